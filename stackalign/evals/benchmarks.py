"""The benchmarks by name."""

import functools

from stackalign.evals import base, choice, ifeval, mathematics

BENCHMARKS: dict[str, base.Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        base.Benchmark(
            "ifeval", "IFEval", ifeval.items, base.one_by_one(ifeval.score), ifeval.metrics, 1024, (250, 250)
        ),
        base.Benchmark(
            "math", "MATH", mathematics.items, base.one_by_one(mathematics.score), sizes=(956, 956), max_new_tokens=1024
        ),
        base.Benchmark("aime", "AIME", mathematics.items, base.one_by_one(mathematics.score), max_new_tokens=4096),
        base.Benchmark("gsm8k", "GSM8K", mathematics.items, base.one_by_one(mathematics.score)),
        base.Benchmark(
            "gpqa", "GPQA-Diamond", choice.gpqa, base.one_by_one(choice.score), choice.metrics, sizes=(99, 99)
        ),
        base.Benchmark(
            "truthfulqa", "TruthfulQA MC1", choice.truthfulqa, base.one_by_one(choice.score), choice.metrics,
            sizes=(200, 617),
        ),
        base.Benchmark(
            "culturalbench", "CulturalBench Easy", choice.culturalbench, base.one_by_one(choice.score), choice.metrics,
            sizes=(613, 613),
        ),
        base.Benchmark(
            "culturalbench_hard", "CulturalBench Hard", choice.culturalbench_hard,
            base.one_by_one(choice.score_statement), choice.statement_metrics, 64,
        ),
        base.Benchmark(
            "lab_bench", "LAB-Bench", choice.ideal, base.one_by_one(choice.score), choice.metrics, sizes=(578, 578)
        ),
        base.Benchmark(
            "bixbench", "BixBench", functools.partial(choice.ideal, refusal=choice.REFUSAL),
            base.one_by_one(choice.score), choice.metrics, sizes=(102, 103),
            note="questions as multiple choice with a refusal, without the data capsules",
        ),
    )
}  # fmt: skip

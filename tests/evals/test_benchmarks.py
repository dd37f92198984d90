import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from stackalign.data import readers
from stackalign.evals import Item, base
from stackalign.evals.benchmarks import BENCHMARKS

FILES = {
    "ifeval": "ifeval.jsonl", "gsm8k": "gsm8k_test.jsonl", "truthfulqa": "truthfulqa.jsonl",
    "culturalbench": "culturalbench_mcq.jsonl", "culturalbench_hard": "culturalbench_mcq.jsonl",
    "mbpp": "mbpp.jsonl", "humaneval": "humaneval.jsonl",
}  # fmt: skip
SIZES = {
    "ifeval": (250, 250), "gsm8k": (0, 1319), "truthfulqa": (200, 617), "culturalbench": (613, 613),
    "mbpp": (487, 487), "humaneval": (50, 114),
}  # fmt: skip
HOSTILE = ["", " \n", "\x00\x01\x02" * 50, "\ud800", "A" * 1_000_000, "(" * 20_000, "\\boxed{" * 5_000, "0" * 100_000]


def items(n: int, **facts) -> list[Item]:
    return [Item(f"i{i}", ({"role": "user", "content": "?"},), "A", facts) for i in range(n)]


@pytest.mark.parametrize("name", sorted(set(FILES) & set(BENCHMARKS)))
def test_splits_have_the_papers_sizes_and_stay(shared, name):
    if shared is None:
        pytest.skip("no folder of reference files")
    benchmark = BENCHMARKS[name]
    everything = benchmark.items(readers.read(shared / "data" / FILES[name]), 0)
    split = base.split(everything, benchmark.sizes, 0)
    if name in SIZES:
        assert (len(split.dev), len(split.test)) == SIZES[name]
    assert not {item.id for item in split.dev} & {item.id for item in split.test}
    assert split == base.split(everything, benchmark.sizes, 0)
    json.dumps([item.facts for item in everything])


@pytest.mark.parametrize("name", sorted(set(FILES) & set(BENCHMARKS)))
def test_hostile_responses_never_score(shared, name):
    if shared is None:
        pytest.skip("no folder of reference files")
    benchmark = BENCHMARKS[name]
    some = benchmark.items(readers.read(shared / "data" / FILES[name]), 0)[:1] * len(HOSTILE)
    scores = benchmark.scores(some, HOSTILE)
    # IFEval's instructions may be followed by anything that is not blank.
    empty = scores[:2] if name == "ifeval" else scores
    assert all(score.value == 0 for score in empty) and all(0 <= score.value <= 1 for score in scores)
    assert not any(score.parsed for score in scores[:2])
    metrics = benchmark.metrics(some, scores)
    assert all(np.isfinite(metric.values).all() for metric in metrics.values())


@hypothesis.given(st.integers(2, 60), st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
@hypothesis.settings(deadline=None, max_examples=60)
def test_drawn_splits_are_disjoint_and_in_order(count, dev, test, seed):
    everything = items(count)
    split = base.split(everything, (dev, test), seed)
    ids = [item.id for item in everything]
    for part in split[:2]:
        assert part and [ids.index(item.id) for item in part] == sorted(ids.index(item.id) for item in part)
    assert not {item.id for item in split.dev} & {item.id for item in split.test}
    if dev + test <= count:
        assert (len(split.dev), len(split.test)) == (dev, test)
    else:
        assert len(split.dev) + len(split.test) == count
        assert abs(len(split.dev) / count - dev / (dev + test)) <= 1 / count + 1e-9


def test_splits_of_the_data_come_first():
    mixed = items(3, paper_split="dev") + [item._replace(id=f"t{item.id}") for item in items(2, paper_split="test")]
    assert [len(part) for part in base.split(mixed, (1, 1), 0)[:2]] == [3, 2]
    assert base.split(mixed + items(1), None, 0)[:2] == ((), tuple(mixed + items(1)))
    with pytest.raises(ValueError, match="at least 2"):
        base.split(items(1), (1, 1), 0)


def test_samples_nest_and_keep_the_order():
    everything = items(30)
    small, large = base.sample(everything, 5, 3), base.sample(everything, 9, 3)
    assert {item.id for item in small} <= {item.id for item in large}
    assert base.sample(everything, 0, 3) == base.sample(everything, 99, 3) == tuple(everything)
    assert [item.id for item in large] == sorted((item.id for item in large), key=lambda name: int(name[1:]))
    with pytest.raises(ValueError, match="limit"):
        base.sample(everything, -1, 0)


def test_build_names_rows():
    def make(fields, number):
        return Item(base.row_id(fields, number, "id"), (), base.text(fields, "a", "b"))

    assert [item.gold for item in base.build([("r1", {"b": "x"}), ("r2", {"a": "y"})], make)] == ["x", "y"]
    with pytest.raises(ValueError, match="r2: id '7' occurs twice"):
        base.build([("r1", {"id": 7, "a": "x"}), ("r2", {"id": "7", "a": "x"})], make)
    with pytest.raises(ValueError, match="r1: field 'a' or 'b' must be"):
        base.build([("r1", {"a": 3})], make)
    with pytest.raises(ValueError, match="no rows"):
        base.build([], make)

"""Benchmarks: our speed beside a reference's, measured in the same run.

    python -m experiments.bench --suite=lm                       # about 5 minutes on two CPU cores
    python -m experiments.bench --suite=lm --only='decode_(1|4)$' --repeats=5
    python -m experiments.bench --suite=tabular                  # about 4 minutes
    python -m experiments.bench --suite=population
    python -m experiments.bench --suite=gpu                      # at most 8 minutes on one GPU; --limit_s

Prints one JSON object a line. The first, "machine", says where it ran; every other is a row:

    {"name": "decode_16", "ours": 250.1, "reference": 110.2, "ratio": 2.27, "unit": "tok/s",
     "reference_is": "transformers generate, torch CPU float32", ...}

Both sides take turns, `ours` and `reference` are medians, and a `ratio` above 1 is better for us; `best` has the
fastest run of each. A row without a reference has null there, and so have all rows where the reference's packages (the
test extra) are not installed. Progress goes to standard error. Other work on the machine slows the sides unequally:
PyTorch's threads wait for each other, so a busy core costs the reference more; `load_average` of the first line tells
how busy the machine was at the start.

Suite lm: `decode_ROWS` is sampling at temperature 0.7 and top-p 0.9 (`_greedy`: the most probable token) with
SmolLM2-135M, prompts of 64 tokens and 64 new ones, against `transformers`; `train_dpo_lora` a DPO step on a LoRA of
rank 16 against PEFT; `judge_over_combat` the seconds that four agents take to judge a round of duels, as a share of
those that generating it took, `bound` what that may cost; `four_agents` the seconds of decoding 16 rows of four agents,
with adapters of rank 16, over those of 16 rows of one; `logprob_memory` the scratch memory of the log-probabilities of
8192 tokens and their gradient, as XLA compiles it, against that of the whole logits (a ratio above 1 is less memory).

Suite tabular: steps a second of SMIDA on one game with X contexts and Y actions of each player, against transcriptions
of the algorithm in NumPy (`tabular_numpy_...`) and jitted JAX (`tabular_jit_...`), up to a utility of 4 GiB;
`tabular_growth` is how the time grows with X and Y (`utility`: how its size does), `tabular_memory_...` the peak memory
(`bound`: what it may be), `tabular_games_...` small games a second.

Suite population: simulated iterations of a pool a second, against NumPy.

Suite gpu: one GPU against its own `copy` bandwidth and `matmul` rate, with random bfloat16 weights of the shapes of
Qwen2.5 1.5B and 7B. `logits` compares bfloat16 and float32 with float32 on the CPU; `of_copy` of `decode_ROWS_...` is
the share of that bandwidth which the bytes that a step must read come to; `judge_...` scores two answers a prompt;
`dpo_...` and `grpo_...` are steps of adapters of rank 64, with `mfu` as shares of that matmul rate by two counts:
`6N_tokens`, six FLOPs a parameter and token, and `needed`, what adapters need (about 4N, attention and vocabulary).
Compilation is reported apart (`trace_s`, `compile_s`; programs are kept for the next run), `scratch_gb` is what XLA
planned, `peak_gb` what the device saw where a row reached a new peak. Rows that do not fit into --limit_s are named in
the last one. Without a GPU the suite runs at tiny shapes, `"tiny": true`.
"""

import json
import os
import platform
import re
import sys
import time

import jax
from absl import app, flags

from experiments import compilation
from experiments.benches import gpu, lm, population, tabular

SUITES = {"gpu": gpu, "lm": lm, "population": population, "tabular": tabular}

FLAGS = flags.FLAGS

flags.DEFINE_enum("suite", "lm", list(SUITES), "Which benchmarks to run.")
flags.DEFINE_integer("repeats", 3, "Counted runs of each side, after one that is not counted.", lower_bound=1)
flags.DEFINE_string("only", "", "Regular expression: run only rows whose name it matches somewhere.")
flags.DEFINE_float("limit_s", 480.0, "Suite gpu: seconds that it may take; rows that no longer fit are skipped.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    suite, start = SUITES[FLAGS.suite], time.perf_counter()
    try:
        pattern = re.compile(FLAGS.only)
    except re.error as error:
        raise app.UsageError(f"--only={FLAGS.only!r} is not a regular expression: {error}") from error
    if not any(map(pattern.search, suite.NAMES)):
        raise app.UsageError(f"--only={FLAGS.only!r} matches none of {', '.join(suite.NAMES)}")

    def note(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def show(row: dict) -> None:
        print(json.dumps(row), flush=True)

    show(
        {"name": "machine", "suite": FLAGS.suite, "cores": len(os.sched_getaffinity(0)),
         "load_average": round(os.getloadavg()[0], 2), "machine": platform.machine(),
         "backend": jax.default_backend(), "devices": jax.device_count(), "python": platform.python_version(),
         "jax": jax.__version__, **suite.versions(), "repeats": FLAGS.repeats}
    )  # fmt: skip
    options = {}
    if suite is gpu:
        compilation.use_cache()
        options["deadline"] = start + FLAGS.limit_s
    for row in suite.rows(FLAGS.repeats, lambda name: bool(pattern.search(name)), note, **options):
        show(row)
    note("done")


if __name__ == "__main__":
    app.run(main)

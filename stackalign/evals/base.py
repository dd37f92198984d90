"""What every benchmark is made of: items, and pure functions that score a response to one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Rows = Iterable[tuple[str, Mapping[str, Any]]]
"""Rows of a data set: where each stands, for messages about it, and its fields (`data.readers.read`)."""


class Item(NamedTuple):
    """One question of a benchmark.

    Attributes:
      id: unique within the benchmark.
      messages: the chat to answer, `{"role", "content"}` each.
      gold: what a right answer is, as the benchmark's scorer reads it.
      facts: whatever else its scorer or its report needs (choices, category, level), JSON-ready.
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    gold: Any = None
    facts: Mapping[str, Any] = {}


class Score(NamedTuple):
    """The verdict on one response.

    Attributes:
      value: in [0, 1], or a raw reward where the benchmark says so.
      parsed: whether an answer was found in the response; False never scores.
      detail: JSON-ready: the answer that was found, verdicts of parts, why it failed.
    """

    value: float
    parsed: bool
    detail: Mapping[str, Any] = {}


class Metric(NamedTuple):
    """What a benchmark reports: the mean of `values` [N], of which those with one label in `clusters` [N] depend.

    `kind` is "accuracy" (values are 0 or 1), "score" (in [0, 1]) or "reward" (any number). Without clusters every
    value stands for itself.
    """

    values: np.ndarray
    kind: str = "accuracy"
    clusters: tuple[str, ...] | None = None


def mean_value(items: Sequence[Item], scores: Sequence[Score]) -> dict[str, Metric]:
    """The metric of benchmarks whose items are right or wrong."""
    del items
    return {"accuracy": Metric(np.array([score.value for score in scores]))}


def one_by_one(score: Callable[[Item, str], Score]) -> Callable[[Sequence[Item], Sequence[str]], list[Score]]:
    """Scores of many responses from a function that scores one."""
    return lambda items, responses: [score(item, text) for item, text in zip(items, responses, strict=True)]


class Benchmark(NamedTuple):
    """A benchmark as functions.

    Attributes:
      name, title: for flags and for tables.
      items: `(rows, seed) -> items`; the seed decides the order of choices.
      scores: `(items, responses) -> scores`, in their order.
      metrics: `(items, scores) -> {name: Metric}`; the first is the headline.
      max_new_tokens: what an answer usually needs.
      sizes: how many items the paper takes for development and for test; None where the data are a test set.
      note: said wherever its results are shown, for instance that it is a proxy.
    """

    name: str
    title: str
    items: Callable[[Rows, int], tuple[Item, ...]]
    scores: Callable[[Sequence[Item], Sequence[str]], list[Score]]
    metrics: Callable[[Sequence[Item], Sequence[Score]], Mapping[str, Metric]] = mean_value
    max_new_tokens: int = 512
    sizes: tuple[int, int] | None = None
    note: str = ""


class Split(NamedTuple):
    """Development and test items of a benchmark; `source` says where the split is from."""

    dev: tuple[Item, ...]
    test: tuple[Item, ...]
    source: str


def split(items: Sequence[Item], sizes: tuple[int, int] | None, seed: int) -> Split:
    """The split that the items bring (`facts["paper_split"]`, "dev" or "test" in all), else one drawn from `seed`.

    Args:
      items: of one benchmark, at least two.
      sizes: of the split that is drawn; both parts are shrunk alike where there are fewer items. None: all are test.
      seed: non-negative.

    Returns:
      Both parts in the items' order, disjoint.
    """
    if items and all(item.facts.get("paper_split") in ("dev", "test") for item in items):
        parts = [tuple(item for item in items if item.facts["paper_split"] == name) for name in ("dev", "test")]
        return Split(*parts, "from the data")
    if sizes is None:
        return Split((), tuple(items), "the whole data are the test set")
    if len(items) < 2:
        raise ValueError(f"a split needs at least 2 items, got {len(items)}")
    dev, test = sizes
    if dev + test > len(items):
        dev = min(max(round(len(items) * dev / (dev + test)), 1), len(items) - 1)
        test = len(items) - dev
    order = np.random.default_rng([seed, len(items)]).permutation(len(items))
    parts = [tuple(items[i] for i in sorted(order[a:b])) for a, b in ((0, dev), (dev, dev + test))]
    return Split(*parts, f"drawn with seed {seed}")


def sample(items: Sequence[Item], limit: int, seed: int) -> tuple[Item, ...]:
    """`limit` items drawn without replacement, in their order; all of them if there are no more. 0 is no limit."""
    if limit < 0:
        raise ValueError(f"limit must not be negative, got {limit}")
    if not 0 < limit < len(items):
        return tuple(items)
    chosen = np.random.default_rng([seed, 1]).permutation(len(items))[:limit]
    return tuple(items[i] for i in sorted(chosen))


def build(rows: Rows, make: Callable[[Mapping[str, Any], int], Item | Iterable[Item]]) -> tuple[Item, ...]:
    """Items of rows: `make(fields, number)` gives one or several; its errors get the place of the row.

    Raises:
      ValueError: naming the row: what `make` raises, or an id that occurs twice; or no rows.
    """
    items: dict[str, Item] = {}
    for number, (where, fields) in enumerate(rows):
        try:
            made = make(fields, number)
            for item in (made,) if isinstance(made, Item) else made:
                if item.id in items:
                    raise ValueError(f"id {item.id!r} occurs twice; give every row its own")
                items[item.id] = item
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not items:
        raise ValueError("no rows, so no items")
    return tuple(items.values())


def text(fields: Mapping[str, Any], *names: str) -> str:
    """The first of the fields `names` that is there, a text that is not blank; ValueError names them otherwise."""
    value = next((fields[name] for name in names if fields.get(name) is not None), None)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {' or '.join(map(repr, names))} must be a non-empty string, got {value!r}")
    return value


def row_id(fields: Mapping[str, Any], number: int, *names: str) -> str:
    """The first of the fields `names` that is there, as text; else the row's number."""
    return str(next((fields[name] for name in names if fields.get(name) not in (None, "")), number))

"""What every benchmark is made of: items, and pure functions that score a response to one."""

from collections.abc import Mapping
from typing import Any, NamedTuple


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

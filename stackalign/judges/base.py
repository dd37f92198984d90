"""What a judge is to an algorithm."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from stackalign.lm import pool


class Item(NamedTuple):
    """One judgement: which judge, of which instruction (any object with a `prompt`), of which answer."""

    judge: int
    instruction: Any
    answer: pool.Answer


Measure = Callable[[jax.Array, pool.Pool, pool.Stacks | None, Sequence[Item], pool.Progress], np.ndarray]
"""(key, pool, adapters, items, progress) → one float an item, NaN where the judge failed."""


class Judge(NamedTuple):
    """A way to judge.

    Attributes:
      names: the external judges, or None when the pool's own agents judge (peers; then item.judge is an agent).
      measure: see `Measure`.
      scale: turns the measures of one judge, all those of an iteration so far, into scores in [1, 10].
    """

    names: tuple[str, ...] | None
    measure: Measure
    scale: Callable[[np.ndarray], np.ndarray]


def identity(scores: np.ndarray) -> np.ndarray:
    """The scale of a judge that measures scores."""
    return scores

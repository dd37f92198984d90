"""The interface of an instruction leader, and the draw from its distribution."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp


class Leader(NamedTuple):
    """A leader over K instructions as three pure functions.

    init: `(num_instructions) -> state`.
    probabilities: `(state) -> [K]`, the distribution that the leader commits to for a whole iteration.
    update: `(state, drawn [D] int, rewards [D], valid [D] bool) -> state`, after all D duels of the iteration.
    """

    init: Callable[[int], Any]
    probabilities: Callable[[Any], jax.Array]
    update: Callable[[Any, jax.Array, jax.Array, jax.Array], Any]


def draw(key: jax.Array, probabilities: jax.Array, num_duels: int) -> jax.Array:
    """Draws the instructions of one iteration, independently and with replacement (section 2, "Setup").

    Args:
      key: PRNG key, consumed.
      probabilities: `[K]`, a distribution.
      num_duels: D >= 0, static.

    Returns:
      `[D]` int32 instruction numbers in [0, K).
    """
    chex.assert_rank(probabilities, 1)
    return jax.random.categorical(key, jnp.log(probabilities), shape=(num_duels,)).astype(jnp.int32)

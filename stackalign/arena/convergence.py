"""Early stopping on the top model's reputation, with the rule of the public Sparta code."""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ConvergenceConfig:
    """min_improvement: rating points over the window. window: iterations. patience: iterations without improvement."""

    min_improvement: float = 0.1
    window: int = 5
    patience: int = 3


DEFAULT = ConvergenceConfig()


class ConvergenceState(NamedTuple):
    """history: `[W, m]` ratings, oldest first. count: [] int32 iterations seen. stalled: [] int32 in a row."""

    history: jax.Array
    count: jax.Array
    stalled: jax.Array


def init(num_models: int, config: ConvergenceConfig = DEFAULT) -> ConvergenceState:
    """No iteration seen."""
    zero = jnp.zeros((), jnp.int32)
    return ConvergenceState(jnp.zeros((config.window, num_models)), zero, zero)


def update(
    state: ConvergenceState,
    ratings: jax.Array,
    config: ConvergenceConfig = DEFAULT,
) -> tuple[jax.Array, ConvergenceState]:
    """Takes the ratings `[m]` at an iteration's end; returns whether to stop ([] bool), and the new state.

    Once a window is full, an iteration is stalled when the currently best model gained less than `min_improvement`
    since the window's first entry. `patience` stalled iterations in a row stop the run.
    """
    chex.assert_rank(ratings, 1)
    history = jnp.concatenate([state.history[1:], ratings[None].astype(state.history.dtype)])
    count = state.count + 1
    best = jnp.argmax(ratings)
    gained = history[-1, best] - history[0, best] >= config.min_improvement
    full = count >= config.window
    stalled = jnp.where(full, jnp.where(gained, 0, state.stalled + 1), state.stalled)
    return full & (stalled >= config.patience), ConvergenceState(history, count, stalled)

"""EXP3 over instructions in the log domain (equations 1 and 5 of Stackelberg Alignment)."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from stackalign.leader import base


class Exp3State(NamedTuple):
    """log_weights: `[K]`, normalised: `logsumexp(log_weights) == 0`. Linear weights overflow in long runs."""

    log_weights: jax.Array


def init(num_instructions: int) -> Exp3State:
    """Equal weights over `num_instructions` >= 1 instructions; ValueError below that."""
    if num_instructions < 1:
        raise ValueError(f"num_instructions must be at least 1, got {num_instructions}")
    return Exp3State(jnp.full((num_instructions,), -jnp.log(float(num_instructions))))


def probabilities(state: Exp3State, *, gamma: float = 0.2) -> jax.Array:
    """Equation 1, `p_k = (1 - gamma) w_k / sum(w) + gamma / K`.

    Args:
      state: log-weights `[K]`.
      gamma: exploration rate in [0, 1].

    Returns:
      `[K]`, sums to 1, every entry at least gamma / K.
    """
    chex.assert_rank(state.log_weights, 1)
    return (1.0 - gamma) * jax.nn.softmax(state.log_weights) + gamma / state.log_weights.shape[0]


def update(
    state: Exp3State,
    drawn: jax.Array,
    rewards: jax.Array,
    valid: jax.Array,
    *,
    gamma: float = 0.2,
    eta: float = 0.2,
) -> Exp3State:
    """Equation 5, `log w_k += (eta / K) r_k / p_k`, summed over the duels of one iteration, then renormalised.

    The paper prints the step 1/K, which is `eta=1`; the default is Auer et al.'s EXP3, `eta = gamma`. The paper's
    algorithm updates after each duel; here p is the distribution of the iteration's start for every duel, because
    the leader commits to it for the whole iteration. An instruction drawn twice gets both contributions.

    Args:
      state: log-weights `[K]`.
      drawn: `[D]` int instruction numbers in [0, K).
      rewards: `[D]` in [0, 1]; a reward that is not finite contributes nothing.
      valid: `[D]` bool; False contributes nothing (a duel without scores).
      gamma: exploration rate of the distribution that the instructions were drawn from.
      eta: step size.
    """
    chex.assert_rank([state.log_weights, drawn, rewards, valid], 1)
    chex.assert_equal_shape([drawn, rewards, valid])
    num_instructions = state.log_weights.shape[0]
    p = probabilities(state, gamma=gamma)[drawn]
    used = valid & jnp.isfinite(rewards) & (p > 0.0)
    steps = (eta / num_instructions) * jnp.where(used, rewards, 0.0) / jnp.where(used, p, 1.0)
    log_weights = state.log_weights.at[drawn].add(steps.astype(state.log_weights.dtype))
    return Exp3State(log_weights - jax.nn.logsumexp(log_weights))


def leader(*, gamma: float = 0.2, eta: float = 0.2) -> base.Leader:
    """The EXP3 leader with its rates bound; the paper gives gamma 0.2 and prints eta 1 (see `update`)."""
    return base.Leader(
        init,
        functools.partial(probabilities, gamma=gamma),
        functools.partial(update, gamma=gamma, eta=eta),
    )

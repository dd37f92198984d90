"""The leader that never learns: uniform over the instructions (Sparta Alignment)."""

import jax
import jax.numpy as jnp

from stackalign.leader import base, exp3


def probabilities(state: exp3.Exp3State) -> jax.Array:
    """`[K]`, 1/K each."""
    return jnp.full_like(state.log_weights, 1.0 / state.log_weights.shape[0])


def update(state: exp3.Exp3State, drawn: jax.Array, rewards: jax.Array, valid: jax.Array) -> exp3.Exp3State:
    """The state as it was; the record of the duels is not used."""
    del drawn, rewards, valid
    return state


def leader() -> base.Leader:
    """The uniform leader. Its state is EXP3's (equal log-weights), so that records have one form."""
    return base.Leader(exp3.init, probabilities, update)

"""Exponential tilting of the Follower's reference, `omega_a` proportional to `omega_ref exp(a u)`.

Every iterate of SMIDA's Follower is such a tilt (its weight a grows from 0 to 1 / tau_F) and so is its best response.
What the Leader pays against omega_a follows from one pass over the utility, so no Follower has to be stored.
"""

import math

import jax
import jax.numpy as jnp

from stackalign.games.game import Game

# Numbers of one block of the pass on CPUs: three arrays of this size stay in the caches of one core.
_BLOCK = 2**18


@jax.jit
def tilted(game: Game, weight: jax.Array) -> jax.Array:
    """Log-probabilities `[X, L, F]` proportional to `omega_ref exp(weight u)`.

    Args:
      game: the game.
      weight: `[]` or `[X, 1, 1]`, >= 0; at inf the reference restricted to the largest utilities.
    """
    below = game.utility - jnp.max(game.utility, axis=-1, keepdims=True)
    return jax.nn.log_softmax(game.log_omega_ref + _times(weight, below), axis=-1)


@jax.jit
def costs(game: Game, weights: jax.Array, decays: jax.Array) -> jax.Array:
    """The Leader's costs (equation 5) against tilts of the Follower.

    With `Z = sum omega_ref exp(a u)` they are `tau_F log Z + (1 - tau_F a) E_omega_a[u]`, which is written from the
    largest utility of each row downwards, so that nothing overflows or cancels.

    Args:
      game: the game.
      weights: `[N]`, the tilts a in [0, 1 / tau_F]; inf at tau_F = 0.
      decays: `[N]`, `1 - tau_F a`, given because it would cancel near 0.

    Returns:
      `[N, X, L]`. Reads the utility once; on CPUs it goes through it in blocks of rows, so that all of N share the read
      and temporaries stay small.
    """
    num_contexts, num_leader, num_follower = game.utility.shape
    num_rows = num_contexts * num_leader
    top = jnp.max(game.utility, axis=-1)
    if jax.default_backend() != "cpu" or num_rows * num_follower <= _BLOCK:
        return jax.lax.map(lambda tilt: _costs(game.utility, top, game.log_omega_ref, game.tau_follower, *tilt),
                           (weights, decays))  # fmt: skip
    utility, top = game.utility.reshape(num_rows, num_follower), top.reshape(num_rows)
    reference = game.log_omega_ref
    per_row = reference.shape[:2] != (1, 1)
    reference = jnp.broadcast_to(reference, (num_contexts, num_leader, reference.shape[-1])) if per_row else reference
    reference = reference.reshape(-1, reference.shape[-1])
    size = min(num_rows, max(1, _BLOCK // num_follower))

    def block(number, out):
        # The last block overlaps the one before instead of being shorter: shapes are static.
        start = jnp.minimum(number * size, num_rows - size)

        def cut(rows):
            return jax.lax.dynamic_slice_in_dim(rows, start, size)

        rows, tops, references = cut(utility), cut(top), cut(reference) if per_row else reference
        values = jax.lax.map(lambda tilt: _costs(rows, tops, references, game.tau_follower, *tilt), (weights, decays))
        return jax.lax.dynamic_update_slice_in_dim(out, values, start, axis=1)

    out = jnp.zeros((weights.shape[0], num_rows), game.utility.dtype)
    return jax.lax.fori_loop(0, math.ceil(num_rows / size), block, out).reshape(-1, num_contexts, num_leader)


def _costs(utility, top, log_reference, tau, weight, decay):
    """One tilt: utilities `[..., F]`, their maxima `top [...]`, and a reference that broadcasts against them."""
    below = utility - top[..., None]
    exponents = _times(weight, below)
    if log_reference.shape[-1] == 1 < utility.shape[-1]:  # uniform: the largest exponent is that of `top`, 0
        shift = log_reference[..., 0]
    else:
        exponents = exponents + log_reference
        shift = jnp.max(exponents, axis=-1)
        exponents = exponents - shift[..., None]
    mass = jnp.exp(exponents)
    # Without the barrier XLA's CPU backend fuses exp into the sums and evaluates it one number at a time.
    mass, moment = _materialised(mass, mass * below)
    total = jnp.sum(mass, axis=-1)
    return top + tau * (jnp.log(total) + shift) + decay * jnp.sum(moment, axis=-1) / total


def _times(weight, below):
    """`weight * below` for below <= 0, where inf * 0 is 0."""
    lower = below < 0.0
    return jnp.where(lower, weight * jnp.where(lower, below, -1.0), 0.0)


def _materialised(*arrays):
    return jax.lax.optimization_barrier(arrays) if jax.default_backend() == "cpu" else arrays

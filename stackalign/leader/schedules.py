"""Schedules of the target gap over a run (equation 3 of Stackelberg Alignment, and its cosine form)."""

import chex
import jax
import jax.numpy as jnp


def progress(iteration: chex.Numeric, num_iterations: chex.Numeric) -> jax.Array:
    """`tau = t / (T - 1)` of equation 3, with t counted from 0 so that the last iteration has tau = 1.

    The paper prints the same quotient with iterations numbered from 1, under which tau would exceed 1.

    Args:
      iteration: t in [0, T).
      num_iterations: T >= 1; T = 1 gives 0.

    Returns:
      [] in [0, 1].
    """
    iteration, last = jnp.asarray(iteration), jnp.asarray(num_iterations) - 1
    return jnp.where(last > 0, iteration / jnp.maximum(last, 1), 0.0)


def linear(progress: chex.Numeric, start: chex.Numeric, end: chex.Numeric) -> jax.Array:
    """Equation 3, `g* = end + (start - end)(1 - tau)`, for tau = `progress` in [0, 1].

    The paper's leader goes from 0.6 to 0.15, its matching from 1 to 0.
    """
    return end + (start - end) * (1.0 - jnp.asarray(progress))


def cosine(progress: chex.Numeric, start: chex.Numeric, end: chex.Numeric) -> jax.Array:
    """`g* = end + (start - end)(1 + cos(pi tau)) / 2`: Appendix C says cosine for the matching."""
    return end + (start - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.asarray(progress)))

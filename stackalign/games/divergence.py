"""Divergences between distributions that are given by their log-probabilities."""

import chex
import jax
import jax.numpy as jnp


def kl(log_p: jax.Array, log_q: jax.Array, *, axis: int = -1) -> jax.Array:
    """Kullback-Leibler divergence `KL(p || q)` in nats, never negative.

    Summed as `p log(p / q) - p + q`, whose every term is non-negative and whose sum is the same for normalised p and q.
    A rounding error in a normaliser then costs its square instead of itself, so that small divergences keep their
    digits.

    Args:
      log_p: log-probabilities; -inf where p has no mass.
      log_q: log-probabilities that broadcast against `log_p`; finite wherever `log_p` is (otherwise the result is inf).
      axis: the axis of the outcomes.

    Returns:
      The divergences, `axis` removed.
    """
    has_mass = log_p > -jnp.inf
    log_ratio = jnp.where(has_mass, log_p, 0.0) - jnp.where(has_mass, log_q, 0.0)
    q = jnp.exp(log_q)
    small = jnp.abs(log_ratio) < 1.0
    near = jnp.where(small, log_ratio, 0.0)
    terms = jnp.where(
        small,
        q * (near * jnp.exp(near) - jnp.expm1(near)),
        jnp.exp(log_p) * log_ratio - jnp.exp(log_p) + q,
    )
    return jnp.sum(jnp.where(has_mass, jnp.maximum(terms, 0.0), q), axis=axis)


def oscillation(values: jax.Array, axis: int | tuple[int, ...] = -1) -> jax.Array:
    """`osc(v) = max v - min v` over `axis` (appendix C.1)."""
    return jnp.max(values, axis=axis) - jnp.min(values, axis=axis)


def normalise(logits: jax.Array) -> jax.Array:
    """Log-probabilities over the last axis, `logits - logsumexp(logits)`; -inf stays -inf."""
    chex.assert_type(logits, float)
    return jax.nn.log_softmax(logits, axis=-1)

"""The aggregate of several judges' scores for one answer (equation 8)."""

import chex
import jax
import jax.numpy as jnp


def aggregate(scores: jax.Array, mask: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Equation 8: `sum_k R_k s_k / sum_k R_k` over the judges that count and did score.

    A judge that failed (a score that is not finite) leaves the mean, as one that is masked out does. Where the paper
    puts 5.0 for a failed parse, the caller puts 5.0 into `scores`. A weight sum of 0 gives the plain mean of those
    who scored.

    Args:
      scores: `[J]` raw scores; NaN is a failure.
      mask: `[J]` bool, the judges that count.
      weights: `[J]`, not negative.

    Returns:
      The aggregate [] within the scores that count, 0 (no score) where there is none; and [] bool, whether there is
      one.
    """
    chex.assert_rank([scores, mask, weights], 1)
    chex.assert_equal_shape([scores, mask, weights])
    counted = mask & jnp.isfinite(scores)
    weights = jnp.where(counted, weights, 0.0)
    weights = jnp.where(jnp.sum(weights) > 0, weights, counted.astype(weights.dtype))
    total = jnp.sum(weights)
    # Divided once, at the end: whole scores under equal whole weights then tie exactly, whichever judge gave which.
    mean = jnp.sum(weights * jnp.where(counted, scores, 0.0)) / jnp.where(total > 0, total, 1.0)
    return mean, jnp.any(counted)

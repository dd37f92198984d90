"""The leader's reward for one duel (equations 2 and 4 of Stackelberg Alignment). Scores are raw, on [1, 10]."""

import chex
import jax
import jax.numpy as jnp


def difficulty(score: jax.Array, *, threshold: float = 3.0, max_score: float = 10.0) -> jax.Array:
    """Equation 2: `(s_max - s) / (s_max - tau_th)` where `s >= tau_th`, else 0.

    Args:
      score: `[...]` raw scores, at most `max_score`.
      threshold: tau_th; at it the reward is 1, below it 0 (too hard to learn from).
      max_score: s_max; at it the reward is 0 (already mastered).

    Returns:
      `[...]` in [0, 1].
    """
    score = jnp.asarray(score)
    return jnp.where(score >= threshold, (max_score - score) / (max_score - threshold), 0.0)


def preference(
    score_a: jax.Array,
    score_b: jax.Array,
    target_gap: chex.Numeric,
    *,
    bandwidth: float = 0.15,
    score_range: float = 9.0,
) -> jax.Array:
    """Equation 4: `exp(-(|s_a - s_b| / range - g*)^2 / (2 bandwidth^2))`.

    Args:
      score_a: `[...]` raw scores of the first combatant.
      score_b: `[...]` raw scores of the second.
      target_gap: g* of this iteration, a share of the score range (equation 3).
      bandwidth: sigma_r, on the normalised gap.
      score_range: s_max - s_min.

    Returns:
      `[...]` in [0, 1], 1 where the gap is the target.
    """
    gap = jnp.abs(jnp.asarray(score_a) - jnp.asarray(score_b)) / score_range
    return jnp.exp(-jnp.square(gap - target_gap) / (2.0 * bandwidth**2))


def composite(
    score_a: jax.Array,
    score_b: jax.Array,
    target_gap: chex.Numeric,
    *,
    difficulty_weight: float = 0.3,
    preference_weight: float = 0.7,
    threshold: float = 3.0,
    bandwidth: float = 0.15,
    min_score: float = 1.0,
    max_score: float = 10.0,
) -> jax.Array:
    """Section 2.1: the mean over both combatants of `lambda_1 r_diff(s) + lambda_2 r_pref`.

    Args:
      score_a: `[...]` raw scores of the first combatant.
      score_b: `[...]` raw scores of the second.
      target_gap: g* of this iteration.
      difficulty_weight: lambda_1.
      preference_weight: lambda_2; the paper has both sum to 1.
      threshold: tau_th of equation 2.
      bandwidth: sigma_r of equation 4.
      min_score: s_min.
      max_score: s_max.

    Returns:
      `[...]` in [0, 1] for scores in [min_score, max_score]; NaN where a score is NaN (the leader skips it).
    """
    hard = 0.5 * sum(difficulty(s, threshold=threshold, max_score=max_score) for s in (score_a, score_b))
    apart = preference(score_a, score_b, target_gap, bandwidth=bandwidth, score_range=max_score - min_score)
    return difficulty_weight * hard + preference_weight * apart

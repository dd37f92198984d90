"""Candidates, adversarial triplets and how well a score ranks errors (Sections 3.2 and 5 of SMIDA).

N is the number of preference triplets `(x, y, y')`; a score is an uncertainty such as the ensemble's variance, higher
where an error is more likely. Everything but the checks of alpha and epsilon is jittable and vmappable.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class SearchMetrics(NamedTuple):
    """What a search found, scalars in [0, 1] except the enrichment; NaN where the denominator is 0.

    candidate_rate: candidates of all triplets. joint_yield: triplets that are candidate and adversarial, of all.
    precision: adversarial ones of the candidates. base_rate: adversarial ones of all. enrichment: precision /
    base_rate. captured: candidates of the adversarial triplets.
    """

    candidate_rate: jax.Array
    joint_yield: jax.Array
    precision: jax.Array
    base_rate: jax.Array
    enrichment: jax.Array
    captured: jax.Array


def candidate_threshold(reference_scores: jax.Array, *, alpha: float) -> jax.Array:
    """`F^{-1}(1 - alpha)` of Definition 3.2 by the inverse CDF: the least score s with `F(s) >= 1 - alpha`.

    It is one of the scores, never interpolated: at least a share alpha of the reference reaches it, more where there
    are ties. `alpha N` counts as an integer where it is one up to rounding.

    Args:
      reference_scores: `[N]` under the reference policies, finite; one threshold serves every policy compared.
      alpha: in (0, 1), static.

    Returns:
      Scalar.

    Raises:
      ValueError: alpha outside (0, 1), or no scores.
    """
    chex.assert_rank(reference_scores, 1)
    num_scores = reference_scores.shape[0]
    if num_scores == 0:
        raise ValueError("reference_scores is empty: a threshold needs at least one score")
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha must be in (0, 1), got {alpha}")
    # ceil((1 - alpha) N) = N - floor(alpha N); the slack covers an alpha that is itself the result of arithmetic.
    rank = num_scores - math.floor(alpha * num_scores * (1.0 + 1e-12))
    return jnp.sort(reference_scores)[max(rank, 1) - 1]


def is_candidate(scores: jax.Array, threshold: chex.Numeric) -> jax.Array:
    """Definition 3.2, `score >= threshold` elementwise; NaN is no candidate."""
    return jnp.asarray(scores) >= threshold


def is_adversarial(oracle: chex.Numeric, ensemble_mean: chex.Numeric, *, epsilon: chex.Numeric = 0.0) -> jax.Array:
    """Definition 3.1: the ensemble mean strictly reverses an oracle that is more than epsilon from indifference.

    Both inequalities are strict with a slack of 4 machine epsilons of the coarser input dtype, because probabilities
    are rounded: an oracle of 0.6 is not 0.1-adversarial although `0.6 - 0.5 > 0.1` in float32, and a mean that is
    1/2 up to rounding reverses nothing.

    Args:
      oracle: `[...]` P*(y > y' | x) in [0, 1]; NaN (no valid verdict) is not adversarial.
      ensemble_mean: `[...]` mean of the members' P(y > y' | x) in [0, 1].
      epsilon: margin in [0, 1/2); ValueError outside where it is a Python number.

    Returns:
      `[...]` bool.
    """
    if isinstance(epsilon, int | float) and not 0.0 <= epsilon < 0.5:
        raise ValueError(f"epsilon must be in [0, 1/2), got {epsilon}")
    oracle, ensemble_mean = _floating(oracle), _floating(ensemble_mean)
    slack = 4.0 * max(float(jnp.finfo(p.dtype).eps) for p in (oracle, ensemble_mean))
    # Signs, not the product, which underflows.
    oracle_margin, ensemble_margin = oracle - 0.5, ensemble_mean - 0.5
    reversed_ = (oracle_margin > 0.0) != (ensemble_margin > 0.0)
    return reversed_ & (jnp.abs(oracle_margin) > epsilon + slack) & (jnp.abs(ensemble_margin) > slack)


def auroc(errors: jax.Array, scores: jax.Array) -> jax.Array:
    """Probability that an error scores above a non-error, a tie counting half: the area under the ROC curve.

    Args:
      errors: `[N]` bool.
      scores: `[N]`, higher where an error is more likely.

    Returns:
      Scalar in [0, 1]; NaN without an error, without a non-error or with a NaN score.
    """
    chex.assert_rank([errors, scores], 1)
    chex.assert_equal_shape([errors, scores])
    errors = jnp.asarray(errors, bool)
    ranks = jax.scipy.stats.rankdata(scores, method="average")
    num_errors, num_others = (jnp.sum(side).astype(ranks.dtype) for side in (errors, ~errors))
    # Mann-Whitney U over means rather than sums: float32 holds the ranks, not their total's square.
    mean_rank = jnp.sum(jnp.where(errors, ranks, 0.0)) / jnp.maximum(num_errors, 1.0)
    area = (mean_rank - 0.5 * (num_errors + 1.0)) / jnp.maximum(num_others, 1.0)
    return jnp.where((num_errors > 0) & (num_others > 0), area, jnp.nan)


def average_precision(errors: jax.Array, scores: jax.Array) -> jax.Array:
    """`sum_k (recall_k - recall_{k-1}) precision_k` over the distinct scores from high to low.

    Tied triplets enter together, so that the order of the rows does not matter.

    Args:
      errors: `[N]` bool.
      scores: `[N]`, higher where an error is more likely.

    Returns:
      Scalar in [0, 1]; NaN without an error or with a NaN score.
    """
    chex.assert_rank([errors, scores], 1)
    chex.assert_equal_shape([errors, scores])
    errors, scores = jnp.asarray(errors, bool), _floating(scores)
    order = jnp.argsort(scores)
    ordered = scores[order]
    # below[k]: errors among the k lowest scores; first: how many scores lie below one's own.
    below = jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(errors[order].astype(int))])
    first = jnp.searchsorted(ordered, ordered, side="left")
    precision = (below[-1] - below[first]) / (scores.shape[0] - first)
    total = jnp.sum(jnp.where(errors[order], precision, 0.0))
    return jnp.where((below[-1] > 0) & ~jnp.any(jnp.isnan(scores)), total / jnp.maximum(below[-1], 1), jnp.nan)


def search_metrics(candidates: jax.Array, adversarial: jax.Array) -> SearchMetrics:
    """Yield of a search from its candidates `[N]` bool and its adversarial triplets `[N]` bool (Section 5.3)."""
    chex.assert_rank([candidates, adversarial], 1)
    chex.assert_equal_shape([candidates, adversarial])
    candidates, adversarial = jnp.asarray(candidates, bool), jnp.asarray(adversarial, bool)
    num_triplets = candidates.shape[0]
    num_candidates, num_adversarial = jnp.sum(candidates), jnp.sum(adversarial)
    num_both = jnp.sum(candidates & adversarial)
    precision, base_rate = _ratio(num_both, num_candidates), _ratio(num_adversarial, num_triplets)
    return SearchMetrics(
        candidate_rate=_ratio(num_candidates, num_triplets),
        joint_yield=_ratio(num_both, num_triplets),
        precision=precision,
        base_rate=base_rate,
        enrichment=_ratio(precision, base_rate),
        captured=_ratio(num_both, num_adversarial),
    )


def _ratio(numerator: chex.Numeric, denominator: chex.Numeric) -> jax.Array:
    positive = denominator > 0
    return jnp.where(positive, numerator / jnp.where(positive, denominator, 1), jnp.nan)


def _floating(x: chex.Numeric) -> jax.Array:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)

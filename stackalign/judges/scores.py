"""Scores from distributions and likelihoods. Scores lie in [1, 10]; NaN is a failure."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

FALLBACK_SCORE = 5.0
"""The score that the paper gives to a reply that cannot be parsed (Stackelberg Alignment, Appendix G)."""


def digits_expectation(logp_one_to_nine: jax.Array, logp_ten_given_one: jax.Array) -> jax.Array:
    """The expected score under a judge's own distribution over the strings "1" … "10" (judge mode `digits`).

    With p(d) the probability of digit d at the JSON value position and q that of "0" after "1":
    p10 = p("1")·q and p1 = p("1") − p10, renormalised over 1 … 10. In log space, so that a judge that gives all ten
    tiny probabilities still has a score.

    Args:
      logp_one_to_nine: `[..., 9]` log p("1") … log p("9").
      logp_ten_given_one: `[...]` log p("0" | "1").

    Returns:
      `[...]` float32 scores in [1, 10]; NaN where all ten log-probabilities are −inf or one is NaN.
    """
    chex.assert_axis_dimension(logp_one_to_nine, -1, 9)
    chex.assert_equal_shape_prefix((logp_one_to_nine, logp_ten_given_one), jnp.ndim(logp_ten_given_one))
    digits = jnp.asarray(logp_one_to_nine, jnp.float32)
    ten = jnp.minimum(jnp.asarray(logp_ten_given_one, jnp.float32), 0.0)  # rounding may put log 1 above 0
    one = digits[..., 0]
    log_p = jnp.concatenate(
        [(one + jnp.log(-jnp.expm1(ten)))[..., None], digits[..., 1:], (one + ten)[..., None]], axis=-1
    )
    largest = jnp.max(log_p, axis=-1, keepdims=True)
    usable = jnp.isfinite(largest)
    weights = jnp.exp(jnp.where(usable, log_p - jnp.where(usable, largest, 0.0), 0.0))
    expectation = jnp.sum(weights * jnp.arange(1.0, 11.0), axis=-1) / jnp.sum(weights, axis=-1)
    return jnp.where(usable[..., 0], expectation, jnp.nan)


def percentile_scores(values: np.ndarray) -> np.ndarray:
    """s = 1 + 9·(percentile rank) among all answers that one judge scored in one iteration (judge mode `likelihood`).

    The rank runs from 0 (lowest) to 1 (highest) as (r − 1)/(N − 1), with r the average rank of ties; a single answer,
    like answers that are all equal, sits in the middle and scores 5.5.

    Args:
      values: `[N]`, e.g. mean token log-probabilities; larger is better. −inf is the lowest value.

    Returns:
      `[N]` float64 scores in [1, 10]. A NaN value stays NaN and does not count in N.
    """
    values = np.asarray(values, np.float64)
    chex.assert_rank(values, 1)
    scores = np.full(values.shape, np.nan)
    kept = ~np.isnan(values)
    count = int(kept.sum())
    if count == 1:
        scores[kept] = 5.5
    elif count > 1:
        scores[kept] = 1.0 + 9.0 * (scipy.stats.rankdata(values[kept], method="average") - 1.0) / (count - 1.0)
    return scores


def raw_likelihood_scores(mean_logp: np.ndarray) -> np.ndarray:
    """s = 1 + 9·exp(mean token log-probability), the `raw` option of judge mode `likelihood`.

    Args:
      mean_logp: `[...]`, at most 0 (rounding up to 1e-3 above is taken as 0); NaN is a failure and stays NaN.

    Returns:
      `[...]` float64 scores in [1, 10].

    Raises:
      ValueError: a mean log-probability above 0.
    """
    mean_logp = np.asarray(mean_logp, np.float64)
    if np.any(mean_logp > 1e-3):
        raise ValueError(f"mean log-probabilities are at most 0, got {np.nanmax(mean_logp)}")
    return 1.0 + 9.0 * np.exp(np.minimum(mean_logp, 0.0))


def on_parse_failure(scores: np.ndarray, mode: Literal["drop", "five"] = "drop") -> np.ndarray:
    """What a failed parse counts as: with `drop` it stays NaN and leaves the mean, with `five` it is the paper's 5.0.

    Args:
      scores: `[...]` with NaN for failures.
      mode: `"drop"` or `"five"`.

    Returns:
      `[...]` a new float64 array.

    Raises:
      ValueError: an unknown mode.
    """
    if mode not in ("drop", "five"):
        raise ValueError(f"unknown on_parse_failure {mode!r}; use 'drop' or 'five'")
    scores = np.array(scores, np.float64)
    return scores if mode == "drop" else np.where(np.isnan(scores), FALLBACK_SCORE, scores)

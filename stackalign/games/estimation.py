"""Why a general preference model needs more annotations than a reward model (Appendix I of SMIDA).

K responses to one prompt, n annotations of every unordered pair, and a ground truth that has rewards. The general
estimator learns each pair from its own annotations; the reward estimator pools the K - 1 pairs of a response, and its
error in the supremum norm is smaller by a factor that grows like sqrt(K).
"""

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np


class Errors(NamedTuple):
    """Errors of both estimators in the supremum norm, `[S]` each, from the same annotations."""

    general: jax.Array
    reward: jax.Array


def preferences(rewards: jax.Array) -> jax.Array:
    """Ground truth `P_ij = 1/2 + r_i - r_j`, the probability that response i is preferred to j.

    Args:
      rewards: `[K]` as `validate_rewards` wants them.

    Returns:
      `[K, K]` in [0, 1], 1/2 on the diagonal.
    """
    chex.assert_rank(rewards, 1)
    return 0.5 + (rewards[:, None] - rewards[None, :])


def validate_rewards(rewards: chex.Array, *, tolerance: float | None = None) -> None:
    """Checks on the host that concrete rewards `[K]` meet the assumptions: `sum(r) = 0` and `|r_i| <= 1/4`.

    Args:
      rewards: `[K]`, floating, K >= 2.
      tolerance: largest `|sum(r)|`; None for K machine epsilons of the array's dtype.

    Raises:
      ValueError: names what is wrong, the first index where one is to blame, and the fix.
    """
    rewards = np.asarray(rewards)
    if rewards.ndim != 1 or rewards.shape[0] < 2 or not jnp.issubdtype(rewards.dtype, jnp.floating):
        raise ValueError(
            f"rewards must be floating with the shape [K], K >= 2, got {rewards.dtype}{list(rewards.shape)}"
        )
    tolerance = rewards.shape[0] * float(jnp.finfo(rewards.dtype).eps) if tolerance is None else tolerance
    rewards = rewards.astype(np.float64)
    wrong = ~(np.abs(rewards) <= 0.25)  # so that NaN is wrong
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ValueError(f"rewards[{index}] is {rewards[index]:.9g}, outside [-1/4, 1/4]; scale the rewards down")
    if abs(rewards.sum()) > tolerance:
        raise ValueError(f"rewards sum to {rewards.sum():.9g}, not 0 within {tolerance:.3g}; subtract their mean")


def annotate(key: jax.Array, preferences: jax.Array, *, num_annotations: chex.Numeric) -> jax.Array:
    """Empirical means of n independent annotations of every unordered pair.

    Args:
      key: PRNG key, consumed.
      preferences: `[K, K]` in [0, 1], antisymmetric; the entries above the diagonal are read.
      num_annotations: n >= 1; ValueError below that where it is a Python int.

    Returns:
      `[K, K]`: `n Y_ij ~ Binomial(n, P_ij)` for i < j, `Y_ji = 1 - Y_ij` and 1/2 on the diagonal.
    """
    chex.assert_rank(preferences, 2)
    _check_count("num_annotations", num_annotations, 1)
    num_responses = preferences.shape[0]
    i, j = np.triu_indices(num_responses, k=1)
    counts = jax.random.binomial(key, num_annotations, preferences[i, j], dtype=preferences.dtype)
    means = counts / num_annotations
    table = jnp.full((num_responses, num_responses), 0.5, preferences.dtype)
    return table.at[i, j].set(means).at[j, i].set(1.0 - means)


def general_estimate(means: jax.Array) -> jax.Array:
    """The general estimator `P_ij = Y_ij`: the means `[K, K]` of `annotate` as they are, unbiased for any truth."""
    chex.assert_rank(means, 2)
    return means


def estimated_rewards(means: jax.Array) -> jax.Array:
    """`r_i = (1 / K) sum_{j != i} (Y_ij - 1/2)`, unbiased where the truth has rewards that sum to 0.

    Args:
      means: `[K, K]` of `annotate`, 1/2 on the diagonal.

    Returns:
      `[K]` in (-1/2, 1/2), sums to 0 up to rounding.
    """
    chex.assert_rank(means, 2)
    return jnp.mean(means - 0.5, axis=1)


def reward_estimate(means: jax.Array) -> jax.Array:
    """The reward estimator `P_ij = clip(1/2 + r_i - r_j, 0, 1)` with the rewards of `estimated_rewards`.

    Args:
      means: `[K, K]` of `annotate`, 1/2 on the diagonal.

    Returns:
      `[K, K]` in [0, 1], 1/2 on the diagonal.
    """
    return jnp.clip(preferences(estimated_rewards(means)), 0.0, 1.0)


def sup_error(estimate: jax.Array, truth: jax.Array) -> jax.Array:
    """`max_ij |estimate_ij - truth_ij|` of two `[K, K]`: a scalar in [0, 1]."""
    chex.assert_rank([estimate, truth], 2)
    chex.assert_equal_shape([estimate, truth])
    return jnp.max(jnp.abs(estimate - truth))


def general_bound(num_responses: int, num_annotations: int, *, delta: float) -> float:
    """Equation 28, `sqrt(log(2 M / delta) / (2 n))` with the `M = K (K - 1) / 2` unordered pairs.

    Args:
      num_responses: K >= 2.
      num_annotations: n >= 1 of each pair.
      delta: in (0, 1).

    Returns:
      What the general estimator's `sup_error` exceeds with probability at most delta.

    Raises:
      ValueError: an argument out of its range.
    """
    _check_bound(num_responses, num_annotations, delta)
    num_pairs = num_responses * (num_responses - 1) // 2
    return math.sqrt(math.log(2 * num_pairs / delta) / (2 * num_annotations))


def reward_bound(num_responses: int, num_annotations: int, *, delta: float) -> float:
    """Equation 29, `sqrt(2 (K - 1) log(2 K / delta) / (n K^2))`, for the reward estimator; as `general_bound`.

    Smaller than equation 28 from K = 3 on, by a factor of about 0.6 sqrt(K); at K = 2, where there is nothing to
    pool, the general bound is the smaller one.
    """
    _check_bound(num_responses, num_annotations, delta)
    log_term = math.log(2 * num_responses / delta)
    return math.sqrt(2 * (num_responses - 1) * log_term / (num_annotations * num_responses**2))


def simulate(key: jax.Array, rewards: jax.Array, *, num_annotations: chex.Numeric, num_seeds: int) -> Errors:
    """Measures both estimators on `num_seeds` independent sets of annotations. Compiled once a shape.

    Args:
      key: PRNG key, consumed.
      rewards: `[K]` as `validate_rewards` wants them; the guarantee of equation 29 needs that.
      num_annotations: n >= 1 of each pair; ValueError below that where it is a Python int.
      num_seeds: S >= 1, static; ValueError below that.
    """
    _check_count("num_annotations", num_annotations, 1)
    _check_count("num_seeds", num_seeds, 1)
    return _simulate(key, rewards, num_annotations, num_seeds)


@functools.partial(jax.jit, static_argnums=3)
def _simulate(key: jax.Array, rewards: jax.Array, num_annotations: chex.Numeric, num_seeds: int) -> Errors:
    truth = preferences(rewards)

    def measure(key):
        means = annotate(key, truth, num_annotations=num_annotations)
        return Errors(sup_error(general_estimate(means), truth), sup_error(reward_estimate(means), truth))

    return jax.vmap(measure)(jax.random.split(key, num_seeds))


def _check_bound(num_responses: int, num_annotations: int, delta: float) -> None:
    _check_count("num_responses", num_responses, 2)
    _check_count("num_annotations", num_annotations, 1)
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}")


def _check_count(name: str, value: chex.Numeric, least: int) -> None:
    # Traced values can't be checked.
    if isinstance(value, int) and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")

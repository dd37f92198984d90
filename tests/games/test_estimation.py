"""Appendix I: both estimators are unbiased, stay below their bounds, and their errors part like sqrt(K)."""

import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.games import estimation

# One number of seeds and of responses wherever possible: every other shape compiles anew.
SEEDS = 4000
settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
by_precision = pytest.mark.parametrize("precision", ["float32", "float64"])


def centred(rewards):
    """Sums to 0 and lies in [-1/4, 1/4]."""
    rewards = np.asarray(rewards, np.float64)
    rewards = rewards - rewards.mean()
    return rewards * 0.25 / max(np.abs(rewards).max(), 0.25)


reward_vectors = hnp.arrays(np.float64, 5, elements=st.floats(-1, 1), fill=st.nothing()).map(centred)


@by_precision
@settings
@hypothesis.given(rewards=reward_vectors)
def test_ground_truth(precision, rewards):
    with jax.enable_x64(precision == "float64"):
        rewards = jnp.asarray(rewards, precision)
        estimation.validate_rewards(rewards)
        p = np.asarray(estimation.preferences(rewards))
    atol = {"float32": 1e-6, "float64": 1e-15}[precision]
    assert p.dtype == precision
    assert 0.0 <= p.min() and p.max() <= 1.0
    np.testing.assert_array_equal(np.diagonal(p), 0.5)
    np.testing.assert_allclose(p + p.T, 1.0, atol=atol)
    np.testing.assert_allclose(p[1, 3], 0.5 + float(rewards[1]) - float(rewards[3]), atol=atol)


@by_precision
@settings
@hypothesis.given(rewards=reward_vectors)
def test_both_estimates_are_exact_from_exact_annotations(precision, rewards):
    with jax.enable_x64(precision == "float64"):
        truth = estimation.preferences(jnp.asarray(rewards, precision))
        atol = {"float32": 1e-6, "float64": 1e-15}[precision]
        np.testing.assert_array_equal(estimation.general_estimate(truth), truth)
        np.testing.assert_allclose(estimation.reward_estimate(truth), truth, atol=atol)
        np.testing.assert_allclose(estimation.estimated_rewards(truth), rewards, atol=atol)


def test_formula_of_the_reward_estimator():
    means = np.array([[0.5, 1.0, 1.0], [0.0, 0.5, 0.25], [0.0, 0.75, 0.5]])
    rewards = [sum(means[i, j] - 0.5 for j in range(3) if j != i) / 3 for i in range(3)]
    np.testing.assert_allclose(estimation.estimated_rewards(means), rewards, rtol=1e-6)
    expected = [[min(max(0.5 + a - b, 0.0), 1.0) for b in rewards] for a in rewards]
    np.testing.assert_allclose(estimation.reward_estimate(means), expected, rtol=1e-6)
    assert estimation.sup_error(means, means.T) == 1.0


def test_the_reward_estimate_is_clipped():
    """Response 0 beats all and the last loses to all: 1/2 + 3/8 + 3/8."""
    means = np.where(np.arange(4)[:, None] < np.arange(4), 1.0, 0.0) + 0.5 * np.eye(4)
    estimate = np.asarray(estimation.reward_estimate(means))
    assert estimate[0, 3] == 1.0 and estimate[3, 0] == 0.0


@jax.jit
def annotated(key, truth, num_annotations):
    def one(key):
        return estimation.annotate(key, truth, num_annotations=num_annotations)

    return jax.vmap(one)(jax.random.split(key, SEEDS))


@by_precision
@pytest.mark.parametrize("num_annotations", [3, 60])
def test_annotations_and_estimates_are_unbiased(precision, num_annotations):
    """The mean over many sets within 5 standard errors; the variance of the annotations is that of n draws."""
    with jax.enable_x64(precision == "float64"):
        truth = estimation.preferences(jnp.asarray([-0.25, 0.25, 0.1, -0.1], precision))
        means = annotated(jax.random.key(0), truth, num_annotations)
        assert means.dtype == precision
        rewards = np.asarray(jax.vmap(estimation.estimated_rewards)(means), np.float64)
        means, truth = np.asarray(means, np.float64), np.asarray(truth, np.float64)
    # One draw a pair: the two orders of a pair are the same annotations, in whole numbers.
    np.testing.assert_allclose(means + np.swapaxes(means, 1, 2), 1.0, atol=1e-6)
    np.testing.assert_array_equal(np.diagonal(means, axis1=1, axis2=2), 0.5)
    i, j = np.triu_indices(4, k=1)
    counts = means[:, i, j] * num_annotations
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-4)
    # P = 0 is in the truth (pair 0, 1), and is annotated without exception.
    assert truth[0, 1] == 0.0 and counts[:, 0].max() == 0.0
    single = truth * (1 - truth) / num_annotations
    assert (np.abs(means.mean(axis=0) - truth) <= 5 * np.sqrt(single / SEEDS) + 1e-7).all()
    np.testing.assert_allclose(means[:, i, j].var(axis=0), single[i, j], rtol=0.15)
    off_diagonal = single * (1 - np.eye(4))
    errors = np.abs(rewards.mean(axis=0) - [-0.25, 0.25, 0.1, -0.1])
    assert (errors <= 5 * np.sqrt(off_diagonal.sum(axis=1) / 16 / SEEDS) + 1e-7).all()
    # Pairs are independent of one another.
    correlations = np.corrcoef(counts[:, 1:].T) - np.eye(5)
    assert np.abs(correlations).max() < 5 / math.sqrt(SEEDS)


@pytest.mark.parametrize("num_responses", [2, 4, 8])
@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_the_bounds_hold(num_responses, delta):
    """The errors come near enough that a bound too small by a factor of 3 would not hold."""
    n = 50
    errors = estimation.simulate(jax.random.key(1), jnp.zeros(num_responses), num_annotations=n, num_seeds=SEEDS)
    assert errors.general.shape == errors.reward.shape == (SEEDS,)
    for error, bound in [
        (errors.general, estimation.general_bound(num_responses, n, delta=delta)),
        (errors.reward, estimation.reward_bound(num_responses, n, delta=delta)),
    ]:
        assert np.mean(error > bound) <= delta
        assert np.mean(error > bound / 3) > delta


def test_measured_errors_part_like_the_square_root_of_k():
    ratios = {}
    for num_responses in (4, 8, 32):
        rewards = jnp.linspace(-0.2, 0.2, num_responses)
        errors = estimation.simulate(jax.random.key(2), rewards, num_annotations=100, num_seeds=SEEDS)
        ratios[num_responses] = float(jnp.mean(errors.general) / jnp.mean(errors.reward))
    scaled = [ratio / math.sqrt(num_responses) for num_responses, ratio in ratios.items()]
    assert all(0.55 < value < 0.85 for value in scaled), ratios
    assert max(scaled) / min(scaled) < 1.2, ratios


@pytest.mark.parametrize("delta", [0.01, 0.05, 0.1])
def test_ratio_of_the_bounds(delta):
    def ratio(num_responses):
        general = estimation.general_bound(num_responses, 100, delta=delta)
        return general / estimation.reward_bound(num_responses, 100, delta=delta)

    for num_responses in (4, 8, 16, 32, 64):
        np.testing.assert_allclose(ratio(num_responses) / math.sqrt(num_responses), 0.60, rtol=0, atol=0.03)
    assert ratio(2) < 1.0 < ratio(3)


def test_bounds_by_hand():
    """K = 5 has 10 pairs."""
    np.testing.assert_allclose(estimation.general_bound(5, 40, delta=0.1), np.sqrt(np.log(200) / 80))
    np.testing.assert_allclose(estimation.reward_bound(5, 40, delta=0.1), np.sqrt(8 * np.log(100) / 1000))
    halved = estimation.reward_bound(5, 160, delta=0.1)
    np.testing.assert_allclose(halved, estimation.reward_bound(5, 40, delta=0.1) / 2)


def test_the_simulation_measures_the_annotations_of_its_keys():
    key, rewards = jax.random.key(3), jnp.array([-0.2, 0.2, 0.1, -0.1])
    errors = estimation.simulate(key, rewards, num_annotations=7, num_seeds=SEEDS)
    truth = estimation.preferences(rewards)
    means = annotated(key, truth, 7)
    estimates = jax.vmap(estimation.reward_estimate)(means)
    np.testing.assert_allclose(errors.general, np.abs(means - truth).max(axis=(1, 2)), atol=1e-6)
    np.testing.assert_allclose(errors.reward, np.abs(estimates - truth).max(axis=(1, 2)), atol=1e-6)
    other = estimation.simulate(jax.random.key(4), rewards, num_annotations=7, num_seeds=SEEDS)
    assert (np.asarray(errors.general) != np.asarray(other.general)).any()


def test_certain_preferences_are_annotated_without_nan():
    with jax.debug_nans(True):
        errors = estimation.simulate(jax.random.key(0), jnp.array([0.25, -0.25]), num_annotations=1, num_seeds=4)
    np.testing.assert_array_equal(errors.general, 0.0)
    np.testing.assert_array_equal(errors.reward, 0.0)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([0.2, 0.3, -0.5], r"rewards\[1\] is 0\.3\S*, outside \[-1/4, 1/4\]"),
        ([0.2, np.nan, -0.2], r"rewards\[1\] is nan"),
        ([0.2, 0.1, 0.0], "rewards sum to 0.3.*subtract their mean"),
        ([0.0], "rewards must be floating with the shape"),
        ([[0.0, 0.0]], "rewards must be floating with the shape"),
        ([0, 0], "rewards must be floating with the shape"),
    ],
)
def test_validate_rewards_names_what_is_wrong(rewards, message):
    with pytest.raises(ValueError, match=message):
        estimation.validate_rewards(np.array(rewards))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 10, 0.1), "num_responses must be at least 2, got 1"),
        ((2, 0, 0.1), "num_annotations must be at least 1, got 0"),
        ((2, 10, 0.0), r"delta must be in \(0, 1\), got 0.0"),
        ((2, 10, 1.0), r"delta must be in \(0, 1\), got 1.0"),
        ((2, 10, math.nan), "delta"),
    ],
)
@pytest.mark.parametrize("bound", [estimation.general_bound, estimation.reward_bound])
def test_bounds_name_what_is_wrong(bound, arguments, message):
    num_responses, num_annotations, delta = arguments
    with pytest.raises(ValueError, match=message):
        bound(num_responses, num_annotations, delta=delta)


def test_simulate_and_annotate_name_what_is_wrong():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="num_seeds"):
        estimation.simulate(key, jnp.zeros(2), num_annotations=1, num_seeds=0)
    with pytest.raises(ValueError, match="num_annotations"):
        estimation.simulate(key, jnp.zeros(2), num_annotations=0, num_seeds=1)
    with pytest.raises(ValueError, match="num_annotations"):
        estimation.annotate(key, jnp.full((2, 2), 0.5), num_annotations=0)

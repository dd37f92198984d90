"""Definitions 3.1 and 3.2, AUROC and average precision with ties, and the yield of a search."""

import functools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign import preference

N = 12
settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
auroc, average_precision = jax.jit(preference.auroc), jax.jit(preference.average_precision)
search_metrics = jax.jit(preference.search_metrics)
by_precision = pytest.mark.parametrize("precision", ["float32", "float64"])
REFERENCE = [0.01, 0.02, 0.02, 0.03, 0.05, 0.05, 0.08, 0.1, 0.1, 0.2]

# Few distinct values, so that ties are the rule.
tied_scores = st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.1, 0.25, 3.0]), min_size=N, max_size=N)
scores_of_n = tied_scores | st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=N, max_size=N)
flags = st.lists(st.booleans(), min_size=N, max_size=N).map(np.array)
mixed_flags = flags.filter(lambda errors: 0 < errors.sum() < N)


@pytest.fixture(scope="module")
def cases(vectors):
    return json.loads((vectors / "preference_scores.json").read_text())


# Candidates.


@by_precision
def test_thresholds_of_the_vectors(cases, precision):
    cases = cases["alpha_candidates"]
    assert cases["reference_variances"] == REFERENCE
    with jax.enable_x64(precision == "float64"):
        reference = jnp.array(REFERENCE, precision)
        for case in cases["cases"]:
            threshold = preference.candidate_threshold(reference, alpha=case["alpha"])
            assert threshold == jnp.array(case["threshold_inverse_cdf"], precision)
            assert preference.is_candidate(reference, threshold).sum() == case["count_ge"]


def test_a_threshold_is_a_score_and_ties_pass_it():
    """Interpolation would give 0.11 and one candidate instead of three."""
    reference = jnp.array(REFERENCE)
    threshold = preference.candidate_threshold(reference, alpha=0.1)
    assert threshold == jnp.float32(0.1)
    assert preference.is_candidate(reference, threshold).sum() == 3


@settings
@hypothesis.given(st.sampled_from([1, 10, 35]), st.data())
def test_threshold_is_the_inverse_cdf(num_scores, data):
    """alpha = a / b: the rank is ceil((b - a) N / b) in whole numbers, however the quotient rounds."""
    b = data.draw(st.sampled_from([2, 3, 7, 10, 100, 1000]))
    a = data.draw(st.integers(1, b - 1))
    scores = np.random.default_rng(0).permutation(num_scores).astype(np.float32)
    expected = sorted(scores)[-(-(b - a) * num_scores // b) - 1]
    for alpha in (a / b, 1 - (b - a) / b):
        threshold = preference.candidate_threshold(jnp.asarray(scores), alpha=alpha)
        assert threshold == expected
        share = float(preference.is_candidate(scores, threshold).mean())
        assert alpha - 1e-6 <= share < alpha + 1 / num_scores + 1e-6


@pytest.mark.parametrize(
    ("alpha", "num_scores", "rank"), [(0.29, 100, 71), (0.57, 100, 43), (1 - 0.9, 10, 9), (0.7, 10, 3)]
)
def test_the_rank_survives_rounding(alpha, num_scores, rank):
    """In float64 `alpha N` falls just short of an integer, or `(1 - alpha) N` just passes one."""
    assert alpha * num_scores < num_scores - rank or (1 - alpha) * num_scores > rank
    assert preference.candidate_threshold(jnp.arange(1, num_scores + 1), alpha=alpha) == rank


def test_thresholds_at_the_ends_of_alpha():
    scores = jnp.array([3.0, 1.0, 2.0])
    assert preference.candidate_threshold(scores, alpha=1e-9) == 3.0
    assert preference.candidate_threshold(scores, alpha=1 - 2**-53) == 1.0
    assert preference.candidate_threshold(scores[:1], alpha=0.5) == 3.0


def test_threshold_under_vmap_and_jit():
    references = jnp.array([REFERENCE, [10 * score for score in REFERENCE]])
    threshold = jax.jit(jax.vmap(functools.partial(preference.candidate_threshold, alpha=0.2)))(references)
    np.testing.assert_allclose(threshold, [0.1, 1.0], rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 10, float("nan")])
def test_alpha_is_checked(alpha):
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\)"):
        preference.candidate_threshold(jnp.array(REFERENCE), alpha=alpha)


def test_a_threshold_needs_scores():
    with pytest.raises(ValueError, match="reference_scores is empty"):
        preference.candidate_threshold(jnp.zeros(0), alpha=0.1)


def test_nan_is_no_candidate():
    np.testing.assert_array_equal(preference.is_candidate(jnp.array([jnp.nan, 1.0, 0.5]), 0.5), [False, True, True])


# Adversarial triplets.


@by_precision
def test_adversarial_vectors(cases, precision):
    with jax.enable_x64(precision == "float64"):
        for case in cases["epsilon_adversarial"]:
            oracle, mean = jnp.array(case["oracle"], precision), jnp.array(case["ensemble_mean"], precision)
            # By symmetry also with both preferences turned round, where other numbers round.
            for p, q in [(oracle, mean), (1 - oracle, 1 - mean)]:
                assert bool(preference.is_adversarial(p, q, epsilon=case["eps"])) == case["adversarial"], case


@by_precision
@pytest.mark.parametrize("num_queries", [10, 11, 20])
def test_adversarial_is_strict_in_whole_numbers(precision, num_queries):
    """Oracle v / k, epsilon e / (2 k), mean m / k: the definition in integers, whatever rounds."""
    votes = np.arange(num_queries + 1)
    with jax.enable_x64(precision == "float64"):
        shares = jnp.asarray(votes / num_queries, precision)
        for twice_margin in range(num_queries):
            flagged = preference.is_adversarial(
                shares[:, None], shares[None, :], epsilon=twice_margin / (2 * num_queries)
            )
            oracle, mean = (2 * votes - num_queries)[:, None], (2 * votes - num_queries)[None, :]
            np.testing.assert_array_equal(flagged, (oracle * mean < 0) & (np.abs(oracle) > twice_margin))


def test_a_mean_that_is_indifferent_up_to_rounding_reverses_nothing():
    """Members that average to 1/2 do so only up to an ulp; margins that matter are far above it."""
    mean = np.float32(0.5) + np.array([-1, 1], np.float32) * np.finfo(np.float32).eps
    assert not preference.is_adversarial(np.float32(0.9), mean).any()
    assert not preference.is_adversarial(mean, np.float32(0.1)).any()
    assert preference.is_adversarial(np.float32(0.50001), np.float32(0.49999))
    with jax.enable_x64(True):
        tiny = np.float64(1e-9)  # the product of these margins is no reason to miss them
        assert preference.is_adversarial(0.5 + tiny, 0.5 - tiny)
        # The coarser dtype sets the slack.
        assert not preference.is_adversarial(np.float32(0.6), np.float64(0.4), epsilon=0.1)


def test_unknown_oracles_are_not_adversarial():
    oracle, mean = jnp.array([jnp.nan, 0.9, jnp.nan]), jnp.array([0.1, jnp.nan, jnp.nan])
    assert not preference.is_adversarial(oracle, mean).any()


def test_votes_may_be_whole_numbers():
    np.testing.assert_array_equal(preference.is_adversarial(np.array([0, 1, 1]), np.array([0.7, 0.3, 0.7])), [1, 1, 0])


@pytest.mark.parametrize("epsilon", [-0.01, 0.5, 1, float("nan")])
def test_epsilon_is_checked(epsilon):
    with pytest.raises(ValueError, match=r"epsilon must be in \[0, 1/2\)"):
        preference.is_adversarial(jnp.array(0.9), jnp.array(0.1), epsilon=epsilon)


def test_epsilon_may_be_traced():
    oracle, mean = jnp.array([0.9, 0.6, 0.4]), jnp.array([0.1, 0.4, 0.1])
    sweep = jax.jit(jax.vmap(lambda epsilon: preference.is_adversarial(oracle, mean, epsilon=epsilon)))
    np.testing.assert_array_equal(sweep(jnp.array([0.0, 0.1, 0.4])), [[1, 1, 0], [1, 0, 0], [0, 0, 0]])


# How well a score ranks the errors.


def pair_count(errors, scores):
    above, below = scores[errors][:, None], scores[~errors][None, :]
    return float(np.mean((above > below) + 0.5 * (above == below)))


def swept(errors, scores):
    """The definition: lower the threshold through the distinct scores, add precision by the step in recall."""
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        now = (chosen & errors).sum() / errors.sum()
        total, recall = total + (now - recall) * (chosen & errors).sum() / chosen.sum(), now
    return total


@by_precision
def test_ranking_vectors(cases, precision):
    tolerance = {"float32": 1e-6, "float64": 1e-12}[precision]
    with jax.enable_x64(precision == "float64"):
        for case in cases["auroc_ties"]:
            errors, scores = np.array(case["label_error"], bool), np.array(case["score"], precision)
            np.testing.assert_allclose(auroc(errors, scores), case["auroc"], rtol=tolerance)
            np.testing.assert_allclose(average_precision(errors, scores), case["average_precision"], rtol=tolerance)


@pytest.mark.parametrize(
    ("errors", "scores", "expected"), [([0, 1, 1], [0.5, 0.9, 0.5], 0.75), ([1, 0, 1, 0], [9.0, 9.0, 5.0, 5.0], 0.5)]
)
def test_ties_do_not_depend_on_the_order_of_the_rows(errors, scores, expected):
    errors, scores = np.array(errors, bool), np.array(scores, np.float32)
    precisions = set()
    for order in (np.arange(len(errors)), np.arange(len(errors))[::-1], np.roll(np.arange(len(errors)), 1)):
        assert auroc(errors[order], scores[order]) == expected
        precisions.add(float(average_precision(errors[order], scores[order])))
    assert len(precisions) == 1


@settings
@hypothesis.given(mixed_flags, scores_of_n, st.permutations(range(N)))
def test_auroc_counts_pairs(errors, scores, order):
    scores, order = np.array(scores, np.float32), np.array(order)
    area = float(auroc(errors, scores))
    assert 0.0 <= area <= 1.0
    np.testing.assert_allclose(area, pair_count(errors, scores), rtol=0, atol=1e-6)
    np.testing.assert_allclose(auroc(errors[order], scores[order]), area, rtol=0, atol=1e-6)
    np.testing.assert_allclose(auroc(errors, -scores), 1 - area, rtol=0, atol=1e-6)
    np.testing.assert_allclose(auroc(~errors, scores), 1 - area, rtol=0, atol=1e-6)


@settings
@hypothesis.given(flags.filter(np.any), scores_of_n, st.permutations(range(N)))
def test_average_precision_sweeps_the_thresholds(errors, scores, order):
    scores, order = np.array(scores, np.float32), np.array(order)
    value = float(average_precision(errors, scores))
    assert 0.0 < value <= 1.0 + 1e-6
    np.testing.assert_allclose(value, swept(errors, scores), rtol=0, atol=1e-6)
    np.testing.assert_allclose(average_precision(errors[order], scores[order]), value, rtol=0, atol=1e-6)


def test_large_samples_keep_their_digits():
    """The size of the held-out set; sums of ranks are far above what float32 holds exactly."""
    rng = np.random.default_rng(0)
    errors = rng.uniform(size=37_614) < 0.243
    scores = (np.round(rng.normal(size=errors.size) + 0.6 * errors, 2)).astype(np.float32)
    order = np.argsort(scores)
    below = np.searchsorted(scores[order], scores[errors], "left")
    upto = np.searchsorted(scores[order], scores[errors], "right")
    others = np.concatenate([[0], np.cumsum(~errors[order])])
    expected = np.mean(0.5 * (others[below] + others[upto])) / (~errors).sum()
    np.testing.assert_allclose(jax.jit(preference.auroc)(errors, scores), expected, atol=2e-6)
    hits = np.concatenate([[0], np.cumsum(errors[order])])
    expected = np.mean((errors.sum() - hits[below]) / (errors.size - below))
    np.testing.assert_allclose(jax.jit(preference.average_precision)(errors, scores), expected, atol=2e-6)


def test_rankings_without_one_of_the_classes():
    scores = jnp.array([0.1, 0.3, 0.2])
    none, every = jnp.zeros(3, bool), jnp.ones(3, bool)
    assert np.isnan(auroc(none, scores)) and np.isnan(auroc(every, scores))
    assert np.isnan(average_precision(none, scores))
    assert average_precision(every, scores) == 1.0


def test_a_nan_score_is_not_ranked():
    errors, scores = jnp.array([True, False, True]), jnp.array([0.1, jnp.nan, 0.3])
    assert np.isnan(auroc(errors, scores)) and np.isnan(average_precision(errors, scores))


def test_rankings_under_vmap_and_debug_nans():
    errors = jnp.array([[True, False, True, False], [False, False, False, True]])
    scores = jnp.array([[9.0, 9.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
    with jax.debug_nans(True):
        np.testing.assert_allclose(jax.vmap(auroc)(errors, scores), [0.5, 0.5])
        np.testing.assert_allclose(jax.vmap(average_precision)(errors, scores), [0.5, 0.25])


# The yield of a search.


@settings
@hypothesis.given(flags, flags)
def test_search_metrics_are_counts(candidates, adversarial):
    found = search_metrics(candidates, adversarial)
    both = (candidates & adversarial).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        precision, base_rate = both / candidates.sum(), adversarial.sum() / N
        expected = preference.SearchMetrics(
            candidate_rate=candidates.sum() / N,
            joint_yield=both / N,
            precision=precision,
            base_rate=base_rate,
            enrichment=precision / base_rate,
            captured=both / adversarial.sum(),
        )
    for name in expected._fields:
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-6, err_msg=name)


def test_search_metrics_by_hand():
    """10 triplets, 4 candidates, 3 adversarial, 2 of them candidates."""
    candidates, adversarial = jnp.arange(10) < 4, (jnp.arange(10) >= 2) & (jnp.arange(10) < 5)
    with jax.debug_nans(True):
        found = search_metrics(candidates, adversarial)
    np.testing.assert_allclose(found, [0.4, 0.2, 0.5, 0.3, 0.5 / 0.3, 2 / 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("candidates", "adversarial", "expected"),
    [
        ([0, 0], [0, 1], [0.0, 0.0, np.nan, 0.5, np.nan, 0.0]),
        ([0, 1], [0, 0], [0.5, 0.0, 0.0, 0.0, np.nan, np.nan]),
        ([0, 0], [0, 0], [0.0, 0.0, np.nan, 0.0, np.nan, np.nan]),
        ([], [], [np.nan] * 6),
    ],
)
def test_search_metrics_without_a_denominator(candidates, adversarial, expected):
    found = preference.search_metrics(np.array(candidates, bool), np.array(adversarial, bool))
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


def test_search_metrics_under_vmap():
    """Over margins: one search, several epsilons."""
    candidates = jnp.array([True, True, False, False])
    adversarial = jnp.array([[True, False, True, False], [True, False, False, False]])
    found = jax.vmap(search_metrics, in_axes=(None, 0))(candidates, adversarial)
    np.testing.assert_allclose(found.captured, [0.5, 1.0])
    np.testing.assert_allclose(found.enrichment, [1.0, 2.0])

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stackalign.judges import digits_expectation, on_parse_failure, percentile_scores, raw_likelihood_scores


@hypothesis.given(hnp.arrays(np.float64, 9, elements=st.floats(1e-4, 1)), st.floats(1e-3, 1 - 1e-3), st.floats(0.01, 1))
@hypothesis.settings(deadline=None, max_examples=50)
def test_digits_expectation_by_the_formula(weights, ten_given_one, mass):
    p = mass * weights / weights.sum()
    p10 = p[0] * ten_given_one
    full = np.array([p[0] - p10, *p[1:], p10])
    expected = (full * np.arange(1, 11)).sum() / full.sum()
    score = float(digits_expectation(jnp.log(p), jnp.log(ten_given_one)))
    np.testing.assert_allclose(score, expected, rtol=1e-4)
    assert 1 <= score <= 10


def test_digits_expectation_at_the_edges():
    only_one = jnp.array([0.0, *[-jnp.inf] * 8])
    assert float(digits_expectation(only_one, jnp.array(-jnp.inf))) == 1.0
    for almost_zero in (0.0, 1e-6):
        assert float(digits_expectation(only_one, jnp.array(almost_zero))) == 10.0
    tiny = jnp.full((2, 3, 9), -500.0)  # probabilities that underflow
    np.testing.assert_allclose(
        digits_expectation(tiny, jnp.full((2, 3), jnp.log(0.5))), np.full((2, 3), (0.5 + 44 + 5) / 9), rtol=1e-6
    )
    assert np.isnan(digits_expectation(jnp.full(9, -jnp.inf), jnp.array(-1.0)))
    assert np.isnan(digits_expectation(jnp.full(9, -1.0), jnp.array(jnp.nan)))
    with pytest.raises(AssertionError):
        digits_expectation(jnp.zeros(10), jnp.zeros(()))


@hypothesis.given(
    hnp.arrays(np.float64, st.integers(1, 30), elements=st.sampled_from([-3.0, -2.0, -1.5, -0.1, -np.inf, np.nan]))
)
@hypothesis.settings(deadline=None, max_examples=100)
def test_percentile_scores_by_counting(values):
    scores = percentile_scores(values)
    kept = values[~np.isnan(values)]
    for value, score in zip(values, scores, strict=True):
        if np.isnan(value):
            assert np.isnan(score)
        elif len(kept) == 1:
            assert score == 5.5
        else:
            rank = ((kept < value).sum() + ((kept == value).sum() - 1) / 2) / (len(kept) - 1)
            np.testing.assert_allclose(score, 1 + 9 * rank)
    if len(kept):
        np.testing.assert_allclose(np.nanmean(scores), 5.5)


def test_percentile_scores_edges():
    np.testing.assert_array_equal(percentile_scores(np.array([-2.0, -1.0, -3.0])), [5.5, 10.0, 1.0])
    np.testing.assert_array_equal(percentile_scores(np.array([-1.0, -1.0])), [5.5, 5.5])
    assert percentile_scores(np.array([])).shape == (0,)
    assert np.isnan(percentile_scores(np.array([np.nan]))).all()


def test_raw_likelihood_scores():
    scores = raw_likelihood_scores(np.array([0.0, np.log(0.5), -np.inf, np.nan]))
    np.testing.assert_allclose(scores, [10.0, 5.5, 1.0, np.nan])
    with pytest.raises(ValueError, match="at most 0"):
        raw_likelihood_scores(np.array([0.5]))


def test_failures_leave_the_mean_or_count_five():
    scores = np.array([8.0, np.nan, 10.0])
    assert np.nanmean(on_parse_failure(scores, "drop")) == 9.0
    np.testing.assert_allclose(np.mean(on_parse_failure(scores, "five")), 23 / 3)
    assert np.isnan(scores[1])
    with pytest.raises(ValueError, match="'zero'"):
        on_parse_failure(scores, "zero")

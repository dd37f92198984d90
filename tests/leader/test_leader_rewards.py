"""Equations 2 to 4 and the composite reward."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.leader import rewards, schedules

composite = jax.jit(rewards.composite)
settings = hypothesis.settings(deadline=None, max_examples=50)
score = st.floats(1, 10, width=32)


@pytest.mark.parametrize(
    ("value", "expected"), [(10.0, 0.0), (3.0, 1.0), (2.999, 0.0), (1.0, 0.0), (6.5, 0.5), (float("nan"), 0.0)]
)
def test_difficulty(value, expected):
    np.testing.assert_allclose(rewards.difficulty(value), expected, atol=1e-6)


def test_preference_is_one_at_the_target_and_falls_by_the_bandwidth():
    np.testing.assert_allclose(rewards.preference(9.0, 3.6, 0.6), 1.0, rtol=1e-5)
    np.testing.assert_allclose(rewards.preference(5.0, 5.0, 0.15), np.exp(-0.5), rtol=1e-5)
    np.testing.assert_allclose(rewards.preference(1.0, 10.0, 0.6), np.exp(-(0.4**2) / (2 * 0.15**2)), rtol=1e-5)


def test_composite_by_hand():
    hard = 0.5 * ((10 - 8) / 7 + 0.0)
    apart = np.exp(-((6 / 9 - 0.6) ** 2) / (2 * 0.15**2))
    np.testing.assert_allclose(composite(8.0, 2.0, 0.6), 0.3 * hard + 0.7 * apart, rtol=1e-5)


@settings
@hypothesis.given(score, score, st.floats(0, 1))
def test_composite_is_symmetric_and_within_0_1(a, b, gap):
    value = float(composite(a, b, gap))
    assert 0.0 <= value <= 1.0 + 1e-6
    np.testing.assert_allclose(value, composite(b, a, gap), rtol=1e-6, atol=1e-7)


def test_composite_of_a_missing_score_is_nan():
    assert np.isnan(composite(jnp.nan, 5.0, 0.3))


def test_composite_vmaps():
    a, b = jnp.linspace(1.0, 10.0, 14).reshape(7, 2).T
    loop = [composite(x, y, 0.4) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(jax.vmap(lambda x, y: composite(x, y, 0.4))(a, b), loop, rtol=1e-6)


@pytest.mark.parametrize("schedule", [schedules.linear, schedules.cosine])
def test_schedule_endpoints_and_middle(schedule):
    taus = [schedules.progress(t, 9) for t in range(9)]
    values = np.array([schedule(tau, 0.6, 0.15) for tau in taus])
    np.testing.assert_allclose(values[[0, 4, 8]], [0.6, 0.375, 0.15], rtol=1e-6)
    assert (np.diff(values) < 0).all()


def test_linear_is_equation_3():
    np.testing.assert_allclose(
        [schedules.linear(schedules.progress(t, 8), 1.0, 0.0) for t in range(8)], 1 - np.arange(8) / 7, atol=1e-6
    )


def test_a_single_iteration_has_progress_0():
    with jax.debug_nans(True):
        assert float(schedules.progress(0, 1)) == 0.0
        assert float(jax.jit(schedules.progress)(0, 1)) == 0.0
    np.testing.assert_allclose(schedules.linear(schedules.progress(0, 1), 0.6, 0.15), 0.6, rtol=1e-6)

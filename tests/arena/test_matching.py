"""Active models, equations 6 and 7, the five strategies, and the mixture with uniform matching."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.arena import matching

M = 5
STRATEGIES = sorted(matching.STRATEGIES)
settings = hypothesis.settings(deadline=None, max_examples=20)
rating = st.floats(10, 200, width=32)


@functools.partial(jax.jit, static_argnames=("strategy", "num_opponents"))
def probabilities(key, reputations, active, target_gap, *, strategy, num_opponents=0, random_rate=0.2):
    return matching.opponent_probabilities(
        key,
        reputations,
        active,
        target_gap=target_gap,
        strategy=matching.STRATEGIES[strategy],
        num_opponents=num_opponents,
        random_rate=random_rate,
    )


KEY = jax.random.key(0)
nearest = jax.jit(matching.nearest, static_argnums=3)


def test_active_models_go_round_robin_across_iterations():
    rounds = [matching.active_models(t, 5, 3) for t in range(3)]
    np.testing.assert_array_equal(np.concatenate(rounds), np.arange(15) % 3)
    np.testing.assert_array_equal(jax.jit(matching.active_models, static_argnums=(1, 2))(2, 5, 3), rounds[2])


def test_equation_6():
    gaps = matching.relative_gaps(jnp.array([100.0, 90.0, 125.0, 100.0]), 0)
    np.testing.assert_allclose(gaps, [0.0, 0.4, 1.0, 0.0], rtol=1e-6)


def test_equation_6_of_equal_reputations_is_0():
    with jax.debug_nans(True):
        np.testing.assert_array_equal(matching.relative_gaps(jnp.full(4, 100.0), 2), np.zeros(4))


def test_equation_7():
    reputations = np.array([100.0, 90.0, 125.0, 104.0])
    gaps = np.array([10.0, 25.0, 4.0]) / 25
    weights = np.exp(-((gaps - 0.3) ** 2) / (2 * 0.15**2))
    p = probabilities(KEY, reputations, 0, 0.3, strategy="schedule_decreasing", random_rate=0.0)
    np.testing.assert_allclose(p, np.concatenate([[0.0], weights / weights.sum()]), rtol=1e-5)
    mixed = probabilities(KEY, reputations, 0, 0.3, strategy="schedule_decreasing")
    np.testing.assert_allclose(mixed[1:], 0.8 * p[1:] + 0.2 / 3, rtol=1e-5)


def test_the_mask_keeps_equation_6s_normalisation():
    reputations = np.array([100.0, 90.0, 125.0, 104.0, 101.0])
    gaps = np.array([10.0, 4.0, 1.0]) / 25
    weights = np.exp(-((gaps - 1.0) ** 2) / (2 * 0.15**2))
    p = probabilities(KEY, reputations, 0, 1.0, strategy="schedule_decreasing", num_opponents=3, random_rate=0.0)
    np.testing.assert_allclose(p[jnp.array([1, 3, 4])], weights / weights.sum(), rtol=1e-4)
    assert p[0] == 0 and p[2] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings
@hypothesis.given(st.lists(rating, min_size=M, max_size=M), st.integers(0, M - 1), st.floats(0, 1))
def test_every_strategy_is_a_distribution_over_the_others(strategy, reputations, active, target_gap):
    p = probabilities(KEY, np.float32(reputations), active, target_gap, strategy=strategy)
    assert float(p[active]) == 0.0
    np.testing.assert_allclose(p.sum(), 1.0, atol=1e-6)
    assert float(jnp.delete(p, active).min()) >= 0.2 / (M - 1) - 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_models_always_meet(strategy):
    for active in (0, 1):
        p = probabilities(KEY, np.array([100.0, 40.0]), active, 0.0, strategy=strategy)
        np.testing.assert_array_equal(p, [active == 1, active == 0])


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"lowest_diff"}))
def test_equal_reputations_are_uniform(strategy):
    p = probabilities(KEY, np.full(M, 100.0), 2, 0.7, strategy=strategy)
    np.testing.assert_allclose(p, [0.25, 0.25, 0, 0.25, 0.25], rtol=1e-6)


def test_lowest_diff_of_equal_reputations_is_uniform_over_ties():
    keys = jax.random.split(KEY, 2000)
    run = jax.jit(jax.vmap(lambda k: matching.lowest_diff(k, jnp.full(M, 100.0), 2, num_opponents=1)))
    p = run(keys)
    np.testing.assert_array_equal(jnp.sum(p > 0, axis=1), np.ones(2000))
    np.testing.assert_allclose(p.mean(0), [0.25, 0.25, 0, 0.25, 0.25], atol=0.04)


def test_lowest_and_highest_difference():
    reputations = np.array([100.0, 99.0, 103.0, 60.0, 95.0])
    three = probabilities(KEY, reputations, 0, 0.0, strategy="lowest_diff", random_rate=0.0)
    np.testing.assert_allclose(three, [0, 1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-6)
    one = probabilities(KEY, reputations, 0, 0.0, strategy="lowest_diff", num_opponents=1, random_rate=0.0)
    np.testing.assert_array_equal(one, [0, 1, 0, 0, 0])
    far = probabilities(KEY, reputations, 0, 0.0, strategy="highest_diff", random_rate=0.0)
    np.testing.assert_array_equal(far, [0, 0, 0, 1, 0])
    tied = probabilities(KEY, np.array([100.0, 90.0, 110.0, 100.0]), 0, 0.0, strategy="highest_diff", random_rate=0.0)
    np.testing.assert_array_equal(tied, [0, 0.5, 0.5, 0])


@settings
@hypothesis.given(st.lists(rating, min_size=M, max_size=M), st.integers(0, M - 1), st.integers(0, M + 1))
def test_mask_counts(reputations, active, num_opponents):
    reputations = jnp.float32(reputations)
    mask = nearest(KEY, reputations, active, num_opponents)
    size = num_opponents if 0 < num_opponents < M - 1 else M - 1
    assert int(mask.sum()) == size and not mask[active]
    gaps = np.abs(np.asarray(reputations) - reputations[active])
    outside = ~np.asarray(mask)
    outside[active] = False
    if outside.any():
        assert gaps[np.asarray(mask)].max() <= gaps[outside].min()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sampling_follows_the_probabilities(strategy):
    reputations, num_draws = jnp.array([100.0, 96.0, 91.0, 112.0, 60.0]), 10_000
    options = {"target_gap": 0.3, "strategy": matching.STRATEGIES[strategy], "num_opponents": 2}
    actives = jnp.full((num_draws,), 1)
    drawn = jax.jit(functools.partial(matching.sample_opponents, **options))(jax.random.key(3), reputations, actives)
    p = probabilities(KEY, reputations, 1, 0.3, strategy=strategy, num_opponents=2)
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / num_draws, p, atol=0.02)
    assert (np.asarray(drawn) != 1).all()


def test_the_schedule_moves_from_far_to_near():
    reputations = np.array([100.0, 99.0, 95.0, 80.0])
    start, end = matching.TARGET_GAPS[matching.schedule_decreasing]
    assert (end, start) == matching.TARGET_GAPS[matching.schedule_increasing]
    early = probabilities(KEY, reputations, 0, start, strategy="schedule_decreasing")
    late = probabilities(KEY, reputations, 0, end, strategy="schedule_decreasing")
    assert jnp.argmax(early) == 3 and jnp.argmax(late) == 1


def test_vmap_over_seeds_equals_a_loop():
    reputations = jax.random.uniform(KEY, (4, M), minval=80, maxval=120)
    keys = jax.random.split(jax.random.key(1), 4)
    actives = matching.active_models(0, 8, M)
    run = jax.jit(functools.partial(matching.sample_opponents, target_gap=0.5, num_opponents=3))
    loop = jnp.stack([run(k, r, actives) for k, r in zip(keys, reputations, strict=True)])
    np.testing.assert_array_equal(jax.vmap(run, (0, 0, None))(keys, reputations, actives), loop)


def test_errors():
    with pytest.raises(ValueError, match="two models"):
        matching.opponent_probabilities(KEY, jnp.array([100.0]), 0, target_gap=0.0)
    with pytest.raises(ValueError, match="negative"):
        matching.nearest(KEY, jnp.full(3, 100.0), 0, -1)

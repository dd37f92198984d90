"""Aggregation of judges' scores (equation 8), whole iterations of duels, and Bradley-Terry strengths."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.arena import aggregation, bradley_terry, duels, reputation

M, D = 5, 7
NAN = float("nan")
settings = hypothesis.settings(deadline=None, max_examples=40)
aggregate = jax.jit(aggregation.aggregate)
update = jax.jit(reputation.update, static_argnames="config")
strengths = jax.jit(bradley_terry.strengths)
play = jax.jit(duels.play, static_argnames=("peer", "weighting", "config"))


def mean(scores, mask=None, weights=None):
    scores = jnp.array(scores)
    mask = jnp.ones(scores.shape, bool) if mask is None else jnp.array(mask)
    weights = jnp.ones(scores.shape) if weights is None else jnp.array(weights)
    return aggregate(scores, mask, weights)


def test_equation_8():
    np.testing.assert_allclose(mean([8.0, 2.0], weights=[3.0, 1.0])[0], 6.5, rtol=1e-6)


@pytest.mark.parametrize("failure", [NAN, float("inf"), -float("inf")])
def test_a_failed_judge_leaves_the_mean(failure):
    scores, ones = jnp.array([8.0, failure, 10.0]), jnp.ones(3)
    with jax.debug_nans(True):
        value, scored = aggregate(scores, ones.astype(bool), ones)
    assert float(value) == 9.0 and bool(scored)


def test_a_failure_replaced_by_five():
    np.testing.assert_allclose(mean([8.0, 5.0, 10.0])[0], 23 / 3, rtol=1e-6)


def test_without_any_score_there_is_none():
    for scores, mask in (([NAN, NAN], [True, True]), ([4.0, 5.0], [False, False]), ([4.0, NAN], [False, True])):
        value, scored = mean(scores, mask)
        assert not bool(scored) and float(value) == 0.0


def test_zero_weights_give_the_plain_mean_of_those_who_scored():
    assert float(mean([8.0, 4.0, NAN, 9.0], [True, True, True, False], [0.0, 0.0, 1.0, 1.0])[0]) == 6.0


judge = st.tuples(st.one_of(st.just(NAN), st.floats(1, 10, width=32)), st.booleans(), st.floats(0, 200, width=32))


@settings
@hypothesis.given(st.lists(judge, min_size=4, max_size=4))
def test_the_aggregate_lies_within_the_valid_scores(judges):
    scores, mask, weights = (np.array(x) for x in zip(*judges, strict=True))
    value, scored = mean(np.float32(scores), mask, np.float32(weights))
    counted = scores[mask & ~np.isnan(scores)]
    assert bool(scored) == bool(counted.size)
    if counted.size:
        assert counted.min() - 1e-5 <= float(value) <= counted.max() + 1e-5


@settings
@hypothesis.given(st.permutations([7, 9, 4, 10]))
def test_whole_scores_under_equal_weights_tie_whichever_judge_gave_them(scores):
    assert float(mean(np.float32(scores), weights=[100.0] * 4)[0]) == 7.5


@functools.partial(jax.jit, static_argnames=("num_models", "num_duels", "num_judges"))
def games(key, num_models=M, num_duels=D, num_judges=M):
    key_first, key_step, key_scores, key_fail = jax.random.split(key, 4)
    first = jax.random.randint(key_first, (num_duels,), 0, num_models)
    second = (first + jax.random.randint(key_step, (num_duels,), 1, num_models)) % num_models
    scores = jax.random.uniform(key_scores, (num_duels, 2, num_judges), minval=1.0, maxval=10.0)
    scores = jnp.where(jax.random.bernoulli(key_fail, 0.2, scores.shape), jnp.nan, scores)
    return first, second, scores, jnp.ones(scores.shape, bool)


@jax.jit
def start(key=None):
    ratings = 100.0 + 10 * jax.random.normal(jax.random.key(9) if key is None else key, (M,))
    return reputation.init(M)._replace(ratings=ratings)


@pytest.mark.parametrize("config", reputation.PRESETS.values(), ids=reputation.PRESETS)
def test_play_equals_single_updates(config):
    state = reputation.init(M, config)._replace(ratings=start().ratings)
    first, second, scores, mask = games(jax.random.key(0))
    end, outcome = play(state, first, second, scores, mask, peer=True, config=config)
    for d in range(D):
        np.testing.assert_array_equal(outcome.ratings[d], state.ratings)
        judges = np.arange(M)
        others = jnp.array((judges != first[d]) & (judges != second[d]))
        sides = [aggregate(scores[d, side], others, state.ratings) for side in (0, 1)]
        np.testing.assert_array_equal(outcome.scored[d], [scored for _, scored in sides])
        np.testing.assert_allclose(outcome.scores[d], [value for value, _ in sides], rtol=1e-6)
        valid = sides[0][1] & sides[1][1]
        assert bool(outcome.valid[d]) == bool(valid)
        state = update(state, first[d], second[d], sides[0][0], sides[1][0], valid, config)
    for got, want in zip(end, state, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_combatants_do_not_judge_and_masks_are_kept():
    scores = jnp.array([[[10.0, 10.0, 4.0, 6.0, 9.0], [1.0, 1.0, 6.0, 2.0, 9.0]]])
    mask = jnp.ones(scores.shape, bool).at[:, :, 4].set(False)
    _, outcome = play(reputation.init(M), jnp.array([0]), jnp.array([1]), scores, mask, peer=True)
    np.testing.assert_allclose(outcome.scores, [[5.0, 4.0]], rtol=1e-6)


def test_weighting():
    state = reputation.init(4)._replace(ratings=jnp.array([100.0, 100.0, 30.0, 10.0]))
    scores = jnp.array([[[0.0, 0.0, 8.0, 4.0], [0.0, 0.0, 2.0, 6.0]]])
    arguments = (state, jnp.array([0]), jnp.array([1]), scores, jnp.ones(scores.shape, bool))
    np.testing.assert_allclose(play(*arguments, peer=True)[1].scores, [[7.0, 3.0]], rtol=1e-6)
    np.testing.assert_allclose(play(*arguments, peer=True, weighting="mean")[1].scores, [[6.0, 4.0]], rtol=1e-6)


def test_external_judges_weigh_the_same_and_may_be_any_number():
    scores = jnp.array([[[9.0, 3.0], [2.0, NAN]], [[NAN, NAN], [5.0, 5.0]]])
    state = reputation.init(2)
    end, outcome = play(state, jnp.array([0, 0]), jnp.array([1, 1]), scores, jnp.ones(scores.shape, bool), peer=False)
    np.testing.assert_allclose(outcome.scores, [[6.0, 2.0], [0.0, 5.0]], rtol=1e-6)
    np.testing.assert_array_equal(outcome.scored, [[True, True], [False, True]])
    np.testing.assert_array_equal(outcome.valid, [True, False])
    np.testing.assert_array_equal(end.counts, [1, 1])


def test_weights_are_the_ratings_just_before_the_duel():
    """The judge's rating moves in the first duel; the second duel must see the new one."""
    state = reputation.init(4)._replace(
        ratings=jnp.array([100.0, 100.0, 90.0, 110.0]), deviations=jnp.array([0.5, 0.5, 8.0, 8.0])
    )
    scores = jnp.array([[[9.0] * 4, [1.0] * 4], [[1.0, 1.0, 10.0, 2.0], [1.0, 1.0, 2.0, 9.0]]])
    _, outcome = play(state, jnp.array([2, 0]), jnp.array([3, 1]), scores, jnp.ones(scores.shape, bool), peer=True)
    r = outcome.ratings[1]
    assert float(r[2]) > 91 and float(r[3]) < 109
    np.testing.assert_allclose(outcome.scores[1, 0], (10 * r[2] + 2 * r[3]) / (r[2] + r[3]), rtol=1e-6)


def test_resumed_equals_uninterrupted():
    first, second, scores, mask = games(jax.random.key(2), num_duels=6)
    whole, _ = play(start(), first, second, scores, mask, peer=True)
    half, _ = play(start(), first[:3], second[:3], scores[:3], mask[:3], peer=True)
    stored = reputation.ReputationState(*(jnp.asarray(np.asarray(x)) for x in half))
    resumed, _ = play(stored, first[3:], second[3:], scores[3:], mask[3:], peer=True)
    for got, want in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(got, want)


def test_vmap_over_seeds_and_populations_equals_a_loop():
    keys = jax.random.split(jax.random.key(4), 3)
    run = functools.partial(play, peer=True)
    batch = jax.jit(jax.vmap(lambda k: run(start(k), *games(k))))(keys)
    loop = [run(start(k), *games(k)) for k in keys]
    stacked = jax.tree.map(lambda *x: np.stack(x), *loop)
    for got, want in zip(jax.tree.leaves(batch), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_no_number_is_nan_when_every_judge_fails():
    first, second, scores, mask = games(jax.random.key(5))
    end, outcome = play(start(), first, second, jnp.full(scores.shape, jnp.nan), mask, peer=True)
    assert not outcome.valid.any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((end, outcome)))
    np.testing.assert_array_equal(end.ratings, start().ratings)


def test_errors():
    first, second, scores, mask = games(jax.random.key(0))
    with pytest.raises(ValueError, match="one judge a model"):
        duels.play(start(), first, second, scores[:, :, :3], mask[:, :, :3], peer=True)
    with pytest.raises(ValueError, match="weighting"):
        duels.play(start(), first, second, scores, mask, peer=True, weighting="median")


def test_wins_count_ties_as_halves():
    first, second = jnp.array([0, 1, 0, 0, 2]), jnp.array([1, 0, 1, 2, 2])
    scores = jnp.array([[8.0, 2.0], [3.0, 3.0], [NAN, 1.0], [1.0, 9.0], [4.0, 4.0]])
    table = bradley_terry.wins(first, second, scores, jnp.array([True, True, False, True, True]), 3)
    np.testing.assert_array_equal(table, [[0, 1.5, 0], [0.5, 0, 0], [1, 0, 0]])


def test_two_models_have_the_closed_form(x64):
    theta = strengths(jnp.array([[0.0, 30.0], [10.0, 0.0]]), prior_precision=1e-9)
    np.testing.assert_allclose(theta[0] - theta[1], np.log(3.0), rtol=1e-6)


WINS = {
    "separable": np.triu(np.full((4, 4), 50.0), 1),
    "nobody met": np.zeros((4, 4)),
    "mixed": np.array([[0, 3, 9, 2], [1, 0, 7, 0], [0.5, 2, 0, 40], [5, 0, 1, 0]]),
}


@pytest.mark.parametrize("name", WINS)
def test_strengths_are_a_stationary_point_with_mean_0(name, x64):
    table = jnp.array(WINS[name])
    with jax.debug_nans(True):
        theta = strengths(table)

    def log_posterior(theta):
        return jnp.sum(table * jax.nn.log_sigmoid(theta[:, None] - theta[None])) - 0.05 * jnp.sum(theta**2)

    np.testing.assert_allclose(jax.grad(log_posterior)(theta), 0.0, atol=1e-8)
    np.testing.assert_allclose(theta.mean(), 0.0, atol=1e-12)
    if name == "separable":
        assert (jnp.diff(theta) < 0).all()


def test_strengths_recover_the_order_of_known_skills_and_vmap():
    skills = jnp.linspace(1.5, -1.5, M)

    @jax.jit
    def run(key):
        key_games, key_noise = jax.random.split(key)
        first, second, *_ = games(key_games, num_duels=400)
        won = jax.random.bernoulli(key_noise, jax.nn.sigmoid(skills[first] - skills[second]))
        scores = jnp.stack([won, ~won], axis=1).astype(float)
        return strengths(bradley_terry.wins(first, second, scores, jnp.ones(400, bool), M))

    keys = jax.random.split(jax.random.key(0), 3)
    found = jax.vmap(run)(keys)
    np.testing.assert_allclose(found, jnp.stack([run(k) for k in keys]), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.mean(0), skills, atol=0.4)

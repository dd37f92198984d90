"""The simulated pool: its parts, the whole loop against a plain transcription, and what it should show."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from experiments.benches import population_reference
from stackalign import leader
from stackalign.arena import bradley_terry, matching, population

CONFIG = population.PopulationConfig()
SMALL = population.PopulationConfig(num_models=5, num_instructions=12, num_duels=15)
M, K, D = CONFIG.num_models, CONFIG.num_instructions, CONFIG.num_duels
T, SEEDS = 8, 256
POOL = population.Population(np.array([-2.0, 0.0, 3.0], np.float32), np.array([-1.0, 0.0, 2.0, 5.0], np.float32))


def simulate(key, config=CONFIG, chosen=None, **options):
    chosen = leader.exp3.leader() if chosen is None else chosen
    options = {"schedule": leader.linear, "num_iterations": T, **options}
    return population.simulate(key, config, chosen, leader.draw, leader.composite, **options)


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, None, None))
def many(key, learn_rate, skill_spread):
    return simulate(key, dataclasses.replace(CONFIG, learn_rate=learn_rate, skill_spread=skill_spread))


@functools.cache
def seeds(learn_rate=CONFIG.learn_rate, skill_spread=CONFIG.skill_spread):
    """End states and histories of `SEEDS` runs of the default pool."""
    return jax.tree.map(np.asarray, many(jax.random.split(jax.random.key(0), SEEDS), learn_rate, skill_spread))


def interval(values):
    """Mean of `[N]` and half of its 95 % interval."""
    return np.mean(values), 1.96 * np.std(values, ddof=1) / np.sqrt(len(values))


def rank_correlations(x, y):
    """Spearman's correlation of every row of `[N, m]` without ties."""
    x, y = (scipy.stats.rankdata(v, axis=1) for v in (x, y))
    return np.array([np.corrcoef(a, b)[0, 1] for a, b in zip(x, y, strict=True)])


def test_init():
    pool = population.init(jax.random.key(0), dataclasses.replace(CONFIG, num_instructions=4096))
    assert pool.skills.shape == (M,) and pool.difficulties.shape == (4096,)
    assert (jnp.diff(pool.skills) >= 0).all() and (jnp.diff(pool.difficulties) >= 0).all()
    np.testing.assert_allclose(pool.difficulties.std(), CONFIG.difficulty_spread, rtol=0.05)
    with pytest.raises(ValueError, match="at least 3"):
        population.init(jax.random.key(0), dataclasses.replace(CONFIG, num_models=2))


def test_configuration_is_static():
    assert hash(CONFIG) == hash(population.PopulationConfig()) and CONFIG == population.PopulationConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.num_models = 4


def test_qualities_are_normal_around_skill_less_difficulty():
    models, instructions = np.array([[0, 2]]), np.arange(4)[:, None]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def qualities(key, noise):
        return population.answer_qualities(key, POOL, models, instructions, noise=noise)

    keys = jax.random.split(jax.random.key(0), 4000)
    expected = np.array([[-1.0, 4.0], [-2.0, 3.0], [-4.0, 1.0], [-7.0, -2.0]])
    drawn = qualities(keys, 0.5)
    np.testing.assert_allclose(drawn.mean(0), expected, atol=5 * 0.5 / np.sqrt(4000))
    np.testing.assert_allclose(drawn.std(0), 0.5, rtol=0.1)
    np.testing.assert_array_equal(qualities(keys, 0.0)[0], expected)


@jax.jit
def judged(quality, noise, slope, failure_rate):
    """`[8000, 3]` scores for one quality."""
    scores = population.judge_scores(
        jax.random.key(0), POOL, jnp.full((4000, 2), quality), noise=noise, slope=slope, failure_rate=failure_rate
    )
    return scores.reshape(8000, 3)


def test_judges_see_the_quality_through_noise_that_shrinks_with_their_skill():
    seen = scipy.special.logit((np.asarray(judged(0.3, 0.8, 0.5, 0.0)) - 1) / 9)
    deviations = 0.8 * np.exp([1.0, 0.0, -1.5])
    np.testing.assert_allclose(seen.std(0), deviations, rtol=0.05)
    assert (np.abs(seen.mean(0) - 0.3) < 5 * deviations / np.sqrt(8000)).all()
    np.testing.assert_allclose(judged(0.3, 0.0, 0.5, 0.0), 1 + 9 / (1 + np.exp(-0.3)), rtol=1e-6)


@pytest.mark.parametrize("quality", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_scores_stay_in_their_range(quality):
    scores = judged(quality, 3.0, 0.5, 0.0)
    assert float(scores.min()) >= 1 and float(scores.max()) <= 10


def test_lost_judgements():
    np.testing.assert_allclose(np.isnan(judged(0.0, 1.0, 0.5, 0.25)).mean(0), 0.25, atol=0.025)
    assert np.isnan(judged(0.0, 1.0, 0.5, 1.0)).all()


def test_learning_by_hand():
    instructions, lessons = np.array([1, 3, 1, 0]), np.array([1.0, 1.0, -1.0, 0.0])
    # The two lessons on instruction 1 cancel; the one on instruction 3 remains, a quarter of the duels.
    p = scipy.special.expit(POOL.skills - 5.0)
    learnt = population.learn(POOL, instructions, lessons, rate=0.8)
    np.testing.assert_allclose(learnt.skills, POOL.skills + 0.8 * 4 * p * (1 - p) / 4, rtol=1e-5)
    np.testing.assert_array_equal(learnt.difficulties, POOL.difficulties)


def test_models_learn_most_at_their_edge():
    edge = np.asarray(population.edge(POOL))
    distance = np.abs(POOL.skills[:, None] - POOL.difficulties)
    np.testing.assert_array_equal(np.argsort(-edge, axis=1), np.argsort(distance, axis=1))
    assert edge[1, 1] == 1.0 and (edge > 0).all()


def test_shapes_and_ranges():
    state, history = seeds()
    assert history.probabilities.shape == (SEEDS, T, K) and history.skills.shape == (SEEDS, T, M)
    assert history.ratings.shape == history.deviations.shape == (SEEDS, T, M)
    assert history.edge.shape == history.realised_gap.shape == history.target_gap.shape == (SEEDS, T)
    duels = history.duels
    assert duels.scores.shape == duels.qualities.shape == (SEEDS, T, D, 2)
    assert duels.judged.shape == (SEEDS, T, D, 2, M) and duels.rewards.shape == (SEEDS, T, D)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state, history)))
    np.testing.assert_allclose(history.probabilities.sum(-1), 1.0, rtol=1e-5)
    assert history.probabilities.min() >= 0.2 / K * (1 - 1e-5)
    assert (duels.scores >= 1).all() and (duels.scores <= 10).all() and duels.valid.all()
    assert (duels.rewards >= 0).all() and (duels.rewards <= 1).all()
    assert (duels.first != duels.second).all() and set(np.unique(duels.lessons)) <= {-1.0, 0.0, 1.0}
    np.testing.assert_allclose(history.reward_gap[0], np.linspace(0.6, 0.15, T), rtol=1e-5)
    np.testing.assert_allclose(history.target_gap[0], np.linspace(1.0, 0.0, T), atol=1e-6)
    np.testing.assert_array_equal(state.reputation.counts.sum(-1), 2 * T * D)


class Replay:
    """The draws that a run of ours made, for `population_reference`; the distributions it offers are compared."""

    def __init__(self, key, config, history):
        self.config, self.history = config, history
        self.keys = jax.random.split(jax.random.split(key)[1], len(history.edge))

    def instructions(self, t, probabilities):
        np.testing.assert_allclose(probabilities, self.history.probabilities[t], rtol=1e-9)
        return np.asarray(self.history.duels.instructions[t])

    def opponents(self, t, probabilities):
        # In float64 equal draws from equal distributions; that they are equal is checked on the first duels.
        for d in range(3):
            ours = matching.opponent_probabilities(
                jax.random.key(0),
                self.history.ratings[t],
                self.history.duels.first[t, d],
                target_gap=self.history.target_gap[t],
            )
            np.testing.assert_allclose(probabilities[d], ours, rtol=1e-9)
        return np.asarray(self.history.duels.second[t])

    def answers(self, t):
        return np.asarray(jax.random.normal(jax.random.split(self.keys[t], 4)[2], (self.config.num_duels, 2)))

    def judges(self, t):
        key = jax.random.split(jax.random.split(self.keys[t], 4)[3])[0]
        return np.asarray(jax.random.normal(key, (self.config.num_duels, 2, self.config.num_models)))


def test_the_loop_equals_a_plain_transcription_with_the_same_draws(x64):
    key = jax.random.key(3)
    state, history = jax.jit(functools.partial(simulate, config=SMALL, num_iterations=6))(key)
    settings = population_reference.Settings(
        num_models=SMALL.num_models,
        num_instructions=SMALL.num_instructions,
        num_duels=SMALL.num_duels,
        num_iterations=6,
    )
    start = np.asarray(history.skills[0]), np.asarray(state.population.difficulties)
    found = population_reference.simulate(settings, *start, Replay(key, SMALL, history))
    end = (state.population.skills, state.reputation.ratings, state.reputation.deviations)
    for want, got, last in zip(found, (history.skills, history.ratings, history.deviations), end, strict=False):
        np.testing.assert_allclose(got, want[:-1], rtol=1e-9)
        np.testing.assert_allclose(last, want[-1], rtol=1e-9)
    np.testing.assert_allclose(leader.exp3.probabilities(state.leader), found.probabilities[-1], rtol=1e-9)
    np.testing.assert_allclose(history.duels.scores, found.scores, rtol=1e-9)


def test_the_transcription_with_its_own_draws_agrees_in_distribution():
    settings, gains, ratings = population_reference.Settings(), [], []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        pool = population_reference.population(settings, rng)
        found = population_reference.simulate(settings, *pool, population_reference.NumpyDraws(settings, rng))
        gains.append((found.skills[-1] - found.skills[0]).mean())
        ratings.append(found.ratings[-1].std())
    state, history = seeds()
    ours = (state.population.skills - history.skills[:, 0]).mean(-1), state.reputation.ratings.std(-1)
    for sample, reference in zip(ours, (gains, ratings), strict=True):
        assert scipy.stats.ttest_ind(sample, reference, equal_var=False).pvalue > 1e-3


def test_a_plain_run_equals_its_row_of_the_jitted_and_vmapped_ones():
    plain = simulate(jax.random.split(jax.random.key(0), SEEDS)[5])
    for got, want in zip(*map(jax.tree.leaves, (seeds(), plain)), strict=True):
        np.testing.assert_allclose(got[5], want, rtol=2e-4, atol=2e-5)


def test_better_skill_earns_a_higher_score():
    _, history = seeds()
    duels = history.duels
    skills = np.stack(
        [np.take_along_axis(history.skills, np.asarray(side), axis=2) for side in (duels.first, duels.second)], axis=-1
    )
    better, worse = (
        np.take_along_axis(duels.scores, pick[..., None], axis=-1) for pick in (skills.argmax(-1), skills.argmin(-1))
    )
    mean, half = interval((better - worse).mean((1, 2, 3)))
    assert mean - half > 1.0


def test_equal_skills_are_exchangeable():
    """Nothing but chance tells the models apart: neither their number nor when they are active."""
    state, _ = seeds(learn_rate=0.0, skill_spread=0.0)
    ratings = state.reputation.ratings
    assert ratings.std() > 0.1
    assert scipy.stats.f_oneway(*ratings.T).pvalue > 1e-3
    ranks = scipy.stats.rankdata(ratings, axis=1)
    assert np.abs(ranks.mean(0) - (M + 1) / 2).max() < 4 * np.sqrt((M**2 - 1) / 12 / SEEDS)


def test_no_learning_without_a_learning_rate():
    state, history = seeds(learn_rate=0.0)
    np.testing.assert_array_equal(history.skills, np.broadcast_to(history.skills[:, :1], history.skills.shape))
    np.testing.assert_array_equal(state.population.skills, history.skills[:, 0])
    assert (history.ratings[:, -1] != 100).any()


def test_reputations_recover_the_order_of_the_skills():
    """Measured over these seeds: 0.941 ± 0.008, and Bradley-Terry strengths from the same duels 0.941 ± 0.009."""
    state, history = seeds(learn_rate=0.0)
    ratings = rank_correlations(state.reputation.ratings, state.population.skills)
    duels = jax.tree.map(lambda leaf: leaf.reshape(SEEDS, T * D, *leaf.shape[3:]), history.duels)
    strengths = jax.jit(jax.vmap(lambda *duel: bradley_terry.strengths(bradley_terry.wins(*duel, M))))(
        duels.first, duels.second, duels.scores, duels.valid
    )
    for found in (ratings, rank_correlations(strengths, state.population.skills)):
        mean, half = interval(found)
        assert mean - half > 0.9


def test_the_pool_learns():
    state, history = seeds()
    mean, half = interval((state.population.skills - history.skills[:, 0]).mean(-1))
    assert mean - half > 0.5
    assert (history.duels.lessons > 0).mean() > 0.85


def test_exp3_prefers_instructions_near_the_pools_ability():
    """Against the uniform distribution over the same instructions, for the same skills; ability is the mean skill."""
    state, history = seeds()
    skills = state.population.skills
    p = np.asarray(jax.vmap(leader.exp3.probabilities)(state.leader))
    near = np.abs(state.population.difficulties - skills.mean(-1, keepdims=True)) < 1
    mean, half = interval(((p - 1 / K) * near).sum(-1) / near.mean(-1))
    assert mean - half > 0.03
    edge = np.asarray(jax.vmap(population.edge)(state.population)).mean(1)
    mean, half = interval(((p - 1 / K) * edge).sum(-1))
    assert mean - half > 0.0


def test_the_uniform_leader_stays_uniform():
    _, history = simulate(jax.random.key(0), SMALL, leader.uniform.leader(), num_iterations=3)
    np.testing.assert_array_equal(history.probabilities, np.full((3, SMALL.num_instructions), 1 / 12, np.float32))


def test_the_leader_passed_in_is_used():
    """One that always plays instruction 0 and counts the duels that it is told of; without judges there are none."""

    def update(state, instructions, rewards, valid):
        assert instructions.shape == rewards.shape == valid.shape == (SMALL.num_duels,)
        return state + jnp.sum(valid)

    stubborn = leader.Leader(lambda k: jnp.zeros((), int), lambda _: jnp.eye(SMALL.num_instructions)[0], update)

    @jax.jit
    def run(failure_rate):
        config = dataclasses.replace(SMALL, failure_rate=failure_rate)
        return simulate(jax.random.key(0), config, stubborn, num_iterations=3)

    state, history = run(0.0)
    np.testing.assert_array_equal(history.duels.instructions, 0)
    assert int(state.leader) == 3 * SMALL.num_duels
    state, history = run(1.0)
    assert int(state.leader) == 0 and not history.duels.valid.any()
    np.testing.assert_array_equal(state.reputation.ratings, 100.0)
    np.testing.assert_array_equal(state.population.skills, history.skills[0])


def test_errors():
    with pytest.raises(ValueError, match=r"skills must have shape \(8,\), got \(3,\)"):
        simulate(jax.random.key(0), population=POOL)

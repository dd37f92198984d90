"""A simulated pool: skills and difficulties in place of language models and text.

`simulate` is Algorithm 1 of Stackelberg Alignment: a leader commits to a distribution over instructions, models meet
by their reputations, peers score both answers on [1, 10], reputations move after every duel, the leader learns from
the duels' rewards and the models from the preference pairs. Matching, judging and rating are this room's own
functions. The leader is passed in.

What the paper gets from language models is modelled, and the model is a choice of this module, not the paper's:

* Skill and difficulty are numbers on one logit scale, as in item response theory. There are no topics: a better model
  is better at everything.
* The quality of an answer is skill - difficulty + Gaussian noise, in logits; the score that it deserves is
  `1 + 9 sigmoid(quality)`.
* A judge sees the quality through Gaussian noise whose deviation falls exponentially with the judge's own skill.
  Judges are not biased, do not collude and do not favour their own kind.
* Every pair trains every model (as in the paper). A pair whose chosen answer truly is the better one raises a skill,
  one in the wrong order lowers it by as much, both in proportion to `4 p (1 - p)`, where p = sigmoid(skill -
  difficulty): most where the model would do half well, hardly where the instruction is far too easy or too hard.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from stackalign.arena import duels, matching, reputation

MIN_SCORE, MAX_SCORE = 1.0, 10.0


@dataclasses.dataclass(frozen=True)
class PopulationConfig:
    """One simulated pool. Matching and rating have the paper's defaults; sizes of the noises and of learning are ours.

    Attributes:
      num_models: m >= 3, so that every duel has a judge.
      num_instructions: K >= 1.
      num_duels: D >= 1, in each iteration.
      skill_spread: standard deviation of the first skills around 0, in logits, >= 0.
      difficulty_spread: standard deviation of the difficulties around 0, in logits, >= 0.
      answer_noise: standard deviation of an answer's quality around skill - difficulty, in logits, >= 0.
      judge_noise: standard deviation of what a judge of skill 0 sees around the quality, in logits, >= 0.
      judge_slope: how fast that falls with skill: a judge's noise is `judge_noise exp(-judge_slope skill)`; 0 makes all
        judges equally good.
      failure_rate: probability in [0, 1] that a judgement is lost, as a reply that cannot be parsed is.
      learn_rate: logits that a skill gains in an iteration if every pair is right and at the model's edge; 0 keeps all
        skills as they are.
      reward_gap: target score gap of the leader's reward at the start and the end, shares of the score range
        (equation 3).
      strategy: one of `matching.STRATEGIES`' functions.
      target_gap: target gap of the matching at the start and the end (equation 3, `matching.TARGET_GAPS`).
      bandwidth: sigma_g of equation 7.
      num_opponents: n_opp, 0 for the strategy's own default.
      random_rate: p_rand in [0, 1].
      rating: constants of the rating (equations 9 to 11).
      weighting: "reputation" for equation 8, "mean" for equal judge weights.
    """

    num_models: int = 8
    num_instructions: int = 64
    num_duels: int = 64
    skill_spread: float = 1.0
    difficulty_spread: float = 2.0
    answer_noise: float = 1.0
    judge_noise: float = 1.0
    judge_slope: float = 0.5
    failure_rate: float = 0.0
    learn_rate: float = 0.3
    reward_gap: tuple[float, float] = (0.6, 0.15)
    strategy: matching.Strategy = matching.schedule_decreasing
    target_gap: tuple[float, float] = (1.0, 0.0)
    bandwidth: float = 0.15
    num_opponents: int = 0
    random_rate: float = 0.2
    rating: reputation.ReputationConfig = reputation.PAPER
    weighting: str = "reputation"


class Population(NamedTuple):
    """skills: `[m]`. difficulties: `[K]`. Both in logits, on one scale."""

    skills: jax.Array
    difficulties: jax.Array


class Duels(NamedTuple):
    """The record J of one iteration: D duels in order.

    instructions: `[D]` int32 in [0, K).
    first, second: `[D]` int32 in [0, m), active model and opponent.
    qualities: `[D, 2]` true qualities of both answers, logits. No model and no rating ever sees them.
    judged: `[D, 2, m]` raw scores in [1, 10], NaN where the judgement was lost; those of the combatants do not count.
    scores: `[D, 2]` aggregated scores (equation 8), 0 where nobody scored the answer.
    valid: `[D]` bool, whether both answers have a score.
    rewards: `[D]` the leader's reward; of no meaning where not valid.
    lessons: `[D]` +1 for a pair whose chosen answer truly is the better, -1 for one that has them the wrong way round,
      0 where there is no pair (a tie, or not valid).
    """

    instructions: jax.Array
    first: jax.Array
    second: jax.Array
    qualities: jax.Array
    judged: jax.Array
    scores: jax.Array
    valid: jax.Array
    rewards: jax.Array
    lessons: jax.Array


class History(NamedTuple):
    """Row t of every array is iteration t; what changes is as it stood when the iteration began.

    probabilities: `[T, K]` what the leader committed to.
    skills: `[T, m]` logits.
    ratings: `[T, m]` R.
    deviations: `[T, m]` sigma.
    reward_gap: `[T]` the leader's target, a share of the score range.
    target_gap: `[T]` the matching's target.
    realised_gap: `[T]` mean relative gap (equation 6) between the models that met.
    edge: `[T]` in [0, 1], mean over models of `edge` at the instructions that the leader plays, in expectation: the
      share of the largest possible progress that its distribution allows.
    duels: `Duels` with `[T, ...]` fields.
    """

    probabilities: jax.Array
    skills: jax.Array
    ratings: jax.Array
    deviations: jax.Array
    reward_gap: jax.Array
    target_gap: jax.Array
    realised_gap: jax.Array
    edge: jax.Array
    duels: Duels


class SimulationState(NamedTuple):
    """population: skills and difficulties. leader: the leader's own state. reputation: ratings of the m models."""

    population: Population
    leader: Any
    reputation: reputation.ReputationState


def init(key: jax.Array, config: PopulationConfig) -> Population:
    """Gaussian skills and difficulties around 0, each in ascending order, so that an index is a rank.

    Args:
      key: PRNG key, consumed.
      config: sizes and spreads.

    Raises:
      ValueError: fewer than three models, which leaves a duel without a judge.
    """
    if config.num_models < 3:
        raise ValueError(f"peers judge, so num_models must be at least 3, got {config.num_models}")
    skill_key, difficulty_key = jax.random.split(key)
    skills = config.skill_spread * jax.random.normal(skill_key, (config.num_models,))
    difficulties = config.difficulty_spread * jax.random.normal(difficulty_key, (config.num_instructions,))
    return Population(jnp.sort(skills), jnp.sort(difficulties))


def answer_qualities(
    key: jax.Array, population: Population, models: jax.Array, instructions: jax.Array, *, noise: float = 1.0
) -> jax.Array:
    """Draws the quality of one answer of each model to each instruction.

    Args:
      key: PRNG key, consumed: standard normal draws of the result's shape.
      population: skills and difficulties.
      models: `[...]` int in [0, m).
      instructions: `[...]` int in [0, K), of a shape that broadcasts with `models`.
      noise: standard deviation, logits.

    Returns:
      `[...]` logits; `expected_score` of it is what the answer deserves.
    """
    mean = population.skills[models] - population.difficulties[instructions]
    return mean + noise * jax.random.normal(key, mean.shape, mean.dtype)


def expected_score(quality: jax.Array) -> jax.Array:
    """The score in [1, 10] that an answer of this quality `[...]` (logits) deserves: `1 + 9 sigmoid(quality)`."""
    return MIN_SCORE + (MAX_SCORE - MIN_SCORE) * jax.nn.sigmoid(quality)


def judge_scores(
    key: jax.Array,
    population: Population,
    qualities: jax.Array,
    *,
    noise: float = 1.0,
    slope: float = 0.5,
    failure_rate: float = 0.0,
) -> jax.Array:
    """Lets every model score every answer, independently, also its own (which `duels.play` leaves out).

    Args:
      key: PRNG key, consumed: split in two, standard normal draws from the first half, failures from the second.
      population: the judges' skills `[m]`.
      qualities: `[D, 2]` logits.
      noise: standard deviation, logits, of what a judge of skill 0 sees around the quality.
      slope: per logit of skill; a judge's noise is `noise exp(-slope skill)`.
      failure_rate: probability that a judgement is lost.

    Returns:
      `[D, 2, m]` raw scores in [1, 10], NaN where lost.
    """
    chex.assert_rank(qualities, 2)
    noise_key, failure_key = jax.random.split(key)
    shape = (*qualities.shape, population.skills.shape[0])
    deviations = noise * jnp.exp(-slope * population.skills)
    seen = qualities[..., None] + deviations * jax.random.normal(noise_key, shape, qualities.dtype)
    lost = jax.random.bernoulli(failure_key, failure_rate, shape)
    return jnp.where(lost, jnp.nan, expected_score(seen))


def edge(population: Population) -> jax.Array:
    """`[m, K]` in [0, 1]: `4 p (1 - p)` at p = sigmoid(skill - difficulty), 1 where they are equal."""
    p = jax.nn.sigmoid(population.skills[:, None] - population.difficulties[None, :])
    return 4.0 * p * (1.0 - p)


def learn(population: Population, instructions: jax.Array, lessons: jax.Array, *, rate: float = 0.3) -> Population:
    """Every model learns from every pair: `skill_i += rate mean_d(lesson_d edge_{i, k_d})`.

    Args:
      population: skills and difficulties.
      instructions: `[D]` int, what the pairs answer.
      lessons: `[D]` in {-1, 0, 1}, see `Duels`.
      rate: logits.
    """
    chex.assert_rank([instructions, lessons], 1)
    gains = jnp.mean(lessons * edge(population)[:, instructions], axis=1)
    return population._replace(skills=population.skills + rate * gains)


def simulate(
    key: jax.Array,
    config: PopulationConfig,
    leader: Any,
    draw: Callable[[jax.Array, jax.Array, int], jax.Array],
    reward: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    *,
    schedule: Callable[[jax.Array, float, float], jax.Array],
    num_iterations: int = 8,
    population: Population | None = None,
) -> tuple[SimulationState, History]:
    """Runs the pool for T iterations as one scan.

    Under `jit` all but `key` and `population` is static. A caller that closes over the rest may trace numeric fields of
    the configuration, to `vmap` over a noise or a rate without compiling again.

    As in the batched form of Algorithm 1, opponents of an iteration are drawn from the ratings at its start and its
    skills stand still; ratings and judge weights move duel by duel.

    Args:
      key: PRNG key, consumed: split into one for `init` and one for the run, the latter into one an iteration, and
        that into those of the draw, the matching, the answers and the judges. `vmap` over it for several seeds.
      config: sizes, noises and rules.
      leader: any record with `init(K) -> state`, `probabilities(state) -> [K]` and
        `update(state, instructions [D], rewards [D], valid [D]) -> state`, for example `leader.exp3.leader()`.
      draw: `(key, probabilities [K], D) -> [D]` instructions, for example `leader.draw`.
      reward: `(scores [D], scores [D], target gap) -> [D]` in [0, 1], for example `leader.composite`.
      schedule: `(progress [T] in [0, 1], start, end) -> [T]`, both target gaps over the run, for example
        `leader.linear`.
      num_iterations: T >= 1.
      population: where to start; `init` of the key where None.

    Returns:
      The state after the last iteration, and the history.

    Raises:
      ValueError: as in `init` and `duels.play`, or a population of other sizes than the configuration's.
    """
    init_key, run_key = jax.random.split(key)
    fresh = init(init_key, config)
    population = fresh if population is None else population
    for name, has, wants in zip(Population._fields, population, fresh, strict=True):
        if has.shape != wants.shape:
            raise ValueError(f"{name} must have shape {wants.shape}, got {has.shape}")
    all_judges = jnp.ones((config.num_duels, 2, config.num_models), bool)

    def step(state: SimulationState, inputs):
        key, iteration, reward_gap, target_gap = inputs
        draw_key, match_key, answer_key, judge_key = jax.random.split(key, 4)
        pool, ratings = state.population, state.reputation.ratings

        probabilities = leader.probabilities(state.leader)
        instructions = draw(draw_key, probabilities, config.num_duels)
        first = matching.active_models(iteration, config.num_duels, config.num_models)
        second = matching.sample_opponents(
            match_key,
            ratings,
            first,
            target_gap=target_gap,
            strategy=config.strategy,
            bandwidth=config.bandwidth,
            num_opponents=config.num_opponents,
            random_rate=config.random_rate,
        )
        gaps = jax.vmap(matching.relative_gaps, (None, 0))(ratings, first)
        realised = jnp.mean(jnp.take_along_axis(gaps, second[:, None], axis=1))

        combatants = jnp.stack([first, second], axis=1)
        qualities = answer_qualities(answer_key, pool, combatants, instructions[:, None], noise=config.answer_noise)
        judged = judge_scores(
            judge_key,
            pool,
            qualities,
            noise=config.judge_noise,
            slope=config.judge_slope,
            failure_rate=config.failure_rate,
        )
        rating, outcome = duels.play(
            state.reputation,
            first,
            second,
            judged,
            all_judges,
            peer=True,
            weighting=config.weighting,
            config=config.rating,
        )

        rewards = reward(outcome.scores[:, 0], outcome.scores[:, 1], reward_gap)
        seen, true = (jnp.sign(pair[:, 0] - pair[:, 1]) for pair in (outcome.scores, qualities))
        lessons = jnp.where(outcome.valid, seen * true, 0.0)
        new_state = SimulationState(
            learn(pool, instructions, lessons, rate=config.learn_rate),
            leader.update(state.leader, instructions, rewards, outcome.valid),
            rating,
        )
        record = Duels(instructions, first, second, qualities, judged, outcome.scores, outcome.valid, rewards, lessons)
        row = History(
            probabilities=probabilities,
            skills=pool.skills,
            ratings=ratings,
            deviations=state.reputation.deviations,
            reward_gap=reward_gap,
            target_gap=target_gap,
            realised_gap=realised,
            edge=jnp.mean(edge(pool) @ probabilities),
            duels=record,
        )
        return new_state, row

    start = SimulationState(
        population, leader.init(config.num_instructions), reputation.init(config.num_models, config.rating)
    )
    progress = jnp.linspace(0.0, 1.0, num_iterations)
    inputs = (
        jax.random.split(run_key, num_iterations),
        jnp.arange(num_iterations),
        schedule(progress, *config.reward_gap),
        schedule(progress, *config.target_gap),
    )
    return jax.lax.scan(step, start, inputs)

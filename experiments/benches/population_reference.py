"""The simulated pool of `stackalign.arena.population` once more, in plain Python and NumPy, one duel at a time.

Written from the paper's equations (Stackelberg Alignment, Algorithm 1, equations 1 to 11) and the module's model of a
pool, with loops where the paper has loops and none of the library's code: the reference of the benchmark, and an
independent check of the arithmetic. Default rules only: EXP3, linear schedules, `schedule_decreasing`, the `paper`
rating, no lost judgement.
"""

import dataclasses
import math
from typing import NamedTuple, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, noises and constants; the names of `population.PopulationConfig` and of the paper's symbols."""

    num_models: int = 8
    num_instructions: int = 64
    num_duels: int = 64
    num_iterations: int = 8
    skill_spread: float = 1.0
    difficulty_spread: float = 2.0
    answer_noise: float = 1.0
    judge_noise: float = 1.0
    judge_slope: float = 0.5
    learn_rate: float = 0.3
    gamma: float = 0.2
    eta: float = 0.2
    difficulty_weight: float = 0.3
    preference_weight: float = 0.7
    threshold: float = 3.0
    bandwidth: float = 0.15
    random_rate: float = 0.2
    reward_gap: tuple[float, float] = (0.6, 0.15)
    target_gap: tuple[float, float] = (1.0, 0.0)


class Draws(Protocol):
    """Where chance comes from; t is the iteration."""

    def instructions(self, t: int, probabilities: np.ndarray) -> np.ndarray:
        """`[D]` instructions from `probabilities` `[K]`."""

    def opponents(self, t: int, probabilities: np.ndarray) -> np.ndarray:
        """`[D]` opponents, each from its row of `probabilities` `[D, m]`."""

    def answers(self, t: int) -> np.ndarray:
        """`[D, 2]` standard normal."""

    def judges(self, t: int) -> np.ndarray:
        """`[D, 2, m]` standard normal."""


class NumpyDraws:
    """Draws of a NumPy generator."""

    def __init__(self, settings: Settings, rng: np.random.Generator):
        self.settings, self.rng = settings, rng

    def instructions(self, t, probabilities):
        return self.rng.choice(len(probabilities), size=self.settings.num_duels, p=probabilities)

    def opponents(self, t, probabilities):
        return np.array([self.rng.choice(len(p), p=p) for p in probabilities])

    def answers(self, t):
        return self.rng.standard_normal((self.settings.num_duels, 2))

    def judges(self, t):
        return self.rng.standard_normal((self.settings.num_duels, 2, self.settings.num_models))


class Result(NamedTuple):
    """skills, ratings, deviations: `[T + 1, m]`; probabilities: `[T + 1, K]`; scores: `[T, D, 2]`. Last is the end."""

    skills: np.ndarray
    ratings: np.ndarray
    deviations: np.ndarray
    probabilities: np.ndarray
    scores: np.ndarray


class Rating:
    """Equations 9 to 11 with the constants of the `paper` preset."""

    def __init__(self, num_models: int):
        self.ratings = [100.0] * num_models
        self.deviations = [0.5] * num_models
        self.deltas: list[list[float]] = [[] for _ in range(num_models)]
        self.counts = [0] * num_models

    def update(self, first: int, second: int, score_first: float, score_second: float) -> None:
        spread = math.hypot(self.deviations[first], self.deviations[second])
        z = (self.ratings[first] - self.ratings[second]) / spread
        surprise = max(abs(normal_cdf(z) - normal_cdf(-z)), 0.01)
        for model, gap in ((first, score_first - score_second), (second, score_second - score_first)):
            self.counts[model] += 1
            k = max(5.0, 10.0 * 0.9 ** (self.counts[model] // 10))
            change = k / 20.0 * gap * math.tanh(self.deviations[model]) * surprise
            change = max(change, 10.0 - self.ratings[model])
            self.ratings[model] += change
            self.deltas[model] = (self.deltas[model] + [change])[-20:]
            if len(self.deltas[model]) > 1:
                self.deviations[model] = max(float(np.std(self.deltas[model], ddof=1)), 0.1)


def normal_cdf(x: float) -> float:
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def linear(t: int, num_iterations: int, start: float, end: float) -> float:
    """Equation 3."""
    return end + (start - end) * (1.0 - t / max(num_iterations - 1, 1))


def opponent_probabilities(ratings: list[float], active: int, target: float, settings: Settings) -> np.ndarray:
    """Equations 6 and 7, mixed with the uniform distribution."""
    gaps = np.abs(np.array(ratings) - ratings[active])
    if gaps.max() > 0:
        gaps = gaps / gaps.max()
    weights = np.exp(-((gaps - target) ** 2) / (2 * settings.bandwidth**2))
    weights[active] = 0.0
    uniform = np.full(len(ratings), 1 / (len(ratings) - 1))
    uniform[active] = 0.0
    return (1 - settings.random_rate) * weights / weights.sum() + settings.random_rate * uniform


def leader_reward(score_a: float, score_b: float, target: float, settings: Settings) -> float:
    """Equations 2 and 4, averaged over both combatants."""
    close = math.exp(-((abs(score_a - score_b) / 9 - target) ** 2) / (2 * settings.bandwidth**2))
    total = 0.0
    for score in (score_a, score_b):
        hard = (10 - score) / (10 - settings.threshold) if score >= settings.threshold else 0.0
        total += settings.difficulty_weight * hard + settings.preference_weight * close
    return total / 2


def population(settings: Settings, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Skills `[m]` and difficulties `[K]`, ascending."""
    skills = settings.skill_spread * rng.standard_normal(settings.num_models)
    difficulties = settings.difficulty_spread * rng.standard_normal(settings.num_instructions)
    return np.sort(skills), np.sort(difficulties)


def simulate(settings: Settings, skills: np.ndarray, difficulties: np.ndarray, draws: Draws) -> Result:
    """All iterations of one pool from skills `[m]` and difficulties `[K]`."""
    num_models, num_instructions = len(skills), len(difficulties)
    skills, rating = np.array(skills, float), Rating(num_models)
    log_weights = np.zeros(num_instructions)
    rows, all_scores = [], []

    def distribution() -> np.ndarray:
        weights = np.exp(log_weights - log_weights.max())
        return (1 - settings.gamma) * weights / weights.sum() + settings.gamma / num_instructions

    for t in range(settings.num_iterations):
        reward_target = linear(t, settings.num_iterations, *settings.reward_gap)
        match_target = linear(t, settings.num_iterations, *settings.target_gap)
        p = distribution()
        rows.append((skills.copy(), list(rating.ratings), list(rating.deviations), p))
        instructions = draws.instructions(t, p)
        first = [(t * settings.num_duels + d) % num_models for d in range(settings.num_duels)]
        second = draws.opponents(
            t, np.array([opponent_probabilities(rating.ratings, a, match_target, settings) for a in first])
        )
        answer_noise, judge_noise = draws.answers(t), draws.judges(t)
        eyes = settings.judge_noise * np.exp(-settings.judge_slope * skills)
        progress, gains = np.zeros(num_instructions), np.zeros(num_models)
        scores = np.zeros((settings.num_duels, 2))
        for d, (a, b, k) in enumerate(zip(first, second, instructions, strict=True)):
            qualities = np.array([skills[a], skills[b]]) - difficulties[k] + settings.answer_noise * answer_noise[d]
            judges = [j for j in range(num_models) if j not in (a, b)]
            weights = np.array([rating.ratings[j] for j in judges])
            for side in (0, 1):
                raw = 1 + 9 * sigmoid(qualities[side] + eyes[judges] * judge_noise[d, side, judges])
                scores[d, side] = weights @ raw / weights.sum()
            rating.update(a, b, *scores[d])
            progress[k] += leader_reward(*scores[d], reward_target, settings) / p[k]
            lesson = np.sign(scores[d, 0] - scores[d, 1]) * np.sign(qualities[0] - qualities[1])
            half_well = sigmoid(skills - difficulties[k])
            gains += lesson * 4 * half_well * (1 - half_well)
        log_weights += settings.eta / num_instructions * progress
        skills = skills + settings.learn_rate * gains / settings.num_duels
        all_scores.append(scores)
    rows.append((skills, rating.ratings, rating.deviations, distribution()))
    return Result(*(np.array(column) for column in zip(*rows, strict=True)), np.array(all_scores))

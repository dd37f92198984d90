"""Statistics of evaluations: macro-averages and marks, intervals, bootstraps, AUROC, win rates.

NumPy arrays (or what `np.asarray` takes) in, NumPy arrays out, everything in float64. Whatever is random takes a `seed`
and gives the same numbers for it. Every function raises ValueError, naming the argument, for empty, NaN, out-of-range
or mismatched input. "The paper" is Stackelberg Alignment; its tables are reproduced in the tests.
"""

import operator
from typing import NamedTuple

import jax
import numpy as np
import scipy.stats
from numpy.typing import ArrayLike

from stackalign import preference

_auroc = jax.jit(preference.auroc)

# Entries that one batch of a bootstrap holds: bounds its memory, 8 bytes each.
_BATCH_ENTRIES = 4_000_000


class Interval(NamedTuple):
    """Ends of confidence intervals, float64 of one shape (scalars for scalar input)."""

    low: np.ndarray
    high: np.ndarray


class Bootstrap(NamedTuple):
    """A mean with its percentile interval: `estimate`, `low`, `high`."""

    estimate: float
    low: float
    high: float


class PairedBootstrap(NamedTuple):
    """Two models on the same rows.

    difference: mean(first) - mean(second). low, high: its percentile interval. p_value: two-sided, in (0, 1], of the
    hypothesis that the difference is 0.
    """

    difference: float
    low: float
    high: float
    p_value: float


class WinRates(NamedTuple):
    """Duels between m models; entry (i, j) is of row model i against column model j, the diagonal is empty.

    wins: `[m, m]` int. draws, games: `[m, m]` int, symmetric; `wins + wins.T + draws == games`. win_rate, draw_rate:
    `[m, m]` shares of the games, a draw being no win; NaN where two models never met.
    """

    wins: np.ndarray
    draws: np.ndarray
    games: np.ndarray
    win_rate: np.ndarray
    draw_rate: np.ndarray


class FollowingMeans(NamedTuple):
    """Accuracies of IFEval. prompt: share of prompts whose every instruction is followed. instruction: share of
    instructions that are followed. num_prompts, num_instructions: the denominators."""

    prompt: float
    instruction: float
    num_prompts: int
    num_instructions: int


# Tables of methods by datasets.


def macro_average(
    scores: ArrayLike, available: ArrayLike | None = None, *, rescaled: ArrayLike | None = None
) -> np.ndarray:
    """Mean over the datasets that a method has, as the column Avg of the paper's table 1.

    Args:
      scores: `[M, T]` of the M methods compared within one pool on T datasets, in [0, 1] but for rescaled datasets.
      available: `[M, T]` bool, False where a method does not apply ("–" in the table) and its score is not read;
        default all. A dataset that no method has counts for none.
      rescaled: `[T]` bool, datasets on another scale (AlpacaEval): min-max normalised over the methods that have
        them, so the average of a method depends on the methods it is compared with. Default none.

    Returns:
      `[M]` in [0, 1].

    Raises:
      ValueError: a method without any dataset, a score outside [0, 1] on a dataset that is not rescaled, or fewer
        than two different scores on one that is.
    """
    scores = _array("scores", scores, ndim=2, finite=False)
    available = _mask("available", available, scores.shape)
    rescaled = _flags("rescaled", np.zeros(scores.shape[1], bool) if rescaled is None else rescaled)
    _same_shape("rescaled", rescaled, "a row of scores", scores[0])
    _require(np.isfinite(scores[available]).all(), "scores must be finite where they are available")
    _require(available.any(1).all(), "every method needs a score on at least one dataset", ~available.any(1))
    outside = available & ~rescaled & ~((scores >= 0.0) & (scores <= 1.0))
    _require(not outside.any(), "scores must be in [0, 1] on a dataset that is not rescaled", outside)
    low = np.min(scores, axis=0, where=available, initial=np.inf)
    high = np.max(scores, axis=0, where=available, initial=-np.inf)
    flat = rescaled & available.any(0) & ~(low < high)
    _require(not flat.any(), "min-max normalisation needs two methods with different scores on a dataset", flat)
    low, spread = np.where(rescaled, low, 0.0), np.where(rescaled, high - low, 1.0)
    unit = (np.where(available, scores, 0.0) - low) / np.where(spread > 0.0, spread, 1.0)
    return np.mean(unit, axis=1, where=available)


def significance_marks(
    estimates: ArrayLike, lows: ArrayLike, baselines: ArrayLike, available: ArrayLike | None = None
) -> np.ndarray:
    """Marks of the paper's table 2: 1 (`*`) for an estimate above every baseline, 2 (`**`) if its interval is too.

    Both comparisons are strict: a method that equals the best baseline has no mark. The baselines' own noise does not
    enter, so this is weaker than a test of the difference (`paired_bootstrap`).

    Args:
      estimates: `[T]` of one method on T datasets.
      lows: `[T]` lower ends of their intervals.
      baselines: `[B, T]` estimates of the baselines.
      available: `[B, T]` bool, False where a baseline does not apply; default all.

    Returns:
      `[T]` int in {0, 1, 2}; `"*" * mark` prints it.

    Raises:
      ValueError: a dataset without any baseline.
    """
    estimates, lows = _array("estimates", estimates, ndim=1), _array("lows", lows, ndim=1)
    baselines = _array("baselines", baselines, ndim=2, finite=False)
    available = _mask("available", available, baselines.shape)
    _same_shape("lows", lows, "estimates", estimates)
    _same_shape("a row of baselines", baselines[0], "estimates", estimates)
    _require(np.isfinite(baselines[available]).all(), "baselines must be finite where they are available")
    _require(available.any(0).all(), "every dataset needs at least one baseline", ~available.any(0))
    best = np.max(baselines, axis=0, where=available, initial=-np.inf)
    above = estimates > best
    return above.astype(int) + (above & (lows > best))


# Intervals of one estimate.


def monte_carlo_bernoulli(
    estimates: ArrayLike, sizes: ArrayLike, *, level: float = 0.95, num_draws: int = 10_000, seed: int = 0
) -> Interval:
    """The paper's interval of an accuracy: percentiles of the accuracy of `size` Bernoulli(estimate) answers.

    It is a parametric bootstrap: no wider than a point at an estimate of 0 or 1, where `clopper_pearson` still is. It
    contains the estimate where that is a whole number of right answers out of `size`.

    Args:
      estimates: `[...]` accuracies in [0, 1].
      sizes: `[...]` int, questions in the test set, at least 1; broadcast against `estimates`.
      level: confidence in (0, 1).
      num_draws: test sets drawn for each estimate; `[num_draws, ...]` is held in memory.
      seed: of the draws, non-negative.
    """
    estimates, sizes = _broadcast("estimates", _array("estimates", estimates), "sizes", _whole("sizes", sizes, 1))
    _require(((estimates >= 0.0) & (estimates <= 1.0)).all(), "estimates must be in [0, 1]")
    _check_resampling("num_draws", num_draws, level)
    draws = np.random.default_rng(seed).binomial(sizes, estimates, (num_draws, *estimates.shape)) / sizes
    return _percentiles(draws, level)


def monte_carlo_gaussian(
    estimates: ArrayLike,
    sizes: ArrayLike,
    *,
    deviation: float = 5.0,
    level: float = 0.95,
    num_draws: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The paper's interval of a mean reward (AlpacaEval): percentiles of N(estimate, deviation^2 / size).

    Args:
      estimates: `[...]` finite means.
      sizes: `[...]` int, rewards behind each mean, at least 1; broadcast against `estimates`.
      deviation: standard deviation of one reward, above 0. The paper assumes 5; a measured one is better.
      level: confidence in (0, 1).
      num_draws: means drawn for each estimate; `[num_draws, ...]` is held in memory.
      seed: of the draws, non-negative.
    """
    estimates, sizes = _broadcast("estimates", _array("estimates", estimates), "sizes", _whole("sizes", sizes, 1))
    _require(0.0 < deviation < np.inf, f"deviation must be above 0 and finite, got {deviation}")
    _check_resampling("num_draws", num_draws, level)
    noise = np.random.default_rng(seed).standard_normal((num_draws, *estimates.shape))
    return _percentiles(estimates + deviation / np.sqrt(sizes) * noise, level)


def wilson(successes: ArrayLike, trials: ArrayLike, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion, without continuity correction: covers about `level` on average.

    Args:
      successes: `[...]` int in [0, trials].
      trials: `[...]` int, at least 1; broadcast against `successes`.
      level: confidence in (0, 1).
    """
    return _binomial_interval(successes, trials, level, "wilson")


def clopper_pearson(successes: ArrayLike, trials: ArrayLike, *, level: float = 0.95) -> Interval:
    """Clopper and Pearson's exact interval of a proportion: covers at least `level`, whatever the proportion.

    Args:
      successes: `[...]` int in [0, trials].
      trials: `[...]` int, at least 1; broadcast against `successes`.
      level: confidence in (0, 1).
    """
    return _binomial_interval(successes, trials, level, "exact")


# Bootstraps.


def cluster_bootstrap(
    values: ArrayLike,
    clusters: ArrayLike | None = None,
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Bootstrap:
    """Mean over rows, with the percentile interval that resamples whole clusters.

    Rows of one prompt (its responses, its triplets) are not independent: resampling them one by one gives an interval
    that is too narrow. A cluster drawn twice counts all its rows twice; each resample's mean is over its rows.
    With few clusters (below about 20) the interval is too narrow still.

    Args:
      values: `[N]` finite.
      clusters: `[N]` labels (int or str), equal for rows of one prompt; default every row on its own.
      level: confidence in (0, 1).
      num_resamples: at least 1.
      seed: of the resampling, non-negative. The labels themselves do not matter, only which rows share one.

    Raises:
      ValueError: fewer than two clusters.
    """
    values = _array("values", values, ndim=1)
    estimate, interval, _ = _resample(values, clusters, level, num_resamples, seed)
    return Bootstrap(estimate, float(interval.low), float(interval.high))


def paired_bootstrap(
    first: ArrayLike,
    second: ArrayLike,
    clusters: ArrayLike | None = None,
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> PairedBootstrap:
    """Difference of two models that answered the same questions, resampling questions (or clusters of them).

    With d the difference and d* that of a resample, the p-value is `(1 + #{|d* - d| >= |d|}) / (1 + resamples)`: how
    often a difference as large would come up if the true one were 0. It is never 0. Exchanging the models
    negates the difference and its interval and keeps the p-value.

    Args:
      first: `[N]` finite scores of one model.
      second: `[N]` of the other, on the same rows.
      clusters: `[N]` labels as in `cluster_bootstrap`; default every row on its own.
      level: confidence in (0, 1).
      num_resamples: at least 1.
      seed: of the resampling, non-negative.

    Raises:
      ValueError: fewer than two clusters.
    """
    first, second = _array("first", first, ndim=1), _array("second", second, ndim=1)
    _same_shape("second", second, "first", first)
    estimate, interval, resamples = _resample(first - second, clusters, level, num_resamples, seed)
    # Rounding must not turn a tie (a resample with d* = 2 d) into less.
    slack = 1e-12 * np.max(np.abs(first - second))
    extreme = np.sum(np.abs(resamples - estimate) >= abs(estimate) - slack)
    p_value = (1 + int(extreme)) / (1 + num_resamples)
    return PairedBootstrap(estimate, float(interval.low), float(interval.high), p_value)


# Rankings, duels, instruction following.


def auroc(positives: ArrayLike, scores: ArrayLike) -> float:
    """Probability that a positive scores above a negative, a tie counting half (`preference.auroc` in float64).

    Args:
      positives: `[N]` bool (or 0 and 1).
      scores: `[N]`, infinities allowed.

    Raises:
      ValueError: no positive or no negative.
    """
    positives, scores = _flags("positives", positives), _array("scores", scores, ndim=1, finite=False)
    _same_shape("scores", scores, "positives", positives)
    _require(not np.isnan(scores).any(), "scores must not be NaN")
    _require(0 < positives.sum() < positives.size, "positives must hold at least one positive and one negative")
    # Whole-number ranks, because an accelerator flushes what is subnormal.
    ranks = np.unique(scores, return_inverse=True)[1]
    with jax.enable_x64(True):
        return float(_auroc(positives, ranks))


def win_rates(
    first: ArrayLike, second: ArrayLike, scores: ArrayLike, *, num_models: int, valid: ArrayLike | None = None
) -> WinRates:
    """Who beats whom, equal scores being draws (figure 6 of the paper).

    Args:
      first: `[D]` int in [0, num_models), first combatants.
      second: `[D]` int, second combatants; a duel of a model with itself does not count.
      scores: `[D, 2]` of the first's and the second's answer.
      num_models: m, at least 1.
      valid: `[D]` bool, False where a duel does not count and its scores are not read; default all.
    """
    _require(operator.index(num_models) >= 1, f"num_models must be at least 1, got {num_models}")
    first, second = _whole("first", first, 0, ndim=1), _whole("second", second, 0, ndim=1)
    scores = _array("scores", scores, ndim=2, finite=False)
    _same_shape("second", second, "first", first)
    _require(scores.shape == (first.size, 2), f"scores must be [{first.size}, 2] like first, found {scores.shape}")
    valid = _mask("valid", valid, first.shape)
    _require(max(first.max(), second.max()) < num_models, f"models must be below num_models = {num_models}")
    _require(np.isfinite(scores[valid]).all(), "scores must be finite where a duel is valid")
    counted, (left, right) = valid & (first != second), scores.T
    ahead, behind, level = (counted & sign for sign in (left > right, left < right, left == right))
    wins, draws = np.zeros((2, num_models, num_models), int)
    np.add.at(wins, (first[ahead], second[ahead]), 1)
    np.add.at(wins, (second[behind], first[behind]), 1)
    np.add.at(draws, (first[level], second[level]), 1)
    draws = draws + draws.T
    games = wins + wins.T + draws
    played = np.where(games > 0, games, np.nan)
    return WinRates(wins, draws, games, wins / played, draws / played)


def following_means(followed: ArrayLike, prompts: ArrayLike) -> FollowingMeans:
    """Prompt-level and instruction-level accuracy (IFEval), from one verdict for each instruction of each prompt.

    An instruction that a prompt gives twice is two rows. Strict and loose verdicts are two calls.

    Args:
      followed: `[I]` bool (or 0 and 1).
      prompts: `[I]` labels (int or str) of the prompts they belong to, in any order.
    """
    followed = _flags("followed", followed)
    prompts = _labels("prompts", prompts, followed.shape)
    size = np.bincount(prompts)
    whole = np.bincount(prompts, followed) == size
    return FollowingMeans(float(whole.mean()), float(followed.mean()), size.size, followed.size)


# Checks and shared parts.


def _resample(
    values: np.ndarray, clusters: ArrayLike | None, level: float, num_resamples: int, seed: int
) -> tuple[float, Interval, np.ndarray]:
    """The mean of `values`, its interval, and the means `[num_resamples]` of resampled clusters."""
    _check_resampling("num_resamples", num_resamples, level)
    clusters = np.arange(values.size) if clusters is None else _labels("clusters", clusters, values.shape)
    sums, sizes = np.bincount(clusters, values), np.bincount(clusters)
    _require(sums.size >= 2, "a bootstrap needs at least two clusters (rows, where none are given)")
    result = scipy.stats.bootstrap(
        (sums, sizes),
        lambda sums, sizes, axis: np.sum(sums, axis) / np.sum(sizes, axis),
        n_resamples=num_resamples,
        batch=max(1, _BATCH_ENTRIES // sums.size),
        vectorized=True,
        paired=True,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(np.sum(sums) / np.sum(sizes)), Interval(*result.confidence_interval), result.bootstrap_distribution


def _binomial_interval(successes: ArrayLike, trials: ArrayLike, level: float, method: str) -> Interval:
    successes, trials = _whole("successes", successes, 0), _whole("trials", trials, 1)
    successes, trials = _broadcast("successes", successes, "trials", trials)
    _require((successes <= trials).all(), "successes must not exceed trials")
    _check_level(level)

    def interval(successes, trials):
        return scipy.stats.binomtest(int(successes), int(trials)).proportion_ci(level, method)

    return Interval(*(end[()] for end in np.vectorize(interval, otypes=[float, float])(successes, trials)))


def _percentiles(draws: np.ndarray, level: float) -> Interval:
    return Interval(*np.quantile(draws, [0.5 - level / 2, 0.5 + level / 2], axis=0))


def _require(holds: bool, message: str, where: np.ndarray | None = None) -> None:
    """Raises ValueError(message) unless it holds; `where` marks the offending entries, the first of which is named."""
    if not holds:
        index = "" if where is None else f" (index {', '.join(map(str, np.argwhere(where)[0]))})"
        raise ValueError(message + index)


def _array(name: str, values: ArrayLike, *, ndim: int | None = None, finite: bool = True) -> np.ndarray:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers in a rectangular array: {error}") from error
    _require(ndim in (None, array.ndim), f"{name} must have {ndim} axes, found shape {array.shape}")
    _require(array.size > 0, f"{name} is empty")
    _require(not finite or bool(np.isfinite(array).all()), f"{name} must be finite", ~np.isfinite(np.atleast_1d(array)))
    return array


def _whole(name: str, values: ArrayLike, minimum: int, *, ndim: int | None = None) -> np.ndarray:
    _array(name, values, ndim=ndim)
    array = np.asarray(values)
    _require(np.issubdtype(array.dtype, np.integer), f"{name} must be whole numbers, found {array.dtype}")
    _require((array >= minimum).all(), f"{name} must be at least {minimum}")
    return array.astype(np.int64)


def _flags(name: str, values: ArrayLike) -> np.ndarray:
    array = _array(name, values, ndim=1)
    _require(np.isin(array, (0.0, 1.0)).all(), f"{name} must be booleans (or 0 and 1)")
    return array.astype(bool)


def _mask(name: str, values: ArrayLike | None, shape: tuple[int, ...]) -> np.ndarray:
    array = np.ones(shape, bool) if values is None else np.asarray(values)
    _require(array.dtype == bool, f"{name} must be booleans, found {array.dtype}")
    _require(array.shape == shape, f"{name} has shape {array.shape}, expected {shape}")
    return array


def _labels(name: str, values: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers 0, 1, … in the order in which the labels first occur, so that what the labels are does not matter."""
    array = np.asarray(values)
    _require(array.shape == shape, f"{name} has shape {array.shape}, expected {shape}")
    _require(array.dtype.kind in "iuU", f"{name} must be whole numbers or strings, found {array.dtype}")
    _, start, label = np.unique(array, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(start))[label]


def _broadcast(name: str, array: np.ndarray, other_name: str, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    try:
        array, other = np.broadcast_arrays(array, other)
    except ValueError as error:
        raise ValueError(f"{other_name} {other.shape} does not broadcast against {name} {array.shape}") from error
    return array, other


def _same_shape(name: str, array: np.ndarray, other_name: str, other: np.ndarray) -> None:
    _require(array.shape == other.shape, f"{name} has shape {array.shape}, {other_name} has {other.shape}")


def _check_level(level: float) -> None:
    _require(0.0 < level < 1.0, f"level must be in (0, 1), got {level}")


def _check_resampling(name: str, count: int, level: float) -> None:
    _require(operator.index(count) >= 1, f"{name} must be at least 1, got {count}")
    _check_level(level)

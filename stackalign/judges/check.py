"""How good a judge is, measured on pairs of a right and a wrong answer."""

from typing import NamedTuple

import chex
import numpy as np
import scipy.stats


class JudgeCheck(NamedTuple):
    """A judge's accuracy on verifiable pairs.

    Attributes:
      accuracy: share of pairs whose right answer scored higher; ties count half, failures count nothing.
      low: lower end of the 95 % Wilson interval.
      high: upper end.
      num_pairs: all pairs, failures included.
      ties: pairs with equal scores.
      failures: pairs with at least one failed score.
      at_chance: whether `low` is at most one half: the judge is not shown to be better than a coin.
    """

    accuracy: float
    low: float
    high: float
    num_pairs: int
    ties: int
    failures: int
    at_chance: bool


def accuracy(scores_right: np.ndarray, scores_wrong: np.ndarray) -> JudgeCheck:
    """Accuracy of a judge that scored right and wrong answers to the same instructions.

    Args:
      scores_right: `[N]` scores of the right answers, NaN for a failed parse.
      scores_wrong: `[N]` scores of the wrong answers, in the same order.

    Raises:
      ValueError: no pairs.
    """
    right, wrong = np.asarray(scores_right, np.float64), np.asarray(scores_wrong, np.float64)
    chex.assert_rank((right, wrong), 1)
    chex.assert_equal_shape((right, wrong))
    total = right.shape[0]
    if not total:
        raise ValueError("a judge check needs at least one pair of a right and a wrong answer")
    failures = int(np.sum(np.isnan(right) | np.isnan(wrong)))
    ties = int(np.sum(right == wrong))
    share = (float(np.sum(right > wrong)) + 0.5 * ties) / total
    low, high = _wilson(share, total)
    return JudgeCheck(share, low, high, total, ties, failures, low <= 0.5)


def _wilson(share: float, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval. Written out because library versions want whole successes, and ties are halves."""
    z = float(scipy.stats.norm.ppf(0.5 + confidence / 2))
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z * np.sqrt(share * (1 - share) / total + z**2 / (4 * total**2)) / (1 + z**2 / total)
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))

import hypothesis
import numpy as np
import pytest
import scipy.stats
from hypothesis import strategies as st

from stackalign.judges import accuracy


@hypothesis.given(st.integers(0, 60), st.integers(0, 60))
@hypothesis.settings(deadline=None, max_examples=50)
def test_the_interval_is_wilsons(wins, losses):
    hypothesis.assume(wins + losses)
    check = accuracy(np.array([7.0] * wins + [3.0] * losses), np.full(wins + losses, 5.0))
    interval = scipy.stats.binomtest(wins, wins + losses).proportion_ci(method="wilson")
    np.testing.assert_allclose([check.low, check.high], interval, atol=1e-12)
    assert check.accuracy == wins / (wins + losses)
    assert check.at_chance == (interval.low <= 0.5)


def test_ties_count_half_and_failures_are_not_right():
    check = accuracy(np.array([8.0, 5.0, np.nan, 9.0, np.nan]), np.array([2.0, 5.0, 3.0, np.nan, np.nan]))
    assert (check.accuracy, check.num_pairs, check.ties, check.failures) == (1.5 / 5, 5, 1, 3)


def test_at_chance():
    assert accuracy(np.full(10, 5.0), np.full(10, 5.0)).at_chance
    assert accuracy(np.full(3, 6.0), np.full(3, 5.0)).at_chance  # three pairs show nothing
    assert not accuracy(np.full(10, 6.0), np.full(10, 5.0)).at_chance


def test_bad_input():
    with pytest.raises(ValueError, match="at least one pair"):
        accuracy(np.array([]), np.array([]))
    with pytest.raises(AssertionError):
        accuracy(np.zeros(3), np.zeros(2))

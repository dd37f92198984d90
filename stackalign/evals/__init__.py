"""Benchmarks: items, scorers, statistics."""

from stackalign.evals import statistics
from stackalign.evals.base import Item, Score

__all__ = ["Item", "Score", "statistics"]

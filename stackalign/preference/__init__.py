"""Preference models under test: candidates for supervision, adversarial triplets, and how well a score finds errors."""

from stackalign.preference import metrics
from stackalign.preference.metrics import (
    SearchMetrics,
    auroc,
    average_precision,
    candidate_threshold,
    is_adversarial,
    is_candidate,
    search_metrics,
)

__all__ = [
    "SearchMetrics",
    "auroc",
    "average_precision",
    "candidate_threshold",
    "is_adversarial",
    "is_candidate",
    "metrics",
    "search_metrics",
]

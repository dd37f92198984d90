"""From answers to numbers: scores of every item, metrics with their intervals, differences between models."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.evaluation.tasks import Task
from stackalign.evals import Score, base, statistics


def interval(metric: base.Metric) -> dict[str, Any]:
    """A metric's value with its 95 % interval, JSON-ready.

    Independent verdicts get Wilson's interval; values that depend, or that are no verdicts, a bootstrap's, of whole
    clusters where there are any. A single value or cluster has no interval.
    """
    values = np.asarray(metric.values, float)
    found: dict[str, Any] = {"value": float(values.mean()), "count": len(values), "kind": metric.kind}
    if metric.kind == "accuracy" and metric.clusters is None:
        low, high = statistics.wilson(int(values.sum()), len(values))
        return {**found, "interval": [float(low), float(high)], "method": "Wilson"}
    if len(values) < 2 or (metric.clusters is not None and len(set(metric.clusters)) < 2):
        return {**found, "interval": None, "method": "none: one value"}
    clusters = None if metric.clusters is None else np.asarray(metric.clusters)
    _, low, high = statistics.cluster_bootstrap(values, clusters)
    method = "bootstrap" if clusters is None else f"bootstrap of {len(set(metric.clusters))} clusters"
    return {**found, "interval": [float(low), float(high)], "method": method}


def of_model(task: Task, answers: Sequence[Mapping[str, Any]], scores: Sequence[Score]) -> dict[str, Any]:
    """What one model reached on one benchmark, JSON-ready.

    Args:
      task: what was asked.
      answers: records in the order of the items: `response`, `finished`, `tokens`, `fault`.
      scores: theirs.
    """
    metrics = task.benchmark.metrics(task.items, scores)
    tokens = [answer["tokens"] for answer in answers if answer["tokens"] is not None]
    by_category: dict[str, list[float]] = {}
    for item, score in zip(task.items, scores, strict=True):
        if isinstance(category := item.facts.get("category") or item.facts.get("country"), str) and category:
            by_category.setdefault(category, []).append(score.value)
    return {
        "metrics": {name: interval(metric) for name, metric in metrics.items()},
        "unparsed": float(np.mean([not score.parsed for score in scores])),
        "cut": float(np.mean([not answer["finished"] and not answer["fault"] for answer in answers])),
        "faults": sum(bool(answer["fault"]) for answer in answers),
        "mean_tokens": float(np.mean(tokens)) if tokens else None,
        "categories": {
            name: {"value": float(np.mean(values)), "count": len(values)}
            for name, values in sorted(by_category.items())
        },
    }


def differences(task: Task, scores: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    """Every model against the first on the headline metric, paired by item."""
    found: dict[str, Any] = {}
    metrics = {label: next(iter(task.benchmark.metrics(task.items, one).values())) for label, one in scores.items()}
    (first, reference), *others = metrics.items()
    for label, metric in others:
        if len(metric.values) < 2:
            continue
        clusters = None if metric.clusters is None else np.asarray(metric.clusters)
        paired = statistics.paired_bootstrap(metric.values, reference.values, clusters)
        found[label] = {"against": first, **{name: float(value) for name, value in paired._asdict().items()}}
    return found


def averages(results: Mapping[str, Any], labels: Sequence[str]) -> dict[str, float]:
    """The paper's average of the headlines of all benchmarks, by model; empty with fewer than two benchmarks.

    Rewards are min-max normalised over the models, so they count only where models differ.
    """
    headlines = [
        [next(iter(result["models"][label]["metrics"].values())) for label in labels] for result in results.values()
    ]
    table = np.array([[one["value"] for one in row] for row in headlines]).T
    rewards = np.array([row[0]["kind"] == "reward" for row in headlines])
    counted = ~rewards | (np.ptp(table, axis=0) > 0)
    if counted.sum() < 2:
        return {}
    found = statistics.macro_average(table[:, counted], rescaled=rewards[counted])
    return dict(zip(labels, map(float, found), strict=True))

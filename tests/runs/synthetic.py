"""A synthetic run folder with known numbers."""

import math

import numpy as np

from stackalign.runs import folder, records


def metrics_rows(agents, num_iterations, num_instructions, *, num_duels=8, seed=0):
    """Lines of metrics.jsonl, iteration 0 included, drawn from a seed."""
    rng = np.random.default_rng(seed)
    ratings = np.full(len(agents), 100.0)
    accuracy = rng.uniform(0.3, 0.5, len(agents))
    log = np.full(num_instructions, -math.log(num_instructions))
    rows = []
    for iteration in range(num_iterations + 1):
        weights = np.exp(log)
        row = {
            "iteration": iteration,
            "validation": dict(zip(agents, accuracy.tolist(), strict=True)),
            "validation_mean": float(accuracy.mean()),
            "leader": {
                "log_weights": log.tolist(),
                "probabilities": (0.8 * weights + 0.2 / num_instructions).tolist(),
            },
            "reputations": dict(zip(agents, ratings.tolist(), strict=True)),
            "deviations": dict.fromkeys(agents, 0.5 if iteration == 0 else 0.1 + 0.05 * iteration),
        }
        if iteration > 0:
            row |= {
                "deviation_floor_share": 0.25,
                "bradley_terry": {agent: float(index) for index, agent in enumerate(agents)},
                "target_gap": 1.0 - (iteration - 1) / max(1, num_iterations - 1),
                "realised_gap": 0.9 - 0.7 * (iteration - 1) / max(1, num_iterations - 1),
                "pairs": num_duels - 2,
                "ties": 1,
                "invalid": 1,
                "parse_failures": {agent: 1 if index == 0 else 0 for index, agent in enumerate(agents)},
                "failures_total": 1,
                "calls": {
                    "generations": 2 * num_duels,
                    "judgements": 2 * num_duels * (len(agents) - 2),
                    "generations_formula": 2 * num_duels,
                    "judgements_formula": 2 * num_duels * (len(agents) - 2),
                    "paper_formula": num_duels * len(agents),
                },
                "loss": {"first": 0.69, "last": 0.6, "mean": 0.65},
                "type_token_ratio": dict.fromkeys(agents, 0.4),
                "response_tokens": dict.fromkeys(agents, 12.5),
                "seconds": {"generate": 1.25, "judge": 0.5 * iteration},
            }
        rows.append(row)
        ratings = ratings + rng.normal(0, 1.5, len(agents))
        accuracy = np.clip(accuracy + rng.normal(0.02, 0.015, len(agents)), 0, 1)
        log = log + rng.normal(0, 0.12, num_instructions)
        log = log - np.log(np.exp(log).sum())
    return rows


def duel_rows(agents, num_iterations, *, num_duels=8, seed=1):
    """Lines of duels.jsonl; of every iteration one is a tie and one has no score."""
    rng = np.random.default_rng(seed)
    rows = []
    for iteration in range(1, num_iterations + 1):
        for duel in range(num_duels):
            first = duel % len(agents)
            second = (first + 1 + int(rng.integers(len(agents) - 1))) % len(agents)
            scores = [round(float(score), 2) for score in rng.uniform(1, 10, 2)]
            if duel == 0:
                scores = [5.0, 5.0]
            valid = duel != 1
            judges = {name: list(scores) for name in agents if name not in (agents[first], agents[second])}
            if not valid:
                scores, judges = [None, None], {name: [None, None] for name in judges}
            rows.append(
                {
                    "iteration": iteration,
                    "duel": duel,
                    "instruction": f"add-{duel}",
                    "models": [agents[first], agents[second]],
                    "answers": ["12", "13"],
                    "finished": [True, True],
                    "judges": judges,
                    "scores": scores,
                    "valid": valid,
                    "parse_failures": 0 if valid else 2,
                }
            )
    return rows


def instruction_rows(count):
    return [
        {
            "id": f"add-{index}",
            "prompt": f"What is {index} + {2 * index}?\nAnswer with the number | only.",
            "answer": str(3 * index),
            "verifier": {"kind": "integer"},
            "topic": "addition",
            "difficulty": 1,
        }
        for index in range(count)
    ]


def write_run(path, agents, *, num_iterations=3, num_instructions=16, config=None):
    """Makes a run folder of synthetic rows and returns (metrics, duels)."""
    metrics = metrics_rows(agents, num_iterations, num_instructions)
    duels = duel_rows(agents, num_iterations)
    with folder.create(path, {"algorithm": "align", "seed": 3, "peer": True} | (config or {})) as run:
        records.write(run.instructions, instruction_rows(num_instructions))
        records.append(run.metrics, metrics)
        records.append(run.duels, duels)
    return metrics, duels

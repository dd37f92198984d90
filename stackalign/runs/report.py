"""The report of a run, made from the files in its folder alone: a summary, a page to read, and figures."""

import json
import math
import os
import pathlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stackalign.runs import figures, folder, records

SUMMARY = "summary.json"
PAGE = "report.md"

MAX_PARSE_FAILURE_RATE = 0.05
MAX_FLOOR_SHARE = 0.5
_PAGE_ROWS = 12  # iterations listed on the page; the summary has them all


def _optional_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    # A run that was killed or is at work may end in a torn line; `checkpoints.resume` cuts it off.
    return records.read(path, allow_torn=True) if path.exists() else []


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _summed(dicts: Iterable[Mapping[str, float] | None]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in dicts:
        for key, value in (one or {}).items():
            if value is not None:
                total[key] = total.get(key, 0) + value
    return total


def _table(rows: Sequence[Mapping[str, Any]], field: str, names: Sequence[str]) -> np.ndarray:
    """[rows, names] of `row[field][name]`, NaN where there is none."""
    cells = [[(row.get(field) or {}).get(name) for name in names] for row in rows]
    return np.array(cells, dtype=float).reshape(len(rows), len(names))


def _last(rows: Sequence[Mapping[str, Any]], field: str) -> Any:
    return next((row[field] for row in reversed(rows) if row.get(field) is not None), None)


def _weights(row: Mapping[str, Any]) -> np.ndarray | None:
    """The leader's weights [K] with sum 1 (before the uniform exploration is mixed in, where both are recorded)."""
    leader = row.get("leader") or {}
    if leader.get("log_weights") is not None:
        log = np.asarray(leader["log_weights"], float)
        weights = np.exp(log - log.max())
        return weights / weights.sum()
    if leader.get("probabilities") is not None:
        return np.asarray(leader["probabilities"], float)
    return None


def _win_rates(duels: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> dict[str, Any]:
    index = {agent: position for position, agent in enumerate(agents)}
    wins, draws, games = np.zeros((3, len(agents), len(agents)), int)
    for duel in duels:
        (first, second), (score, rival) = duel["models"], duel["scores"]
        if not duel["valid"] or score is None or rival is None or first == second:
            continue
        pair = index[first], index[second]
        for table in (games, draws) if score == rival else (games,):
            table[pair] += 1
            table[pair[::-1]] += 1
        if score != rival:
            wins[pair if score > rival else pair[::-1]] += 1
    return {"agents": list(agents), "wins": wins.tolist(), "draws": draws.tolist(), "games": games.tolist()}


def _parse_failures(
    metrics: Sequence[Mapping[str, Any]], duels: Sequence[Mapping[str, Any]], judgements: float
) -> tuple[dict[str, dict[str, float]], float | None]:
    """Failures, attempts and rate by judge, and the rate of all.

    The judgements that were counted are shared out by how many sides of duels each judge stands for: exactly its own
    number where one judgement is one side.
    """
    failures = _summed(row.get("parse_failures") for row in metrics)
    sides = dict.fromkeys(failures, 0)
    for duel in duels:
        first, second = duel["models"]
        for judge, scores in duel["judges"].items():
            kept_out = judge in (first, second) and first != second and all(score is None for score in scores)
            sides[judge] = sides.get(judge, 0) + (0 if kept_out else len(scores))
    scale = judgements / sum(sides.values()) if judgements and sum(sides.values()) else 1.0
    found = {}
    for judge, count in sides.items():
        failed, attempts = failures.get(judge, 0), count * scale
        found[judge] = {"failures": failed, "attempts": attempts, "rate": failed / attempts if attempts else None}
    attempts = sum(row["attempts"] for row in found.values())
    return found, sum(failures.values()) / attempts if attempts else None


def _judge_check(path: pathlib.Path) -> dict[str, dict[str, Any]] | None:
    if not path.exists():
        return None
    rows = json.loads(path.read_text(encoding="utf-8"))
    rows = rows.get("judges", rows)
    fields = ("accuracy", "interval", "at_chance")
    return {judge: {field: row.get(field) for field in fields} for judge, row in rows.items() if isinstance(row, dict)}


def _leader_ends(metrics: Sequence[Mapping[str, Any]], instructions: Sequence[Mapping[str, Any]], count: int = 5):
    weights = next((weights for row in reversed(metrics) if (weights := _weights(row)) is not None), None)
    if weights is None or np.ptp(weights) * len(weights) <= 1e-9:  # no weight stands out
        return {"top": [], "bottom": []}
    probabilities = (_last(metrics, "leader") or {}).get("probabilities")
    order = [int(arm) for arm in np.argsort(-weights, kind="stable")]
    count = min(count, len(order) // 2)

    def row(arm: int) -> dict[str, Any]:
        known = instructions[arm] if len(instructions) == len(weights) else {}
        return {
            "id": known.get("id", str(arm)),
            "prompt": known.get("prompt"),
            "weight": float(weights[arm] * len(weights)),
            "probability": None if probabilities is None else probabilities[arm] * len(weights),
        }

    return {"top": [row(arm) for arm in order[:count]], "bottom": [row(arm) for arm in order[::-1][:count]]}


def _command(config: Mapping[str, Any]) -> str:
    """The command line that the configuration stands for."""
    if config.get("command"):
        return config["command"] if isinstance(config["command"], str) else shlex.join(config["command"])
    flags = []
    for key, value in config.items():
        if key in folder.FREE or key == folder.ENVIRONMENT or isinstance(value, dict) or value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no'}{key}")
        elif isinstance(value, list):
            flags.append(f"--{key}={','.join(map(str, value))}")
        else:
            flags.append(f"--{key}={value}")
    return shlex.join(["python", "-m", "experiments.align", *flags, "--run_dir=NEW_FOLDER"])


def _warnings(summary: Mapping[str, Any], arms_fit: bool) -> list[str]:
    found = []
    if summary["final_gain"] is not None and summary["iterations"] > 0 and summary["final_gain"] <= 0:
        found.append(f"validation did not rise: {100 * summary['final_gain']:+.1f} points from start to end")
    if summary["final_validation"] is None:
        found.append("validation was never measured")
    chance = [judge for judge, row in (summary["judge_check"] or {}).items() if row["at_chance"]]
    if chance:
        found.append(f"judges at chance on pairs with a known right answer: {', '.join(chance)}; scores may be noise")
    for judge, row in summary["parse_failures"].items():
        if row["rate"] is not None and row["rate"] > MAX_PARSE_FAILURE_RATE:
            found.append(f"{row['rate']:.1%} of the replies of judge {judge} held no score ({row['failures']} replies)")
    trained = [row for row in summary["by_iteration"] if row["pairs"] is not None]
    empty = [row["iteration"] for row in trained if row["pairs"] == 0]
    if trained and len(empty) == len(trained):
        found.append("no preference pair in the whole run: every duel was a tie or had no score")
    elif empty:
        found.append(f"no preference pair in iteration {', '.join(map(str, empty))}: all ties or without score")
    share = summary["deviation_floor_share"]
    if share is not None and share >= MAX_FLOOR_SHARE:
        found.append(f"{share:.0%} of the deviations are on their floor: reputations hardly move any more")
    if not arms_fit:
        found.append(f"{folder.INSTRUCTIONS} does not list the leader's instructions: they are named by number")
    return found


def _points(value: float) -> str:
    return f"{100 * value:+.1f} points"


def _verdict(summary: Mapping[str, Any]) -> str:
    start, final = summary["start_validation"], summary["final_validation"]
    if final is None:
        return "The run recorded no validation accuracy."
    if summary["iterations"] == 0:
        return f"Mean validation accuracy is {start:.1%} before any training; no iteration is complete yet."
    gain = summary["final_gain"]
    moved = "rose" if gain > 0 else "fell" if gain < 0 else "stayed"
    count = summary["iterations"]
    how = f"from {start:.1%} to {final:.1%} ({_points(gain)})" if gain else f"at {final:.1%}"
    return (
        f"Mean validation accuracy {moved} {how} in {count} iteration{'s' if count > 1 else ''}; the best iteration is "
        f"{summary['best_iteration']} ({summary['best_validation']:.1%}, {_points(summary['best_gain'])}), its best "
        f"agent is {summary['best_agent']} ({summary['best_agent_validation']:.1%})."
    )


def summarise(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of `report/summary.json`, from the files of a run folder.

    Rows of `metrics.jsonl` are numbered from 0, the state before any training. What a run did not record is None (or
    an empty list or object), never missing: the field names are the same for every run. Accuracies are in [0, 1],
    leader weights are relative to uniform, `seconds` and `calls` are sums over the iterations.

    Raises:
      FileNotFoundError: there is no configuration in the folder.
      ValueError: no line of metrics is complete, or a file is damaged.
    """
    run_dir = pathlib.Path(run_dir)
    config = json.loads((run_dir / folder.CONFIG).read_text(encoding="utf-8"))
    metrics, duels = _optional_rows(run_dir / folder.METRICS), _optional_rows(run_dir / folder.DUELS)
    instructions = _optional_rows(run_dir / folder.INSTRUCTIONS)
    results_file = run_dir / folder.RESULTS
    results = json.loads(results_file.read_text(encoding="utf-8")) if results_file.exists() else {}
    if not metrics:
        raise ValueError(f"{run_dir / folder.METRICS} has no complete line: there is nothing to report yet")

    seen = [name for row in metrics for field in ("validation", "reputations") for name in row.get(field) or {}]
    agents = list(dict.fromkeys([*seen, *(name for duel in duels for name in duel["models"])]))
    by_iteration = []
    for row in metrics:
        by_agent = row.get("validation") or {}
        mean = row.get("validation_mean")
        by_iteration.append(
            {
                "iteration": row["iteration"],
                "validation": by_agent,
                "validation_mean": _mean(by_agent.values()) if mean is None else mean,
                "loss": row.get("loss"),
                **{field: row.get(field) for field in ("pairs", "ties", "invalid", "target_gap", "realised_gap")},
                **{field: row.get(field) or {} for field in ("type_token_ratio", "response_tokens")},
            }
        )

    measured = [row for row in by_iteration if row["validation_mean"] is not None]
    best = max(measured, key=lambda row: row["validation_mean"], default=None)  # the earliest of equals
    start = measured[0]["validation_mean"] if measured else None
    final = measured[-1]["validation_mean"] if measured else None
    known = {agent: value for agent, value in (best or {}).get("validation", {}).items() if value is not None}
    best_agent = max(known, key=known.get, default=None)

    calls = _summed(row.get("calls") for row in metrics)
    parse_failures, failure_rate = _parse_failures(metrics, duels, calls.get("judgements", 0))
    seconds = _summed(row.get("seconds") for row in metrics)
    arms = _weights(metrics[-1])
    summary = {
        "iterations": metrics[-1]["iteration"],
        "agents": agents,
        "duels": len(duels),
        "start_validation": start,
        "final_validation": final,
        "final_gain": None if final is None else final - start,
        "best_iteration": best["iteration"] if best else None,
        "best_validation": best["validation_mean"] if best else None,
        "best_gain": best["validation_mean"] - start if best else None,
        "best_agent": best_agent,
        "best_agent_validation": known.get(best_agent),
        "best_agent_test": (((results.get("test") or {}).get("best") or {}).get("by_agent") or {}).get(best_agent),
        "by_iteration": by_iteration,
        "calls": {
            field: calls.get(field)
            for field in
            ("generations", "judgements", "generations_formula", "judgements_formula", "paper_formula")
        },
        "seconds": seconds,
        "seconds_total": math.fsum(seconds.values()) if seconds else None,
        "parse_failures": parse_failures,
        "parse_failure_rate": failure_rate,
        "judge_check": _judge_check(run_dir / folder.JUDGE_CHECK),
        "reputations": _last(metrics, "reputations") or {},
        "deviations": _last(metrics, "deviations") or {},
        "deviation_floor_share": _last(metrics, "deviation_floor_share"),
        "bradley_terry": _last(metrics, "bradley_terry") or {},
        "leader": _leader_ends(metrics, instructions),
        "win_rates": _win_rates(duels, agents),
        "type_token_ratio": _last(metrics, "type_token_ratio") or {},
        "response_tokens": _last(metrics, "response_tokens") or {},
        "test": results.get("test"),
        "peak_memory_bytes": results.get("peak_memory_bytes"),
        "programs": results.get("programs") or {},
        "environment": config.get(folder.ENVIRONMENT, {}),
        "command": _command(config),
    }  # fmt: skip
    summary["warnings"] = _warnings(summary, arms is None or len(arms) == len(instructions))
    summary["verdict"] = _verdict(summary)
    return summary


def _cell(value: Any, form: str = "") -> str:
    if value is None:
        return "–"
    text = " ".join(format(value, form).split()).replace("|", "\\|")
    return text if len(text) <= 100 else text[:99] + "…"


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _page(summary: Mapping[str, Any], pictures: Sequence[tuple[str, str]]) -> str:
    rows = summary["by_iteration"]
    lines = ["# Run report", "", f"**{summary['verdict']}**", ""]
    lines += ["One run, one seed: no interval. The best iteration was chosen on this same validation split.", ""]
    lines += [f"> **Warning:** {warning}\n" for warning in summary["warnings"]]

    shown = rows
    if len(rows) > _PAGE_ROWS:
        shown = [rows[index] for index in sorted({round(x) for x in np.linspace(0, len(rows) - 1, _PAGE_ROWS)})]
        lines += [f"{len(shown)} of {len(rows)} iterations; all are in `{SUMMARY}`.", ""]
    lines += _grid(
        ["iteration", "mean validation", "pairs", "ties", "invalid", "target gap", "realised gap", "mean loss"],
        [
            [
                _cell(row["iteration"]),
                _cell(row["validation_mean"], ".1%"),
                *(_cell(row[field]) for field in ("pairs", "ties", "invalid")),
                *(_cell(row[field], ".2f") for field in ("target_gap", "realised_gap")),
                _cell((row["loss"] or {}).get("mean"), ".4f"),
            ]
            for row in shown
        ],
    )

    lines += ["## Agents", ""]
    measured = [row["validation"] for row in rows if row["validation"]] or [{}]
    best = next((row["validation"] for row in rows if row["iteration"] == summary["best_iteration"]), {})
    lines += _grid(
        ["agent", "start", "end", f"iteration {_cell(summary['best_iteration'])}", "reputation", "deviation",
         "Bradley-Terry", "type-token ratio", "answer tokens"],
        [
            [
                _cell(agent),
                *(_cell(known.get(agent), ".1%") for known in (measured[0], measured[-1], best)),
                _cell(summary["reputations"].get(agent), ".2f"),
                _cell(summary["deviations"].get(agent), ".2f"),
                _cell(summary["bradley_terry"].get(agent), ".2f"),
                _cell(summary["type_token_ratio"].get(agent), ".3f"),
                _cell(summary["response_tokens"].get(agent), ".1f"),
            ]
            for agent in summary["agents"]
        ],
    )  # fmt: skip
    if summary["deviation_floor_share"] is not None:
        lines += [f"Deviations on their floor: {summary['deviation_floor_share']:.0%}.", ""]

    if summary["test"]:
        test = summary["test"]
        stages = [stage for stage in ("start", "best", "final") if stage in test]
        lines += [f"## Test ({test['questions']} questions that played no part in the run)", ""]
        head = ["agent", *(f"{stage} (iteration {test[stage]['iteration']})" for stage in stages)]
        table = [[_cell(a), *(_cell(test[s]["by_agent"].get(a), ".1%") for s in stages)] for a in summary["agents"]]
        lines += _grid(head, [*table, ["**mean**", *(_cell(test[s]["mean"], ".1%") for s in stages)]])
        if summary["best_agent_test"] is not None:
            lines += [
                f"By validation, iteration {_cell(summary['best_iteration'])} and {_cell(summary['best_agent'])} "
                f"reach {summary['best_agent_test']:.1%}.",
                "",
            ]

    lines += ["## Judges", ""]
    check = summary["judge_check"] or {}
    judges = list(dict.fromkeys([*summary["parse_failures"], *check]))
    judge_rows = []
    for judge in judges:
        row, failed = check.get(judge, {}), summary["parse_failures"].get(judge, {})
        interval = row.get("interval")
        verdict = {True: "yes", False: "no"}.get(row.get("at_chance"), "–")
        judge_rows.append(
            [
                _cell(judge),
                _cell(row.get("accuracy"), ".1%"),
                f"{interval[0]:.1%} – {interval[1]:.1%}" if interval else "–",
                verdict,
                _cell(failed.get("failures")),
                _cell(failed.get("rate"), ".1%"),
            ]
        )
    head = ["judge", "accuracy on known pairs", "interval", "at chance", "replies without a score", "share"]
    lines += _grid(head, judge_rows) if judges else ["No judge is recorded.", ""]
    if summary["judge_check"] is None:
        lines += ["The judges were not checked on pairs with a known right answer.", ""]

    lines += ["## Leader", ""]
    ends = [("top", row) for row in summary["leader"]["top"]]
    ends += [("bottom", row) for row in reversed(summary["leader"]["bottom"])]
    head = ["", "instruction", "prompt", "weight relative to uniform"]
    grid = [[end, _cell(row["id"]), _cell(row["prompt"]), f"{row['weight']:.2f}×"] for end, row in ends]
    lines += _grid(head, grid) if ends else ["All weights are equal, or none are recorded.", ""]

    lines += ["## Cost", ""]
    calls = summary["calls"]
    lines += _grid(
        ["model calls", "counted", "by formula"],
        [
            [kind, _cell(calls[kind], ",.0f"), _cell(calls[f"{kind}_formula"], ",.0f")]
            for kind in ("generations", "judgements")
        ],
    )
    paper = _cell(calls["paper_formula"], ",.0f")
    lines += [f"The paper's own count, D·m an iteration (one judge pass reads both answers): {paper}.", ""]
    if summary["seconds"]:
        by_phase = sorted(summary["seconds"].items(), key=lambda item: -item[1])
        listed = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in by_phase)
        lines += [f"Seconds: {summary['seconds_total']:.1f} in all ({listed}).", ""]
    if summary["peak_memory_bytes"]:
        lines += [f"Peak memory: {summary['peak_memory_bytes'] / 2**30:.2f} GiB.", ""]
    if summary["programs"]:
        listed = ", ".join(f"{name} {count}" for name, count in summary["programs"].items())
        lines += [f"Programs compiled, or read from the cache of earlier runs: {listed}.", ""]

    lines += ["## Figures", ""]
    for name, caption in pictures:
        lines += [f"![{caption}]({name})", ""]
    lines += ["## How to reproduce", "", "```sh", summary["command"], "```", ""]
    listed = ", ".join(f"{key} {value}" for key, value in summary["environment"].items())
    lines += [f"Made with {listed}. All settings are in `{folder.CONFIG}`.", ""]
    return "\n".join(lines)


def _draw(run_dir: pathlib.Path, summary: Mapping[str, Any], out: pathlib.Path) -> list[tuple[str, str]]:
    metrics = _optional_rows(run_dir / folder.METRICS)
    instructions = _optional_rows(run_dir / folder.INSTRUCTIONS)
    agents, drawn = summary["agents"], []

    def add(name: str, caption: str, figure) -> None:
        figure.savefig(out / f"{name}.png", dpi=figures.DPI, bbox_inches="tight")
        drawn.append((f"{name}.png", caption))

    numbers = [row["iteration"] for row in metrics]
    accuracies = _table(metrics, "validation", agents)
    if np.isfinite(accuracies).any():
        figure = figures.validation(accuracies, agents, iterations=numbers, baseline=summary["start_validation"])
        add("validation", "Validation accuracy", figure)
    weighted = [(row["iteration"], weights) for row in metrics if (weights := _weights(row)) is not None]
    if weighted:
        times, weights = [number for number, _ in weighted], np.stack([one for _, one in weighted])
        names = [str(arm) for arm in range(weights.shape[1])]
        if len(instructions) == len(names):
            names = [" ".join(f"{row['id']}: {row['prompt']}".split()) for row in instructions]
        add("leader_weights", "Leader weights", figures.leader_weights(weights, names, iterations=times))
        add("leader_heatmap", "Most dynamic instructions", figures.leader_heatmap(weights, names, iterations=times))
    ratings = _table(metrics, "reputations", agents)
    if np.isfinite(ratings).any():
        rows = np.isfinite(ratings).any(axis=1)
        figure = figures.reputations(
            ratings[rows], _table(metrics, "deviations", agents)[rows], agents,
            iterations=[number for number, kept in zip(numbers, rows, strict=True) if kept],
        )  # fmt: skip
        add("reputations", "Reputations", figure)
    rates = summary["win_rates"]
    if np.any(rates["games"]):
        add("win_rates", "Win rates", figures.win_rates(rates["wins"], rates["draws"], rates["games"], agents))
    matched = [row for row in summary["by_iteration"] if row["realised_gap"] is not None]
    if matched:
        target, realised = (np.array([row[f] for row in matched], float) for f in ("target_gap", "realised_gap"))
        figure = figures.gaps(target, realised, iterations=[row["iteration"] for row in matched])
        add("gaps", "Target and realised gap", figure)
    return drawn


def build(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes `report/` into a run folder: `summary.json`, `report.md` and PNG figures; returns the summary.

    It reads the folder's files and nothing else, takes no lock, and may be called while the run is at work.

    Raises:
      FileNotFoundError, ValueError: see `summarise`.
      OSError: the report cannot be written.
    """
    run_dir = pathlib.Path(run_dir)
    summary = summarise(run_dir)
    out = run_dir / folder.REPORT
    out.mkdir(exist_ok=True)
    pictures = _draw(run_dir, summary, out)
    text = json.dumps(records.plain(summary, "summary"), indent=2, allow_nan=False)
    records.write_atomic(out / SUMMARY, text + "\n")
    records.write_atomic(out / PAGE, _page(summary, pictures))
    return summary

"""Findings of the jobs as JSON, text and figures."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.tabular import jobs
from experiments.tabular.source import Source
from stackalign.games import bounds
from stackalign.runs import tabular_figures


def finite(value: Any) -> Any:
    """Floats for JSON, None for those that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, bool | int | str):
        return value
    if np.ndim(value):
        return [finite(item) for item in np.asarray(value)]
    return float(value) if np.isfinite(value) else None


def first_at_most(values: np.ndarray, limit: float) -> int | None:
    """The first step from which on all values are at most `limit` (NaN counts as that)."""
    above = np.flatnonzero(values > limit)
    step = int(above[-1]) + 1 if len(above) else 0
    return step if step < len(values) and np.isfinite(values[step]) else None


def after(step: int | None, num_steps: int) -> str:
    return f"after {step}" if step is not None else f"not in {num_steps}"


def summarise(source: Source, steps: jobs.Steps, solved: jobs.Solved, accuracy: float) -> dict[str, Any]:
    """All findings of the default job in JSON's types."""
    facts, solution, worst, final = solved.facts, solved.solution, solved.worst, solved.final
    times = np.arange(steps.num_steps + 1)
    promised = jobs.bounds_at(facts.constants, times)
    fewest = int(solution.step.min())
    reached = first_at_most(np.fmax(worst.leader, worst.leader_reverse), accuracy)
    if max(final.leader, final.leader_reverse) > accuracy:  # of a context that stopped early, perhaps
        reached = None
    players = ("leader", "leader_reference", "follower", "follower_reference")
    return {
        "game": {
            "source": source.what,
            "shape": list(source.utility.shape),
            "dtype": str(solution.log_pi.dtype),
            "given": list(source.fields),
        },
        "steps": {**steps.taus, **steps.etas, "num_steps": steps.num_steps},
        "constants": finite(facts.constants._asdict()),
        "equilibrium": {
            "value": finite(np.sum(facts.prior * facts.context_value)),
            "effective_actions": dict(zip(players, finite(np.exp(facts.prior @ facts.entropies)), strict=True)),
        },
        "smida": {
            "fewest_steps": fewest,
            "most_steps": int(solution.step.max()),
            "final": finite(final._replace(step=0)._asdict()),
            "mean_gap": finite(np.sum(facts.prior * solution.gap)),
            "bounds": {name: finite(values[fewest]) for name, values in promised._asdict().items()},
            "accuracy": accuracy,
            "steps_to_accuracy": reached,
            "steps_promised": int(bounds.steps_until(facts.constants, accuracy)),
            "seconds": solved.seconds,
        },
        "trajectory": {
            **finite(worst._asdict()),
            "step": times.tolist(),
            **{f"bound_{name}": finite(values) for name, values in promised._asdict().items()},
        },
    }


def table(found: Mapping[str, Any]) -> str:
    """The default job's findings as text."""
    game, steps, run, c = (found[name] for name in ("game", "steps", "smida", "constants"))
    (contexts, leader, follower), effective = game["shape"], found["equilibrium"]["effective_actions"]
    final, promised = run["final"], run["bounds"]
    number = f"{run['fewest_steps']}" + (f" to {run['most_steps']}" if run["fewest_steps"] < run["most_steps"] else "")
    kls = {player: max(final[player], final[f"{player}_reverse"]) for player in ("leader", "follower")}

    def row(what: str, measured: str, promised: str) -> str:
        return f"  {what:<36}{measured:>12}   {promised}"

    return "\n".join([
        f"game         {game['source']}: {contexts} contexts, {leader} Leader × {follower} Follower actions, "
        f"{game['dtype']}",
        f"             tau_L = {steps['tau_leader']:.4g}, tau_F = {steps['tau_follower']:.4g}; not uniform: "
        f"{', '.join(game['given']) or 'nothing'}",
        f"step sizes   eta_L = {steps['eta_leader']:.4g}, eta_F = {steps['eta_follower']:.4g}; condition 6: 0 < "
        f"{c['leader_rate']:.4g} < {c['follower_rate']:.4g} <= 1, kappa = {c['kappa']:.4g}",
        f"oscillation  D = {c['oscillation']:.4g} of u, D_F = {c['follower_oscillation']:.4g} over the Follower's "
        f"actions, D_L = {c['leader_oscillation']:.4g} of r",
        f"equilibrium  value {found['equilibrium']['value']:.10g}; effective actions (exp of the mean entropy):",
        f"             Leader {effective['leader']:.3g} (its reference {effective['leader_reference']:.3g}), "
        f"Follower {effective['follower']:.3g} (its reference {effective['follower_reference']:.3g})",
        f"SMIDA        {number} steps, {run['seconds']:.2f} s with compilation",
        "",
        f"{'at the end, largest over contexts':<38}{'measured':>12}   at most",
        row("KL divergence of the Follower", f"{kls['follower']:.3g}" if kls["follower"] > 0 else "rounding",
            f"{promised['follower']:.3g} (bound 13)"),
        row("KL divergence of the Leader", f"{kls['leader']:.3g}",
            f"{promised['leader']:.3g} (bound 14), {promised['leader_simple']:.3g} (bound 15)"),
        row("saddle gap", f"{final['gap']:.3g}", f"{promised['gap']:.3g} (from 13 and 14)"),
        row(f"steps to a Leader KL of {run['accuracy']:.3g}", after(run["steps_to_accuracy"], steps["num_steps"]),
            f"{run['steps_promised']} (bound 15)"),
    ])  # fmt: skip


def check_table(rows: Mapping[str, Mapping[str, Any]], num_steps: int) -> str:
    """The worst place of every theorem as text."""

    def show(value) -> str:
        return "not finite" if value is None else f"{value:.3g}"

    title = f"theorems, t = 0 … {num_steps}"
    lines = [f"{title:<34}{'margin':>11}   where it is least: left <= right (+ rounding)"]
    for name, row in rows.items():
        verdict = "holds" if row["holds"] else "FAILS"
        lines.append(
            f"  {verdict}  {name:<25}{show(row['margin']):>11}   {show(row['left'])} <= {show(row['right'])} "
            f"(+ {show(row['tolerance'])}), step {row['step']}, context {row['context']}"
        )
    return "\n".join(lines)


def compare_table(found: Mapping[str, jobs.Rival], accuracy: float) -> str:
    """The solvers as text."""
    to = f"steps to {accuracy:.3g}"
    lines = [f"{'saddle gap, mean over contexts':<32}{'at the end':>12}{to:>18}{'ms/step':>10}   step sizes"]
    for name, rival in found.items():
        etas = f"{rival.etas[0]:.4g}, {rival.etas[1]:.4g} ({rival.chosen})" if rival.etas else "none"
        reached = after(first_at_most(rival.race.gaps, accuracy), len(rival.race.gaps) - 1)
        milliseconds = 1e3 * rival.race.seconds_per_step
        lines.append(f"  {name:<30}{rival.race.gaps[-1]:>12.3g}{reached:>18}{milliseconds:>10.3f}   {etas}")
    return "\n".join(lines)


def compare_json(found: Mapping[str, jobs.Rival], accuracy: float) -> dict[str, Any]:
    """The solvers in JSON's types."""
    return {
        name: {
            "eta_leader": rival.etas[0] if rival.etas else None,
            "eta_follower": rival.etas[1] if rival.etas else None,
            "step_sizes": rival.chosen or "none",
            "final_gap": finite(rival.race.gaps[-1]),
            "steps_to_accuracy": first_at_most(rival.race.gaps, accuracy),
            "milliseconds_per_step": 1e3 * rival.race.seconds_per_step,
            "gap": finite(rival.race.gaps),
        }
        for name, rival in found.items()
    }


def divergence_figure(solved: jobs.Solved):
    """Divergences beside their bounds, and what rounding alone can make."""
    times, slack = np.arange(len(solved.worst.step)), solved.facts.tolerances
    promised = jobs.bounds_at(solved.facts.constants, times)
    # Log-probabilities that differ by rounding d have a divergence of about d² / 2.
    eps = np.finfo(slack.log_pi.dtype).eps
    floors = {
        player: float(max(rounding, eps)) ** 2 / 2
        for player, rounding in (("leader", slack.log_pi), ("follower", slack.log_omega))
    }
    return tabular_figures.divergences(times, solved.worst._asdict(), promised._asdict(), floors)


def solvers_figure(found: Mapping[str, jobs.Rival], solved: jobs.Solved):
    """Gaps of the solvers over steps and time."""
    races = {}
    for name, rival in found.items():
        etas = f"η = {rival.etas[0]:.4g}, {rival.etas[1]:.4g}: {rival.chosen}" if rival.etas else "needs the whole game"
        races[f"{name}, {1e3 * rival.race.seconds_per_step:.3g} ms a step\n{etas}"] = rival.race
    floor = float(np.finfo(solved.solution.gap.dtype).eps * (solved.facts.largest or 1.0))
    return tabular_figures.solvers(races, floor=floor)

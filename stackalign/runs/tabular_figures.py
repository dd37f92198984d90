"""Figures of a tabular game. Each function takes arrays, and returns a matplotlib `Figure` (Agg, no global state).

Zero and NaN leave a gap on the logarithmic axes. Grey is what rounding alone can make.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from stackalign.runs import figures
from stackalign.runs.figures import COLOURS

_BELOW = 30.0  # how far below the floor of rounding an axis reaches


class Race(NamedTuple):
    """The gaps of one solver, `[T + 1]`, and the seconds that one of its steps takes."""

    gaps: ArrayLike
    seconds_per_step: float


def _drawable(values: ArrayLike) -> np.ndarray:
    values = np.asarray(values, np.float64)
    return np.where(values > 0.0, values, np.nan)


def _style(axes: Axes, title: str, curves: list[np.ndarray], floor: float, integer: bool = True) -> None:
    """A logarithmic y axis from below the floor to above the curves, and the floor."""
    highest = max((np.nanmax(curve, initial=0.0, where=np.isfinite(curve)) for curve in curves), default=0.0)
    bottom, top = floor / _BELOW, 3.0 * max(highest, 10.0 * floor)
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.axhspan(bottom, floor, color="#EEEEEE", zorder=0, label="rounding")
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=integer))
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


_LEADER = {"leader": r"KL($\pi_t\,\Vert\,\pi_*$)", "leader_reverse": r"KL($\pi_*\,\Vert\,\pi_t$)"}
_FOLLOWER = {"follower": r"KL($\omega_t\,\Vert\,\omega_*$)", "follower_reverse": r"KL($\omega_*\,\Vert\,\omega_t$)"}


def divergences(
    steps: ArrayLike,
    measured: Mapping[str, ArrayLike],
    promised: Mapping[str, ArrayLike],
    floors: Mapping[str, float],
) -> Figure:
    """Divergences of both players from the equilibrium beside their bounds, over the steps.

    Args:
      steps: `[T + 1]`.
      measured: "leader", "leader_reverse", "follower" and "follower_reverse", `[T + 1]` each; others are ignored.
      promised: "follower" (bound 13), "leader" (bound 14) and "leader_simple" (bound 15), `[T + 1]` each.
      floors: "leader" and "follower", the divergences that rounding alone can make.
    """
    figure = figures.blank(9.0, 6.2)
    top, bottom = figure.subplots(2, sharex=True)
    for axes, title, names, limits, floor in (
        (top, "Follower, largest over contexts and Leader actions", _FOLLOWER, {"follower": "bound 13"}, "follower"),
        (bottom, "Leader, largest over contexts", _LEADER, {"leader_simple": "bound 15", "leader": "bound 14"},
         "leader"),
    ):  # fmt: skip
        curves = [(_drawable(promised[key]), name) for key, name in limits.items()]
        curves += [(_drawable(measured[key]), name) for key, name in names.items()]
        looks = [(COLOURS[5], "-"), (COLOURS[1], "-")][: len(limits)] + [(COLOURS[0], "-"), (COLOURS[8], (0, (4, 3)))]
        for (values, name), (colour, style) in zip(curves, looks, strict=True):
            axes.plot(steps, values, color=colour, linestyle=style, linewidth=1.7, label=name)
        _style(axes, title, [values for values, _ in curves], floors[floor])
        axes.set_ylabel("KL divergence (nats)")
        figures.legend(axes, fontsize=8.5, labelspacing=0.8)
    bottom.set_xlabel("step t")
    return figure


def solvers(races: Mapping[str, Race], *, floor: float) -> Figure:
    """Saddle gap of several solvers of one game, over their steps and over the seconds that these take.

    Args:
      races: by what the legend calls the solver.
      floor: the gap that rounding alone can make. Gaps below it (also 0) are drawn at the bottom of the axis.
    """
    figure = figures.blank(11.0, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    curves = [np.maximum(np.asarray(race.gaps, np.float64), floor / _BELOW) for race in races.values()]
    for number, (curve, (name, race)) in enumerate(zip(curves, races.items(), strict=True)):
        steps = np.arange(len(curve))
        look = {"color": COLOURS[number], "linewidth": 1.8, "linestyle": ("-", "--", "-.", ":")[number % 4]}
        left.plot(steps, curve, **look)
        right.plot(1e3 * race.seconds_per_step * steps, curve, label=name, **look)
    _style(left, "Saddle gap over steps", curves, floor)
    _style(right, "… and over the time they take", curves, floor, integer=False)
    left.set_ylabel("saddle gap (units of utility)")
    left.set_xlabel("step")
    right.set_xlabel("milliseconds")
    figures.legend(right, fontsize=8.5, labelspacing=0.8)
    return figure

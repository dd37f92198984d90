"""Figures of a run. Each function takes arrays and names, and returns a matplotlib `Figure` (Agg, no global state).

NaN stands for what is not known; it leaves a gap. Colours are Okabe and Ito's, which stay apart for colour-blind
readers; markers tell lines apart without colour.
"""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike

DPI = 150
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#B8A900", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_STRONG, _WEAK, _NEUTRAL = "#0072B2", "#D55E00", "#BBBBBB"


def blank(width: float, height: float) -> Figure:
    """An empty figure of so many inches, without pyplot's global state."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _axes(figure: Figure, title: str, x: str, y: str) -> Axes:
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def _iterations(axes: Axes, iterations: Sequence[int]) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(iterations) == 1:  # one point: a unit of room on both sides, instead of a degenerate axis
        axes.set_xlim(iterations[0] - 1, iterations[0] + 1)
        axes.set_xticks(list(iterations))


def _short(name: str, width: int = 28) -> str:
    """An agent's name: both ends stay, because models' names differ at either."""
    return name if len(name) <= width else f"{name[: (width - 1) // 2]}…{name[-(width - 1) // 2 :]}"


def _start(name: str, width: int = 36) -> str:
    """An instruction's name: its start says which it is."""
    return name if len(name) <= width else f"{name[: width - 1]}…"


def legend(axes: Axes, **options: Any) -> None:
    """A legend to the right of the axes."""
    look = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "frameon": False, "fontsize": 8, "borderaxespad": 0.0}
    axes.legend(**{**look, **options})


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Positions near `values` that are at least `gap` apart, in the same order."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    spots: list[list] = []  # blocks of labels: [centre, members]
    for index in order:
        spots.append([values[index], [index]])
        while len(spots) > 1:
            (low, below), (high, above) = spots[-2:]
            if high - low >= gap * (len(below) + len(above)) / 2:
                break
            members = below + above
            centre = (low * len(below) + high * len(above)) / len(members)
            spots[-2:] = [[centre, members]]
    placed = [0.0] * len(values)
    for centre, members in spots:
        for rank, index in enumerate(members):
            placed[index] = centre + gap * (rank - (len(members) - 1) / 2)
    return placed


def _relative(weights: ArrayLike, names: Sequence[str]) -> np.ndarray:
    weights = np.asarray(weights, float)
    if weights.ndim != 2 or weights.shape[1] != len(names):
        raise ValueError(f"weights have shape {weights.shape}, expected [iterations, {len(names)}]")
    return weights * len(names)


def _ends(final: np.ndarray, count: int) -> tuple[list[int], list[int]]:
    """Columns with the greatest and the least final value, disjoint, the extreme one first; none if all are equal."""
    if not np.nanmax(final, initial=-np.inf) - np.nanmin(final, initial=np.inf) > 1e-9:
        return [], []
    order = [int(column) for column in np.argsort(-final, kind="stable") if np.isfinite(final[column])]
    count = min(count, len(order) // 2)
    return order[:count], order[::-1][:count]


def leader_weights(
    weights: ArrayLike, names: Sequence[str], *, iterations: Sequence[int] | None = None, highlighted: int = 5
) -> Figure:
    """The leader's weights over time, relative to uniform, with those that end highest and lowest named.

    Args:
      weights: [T, K], each row sums to 1.
      names: K instruction names.
      iterations: T numbers (default 0, 1, ...).
      highlighted: how many at either end.
    """
    relative = _relative(weights, names)
    iterations = range(len(relative)) if iterations is None else iterations
    top, bottom = _ends(relative[-1], highlighted)
    figure = blank(8.5, 4.8)
    axes = _axes(figure, f"Leader weights of {len(names)} instructions", "iteration", "weight relative to uniform")
    marker = "o" if len(relative) == 1 else None
    for column in range(len(names)):
        if column not in top and column not in bottom:
            axes.plot(iterations, relative[:, column], color=_NEUTRAL, linewidth=0.7, alpha=0.7, marker=marker)
    for columns, colour in ((top, _STRONG), (bottom, _WEAK)):
        for column in columns:
            axes.plot(iterations, relative[:, column], color=colour, linewidth=1.6, marker="o", markersize=3)
    axes.axhline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 3)))
    _iterations(axes, iterations)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    named = [*top, *bottom]
    places = _spread([relative[-1, column] for column in named], (high - low) * 0.052)
    right = axes.get_xlim()[1]
    for column, place in zip(named, places, strict=True):
        colour = _STRONG if column in top else _WEAK
        axes.annotate(
            f"{_start(names[column])}  {relative[-1, column]:.2f}×",
            (iterations[-1], relative[-1, column]), xytext=(right + (right - axes.get_xlim()[0]) * 0.03, place),
            textcoords="data", fontsize=7.5, color=colour, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2,
                        "relpos": (0.0, 0.5)},
        )  # fmt: skip
    return figure


def leader_heatmap(
    weights: ArrayLike, names: Sequence[str], *, iterations: Sequence[int] | None = None, shown: int = 32
) -> Figure:
    """The weights of the instructions that moved most (range over time), as a heatmap on a log2 scale.

    Args:
      weights: [T, K], each row sums to 1.
      names: K instruction names.
      iterations: T numbers (default 0, 1, ...).
      shown: how many rows at most; sorted by the final weight.
    """
    relative = _relative(weights, names)
    iterations = range(len(relative)) if iterations is None else iterations
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.log2(relative)
    log[~np.isfinite(log)] = np.nan
    span = np.nan_to_num(np.ptp(log, axis=0), nan=-1.0)
    rows = np.argsort(-span, kind="stable")[:shown]
    rows = rows[np.argsort(-np.nan_to_num(log[-1, rows], nan=-np.inf), kind="stable")]
    limit = max(0.05, float(np.nanmax(np.abs(log[:, rows]), initial=0.0)))
    figure = blank(max(5.0, 3.6 + 0.34 * min(len(relative), 24)), 1.6 + 0.2 * len(rows))
    axes = figure.add_subplot()
    title = f"The {len(rows)} most dynamic of {len(names)} instructions" if len(rows) < len(names) else "Leader weights"
    axes.set_title(title, loc="left", fontsize=11)
    colours = mpl.colormaps["RdBu"].with_extremes(bad="#EEEEEE")
    image = axes.imshow(
        log[:, rows].T, aspect="auto", cmap=colours, vmin=-limit, vmax=limit, interpolation="nearest",
        extent=(-0.5, len(relative) - 0.5, len(rows) - 0.5, -0.5),
    )  # fmt: skip
    step = math.ceil(len(relative) / 16)
    axes.set_xticks(range(0, len(relative), step), [str(number) for number in list(iterations)[::step]])
    axes.set_yticks(range(len(rows)), [_start(names[row]) for row in rows], fontsize=7.5)
    axes.set_xlabel("iteration")
    bar = figure.colorbar(image, ax=axes, fraction=0.06, pad=0.02)
    bar.set_label("weight relative to uniform")
    ticks = np.linspace(-limit, limit, 5)
    bar.set_ticks(ticks, labels=[f"{2.0**tick:.2f}×" for tick in ticks])
    return figure


def reputations(
    ratings: ArrayLike, deviations: ArrayLike, names: Sequence[str], *, iterations: Sequence[int] | None = None
) -> Figure:
    """Reputations over time with a band of one deviation.

    Args:
      ratings: [T, m].
      deviations: [T, m], NaN where not known.
      names: m agent names.
      iterations: T numbers (default 0, 1, ...).
    """
    ratings, deviations = np.asarray(ratings, float), np.asarray(deviations, float)
    if ratings.shape != deviations.shape or ratings.ndim != 2 or ratings.shape[1] != len(names):
        raise ValueError(f"ratings {ratings.shape} and deviations {deviations.shape}: expected [T, {len(names)}]")
    iterations = range(len(ratings)) if iterations is None else iterations
    figure = blank(8.5, 4.4)
    axes = _axes(figure, "Reputations (band: ± one deviation)", "iteration", "reputation")
    final = np.nan_to_num(ratings[-1], nan=-np.inf)
    for index in np.argsort(-final, kind="stable"):  # the legend in the order in which the lines end
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        centre, spread = ratings[:, index], deviations[:, index]
        if len(ratings) == 1:
            axes.errorbar(iterations, centre, spread, color=colour, marker=marker, capsize=3, linestyle="none")
        else:
            axes.fill_between(iterations, centre - spread, centre + spread, color=colour, alpha=0.15, linewidth=0)
        label = f"{_short(names[index])}  {ratings[-1, index]:.1f}"
        axes.plot(iterations, centre, color=colour, marker=marker, markersize=4, linewidth=1.6, label=label)
    axes.ticklabel_format(axis="y", useOffset=False)
    _iterations(axes, iterations)
    legend(axes)
    return figure


def win_rates(wins: ArrayLike, draws: ArrayLike, games: ArrayLike, names: Sequence[str]) -> Figure:
    """Who beats whom: a cell is the row agent's shares of wins and draws against the column agent.

    Args:
      wins: [m, m] duels that the row agent won against the column agent.
      draws: [m, m] drawn duels, symmetric.
      games: [m, m] valid duels, symmetric; 0 leaves the cell empty.
      names: m agent names.
    """
    wins, draws, games = (np.asarray(array, float) for array in (wins, draws, games))
    count = len(names)
    for array in (wins, draws, games):
        if array.shape != (count, count):
            raise ValueError(f"expected [{count}, {count}] matrices, found {array.shape}")
    played = np.where(games > 0, games, np.nan)
    rate, drawn = wins / played, draws / played
    size = 2.6 + 0.72 * count
    figure = blank(size + 0.9, size)
    axes = figure.add_subplot()
    axes.set_title("Win rate of the row agent against the column agent", loc="left", fontsize=11)
    colours = mpl.colormaps["PuOr_r"].with_extremes(bad="#D4D4D4")
    # A draw counts half in the colour, so that a pair that only draws is neutral.
    image = axes.imshow(rate + drawn / 2, cmap=colours, vmin=0.0, vmax=1.0)
    short = [_short(name, 24) for name in names]
    if max(map(len, short)) > 9:
        axes.set_xticks(range(count), short, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    else:
        axes.set_xticks(range(count), short, fontsize=8)
    axes.set_yticks(range(count), short, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row in range(count):
        for column in range(count):
            if np.isnan(rate[row, column]):
                axes.text(column, row, "" if row == column else "–", ha="center", va="center", fontsize=8)
                continue
            shade = rate[row, column] + drawn[row, column] / 2
            lines = [f"win {rate[row, column]:.0%}", f"draw {drawn[row, column]:.0%}", f"n={games[row, column]:.0f}"]
            colour = "white" if abs(shade - 0.5) > 0.33 else "black"
            text = "\n".join(lines)
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour, linespacing=1.15)
    bar = figure.colorbar(image, ax=axes, fraction=0.045, pad=0.02)
    bar.set_label("wins + half of the draws")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def validation(
    accuracies: ArrayLike,
    names: Sequence[str],
    *,
    iterations: Sequence[int] | None = None,
    baseline: float | None = None,
) -> Figure:
    """Validation accuracy of every agent, and their mean against the start.

    Args:
      accuracies: [T, m] in [0, 1], NaN where not measured.
      names: m agent names.
      iterations: T numbers (default 0, 1, ...).
      baseline: mean accuracy before training, drawn as a line (default: none).
    """
    accuracies = np.asarray(accuracies, float)
    if accuracies.ndim != 2 or accuracies.shape[1] != len(names):
        raise ValueError(f"accuracies have shape {accuracies.shape}, expected [iterations, {len(names)}]")
    iterations = range(len(accuracies)) if iterations is None else iterations
    figure = blank(8.5, 4.4)
    axes = _axes(figure, "Validation accuracy", "iteration", "accuracy")
    final = np.nan_to_num(accuracies[-1], nan=-np.inf)
    mean = np.array([np.mean(row[np.isfinite(row)]) if np.isfinite(row).any() else np.nan for row in accuracies])
    label = f"mean of the agents  {mean[-1]:.1%}"
    axes.plot(iterations, mean, color="black", linewidth=2.8, marker="o", markersize=5, label=label, zorder=3)
    if baseline is not None and math.isfinite(baseline):
        axes.axhline(baseline, color="black", linewidth=1, linestyle=(0, (4, 3)), label=f"start  {baseline:.1%}")
    for index in np.argsort(-final, kind="stable"):
        colour, marker = COLOURS[index % (len(COLOURS) - 1)], MARKERS[index % len(MARKERS)]  # black is the mean's
        label = f"{_short(names[index])}  {accuracies[-1, index]:.1%}"
        style = "-" if index < len(COLOURS) - 1 else ":"
        axes.plot(
            iterations, accuracies[:, index], color=colour, marker=marker, markersize=4, linewidth=1.2, alpha=0.9,
            linestyle=style, label=label,
        )  # fmt: skip
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _iterations(axes, iterations)
    legend(axes)
    return figure


def gaps(target: ArrayLike, realised: ArrayLike, *, iterations: Sequence[int] | None = None) -> Figure:
    """Target and realised mean relative gap of reputations between the two agents of a duel (eqs. 3 and 6).

    Args:
      target: [T] in [0, 1].
      realised: [T] in [0, 1].
      iterations: T numbers (default 1, 2, ...).
    """
    target, realised = np.asarray(target, float), np.asarray(realised, float)
    if target.ndim != 1 or target.shape != realised.shape:
        raise ValueError(f"target {target.shape} and realised {realised.shape} must be vectors of one length")
    iterations = range(1, len(target) + 1) if iterations is None else iterations
    figure = blank(7.0, 3.6)
    axes = _axes(figure, "Matching: target and realised gap", "iteration", "relative reputation gap")
    axes.plot(iterations, target, color=COLOURS[5], linestyle=(0, (5, 2)), marker="s", markersize=4, label="target")
    axes.plot(iterations, realised, color=COLOURS[0], marker="o", markersize=4, label="realised mean")
    axes.set_ylim(-0.03, 1.03)
    _iterations(axes, iterations)
    legend(axes)
    return figure

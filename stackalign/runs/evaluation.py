"""The report of an evaluation: tables and a bar chart, from its results alone."""

import html
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stackalign.runs import figures, records

PAGE, WEB_PAGE, CHART = "report.md", "report.html", "scores.png"

MAX_UNPARSED = 0.1


def write(folder: str | os.PathLike, results: Mapping[str, Any]) -> list[str]:
    """Writes `report.md`, `report.html` and `scores.png` into a folder, made if missing.

    Args:
      folder: where to.
      results: `command`, `models` (labels), `benchmarks` (by name: `title`, `note`, `origin`, `models`,
        `differences`), `averages`.

    Returns:
      The warnings that the pages give.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    warnings = _warnings(results)
    blocks = _blocks(results, warnings)
    records.write_atomic(folder / PAGE, _markdown(blocks))
    records.write_atomic(folder / WEB_PAGE, _html(blocks))
    chart(results).savefig(folder / CHART)
    return warnings


def table(results: Mapping[str, Any]) -> str:
    """The headline of every benchmark and model, as a Markdown table."""
    head, rows = _headlines(results)
    return "\n".join(_grid(head, rows))


def chart(results: Mapping[str, Any]) -> Figure:
    """Bars of the headlines in [0, 1] with their intervals; rewards, on another scale, have a panel of their own."""
    labels = list(results["models"])
    shares, rewards = [], []
    for result in results["benchmarks"].values():
        (rewards if _headline(result, labels[0])[1]["kind"] == "reward" else shares).append(result)
    panels = [panel for panel in (shares, rewards) if panel]
    width = sum(max(3.2, 0.5 + (0.28 * len(labels) + 0.5) * len(panel)) for panel in panels)
    figure = figures.blank(min(max(width, 5.0), 24.0), 4.2)
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=[len(panel) for panel in panels])[0]
    for where, panel in zip(axes, panels, strict=True):
        step = 0.8 / len(labels)
        for number, label in enumerate(labels):
            found = [_headline(result, label)[1] for result in panel]
            values = np.array([one["value"] for one in found])
            ends = np.array([one["interval"] or [one["value"]] * 2 for one in found]).T
            # An end may lie a rounding on the other side of the value.
            spread = np.maximum(np.abs(ends - values) * np.array([[-1], [1]]) * np.sign(ends - values), 0)
            colour = figures.COLOURS[number % len(figures.COLOURS)]
            places = np.arange(len(panel)) + (number - (len(labels) - 1) / 2) * step
            where.bar(places, values, 0.9 * step, color=colour, label=label)
            where.errorbar(places, values, spread, fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
        titles = [result["title"] + ("\n(proxy)" if "proxy" in result["note"] else "") for result in panel]
        many = len(panel) > 4
        where.set_xticks(
            np.arange(len(panel)), titles, fontsize=8, rotation=30 if many else 0, ha="right" if many else "center"
        )
        where.spines[["top", "right"]].set_visible(False)
        where.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        where.set_axisbelow(True)
        if panel is shares:
            top = max(max(_headline(result, label)[1]["value"] for label in labels) for result in panel)
            where.set_ylim(0, 1 if top > 0.5 else None)
            where.set_ylabel("score, with 95 % intervals")
        else:
            where.set_ylabel("reward, with 95 % intervals")
    if len(labels) > 1:
        figures.legend(axes[-1])
    return figure


def _headline(result: Mapping[str, Any], label: str) -> tuple[str, Mapping[str, Any]]:
    return next(iter(result["models"][label]["metrics"].items()))


def _number(metric: Mapping[str, Any]) -> str:
    share = metric["kind"] != "reward"
    text = f"{metric['value']:.1%}" if share else f"{metric['value']:.2f}"
    if metric["interval"] is None:
        return text
    low, high = metric["interval"]
    return f"{text} [{low:.1%}, {high:.1%}]" if share else f"{text} [{low:.2f}, {high:.2f}]"


def _headlines(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    labels = list(results["models"])
    rows = []
    for result in results["benchmarks"].values():
        name = _headline(result, labels[0])[0]
        title = result["title"] + (" (proxy)" if "proxy" in result["note"] else "")
        found = [_number(_headline(result, label)[1]) for label in labels]
        rows.append([title, name, str(result["origin"]["asked"]), *found])
    if results["averages"]:
        rows.append(["**average**", "", "", *(f"**{results['averages'][label]:.1%}**" for label in labels)])
    return ["benchmark", "metric", "items", *labels], rows


def _warnings(results: Mapping[str, Any]) -> list[str]:
    found = []
    for result in results["benchmarks"].values():
        for label, one in result["models"].items():
            about = f"{result['title']}, {label}"
            if one["unparsed"] > MAX_UNPARSED:
                found.append(f"{about}: no answer could be read from {one['unparsed']:.0%} of the responses")
            if one["cut"] > MAX_UNPARSED:
                found.append(f"{about}: {one['cut']:.0%} of the responses were cut by the token limit")
            if one["faults"]:
                found.append(f"{about}: {one['faults']} item(s) got no answer and count as wrong")
    return found


# A page is a list of blocks, ("h2", text), ("p", text), ("table", head, rows) or ("image", file, caption), which two
# writers turn into Markdown and HTML.


def _blocks(results: Mapping[str, Any], warnings: Sequence[str]) -> list[tuple]:
    labels = list(results["models"])
    blocks: list[tuple] = [("h1", "Evaluation"), ("code", results["command"])]
    blocks += [("p", f"Warning: {text}") for text in warnings]
    blocks += [("table", *_headlines(results)), ("image", CHART, "headline metrics")]
    for name, result in results["benchmarks"].items():
        blocks.append(("h2", result["title"]))
        origin = result["origin"]
        about = f"{origin['asked']} of {origin['items']} items of {origin['source']} (part: {origin['part']}"
        about += f"; split: {origin['split']})" if "split" in origin else ")"
        blocks.append(("p", about + (f". Note: {result['note']}" if result["note"] else "") + "."))
        metrics = [*result["models"][labels[0]]["metrics"]]
        metrics += [one for label in labels for one in result["models"][label]["metrics"] if one not in metrics]
        metrics = list(dict.fromkeys(metrics))
        rows = []
        for label in labels:
            one = result["models"][label]
            cells = [_number(one["metrics"][metric]) if metric in one["metrics"] else "–" for metric in metrics]
            mean = "–" if one["mean_tokens"] is None else f"{one['mean_tokens']:.0f}"
            rows.append([label, *cells, f"{one['unparsed']:.1%}", f"{one['cut']:.1%}", str(one["faults"]), mean])
        blocks.append(("table", ["model", *metrics, "unparsed", "cut", "no answer", "mean tokens"], rows))
        if result["differences"]:
            unit = 100 if _headline(result, labels[0])[1]["kind"] != "reward" else 1
            rows = [
                [label, one["against"], f"{unit * one['difference']:+.1f}",
                 f"[{unit * one['low']:+.1f}, {unit * one['high']:+.1f}]", f"{one['p_value']:.3f}"]
                for label, one in result["differences"].items()
            ]  # fmt: skip
            head = ["model", "against", "difference" + (" (points)" if unit == 100 else ""), "95 % interval", "p"]
            blocks += [("p", "Paired by item (bootstrap):"), ("table", head, rows)]
        categories = sorted({one for label in labels for one in result["models"][label]["categories"]})
        if 1 < len(categories) <= 40:
            rows = []
            for category in categories:
                found = [result["models"][label]["categories"].get(category) for label in labels]
                cells = ["–" if one is None else f"{one['value']:.1%} of {one['count']}" for one in found]
                rows.append([category, *cells])
            blocks.append(("table", ["category", *labels], rows))
        blocks.append(("p", f"Answers: answers/{name}/, scores: scores/{name}/."))
    return blocks


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(map(_cell, head)) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows)]


def _markdown(blocks: Sequence[tuple]) -> str:
    lines: list[str] = []
    for kind, *content in blocks:
        lines += {
            "h1": lambda text: [f"# {text}"],
            "h2": lambda text: [f"## {text}"],
            "p": lambda text: [text],
            "code": lambda text: ["```", text, "```"],
            "table": _grid,
            "image": lambda file, caption: [f"![{caption}]({file})"],
        }[kind](*content) + [""]
    return "\n".join(lines)


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}table{border-collapse:"
    "collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.25em .6em;text-align:left}img{max-width:100%}"
    "pre{background:#f4f4f4;padding:.6em;overflow-x:auto}"
)


def _html(blocks: Sequence[tuple]) -> str:
    def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        def row(tag: str, cells: Sequence[str]) -> str:
            texts = (html.escape(cell).replace("**", "") for cell in cells)
            return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

        return "<table>" + row("th", head) + "".join(row("td", cells) for cells in rows) + "</table>"

    parts = []
    for kind, *content in blocks:
        parts.append(
            {
                "h1": lambda text: f"<h1>{html.escape(text)}</h1>",
                "h2": lambda text: f"<h2>{html.escape(text)}</h2>",
                "p": lambda text: f"<p>{html.escape(text)}</p>",
                "code": lambda text: f"<pre>{html.escape(text)}</pre>",
                "table": grid,
                "image": lambda file, caption: f'<img src="{file}" alt="{html.escape(caption)}">',
            }[kind](*content)
        )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Evaluation</title><style>{_STYLE}</style>'
    return head + "\n".join(parts) + "</html>\n"

"""The learning table of the toy pool: variants of the algorithm on the same pools, several seeds, paired differences.

    python -m experiments.toy_table                  # 5 seeds, about 20 minutes on two CPU cores
    python -m experiments.toy_table --seeds=2 --variants=nll,nll_random

Every seed makes one pool and one set of prompts; all variants start from it. Accuracy is greedy exact match of the mean
agent on 360 test prompts that no variant, setting or iteration was chosen on: hyperparameters and the best iteration
come from the validation split. Writes rows.jsonl (one line a seed and variant; a stopped table goes on there),
table.json, table.md and table.png into --out_dir, and prints the table.
"""

import json
import pathlib
import sys
from typing import Any

import numpy as np
from absl import app, flags, logging

from experiments import compilation, prepare, settings

FLAGS = flags.FLAGS
flags.DEFINE_integer("seeds", 5, "How many seeds.")
flags.DEFINE_integer("first_seed", 0, "The first of them.")
flags.DEFINE_list("variants", None, "Which variants, by name; all by default.")
flags.DEFINE_string("out_dir", "outputs/toy_table", "Where rows and tables go.")
flags.DEFINE_multi_string("set", [], "NAME=VALUE: a setting of experiments.align for all variants.")

PLAIN, NLL = {"nll_weight": 0.0}, {"nll_weight": 1.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("DPO as in the paper", PLAIN),
    "plain_uniform": ("DPO, uniform leader", {**PLAIN, "leader": "uniform"}),
    "plain_mean": ("DPO, plain mean of judges", {**PLAIN, "weighting": "mean"}),
    "plain_verifier": ("DPO, verifier as judge", {**PLAIN, "judge": "verifier"}),
    "plain_random": ("DPO, random judge (control)", {**PLAIN, "judge": "random"}),
    "nll": ("DPO + NLL of the chosen answer", NLL),
    "nll_uniform": ("DPO + NLL, uniform leader", {**NLL, "leader": "uniform"}),
    "nll_mean": ("DPO + NLL, plain mean of judges", {**NLL, "weighting": "mean"}),
    "nll_verifier": ("DPO + NLL, verifier as judge", {**NLL, "judge": "verifier"}),
    "nll_random": ("DPO + NLL, random judge (control)", {**NLL, "judge": "random"}),
    "nll_fresh": ("DPO + NLL, new instructions each iteration", {**NLL, "fresh_instructions": True}),
}
DIFFERENCES = (
    ("nll", "plain", "NLL of the chosen answer"),
    ("plain", "plain_uniform", "EXP3 − uniform leader (DPO)"),
    ("nll", "nll_uniform", "EXP3 − uniform leader (DPO + NLL)"),
    ("plain", "plain_mean", "reputation − plain mean (DPO)"),
    ("nll", "nll_mean", "reputation − plain mean (DPO + NLL)"),
    ("plain_verifier", "plain", "verifier − peers (DPO)"),
    ("nll_verifier", "nll", "verifier − peers (DPO + NLL)"),
    ("plain", "plain_random", "peers − random judge (DPO)"),
    ("nll", "nll_random", "peers − random judge (DPO + NLL)"),
    ("nll_fresh", "nll", "new − fixed instructions (DPO + NLL)"),
)


def interval(values) -> tuple[float, float]:
    """Mean and half-width of its 95 % t-interval (NaN for one value)."""
    import scipy.stats

    values = np.asarray(values, float)
    if len(values) < 2:
        return float(values.mean()), float("nan")
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def parse_set(entries: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` entries as settings of the right type."""
    given = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or name not in settings.PAPER:
            raise ValueError(f"--set={entry}: expected NAME=VALUE with a setting of experiments.align")
        default = settings.PAPER[name]
        given[name] = value.lower() in ("1", "true") if isinstance(default, bool) else type(default)(value)
    return given


def play(chosen: dict[str, Any], pool, stacks, split, progress) -> dict[str, Any]:
    """One variant on one pool: accuracies before, at the best iteration by validation, and at the end."""
    import jax

    from stackalign import data
    from stackalign.algorithms import align, evaluation

    config = settings.align_config(chosen)
    judge = prepare.make_judge(chosen, progress)
    task = align.Task(split.instructions, split.validation, judge, data.verify, prepare.checkable)
    align.check(config, pool, task, chosen["num_instructions"])
    state = align.init(jax.random.key(chosen["seed"]), config, pool, task, chosen["num_instructions"], stacks)

    def test(stacks) -> float:
        return float(
            evaluation.evaluate(
                pool, stacks, split.test, data.verify, max_new_tokens=chosen["max_new_tokens"], progress=progress
            ).mean()
        )

    validation = [align.baseline(config, pool, task, state, progress).metrics["validation_mean"]]
    tests, pairs, accuracies, gaps = [test(state.stacks)], [], [], []
    for after, record in align.align(config, pool, task, state, progress):
        validation.append(record.metrics["validation_mean"])
        tests.append(test(after.stacks))
        pairs.append(record.metrics["pairs"])
        accuracies.append(record.metrics["pair_accuracy"])
        gaps.append(record.metrics["realised_gap"])
    best = int(np.argmax(validation))
    return {
        "validation": validation,
        "test": tests,
        "best_iteration": best,
        "start": tests[0],
        "final": tests[-1],
        "best": tests[best],
        "pairs": pairs,
        "pair_accuracy": accuracies,
        "realised_gap": gaps,
    }


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means, intervals and paired differences in points, over the seeds that each variant has."""
    names = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    gains = {
        name: {row["seed"]: 100 * (row["final"] - row["start"]) for row in rows if row["variant"] == name}
        for name in names
    }
    best = {
        name: {row["seed"]: 100 * (row["best"] - row["start"]) for row in rows if row["variant"] == name}
        for name in names
    }
    starts = {row["seed"]: 100 * row["start"] for row in rows}
    out = {"seeds": sorted(starts), "start": interval(list(starts.values())), "variants": {}, "differences": {}}
    for name in names:
        out["variants"][name] = {
            "what": VARIANTS[name][0],
            "gain": interval(list(gains[name].values())),
            "gain_at_best_validation": interval(list(best[name].values())),
            "by_seed": gains[name],
        }
    for one, other, what in DIFFERENCES:
        both = sorted(set(gains.get(one, {})) & set(gains.get(other, {})))
        if both:
            out["differences"][what] = interval([gains[one][seed] - gains[other][seed] for seed in both])
    return out


def markdown(result: dict[str, Any]) -> str:
    """The table as Markdown."""

    def cell(pair) -> str:
        return f"{pair[0]:+.1f} ± {pair[1]:.1f}"

    start = result["start"]
    lines = [
        f"{len(result['seeds'])} seeds; mean test accuracy before training: {start[0]:.1f} ± {start[1]:.1f} %.",
        "",
        "| variant | change on test, points (95 %) | at the iteration that validation chose |",
        "|---|---|---|",
    ]
    for row in result["variants"].values():
        lines.append(f"| {row['what']} | {cell(row['gain'])} | {cell(row['gain_at_best_validation'])} |")
    lines += ["", "| paired difference | points (95 %) |", "|---|---|"]
    lines += [f"| {what} | {cell(pair)} |" for what, pair in result["differences"].items()]
    return "\n".join(lines)


def figure(rows: list[dict[str, Any]]):
    """Change of the mean test accuracy over iterations, mean and 95 % interval over seeds, for the main variants."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [
        ("nll_verifier", "#009E73", "--"), ("nll", "#0072B2", "-"), ("plain", "#56B4E9", "-"),
        ("nll_random", "#D55E00", "-"), ("plain_random", "#E69F00", "-"),
    ]  # fmt: skip
    canvas = Figure(figsize=(9.5, 4.0), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    for name, colour, style in drawn:
        gains = np.array([100 * (np.array(row["test"]) - row["test"][0]) for row in rows if row["variant"] == name])
        if not len(gains):
            continue
        center, half = np.array([interval(column) for column in gains.T]).T
        half = np.nan_to_num(half)
        x = np.arange(len(center))
        axes.plot(x, center, color=colour, linestyle=style, linewidth=2, label=VARIANTS[name][0])
        axes.fill_between(x, center - half, center + half, color=colour, alpha=0.12, linewidth=0)
    axes.axhline(0, color="0.4", linewidth=0.8)
    axes.set_xlabel("iteration")
    axes.set_ylabel("change of test accuracy, points")
    axes.set_title(f"A pool of six tiny models judging itself ({len({row['seed'] for row in rows})} seeds)", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return canvas


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    logging.set_verbosity(logging.WARNING)
    try:
        unknown = sorted(set(FLAGS.variants or ()) - set(VARIANTS))
        if unknown:
            raise ValueError(f"--variants: unknown {', '.join(unknown)}; there is {', '.join(VARIANTS)}")
        common = parse_set(FLAGS.set)
        for _, own in VARIANTS.values():
            settings.resolve("toy", {**common, **own})
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    from stackalign import runs
    from stackalign.algorithms import toy

    compilation.use_cache()
    out = pathlib.Path(FLAGS.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "rows.jsonl"
    rows = runs.records.read(file, allow_torn=True) if file.exists() else []
    runs.records.write(file, rows)
    names = FLAGS.variants or list(VARIANTS)
    seeds = range(FLAGS.first_seed, FLAGS.first_seed + FLAGS.seeds)
    total, done = len(names) * len(seeds), 0
    with runs.Bars(overall="run") as progress:
        progress("run", 0, total, "runs")
        for seed in seeds:
            split = toy.split(seed)
            made = None
            for name in names:
                done += 1
                chosen = settings.resolve("toy", {**common, **VARIANTS[name][1], "seed": seed})
                if any((row["seed"], row["variant"]) == (seed, name) for row in rows):
                    continue
                if made is None:
                    made = prepare.toy_pool(chosen, split, out / f"pool_{seed}.npz", progress)
                rows.append({"seed": seed, "variant": name, **play(chosen, *made, split, progress)})
                runs.records.append(file, rows[-1:])
                progress("run", done, total, "runs")
                progress.write(f"seed {seed} {name}: test {rows[-1]['start']:.1%} → {rows[-1]['final']:.1%}")
    result = table(rows)
    (out / "table.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (out / "table.md").write_text(markdown(result) + "\n", encoding="utf-8")
    figure(rows).savefig(out / "table.png", dpi=150)
    print(markdown(result))
    return 0


if __name__ == "__main__":
    app.run(main)

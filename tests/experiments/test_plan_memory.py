"""The memory plan: exact parameters, collectives read from programs, verdicts, and what it refuses."""

import json
import pathlib
import subprocess
import sys

import pytest

from experiments import plan_memory

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = ("--rows=8", "--train_rows=8", "--prompt=16", "--new=8", "--agents=2", "--lora_rank=2")


def run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.plan_memory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.fixture
def folder(tmp_path):
    sizes = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128,
             "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
             "max_position_embeddings": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tmp_path


def test_a_small_model(folder):
    """Matrices are cut eight ways, norms lie whole: the parameters of a device by hand."""
    done = run(f"--model={folder}", "--mesh=fsdp=4,tensor=2", *SMALL, "--dtype=float32")
    assert done.returncode == 0, done.stderr
    matrices = 2 * 1024 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)
    norms = 5 * 64
    assert f"{(matrices + norms) / 1e9:.2f}B parameters" in done.stdout
    for name in ("answer 8 prompts", "judge 8 answers", "train on 8 pairs"):
        assert name in done.stdout
    assert "all-" in done.stdout
    assert "fits: at most" in done.stdout
    done = run(f"--model={folder}", "--mesh=fsdp=1", *SMALL, "--device_gb=0.1", "--rows=4096")
    assert done.returncode == 1
    assert "does not fit" in done.stdout
    assert "rows would fit" in done.stdout


def test_collectives_are_counted():
    text = """
  %a = f32[8,4]{1,0} all-gather(f32[2,4]{1,0} %x), dimensions={0}
  %b = (bf16[16]{0}, bf16[8]{0}) all-reduce-start(%y), to_apply=%sum
  %c = f32[8,4]{1,0} add(f32[8,4]{1,0} %a, f32[8,4]{1,0} %a)
"""
    assert plan_memory.exchanged(text) == {"all-gather": (1, 128.0), "all-reduce": (1, 48.0)}


@pytest.mark.parametrize("name", plan_memory.SHAPES)
def test_named_shapes_have_their_size(name):
    """Billions of parameters as the models' cards state them."""
    from stackalign.lm import weights
    from stackalign.lm.weights import hf_config

    size = {"qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62, "llama-3.1-8b": 8.03, "aya-expanse-8b": 8.03}[name]
    assert abs(weights.num_parameters(hf_config.from_hf(plan_memory.SHAPES[name])) / 1e9 - size) < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh=fsdp=x",), "expected axes"),
        (("--mesh=rows=2",), "expected axes"),
        (("--model=nowhere",), "nowhere"),
        (("--lora_targets=w",), "lora targets"),
    ],
)
def test_refused(arguments, message):
    done = run(*SMALL, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr

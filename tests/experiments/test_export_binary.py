"""The export binary: merged folders from an adapter or a base alone, and what it refuses."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import transformers

from stackalign.lm import lora, weights
from stackalign.lm.weights import peft

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPE = lora.LoraConfig(rank=2, alpha=6.0, targets=("q", "o", "up"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": [1, 2]}  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    config, _ = weights.load(base)
    stack = lora.init(jax.random.key(0), config, SHAPE, 1)
    stack = jax.tree.map(lambda leaf: leaf + 0.1, stack)
    peft.save(folder, jax.tree.map(np.asarray, lora.select(stack, 0)), SHAPE, str(base), config)
    return folder


def export(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.export", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_an_agent_is_merged(tmp_path, base, adapter):
    """By hand: every target's block of rows gains `scale * b a`; nothing else changes. Token ids are the base's."""
    done = export(f"--adapter={adapter}", f"--out_dir={tmp_path / 'out'}", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    assert "merged in" in done.stdout
    assert "no tokenizer was written" not in done.stderr or "tokenizer" in done.stderr
    config, merged = weights.load(tmp_path / "out")
    _, params = weights.load(base)
    read = peft.load(adapter, config, SHAPE)
    for index in range(2):
        delta = {name: 3.0 * sides["b"] @ sides["a"] for name, sides in read[index].items()}
        layer, before = merged["layers"][index], params["layers"][index]
        np.testing.assert_allclose(layer["qkv"][:24], before["qkv"][:24] + delta["q"], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(layer["qkv"][24:], before["qkv"][24:])
        np.testing.assert_allclose(layer["o"], before["o"] + delta["o"], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(layer["gate_up"][:32], before["gate_up"][:32])
        np.testing.assert_allclose(layer["gate_up"][32:], before["gate_up"][32:] + delta["up"], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(layer["down"], before["down"])
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == [1, 2]
    assert theirs.pad_token_id == 0


@pytest.mark.real_weights
def test_a_gguf_base_with_its_tokenizer(tmp_path):
    """transformers' own tokenizer and model, from what we wrote, speak SmolLM2."""
    done = export("--base=smollm2", f"--out_dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --adapter, --base, or both"),
        (("--base=nowhere",), "there is no model 'nowhere'"),
        (("--adapter=nowhere",), "nowhere/adapter_config.json"),
        (("--base={base}", "--adapter={base}"), "not the configuration of a LoRA adapter"),
    ],
)
def test_refused(tmp_path, base, arguments, message):
    arguments = [argument.format(base=base) for argument in arguments]
    done = export(*arguments, f"--out_dir={tmp_path / 'out'}")
    assert done.returncode == 1
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_folder_is_left_alone(tmp_path, base):
    (tmp_path / "mine").write_text("kept")
    done = export(f"--base={base}", f"--out_dir={tmp_path}")
    assert done.returncode == 1
    assert "is not an empty folder" in done.stdout + done.stderr

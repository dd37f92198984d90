"""Adapters in PEFT's folder format, in and out."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from stackalign.lm import LoraConfig, char_tokenizer, lora
from stackalign.lm.weights import CheckpointError, peft

CONFIG = char_tokenizer.tiny_config(20, hidden_size=16, num_layers=2, num_heads=2)
SHAPE = LoraConfig(rank=3, alpha=6.0, dropout=0.0, targets=("q", "v", "down"))


@pytest.fixture
def adapter():
    stack = lora.init(jax.random.key(0), CONFIG, SHAPE, 2)
    key = jax.random.key(1)
    return jax.tree.map(lambda leaf: np.asarray(jax.random.normal(key, leaf.shape)), lora.select(stack, 1))


def product(layer, target, scale):
    return scale * layer[target]["b"] @ layer[target]["a"]


def test_round_trip_is_exact(tmp_path, adapter):
    peft.save(tmp_path, adapter, SHAPE, "base", CONFIG)
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path, CONFIG, SHAPE), adapter)


def test_other_rank_alpha_and_targets_keep_the_function(tmp_path, adapter):
    peft.save(tmp_path, adapter, SHAPE, "base", CONFIG)
    wider = LoraConfig(rank=5, alpha=20.0, dropout=0.0, targets=("q", "k", "v", "down"))
    for mine, theirs in zip(adapter, peft.load(tmp_path, CONFIG, wider), strict=True):
        assert np.abs(theirs["k"]["b"]).max() == 0
        for target in SHAPE.targets:
            np.testing.assert_allclose(
                product(theirs, target, wider.scale), product(mine, target, SHAPE.scale), rtol=1e-5, atol=1e-5
            )


def change(folder, tensors=None, **fields):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    if tensors:
        held = load_file(folder / "adapter_model.safetensors")
        save_file(tensors(held), folder / "adapter_model.safetensors")


NAME = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("fields", "tensors", "words"),
    [
        ({"r": 4}, None, "--lora_rank=4"),
        ({"use_dora": True}, None, "use_dora"),
        ({"bias": "all"}, None, "bias"),
        ({"target_modules": ["q_proj", "k_proj"]}, None, "--lora_targets"),
        ({"target_modules": "all-linear"}, None, "--lora_targets"),
        ({"r": None}, None, "r=None"),
        ({"r": 0}, None, "r=0"),
        ({"target_modules": ["query_key_value"]}, None, "query_key_value.*another base"),
        ({}, lambda held: {k: v for k, v in held.items() if k != NAME}, "layers.1.self_attn.v_proj.lora_B"),
        ({}, lambda held: {**held, NAME: held[NAME].T.copy()}, "layers.1.self_attn.v_proj.lora_B"),
        ({}, lambda held: {**held, NAME: held[NAME] * np.nan}, "not finite"),
        ({}, lambda held: {**held, NAME.replace("layers.1", "layers.7"): held[NAME]}, "layers.7"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, adapter, fields, tensors, words):
    peft.save(tmp_path, adapter, SHAPE, "base", CONFIG)
    change(tmp_path, tensors, **fields)
    with pytest.raises(CheckpointError, match=words):
        peft.load(tmp_path, CONFIG, SHAPE)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"hidden_size": 32}, r"down_proj.lora_B.*\(16, 3\); this base needs \(32, 3\).*made for another"),
        ({"num_heads": 4, "num_kv_heads": 1}, r"q_proj.lora_B.*\(16, 3\); this base needs \(32, 3\).*made for another"),
        ({"num_layers": 1}, r"layers.1.*does not belong to this base \(1 layers\).*made for another"),
        ({"num_layers": 3}, r"layers.2.*missing.*made for another"),
        ({"family": "phi3"}, r"q_proj, v_proj.*'phi3'.*qkv_proj.*made for another"),
    ],
)
def test_adapters_of_another_base_are_refused(tmp_path, adapter, other, words):
    peft.save(tmp_path, adapter, SHAPE, "base", CONFIG)
    with pytest.raises(CheckpointError, match=words):
        peft.load(tmp_path, dataclasses.replace(CONFIG, **other), SHAPE)


def test_a_fused_adapter_is_not_for_plain_projections(tmp_path, adapter):
    fused = dataclasses.replace(CONFIG, family="phi3")
    peft.save(tmp_path, adapter, SHAPE, "base", fused)
    with pytest.raises(CheckpointError, match="qkv_proj.*'llama'.*made for another"):
        peft.load(tmp_path, CONFIG, SHAPE)


def test_missing_and_damaged_files(tmp_path, adapter):
    with pytest.raises(CheckpointError, match="adapter_config.json"):
        peft.load(tmp_path, CONFIG, SHAPE)
    peft.save(tmp_path, adapter, SHAPE, "base", CONFIG)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="damaged"):
        peft.load(tmp_path, CONFIG, SHAPE)
    for text in (b"[]", b"{", b"\xff"):
        (tmp_path / "adapter_config.json").write_bytes(text)
        with pytest.raises(CheckpointError, match="damaged"):
            peft.load(tmp_path, CONFIG, SHAPE)


def test_the_real_library_reads_what_is_written(tmp_path, adapter):
    """PEFT loads the folder onto a torch Llama and merges to W + scale · B A."""
    import peft as reference
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    peft.save(tmp_path, adapter, SHAPE, "base", CONFIG)
    merged = reference.PeftModel.from_pretrained(model, str(tmp_path)).merge_and_unload().state_dict()
    for index, layer in enumerate(adapter):
        for target in SHAPE.targets:
            name = f"model.layers.{index}.{peft.MODULES[target]}.weight"
            moved = (merged[name] - before[name]).to(torch.float32).numpy()
            np.testing.assert_allclose(moved, product(layer, target, SHAPE.scale), rtol=1e-4, atol=1e-4)

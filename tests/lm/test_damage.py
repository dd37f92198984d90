"""Damaged checkpoints of every family: each kind of tensor missing, extra, transposed or not finite, by its name."""

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from stackalign.lm import weights
from stackalign.lm.weights import CheckpointError, export, hf_config, layout
from stackalign.lm.weights import gguf as gguf_reader

# No matrix is square, so that a transposed one always has another shape.
COMMON = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 56, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
          "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5}  # fmt: skip
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 10, "sliding_window": 4},
    "phi3": {"sliding_window": None},
    "cohere": {"layer_norm_eps": 1e-5},
}
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


def config_of(family):
    fields = {**COMMON, "model_type": family, **FAMILIES[family]}
    if family == "gemma3_text":
        del fields["hidden_act"]
    return hf_config.from_hf(fields)


def values_of(config):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in layout.shapes(config).items()}


def kinds(config):
    """One tensor of every kind: those of layer 1, and those outside the layers."""
    return [name for name in layout.shapes(config) if ".layers.0." not in name]


def damages(values, name):
    """(what, damaged tensors, expected words) for every way to damage `name` that its shape allows."""
    value = values[name]
    yield "missing", {k: v for k, v in values.items() if k != name}, "missing"
    yield "extra", {**values, f"{name}.more": value}, "more"
    broken = value.copy()
    broken.flat[-1] = np.nan
    yield "not finite", {**values, name: broken}, "not finite"
    if value.ndim == 2:
        assert value.shape[0] != value.shape[1]
        yield "transposed", {**values, name: np.ascontiguousarray(value.T)}, "transposed"
    else:
        yield "cut", {**values, name: value[:-1].copy()}, "expected"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_folder_counts(tmp_path, family):
    config = config_of(family)
    assert config.family == family
    params, views = layout.allocate(config, np.float32)
    for name, value in values_of(config).items():
        views[name][...] = value
    export.save(tmp_path, config, params, dtype="float32")
    held = load_file(tmp_path / "model.safetensors")
    assert held.keys() == layout.shapes(config).keys() and weights.load(tmp_path)[0] == config
    for name in kinds(config):
        for what, tensors, words in damages(held, name):
            save_file(tensors, tmp_path / "model.safetensors")
            with pytest.raises(CheckpointError) as error:
                weights.load(tmp_path)
            assert name in str(error.value) and words in str(error.value), (what, str(error.value))
            assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(("mine", "other"), [("llama", "phi3"), ("phi3", "llama"), ("qwen3", "qwen2")])
def test_tensors_of_another_family_are_named(tmp_path, mine, other):
    """Fused names in an unfused family, and the other way round."""
    for family in (other, mine):
        config = config_of(family)
        params, views = layout.allocate(config, np.float32)
        for name, value in values_of(config).items():
            views[name][...] = value
        export.save(tmp_path / family, config, params, dtype="float32")
    save_file(load_file(tmp_path / other / "model.safetensors"), tmp_path / mine / "model.safetensors")
    with pytest.raises(CheckpointError, match="layers.0.self_attn.*missing"):
        weights.load(tmp_path / mine)


def write_gguf(file, architecture, config, values, rename=None):
    writer = gguf.GGUFWriter(file, architecture)
    for add, value in [
        (writer.add_vocab_size, 40), (writer.add_context_length, 64), (writer.add_embedding_length, 24),
        (writer.add_block_count, 2), (writer.add_feed_forward_length, 56), (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2), (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 1e4),
        (writer.add_key_length, 10), (writer.add_value_length, 10),
    ]:  # fmt: skip
        add(value)
    if architecture == "gemma3":
        writer.add_sliding_window(4)
    parts = gguf_reader._GEMMA_PARTS if config.post_norms else gguf_reader._PARTS
    for name, value in values.items():
        stem = name.removesuffix(".more")
        native = gguf_reader._native(stem, parts) + name[len(stem) :]
        writer.add_tensor(native, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("architecture", GGUF_FAMILIES)
def test_every_tensor_of_a_gguf_file_counts(tmp_path, architecture):
    config = config_of(GGUF_FAMILIES[architecture])
    values, file = values_of(config), tmp_path / "a.gguf"
    assert weights.load(write_gguf(file, architecture, config, values))[0].family == config.family
    parts = gguf_reader._GEMMA_PARTS if config.post_norms else gguf_reader._PARTS
    for name in kinds(config):
        native = gguf_reader._native(name, parts)
        for what, tensors, words in damages(values, name):
            if name == "lm_head.weight" and what == "missing":
                continue  # a file without it ties embedding and output
            write_gguf(file, architecture, config, tensors)
            with pytest.raises(CheckpointError) as error:
                weights.load(file)
            assert native in str(error.value) and words in str(error.value), (what, str(error.value))
            assert str(file) in str(error.value)

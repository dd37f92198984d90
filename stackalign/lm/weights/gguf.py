"""Reads a GGUF file of architecture llama, qwen2, qwen3 or gemma3: metadata, and tensors dequantised one at a time.

Two things that the converter does to such files are undone. For llama it interleaves the rows of each query and key
head, because its rotary embedding turns neighbouring rows there; ours, like the original checkpoints', turns row `i`
with row `i + head_dim / 2`. To the norms of Gemma it adds the 1 that the model adds to them.
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize

from stackalign.lm.config import DecoderConfig
from stackalign.lm.weights import gguf_config, layout
from stackalign.lm.weights.layout import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA_PARTS = _PARTS | {"post_attention_layernorm": "post_attention_norm"}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def load(file: pathlib.Path, *, dtype: Any = np.float32) -> tuple[DecoderConfig, dict[str, Any]]:
    """Reads configuration and parameters of a GGUF file; see `stackalign.lm.weights.load`."""
    reader = open_reader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = read_config(reader)
    if ROPE_FACTORS in tensors:
        factors = _dequantize(tensors.pop(ROPE_FACTORS), file)
        config = gguf_config.with_rope_factors(config, factors.tolist())

    found = {name: (file, tuple(reversed(tensor.shape.tolist()))) for name, tensor in tensors.items()}
    parts = _GEMMA_PARTS if config.post_norms else _PARTS
    native = {name: _native(name, parts) for name in layout.shapes(config)}
    layout.check({native[name]: shape for name, shape in layout.shapes(config).items()}, found, file)
    params, views = layout.allocate(config, dtype)
    for name, view in views.items():
        value = _dequantize(tensors[native[name]], file).reshape(view.shape)
        if config.family == "llama" and (".q_proj." in name or ".k_proj." in name):
            pairs = value.reshape(-1, config.head_dim // 2, 2, config.hidden_size)
            value = pairs.swapaxes(1, 2).reshape(view.shape)
        if config.norm_offset and "norm" in name:
            value = value - config.norm_offset
        layout.store(view, value, file, native[name])
    return config, params


def read_config(reader: GGUFReader) -> DecoderConfig:
    """The configuration without the Llama-3 scaling that a tensor states; see `gguf_config.from_gguf`."""
    fields = scalar_fields(reader)
    if f"{fields.get('general.architecture')}.vocab_size" not in fields:
        fields |= read_fields(reader, ["tokenizer.ggml.tokens"])
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    return gguf_config.from_gguf(fields, tie_embeddings=tied)


def open_reader(file: pathlib.Path) -> GGUFReader:
    """Opens a GGUF file, memory-mapped, or raises CheckpointError."""
    try:
        return GGUFReader(file)
    except OSError as error:
        raise CheckpointError(f"{file}: can't be read: {error}") from error
    # A damaged header makes the reader fail in whichever way the bytes lead it.
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{file}: not a whole GGUF file (truncated or damaged, or a tensor type that the gguf package does not "
            f"know): {error}"
        ) from error


def scalar_fields(reader: GGUFReader) -> dict[str, Any]:
    """Every metadata value that is no array, and the short arrays outside the tokenizer, as plain Python values."""
    return read_fields(
        reader,
        [
            key
            for key, field in reader.fields.items()
            if field.types[:1] != [GGUFValueType.ARRAY] or not key.startswith("tokenizer.")
        ],
    )


def read_fields(reader: GGUFReader, keys: Iterable[str]) -> dict[str, Any]:
    """The metadata values under `keys`, those present, as plain Python values."""
    return {key: reader.fields[key].contents() for key in keys if key in reader.fields}


def _native(name: str, parts: Mapping[str, str]) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    index, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{parts[part]}.{kind}"


def _dequantize(tensor: Any, file: pathlib.Path) -> np.ndarray:
    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file}: tensor {tensor.name!r} has type {tensor.tensor_type.name}, which the gguf package does not "
            f"dequantise: {error}"
        ) from error

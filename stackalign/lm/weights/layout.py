"""The decoder's parameter layout: expected tensors by name, the buffers they are read into, and the checks."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from stackalign.lm.config import DecoderConfig

DTYPES = ("float32", "bfloat16", "float16")


class CheckpointError(ValueError):
    """A checkpoint that does not hold the parameters its configuration asks for; names the file and the tensor."""


def layer_parts(config: DecoderConfig) -> dict[str, tuple[tuple[str, int], ...]]:
    """Parameter of a layer to the tensors of a Hugging Face checkpoint that are its row blocks, and their rows.

    Names are relative to the layer, without ".weight" or ".bias".
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    heads = (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    fused = config.family == "phi3"
    parts: dict[str, tuple[tuple[str, int], ...]] = {
        "attn_norm": (("input_layernorm", hidden),),
        "qkv": (("self_attn.qkv_proj", query + 2 * kv),) if fused else heads,
        "o": (("self_attn.o_proj", hidden),),
        "gate_up": (("mlp.gate_up_proj", 2 * inner),) if fused else (("mlp.gate_proj", inner), ("mlp.up_proj", inner)),
        "down": (("mlp.down_proj", hidden),),
    }
    if config.qkv_bias:
        parts["qkv_bias"] = heads
    if config.qk_norm:
        parts["q_norm"] = (("self_attn.q_norm", config.head_dim),)
        parts["k_norm"] = (("self_attn.k_norm", config.head_dim),)
    if config.post_norms:
        parts["post_attn_norm"] = (("post_attention_layernorm", hidden),)
        parts["mlp_norm"] = (("pre_feedforward_layernorm", hidden),)
        parts["post_mlp_norm"] = (("post_feedforward_layernorm", hidden),)
    elif not config.parallel:
        parts["mlp_norm"] = (("post_attention_layernorm", hidden),)
    return parts


def _columns(config: DecoderConfig, part: str) -> tuple[int, ...]:
    """Shape behind the rows: () for vectors."""
    inputs = {
        "qkv": config.hidden_size, "o": config.num_heads * config.head_dim,
        "gate_up": config.hidden_size, "down": config.intermediate_size,
    }  # fmt: skip
    return (inputs[part],) if part in inputs else ()


def tensor_name(layer: int, name: str, part: str) -> str:
    """Full name of a tensor of `layer_parts`."""
    return f"model.layers.{layer}.{name}.{'bias' if part.endswith('_bias') else 'weight'}"


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape `[out, in]` of every tensor, under the names of a Hugging Face checkpoint of the configuration's family."""
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for part, blocks in layer_parts(config).items():
            result |= {tensor_name(layer, name, part): (rows, *_columns(config, part)) for name, rows in blocks}
    result["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        result["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return result


def num_parameters(config: DecoderConfig) -> int:
    """Number of scalar parameters; a tied embedding counts once."""
    return sum(math.prod(shape) for shape in shapes(config).values())


def allocate(config: DecoderConfig, dtype: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Uninitialised parameters of the decoder, and for every name of `shapes` the view into them that it fills.

    Query, key and value (gate and up) are row blocks of one buffer, so reading needs no second copy of a tensor.
    """
    dtype = np.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype={dtype.name} is not supported for parameters; supported: {', '.join(DTYPES)}")
    expected = shapes(config)
    views: dict[str, np.ndarray] = {}

    def buffer(*names: str) -> np.ndarray:
        rows = [expected[name][0] for name in names]
        whole = np.empty((sum(rows), *expected[names[0]][1:]), dtype)
        views.update(zip(names, np.split(whole, np.cumsum(rows)[:-1]), strict=True))
        return whole

    def layer(index: int) -> dict[str, np.ndarray]:
        return {
            part: buffer(*(tensor_name(index, name, part) for name, _ in blocks))
            for part, blocks in layer_parts(config).items()
        }

    params: dict[str, Any] = {
        "embed": buffer("model.embed_tokens.weight"),
        "layers": tuple(map(layer, range(config.num_layers))),
        "final_norm": buffer("model.norm.weight"),
    }
    if not config.tie_embeddings:
        params["lm_head"] = buffer("lm_head.weight")
    assert views.keys() == expected.keys()
    return params, views


def check(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[pathlib.Path, tuple[int, ...]]], source: Any
) -> None:
    """Raises CheckpointError unless `found`, name to (file, shape), has exactly the `expected` names and shapes."""
    missing = [name for name in expected if name not in found]
    if missing:
        name = missing[0]
        raise CheckpointError(
            f"{source}: tensor {name!r} is missing (expected shape {expected[name]}); "
            f"{len(missing)} of {len(expected)} tensors are missing"
        )
    for name, (file, shape) in found.items():
        if name not in expected:
            raise CheckpointError(f"{file}: tensor {name!r} of shape {shape} is not a parameter of this configuration")
        if shape != expected[name]:
            hint = " (transposed)" if shape == expected[name][::-1] else ""
            raise CheckpointError(f"{file}: tensor {name!r} has shape {shape}{hint}; expected {expected[name]}")


def store(view: np.ndarray, value: np.ndarray, file: Any, name: str) -> None:
    """Writes `value` into its `view`, cast to the view's dtype, where it must be finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        view[...] = value
    finite = np.isfinite(view)
    if not finite.all():
        raise CheckpointError(
            f"{file}: tensor {name!r} of shape {view.shape} has {view.size - int(finite.sum())} "
            f"values that are not finite as {view.dtype.name}"
        )

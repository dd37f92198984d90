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


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape `[out, in]` of every tensor, under the names of a Hugging Face llama checkpoint."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        result |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (query_rows, hidden),
                "self_attn.k_proj": (kv_rows, hidden),
                "self_attn.v_proj": (kv_rows, hidden),
                "self_attn.o_proj": (hidden, query_rows),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    result["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        result["lm_head.weight"] = (config.vocab_size, hidden)
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

    def layer(prefix: str) -> dict[str, np.ndarray]:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return {
            "attn_norm": buffer(f"{prefix}.input_layernorm.weight"),
            "qkv": buffer(*(f"{attention}.{part}_proj.weight" for part in "qkv")),
            "o": buffer(f"{attention}.o_proj.weight"),
            "mlp_norm": buffer(f"{prefix}.post_attention_layernorm.weight"),
            "gate_up": buffer(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            "down": buffer(f"{mlp}.down_proj.weight"),
        }

    params: dict[str, Any] = {
        "embed": buffer("model.embed_tokens.weight"),
        "layers": tuple(layer(f"model.layers.{index}") for index in range(config.num_layers)),
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

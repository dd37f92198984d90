"""LoRA adapters in PEFT's folder format (`adapter_config.json`, `adapter_model.safetensors`), in and out."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from stackalign.lm import lora
from stackalign.lm.config import DecoderConfig
from stackalign.lm.weights.layout import CheckpointError

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Families whose checkpoints hold several of our projections in one: module to its targets, in the order of its rows.
FUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phi3": {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
}
# Fields of adapter_config.json that change the function, with the values that leave it plain LoRA.
_PLAIN = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "megatron_config": (None,),
}

Adapter = tuple[Mapping[str, Mapping[str, np.ndarray]], ...]
"""One agent's adapter: a dict a layer, `{target: {"a": [r, in], "b": [out, r]}}`."""


def _modules(family: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """A family's modules by the names that `target_modules` has, each with its path and the targets that it holds."""
    fused = FUSED.get(family, {})
    inside = {part for parts in fused.values() for part in parts}
    modules = {**fused, **{path: (target,) for target, path in MODULES.items() if target not in inside}}
    return {path.split(".")[1]: (path, parts) for path, parts in modules.items()}


def _key(layer: int, module: str, side: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"


def _join(layer: Mapping[str, Any], parts: tuple[str, ...], rows: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """The adapters of a module's parts as one, `(a, b)`: their ranks add up and `b` is block-diagonal."""
    held = [name for name in parts if name in layer]
    a = np.concatenate([np.asarray(layer[name]["a"], np.float32) for name in held])
    b = np.zeros((sum(rows[name] for name in parts), a.shape[0]), np.float32)
    row = column = 0
    for name in parts:
        if name in layer:
            block = np.asarray(layer[name]["b"], np.float32)
            b[row : row + block.shape[0], column : column + block.shape[1]] = block
            column += block.shape[1]
        row += rows[name]
    return a, b


def save(
    folder: str | os.PathLike, adapter: Adapter, config: lora.LoraConfig, base_model: str, model: DecoderConfig
) -> None:
    """Writes one agent's adapter as a PEFT folder.

    Where the family's checkpoints fuse projections (Phi-3), so does the adapter, with the sum of their ranks.

    Args:
      folder: created if missing.
      adapter: see `Adapter` (`lora.select(stack, index)`).
      config: its shape.
      base_model: name or path of the base, for the reader of the adapter.
      model: configuration of the base.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = {target: out for target, (out, _) in lora.target_shapes(model).items()}
    tensors, copies = {}, {}
    for name, (path, parts) in _modules(model.family).items():
        copies[name] = len(set(parts) & set(config.targets))
        for index, layer in enumerate(adapter if copies[name] else ()):
            tensors[_key(index, path, "A")], tensors[_key(index, path, "B")] = _join(layer, parts, rows)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": [name for name, count in copies.items() if count],
        "rank_pattern": {name: count * config.rank for name, count in copies.items() if count > 1},
        "alpha_pattern": {name: count * config.alpha for name, count in copies.items() if count > 1},
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def read_shape(folder: str | os.PathLike) -> tuple[lora.LoraConfig, str]:
    """The shape of a PEFT folder's adapter, fused projections counted apart, and the base that it names.

    Raises:
      CheckpointError: no such folder, or fields missing or of no use.
    """
    file = pathlib.Path(folder) / "adapter_config.json"
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        known = {name: parts for family in ("", *FUSED) for name, (_, parts) in _modules(family).items()}
        targets = {part for name in described["target_modules"] for part in known[name]}
        ordered = tuple(name for name in lora.TARGETS if name in targets)
        shape = lora.LoraConfig(rank=described["r"], alpha=described["lora_alpha"], dropout=0.0, targets=ordered)
        return shape, described["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: not the configuration of a LoRA adapter: {error!r}") from error


def load(folder: str | os.PathLike, config: DecoderConfig, shape: lora.LoraConfig) -> Adapter:
    """Reads a PEFT folder as an adapter of the run's shape.

    A smaller rank is padded with zeros and another alpha is folded into `b`, which leaves the function as it was.

    Raises:
      CheckpointError: a missing or damaged file, an adapter for another base, a larger rank or other targets than the
        run's, or a kind of adapter that is not plain LoRA; the message names the field or tensor.
    """
    folder = pathlib.Path(folder)
    try:
        described = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a PEFT adapter folder: {error.filename} is missing") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: damaged adapter: {error}") from error
    if not isinstance(described, dict):
        raise CheckpointError(f"{folder}: damaged adapter: adapter_config.json must hold an object")
    modules = _modules(config.family)
    targets = described.get("target_modules")
    if isinstance(targets, list) and not set(targets) <= set(modules):
        raise CheckpointError(
            f"{folder}: target_modules has {', '.join(sorted(set(targets) - set(modules)))}, which a base of family "
            f"{config.family!r} has not ({', '.join(modules)}): the adapter was made for another base"
        )
    fused = {name for name, (_, parts) in modules.items() if len(parts) > 1}
    for field, plain in _PLAIN.items():
        value = described.get(field)
        patterned = field.endswith("_pattern") and isinstance(value, dict) and set(value) <= fused
        if field in described and value not in plain and not patterned:
            raise CheckpointError(f"{folder}: adapter field {field}={value!r} is not supported (plain LoRA)")
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder}: adapter_config.json must give r and lora_alpha, got r={rank!r}, {alpha!r}")
    allowed = {name for name, (_, parts) in modules.items() if set(parts) & set(shape.targets)}
    if not isinstance(targets, list) or not set(targets) <= allowed:
        raise CheckpointError(
            f"{folder}: the adapter's target_modules {targets} are not all among the run's --lora_targets "
            f"({','.join(shape.targets)})"
        )
    sizes = lora.target_shapes(config)
    layers = [
        {
            target: {
                "a": np.zeros((shape.rank, sizes[target][1]), np.float32),
                "b": np.zeros((sizes[target][0], shape.rank), np.float32),
            }
            for target in shape.targets
        }
        for _ in range(config.num_layers)
    ]
    for name in sorted(targets):
        path, parts = modules[name]
        own_rank = (described.get("rank_pattern") or {}).get(name, rank)
        ratio = (described.get("alpha_pattern") or {}).get(name, alpha) / own_rank / shape.scale
        if name not in fused:
            _require_rank(folder, own_rank, parts[0], shape)
        for index, layer in enumerate(layers):
            rows = np.cumsum([sizes[part][0] for part in parts])
            a, b = (
                _checked(folder, key, tensors.pop(key, None), expected)
                for key, expected in (
                    (_key(index, path, "A"), (own_rank, sizes[parts[0]][1])),
                    (_key(index, path, "B"), (int(rows[-1]), own_rank)),
                )
            )
            blocks = dict(zip(parts, np.split(b, rows[:-1]), strict=True))
            for part, columns in _columns(blocks, [part for part in parts if part in shape.targets]).items():
                if part not in shape.targets:
                    if len(columns):
                        raise CheckpointError(
                            f"{folder}: the adapter changes {part!r} (in {name}), which is not among the run's "
                            f"--lora_targets ({','.join(shape.targets)})"
                        )
                    continue
                _require_rank(folder, len(columns), part, shape)
                layer[part]["a"][: len(columns)] = a[columns]
                layer[part]["b"][:, : len(columns)] = blocks[part][:, columns].astype(np.float32) * ratio
    if tensors:
        raise CheckpointError(
            f"{folder}: tensor {min(tensors)} does not belong to this base ({config.num_layers} layers): the adapter "
            "was made for another"
        )
    return tuple(layers)


def _columns(blocks: Mapping[str, np.ndarray], held: list[str]) -> dict[str, np.ndarray]:
    """The columns of `b` that each part of a module uses: its block where `b` is block-diagonal, else those not zero.

    Args:
      blocks: each part's rows of `b`, `[out, rank]`.
      held: the parts that may have an adapter.
    """
    rank = next(iter(blocks.values())).shape[1]
    each = rank // len(held)
    diagonal = {part: np.arange(place * each, (place + 1) * each) for place, part in enumerate(held)}
    outside = (np.delete(block, diagonal.get(part, []), axis=1) for part, block in blocks.items())
    if each * len(held) == rank and not any(rest.any() for rest in outside):
        return {part: diagonal.get(part, np.arange(0)) for part in blocks}
    return {part: np.flatnonzero(block.any(axis=0)) for part, block in blocks.items()}


def _require_rank(folder: pathlib.Path, rank: int, target: str, shape: lora.LoraConfig) -> None:
    if rank > shape.rank:
        raise CheckpointError(
            f"{folder}: the adapter has rank {rank} on {target!r}, the run {shape.rank}: pass --lora_rank={rank}"
        )


def _checked(folder: pathlib.Path, key: str, value: np.ndarray | None, expected: tuple[int, ...]) -> np.ndarray:
    if value is None or value.shape != expected:
        what = "missing" if value is None else f"of shape {value.shape}"
        raise CheckpointError(
            f"{folder}: tensor {key} is {what}; this base needs {expected}, so the adapter is damaged or was made for "
            "another"
        )
    if not np.isfinite(value).all():
        raise CheckpointError(f"{folder}: tensor {key} has values that are not finite")
    return value

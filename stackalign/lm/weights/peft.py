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
_TARGETS = {module.split(".")[1]: target for target, module in MODULES.items()}
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


def _key(layer: int, target: str, side: str) -> str:
    return f"base_model.model.model.layers.{layer}.{MODULES.get(target, target)}.lora_{side}.weight"


def _fuse(layer: Mapping[str, Any], parts: tuple[str, ...], rows: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The adapters of several projections as one of the fused projection: their ranks add up, `b` is block-diagonal."""
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
    return {"a": a, "b": b}


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
    fused = FUSED.get(model.family, {})
    alone = [name for name in config.targets if not any(name in parts for parts in fused.values())]
    fused = {module: parts for module, parts in fused.items() if set(parts) & set(config.targets)}
    tensors = {}
    for index, layer in enumerate(adapter):
        modules = {name: layer[name] for name in alone}
        modules |= {module: _fuse(layer, parts, rows) for module, parts in fused.items()}
        for name, sides in modules.items():
            for side in ("a", "b"):
                value = np.ascontiguousarray(np.asarray(sides[side], np.float32))
                tensors[_key(index, name, side.upper())] = value
    copies = {module.split(".")[1]: len(set(parts) & set(config.targets)) for module, parts in fused.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": [MODULES[target].split(".")[1] for target in alone] + list(copies),
        "rank_pattern": {module: count * config.rank for module, count in copies.items()},
        "alpha_pattern": {module: count * config.alpha for module, count in copies.items()},
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
        apart = {module.split(".")[1]: parts for family in FUSED.values() for module, parts in family.items()}
        targets = [part for name in described["target_modules"] for part in (apart.get(name) or (_TARGETS[name],))]
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
    except (json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: damaged adapter: {error}") from error
    fused = FUSED.get(config.family, {})
    patterns = {name: described.get(name) or {} for name in ("rank_pattern", "alpha_pattern")} if fused else {}
    for field, plain in _PLAIN.items():
        if field in patterns and set(patterns[field]) <= {module.split(".")[1] for module in fused}:
            continue
        if field in described and described[field] not in plain:
            raise CheckpointError(f"{folder}: adapter field {field}={described[field]!r} is not supported (plain LoRA)")
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder}: adapter_config.json must give r and lora_alpha, got r={rank!r}, {alpha!r}")
    if rank > shape.rank and not FUSED.get(config.family):
        raise CheckpointError(f"{folder}: the adapter has rank {rank}, the run {shape.rank}: pass --lora_rank={rank}")
    targets = described.get("target_modules")
    if fused and isinstance(targets, list):
        tensors, targets = _split(folder, tensors, targets, described | patterns, config, shape)
        rank, alpha = shape.rank, shape.alpha
    unknown = sorted(set(targets or ()) - set(_TARGETS)) if isinstance(targets, list) else [targets]
    missing = [] if unknown else sorted({_TARGETS[name] for name in targets} - set(shape.targets))
    if unknown or missing:
        raise CheckpointError(
            f"{folder}: the adapter's target_modules {targets} are not all among the run's --lora_targets "
            f"({','.join(shape.targets)})"
        )
    sizes, layers = lora.target_shapes(config), []
    ratio = (alpha / rank) / shape.scale
    for index in range(config.num_layers):
        layer = {}
        for target in shape.targets:
            out, fan_in = sizes[target]
            a, b = np.zeros((shape.rank, fan_in), np.float32), np.zeros((out, shape.rank), np.float32)
            found = [tensors.pop(_key(index, target, side), None) for side in "AB"]
            if MODULES[target].split(".")[1] in targets:
                for side, value, expected in zip("AB", found, ((rank, fan_in), (out, rank)), strict=True):
                    _checked(folder, _key(index, target, side), value, expected)
                a[:rank], b[:, :rank] = found[0], found[1].astype(np.float32) * ratio
            layer[target] = {"a": a, "b": b}
        layers.append(layer)
    if tensors:
        raise CheckpointError(
            f"{folder}: tensor {min(tensors)} does not belong to this base ({config.num_layers} layers)"
        )
    return tuple(layers)


def _split(folder, tensors, targets, described, config: DecoderConfig, shape: lora.LoraConfig):
    """Tensors and target modules of a PEFT folder with fused projections, as the unfused ones of the run's shape."""
    sizes, found, kept = lora.target_shapes(config), dict(tensors), []
    fused = {module.split(".")[1]: (module, parts) for module, parts in FUSED[config.family].items()}
    plain = {MODULES[name].split(".")[1]: (MODULES[name], (name,)) for name in ("o", "down")}
    for name in sorted(targets):
        if name not in fused | plain:
            kept.append(name)
            continue
        module, parts = (fused | plain)[name]
        rank = described["rank_pattern"].get(name, described["r"])
        ratio = described["alpha_pattern"].get(name, described["lora_alpha"]) / rank / shape.scale
        kept += [MODULES[part].split(".")[1] for part in parts if part in shape.targets]
        for index in range(config.num_layers):
            keys = [_key(index, module, side) for side in "AB"]
            a, b = (_checked(folder, key, found.pop(key, None), expected) for key, expected in zip(
                keys, ((rank, sizes[parts[0]][1]), (sum(sizes[part][0] for part in parts), rank)), strict=True
            ))  # fmt: skip
            blocks = dict(zip(parts, np.split(b, np.cumsum([sizes[part][0] for part in parts])[:-1]), strict=True))
            for part, columns in _columns(blocks, [part for part in parts if part in shape.targets], rank).items():
                if part not in shape.targets and len(columns):
                    raise CheckpointError(
                        f"{folder}: the adapter changes {part!r} (in {name}), which is not among the run's "
                        f"--lora_targets ({','.join(shape.targets)})"
                    )
                if len(columns) > shape.rank:
                    raise CheckpointError(
                        f"{folder}: the adapter has rank {len(columns)} on {part!r}, the run {shape.rank}: pass "
                        f"--lora_rank={len(columns)}"
                    )
                if part in shape.targets:
                    out, fan_in = sizes[part]
                    own_a, own_b = np.zeros((shape.rank, fan_in), np.float32), np.zeros((out, shape.rank), np.float32)
                    own_a[: len(columns)] = a[columns]
                    own_b[:, : len(columns)] = blocks[part][:, columns].astype(np.float32) * ratio
                    found[_key(index, part, "A")], found[_key(index, part, "B")] = own_a, own_b
    return found, list(dict.fromkeys(kept))


def _columns(blocks: Mapping[str, np.ndarray], held: list[str], rank: int) -> dict[str, np.ndarray]:
    """The columns of a fused `b` that each part uses: its block where `b` is block-diagonal, else those not zero."""
    each = rank // max(len(held), 1)
    diagonal = {part: np.arange(place * each, (place + 1) * each) for place, part in enumerate(held)}
    outside = [np.delete(block, diagonal.get(part, []), axis=1).any() for part, block in blocks.items()]
    if len(blocks) == 1 or (each * len(held) == rank and not any(outside)):
        return {part: diagonal.get(part, np.arange(0)) for part in blocks}
    return {part: np.flatnonzero(block.any(axis=0)) for part, block in blocks.items()}


def _checked(folder, key: str, value: np.ndarray | None, expected: tuple[int, ...]) -> np.ndarray:
    if value is None or value.shape != expected or not np.isfinite(value).all():
        what = "missing" if value is None else f"of shape {value.shape} or not finite"
        raise CheckpointError(f"{folder}: tensor {key} is {what}; this base needs {expected}")
    return value

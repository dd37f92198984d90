"""LoRA adapters in PEFT's folder format (`adapter_config.json`, `adapter_model.safetensors`), in and out."""

import json
import os
import pathlib
from collections.abc import Mapping

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
    return f"base_model.model.model.layers.{layer}.{MODULES[target]}.lora_{side}.weight"


def save(folder: str | os.PathLike, adapter: Adapter, config: lora.LoraConfig, base_model: str) -> None:
    """Writes one agent's adapter as a PEFT folder.

    Args:
      folder: created if missing.
      adapter: see `Adapter` (`lora.select(stack, index)`).
      config: its shape.
      base_model: name or path of the base, for the reader of the adapter.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        _key(index, target, side.upper()): np.ascontiguousarray(np.asarray(layer[target][side], np.float32))
        for index, layer in enumerate(adapter)
        for target in layer
        for side in ("a", "b")
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": [MODULES[target].split(".")[1] for target in config.targets],
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


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
    for field, plain in _PLAIN.items():
        if field in described and described[field] not in plain:
            raise CheckpointError(f"{folder}: adapter field {field}={described[field]!r} is not supported (plain LoRA)")
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder}: adapter_config.json must give r and lora_alpha, got r={rank!r}, {alpha!r}")
    if rank > shape.rank:
        raise CheckpointError(f"{folder}: the adapter has rank {rank}, the run {shape.rank}: pass --lora_rank={rank}")
    targets = described.get("target_modules")
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
                    if value is None or value.shape != expected or not np.isfinite(value).all():
                        what = "missing" if value is None else f"of shape {value.shape} or not finite"
                        raise CheckpointError(
                            f"{folder}: tensor {_key(index, target, side)} is {what}; this base needs {expected}"
                        )
                a[:rank], b[:, :rank] = found[0], found[1].astype(np.float32) * ratio
            layer[target] = {"a": a, "b": b}
        layers.append(layer)
    if tensors:
        raise CheckpointError(
            f"{folder}: tensor {min(tensors)} does not belong to this base ({config.num_layers} layers)"
        )
    return tuple(layers)

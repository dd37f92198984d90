"""Writes parameters, with or without an adapter merged into them, as a Hugging Face folder that others load."""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
from safetensors.numpy import save_file

from stackalign.lm import lora
from stackalign.lm.config import DecoderConfig
from stackalign.lm.weights import hf_config, layout

SHARD = 5 * 10**9  # bytes of a file
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tensors(
    config: DecoderConfig, params: Mapping[str, Any], adapter: Any = None, *, scale: float = 1.0
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values of a checkpoint of the configuration's family, one at a time.

    Args:
      config: the model's.
      params: its parameters.
      adapter: one agent's adapter (`lora.select(stack, index)`: `{target: {"a": [r, in], "b": [out, r]}}` a layer), or
        None. Each projection W becomes `W + scale * b a`.
      scale: `LoraConfig.scale`.
    """
    yield "model.embed_tokens.weight", np.asarray(params["embed"], np.float32)
    blocks = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
    rows = {target: out for target, (out, _) in lora.target_shapes(config).items()}
    for index, layer in enumerate(params["layers"]):
        for part, names in layout.layer_parts(config).items():
            value = np.array(layer[part], np.float32)
            first = 0
            for target in blocks.get(part, ()):
                if adapter is not None and target in adapter[index]:
                    a, b = (np.asarray(adapter[index][target][side], np.float32) for side in "ab")
                    value[first : first + rows[target]] += scale * (b @ a)
                first += rows[target]
            borders = np.cumsum([size for _, size in names])[:-1]
            for (name, _), block in zip(names, np.split(value, borders), strict=True):
                yield layout.tensor_name(index, name, part), block
    yield "model.norm.weight", np.asarray(params["final_norm"], np.float32)
    if not config.tie_embeddings:
        yield "lm_head.weight", np.asarray(params["lm_head"], np.float32)


def read_token_ids(path: pathlib.Path) -> dict[str, Any]:
    """The `token_ids` of `save` that the `config.json` of a base states; none where it is no folder."""
    stated = json.loads((path / "config.json").read_text(encoding="utf-8")) if path.is_dir() else {}
    return {name: stated[name] for name in _TOKEN_IDS if name in stated}


def save(
    folder: str | os.PathLike,
    config: DecoderConfig,
    params: Mapping[str, Any],
    adapter: Any = None,
    *,
    scale: float = 1.0,
    dtype: str = "bfloat16",
    shard: int = SHARD,
    token_ids: Mapping[str, Any] | None = None,
) -> None:
    """Writes `config.json` and safetensors, in shards with an index where one file would exceed `shard` bytes.

    Host memory holds one shard beside the parameters. The tokenizer is not written (`lm.tokenizer.save`).

    Args:
      folder: created if missing.
      config, params, adapter, scale: see `tensors`.
      dtype: of what is written: float32, bfloat16 or float16.
      shard: bytes.
      token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` of config.json; null by default (`read_token_ids`).

    Raises:
      UnsupportedModelError: a configuration that its family's format can't state.
      ValueError: another dtype, or a value that is not finite in it.
    """
    if dtype not in layout.DTYPES:
        raise ValueError(f"dtype={dtype} is not supported for parameters; supported: {', '.join(layout.DTYPES)}")
    fields = hf_config.to_hf(config) | {"dtype": dtype, "torch_dtype": dtype}
    fields |= dict.fromkeys(_TOKEN_IDS) | dict(token_ids or {})
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    width = np.dtype(dtype).itemsize
    placed, number, filled = {}, 0, 0
    for name, shape in layout.shapes(config).items():
        size = width * int(np.prod(shape))
        if filled and filled + size > shard:
            number, filled = number + 1, 0
        placed[name], filled = number, filled + size
    count = number + 1
    files = ["model.safetensors"] if count == 1 else [
        f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)
    ]  # fmt: skip
    held: dict[str, np.ndarray] = {}
    current = 0
    for name, value in tensors(config, params, adapter, scale=scale):
        if placed[name] != current:
            save_file(held, folder / files[current], metadata={"format": "pt"})
            held, current = {}, placed[name]
        with np.errstate(over="ignore"):
            held[name] = np.ascontiguousarray(value.astype(dtype))
        if not np.isfinite(held[name]).all():
            raise ValueError(f"{name} has values that are not finite as {dtype}")
    save_file(held, folder / files[current], metadata={"format": "pt"})
    if count > 1:
        total = width * layout.num_parameters(config)
        index = {"metadata": {"total_size": total}, "weight_map": {name: files[at] for name, at in placed.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

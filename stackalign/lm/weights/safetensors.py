"""Reads a Hugging Face checkpoint folder: `config.json` with `model.safetensors`, whole or sharded."""

import contextlib
import json
import pathlib
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
from safetensors import SafetensorError, safe_open

from stackalign.lm.config import DecoderConfig
from stackalign.lm.weights import hf_config, layout
from stackalign.lm.weights.layout import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("BF16", "F16", "F32", "F64")
_DERIVED = ".rotary_emb.inv_freq"  # written by old versions; follows from the configuration
# Where checkpoints with a vision part keep their text part, and what of theirs is not text.
_TEXT = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_VISION = ("vision_tower.", "multi_modal_projector.", "mm_projector.", "image_newline", "vision_model.")


def load(folder: pathlib.Path, *, dtype: Any = np.float32) -> tuple[DecoderConfig, dict[str, Any]]:
    """Reads configuration and parameters of a checkpoint folder; see `stackalign.lm.weights.load`."""
    fields = _read_json(folder / "config.json")
    config = hf_config.from_hf(fields)
    with contextlib.ExitStack() as stack:
        found, readers = _open_all(folder, stack)
        with_vision = hf_config.has_vision_part(fields)
        stored = {_text_name(name) if with_vision else name: name for name in found}
        found = {name: found[stored[name]] for name in stored if name is not None}

        def read(name: str) -> np.ndarray:
            try:
                return readers[found[name][0]].get_tensor(stored[name])
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{found[name][0]}: tensor {name!r} can't be read: {error}") from error

        names = found.keys()
        if config.tie_embeddings and "lm_head.weight" in found:
            # Some writers store the tied output too: harmless if it is the embedding, another model if it is not.
            if not np.array_equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
                file, shape = found["lm_head.weight"]
                raise CheckpointError(
                    f"{file}: tensor 'lm_head.weight' of shape {shape} differs from the embedding that config.json "
                    "ties it to (tie_word_embeddings)"
                )
            names = names - {"lm_head.weight"}
        layout.check(layout.shapes(config), {name: found[name] for name in found if name in names}, folder)
        params, views = layout.allocate(config, dtype)
        for name, view in views.items():
            layout.store(view, read(name), found[name][0], name)
    return config, params


def _text_name(name: str) -> str | None:
    """A tensor's name in the text model alone; None where it belongs to a vision part."""
    if name.removeprefix("model.").startswith(_VISION):
        return None
    for stored, own in _TEXT:
        if name.startswith(stored):
            return own + name.removeprefix(stored)
    return name


def _open_all(
    folder: pathlib.Path, stack: contextlib.ExitStack
) -> tuple[dict[str, tuple[pathlib.Path, tuple[int, ...]]], dict[pathlib.Path, Any]]:
    """Opens the file or shards; returns name to (file, shape) for every tensor, and the readers by file."""
    placed: dict[str, pathlib.Path] | None = None
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX}: no 'weight_map' from tensor to file")
        for shard in weight_map.values():
            if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard:
                raise CheckpointError(f"{folder / INDEX}: {shard!r} is not the name of a file in the same folder")
        placed = {name: folder / shard for name, shard in weight_map.items()}
        files = sorted(set(placed.values()))
    else:
        raise CheckpointError(f"{folder}: neither {WEIGHTS} nor {INDEX} (other formats of weights are not read)")

    readers: dict[pathlib.Path, Any] = {}
    found: dict[str, tuple[pathlib.Path, tuple[int, ...]]] = {}
    for file in files:
        if not file.is_file():
            lost = [name for name, place in (placed or {}).items() if place == file]
            raise CheckpointError(f"{file}: missing shard, which should hold {len(lost)} tensors, {lost[0]!r} first")
        try:
            readers[file] = stack.enter_context(safe_open(file, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a whole safetensors file (truncated or damaged): {error}") from error
        for name in readers[file].keys():  # noqa: SIM118  (a reader is no mapping)
            header = readers[file].get_slice(name)
            if name.endswith(_DERIVED):
                continue
            if placed is not None and placed.get(name) != file:
                raise CheckpointError(f"{file}: tensor {name!r} is here, but {INDEX} places it in {placed.get(name)}")
            if header.get_dtype() not in _FLOATS:
                raise CheckpointError(
                    f"{file}: tensor {name!r} has type {header.get_dtype()}; supported: {', '.join(_FLOATS)}"
                )
            found[name] = (file, tuple(header.get_shape()))
    for name, file in (placed or {}).items():
        if name not in found and not name.endswith(_DERIVED):
            raise CheckpointError(f"{file}: tensor {name!r} is missing, though {INDEX} places it there")
    return found, readers


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return value

"""Pretrained parameters, from a Hugging Face folder or a GGUF file."""

import os
import pathlib
from typing import Any

import numpy as np

from stackalign.lm.config import DecoderConfig
from stackalign.lm.weights.layout import CheckpointError, num_parameters

__all__ = ["CheckpointError", "load", "num_parameters"]


def load(path: str | os.PathLike[str], *, dtype: Any = np.float32) -> tuple[DecoderConfig, dict[str, Any]]:
    """Reads a checkpoint into host memory, tensor by tensor: no more than the parameters and one tensor at a time.

    Args:
      path: a folder with `config.json` and `model.safetensors` (or its shards and their index), or a `.gguf` file.
      dtype: of every parameter: float32, bfloat16 or float16.

    Returns:
      The configuration and the parameters as NumPy arrays in the orientation `[out, in]`::

        {"embed": [V, d], "layers": ({"attn_norm": [d], "qkv": [(H + 2·Hkv)·hd, d], "o": [d, H·hd], "mlp_norm": [d],
                                      "gate_up": [2f, d], "down": [d, f]}, ...),
         "final_norm": [d], "lm_head": [V, d] (only when untied)}

    Raises:
      UnsupportedModelError: an architecture or field that the decoder does not compute.
      CheckpointError: a tensor missing, left over, of another shape or type, or not finite; a damaged or missing file.
    """
    path = pathlib.Path(path)
    # Imported here: neither format's package is needed for the other.
    if path.is_dir():
        from stackalign.lm.weights import safetensors

        return safetensors.load(path, dtype=dtype)
    if path.is_file() and path.suffix == ".gguf":
        from stackalign.lm.weights import gguf

        return gguf.load(path, dtype=dtype)
    raise CheckpointError(f"{path}: expected a folder with config.json and safetensors, or a .gguf file")

"""Decoder configurations: what a checkpoint's configuration comes to. Its readers are in `lm.weights`.

What the decoder can't compute is refused by name rather than approximated.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


class UnsupportedModelError(ValueError):
    """A model that the decoder does not compute: its architecture, or a configuration field by name and value."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3 rotary scaling: long wavelengths are stretched by `factor`, short ones kept, a linear blend between.

    With wavelength `w = 2 pi / frequency`: `w > original_max_positions / low_freq_factor` is divided by `factor`,
    `w < original_max_positions / high_freq_factor` is kept.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(f"rope scaling {name}", getattr(self, name))
        check_count("rope scaling original_max_positions", self.original_max_positions)
        if self.high_freq_factor <= self.low_freq_factor:
            raise UnsupportedModelError(
                f"rope scaling high_freq_factor={self.high_freq_factor} must exceed "
                f"low_freq_factor={self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class DividedRope:
    """Rotary frequencies divided by numbers of their own, `[rotary_dim / 2]`, and a factor on cosines and sines."""

    divisors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for divisor in self.divisors:
            check_positive("rope scaling factor", divisor)
        check_positive("rope scaling attention_factor", self.attention_factor)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Static shape and constants of a decoder: hashable, so that it can be a static argument of a jitted function.

    `vocab_size` is the number of rows of the embedding, which may exceed the tokenizer's number of ids.
    `num_heads * head_dim` need not equal `hidden_size`. `max_positions` is the context in tokens that the function is
    that of the checkpoint for. The fields with defaults are what families add to a plain Llama:

    Attributes:
      activation: of the gated MLP, "silu" or "gelu_tanh".
      attention_scale: factor of attention logits; None is `head_dim ** -0.5`.
      norm: "rms", or "layer" for a layer norm without bias.
      norm_offset: added to every norm's weights (Gemma stores them around 0).
      qkv_bias: query, key and value projections have biases (Qwen2).
      qk_norm: each query and key head is normalised before rotation (Qwen3, Gemma 3).
      post_norms: attention and MLP outputs are normalised before they are added (Gemma 3).
      parallel: attention and MLP read the same normalised input and are added together (Cohere).
      rotary_dim: leading features of a head that are rotated; None is all (Phi-4-mini rotates three quarters).
      rope_interleaved: neighbouring features form the rotated pairs (Cohere).
      local_rope_theta: base of the unscaled rotary frequencies in layers with a window; None is the same as elsewhere.
      windows: one entry a layer, how many positions back (itself included) it attends, or None for all; () for all.
      embed_scale: factor of the embedded tokens.
      logit_scale: factor of the logits.
      family: the `model_type` whose tensor names and fields the checkpoint has.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | DividedRope | None
    tie_embeddings: bool
    max_positions: int
    activation: str = "silu"
    attention_scale: float | None = None
    norm: str = "rms"
    norm_offset: float = 0.0
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    parallel: bool = False
    rotary_dim: int | None = None
    rope_interleaved: bool = False
    local_rope_theta: float | None = None
    windows: tuple[int | None, ...] = ()
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    family: str = "llama"

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.windows or (None,) * self.num_layers

    @property
    def rotary_size(self) -> int:
        """Features of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_positions"):
            check_count(name, getattr(self, name))
        check_positive("norm_eps", self.norm_eps)
        check_positive("rope_theta", self.rope_theta)
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.rotary_dim is not None:
            check_count("rotary_dim", self.rotary_dim)
        if self.rotary_size % 2 or self.rotary_size > self.head_dim:
            raise UnsupportedModelError(
                f"head_dim={self.head_dim} with {self.rotary_size} rotated features: rotary positions act on pairs of "
                "features of a head"
            )
        for name in ("attention_scale", "local_rope_theta"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name in ("embed_scale", "logit_scale"):
            check_positive(name, getattr(self, name))
        if self.activation not in ("silu", "gelu_tanh"):
            raise refuse("activation", self.activation, "'silu' or 'gelu_tanh'")
        if self.norm not in ("rms", "layer"):
            raise refuse("norm", self.norm, "'rms' or 'layer'")
        if self.windows and len(self.windows) != self.num_layers:
            raise UnsupportedModelError(f"windows must have one entry for each of the {self.num_layers} layers")
        for window in self.windows:
            if window is not None:
                check_count("sliding_window", window)
        if isinstance(self.rope_scaling, DividedRope) and len(self.rope_scaling.divisors) != self.rotary_size // 2:
            raise UnsupportedModelError(
                f"rope scaling has {len(self.rope_scaling.divisors)} factors for {self.rotary_size // 2} frequencies"
            )


def check_count(name: str, value: Any) -> None:
    """Raises UnsupportedModelError unless the value is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{name}={value!r} must be a positive integer")


def check_positive(name: str, value: Any) -> None:
    """Raises UnsupportedModelError unless the value is a positive finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise UnsupportedModelError(f"{name}={value!r} must be a positive finite number")


def refuse(field: str, value: Any, supported: str) -> UnsupportedModelError:
    """The error for a value that is not supported."""
    return UnsupportedModelError(f"{field}={value!r} is not supported; supported: {supported}")


def required(fields: Mapping[str, Any], name: str) -> Any:
    """A field's value; UnsupportedModelError where it is absent or null."""
    if fields.get(name) is None:
        raise UnsupportedModelError(f"the model's configuration lacks the required field {name!r}")
    return fields[name]


def head_size(explicit: Any, hidden_size: Any, num_heads: Any) -> Any:
    """The head size that a file states, or the hidden size over the heads."""
    if explicit is not None:
        return explicit
    check_count("hidden size", hidden_size)
    check_count("number of attention heads", num_heads)
    if hidden_size % num_heads:
        raise UnsupportedModelError(
            f"no head size is given and the hidden size {hidden_size} is not a multiple of the {num_heads} heads"
        )
    return hidden_size // num_heads

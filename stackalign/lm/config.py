"""Decoder configurations, read from a checkpoint's own `config.json` or GGUF fields.

A field that the file gives is always used; what the decoder can't compute is refused by name rather than approximated.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
            _check_positive(f"rope scaling {name}", getattr(self, name))
        _check_count("rope scaling original_max_positions", self.original_max_positions)
        if self.high_freq_factor <= self.low_freq_factor:
            raise UnsupportedModelError(
                f"rope scaling high_freq_factor={self.high_freq_factor} must exceed "
                f"low_freq_factor={self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Static shape and constants of a decoder: hashable, so that it can be a static argument of a jitted function.

    `vocab_size` is the number of rows of the embedding, which may exceed the tokenizer's number of ids.
    `num_heads * head_dim` need not equal `hidden_size`. `max_positions` is the trained context in tokens.
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
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    max_positions: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_positions"):
            _check_count(name, getattr(self, name))
        _check_positive("norm_eps", self.norm_eps)
        _check_positive("rope_theta", self.rope_theta)
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim={self.head_dim} must be even (rotary positions act on pairs)")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{name}={value!r} must be a positive integer")


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise UnsupportedModelError(f"{name}={value!r} must be a positive finite number")


def _refuse(field: str, value: Any, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{field}={value!r} is not supported; supported: {supported}")


# Fields of config.json that change the function, with the values under which they leave it a plain llama.
_INERT: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "hidden_act": ("silu",),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "mlp_bias": (None, False),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1),
    "qk_norm": (None, False),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "use_qk_norm": (None, False),
}


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face `config.json` of `model_type` llama, as transformers 4 or 5 writes it.

    Absent means what it means in that format: `num_key_value_heads` as many as the heads, `head_dim`
    `hidden_size / num_attention_heads`, `rope_theta` 10000, `tie_word_embeddings` false. Every other field of the
    configuration is required.

    Raises:
      UnsupportedModelError: an unsupported architecture or field, or a missing or senseless one; the message names it.
    """
    model_type = _required(config, "model_type")
    if model_type != "llama":
        raise _refuse("model_type", model_type, "'llama'")
    architectures = config.get("architectures")
    if architectures not in (None, ["LlamaForCausalLM"]):
        raise _refuse("architectures", architectures, "['LlamaForCausalLM']")
    for field, inert in _INERT.items():
        if field in config and config[field] not in inert:
            raise _refuse(field, config[field], " or ".join(repr(value) for value in inert if value is not None) or
                          "null or absent")
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False:
        raise _refuse("sliding_window", window, "null (every layer attends to the whole context)")
    layer_types = config.get("layer_types")
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise _refuse("layer_types", layer_types, "'full_attention' for every layer")

    num_heads = _required(config, "num_attention_heads")
    hidden_size = _required(config, "hidden_size")
    num_kv_heads = config.get("num_key_value_heads")
    rope_theta, rope_scaling = _hf_rope(config)
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise _refuse("tie_word_embeddings", tied, "true or false")
    return DecoderConfig(
        vocab_size=_required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(config, "intermediate_size"),
        num_layers=_required(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=_head_dim(config.get("head_dim"), hidden_size, num_heads),
        norm_eps=_required(config, "rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_embeddings=tied,
        max_positions=_required(config, "max_position_embeddings"),
    )


# Keys under "llama." of a GGUF file that are read below or that say nothing about the function.
_GGUF_READ = frozenset({
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "feed_forward_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "vocab_size",
})  # fmt: skip
_GGUF_INERT: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}


def from_gguf(fields: Mapping[str, Any], *, tie_embeddings: bool) -> DecoderConfig:
    """Reads the metadata of a GGUF file of architecture llama.

    A GGUF file does not say in its metadata whether embedding and output are tied (the file then has no tensor
    `output.weight`) nor how Llama 3 scales its rotary frequencies (the tensor `rope_freqs.weight` does; see
    `with_rope_factors`).

    Args:
      fields: key to plain Python value; of the tokenizer only `tokenizer.ggml.tokens` is looked at, for its length,
        where `llama.vocab_size` is absent.
      tie_embeddings: whether the output projection is the embedding.

    Raises:
      UnsupportedModelError: an unsupported architecture or field, or a missing or senseless one; the message names it.
    """
    architecture = _required(fields, "general.architecture")
    if architecture != "llama":
        raise _refuse("general.architecture", architecture, "'llama'")
    for key, value in fields.items():
        name = key.removeprefix("llama.")
        if name == key or name in _GGUF_READ:
            continue
        if value not in _GGUF_INERT.get(name, ()):
            raise _refuse(key, value, " or ".join(map(repr, _GGUF_INERT.get(name, ()))) or "files without that field")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise _refuse("llama.rope.scaling.type", scaling, "'none'")

    num_heads = _required(fields, "llama.attention.head_count")
    hidden_size = _required(fields, "llama.embedding_length")
    head_dim = _head_dim(fields.get("llama.attention.key_length"), hidden_size, num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise _refuse(key, fields[key], f"the head size, {head_dim}")
    vocab_size = fields.get("llama.vocab_size")
    if vocab_size is None:
        vocab_size = len(_required(fields, "tokenizer.ggml.tokens"))
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_required(fields, "llama.feed_forward_length"),
        num_layers=_required(fields, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=_required(fields, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.get("llama.rope.freq_base", 10000.0),
        rope_scaling=None,
        tie_embeddings=tie_embeddings,
        max_positions=_required(fields, "llama.context_length"),
    )


def with_rope_factors(config: DecoderConfig, factors: Sequence[float]) -> DecoderConfig:
    """Adds the scaling that a GGUF file states as divisors of the rotary frequencies, `[head_dim / 2]`.

    The divisors are computed from the scaling's four constants, of which every Llama 3 shares the last three; the
    first is the largest divisor. Divisors that do not come out that way are refused.
    """
    scaling = RopeScaling(
        factor=max(factors, default=1.0), low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    half = config.head_dim // 2
    expected = [_rope_divisor(config.rope_theta ** (-index / half), scaling) for index in range(half)]
    same = [math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=False)]
    if len(factors) != half or not all(same):
        raise _refuse("rope_freqs.weight", list(factors), f"divisors of {scaling}")
    return dataclasses.replace(config, rope_scaling=None if scaling.factor == 1 else scaling)


def _rope_divisor(frequency: float, scaling: RopeScaling) -> float:
    periods = scaling.original_max_positions * frequency / (2 * math.pi)
    if periods < scaling.low_freq_factor:
        return scaling.factor
    if periods > scaling.high_freq_factor:
        return 1.0
    kept = (periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return 1 / ((1 - kept) / scaling.factor + kept)


def _required(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise UnsupportedModelError(f"the model's configuration lacks the required field {name!r}")
    return fields[name]


def _head_dim(explicit: Any, hidden_size: Any, num_heads: Any) -> Any:
    if explicit is not None:
        return explicit
    _check_count("hidden size", hidden_size)
    _check_count("number of attention heads", num_heads)
    if hidden_size % num_heads:
        raise UnsupportedModelError(
            f"no head size is given and the hidden size {hidden_size} is not a multiple of the {num_heads} heads"
        )
    return hidden_size // num_heads


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    spellings = [config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name) is not None]
    if len(spellings) == 2 and _rope_kind(spellings[0]) != _rope_kind(spellings[1]):
        raise UnsupportedModelError(
            f"rope_parameters={spellings[0]!r} contradicts rope_scaling={spellings[1]!r}; give one of them"
        )
    rope = spellings[0] if spellings else {}
    if not isinstance(rope, Mapping):
        raise _refuse("rope_parameters", rope, "an object")
    thetas = [source["rope_theta"] for source in (rope, config) if source.get("rope_theta") is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
        raise UnsupportedModelError(f"rope_parameters' rope_theta={thetas[0]!r} contradicts rope_theta={thetas[1]!r}")
    theta = thetas[0] if thetas else 10000.0
    if rope.get("partial_rotary_factor", 1) not in (None, 1):
        raise _refuse("partial_rotary_factor", rope["partial_rotary_factor"], "1.0")

    kind = _rope_kind(rope)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _refuse("rope_type", kind, "'default' or 'llama3'")
    original = "original_max_position_embeddings"
    return theta, RopeScaling(
        factor=_required(rope, "factor"),
        low_freq_factor=_required(rope, "low_freq_factor"),
        high_freq_factor=_required(rope, "high_freq_factor"),
        original_max_positions=_required(rope if rope.get(original) is not None else config, original),
    )


def _rope_kind(rope: Any) -> Any:
    if not isinstance(rope, Mapping):
        raise _refuse("rope_scaling", rope, "an object")
    return rope.get("rope_type") or rope.get("type") or "default"

"""Decoder configurations from the metadata of a GGUF file.

A field that the file gives is always used; what the decoder can't compute is refused by name rather than approximated.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stackalign.lm.config import DecoderConfig, DividedRope, RopeScaling, check_count, head_size, refuse, required

# Keys under the architecture's name in a GGUF file that are read below or that say nothing about the function.
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
# GGUF architectures, their family, and the further keys that they read.
_GGUF_FAMILIES: Mapping[str, tuple[str, frozenset[str]]] = {
    "llama": ("llama", frozenset()),
    "qwen2": ("qwen2", frozenset()),
    "qwen3": ("qwen3", frozenset()),
    "gemma3": ("gemma3_text", frozenset({"attention.sliding_window", "rope.freq_base_swa", "rope.scaling.factor"})),
}


def from_gguf(fields: Mapping[str, Any], *, tie_embeddings: bool) -> DecoderConfig:
    """Reads the metadata of a GGUF file of architecture llama, qwen2, qwen3 or gemma3.

    A GGUF file does not say in its metadata whether embedding and output are tied (the file then has no tensor
    `output.weight`), how Llama 3 scales its rotary frequencies (the tensor `rope_freqs.weight` does; see
    `with_rope_factors`), nor that every sixth layer of Gemma 3 sees everything and that its 27B model (62 layers)
    scales attention by the hidden size a head.

    Args:
      fields: key to plain Python value; of the tokenizer only `tokenizer.ggml.tokens` is looked at, for its length,
        where the vocabulary's size is absent.
      tie_embeddings: whether the output projection is the embedding.

    Raises:
      UnsupportedModelError: an unsupported architecture or field, or a missing or senseless one; the message names it.
    """
    architecture = required(fields, "general.architecture")
    if architecture not in _GGUF_FAMILIES:
        raise refuse("general.architecture", architecture, ", ".join(map(repr, _GGUF_FAMILIES)))
    family, reads = _GGUF_FAMILIES[architecture]
    prefix = f"{architecture}."
    for key, value in fields.items():
        name = key.removeprefix(prefix)
        if name == key or name in _GGUF_READ | reads:
            continue
        if value not in _GGUF_INERT.get(name, ()):
            raise refuse(key, value, " or ".join(map(repr, _GGUF_INERT.get(name, ()))) or "files without that field")

    num_heads = required(fields, f"{prefix}attention.head_count")
    hidden_size = required(fields, f"{prefix}embedding_length")
    num_layers = required(fields, f"{prefix}block_count")
    head_dim = head_size(fields.get(f"{prefix}attention.key_length"), hidden_size, num_heads)
    for key in (f"{prefix}attention.value_length", f"{prefix}rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise refuse(key, fields[key], f"the head size, {head_dim}")
    scaling = fields.get(f"{prefix}rope.scaling.type", "none")
    rope_scaling = None
    if scaling == "linear" and family == "gemma3_text":
        factor = float(required(fields, f"{prefix}rope.scaling.factor"))
        rope_scaling = DividedRope((factor,) * (head_dim // 2))
    elif scaling != "none":
        raise refuse(f"{prefix}rope.scaling.type", scaling, "'none'" + (" or 'linear'" if reads else ""))
    vocab_size = fields.get(f"{prefix}vocab_size")
    if vocab_size is None:
        vocab_size = len(required(fields, "tokenizer.ggml.tokens"))
    extra: dict[str, Any] = {}
    if family == "gemma3_text":
        check_count(f"{prefix}block_count", num_layers)
        window = required(fields, f"{prefix}attention.sliding_window")
        extra = {
            "activation": "gelu_tanh", "norm_offset": 1.0, "qk_norm": True, "post_norms": True,
            "embed_scale": hidden_size**0.5, "local_rope_theta": fields.get(f"{prefix}rope.freq_base_swa", 10000.0),
            "windows": tuple(window if (layer + 1) % 6 else None for layer in range(num_layers)),
            "attention_scale": (hidden_size / num_heads if num_layers == 62 else head_dim) ** -0.5,
        }  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=required(fields, f"{prefix}feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get(f"{prefix}attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=required(fields, f"{prefix}attention.layer_norm_rms_epsilon"),
        rope_theta=fields.get(f"{prefix}rope.freq_base", 1e6 if family == "gemma3_text" else 10000.0),
        rope_scaling=rope_scaling,
        tie_embeddings=tie_embeddings,
        max_positions=required(fields, f"{prefix}context_length"),
        qkv_bias=family == "qwen2",
        family=family,
        **{"qk_norm": family == "qwen3", **extra},
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
        raise refuse("rope_freqs.weight", list(factors), f"divisors of {scaling}")
    return dataclasses.replace(config, rope_scaling=None if scaling.factor == 1 else scaling)


def _rope_divisor(frequency: float, scaling: RopeScaling) -> float:
    periods = scaling.original_max_positions * frequency / (2 * math.pi)
    if periods < scaling.low_freq_factor:
        return scaling.factor
    if periods > scaling.high_freq_factor:
        return 1.0
    kept = (periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return 1 / ((1 - kept) / scaling.factor + kept)

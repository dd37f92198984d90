"""Decoder configurations from and to a Hugging Face `config.json`.

A field that the file gives is always used; what the decoder can't compute is refused by name rather than approximated.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stackalign.lm.config import (
    DecoderConfig,
    DividedRope,
    RopeScaling,
    UnsupportedModelError,
    check_count,
    check_positive,
    head_size,
    refuse,
    required,
)

# Fields of config.json that change the function, with the values under which they leave it as the decoder computes it;
# families that give a field a meaning leave it out (`_Family.reads`).
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
    "use_bidirectional_attention": (None, False),
    "use_qk_norm": (None, False),
}


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a `model_type` means where its config.json is silent, and the fields of `_INERT` that it reads."""

    architectures: tuple[str, ...]
    rope_theta: float = 10000.0
    tied: bool = False
    reads: tuple[str, ...] = ()


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(("LlamaForCausalLM",)),
    "mistral": _Family(("MistralForCausalLM",)),
    "qwen2": _Family(("Qwen2ForCausalLM",)),
    "qwen3": _Family(("Qwen3ForCausalLM",)),
    "gemma3_text": _Family(("Gemma3ForCausalLM",), 1e6, True, ("hidden_act",)),
    "phi3": _Family(("Phi3ForCausalLM",), reads=("partial_rotary_factor",)),
    "cohere": _Family(("CohereForCausalLM",), 500000.0, True, ("logit_scale",)),
}
# Checkpoints with a vision part: their text part is a family of its own, under `text_config` or among the rest.
_NESTED = ("gemma3", "llava", "llava_next", "llava_onevision")
_FLAT = {"llava_qwen": ("qwen2", ("LlavaQwenForCausalLM",))}
# transformers' values for what a nested Gemma 3 leaves out.
_GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face `config.json`, as transformers 4 or 5 writes it.

    Families (`model_type`): llama, mistral, qwen2, qwen3, gemma3_text, phi3, cohere; of checkpoints with a vision part
    (gemma3, llava, llava_next, llava_onevision, llava_qwen) the text part.

    Absent means what it means in that format: `num_key_value_heads` as many as the heads, `head_dim`
    `hidden_size / num_attention_heads`, and the family's own rotary base and tying of embeddings. Every other field of
    the configuration is required (of a nested Gemma 3, the format's defaults hold).

    A `longrope` scaling has one set of frequencies up to `original_max_position_embeddings` and another one for whole
    sequences beyond; the configuration read is that of the first set, and `max_positions` says so.

    Raises:
      UnsupportedModelError: an unsupported architecture or field, or a missing or senseless one; the message names it.
    """
    text, model_type, architectures = _text_part(config)
    if model_type not in _FAMILIES:
        raise refuse("model_type", model_type, ", ".join(map(repr, (*_FAMILIES, *_NESTED, *_FLAT))))
    family = _FAMILIES[model_type]
    named = text.get("architectures")
    if named is not None and named not in [[name] for name in architectures or family.architectures]:
        raise refuse("architectures", named, repr([(architectures or family.architectures)[0]]))
    for field, inert in _INERT.items():
        if field in text and field not in family.reads and text[field] not in inert:
            raise refuse(field, text[field], " or ".join(repr(value) for value in inert if value is not None) or
                          "null or absent")

    num_heads = required(text, "num_attention_heads")
    hidden_size = required(text, "hidden_size")
    num_layers = required(text, "num_hidden_layers")
    num_kv_heads = text.get("num_key_value_heads")
    head_dim = head_size(text.get("head_dim"), hidden_size, num_heads)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", family.tied))
    if not isinstance(tied, bool):
        raise refuse("tie_word_embeddings", tied, "true or false")
    common: dict[str, Any] = {
        "vocab_size": required(text, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": required(text, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "head_dim": head_dim,
        "norm_eps": required(text, "layer_norm_eps" if model_type == "cohere" else "rms_norm_eps"),
        "tie_embeddings": tied,
        "max_positions": required(text, "max_position_embeddings"),
        "windows": _windows(text, model_type, num_layers),
        "family": model_type,
    }
    if model_type == "gemma3_text":
        activation = required(text, "hidden_activation")
        if activation != "gelu_pytorch_tanh":
            raise refuse("hidden_activation", activation, "'gelu_pytorch_tanh'")
        globally, local = _gemma3_rope(text)
        theta, scaling, _ = _hf_rope(globally, head_dim, 1e6)
        check_positive("query_pre_attn_scalar", required(text, "query_pre_attn_scalar"))
        return DecoderConfig(
            **common, rope_theta=theta, rope_scaling=scaling, local_rope_theta=local, activation="gelu_tanh",
            attention_scale=text["query_pre_attn_scalar"] ** -0.5, norm_offset=1.0, qk_norm=True, post_norms=True,
            embed_scale=hidden_size**0.5,
        )  # fmt: skip
    theta, scaling, rotary_dim = _hf_rope(text, head_dim, family.rope_theta, partial=model_type == "phi3")
    if isinstance(scaling, DividedRope) and model_type == "phi3":
        common["max_positions"] = _longrope_original(text)
    common |= {"rope_theta": theta, "rope_scaling": scaling, "rotary_dim": rotary_dim}
    if model_type == "cohere":
        common |= {"norm": "layer", "parallel": True, "rope_interleaved": True,
                   "logit_scale": text.get("logit_scale", 0.0625)}  # fmt: skip
    return DecoderConfig(**common, qkv_bias=model_type == "qwen2", qk_norm=model_type == "qwen3")


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """A `config.json` of the configuration's family that `from_hf` and transformers read back as the same function.

    Long-rope checkpoints lose the frequencies for contexts beyond the original one, which the configuration does not
    hold: the context that is written is the original one.

    Raises:
      UnsupportedModelError: a field that the family's format can't state.
    """
    family = _FAMILIES.get(config.family)
    if family is None:
        raise refuse("family", config.family, ", ".join(map(repr, _FAMILIES)))
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if isinstance(scaling, RopeScaling):
        rope |= {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }  # fmt: skip
    elif isinstance(scaling, DividedRope) and config.family == "phi3":
        rope |= {
            "rope_type": "longrope", "short_factor": list(scaling.divisors), "long_factor": list(scaling.divisors),
            "attention_factor": scaling.attention_factor, "original_max_position_embeddings": config.max_positions,
        }  # fmt: skip
    elif isinstance(scaling, DividedRope):
        rope |= {"rope_type": "linear", "factor": scaling.divisors[0]}
    if config.rotary_dim is not None:
        rope["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    fields: dict[str, Any] = {
        "architectures": list(family.architectures), "model_type": config.family, "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "layer_norm_eps" if config.family == "cohere" else "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings, "max_position_embeddings": config.max_positions,
        "rope_parameters": rope, "hidden_act": "silu",
    }  # fmt: skip
    windows = {window for window in config.windows if window is not None}
    kinds = ["sliding_attention" if window else "full_attention" for window in config.layer_windows]
    if windows:
        fields["sliding_window"] = max(windows)
    elif config.family in ("mistral", "phi3"):
        fields["sliding_window"] = None
    if config.family in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": bool(windows), "layer_types": kinds}
        fields["max_window_layers"] = kinds.index("sliding_attention") if windows else config.num_layers
    elif config.family == "gemma3_text":
        del fields["hidden_act"]
        local = config.local_rope_theta or config.rope_theta
        fields |= {
            "hidden_activation": "gelu_pytorch_tanh", "layer_types": kinds,
            "query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2),
            "rope_parameters": {"full_attention": rope,
                                "sliding_attention": {"rope_type": "default", "rope_theta": local}},
        }  # fmt: skip
    elif config.family == "phi3":
        fields["original_max_position_embeddings"] = config.max_positions
    elif config.family == "cohere":
        fields["logit_scale"] = config.logit_scale
    try:
        same = from_hf(fields) == config
    except UnsupportedModelError:
        same = False
    if not same:
        raise UnsupportedModelError(f"a config.json of model_type {config.family!r} can't state this: {config}")
    return fields


def has_vision_part(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a checkpoint with a vision part, of which `from_hf` reads the text part."""
    return config.get("model_type") in (*_NESTED, *_FLAT)


def _text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any, tuple[str, ...] | None]:
    """The text part of a configuration, its model type, and its architectures where they are not the family's."""
    model_type = required(config, "model_type")
    if model_type in _FLAT:
        return config, *_FLAT[model_type]
    if model_type not in _NESTED:
        return config, model_type, None
    text = required(config, "text_config")
    if not isinstance(text, Mapping):
        raise refuse("text_config", text, "an object")
    if model_type == "gemma3":
        return {**_GEMMA3_DEFAULTS, **text}, "gemma3_text", None
    return text, required(text, "model_type"), None


def _windows(text: Mapping[str, Any], model_type: str, num_layers: Any) -> tuple[int | None, ...]:
    """How far each layer looks back; () where all look back to the start."""
    check_count("num_hidden_layers", num_layers)
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, Sequence) or len(kinds) != num_layers
        or not set(kinds) <= {"full_attention", "sliding_attention"}
    ):  # fmt: skip
        raise refuse("layer_types", kinds, "'full_attention' or 'sliding_attention' for every layer")
    if model_type in ("llama", "cohere"):
        if window is not None and text.get("use_sliding_window") is not False:
            raise refuse("sliding_window", window, "null (every layer attends to the whole context)")
        if kinds is not None and set(kinds) != {"full_attention"}:
            raise refuse("layer_types", kinds, "'full_attention' for every layer")
        return ()
    if model_type in ("qwen2", "qwen3"):
        if not text.get("use_sliding_window", False):
            window = None
        elif kinds is None:
            first = required(text, "max_window_layers")
            kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    elif model_type == "gemma3_text":
        pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", 6))
        check_count("sliding_window_pattern", pattern)
        if kinds is None:
            kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        if kinds is not None and "sliding_attention" in kinds:
            raise UnsupportedModelError("layer_types has 'sliding_attention' but there is no sliding_window")
        return ()
    kinds = kinds or ["sliding_attention"] * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gemma3_rope(text: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """The rotary fields of the layers that see everything, and the base of those with a window."""
    by_kind = text.get("rope_parameters")
    if isinstance(by_kind, Mapping) and "sliding_attention" in by_kind:
        local = by_kind["sliding_attention"] or {}
        if _rope_kind(local) != "default":
            raise refuse("rope_parameters.sliding_attention", local, "unscaled frequencies")
        return {"rope_parameters": by_kind.get("full_attention") or {}}, local.get("rope_theta", 10000.0)
    fields = ("rope_parameters", "rope_scaling", "rope_theta")
    return {name: text[name] for name in fields if name in text}, text.get("rope_local_base_freq", 10000.0)


def _longrope_original(text: Mapping[str, Any]) -> Any:
    original = "original_max_position_embeddings"
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(text.get(name), Mapping) and text[name].get(original) is not None:
            return text[name][original]
    return required(text, original)


def _hf_rope(
    config: Mapping[str, Any], head_dim: Any, default_theta: float, *, partial: bool = False
) -> tuple[float, RopeScaling | DividedRope | None, int | None]:
    """Rotary base, scaling and number of rotated features (None: all).

    From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).
    """
    spellings = [config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name) is not None]
    if len(spellings) == 2 and _rope_kind(spellings[0]) != _rope_kind(spellings[1]):
        raise UnsupportedModelError(
            f"rope_parameters={spellings[0]!r} contradicts rope_scaling={spellings[1]!r}; give one of them"
        )
    rope = spellings[0] if spellings else {}
    if not isinstance(rope, Mapping):
        raise refuse("rope_parameters", rope, "an object")
    thetas = [source["rope_theta"] for source in (rope, config) if source.get("rope_theta") is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
        raise UnsupportedModelError(f"rope_parameters' rope_theta={thetas[0]!r} contradicts rope_theta={thetas[1]!r}")
    theta = thetas[0] if thetas else default_theta
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") if partial else None)
    if share not in (None, 1) and not partial:
        raise refuse("partial_rotary_factor", share, "1.0")
    check_count("head_dim", head_dim)
    rotary_dim = None if share in (None, 1) else int(head_dim * share)

    kind = _rope_kind(rope)
    original = "original_max_position_embeddings"
    if kind == "default":
        return theta, None, rotary_dim
    half = (rotary_dim or head_dim) // 2
    if kind == "linear":
        return theta, DividedRope((float(required(rope, "factor")),) * half), rotary_dim
    if partial and kind in ("longrope", "su"):
        divisors = required(rope, "short_factor")
        if not isinstance(divisors, Sequence):
            raise refuse("short_factor", divisors, "a list of numbers")
        stretch, trained = rope.get("factor"), _longrope_original(config)
        check_count(original, trained)
        if stretch is None:
            stretch = required(config, "max_position_embeddings") / trained
        factor = rope.get("attention_factor")
        if factor is None:
            factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(trained))
        return theta, DividedRope(tuple(map(float, divisors)), factor), rotary_dim
    if kind != "llama3":
        raise refuse("rope_type", kind, "'default', 'linear', 'llama3', or 'longrope' of phi3")
    return theta, RopeScaling(
        factor=required(rope, "factor"),
        low_freq_factor=required(rope, "low_freq_factor"),
        high_freq_factor=required(rope, "high_freq_factor"),
        original_max_positions=required(rope if rope.get(original) is not None else config, original),
    ), rotary_dim


def _rope_kind(rope: Any) -> Any:
    if not isinstance(rope, Mapping):
        raise refuse("rope_scaling", rope, "an object")
    return rope.get("rope_type") or rope.get("type") or "default"

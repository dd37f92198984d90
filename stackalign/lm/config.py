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
class DividedRope:
    """Rotary frequencies divided by numbers of their own, `[rotary_dim / 2]`, and a factor on cosines and sines."""

    divisors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for divisor in self.divisors:
            _check_positive("rope scaling factor", divisor)
        _check_positive("rope scaling attention_factor", self.attention_factor)


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
            _check_count(name, getattr(self, name))
        _check_positive("norm_eps", self.norm_eps)
        _check_positive("rope_theta", self.rope_theta)
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.rotary_dim is not None:
            _check_count("rotary_dim", self.rotary_dim)
        if self.rotary_size % 2 or self.rotary_size > self.head_dim:
            raise UnsupportedModelError(
                f"head_dim={self.head_dim} with {self.rotary_size} rotated features: rotary positions act on pairs of "
                "features of a head"
            )
        for name in ("attention_scale", "local_rope_theta"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for name in ("embed_scale", "logit_scale"):
            _check_positive(name, getattr(self, name))
        if self.activation not in ("silu", "gelu_tanh"):
            raise _refuse("activation", self.activation, "'silu' or 'gelu_tanh'")
        if self.norm not in ("rms", "layer"):
            raise _refuse("norm", self.norm, "'rms' or 'layer'")
        if self.windows and len(self.windows) != self.num_layers:
            raise UnsupportedModelError(f"windows must have one entry for each of the {self.num_layers} layers")
        for window in self.windows:
            if window is not None:
                _check_count("sliding_window", window)
        if isinstance(self.rope_scaling, DividedRope) and len(self.rope_scaling.divisors) != self.rotary_size // 2:
            raise UnsupportedModelError(
                f"rope scaling has {len(self.rope_scaling.divisors)} factors for {self.rotary_size // 2} frequencies"
            )


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{name}={value!r} must be a positive integer")


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise UnsupportedModelError(f"{name}={value!r} must be a positive finite number")


def _refuse(field: str, value: Any, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{field}={value!r} is not supported; supported: {supported}")


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
        raise _refuse("model_type", model_type, ", ".join(map(repr, (*_FAMILIES, *_NESTED, *_FLAT))))
    family = _FAMILIES[model_type]
    named = text.get("architectures")
    if named is not None and named not in [[name] for name in architectures or family.architectures]:
        raise _refuse("architectures", named, repr([(architectures or family.architectures)[0]]))
    for field, inert in _INERT.items():
        if field in text and field not in family.reads and text[field] not in inert:
            raise _refuse(field, text[field], " or ".join(repr(value) for value in inert if value is not None) or
                          "null or absent")

    num_heads = _required(text, "num_attention_heads")
    hidden_size = _required(text, "hidden_size")
    num_layers = _required(text, "num_hidden_layers")
    num_kv_heads = text.get("num_key_value_heads")
    head_dim = _head_dim(text.get("head_dim"), hidden_size, num_heads)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", family.tied))
    if not isinstance(tied, bool):
        raise _refuse("tie_word_embeddings", tied, "true or false")
    common: dict[str, Any] = {
        "vocab_size": _required(text, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _required(text, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "head_dim": head_dim,
        "norm_eps": _required(text, "layer_norm_eps" if model_type == "cohere" else "rms_norm_eps"),
        "tie_embeddings": tied,
        "max_positions": _required(text, "max_position_embeddings"),
        "windows": _windows(text, model_type, num_layers),
        "family": model_type,
    }
    if model_type == "gemma3_text":
        activation = _required(text, "hidden_activation")
        if activation != "gelu_pytorch_tanh":
            raise _refuse("hidden_activation", activation, "'gelu_pytorch_tanh'")
        globally, local = _gemma3_rope(text)
        theta, scaling, _ = _hf_rope(globally, head_dim, 1e6)
        _check_positive("query_pre_attn_scalar", _required(text, "query_pre_attn_scalar"))
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
        raise _refuse("family", config.family, ", ".join(map(repr, _FAMILIES)))
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
    model_type = _required(config, "model_type")
    if model_type in _FLAT:
        return config, *_FLAT[model_type]
    if model_type not in _NESTED:
        return config, model_type, None
    text = _required(config, "text_config")
    if not isinstance(text, Mapping):
        raise _refuse("text_config", text, "an object")
    if model_type == "gemma3":
        return {**_GEMMA3_DEFAULTS, **text}, "gemma3_text", None
    return text, _required(text, "model_type"), None


def _windows(text: Mapping[str, Any], model_type: str, num_layers: Any) -> tuple[int | None, ...]:
    """How far each layer looks back; () where all look back to the start."""
    _check_count("num_hidden_layers", num_layers)
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, Sequence) or len(kinds) != num_layers
        or not set(kinds) <= {"full_attention", "sliding_attention"}
    ):  # fmt: skip
        raise _refuse("layer_types", kinds, "'full_attention' or 'sliding_attention' for every layer")
    if model_type in ("llama", "cohere"):
        if window is not None and text.get("use_sliding_window") is not False:
            raise _refuse("sliding_window", window, "null (every layer attends to the whole context)")
        if kinds is not None and set(kinds) != {"full_attention"}:
            raise _refuse("layer_types", kinds, "'full_attention' for every layer")
        return ()
    if model_type in ("qwen2", "qwen3"):
        if not text.get("use_sliding_window", False):
            window = None
        elif kinds is None:
            first = _required(text, "max_window_layers")
            kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    elif model_type == "gemma3_text":
        pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", 6))
        _check_count("sliding_window_pattern", pattern)
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
            raise _refuse("rope_parameters.sliding_attention", local, "unscaled frequencies")
        return {"rope_parameters": by_kind.get("full_attention") or {}}, local.get("rope_theta", 10000.0)
    fields = ("rope_parameters", "rope_scaling", "rope_theta")
    return {name: text[name] for name in fields if name in text}, text.get("rope_local_base_freq", 10000.0)


def _longrope_original(text: Mapping[str, Any]) -> Any:
    original = "original_max_position_embeddings"
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(text.get(name), Mapping) and text[name].get(original) is not None:
            return text[name][original]
    return _required(text, original)


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
    architecture = _required(fields, "general.architecture")
    if architecture not in _GGUF_FAMILIES:
        raise _refuse("general.architecture", architecture, ", ".join(map(repr, _GGUF_FAMILIES)))
    family, reads = _GGUF_FAMILIES[architecture]
    prefix = f"{architecture}."
    for key, value in fields.items():
        name = key.removeprefix(prefix)
        if name == key or name in _GGUF_READ | reads:
            continue
        if value not in _GGUF_INERT.get(name, ()):
            raise _refuse(key, value, " or ".join(map(repr, _GGUF_INERT.get(name, ()))) or "files without that field")

    num_heads = _required(fields, f"{prefix}attention.head_count")
    hidden_size = _required(fields, f"{prefix}embedding_length")
    num_layers = _required(fields, f"{prefix}block_count")
    head_dim = _head_dim(fields.get(f"{prefix}attention.key_length"), hidden_size, num_heads)
    for key in (f"{prefix}attention.value_length", f"{prefix}rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise _refuse(key, fields[key], f"the head size, {head_dim}")
    scaling = fields.get(f"{prefix}rope.scaling.type", "none")
    rope_scaling = None
    if scaling == "linear" and family == "gemma3_text":
        factor = float(_required(fields, f"{prefix}rope.scaling.factor"))
        rope_scaling = DividedRope((factor,) * (head_dim // 2))
    elif scaling != "none":
        raise _refuse(f"{prefix}rope.scaling.type", scaling, "'none'" + (" or 'linear'" if reads else ""))
    vocab_size = fields.get(f"{prefix}vocab_size")
    if vocab_size is None:
        vocab_size = len(_required(fields, "tokenizer.ggml.tokens"))
    extra: dict[str, Any] = {}
    if family == "gemma3_text":
        _check_count(f"{prefix}block_count", num_layers)
        window = _required(fields, f"{prefix}attention.sliding_window")
        extra = {
            "activation": "gelu_tanh", "norm_offset": 1.0, "qk_norm": True, "post_norms": True,
            "embed_scale": hidden_size**0.5, "local_rope_theta": fields.get(f"{prefix}rope.freq_base_swa", 10000.0),
            "windows": tuple(window if (layer + 1) % 6 else None for layer in range(num_layers)),
            "attention_scale": (hidden_size / num_heads if num_layers == 62 else head_dim) ** -0.5,
        }  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_required(fields, f"{prefix}feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get(f"{prefix}attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=_required(fields, f"{prefix}attention.layer_norm_rms_epsilon"),
        rope_theta=fields.get(f"{prefix}rope.freq_base", 1e6 if family == "gemma3_text" else 10000.0),
        rope_scaling=rope_scaling,
        tie_embeddings=tie_embeddings,
        max_positions=_required(fields, f"{prefix}context_length"),
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
        raise _refuse("rope_parameters", rope, "an object")
    thetas = [source["rope_theta"] for source in (rope, config) if source.get("rope_theta") is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
        raise UnsupportedModelError(f"rope_parameters' rope_theta={thetas[0]!r} contradicts rope_theta={thetas[1]!r}")
    theta = thetas[0] if thetas else default_theta
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") if partial else None)
    if share not in (None, 1) and not partial:
        raise _refuse("partial_rotary_factor", share, "1.0")
    _check_count("head_dim", head_dim)
    rotary_dim = None if share in (None, 1) else int(head_dim * share)

    kind = _rope_kind(rope)
    original = "original_max_position_embeddings"
    if kind == "default":
        return theta, None, rotary_dim
    half = (rotary_dim or head_dim) // 2
    if kind == "linear":
        return theta, DividedRope((float(_required(rope, "factor")),) * half), rotary_dim
    if partial and kind in ("longrope", "su"):
        divisors = _required(rope, "short_factor")
        if not isinstance(divisors, Sequence):
            raise _refuse("short_factor", divisors, "a list of numbers")
        stretch, trained = rope.get("factor"), _longrope_original(config)
        _check_count(original, trained)
        if stretch is None:
            stretch = _required(config, "max_position_embeddings") / trained
        factor = rope.get("attention_factor")
        if factor is None:
            factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(trained))
        return theta, DividedRope(tuple(map(float, divisors)), factor), rotary_dim
    if kind != "llama3":
        raise _refuse("rope_type", kind, "'default', 'linear', 'llama3', or 'longrope' of phi3")
    return theta, RopeScaling(
        factor=_required(rope, "factor"),
        low_freq_factor=_required(rope, "low_freq_factor"),
        high_freq_factor=_required(rope, "high_freq_factor"),
        original_max_positions=_required(rope if rope.get(original) is not None else config, original),
    ), rotary_dim


def _rope_kind(rope: Any) -> Any:
    if not isinstance(rope, Mapping):
        raise _refuse("rope_scaling", rope, "an object")
    return rope.get("rope_type") or rope.get("type") or "default"

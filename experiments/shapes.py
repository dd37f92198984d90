"""Shapes of published models, as their `config.json` gives them: for plans and benchmarks that need no weights."""

from typing import Any

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
_QWEN = {"model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        **_QWEN, "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_parameters": _LLAMA3,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    },
    "aya-expanse-8b": {
        "model_type": "cohere", "vocab_size": 256000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "rope_theta": 1e4, "logit_scale": 0.125,
    },
}  # fmt: skip

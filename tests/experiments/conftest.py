"""A model of a user: small, random, in the form that Hugging Face folders have."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A Hugging Face folder of a tiny random Llama with a byte-level tokenizer and a chat template."""
    import tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    d, f, layers, heads, kv = 16, 32, 2, 2, 1
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in specials])
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(vocab), "hidden_size": d,
        "intermediate_size": f, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu",
        "tie_word_embeddings": True, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def weight(*shape):
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(len(vocab), d), "model.norm.weight": np.ones(d, np.float32)}
    for i in range(layers):
        name = f"model.layers.{i}."
        tensors |= {
            f"{name}self_attn.q_proj.weight": weight(d, d), f"{name}self_attn.k_proj.weight": weight(d // 2, d),
            f"{name}self_attn.v_proj.weight": weight(d // 2, d), f"{name}self_attn.o_proj.weight": weight(d, d),
            f"{name}mlp.gate_proj.weight": weight(f, d), f"{name}mlp.up_proj.weight": weight(f, d),
            f"{name}mlp.down_proj.weight": weight(d, f), f"{name}input_layernorm.weight": np.ones(d, np.float32),
            f"{name}post_attention_layernorm.weight": np.ones(d, np.float32),
        }  # fmt: skip
    save_file(tensors, folder / "model.safetensors")
    return folder

"""Every family against transformers on torch with random small models, float32: logits, padding, caches, greedy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from stackalign.lm import decoder, generate, weights
from stackalign.lm.config import UnsupportedModelError
from stackalign.lm.weights import hf_config

torch.set_num_threads(1)  # spinning threads of two libraries on few cores slow both down many times

COMMON = {"vocab_size": 80, "intermediate_size": 56, "num_hidden_layers": 3, "initializer_range": 0.25,
          "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 64}  # fmt: skip
FACTORS = [1.0, 1.25, 1.5, 2.0, 3.0, 4.0]
FAMILIES = {
    "llama3": (transformers.LlamaConfig, {
        "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    }),
    "mistral": (transformers.MistralConfig, {
        "hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 6, "sliding_window": 4,
    }),
    "qwen2": (transformers.Qwen2Config, {
        "hidden_size": 42, "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "qwen2 with windows": (transformers.Qwen2Config, {
        "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "use_sliding_window": True,
        "sliding_window": 5, "max_window_layers": 1,
    }),
    "qwen3": (transformers.Qwen3Config, {
        "hidden_size": 50, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 12,
        "tie_word_embeddings": True,
    }),
    "gemma3": (transformers.Gemma3TextConfig, {
        "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 20,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}},
    }),
    "phi3": (transformers.Phi3Config, {
        "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6,
    }),
    "phi4-mini": (transformers.Phi3Config, {
        "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True,
        "original_max_position_embeddings": 32, "sliding_window": None,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                            "short_factor": FACTORS, "long_factor": [2 * factor for factor in FACTORS],
                            "original_max_position_embeddings": 32},
    }),
    "phi3-128k": (transformers.Phi3Config, {
        "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 9,
        "original_max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": FACTORS,
                            "long_factor": FACTORS, "original_max_position_embeddings": 32},
    }),
    "cohere": (transformers.CohereConfig, {
        "hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "logit_scale": 0.0625,
    }),
}  # fmt: skip
FORWARD = jax.jit(decoder.apply, static_argnames=("config",))
RELATIVE = 2e-4  # of the largest logit


def torch_model(family: str, seed: int):
    make, fields = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(make(**{**COMMON, **fields}), attn_implementation="eager")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                value.add_(0.3 * torch.randn_like(value))
    return model.eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(family, seed) to the torch model and what we load from the folder that it saves."""
    found = {}

    def get(family, seed):
        if (family, seed) not in found:
            folder = tmp_path_factory.mktemp("family")
            model = torch_model(family, seed)
            model.save_pretrained(folder)
            config, params = weights.load(folder)
            found[family, seed] = model, config, jax.tree.map(jnp.asarray, params)
        return found[family, seed]

    return get


def torch_logits(model, ids, mask):
    ids, mask = torch.tensor(ids).long(), torch.tensor(mask).long()
    positions = torch.clamp(mask.cumsum(1) - 1, min=0)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float().numpy()


def our_logits(params, config, ids, mask):
    hidden, _ = FORWARD(params, None, config, ids, decoder.positions_of(mask), decoder.causal_mask(mask))
    values = decoder.logits(params, hidden.reshape(hidden.shape[0], -1), config.vocab_size)
    return np.asarray(values.T).reshape(*ids.shape, -1)


def draw(seed, *shape):
    return np.random.default_rng(seed).integers(0, COMMON["vocab_size"], shape).astype(np.int32)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(models, family, seed):
    """Sequences longer than every window."""
    model, config, params = models(family, seed)
    ids, mask = draw(seed, 2, 19), np.ones((2, 19), bool)
    expected = torch_logits(model, ids, mask)
    found = our_logits(params, config, ids, mask)
    np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE * np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing(models, family):
    """Rows of 3, 11 and 17 tokens, padded on the left, against each row alone in transformers."""
    model, config, params = models(family, 0)
    lengths, total = (3, 11, 17), 17
    ids, mask = draw(3, 3, total), np.zeros((3, total), bool)
    for row, length in enumerate(lengths):
        mask[row, total - length :] = True
    found = our_logits(params, config, ids, mask)
    for row, length in enumerate(lengths):
        alone = ids[row : row + 1, total - length :]
        expected = torch_logits(model, alone, np.ones((1, length), bool))[0]
        scale = RELATIVE * np.abs(expected).max()
        np.testing.assert_allclose(found[row, total - length :], expected, rtol=0, atol=scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_greedy_decoding(models, family):
    """Tokens equal those of transformers, past the borders of windows; log-probabilities those of a full pass."""
    model, config, params = models(family, 1)
    lengths, total, new = (2, 7, 9), 9, 12
    ids, mask = draw(5, 3, total), np.zeros((3, total), bool)
    for row, length in enumerate(lengths):
        mask[row, total - length :] = True
    out = generate.generate(
        params, None, config, jax.random.split(jax.random.key(0), 3), jnp.asarray(ids), jnp.asarray(mask),
        max_new_tokens=new, greedy=True, eos_ids=(), vocab_size=config.vocab_size,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        prompt = ids[row, total - length :]
        sequence = np.concatenate([prompt, np.asarray(out.tokens[row])])[None]
        logits = torch_logits(model, sequence, np.ones(sequence.shape, bool))[0]
        predicted = logits[length - 1 : -1]
        np.testing.assert_array_equal(predicted.argmax(-1), out.tokens[row])
        log_probs = torch.log_softmax(torch.tensor(predicted), -1).numpy()[np.arange(new), out.tokens[row]]
        np.testing.assert_allclose(out.log_probs[row], log_probs, atol=2e-3)


def test_windows_and_scales_matter(models):
    """The comparisons above would notice a window, a bias, a norm or a scale that is left out."""
    import dataclasses

    changes = {
        "mistral": {"windows": ()},
        "qwen2": {"qkv_bias": False},
        "qwen2 with windows": {"windows": ()},
        "qwen3": {"qk_norm": False},
        "gemma3": {"local_rope_theta": None},
        "phi3": {"windows": ()},
        "phi4-mini": {"rope_scaling": None},
        "cohere": {"rope_interleaved": False},
    }
    for family, change in changes.items():
        model, config, params = models(family, 0)
        ids, mask = draw(0, 2, 19), np.ones((2, 19), bool)
        expected = torch_logits(model, ids, mask)
        broken = our_logits(params, dataclasses.replace(config, **change), ids, mask)
        assert np.abs(broken - expected).max() > 20 * RELATIVE * np.abs(expected).max(), family


def read(family: str, **changes):
    make, fields = FAMILIES[family]
    return hf_config.from_hf({**make(**{**COMMON, **fields}).to_dict(), **changes})


def test_longrope_says_how_far_it_holds():
    """Beyond the original context other frequencies would hold for the whole sequence."""
    assert read("phi4-mini").max_positions == 32


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "yarn"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True}, "sliding_window"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0],
                                      "original_max_position_embeddings": 32}}, "factors"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere", {"logit_scale": 0.0}, "logit_scale"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"architectures": ["MistralForSequenceClassification"]}, "architectures"),
    ],
)  # fmt: skip
def test_fields_that_change_the_function_are_refused_by_name(family, changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        read(family, **changes)


@pytest.mark.parametrize("layout", ["nested, before 5", "nested", "flat"])
def test_the_text_part_of_a_checkpoint_with_vision(tmp_path, models, layout):
    """A Qwen2 backbone under another name: `language_model.model.`, `model.language_model.`, or among the rest."""
    import safetensors.numpy

    model, config, params = models("qwen2", 0)
    text = model.config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    own = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    prefix = {"nested, before 5": "language_model.model.", "nested": "model.language_model.", "flat": "model."}[layout]
    stored = {prefix + name.removeprefix("model."): value for name, value in own.items()}
    vision = {"nested, before 5": "vision_tower.x", "nested": "model.vision_tower.x", "flat": "model.mm_projector.0.w"}
    stored[vision[layout]] = np.ones((2, 2), np.float32)
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    if layout == "flat":
        fields = text | {"model_type": "llava_qwen", "architectures": ["LlavaQwenForCausalLM"]}
    else:
        fields = {"model_type": "llava_next", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found_config, found = weights.load(tmp_path)
    assert found_config == config
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_text_model_may_not_hold_a_vision_part(tmp_path, models):
    import safetensors.numpy

    model, _, _ = models("qwen2", 0)
    model.save_pretrained(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors") | {"vision_tower.x": np.ones(2, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(weights.CheckpointError, match="vision_tower.x"):
        weights.load(tmp_path)

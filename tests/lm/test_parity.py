"""Parity with transformers and peft on torch, float32: logits, greedy answers, gradients, adapters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

from stackalign.lm import decoder, generate, lora, score, tokenizer, weights
from stackalign.lm.weights import fetch

torch.set_num_threads(1)  # spinning threads of two libraries on few cores slow both down many times

COMMON = {"vocab_size": 90, "intermediate_size": 70, "num_hidden_layers": 2, "initializer_range": 0.25,
          "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 5e3}  # fmt: skip
MODELS = {
    "grouped, untied": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
                        "tie_word_embeddings": False, "max_position_embeddings": 128, "rms_norm_eps": 1e-6},
    "plain, tied": {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "tie_word_embeddings": True,
                    "max_position_embeddings": 128,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "llama3 scaling": {"hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16,
                       "tie_word_embeddings": True, "max_position_embeddings": 128, "rope_parameters": LLAMA3},
    "one key head": {"hidden_size": 33, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6,
                     "tie_word_embeddings": False, "max_position_embeddings": 128},
}  # fmt: skip
SCORE = jax.jit(score.completion_log_probs, static_argnames=("config", "vocab_size"))
FORWARD = jax.jit(decoder.apply, static_argnames=("config",))


def torch_model(seed, **fields):
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, **fields)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.add_(0.3 * torch.randn_like(value))
    return model


def torch_logits(model, ids, mask=None):
    ids = torch.tensor(np.asarray(ids))
    mask = torch.ones_like(ids) if mask is None else torch.tensor(np.asarray(mask)).long()
    positions = torch.clamp(mask.cumsum(1) - 1, min=0)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float().numpy()


def our_logits(params, config, ids, mask=None, stack=None, rows=None):
    mask = np.ones(np.shape(ids), bool) if mask is None else mask
    hidden, _ = FORWARD(
        params, stack, config, ids, decoder.positions_of(mask), decoder.causal_mask(mask), rows=rows
    )
    values = decoder.logits(params, hidden.reshape(hidden.shape[0], -1), config.vocab_size)
    return np.asarray(values.T).reshape(*np.shape(ids), -1)


def left(prompts):
    length = max(map(len, prompts))
    ids, mask = np.zeros((len(prompts), length), np.int32), np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :], mask[row, length - len(prompt) :] = prompt, True
    return ids, mask


def torch_greedy(model, prompt, count, ends=None):
    ids = torch.tensor(np.asarray(prompt)[None]).long()
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
            eos_token_id=ends, pad_token_id=0,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=[(name, seed) for seed, name in enumerate(MODELS)], ids=lambda p: p[0])
def pair(request, tmp_path_factory):
    """A random model as transformers made and saved it, and as ours reads it."""
    name, seed = request.param
    folder = tmp_path_factory.mktemp("llama")
    model = torch_model(seed, **MODELS[name])
    model.save_pretrained(folder)
    config, params = weights.load(folder)
    assert (config.rope_scaling is not None) == ("llama3" in name)
    return model, config, jax.tree.map(jnp.asarray, params)


def relative_gap(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


def test_logits(pair):
    """Sequences of 100 tokens: three times the original context of the scaled model."""
    model, config, params = pair
    ids = np.random.default_rng(0).integers(0, 90, (3, 100)).astype(np.int32)
    gap = relative_gap(our_logits(params, config, ids), torch_logits(model, ids))
    print(f"relative gap {gap:.2e}")
    assert gap < 1e-4


def test_rope_scaling_matters_here():
    """The comparison above would notice if the scaling were left out."""
    fields = MODELS["llama3 scaling"]
    ids = np.random.default_rng(0).integers(0, 90, (1, 100))
    scaled = torch_model(2, **fields)
    plain = torch_model(2, **fields | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}})
    assert relative_gap(torch_logits(plain, ids), torch_logits(scaled, ids)) > 1e-2


def test_padded_rows(pair):
    model, config, params = pair
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 90, n) for n in (3, 17, 40)]
    ids, mask = left(prompts)
    found, expected = our_logits(params, config, ids, mask), torch_logits(model, ids, mask)
    for row, prompt in enumerate(prompts):
        assert relative_gap(found[row, -len(prompt) :], expected[row, -len(prompt) :]) < 1e-4
        unpadded = torch_logits(model, [prompt])[0]
        assert relative_gap(found[row, -len(prompt) :], unpadded) < 1e-4


def test_greedy_tokens(pair):
    """Padded together, 30 new tokens: across the original context of the scaled model."""
    model, config, params = pair
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 90, n) for n in (1, 9, 20)]
    run = functools.partial(
        generate.generate, params, None, config, jax.random.split(jax.random.key(0), 3), *left(prompts),
        max_new_tokens=30, greedy=True, vocab_size=90,
    )  # fmt: skip
    out = run(eos_ids=())
    for row, prompt in enumerate(prompts):
        assert out.tokens[row].tolist() == torch_greedy(model, prompt, 30)
    # The log-probabilities of the cached decoding are those of one full pass.
    scored = SCORE(params, None, config, *left(prompts), out.tokens, out.mask, vocab_size=90)
    np.testing.assert_allclose(out.log_probs, scored, atol=1e-4)


@pytest.mark.parametrize("pair", [("grouped, untied", 0)], indirect=True)
def test_ends_of_turn(pair):
    model, config, params = pair
    prompt = np.random.default_rng(3).integers(0, 90, 9)
    whole = torch_greedy(model, prompt, 30)
    ends = (whole[12], 89)  # with an id that the answer reaches
    out = generate.generate(
        params, None, config, jax.random.split(jax.random.key(0), 1), *left([prompt]), max_new_tokens=30,
        greedy=True, eos_ids=ends, vocab_size=90,
    )  # fmt: skip
    assert out.tokens[0][out.mask[0]].tolist() == torch_greedy(model, prompt, 30, list(ends))
    assert bool(out.finished[0])


def test_log_probs_and_their_gradient(pair):
    """The score of a completion, and its gradient by the parameters, against torch's own."""
    model, config, params = pair
    rng = np.random.default_rng(4)
    prompt, completion = rng.integers(0, 90, (1, 7)), rng.integers(0, 90, (1, 5))
    ids = torch.tensor(np.concatenate([prompt, completion], axis=1))
    model.zero_grad()
    logits = model(input_ids=ids).logits[:, 6:-1] / 0.6
    expected = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 7:, None])[..., 0]
    expected.sum().backward()
    full = np.ones((1, 7), bool), np.ones((1, 5), bool)

    def total(params):
        values = score.completion_log_probs(
            params, None, config, prompt, full[0], completion, full[1], temperature=0.6, vocab_size=90, train_head=True
        )
        return values.sum(), values

    (_, values), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    np.testing.assert_allclose(values, expected.detach().numpy(), rtol=1e-4, atol=1e-4)
    named = {name: value.grad.numpy() for name, value in model.named_parameters()}
    for i, layer in enumerate(grads["layers"]):
        prefix = f"model.layers.{i}"
        qkv = np.concatenate([named[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv"])
        assert relative_gap(layer["qkv"], qkv) < 1e-3
        assert relative_gap(layer["down"], named[f"{prefix}.mlp.down_proj.weight"]) < 1e-3
        assert relative_gap(layer["attn_norm"], named[f"{prefix}.input_layernorm.weight"]) < 1e-3
    assert relative_gap(grads["embed"], named["model.embed_tokens.weight"]) < 1e-3


# --- adapters, against peft ---


def test_adapters_equal_peft(tmp_path):
    """Two agents' adapters on all seven projections, in one mixed batch."""
    model = torch_model(5, **MODELS["grouped, untied"])
    model.save_pretrained(tmp_path)
    config, params = weights.load(tmp_path)
    ours = lora.LoraConfig(rank=4, alpha=6.0, dropout=0.0, targets=lora.TARGETS)
    theirs = peft.LoraConfig(
        r=4, lora_alpha=6.0, lora_dropout=0.0, target_modules=[f"{name}_proj" for name in lora.TARGETS]
    )
    wrapped = peft.get_peft_model(model, theirs, adapter_name="agent0")
    wrapped.add_adapter("agent1", theirs)
    torch.manual_seed(6)
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.2)
    found = {name: value.detach().numpy() for name, value in wrapped.named_parameters() if "lora_" in name}

    def stacked(layer, name, side):
        room = "mlp" if name in ("gate", "up", "down") else "self_attn"
        where = f"base_model.model.model.layers.{layer}.{room}.{name}_proj.lora_{side}"
        return jnp.stack([found.pop(f"{where}.agent{agent}.weight") for agent in range(2)])

    stack = tuple(
        {name: {"a": stacked(layer, name, "A"), "b": stacked(layer, name, "B")} for name in lora.TARGETS}
        for layer in range(2)
    )
    assert not found  # every one of peft's weights has its place
    slots = [1, 0, 1]
    ids = np.random.default_rng(0).integers(0, 90, (3, 20)).astype(np.int32)
    logits = our_logits(params, config, ids, stack=stack, rows=lora.rows(ours, 2, jnp.array(slots)))
    bare = our_logits(params, config, ids)
    for row, agent in enumerate(slots):
        wrapped.set_adapter(f"agent{agent}")
        expected = torch_logits(wrapped, ids[row : row + 1])[0]
        assert relative_gap(logits[row], expected) < 1e-4
        assert relative_gap(bare[row], expected) > 1e-2


# --- SmolLM2-135M-Instruct ---

QUESTIONS = (
    "What is the capital of France?",
    "Tell a short story about a lighthouse keeper.",
    "Explain how rainbows form.",
    "Compute 17 + 25 and explain how.",
    "List three uses of a paper clip.",
    "Übersetze ins Englische: „Guten Morgen, wie geht es dir?“",
)


@pytest.fixture(scope="module")
def smollm2():
    path = fetch.smollm2()
    config, params = weights.load(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    encode = tokenizer.load(path).encode_chat
    prompts = [encode([{"role": "user", "content": question}]) for question in QUESTIONS]
    return model, config, jax.tree.map(jnp.asarray, params), prompts, tokenizer.load(path)


@pytest.mark.real_weights
def test_smollm2_logits(smollm2):
    model, config, params, prompts, _ = smollm2
    ids, mask = left(prompts)
    found = our_logits(params, config, ids, mask)
    gaps = []
    for row, prompt in enumerate(prompts):
        expected = torch_logits(model, [prompt])[0]
        gaps.append(np.abs(found[row, -len(prompt) :] - expected).max())
    print("largest gaps of logits", " ".join(f"{gap:.2e}" for gap in gaps))
    assert max(gaps) < 1e-3


@pytest.mark.real_weights
def test_smollm2_greedy_answers(smollm2):
    model, config, params, prompts, chat = smollm2
    out = generate.generate(
        params, None, config, jax.random.split(jax.random.key(0), len(prompts)), *left(prompts), max_new_tokens=64,
        greedy=True, eos_ids=chat.eos_ids, vocab_size=chat.vocab_size,
    )  # fmt: skip
    lengths = np.asarray(out.mask).sum(axis=1)
    assert (lengths == 64).sum() >= 4 and np.asarray(out.finished).any()
    for row, prompt in enumerate(prompts):
        answer = out.tokens[row][out.mask[row]].tolist()
        assert answer == torch_greedy(model, prompt, 64, list(chat.eos_ids))

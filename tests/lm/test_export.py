"""What is written for others: merged folders that transformers loads, and PEFT adapters of every family."""

import jax
import jax.numpy as jnp
import numpy as np
import peft as peft_library
import pytest
import torch
import transformers
from test_families import FAMILIES, FORWARD, RELATIVE, draw, torch_logits, torch_model

from stackalign.lm import decoder, lora, weights
from stackalign.lm.config import UnsupportedModelError
from stackalign.lm.weights import export, hf_config, peft

SHAPE = lora.LoraConfig(rank=3, alpha=6.0, targets=lora.TARGETS)
IDS, MASK = draw(7, 2, 15), np.ones((2, 15), bool)


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Family to its torch model, our configuration and parameters, and an adapter that changes every projection."""
    found = {}

    def get(family):
        if family not in found:
            model, folder = torch_model(family, 0), tmp_path_factory.mktemp("base")
            model.save_pretrained(folder)
            config, params = weights.load(folder)
            stack = lora.init(jax.random.key(0), config, SHAPE, 1)
            keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(stack))))
            stack = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), stack)
            adapter = jax.tree.map(np.asarray, lora.select(stack, 0))
            found[family] = folder, config, params, stack, adapter
        return found[family]

    return get


def our_logits(params, config, stack=None):
    rows = None if stack is None else lora.rows(SHAPE, 1, jnp.zeros(2, int))
    mask = decoder.causal_mask(MASK)
    hidden, _ = FORWARD(params, stack, config, IDS, decoder.positions_of(MASK), mask, rows=rows)
    values = decoder.logits(params, hidden.reshape(hidden.shape[0], -1), config.vocab_size)
    return np.asarray(values.T).reshape(*IDS.shape, -1)


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE * np.abs(expected).max())


def read_torch(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_agent_loads_elsewhere(tmp_path, agents, family):
    """transformers computes the agent's logits from the folder, and so do we; they differ from the base's."""
    _, config, params, stack, adapter = agents(family)
    export.save(tmp_path, config, params, adapter, scale=SHAPE.scale, dtype="float32")
    expected = our_logits(params, config, stack)
    near(torch_logits(read_torch(tmp_path), IDS, MASK), expected)
    same, merged = weights.load(tmp_path)
    assert same == config
    near(our_logits(merged, config), expected)
    assert np.abs(our_logits(params, config) - expected).max() > 20 * RELATIVE * np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_loads_in_peft(tmp_path, agents, family):
    """PEFT on the torch base computes the agent's logits; reading the folder again gives the adapter back."""
    base, config, params, stack, adapter = agents(family)
    peft.save(tmp_path, adapter, SHAPE, str(base), config)
    model = peft_library.PeftModel.from_pretrained(read_torch(base), tmp_path).eval()
    near(torch_logits(model, IDS, MASK), our_logits(params, config, stack))
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path, config, SHAPE), adapter)


def test_a_fresh_adapter_comes_back_whole(tmp_path, agents):
    """Also where projections are fused and `b` is zero: losing `a` would leave nothing to train."""
    _, config, _, _, _ = agents("phi3")
    adapter = jax.tree.map(np.asarray, lora.select(lora.init(jax.random.key(3), config, SHAPE, 1), 0))
    peft.save(tmp_path, adapter, SHAPE, "base", config)
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path, config, SHAPE), adapter)


def test_fused_adapters_of_others(tmp_path, agents):
    """PEFT trains one `a` for a fused projection; each of our projections takes it with its own rows of `b`."""
    base, config, params, _, _ = agents("phi3")
    settings = peft_library.LoraConfig(r=3, lora_alpha=9.0, target_modules=["qkv_proj", "o_proj", "gate_up_proj"])
    model = peft_library.get_peft_model(read_torch(base), settings).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(std=0.1)
    model.save_pretrained(tmp_path)
    adapter = peft.load(tmp_path, config, SHAPE)
    stack = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], adapter)
    near(our_logits(params, config, stack), torch_logits(model, IDS, MASK))
    for targets, message in (
        (("q", "k", "o"), "gate_up_proj.* are not all among the run's --lora_targets"),
        (("q", "k", "o", "gate"), "changes 'up' .*lora_targets"),
    ):
        with pytest.raises(weights.CheckpointError, match=message):
            peft.load(tmp_path, config, lora.LoraConfig(rank=3, alpha=6.0, targets=targets))
    with pytest.raises(weights.CheckpointError, match="rank 3 on 'gate', the run 2: pass --lora_rank=3"):
        peft.load(tmp_path, config, lora.LoraConfig(rank=2, alpha=6.0, targets=lora.TARGETS))


def test_shards(tmp_path, agents):
    """Many small files with an index, which both sides read."""
    _, config, params, _, _ = agents("qwen2")
    export.save(tmp_path, config, params, dtype="float32", shard=20_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    assert not (tmp_path / "model.safetensors").exists()
    _, again = weights.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    near(torch_logits(read_torch(tmp_path), IDS, MASK), our_logits(params, config))


def test_bfloat16_is_rounded_once(tmp_path, agents):
    _, config, params, _, _ = agents("qwen3")
    export.save(tmp_path, config, params)
    _, again = weights.load(tmp_path)
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, again, rounded)
    assert read_torch(tmp_path).config.dtype in (torch.float32, torch.bfloat16)


def test_what_can_not_be_written(tmp_path, agents):
    _, config, params, _, _ = agents("qwen2")
    with pytest.raises(ValueError, match="dtype=float8"):
        export.save(tmp_path, config, params, dtype="float8")
    huge = {**params, "final_norm": params["final_norm"] * 1e5}
    with pytest.raises(ValueError, match="model.norm.weight has values that are not finite as float16"):
        export.save(tmp_path, config, huge, dtype="float16")
    import dataclasses

    with pytest.raises(UnsupportedModelError, match="can't state this"):
        hf_config.to_hf(dataclasses.replace(config, parallel=True))

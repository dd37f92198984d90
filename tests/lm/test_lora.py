"""Stacked adapters: mixed rows against merged weights, separation of agents, dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackalign.lm import decoder, lora
from stackalign.lm.config import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=30, hidden_size=24, intermediate_size=28, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=10,
    norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, tie_embeddings=True, max_positions=64,
)  # fmt: skip
LORA = lora.LoraConfig(rank=3, alpha=6.0, dropout=0.25, targets=lora.TARGETS)
AGENTS = 3
VALID = np.array([[0, 0, 1, 1, 1], [1] * 5, [0, 1, 1, 1, 1], [1] * 5, [0, 0, 0, 0, 1], [1] * 5], bool)
TOKENS = np.random.default_rng(0).integers(0, 30, VALID.shape).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    made = decoder.init(jax.random.key(0), CONFIG)
    return made | {"embed": made["embed"] * 25}


@pytest.fixture(scope="module")
def stack():
    """Adapters of three agents that all change something."""
    made = lora.init(jax.random.key(1), CONFIG, LORA, AGENTS)
    leaves, tree = jax.tree.flatten(made)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return jax.tree.unflatten(
        tree, [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


@functools.partial(jax.jit, static_argnames=("config", "dropped"))
def forward(params, stack, slots=None, key=None, *, config=LORA, dropped=False):
    """Hidden states of all valid places; `slots` None is the grouped layout."""
    if slots is not None:
        rows = lora.rows(config, AGENTS, slots)
    else:
        rows = lora.grouped(config, key if dropped else None)
    hidden, _ = decoder.apply(
        params, stack, CONFIG, TOKENS, decoder.positions_of(VALID), decoder.causal_mask(VALID), rows=rows
    )
    return jnp.where(VALID[None], hidden, 0)


def merged(params, stack, agent):
    """Parameters with an agent's `W + scale · B A`, projection by projection."""
    heads, kv, hd, f = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.intermediate_size
    blocks = {
        "q": ("qkv", 0, heads * hd), "k": ("qkv", heads * hd, (heads + kv) * hd),
        "v": ("qkv", (heads + kv) * hd, (heads + 2 * kv) * hd), "o": ("o", 0, None),
        "gate": ("gate_up", 0, f), "up": ("gate_up", f, 2 * f), "down": ("down", 0, None),
    }  # fmt: skip
    layers = []
    for layer, adapter in zip(params["layers"], stack, strict=True):
        layer = {name: np.array(value) for name, value in layer.items()}
        for name, pair in adapter.items():
            weight, start, end = blocks[name]
            a, b = np.asarray(pair["a"][agent]), np.asarray(pair["b"][agent])
            layer[weight][start:end] += 6.0 / 3 * b @ a
        layers.append(layer)
    return params | {"layers": tuple(layers)}


def test_fresh_adapters_change_nothing(params):
    fresh = lora.init(jax.random.key(3), CONFIG, LORA, AGENTS)
    bare, _ = jax.jit(lambda p: decoder.apply(
        p, None, CONFIG, TOKENS, decoder.positions_of(VALID), decoder.causal_mask(VALID)
    ))(params)  # fmt: skip
    bare = jnp.where(VALID[None], bare, 0)
    np.testing.assert_allclose(forward(params, fresh, jnp.array([0, 1, 2, 0, 1, 2])), bare, atol=1e-6)
    np.testing.assert_allclose(forward(params, fresh), bare, atol=1e-6)
    np.testing.assert_allclose(forward(params, fresh, None, jax.random.key(0), dropped=True), bare, atol=1e-6)


def test_init_shapes_range_and_separate_agents():
    fresh = lora.init(jax.random.key(3), CONFIG, LORA, AGENTS)
    shapes = lora.target_shapes(CONFIG)
    assert [shapes[name] for name in ("q", "v", "o", "down")] == [(60, 24), (20, 24), (24, 60), (24, 28)]
    for layer in fresh:
        assert tuple(layer) == lora.TARGETS
        for name, (out, fan_in) in shapes.items():
            a, b = layer[name]["a"], layer[name]["b"]
            assert a.shape == (AGENTS, 3, fan_in) and b.shape == (AGENTS, out, 3) and a.dtype == b.dtype == jnp.float32
            assert not b.any() and 0.8 * fan_in**-0.5 < jnp.abs(a).max() <= fan_in**-0.5
            assert not np.array_equal(a[0], a[1])
    assert not np.array_equal(fresh[0]["q"]["a"], fresh[1]["q"]["a"])
    only = lora.init(jax.random.key(3), CONFIG, lora.LoraConfig(rank=2), 1)
    assert tuple(only[0]) == lora.ATTENTION


def test_mixed_and_grouped_rows_agree(params, stack):
    in_order = forward(params, stack, jnp.array([0, 0, 1, 1, 2, 2]))
    np.testing.assert_allclose(in_order, forward(params, stack), atol=1e-5)
    assert jnp.abs(in_order - forward(params, stack, jnp.array([0, 0, 1, 1, 2, 1])))[:, 5].max() > 1e-2


@pytest.mark.parametrize("slots", [[0, 0, 1, 1, 2, 2], [2, 1, 0, 0, 2, 2]])
def test_equals_merged_weights(params, stack, slots):
    found = forward(params, stack, jnp.array(slots))
    for row, agent in enumerate(slots):
        expected = forward(merged(params, stack, agent), None, jnp.array(slots))[:, row]
        np.testing.assert_allclose(found[:, row], expected, atol=2e-5)


def test_attention_only_adapters_equal_merged_weights(params, stack):
    few = tuple({name: layer[name] for name in lora.ATTENTION} for layer in stack)
    found = forward(params, few)
    for agent in range(AGENTS):
        expected = forward(merged(params, few, agent), None)[:, 2 * agent : 2 * agent + 2]
        np.testing.assert_allclose(found[:, 2 * agent : 2 * agent + 2], expected, atol=2e-5)


@pytest.mark.parametrize("grouped", [True, False])
def test_gradient_of_one_agents_rows_is_exactly_zero_for_the_others(params, stack, grouped):
    slots = None if grouped else jnp.array([0, 0, 1, 1, 2, 2])
    grads = jax.grad(lambda stack: jnp.square(forward(params, stack, slots)[:, 2:4]).sum())(stack)
    for leaf in jax.tree.leaves(grads):
        assert (np.asarray(leaf)[[0, 2]] == 0).all()
        assert np.abs(leaf[1]).max() > 0


def test_gradient_of_mixed_and_grouped_rows_agree(params, stack):
    def grad(slots):
        return jax.grad(lambda stack: jnp.sin(forward(params, stack, slots)).sum())(stack)

    for one, two in zip(*(map(jax.tree.leaves, (grad(None), grad(jnp.array([0, 0, 1, 1, 2, 2]))))), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-4)


def test_adapters_follow_a_bfloat16_base(params, stack):
    held = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for slots in (None, jnp.array([0, 0, 1, 1, 2, 2])):
        found = forward(held, stack, slots)
        assert found.dtype == jnp.bfloat16
        exact = forward(params, stack, slots)
        assert jnp.abs(found.astype(jnp.float32) - exact).max() < 0.15 * jnp.abs(exact).max()


def test_select(stack):
    chosen = lora.select(stack, np.array([2, 0]))
    np.testing.assert_array_equal(chosen[1]["o"]["b"], np.asarray(stack[1]["o"]["b"])[[2, 0]])


# --- dropout ---


@settings(deadline=None, max_examples=10)
@given(rate=st.sampled_from([1 / 65536, 0.1, 0.25, 0.9]), seed=st.integers(0, 1000))
def test_drop_keeps_the_mean(rate, seed):
    count = 40000
    x = np.asarray(lora.drop(jax.random.key(seed), jnp.ones(count), rate))
    dropped = (x == 0).mean()
    assert abs(dropped - rate) < 5 * (rate * (1 - rate) / count) ** 0.5 + 1e-5
    np.testing.assert_allclose(x[x > 0], 1 / (1 - rate), rtol=1e-4)
    assert abs(x.mean() - 1) < 5 * (rate / (1 - rate) / count) ** 0.5 + 1e-4


def test_drop_keeps_dtype_and_is_decided_by_the_key():
    x = jnp.ones((8, 3, 4), jnp.bfloat16)
    one = lora.drop(jax.random.key(0), x, 0.5)
    assert one.dtype == jnp.bfloat16
    np.testing.assert_array_equal(one, lora.drop(jax.random.key(0), x, 0.5))
    assert not np.array_equal(one, lora.drop(jax.random.key(1), x, 0.5))
    np.testing.assert_array_equal(lora.drop(jax.random.key(0), x, 0.0), x)


def test_dropout_needs_a_key_and_is_off_at_inference(params, stack):
    assert lora.grouped(LORA).key is None
    assert lora.grouped(lora.LoraConfig(dropout=0.0), jax.random.key(0)).key is None
    assert lora.rows(LORA, AGENTS, jnp.zeros(2, int)).key is None
    off = forward(params, stack)
    one, two = (forward(params, stack, None, jax.random.key(seed), dropped=True) for seed in (0, 1))
    assert not np.allclose(one, off, atol=1e-3) and not np.allclose(one, two, atol=1e-3)
    np.testing.assert_array_equal(one, forward(params, stack, None, jax.random.key(0), dropped=True))


def test_dropout_masks_differ_by_layer_and_target(stack):
    rows = lora.grouped(LORA, jax.random.key(0))
    same = {"a": jnp.eye(24)[None], "b": jnp.eye(24)[None]}
    x = jnp.ones((24, 6, 5))
    masks = {
        (index, name): np.asarray(lora.delta({name: same}, name, x, lora.per_layer(rows, index))) > 0
        for index in range(2)
        for name in ("q", "k", "v")
    }
    assert len({mask.tobytes() for mask in masks.values()}) == 6
    assert lora.per_layer(None, 1) is None


# --- configuration ---


def test_defaults_are_the_papers():
    config = lora.LoraConfig()
    assert (config.rank, config.alpha, config.dropout, config.scale) == (64, 16.0, 0.1, 0.25)
    assert config.targets == ("q", "k", "v", "o")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, "dropout"),
        ({"dropout": float("nan")}, "dropout"),
        ({"targets": ("q", "router")}, "got .*router"),
        ({"targets": ()}, "got none"),
    ],
)
def test_configuration_errors_name_the_field(fields, said):
    with pytest.raises(ValueError, match=said):
        lora.LoraConfig(**fields)


def test_no_adapter_adds_nothing(stack):
    x = jnp.ones((24, 6, 5))
    rows = lora.grouped(LORA)
    assert lora.delta(None, "q", x, rows) == 0.0
    assert lora.delta(stack[0], "q", x, None) == 0.0
    assert lora.delta({"q": stack[0]["q"]}, "k", x, rows) == 0.0

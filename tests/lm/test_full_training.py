"""Full fine-tuning, and what holds for it and for LoRA alike: accumulation, recomputation, donation."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.lm import decoder, lora, training
from stackalign.lm.config import DecoderConfig

TIED = DecoderConfig(
    vocab_size=30, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, tie_embeddings=True, max_positions=64,
)  # fmt: skip
UNTIED = DecoderConfig(**{**TIED.__dict__, "tie_embeddings": False})
VOCAB = 27  # the embedding has three rows more
LORA = lora.LoraConfig(rank=2, alpha=4.0, dropout=0.0)
OPTIMIZER = training.adamw(weight_decay=0.01)


def loss(log_probs, batch):
    weighted = -(batch.extra[..., None] * log_probs)
    return weighted.sum(), {"loss": weighted.sum()}


GRADIENT = functools.partial(training.gradient, loss=loss, vocab_size=VOCAB)


def make(config, dtype=jnp.float32):
    params = decoder.init(jax.random.key(0), config)
    params |= {"embed": params["embed"] * 25}
    noisy = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    return jax.tree.map(lambda x: x.astype(dtype), noisy)


def make_batch(agents, rows, seed=0):
    rng = np.random.default_rng(seed)
    lengths, ends = rng.integers(1, 6, (2, agents, rows, 1))
    return training.Batch(
        rng.integers(0, VOCAB, (agents, rows, 5)).astype(np.int32), np.arange(5) >= 5 - lengths,
        rng.integers(0, VOCAB, (agents, rows, 5)).astype(np.int32), np.arange(5) < ends,
        rng.random((agents, rows)).astype(np.float32) / rows,
    )  # fmt: skip


KINDS = {"lora": (LORA, 3), "full": (None, 1)}


def start(kind, config=TIED, dtype=jnp.float32):
    """`(params, trained, lora_config, batch)` of either way to train."""
    shape, agents = KINDS[kind]
    params = make(config, dtype)
    if shape is None:
        return params, training.masters(make(config)), None, make_batch(1, 8)
    stack = lora.init(jax.random.key(1), config, shape, agents)
    stack = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), stack)
    return params, stack, shape, make_batch(agents, 8)


def assert_near(one, two, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one, two)


# --- the gradient ---


def reference_loss(params, config, batch):
    """The model and the loss written out: one sequence at a time, no padding, every projection apart, all logits."""
    q, kv, f = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    half = config.head_dim // 2
    head = params.get("lm_head", params["embed"])[:VOCAB]

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_eps) * scale

    def turn(x):  # [length, heads, head_dim]
        angles = jnp.arange(len(x))[:, None] * config.rope_theta ** (-jnp.arange(half) / half)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def logits(tokens):
        h, length = params["embed"][tokens], len(tokens)
        for layer in params["layers"]:
            x = norm(h, layer["attn_norm"])
            wq, wk, wv = layer["qkv"][:q], layer["qkv"][q : q + kv], layer["qkv"][q + kv :]
            queries, keys = (turn((x @ w.T).reshape(length, -1, config.head_dim)) for w in (wq, wk))
            values = (x @ wv.T).reshape(length, -1, config.head_dim)
            group = config.num_heads // config.num_kv_heads
            keys, values = jnp.repeat(keys, group, axis=1), jnp.repeat(values, group, axis=1)
            weights = jnp.einsum("qhd,khd->hqk", queries, keys) / config.head_dim**0.5
            weights = jnp.where(jnp.tril(jnp.ones((length, length), bool)), weights, -jnp.inf)
            mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(weights), values).reshape(length, -1)
            h = h + mixed @ layer["o"].T
            x = norm(h, layer["mlp_norm"])
            gate, up = x @ layer["gate_up"][:f].T, x @ layer["gate_up"][f:].T
            h = h + (jax.nn.silu(gate) * up) @ layer["down"].T
        return norm(h, params["final_norm"]) @ head.T

    total = 0.0
    for row in range(batch.prompts.shape[1]):
        prompt = batch.prompts[0, row][batch.prompt_mask[0, row]]
        completion = batch.completions[0, row][batch.completion_mask[0, row]]
        log_probs = jax.nn.log_softmax(logits(np.concatenate([prompt, completion]))[len(prompt) - 1 : -1])
        total -= batch.extra[0, row] * log_probs[np.arange(len(completion)), completion].sum()
    return total


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_gradient_equals_autodiff_of_the_model_written_out(config, remat):
    params, batch = make(config), make_batch(1, 4)
    value, expected = jax.jit(jax.value_and_grad(lambda p: reference_loss(p, config, batch)))(params)
    grads, metrics = GRADIENT(
        params, training.masters(params), jax.random.key(0), batch, config=config, lora_config=None, remat=remat
    )
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert all(leaf.shape[0] == 1 and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
    assert_near(jax.tree.map(lambda leaf: leaf[0], grads), expected, rtol=1e-3, atol=2e-5)
    assert np.abs(grads["embed"][0, VOCAB:]).max() == 0 if config.tie_embeddings else True


def test_only_the_dtype_of_the_base_counts():
    """The parameters that are trained are the masters: the base beside them may hold anything."""
    params, trained, shape, batch = start("full")
    other = jax.tree.map(jnp.zeros_like, params)
    runs = [GRADIENT(p, trained, jax.random.key(0), batch, config=TIED, lora_config=shape)[0] for p in (params, other)]
    assert_near(*runs, atol=0)


def test_bfloat16_gradient_is_near_and_float32():
    params, trained, shape, batch = start("full")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    exact, found = (
        GRADIENT(p, trained, jax.random.key(0), batch, config=TIED, lora_config=shape)[0] for p in (params, half)
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    for one, two in zip(jax.tree.leaves(exact), jax.tree.leaves(found), strict=True):
        one, two = np.ravel(one), np.ravel(two)
        assert np.vdot(one, two) / np.linalg.norm(one) / np.linalg.norm(two) > 0.98


def test_the_embeddings_gradient_is_added_in_float32():
    """One token 4096 times, each time with the same gradient g: bfloat16 sums would stop at 256 g."""
    config = DecoderConfig(**{**UNTIED.__dict__, "num_layers": 1, "max_positions": 8192})
    params = make(config, jnp.bfloat16)
    rows = 1024
    batch = training.Batch(
        np.full((1, rows, 4), 5, np.int32), np.ones((1, rows, 4), bool), np.full((1, rows, 1), 7, np.int32),
        np.ones((1, rows, 1), bool), np.ones((1, rows), np.float32),
    )  # fmt: skip
    one = jax.tree.map(lambda x: x[:, :1], batch)
    trained = training.masters(params)
    whole, single = (
        GRADIENT(params, trained, jax.random.key(0), b, config=config, lora_config=None)[0] for b in (batch, one)
    )
    for name in ("embed", "lm_head"):
        scale = float(jnp.abs(single[name]).max()) * rows
        np.testing.assert_allclose(whole[name], rows * single[name], atol=1e-2 * scale)


# --- masters ---


def test_updates_far_below_bfloat16_add_up():
    """200 Adam steps of 1e-6 with one gradient move masters by 2e-4; bfloat16 weights above 0.1, whose ulp is 4e-4 and
    more, swallow every one."""
    params, trained, shape, batch = start("full", dtype=jnp.bfloat16)
    before = jax.tree.map(np.asarray, trained)
    optimizer = training.adamw()
    state = training.init(optimizer, trained)
    grads, _ = GRADIENT(params, trained, jax.random.key(0), batch, config=TIED, lora_config=shape)
    for _ in range(200):  # the same gradient every time, so that every update is known: −1e-6 · sign
        trained, state = training.apply(trained, state, grads, 1e-6, optimizer=optimizer)
    moved = np.asarray(trained["layers"][0]["o"]) - before["layers"][0]["o"]
    slope = np.asarray(grads["layers"][0]["o"])
    large = np.abs(slope) > 1e-4
    assert large.mean() > 0.9
    np.testing.assert_allclose(moved[large], -2e-4 * np.sign(slope[large]), rtol=0.02)
    swallowed = jnp.bfloat16(before["layers"][0]["o"])
    big = np.abs(before["layers"][0]["o"]) > 0.1
    for _ in range(3):
        swallowed = swallowed - (1e-6 * jnp.sign(slope)).astype(jnp.bfloat16)
    assert (np.asarray(swallowed)[big] == np.asarray(jnp.bfloat16(before["layers"][0]["o"]))[big]).all()


def test_compute_copy_is_the_masters_rounded():
    params, trained, *_ = start("full", dtype=jnp.bfloat16)
    copy = training.compute_copy(params, trained)
    assert jax.tree.structure(copy) == jax.tree.structure(params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(copy))
    assert_near(copy, jax.tree.map(lambda x: x[0].astype(jnp.bfloat16), trained), atol=0)
    assert_near(training.masters(copy), jax.tree.map(lambda x: x.astype(jnp.float32)[None], copy), atol=0)


def run_steps(kind, count=10, rate=1e-2, **options):
    params, trained, shape, batch = start(kind, **options)
    state, losses = training.init(OPTIMIZER, trained), []
    for step in range(count):
        grads, metrics = GRADIENT(params, trained, jax.random.key(step), batch, config=TIED, lora_config=shape)
        trained, state = training.apply(trained, state, grads, rate, optimizer=OPTIMIZER)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_training_all_parameters_lowers_the_loss(dtype):
    losses = run_steps("full", dtype=dtype)
    assert losses[-1] < 0.7 * losses[0]


# --- both ways ---


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up_to_the_batch(kind):
    params, trained, shape, batch = start(kind)
    gradient = functools.partial(GRADIENT, config=TIED, lora_config=shape)
    whole, metrics = gradient(params, trained, jax.random.key(0), batch)
    total = None
    for first in range(0, 8, 2):
        part = jax.tree.map(lambda x: x[:, first : first + 2], batch)  # noqa: B023
        out = gradient(params, trained, jax.random.key(0), part)
        total = out if total is None else training.add(total, out)
    assert_near(total[0], whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(total[1]["loss"], metrics["loss"], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_changes_nothing(kind):
    params, trained, shape, batch = start(kind)
    plain, remat = (
        GRADIENT(params, trained, jax.random.key(0), batch, config=TIED, lora_config=shape, remat=remat)[0]
        for remat in (False, True)
    )
    assert_near(plain, remat, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_give_their_buffers_up(kind):
    params, trained, shape, batch = start(kind)
    state = training.init(OPTIMIZER, trained)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of a donated buffer that nothing could use
        for step in range(2):
            total, more = (
                GRADIENT(params, trained, jax.random.key(seed), batch, config=TIED, lora_config=shape)
                for seed in (0, 1)
            )
            grads = training.add(total, more)
            old = jax.tree.leaves((total, trained, state))
            trained, state = training.apply(trained, state, grads[0], 1e-3, optimizer=OPTIMIZER)
            assert all(leaf.is_deleted() for leaf in old), step
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, trained, state, grads)))

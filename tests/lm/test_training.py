"""Training of stacked adapters: accumulation, separation of agents, schedules, float32 masters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stackalign.lm import decoder, lora, training
from stackalign.lm.config import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=30, hidden_size=16, intermediate_size=20, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, tie_embeddings=True, max_positions=64,
)  # fmt: skip
LORA = lora.LoraConfig(rank=2, alpha=4.0, dropout=0.0)
DROPPING = lora.LoraConfig(rank=2, alpha=4.0, dropout=0.3)
AGENTS, ROWS = 3, 4
OPTIMIZER = training.adamw(weight_decay=0.01)


def loss(log_probs, batch):
    """Weighted negative log-likelihood of each row; weights are normalised before the step."""
    weighted = -(batch.extra[..., None] * log_probs)
    return weighted.sum(), {"rows": (batch.extra != 0).sum(), "loss": weighted.sum()}


GRADIENT = functools.partial(training.gradient, config=CONFIG, loss=loss, vocab_size=30)


@pytest.fixture(scope="module")
def params():
    made = decoder.init(jax.random.key(0), CONFIG)
    return made | {"embed": made["embed"] * 25}


@pytest.fixture(scope="module")
def stack():
    made = lora.init(jax.random.key(1), CONFIG, LORA, AGENTS)
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), made)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    lengths, ends = rng.integers(1, 6, (2, AGENTS, ROWS, 1))
    return training.Batch(
        rng.integers(0, 30, (AGENTS, ROWS, 5)).astype(np.int32), np.arange(5) >= 5 - lengths,
        rng.integers(0, 30, (AGENTS, ROWS, 5)).astype(np.int32), np.arange(5) < ends,
        rng.random((AGENTS, ROWS)).astype(np.float32) / ROWS,
    )  # fmt: skip


def leaves(one, two):
    return zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)


def assert_near(one, two, atol):
    for left, right in leaves(one, two):
        np.testing.assert_allclose(left, right, atol=atol)


def part(batch, rows):
    return jax.tree.map(lambda x: x[:, rows], batch)


def test_micro_batches_add_up_to_the_batch(params, stack, batch):
    key = jax.random.key(0)
    whole, metrics = GRADIENT(params, stack, key, batch, lora_config=LORA)
    total = None
    for rows in (slice(0, 2), slice(2, 4)):
        out = GRADIENT(params, stack, key, part(batch, rows), lora_config=LORA)
        total = out if total is None else training.add(total, out)
    assert_near(total[0], whole, 1e-6)
    np.testing.assert_allclose(total[1]["loss"], metrics["loss"], rtol=1e-6)
    assert int(metrics["rows"]) == AGENTS * ROWS


def test_padding_rows_change_nothing(params, stack, batch):
    """A last micro-batch is filled up with rows of weight 0 whose masks are empty."""
    padded = training.Batch(*(np.concatenate([x, np.zeros_like(x)], axis=1) for x in batch))
    whole, _ = GRADIENT(params, stack, jax.random.key(0), batch, lora_config=LORA)
    with jax.debug_nans(True):
        found, _ = GRADIENT(params, stack, jax.random.key(0), padded, lora_config=LORA)
    assert_near(found, whole, 1e-6)


def test_gradient_equals_finite_differences(params, stack, batch):
    grads, metrics = GRADIENT(params, stack, jax.random.key(0), batch, lora_config=LORA)
    direction = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size + 1), x.shape), stack)
    slope = sum(jnp.vdot(g, d) for g, d in leaves(grads, direction))
    values = [
        GRADIENT(params, jax.tree.map(lambda x, d: x + step * d, stack, direction),  # noqa: B023
                 jax.random.key(0), batch, lora_config=LORA)[1]["loss"]
        for step in (-2e-3, 2e-3)
    ]  # fmt: skip
    np.testing.assert_allclose((values[1] - values[0]) / 4e-3, slope, rtol=1e-2)


def steps(params, stack, batch, count, config=LORA, rate=1e-2):
    stack = jax.tree.map(jnp.copy, stack)  # steps give it up
    state = training.init(OPTIMIZER, stack)
    for step in range(count):
        grads, _ = GRADIENT(params, stack, jax.random.key(step), batch, lora_config=config)
        stack, state = training.apply(
            stack, state, grads, training.cosine(step, count, rate), optimizer=OPTIMIZER
        )
    return stack, state


def test_each_agent_trains_as_if_alone(params, stack, batch):
    together, state = steps(params, stack, batch, 4)
    for agent in range(AGENTS):
        only = slice(agent, agent + 1)
        alone, alone_state = steps(params, lora.select(stack, only), jax.tree.map(lambda x: x[only], batch), 4)  # noqa: B023
        assert_near(lora.select(together, only), alone, 1e-6)
        assert_near(jax.tree.map(lambda x: x[only], state), alone_state, 1e-6)  # noqa: B023
    moved = [np.abs(new - old).max(axis=(1, 2)) for new, old in leaves(together, stack)]
    assert np.min(moved) > 1e-3


def test_clipping_is_each_agents_own():
    """Agent 0's gradient has norm 100, agent 1's 0.5: only agent 0's is scaled to norm 1."""
    grads = {"w": jnp.array([[60.0, 80.0], [0.3, 0.4]])}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0))
    values = {"w": jnp.zeros((2, 2))}
    values, _ = training.apply(values, training.init(optimizer, values), grads, 1.0, optimizer=optimizer)
    np.testing.assert_allclose(values["w"], [[-0.6, -0.8], [-0.3, -0.4]], rtol=1e-6)


def test_adamw_by_formula():
    optimizer = training.adamw(b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.1, max_grad_norm=1e9)
    value, gradients = 0.5, [0.3, -0.7, 0.2]
    values = {"w": jnp.full((1, 1), value)}
    state = training.init(optimizer, values)
    mean = square = 0.0
    for step, gradient in enumerate(gradients, start=1):
        mean, square = 0.8 * mean + 0.2 * gradient, 0.9 * square + 0.1 * gradient**2
        update = (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)) ** 0.5 + 1e-3) + 0.1 * value
        value -= 0.05 * update
        grads = {"w": jnp.full((1, 1), gradient)}
        values, state = training.apply(values, state, grads, 0.05, optimizer=optimizer)
    np.testing.assert_allclose(values["w"], value, rtol=1e-5)


def test_gradient_of_zero_is_harmless(stack):
    zeros = jax.tree.map(jnp.zeros_like, stack)
    optimizer = training.adamw()
    with jax.debug_nans(True):
        copy = jax.tree.map(jnp.copy, stack)
        values, _ = training.apply(copy, training.init(optimizer, copy), zeros, 1e-2, optimizer=optimizer)
    assert_near(values, stack, 0)


def test_cosine_endpoints():
    assert training.cosine(0, 10, 3e-5) == pytest.approx(3e-5)
    assert training.cosine(5, 10, 3e-5) == pytest.approx(1.5e-5)
    assert training.cosine(10, 10, 3e-5) == pytest.approx(0, abs=1e-12)
    assert training.cosine(9, 10, 1.0) == pytest.approx((1 + np.cos(0.9 * np.pi)) / 2, rel=1e-5)
    assert training.cosine(0, 1, 1.0) == training.cosine(0, 0, 1.0) == 1.0
    rates = [training.cosine(step, 7, 1.0) for step in range(8)]
    assert all(one > two for one, two in zip(rates, rates[1:], strict=False))


def test_masters_are_float32_and_take_small_steps(params, stack, batch):
    """1000 Adam steps of 8e-6 on 0.1: a bfloat16 parameter would stay at 0.100098."""
    optimizer = training.adamw()
    values = {"w": jnp.full((1, 1), 0.1)}
    state = training.init(optimizer, values)
    for _ in range(1000):
        values, state = training.apply(values, state, {"w": jnp.ones((1, 1))}, 8e-6, optimizer=optimizer)
    np.testing.assert_allclose(values["w"], 0.092, atol=1e-5)
    stuck = jnp.bfloat16(0.1) - jnp.bfloat16(8e-6)
    assert stuck == jnp.bfloat16(0.1) and float(stuck) == pytest.approx(0.100098, abs=1e-6)

    held = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    grads, metrics = GRADIENT(held, stack, jax.random.key(0), batch, lora_config=LORA)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads)) and metrics["loss"].dtype == jnp.float32
    exact, _ = GRADIENT(params, stack, jax.random.key(0), batch, lora_config=LORA)
    flat, flat_exact = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (grads, exact))
    assert np.vdot(flat, flat_exact) / np.linalg.norm(flat) / np.linalg.norm(flat_exact) > 0.99
    copy = jax.tree.map(jnp.copy, stack)
    moved, state = training.apply(copy, training.init(OPTIMIZER, copy), grads, 1e-6, optimizer=OPTIMIZER)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(moved))
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))
    assert min(np.mean(np.asarray(new) != np.asarray(old)) for new, old in leaves(moved, stack)) > 0.9


def test_dropout_is_decided_by_the_key(params, stack, batch):
    runs = [
        GRADIENT(params, stack, jax.random.key(seed), batch, lora_config=DROPPING, remat=remat)[0]
        for seed, remat in ((0, False), (0, True), (1, False))
    ]
    assert_near(runs[0], runs[1], 1e-5)
    assert max(np.abs(one - two).max() for one, two in leaves(runs[0], runs[2])) > 1e-3


def test_training_lowers_the_loss_of_every_agent(params, batch):
    stack = lora.init(jax.random.key(2), CONFIG, LORA, AGENTS)
    trained, _ = steps(params, stack, batch, 12, rate=3e-2)
    for agent in range(AGENTS):
        alone = batch._replace(extra=batch.extra * (np.arange(AGENTS) == agent)[:, None])
        before, after = (
            float(GRADIENT(params, held, jax.random.key(0), alone, lora_config=LORA)[1]["loss"])
            for held in (stack, trained)
        )
        assert after < 0.9 * before

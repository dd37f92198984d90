"""DPO of all parameters: one agent a base, a reference of its own start, and what the caller holds stays."""

import dataclasses

import jax
import numpy as np
import pytest
from test_programs import make_pool

from stackalign.algorithms import preferences
from stackalign.data import Instruction
from stackalign.lm import lora, training
from stackalign.lm import pool as lm_pool

CONFIG = preferences.DpoConfig(batch_size=4, learning_rate=1e-2, epochs=3)


@pytest.fixture(scope="module")
def pool():
    return make_pool("full")


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(0)

    def text(length):
        return "".join(rng.choice(list("0123456789"), length))

    return [
        preferences.Pair(
            Instruction(f"q{i}", text(6)), *(lm_pool.Answer(text(n), (), True) for n in rng.integers(2, 6, 2))
        )
        for i in range(6)
    ]


def train(pool, pairs, config=CONFIG):
    stacks = lm_pool.init_adapters(jax.random.key(0), pool)
    optimizers = preferences.init(config, stacks)
    return stacks, preferences.train(config, pool, stacks, optimizers, jax.random.key(1), pairs)


def test_the_first_loss_is_ln_2_and_the_loss_falls(pool, pairs):
    stacks, (trained, optimizers, losses) = train(pool, pairs)
    assert losses["first"] == pytest.approx(np.log(2), abs=1e-5)
    assert losses["last"] < 0.9 * losses["first"] and losses["accuracy"] > 0.5
    assert optimizers == {}
    for old, new in zip(jax.tree.leaves(stacks), jax.tree.leaves(trained), strict=True):
        assert not old.is_deleted() and new.dtype == np.float32 and np.abs(new - old).max() > 1e-4


def test_training_again_starts_from_a_new_reference(pool, pairs):
    _, (trained, optimizers, _) = train(pool, pairs)
    _, _, losses = preferences.train(CONFIG, pool, trained, optimizers, jax.random.key(2), pairs)
    assert losses["first"] == pytest.approx(np.log(2), abs=1e-5)


def test_micro_batches_change_nothing(pool, pairs):
    # Epsilon of Adam magnifies rounding where a gradient is nearly zero, hence the loss and not the parameters.
    whole, parts = (
        train(pool, pairs, dataclasses.replace(CONFIG, micro_tokens=tokens))[1][2] for tokens in (4096, 64)
    )
    for name in ("first", "last", "mean", "margin"):
        assert parts[name] == pytest.approx(whole[name], abs=2e-4)


def test_moments_carry_over_where_they_are_kept(pool, pairs):
    config = dataclasses.replace(CONFIG, restart_optimizer=False)
    stacks, (trained, optimizers, losses) = train(pool, pairs, config)
    assert optimizers["tiny"][1].count == losses["steps"]
    _, again, _ = preferences.train(config, pool, trained, optimizers, jax.random.key(2), pairs)
    assert again["tiny"][1].count == 2 * losses["steps"]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((stacks, trained, optimizers)))


def test_the_masters_answer(pool):
    """Generation, scores and next tokens come from what is trained, in the base's dtype."""
    half = pool.bases["tiny"]._replace(params=jax.tree.map(lambda x: x.astype("bfloat16"), pool.bases["tiny"].params))
    prompt, completion = lm_pool.encode_prompt(pool, 0, "12+34"), [5, 6, 1]
    for base in (pool.bases["tiny"], half):
        mine = dataclasses.replace(pool, bases={"tiny": base})
        stacks = jax.tree.map(lambda x: 1.5 * x, lm_pool.init_adapters(jax.random.key(0), mine))
        plain = dataclasses.replace(
            mine, bases={"tiny": base._replace(params=training.compute_copy(base.params, stacks["tiny"]))}
        )
        for ask in (
            lambda p, s: lm_pool.score_answers(p, s, [(0, prompt, completion)])[0],
            lambda p, s: lm_pool.next_log_probs(p, s, [(0, prompt)], [[1, 2]])[0][0],
            lambda p, s: lm_pool.generate_answers(
                p, s, jax.random.split(jax.random.key(3), 1), [(0, prompt)], lm_pool.Sampling(6, 1.0, 0.9)
            )[0].ids,
        ):
            np.testing.assert_array_equal(ask(mine, stacks), ask(plain, None))


def test_agents_that_share_a_base_are_refused(pool):
    agents = tuple(lm_pool.Agent(name, "tiny") for name in ("one", "two"))
    with pytest.raises(ValueError, match="agents one, two share base 'tiny'"):
        lm_pool.Pool(pool.bases, agents, None)
    lm_pool.Pool(pool.bases, agents, lora.LoraConfig(rank=2))

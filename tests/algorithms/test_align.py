"""The loop of Algorithm 1 on a tiny pool, and its parts against formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign import arena, data, judges
from stackalign.algorithms import align, evaluation, preferences, toy
from stackalign.data import Instruction
from stackalign.lm import lora, training
from stackalign.lm import pool as lm_pool

LORA = lora.LoraConfig(rank=2, alpha=2.0, dropout=0.0, targets=("q", "v"))
CONFIG = align.AlignConfig(
    iterations=2,
    duels=10,
    sampling=lm_pool.Sampling(toy.ANSWER_LENGTH, 1.0, 0.95),
    train=preferences.DpoConfig(learning_rate=1e-2, batch_size=4, epochs=1),
)


def make_task(judge, split, **changes):
    return align.Task(split.instructions, split.validation, judge, data.verify, lambda _: True)._replace(**changes)


@pytest.fixture(scope="module")
def split():
    return toy.split(0, development=10, test=2)


@pytest.fixture(scope="module")
def made(split):
    config = toy.ToyConfig(num_agents=4, pretrain_steps=8, specialise_steps=2, hidden_size=16, num_layers=1)
    return toy.build(jax.random.key(0), 0, config, LORA, exclude=split.prompts)


@pytest.fixture(scope="module")
def played(made, split):
    pool, stacks = made
    task = make_task(judges.peer.likelihood(), split)
    state = align.init(jax.random.key(1), CONFIG, pool, task, 12, stacks)
    return task, state, list(align.align(CONFIG, pool, task, state))


def test_iterations_and_counts(made, played):
    pool, _ = made
    task, _, steps = played
    assert [record.iteration for _, record in steps] == [1, 2]
    for state, record in steps:
        m = record.metrics
        assert len(record.duels) == CONFIG.duels == m["pairs"] + m["ties"] + m["invalid"]
        assert m["calls"]["generations"] == m["calls"]["generations_formula"] == 2 * 10
        assert m["calls"]["judgements"] == m["calls"]["judgements_formula"] == 2 * 10 * (4 - 2)
        assert m["calls"]["paper_formula"] == 10 * 4
        assert sum(m["leader"]["probabilities"]) == pytest.approx(1, abs=1e-5)
        assert set(m["leader"]["instructions"]) <= {i.id for i in task.instructions}
        assert state.iteration == record.iteration


def test_actives_go_round_and_judges_never_duel(made, played):
    pool, _ = made
    for _, record in played[2]:
        for duel in record.duels:
            number = (record.iteration - 1) * CONFIG.duels + duel["duel"]
            assert duel["models"][0] == pool.names[number % 4]
            assert duel["models"][0] != duel["models"][1]
            assert set(duel["judges"]) == set(pool.names) - set(duel["models"])


def test_records_follow_the_equations(made, played):
    """Scores (8), reputations (9-11) and the leader (1-5) recomputed from the duels on paper."""
    pool, _ = made
    task, state, steps = played
    reputation, leader_state = state.reputation, state.leader
    for after, record in steps:
        ids = record.metrics["leader"]["instructions"]
        drawn, gains = [], []
        gap = 0.6 + (0.15 - 0.6) * (record.iteration - 1)
        for duel in record.duels:
            first, second = (pool.names.index(name) for name in duel["models"])
            weights = np.array([reputation.ratings[pool.names.index(name)] for name in duel["judges"]])
            table = np.array(list(duel["judges"].values()))
            means = weights @ table / weights.sum()
            np.testing.assert_allclose(duel["scores"], means, rtol=1e-5)
            reputation = arena.reputation.update(
                reputation, first, second, *duel["scores"], True, arena.reputation.PAPER
            )
            drawn.append(ids.index(duel["instruction"]))
            difficulty = np.mean([(10 - s) / 7 if s >= 3 else 0 for s in duel["scores"]])
            preference = np.exp(-((abs(np.subtract(*duel["scores"])) / 9 - gap) ** 2) / (2 * 0.15**2))
            gains.append(0.3 * difficulty + 0.7 * preference)
        np.testing.assert_allclose(after.reputation.ratings, reputation.ratings, rtol=1e-5)
        log_weights = np.array(leader_state.log_weights, float)
        p = 0.8 * np.exp(log_weights) / np.exp(log_weights).sum() + 0.2 / len(ids)
        for arm, gain in zip(drawn, gains, strict=True):
            log_weights[arm] += 0.2 / len(ids) * gain / p[arm]
        log_weights -= np.log(np.exp(log_weights).sum())
        np.testing.assert_allclose(after.leader.log_weights, log_weights, atol=1e-5)
        leader_state = after.leader


def test_same_key_same_bits(made, played):
    pool, _ = made
    task, state, steps = played
    again = list(align.align(CONFIG, pool, task, state))
    for (one, first), (other, second) in zip(steps, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.stacks, other.stacks)
        assert first.duels == second.duels
        assert {**first.metrics, "seconds": None} == {**second.metrics, "seconds": None}


def test_first_step_loss_is_ln2_for_trained_adapters(made, played):
    """The reference is the adapter as it stood, not the bare base (which these adapters have left)."""
    for _, record in played[2]:
        assert record.metrics["loss"]["first"] == pytest.approx(np.log(2), abs=1e-5)


def test_one_by_one_rounds_and_every_judge(made, split):
    pool, stacks = made
    config = dataclasses.replace(CONFIG, iterations=1, duels=4, duels_per_round=1)
    for judge in (judges.peer.likelihood(raw=True), judges.external.verifier(data.verify), judges.external.random()):
        task = make_task(judge, split)
        state = align.init(jax.random.key(1), config, pool, task, 5, stacks)
        _, record = align.step(config, pool, task, state)
        assert len(record.duels) == 4
        for duel in record.duels:
            assert all(1 <= score <= 10 for score in duel["scores"])
        if judge.names:
            assert all(set(duel["judges"]) == set(judge.names) for duel in record.duels)


def test_fresh_instructions_restart_the_leader(made, split):
    pool, stacks = made
    config = dataclasses.replace(CONFIG, fresh_instructions=True)
    task = make_task(judges.external.random(), split)
    state = align.init(jax.random.key(1), config, pool, task, 8, stacks)
    (first, _), (second, record) = align.align(config, pool, task, state)
    assert set(first.drawn) != set(second.drawn)
    assert {duel["instruction"] for duel in record.duels} <= {task.instructions[i].id for i in second.drawn}


def test_failed_judges_leave_the_mean_and_are_counted(made, split):
    pool, stacks = made

    def measure(key, pool, stacks, items, progress):
        values = np.array([4.0 + len(item.answer.text) % 3 for item in items])
        values[[item.judge == 0 for item in items]] = np.nan
        return values

    task = make_task(judges.Judge(None, measure, lambda values: values), split)
    config = dataclasses.replace(CONFIG, iterations=1)
    _, record = align.step(config, pool, task, align.init(jax.random.key(1), config, pool, task, 5, stacks))
    asked = sum("solver_1" in duel["judges"] for duel in record.duels)
    assert record.metrics["parse_failures"] == {"solver_1": 2 * asked, "solver_2": 0, "solver_3": 0, "solver_4": 0}
    for duel in record.duels:
        valid = [scores for name, scores in duel["judges"].items() if name != "solver_1"]
        np.testing.assert_allclose(duel["scores"], np.mean(valid, axis=0), rtol=1e-4)

    five = functools.partial(judges.on_parse_failure, mode="five")
    task = make_task(judges.Judge(None, measure, five), split)
    _, record = align.step(config, pool, task, align.init(jax.random.key(1), config, pool, task, 5, stacks))
    assert record.metrics["parse_failures"]["solver_1"] == 2 * asked == record.metrics["failures_total"]
    for duel in record.duels:
        table = [[5.0, 5.0] if name == "solver_1" else scores for name, scores in duel["judges"].items()]
        np.testing.assert_allclose(duel["scores"], np.mean(table, axis=0), rtol=1e-4)
        assert duel["judges"].get("solver_1", [None, None]) == [None, None]

    task = make_task(judges.Judge(None, lambda *a: np.full(len(a[3]), np.nan), lambda values: values), split)
    after, record = align.step(config, pool, task, align.init(jax.random.key(1), config, pool, task, 5, stacks))
    assert record.metrics["invalid"] == CONFIG.duels and record.metrics["pairs"] == 0
    assert record.metrics["loss"] == {"steps": 0}
    jax.tree.map(np.testing.assert_array_equal, after.stacks, stacks)
    np.testing.assert_allclose(after.leader.log_weights, -np.log(5), rtol=1e-6)


def test_self_play_of_one_model(made, split):
    pool, stacks = made
    alone = dataclasses.replace(pool, agents=pool.agents[:1])
    task = make_task(judges.peer.likelihood(), split)
    stack = {"toy": lora.select(stacks["toy"], slice(0, 1))}
    state = align.init(jax.random.key(1), CONFIG, alone, task, 5, stack)
    after, record = align.step(CONFIG, alone, task, state)
    assert all(duel["models"] == ["solver_1", "solver_1"] for duel in record.duels)
    np.testing.assert_array_equal(after.reputation.ratings, state.reputation.ratings)


def test_refusals(made, split):
    pool, _ = made
    two = dataclasses.replace(pool, agents=pool.agents[:2])
    peers, verifier = (
        make_task(judges.peer.likelihood(), split),
        make_task(judges.external.verifier(data.verify), split),
    )
    with pytest.raises(ValueError, match="no peer judge"):
        align.check(CONFIG, two, peers, 5)
    align.check(CONFIG, two, verifier, 5)
    with pytest.raises(ValueError, match="1000 instructions asked for .* 48"):
        align.check(CONFIG, pool, peers, 1000)
    bare = verifier._replace(instructions=[Instruction("x", "A1")], checkable=lambda i: i.answer is not None)
    with pytest.raises(ValueError, match="'x'"):
        align.check(CONFIG, pool, bare, 1)
    long = peers._replace(instructions=[Instruction("long", "A" * 40)])
    with pytest.raises(ValueError, match="'long'.*context of 32 tokens"):
        align.check(CONFIG, pool, long, 1)
    foreign = peers._replace(instructions=[Instruction("odd", "é")])
    with pytest.raises(ValueError, match="'odd'.*alphabet"):
        align.check(CONFIG, pool, foreign, 1)


def test_micro_batches_change_nothing(made, split):
    pool, stacks = made
    rng = np.random.default_rng(0)
    pairs = []
    for instruction in split.instructions[:6]:
        texts = ["".join(rng.choice(list("abc"), size=n)) for n in (3, 5)]
        pairs.append(preferences.Pair(instruction, *(lm_pool.Answer(text, (), True) for text in texts)))
    state = align.init(jax.random.key(1), CONFIG, pool, make_task(judges.external.random(), split), 5, stacks)
    out = []
    for micro in (10**6, 4 * 2 * 24):
        config = preferences.DpoConfig(learning_rate=1e-2, batch_size=4, micro_tokens=micro, nll_weight=0.5)
        out.append(preferences.train(config, pool, state.stacks, state.optimizers, jax.random.key(2), pairs))
    for one, other in zip(*(jax.tree.leaves(x[0]) for x in out), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)
    assert out[0][2]["steps"] == out[1][2]["steps"] == 2
    assert out[0][2]["first"] == pytest.approx(out[1][2]["first"], abs=1e-5)


def test_divergence_is_an_error_that_names_the_rate(made, split):
    pool, stacks = made
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, stacks)
    pair = preferences.Pair(split.instructions[0], lm_pool.Answer("a", (), True), lm_pool.Answer("b", (), True))
    config = preferences.DpoConfig()
    with pytest.raises(FloatingPointError, match="--learning_rate"):
        preferences.train(config, pool, broken, preferences.init(config, broken), jax.random.key(0), [pair])


def test_loss_matches_the_formula_and_padded_pairs_weigh_nothing():
    rng = np.random.default_rng(0)
    log_probs = jnp.asarray(-rng.random((2, 3, 2, 4)), jnp.float32)  # two agents, three pairs, the last one padding
    mask = jnp.asarray(rng.random((2, 3, 2, 4)) < 0.8).at[..., 0].set(True)
    reference = jnp.asarray(-rng.random((2, 3, 2)), jnp.float32)
    weights = jnp.asarray([[0.5, 0.5, 0.0]] * 2)
    batch = training.Batch(mask, mask, mask, mask, preferences.PairExtra(reference, weights))
    total, metrics = preferences.dpo_of_rows(0.1, 0.7, 0.0)(jnp.where(mask, log_probs, 0), batch)
    sums = np.where(mask, log_probs, 0).sum(-1)
    margin = 0.1 * ((sums - reference)[..., 0] - (sums - reference)[..., 1])
    nll = -sums[..., 0] / np.asarray(mask)[:, :, 0].sum(-1)
    expected = (weights * (np.log1p(np.exp(-margin)) + 0.7 * nll)).sum()
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    assert float(metrics["margin"]) == pytest.approx(float((weights * margin).sum()), rel=1e-4)


def test_judge_check_counts(made, split):
    pool, stacks = made
    triples = toy.contrasts(0, split.validation)
    found = evaluation.check_judges(jax.random.key(0), pool, judges.external.verifier(data.verify), stacks, triples)
    assert found["verifier"].accuracy == 1 and not found["verifier"].at_chance
    random = evaluation.check_judges(jax.random.key(0), pool, judges.external.random(), stacks, triples)["random"]
    assert random.at_chance
    peers = evaluation.check_judges(jax.random.key(0), pool, judges.peer.likelihood(), stacks, triples)
    assert set(peers) == set(pool.names)

"""EXP3 and the uniform leader: equations 1 and 5, long runs, rejected rewards."""

import functools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign import leader
from stackalign.leader import exp3, uniform

K = 6
update, probabilities = jax.jit(exp3.update), jax.jit(exp3.probabilities)
settings = hypothesis.settings(deadline=None, max_examples=25)
log_weight_lists = st.lists(st.floats(-30, 30), min_size=K, max_size=K)


@jax.jit
def state_of(log_weights):
    return exp3.Exp3State(log_weights - jax.nn.logsumexp(log_weights))


@settings
@hypothesis.given(log_weight_lists, st.floats(0, 1))
def test_probabilities_are_a_distribution_above_the_exploration_floor(log_weights, gamma):
    p = probabilities(state_of(np.float32(log_weights)), gamma=gamma)
    np.testing.assert_allclose(jnp.sum(p), 1.0, atol=1e-6)
    assert float(jnp.min(p)) >= gamma / K - 1e-7


def test_equation_1():
    w = np.array([1.0, 2.0, 5.0])
    p = probabilities(state_of(np.log(w)), gamma=0.2)
    np.testing.assert_allclose(p, 0.8 * w / 8.0 + 0.2 / 3, rtol=1e-6)


@pytest.mark.parametrize("eta", [0.2, 1.0])
def test_equation_5_sums_duplicates_with_the_starting_distribution(eta):
    start = state_of(np.log([1.0, 2.0, 5.0]))
    p = probabilities(start)
    drawn, rewards = jnp.array([2, 0, 2]), jnp.array([0.5, 0.25, 1.0])
    end = update(start, drawn, rewards, jnp.ones(3, bool), eta=eta)
    expected = np.asarray(start.log_weights, np.float64)
    expected += eta / 3 * np.array([0.25 / p[0], 0.0, 1.5 / p[2]])
    expected -= np.log(np.sum(np.exp(expected)))
    np.testing.assert_allclose(end.log_weights, expected, rtol=1e-5)


@settings
@hypothesis.given(log_weight_lists, st.permutations(range(K)), st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_update_commutes_with_a_permutation_of_the_arms(log_weights, order, rewards):
    order, drawn, rewards = np.array(order), jnp.array([0, 3, 3, 5]), jnp.array(rewards)
    valid = jnp.ones(4, bool)
    start = state_of(np.float32(log_weights))
    plain = update(start, drawn, rewards, valid).log_weights
    moved = update(exp3.Exp3State(start.log_weights[order]), jnp.argsort(order)[drawn], rewards, valid)
    np.testing.assert_allclose(moved.log_weights, plain[order], rtol=1e-5, atol=1e-5)


def test_rejected_rewards_change_nothing_and_leave_the_rest_alone():
    start = exp3.init(K)
    drawn = jnp.array([0, 1, 2, 3, 4])
    rewards = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.7, 0.5])
    valid = jnp.array([True, True, True, False, True])
    end = update(start, drawn, rewards, valid)
    alone = update(start, jnp.array([4]), jnp.array([0.5]), jnp.array([True]))
    np.testing.assert_array_equal(end.log_weights, alone.log_weights)
    nothing = update(start, drawn, rewards, jnp.zeros(5, bool))
    np.testing.assert_allclose(nothing.log_weights, start.log_weights, atol=1e-6)


def test_an_arm_that_cannot_be_drawn_does_not_poison_the_others():
    start = exp3.Exp3State(jnp.array([0.0, -2000.0]))
    with jax.debug_nans(True):
        end = update(start, jnp.array([1, 0]), jnp.array([0.0, 0.5]), jnp.array([False, True]), gamma=0.0)
    assert np.isfinite(end.log_weights).all()


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_long_run_of_one_arm(vectors, precision):
    case = json.loads((vectors / "exp3.json").read_text())["exp3_log_domain"]
    counts = [row["n"] for row in case["rows"]]
    rtol = {"float64": 1e-9, "float32": 2e-3}[precision]
    with jax.enable_x64(precision == "float64"):

        @jax.jit
        def run(state):
            def step(state, _):
                drawn, rewards = jnp.array([case["arm"]]), jnp.array([case["reward"]])
                state = update(state, drawn, rewards, jnp.array([True]), gamma=case["gamma"], eta=1.0)
                p = probabilities(state, gamma=case["gamma"])
                return state, (p[0], state.log_weights[0] - state.log_weights[1])

            return jax.lax.scan(step, state, length=max(counts))[1]

        p0, gap = run(exp3.init(case["K"]))
        for row in case["rows"]:
            np.testing.assert_allclose(p0[row["n"] - 1], row["p0"], rtol=rtol, atol=1e-10)
            np.testing.assert_allclose(gap[row["n"] - 1], row["logw_gap"], rtol=rtol, atol=1e-10)
        np.testing.assert_allclose(p0[-1], case["limit_p0"], rtol=1e-6)


def test_resumed_equals_uninterrupted():
    key = jax.random.key(0)
    rule = leader.exp3.leader()

    def steps(state, first, last):
        for t in range(first, last):
            key_draw, key_reward = jax.random.split(jax.random.fold_in(key, t))
            drawn = leader.draw(key_draw, rule.probabilities(state), 5)
            state = rule.update(state, drawn, jax.random.uniform(key_reward, (5,)), jnp.ones(5, bool))
        return state

    whole = steps(rule.init(K), 0, 6)
    stored = np.asarray(steps(rule.init(K), 0, 3).log_weights)
    resumed = steps(exp3.Exp3State(jnp.asarray(stored)), 3, 6)
    np.testing.assert_array_equal(whole.log_weights, resumed.log_weights)


def test_vmap_over_seeds_equals_a_loop():
    rule = leader.exp3.leader()

    @jax.jit
    def run(key):
        key_draw, key_reward = jax.random.split(key)
        state = rule.init(K)
        drawn = leader.draw(key_draw, rule.probabilities(state), 8)
        return rule.update(state, drawn, jax.random.uniform(key_reward, (8,)), jnp.ones(8, bool)).log_weights

    keys = jax.random.split(jax.random.key(1), 4)
    np.testing.assert_allclose(jax.vmap(run)(keys), jnp.stack([run(k) for k in keys]), rtol=1e-6)


def test_draw_follows_the_distribution():
    p = jnp.array([0.5, 0.0, 0.3, 0.2])
    drawn = leader.draw(jax.random.key(0), p, 20_000)
    shares = np.bincount(drawn, minlength=4) / 20_000
    np.testing.assert_allclose(shares, p, atol=0.015)
    assert shares[1] == 0


def test_pinned_step_concentrates_far_less_than_the_printed_one():
    """Top five weights relative to uniform after T = 8 at D = K = 64, rewards fixed and spread over [0, 1]."""

    @functools.partial(jax.vmap, in_axes=(None, 0))
    def top_share(eta, key):
        rule = leader.exp3.leader(eta=eta)
        key_values, key = jax.random.split(key)
        values = jax.random.uniform(key_values, (64,))
        state = rule.init(64)
        for t in range(8):
            drawn = leader.draw(jax.random.fold_in(key, t), rule.probabilities(state), 64)
            state = rule.update(state, drawn, values[drawn], jnp.ones(64, bool))
        return jnp.mean(jnp.sort(jax.nn.softmax(state.log_weights))[-5:]) * 64

    keys = jax.random.split(jax.random.key(0), 16)
    pinned, printed = (float(jnp.mean(jax.jit(top_share)(eta, keys))) for eta in (0.2, 1.0))
    assert 1.3 < pinned < printed / 1.5


def test_uniform_leader_never_moves():
    rule = uniform.leader()
    state = rule.init(5)
    state = rule.update(state, jnp.array([0, 1]), jnp.array([1.0, 1.0]), jnp.ones(2, bool))
    np.testing.assert_array_equal(rule.probabilities(state), np.full(5, 0.2, np.float32))


def test_init_rejects_an_empty_pool():
    with pytest.raises(ValueError, match="num_instructions"):
        exp3.init(0)

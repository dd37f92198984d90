"""Theorem C.1 and its lemmas at every step and context of random games; broken algorithms are caught."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_games import game_arguments, random_game, rates, step_sizes

from stackalign.games import bounds, divergence, smida, theorems
from stackalign.games.game import conditional_cost

geometric_sum = jax.jit(bounds.geometric_sum)
settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=100)


@settings
@hypothesis.given(game_arguments(), rates())
def test_theorems_hold_in_float64(arguments, rates):
    """Tolerances: 8 units of rounding of the largest number in each evaluation (`theorems.tolerances`)."""
    with jax.enable_x64(True):
        game = random_game(**{**arguments, "uniform": False})
        report = theorems.check(game, num_steps=40, **step_sizes(game, rates))
    assert theorems.first_violation(report) is None


@hypothesis.settings(settings, max_examples=50)
@hypothesis.given(game_arguments(), rates())
def test_theorems_hold_in_float32(arguments, rates):
    game = random_game(**{**arguments, "uniform": False})
    report = theorems.check(game, num_steps=40, **step_sizes(game, rates))
    assert theorems.first_violation(report) is None


def test_every_theorem_is_there():
    game = random_game(0)
    report = theorems.check(game, num_steps=3, **step_sizes(game, (0.1, 0.5)))
    names = " ".join(report)
    for name in ("support", "16", "13", "14", "15", "C.2", "B.3", "equality 17", "saddle", "closed form", "recursion"):
        assert name in names
    assert all(worst.excess.shape == (4,) for worst in report.values())


def test_tolerances_are_small_where_numbers_are():
    """Float64 tolerances of a tame game are far below what the theorems speak of."""
    with jax.enable_x64(True):
        game = random_game(0)
        c = bounds.constants(game, **step_sizes(game, (0.1, 0.5)))
        assert max(theorems.tolerances(game, c, jnp.int32(40))) < 1e-12


# Mutants of `smida.step`. Each has one thing wrong.


def leader(game, log_pi, cost, eta):
    rate = eta * game.tau_leader
    return divergence.normalise((1 - rate) * log_pi + rate * game.log_pi_ref - eta * cost)


def follower(game, log_omega, eta, *, tau=None, sign=1.0):
    rate = eta * (game.tau_follower if tau is None else tau)
    return divergence.normalise((1 - rate) * log_omega + rate * game.log_omega_ref + sign * eta * game.utility)


def leader_sees_the_next_follower(state, game, *, eta_leader, eta_follower):
    log_omega = follower(game, state.log_omega, eta_follower)
    return smida.State(
        state.step + 1, leader(game, state.log_pi, conditional_cost(game, log_omega), eta_leader), log_omega
    )


def follower_moves_twice(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_omega=follower(game, new.log_omega, eta_follower))


def cost_without_regulariser(state, game, *, eta_leader, eta_follower):
    cost = jnp.sum(jnp.exp(state.log_omega) * game.utility, axis=-1)
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_pi=leader(game, state.log_pi, cost, eta_leader))


def cost_with_the_leaders_tau(state, game, *, eta_leader, eta_follower):
    cost = conditional_cost(game._replace(tau_follower=game.tau_leader), state.log_omega)
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_pi=leader(game, state.log_pi, cost, eta_leader))


def cost_with_kl_the_other_way(state, game, *, eta_leader, eta_follower):
    expected = jnp.sum(jnp.exp(state.log_omega) * game.utility, axis=-1)
    cost = expected - game.tau_follower * divergence.kl(game.log_omega_ref, state.log_omega)
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_pi=leader(game, state.log_pi, cost, eta_leader))


def leader_without_reference(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    cost = conditional_cost(game, state.log_omega)
    rate = eta_leader * game.tau_leader
    return new._replace(log_pi=divergence.normalise((1 - rate) * state.log_pi - eta_leader * cost))


def leader_ascends(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_pi=leader(game, state.log_pi, -conditional_cost(game, state.log_omega), eta_leader))


def leader_takes_the_followers_step(state, game, *, eta_leader, eta_follower):
    return smida.step(state, game, eta_leader=eta_follower, eta_follower=eta_follower)


def leader_keeps_its_old_policy_in_full(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    cost = conditional_cost(game, state.log_omega)
    rate = eta_leader * game.tau_leader
    return new._replace(log_pi=divergence.normalise(state.log_pi + rate * game.log_pi_ref - eta_leader * cost))


def leader_is_not_normalised(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    cost = conditional_cost(game, state.log_omega)
    rate = eta_leader * game.tau_leader
    return new._replace(log_pi=(1 - rate) * state.log_pi + rate * game.log_pi_ref - eta_leader * cost)


def follower_descends(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_omega=follower(game, state.log_omega, eta_follower, sign=-1.0))


def follower_with_the_leaders_tau(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_omega=follower(game, state.log_omega, eta_follower, tau=game.tau_leader))


def follower_without_reference(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    rate = eta_follower * game.tau_follower
    logits = (1 - rate) * state.log_omega + eta_follower * game.utility
    return new._replace(log_omega=divergence.normalise(logits))


def follower_normalised_over_the_leader(state, game, *, eta_leader, eta_follower):
    rate = eta_follower * game.tau_follower
    logits = (1 - rate) * state.log_omega + rate * game.log_omega_ref + eta_follower * game.utility
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_omega=jax.nn.log_softmax(logits, axis=-2))


def follower_divides_by_tau(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    rate = eta_follower * game.tau_follower
    logits = (1 - rate) * state.log_omega + rate * game.log_omega_ref + eta_follower * game.utility / game.tau_follower
    return new._replace(log_omega=divergence.normalise(logits))


def follower_ignores_the_leaders_action(state, game, *, eta_leader, eta_follower):
    mean = game._replace(utility=jnp.broadcast_to(game.utility.mean(1, keepdims=True), game.utility.shape))
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_omega=follower(mean, state.log_omega, eta_follower))


def players_move_in_single_precision(state, game, *, eta_leader, eta_follower):
    new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
    return new._replace(log_pi=new.log_pi.astype(jnp.float32).astype(jnp.float64))


MUTANTS = {
    leader_sees_the_next_follower: "recursion of the Leader",
    follower_moves_twice: "equality 17",
    cost_without_regulariser: "recursion of the Leader",
    cost_with_the_leaders_tau: "recursion of the Leader",
    cost_with_kl_the_other_way: "recursion of the Leader",
    leader_without_reference: "recursion of the Leader",
    leader_ascends: "recursion of the Leader",
    leader_takes_the_followers_step: "recursion of the Leader",
    leader_keeps_its_old_policy_in_full: "recursion of the Leader",
    leader_is_not_normalised: "full support",
    follower_descends: "bound 13",
    follower_with_the_leaders_tau: "equality 17",
    follower_without_reference: "equality 17",
    follower_normalised_over_the_leader: "full support",
    follower_divides_by_tau: "equality 17",
    follower_ignores_the_leaders_action: "closed form of omega_t",
    players_move_in_single_precision: "recursion of the Leader",
}


@pytest.mark.parametrize(("mutant", "statement"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("seed", range(2))
def test_mutants_are_caught(mutant, statement, seed):
    """By the statement that they break, at the first step that they can break it."""
    with jax.enable_x64(True):
        game = random_game(seed, (2, 3, 3), tau_leader=0.3, tau_follower=0.5)
        report = theorems.check(game, eta_leader=0.5, eta_follower=1.0, num_steps=20, step=mutant)
        violation = theorems.first_violation(report)
        assert violation is not None
        assert violation.step <= 2
        assert (np.asarray(report[statement].excess) > 0.0).any()
        assert np.isclose(violation.left, np.asarray(report[violation.statement].left)[violation.step])
        assert f"fails at step {violation.step}, context" in str(violation)


def test_nan_is_a_violation():
    def broken(state, game, *, eta_leader, eta_follower):
        new = smida.step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
        return new._replace(log_pi=jnp.where(state.step == 2, jnp.nan, new.log_pi))

    with jax.enable_x64(True):
        game = random_game(0)
        report = theorems.check(game, num_steps=5, step=broken, **step_sizes(game, (0.1, 0.5)))
    violation = theorems.first_violation(report)
    assert violation.step in (2, 3)


def test_condition_6_is_needed():
    """What a check refuses, because the theorem does not promise it."""
    game = random_game(0)
    with pytest.raises(ValueError, match="condition 6"):
        theorems.check(game, num_steps=5, eta_leader=2.0, eta_follower=1.0)


@settings
@hypothesis.given(rates(), st.integers(0, 300))
def test_the_geometric_sum(rates, time):
    """`(q_L^t - q_F^t) / (q_L - q_F)` against the sum it stands for, also where the rates nearly agree."""
    with jax.enable_x64(True):
        game = random_game(0)
        for leader_rate in (rates[0], rates[1] * (1 - 1e-10)):
            c = bounds.constants(game, **step_sizes(game, (leader_rate, rates[1])))
            q_leader, q_follower = 1 - float(c.leader_rate), 1 - float(c.follower_rate)
            k = np.arange(time)
            by_hand = np.sum(q_leader ** (time - 1.0 - k) * np.where(k == 0, 1.0, q_follower**k))
            np.testing.assert_allclose(geometric_sum(c, time), by_hand, rtol=1e-5, atol=1e-300)


@settings
@hypothesis.given(game_arguments(), rates(), st.floats(-12, 3))
def test_promised_steps(arguments, rates, exponent):
    """`steps_until` is the first time at which bound 15 is small enough."""
    with jax.enable_x64(True):
        game = random_game(**arguments)
        c, small = bounds.constants(game, **step_sizes(game, rates)), 10.0**exponent
        steps = bounds.steps_until(c, small)
        assert steps >= 0
        assert bounds.leader_bound_simple(c, steps) <= small * (1 + 1e-9)
        assert steps == 0 or bounds.leader_bound_simple(c, steps - 1) >= small * (1 - 1e-9)

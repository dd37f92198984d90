"""Other solvers on the same games: they agree with the closed form, each in its own way."""

import functools

import jax
import numpy as np
import pytest
from random_games import random_game

from stackalign import games
from stackalign.games import equilibrium, rivals, smida

SOLVERS = {
    "mirror_descent_ascent": (rivals.mirror_descent_ascent(eta_leader=0.5, eta_follower=1.5), 200),
    "gradient_descent_ascent": (rivals.gradient_descent_ascent(eta_leader=1.0, eta_follower=4.0), 3000),
    "extragradient": (rivals.extragradient(eta_leader=2.0, eta_follower=2.0), 3000),
    "best_response": (rivals.best_response(), 2),
}


def gap(game, solution, log_pi, log_omega):
    return game.prior @ equilibrium.saddle_gap(game, log_pi, games.conditional_cost(game, log_omega), solution)


@pytest.mark.parametrize("name", SOLVERS)
def test_all_find_the_equilibrium(name):
    solver, num_steps = SOLVERS[name]
    with jax.enable_x64(True):
        for seed in range(2):
            game = random_game(seed, (3, 2, 4), tau_leader=0.4, tau_follower=0.5)
            state, gaps = rivals.run(solver, game, num_steps=num_steps, record=gap)
            solution = equilibrium.closed_form(game)
            log_pi, _ = solver.policies(state)
            assert gaps.shape == (num_steps + 1,)
            assert gaps[-1] < 1e-5 < gaps[0]
            np.testing.assert_allclose(np.exp(log_pi), np.exp(solution.log_pi), atol=2e-2)


def test_mirror_descent_ascent_is_smida():
    game = random_game(0)
    steps = {"eta_leader": 0.5, "eta_follower": 1.5}
    state, _ = rivals.run(rivals.mirror_descent_ascent(**steps), game, num_steps=7, record=gap)
    expected = functools.reduce(lambda state, _: smida.step(state, game, **steps), range(7), smida.init(game))
    for one, other in zip(state, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_best_response_needs_two_steps():
    """The Follower's answer does not depend on the Leader's policy."""
    with jax.enable_x64(True):
        game = random_game(4)
        _, gaps = rivals.run(rivals.best_response(), game, num_steps=3, record=gap)
        assert gaps[1] > 1e-3
        np.testing.assert_allclose(gaps[2:], 0.0, atol=1e-15)


def test_a_gradient_step_follows_the_gradient():
    """On logits: the step's first-order change of f is what descent and ascent say."""
    with jax.enable_x64(True):
        game = random_game(5)
        solver = rivals.gradient_descent_ascent(eta_leader=1e-6, eta_follower=0.0)
        state = solver.init(game)
        before = games.objective(game, *solver.policies(state))
        after = games.objective(game, *solver.policies(solver.step(state, game)))
        assert after < before
        solver = rivals.gradient_descent_ascent(eta_leader=0.0, eta_follower=1e-6)
        assert games.objective(game, *solver.policies(solver.step(state, game))) > before

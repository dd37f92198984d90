"""Games: validation, the objective, divergences."""

import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_games import game_arguments, log_softmax, random_game, random_policies

from stackalign import games
from stackalign.games import divergence

settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=30)
U = np.arange(12.0).reshape(2, 2, 3)


def make(**changes):
    return games.make_game(**{"utility": U, "tau_leader": 1.0, "tau_follower": 1.0, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"utility": np.zeros((2, 3))}, r"utility must have shape .* got \(2, 3\)"),
        ({"utility": np.zeros((2, 0, 3))}, "utility must have shape"),
        ({"utility": np.where(U == 7.0, np.nan, U)}, r"utility\[1, 0, 1\] = nan is not finite"),
        ({"utility": np.where(U == 7.0, np.inf, U)}, "utility.* is not finite"),
        ({"utility": np.where(U == 7.0, 1e39, U)}, "does not fit float32"),
        ({"utility": [[["a", "b"]]]}, "utility must be numbers"),
        ({"prior": ["a", "b"]}, "prior must be numbers"),
        ({"pi_ref": [[0.5, 0.5], [1.0]]}, "pi_ref must be numbers of one shape"),
        ({"tau_leader": "much"}, "tau_leader must be numbers"),
        ({"prior": [1.0]}, r"prior must have shape \[2\]"),
        ({"prior": [0.5, 0.6]}, "prior must sum to 1"),
        ({"prior": [1.0, 0.0]}, r"prior must have full support: entry \[1\] is 0.0"),
        ({"prior": [1.5, -0.5]}, "prior must have full support"),
        ({"prior": [np.nan, 1.0]}, "prior must have full support"),
        ({"pi_ref": [[0.5, 0.5]] * 3}, "pi_ref must have shape"),
        ({"pi_ref": [[0.5, 0.5], [1.0, 0.0]]}, r"pi_ref must have full support: entry \[1, 1\]"),
        ({"pi_ref": [[0.5, 0.5], [0.6, 0.5]]}, r"pi_ref must sum to 1 .* at \[1\]"),
        ({"omega_ref": [0.5, 0.5]}, "omega_ref must have shape"),
        ({"omega_ref": [0.5, 0.2, 0.2]}, "omega_ref must sum to 1"),
        ({"log_omega_ref": [0.0, -np.inf, -np.inf]}, "omega_ref must have full support"),
        ({"log_pi_ref": [0.0, 0.0]}, "pi_ref must sum to 1"),
        ({"pi_ref": [0.5, 0.5], "log_pi_ref": np.log([0.5, 0.5])}, "give pi_ref or log_pi_ref, not both"),
        ({"tau_leader": -1.0}, "tau_leader must be one finite number >= 0, got -1.0"),
        ({"tau_follower": np.inf}, "tau_follower must be"),
        ({"tau_follower": np.nan}, "tau_follower must be"),
        ({"tau_follower": [1.0, 2.0]}, "tau_follower must be one"),
    ],
)
def test_bad_games_are_refused_by_field(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_game_is_immutable_and_normalised():
    game = make(pi_ref=[0.25, 0.75])
    with pytest.raises(AttributeError):
        game.tau_leader = 0.0
    assert game.log_pi_ref.shape == (2, 2)
    assert game.log_omega_ref.shape == (1, 1, 1)
    np.testing.assert_allclose(jnp.exp(games.log_omega_ref(game)), np.full(U.shape, 1 / 3), rtol=1e-6)
    assert {leaf.dtype for leaf in jax.tree.leaves(game)} == {jnp.dtype("float32")}


def test_precision_follows_the_utility():
    with jax.enable_x64(True):
        assert {leaf.dtype for leaf in jax.tree.leaves(make())} == {jnp.dtype("float64")}
        assert {leaf.dtype for leaf in jax.tree.leaves(make(utility=U.astype(np.float32)))} == {jnp.dtype("float32")}
    assert make(utility=U.astype(int)).utility.dtype == jnp.float32


def test_references_that_underflow_are_given_as_logs():
    log_pi_ref = log_softmax(np.array([[0.0, -1e4], [0.0, -2e4]]))
    game = make(log_pi_ref=log_pi_ref)
    np.testing.assert_array_equal(game.log_pi_ref, log_pi_ref.astype(np.float32))


@settings
@hypothesis.given(game_arguments(), st.integers(0, 2**32 - 1))
def test_objective_is_its_formula(arguments, seed):
    """Equation 4 with every sum written out, in float64; tolerance 1e-12 of its largest term."""
    with jax.enable_x64(True):
        game = random_game(**arguments)
        log_pi, log_omega = random_policies(seed, game, 3.0)
        pi, omega, rho, u = np.exp(log_pi), np.exp(log_omega), np.asarray(game.prior), np.asarray(game.utility)
        expected = size = 0.0
        ref = np.broadcast_to(game.log_omega_ref, u.shape)
        for x in range(u.shape[0]):
            for y in range(u.shape[1]):
                term = game.tau_leader * (log_pi[x, y] - game.log_pi_ref[x, y])
                expected += rho[x] * pi[x, y] * term
                size += abs(rho[x] * pi[x, y] * term)
                for z in range(u.shape[2]):
                    term = u[x, y, z] - game.tau_follower * (log_omega[x, y, z] - ref[x, y, z])
                    expected += rho[x] * pi[x, y] * omega[x, y, z] * term
                    size += abs(rho[x] * pi[x, y] * omega[x, y, z] * term)
        np.testing.assert_allclose(games.objective(game, log_pi, log_omega), expected, rtol=0, atol=1e-12 * (1 + size))


def test_gradients_of_the_objective(vectors):
    """The players' exact gradients (equations 20 and 21) on softmax policies."""
    case = json.loads((vectors / "smida.json").read_text())["deep_smida_exact_gradient"]
    with jax.enable_x64(True):
        array = {name: np.asarray(value) for name, value in case.items() if isinstance(value, list)}
        game = games.make_game(
            array["u"][None],
            log_pi_ref=log_softmax(array["theta_ref"])[None],
            log_omega_ref=log_softmax(array["phi_ref"])[None],
            tau_leader=case["tau_L"],
            tau_follower=case["tau_F"],
        )

        def f(theta, phi):
            return games.objective(game, divergence.normalise(theta)[None], divergence.normalise(phi)[None])

        value, gradients = jax.value_and_grad(f, (0, 1))(array["theta"], array["phi"])
        leader_kl = games.leader_kl(game, divergence.normalise(array["theta"])[None], game.log_pi_ref)[1]
        np.testing.assert_allclose(value, case["J_L"], rtol=1e-12)
        np.testing.assert_allclose(value - game.tau_leader * leader_kl, case["J_F"], rtol=1e-12)
        np.testing.assert_allclose(gradients[0], array["grad_theta_JL"], rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(gradients[1], array["grad_phi_JF"], rtol=1e-10, atol=1e-14)


@settings
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(-12, 2))
def test_kl_keeps_its_digits(seed, exponent):
    """Against extended precision, from divergences of 1e-24 to thousands; relative tolerance 1e-3 at the smallest."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        log_q = log_softmax(rng.normal(size=8))
        log_p = log_softmax(log_q + 10.0**exponent * rng.normal(size=8))
        p, q = (np.exp(np.longdouble(log)) for log in (log_p, log_q))
        # The inputs are normalised to rounding only, so the reference is the Bregman form, which forgives that.
        exact = float(np.sum(p * (np.longdouble(log_p) - np.longdouble(log_q)) - p + q))
        measured = float(divergence.kl(jnp.asarray(log_p), jnp.asarray(log_q)))
        assert measured >= 0.0
        np.testing.assert_allclose(measured, exact, rtol=1e-3, atol=3e-19)


def test_kl_at_the_edges():
    """0 log 0 = 0; a distribution that q rules out is infinitely far; nothing is NaN on the way."""
    with jax.debug_nans(True):
        p, q = jnp.log(jnp.array([0.0, 1.0])), jnp.log(jnp.array([0.5, 0.5]))
        np.testing.assert_allclose(divergence.kl(p, q), np.log(2.0), rtol=1e-6)
        assert divergence.kl(p, p) == 0.0
        assert divergence.kl(q, q) == 0.0
        np.testing.assert_allclose(divergence.kl(jnp.array([-2e4, 0.0]), jnp.array([0.0, -2e4])), 2e4)
    assert divergence.kl(q, p) == jnp.inf


def test_kl_means_are_weighted_by_prior_and_leader():
    with jax.enable_x64(True):
        game = random_game(0)
        (log_pi, log_omega), (other_pi, other_omega) = random_policies(1, game), random_policies(2, game)
        leader, leader_mean = games.leader_kl(game, log_pi, other_pi)
        follower, follower_mean = games.follower_kl(game, log_pi, log_omega, other_omega)
        by_hand = (np.exp(log_omega) * (log_omega - other_omega)).sum(-1)
        np.testing.assert_allclose(follower, by_hand, rtol=1e-12)
        np.testing.assert_allclose(leader, (np.exp(log_pi) * (log_pi - other_pi)).sum(-1), rtol=1e-12)
        np.testing.assert_allclose(leader_mean, np.asarray(game.prior) @ leader, rtol=1e-14)
        np.testing.assert_allclose(
            follower_mean, np.einsum("x,xy,xy->", game.prior, np.exp(log_pi), by_hand), rtol=1e-12
        )

"""The closed form of theorem 4.2, best responses, gaps, and the invariances of the game."""

import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from random_games import SHAPES, game_arguments, log_softmax, random_game, random_policies

from stackalign import games
from stackalign.games import equilibrium, tilting, utilities

settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
closed_form = equilibrium.closed_form
objective = jax.jit(games.objective)
exploitability = equilibrium.exploitability
saddle_gap = jax.jit(equilibrium.saddle_gap)
seeds = st.integers(0, 2**32 - 1)


def cases(vectors):
    return json.loads((vectors / "smida.json").read_text())["smida_tabular"]["cases"]


def from_vector(case) -> games.Game:
    return games.make_game(
        np.asarray(case["u"]),
        prior=case["rho"],
        pi_ref=case["pi_ref"],
        omega_ref=case["omega_ref"],
        tau_leader=case["tau_L"],
        tau_follower=case["tau_F"],
    )


def rounding(game: games.Game) -> float:
    """1e-13 of the largest number in an objective of this game, in float64."""
    size = float(jnp.max(jnp.abs(game.utility)))
    size += float(game.tau_leader * jnp.max(jnp.abs(game.log_pi_ref)))
    return 1e-13 * (size + float(game.tau_follower * jnp.max(jnp.abs(game.log_omega_ref))))


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_vectors(vectors, precision, tolerance):
    """Relative to the larger of 1 and, in float32, the size of the log-probabilities, `D / tau`."""
    for case in cases(vectors):
        with jax.enable_x64(precision == "float64"):
            solution = closed_form(from_vector(case))
        size = 1.0 if precision == "float64" else 1.0 + case["D"] / case["tau_L"]
        for found, name in (
            (jnp.exp(solution.log_pi), "pi_star"),
            (jnp.exp(solution.log_omega), "omega_star"),
            (solution.follower_value, "follower_value_r"),
            (solution.value, "game_value"),
        ):
            np.testing.assert_allclose(found, case[name], rtol=tolerance * size, atol=1e-12, err_msg=case["name"])


@settings
@hypothesis.given(game_arguments(), seeds, st.sampled_from((0.1, 1.0, 10.0)))
def test_saddle(arguments, seed, spread):
    """`f(pi*, omega) <= V* <= f(pi, omega*)` for any policies, at tau = 0 of either player too."""
    with jax.enable_x64(True):
        game = random_game(**arguments)
        for zero in ((), ("tau_leader",), ("tau_follower",), ("tau_leader", "tau_follower")):
            played = game._replace(**{name: jnp.zeros(()) for name in zero})
            solution = closed_form(played)
            log_pi, log_omega = random_policies(seed, game, spread)
            slack = rounding(game)
            assert objective(played, solution.log_pi, log_omega) <= solution.value + slack
            assert solution.value <= objective(played, log_pi, solution.log_omega) + slack
            at_solution = objective(played, solution.log_pi, solution.log_omega)
            np.testing.assert_allclose(at_solution, solution.value, rtol=0, atol=slack)
            gains = exploitability(played, solution.log_pi, solution.log_omega)
            assert max(gains) <= slack


@settings
@hypothesis.given(game_arguments(), seeds, st.floats(-4, 0))
def test_uniqueness(arguments, seed, exponent):
    """Any other Leader pays exactly `tau_L KL(pi || pi*)` more, and any other Follower gets `tau_F KL` less."""
    with jax.enable_x64(True):
        game = random_game(**arguments)
        solution = closed_form(game)
        direction_pi, direction_omega = random_policies(seed, game, 1.0)
        log_pi = jax.nn.log_softmax(solution.log_pi + 10.0**exponent * direction_pi)
        log_omega = jax.nn.log_softmax(solution.log_omega + 10.0**exponent * direction_omega)
        leader = game.tau_leader * games.leader_kl(game, log_pi, solution.log_pi)[1]
        follower = game.tau_follower * games.follower_kl(game, solution.log_pi, log_omega, solution.log_omega)[1]
        excess = objective(game, log_pi, solution.log_omega) - solution.value
        shortfall = solution.value - objective(game, solution.log_pi, log_omega)
        np.testing.assert_allclose(excess, leader, rtol=1e-9, atol=rounding(game))
        np.testing.assert_allclose(shortfall, follower, rtol=1e-9, atol=rounding(game))
        # Where one action has all the mass in float64, the divergence underflows with the other actions' mass.
        if (jnp.max(solution.log_pi, axis=-1) < -1e-9).any():
            assert leader > 0.0
        if (jnp.max(solution.log_omega, axis=-1) < -1e-9).all() and (solution.log_pi > -700.0).all():
            assert follower > 0.0


@pytest.mark.parametrize("seed", range(3))
def test_closed_form_is_what_a_generic_optimiser_finds(seed):
    """BFGS on logits: the Follower's best response to each action, then the Leader's problem of theorem B.4."""
    with jax.enable_x64(True):
        game = random_game(seed, (2, 3, 4), tau_leader=0.4, tau_follower=0.3)
        solution = closed_form(game)
        x, y = np.unravel_index(seed, (2, 3))

        @jax.jit
        def follower(logits):
            omega = jax.nn.softmax(logits)
            kl = jnp.sum(omega * (jax.nn.log_softmax(logits) - game.log_omega_ref[x, y]))
            return game.tau_follower * kl - omega @ game.utility[x, y]

        found = scipy.optimize.minimize(follower, np.zeros(4), jac=jax.jit(jax.grad(follower)), tol=1e-12)
        np.testing.assert_allclose(jax.nn.softmax(found.x), jnp.exp(solution.log_omega[x, y]), atol=1e-6)
        np.testing.assert_allclose(-found.fun, solution.follower_value[x, y], rtol=1e-10)

        @jax.jit
        def leader(logits):
            return objective(game, jax.nn.log_softmax(logits.reshape(2, 3)), solution.log_omega)

        found = scipy.optimize.minimize(leader, np.zeros(6), jac=jax.jit(jax.grad(leader)), tol=1e-12)
        np.testing.assert_allclose(jax.nn.softmax(found.x.reshape(2, 3)), jnp.exp(solution.log_pi), atol=1e-6)
        np.testing.assert_allclose(found.fun, solution.value, rtol=1e-10)


def test_zero_temperatures_restrict_the_references():
    """Ties share the reference's mass; everything else has none. No NaN on the way."""
    utility = np.array([[[1.0, 3.0, 3.0], [3.0, 0.0, 2.0], [5.0, 5.0, 5.0]]])
    with jax.debug_nans(True):
        game = games.make_game(
            utility, pi_ref=[0.2, 0.3, 0.5], omega_ref=[0.5, 0.2, 0.3], tau_leader=0.0, tau_follower=0.0
        )
        solution = equilibrium.closed_form(game)
    np.testing.assert_allclose(jnp.exp(solution.log_omega[0]), [[0, 0.4, 0.6], [1, 0, 0], [0.5, 0.2, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(jnp.exp(solution.log_pi[0]), [0.4, 0.6, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(solution.follower_value, [[3.0, 3.0, 5.0]])
    assert solution.value == 3.0
    assert solution.log_pi[0, 2] == -jnp.inf


def test_costs_that_differ_by_rounding_tie_at_zero():
    """The same row in another order of summation is worth the same to the Leader."""
    row = np.random.default_rng(0).normal(size=50)
    utility = np.stack([row, row[::-1], row + 1.0])[None]
    solution = equilibrium.closed_form(games.make_game(utility, tau_leader=0.0, tau_follower=0.7))
    np.testing.assert_allclose(jnp.exp(solution.log_pi[0]), [0.5, 0.5, 0.0], atol=1e-6)


@settings
@hypothesis.given(seeds, st.booleans(), st.booleans())
def test_zero_is_the_limit(seed, leader, follower):
    """Policies at tau = 1e-9 agree with tau = 0 where the best action is unique, as it is at random."""
    with jax.enable_x64(True):
        zero = {"tau_leader": 0.0 if leader else 0.3, "tau_follower": 0.0 if follower else 0.4}
        small = {name: value or 1e-9 for name, value in zero.items()}
        limit, near = (closed_form(random_game(seed, **taus)) for taus in (zero, small))
        np.testing.assert_allclose(jnp.exp(limit.log_pi), jnp.exp(near.log_pi), atol=1e-6)
        np.testing.assert_allclose(jnp.exp(limit.log_omega), jnp.exp(near.log_omega), atol=1e-6)
        np.testing.assert_allclose(limit.value, near.value, atol=1e-7)


@settings
@hypothesis.given(game_arguments(), seeds)
def test_the_saddle_gap_is_the_sum_of_regrets(arguments, seed):
    with jax.enable_x64(True):
        game = random_game(**arguments)
        log_pi, log_omega = random_policies(seed, game, 2.0)
        gap = saddle_gap(game, log_pi, games.conditional_cost(game, log_omega))
        gains = exploitability(game, log_pi, log_omega)
        slack = 10 * rounding(game)
        np.testing.assert_allclose(game.prior @ gap, gains.leader + gains.follower, rtol=1e-9, atol=slack)
        assert (gap >= 0.0).all()
        follower = game.tau_follower * games.follower_kl(game, log_pi, log_omega, closed_form(game).log_omega)[1]
        np.testing.assert_allclose(gains.follower, follower, rtol=1e-9, atol=slack)
        leader = game.tau_leader * games.leader_kl(game, log_pi, closed_form(game).log_pi)[1]
        np.testing.assert_allclose(gains.stackelberg, leader, rtol=1e-9, atol=slack)


@settings
@hypothesis.given(seeds, st.floats(-5.0, 5.0), st.floats(-2, 2))
def test_invariances(seed, shift, exponent):
    """What h(x), h(x, y), a common scale and a permutation of actions do to the equilibrium; tolerance 1e-9."""
    with jax.enable_x64(True):
        game = random_game(seed)
        solution = closed_form(game)
        rng = np.random.default_rng(seed + 1)

        def same(found, expected):
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)

        by_context = shift * rng.normal(size=(3, 1))
        moved = closed_form(game._replace(utility=game.utility + by_context[:, :, None]))
        same(moved.log_pi, solution.log_pi)
        same(moved.log_omega, solution.log_omega)
        same(moved.context_value, solution.context_value + by_context[:, 0])

        by_action = shift * rng.normal(size=(3, 2))
        moved = closed_form(game._replace(utility=game.utility + by_action[:, :, None]))
        same(moved.log_omega, solution.log_omega)
        same(moved.follower_value, solution.follower_value + by_action)
        same(moved.log_pi, log_softmax(np.asarray(solution.log_pi) - by_action / 0.3))

        scale = 10.0**exponent
        scaled = closed_form(
            game._replace(
                utility=scale * game.utility,
                tau_leader=scale * game.tau_leader,
                tau_follower=scale * game.tau_follower,
            )
        )
        same(scaled.log_pi, solution.log_pi)
        same(scaled.log_omega, solution.log_omega)
        same(scaled.value / scale, solution.value)

        leader, follower = rng.permutation(2), rng.permutation(4)
        permuted = closed_form(
            game._replace(
                utility=game.utility[:, leader][:, :, follower],
                log_pi_ref=game.log_pi_ref[:, leader],
                log_omega_ref=game.log_omega_ref[..., follower]
                if game.log_omega_ref.shape[1] == 1
                else game.log_omega_ref[:, leader][:, :, follower],
            )
        )
        same(permuted.log_pi, solution.log_pi[:, leader])
        same(permuted.log_omega, solution.log_omega[:, leader][:, :, follower])
        same(permuted.value, solution.value)


def random_ensemble(seed: int, members=4, contexts=2, actions=3) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=(members, contexts, actions, actions))
    return 1.0 / (1.0 + np.exp(scores.swapaxes(-1, -2) - scores))


@pytest.mark.parametrize("seed", range(3))
def test_slhf_is_the_game_of_preference(seed):
    """SLHF maximises P(y > y') with a Follower that maximises P(y' > y): f of its utility is one minus that."""
    with jax.enable_x64(True):
        ensemble = random_ensemble(seed)
        game = games.make_game(utilities.preference(ensemble), tau_leader=0.2, tau_follower=0.1)
        log_pi, log_omega = random_policies(seed, game)
        wins = np.einsum("x,xy,xyz,xyz->", game.prior, np.exp(log_pi), np.exp(log_omega), ensemble.mean(0))
        regularised = wins - 0.2 * games.leader_kl(game, log_pi, game.log_pi_ref)[1]
        regularised += 0.1 * games.follower_kl(game, log_pi, log_omega, games.log_omega_ref(game))[1]
        np.testing.assert_allclose(objective(game, log_pi, log_omega), 1.0 - regularised, rtol=1e-12)
        # Unregularised, a Follower that copies ties: the Leader wins at most half of the time.
        free = closed_form(game._replace(tau_leader=jnp.zeros(()), tau_follower=jnp.zeros(())))
        assert free.value >= 0.5 - 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_copying_is_a_best_response_under_decision_uncertainty(seed):
    """The Follower always gets 1/2, whatever the Leader does; under variance a copy gets nothing."""
    ensemble = random_ensemble(seed)
    game = games.make_game(utilities.decision_uncertainty(ensemble), tau_leader=0.0, tau_follower=0.0)
    solution = closed_form(game)
    copies = jnp.diagonal(solution.log_omega, axis1=1, axis2=2)
    assert (copies > -jnp.inf).all()
    np.testing.assert_allclose(solution.follower_value, 0.5, rtol=1e-6)
    # So the Leader is indifferent and keeps its reference.
    np.testing.assert_allclose(solution.log_pi, game.log_pi_ref, rtol=1e-5)
    variance = closed_form(game._replace(utility=utilities.variance(ensemble)))
    assert (jnp.diagonal(variance.log_omega, axis1=1, axis2=2) == -jnp.inf).all()


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 7, 3)])
def test_costs_in_blocks_are_costs_in_one_piece(monkeypatch, shape, uniform):
    """Blocks of rows, also where they do not divide the rows evenly."""
    with jax.enable_x64(True):
        game = random_game(0, shape, uniform=uniform)
        weights = jnp.array([0.0, 0.5, 2.0])
        decays = 1.0 - game.tau_follower * weights
        whole = tilting.costs(game, weights, decays)
        monkeypatch.setattr(tilting, "_BLOCK", 4 * shape[2])
        in_blocks = tilting.costs.__wrapped__(game, weights, decays)
        np.testing.assert_allclose(in_blocks, whole, rtol=1e-14, atol=1e-15)
        for weight, cost in zip(weights, whole, strict=True):
            by_hand = games.conditional_cost(game, tilting.tilted(game, weight))
            np.testing.assert_allclose(cost, by_hand, rtol=1e-12, atol=1e-13)


def test_references_of_every_size_mean_the_same():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        utility, by_follower = rng.normal(size=(3, 2, 4)), rng.dirichlet(np.ones(4))
        by_context = rng.dirichlet(np.ones(4), size=(3, 1))
        for small, full in (
            (by_follower, np.broadcast_to(by_follower, utility.shape)),
            (by_context, np.broadcast_to(by_context, utility.shape)),
            (None, np.full(utility.shape, 0.25)),
        ):
            one, other = (
                closed_form(games.make_game(utility, omega_ref=ref, tau_leader=0.2, tau_follower=0.3))
                for ref in (small, full)
            )
            for left, right in zip(one, other, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-12)

"""SMIDA: vectors, an extended-precision transcription, both paths of `solve`, stopping, and refused step sizes."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_games import SHAPES, game_arguments, random_game, rates, step_sizes
from test_equilibrium import cases, from_vector

from stackalign import games
from stackalign.games import bounds, divergence, equilibrium, smida

settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=30)


def policies(game, solution, iterate):
    return iterate.log_pi, iterate.cost, iterate.step


def stored(game, solution, iterate):
    return iterate.log_pi, iterate.cost, iterate.step, iterate.log_omega


def both(one, other):
    return (one, other), (other, one)


@jax.jit
def measure(game, solution, c, log_pi, log_omega, t):
    return {
        "pi": jnp.exp(log_pi),
        "omega": jnp.exp(log_omega),
        "follower_kl_star_t": divergence.kl(solution.log_omega, log_omega),
        "follower_kl_t_star": divergence.kl(log_omega, solution.log_omega),
        "leader_kl_star_t": divergence.kl(solution.log_pi, log_pi),
        "leader_kl_t_star": divergence.kl(log_pi, solution.log_pi),
        "kl_rho_leader": jnp.stack([games.leader_kl(game, *pair)[1] for pair in both(solution.log_pi, log_pi)]),
        "kl_rho_follower": jnp.stack(
            [games.follower_kl(game, solution.log_pi, *pair)[1] for pair in both(solution.log_omega, log_omega)]
        ),
        "f": games.objective(game, log_pi, log_omega),
        "bound13": bounds.follower_bound(c, t),
        "bound14": bounds.leader_bound(c, t),
        "bound15": bounds.leader_bound_simple(c, t),
    }


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("float32", 5e-5)])
def test_vectors(vectors, precision, tolerance):
    """Every listed iterate, divergence, bound and objective; float32 relative to 1 + D / tau."""
    for case in cases(vectors):
        with jax.enable_x64(precision == "float64"):
            game = from_vector(case)
            steps = {"eta_leader": case["eta_L"], "eta_follower": case["eta_F"]}
            last = case["iterates"][-1]["t"]
            run = smida.solve(game, num_steps=last, record=stored, store_follower=True, **steps)
            fast = smida.solve(game, num_steps=last, record=policies, **steps)
            solution, c = equilibrium.closed_form(game), bounds.constants(game, **steps)
            for name, value in (
                ("D", c.oscillation), ("D_F", c.follower_oscillation), ("D_L", c.leader_oscillation),
                ("q_L", 1 - c.leader_rate), ("q_F", 1 - c.follower_rate), ("kappa", c.kappa),
            ):  # fmt: skip
                np.testing.assert_allclose(value, case[name], rtol=1e-5, atol=1e-7, err_msg=name)
            size = 1.0 if precision == "float64" else 1.0 + case["D"] / case["tau_L"]
            for expected in case["iterates"]:
                t = expected["t"]
                log_pi, cost, _, log_omega = (leaf[t] for leaf in run.trajectory)
                found = measure(game, solution, c, log_pi, log_omega, t)
                for name, value in found.items():
                    if name not in expected:  # a case may leave some out
                        continue
                    # Divergences of players are listed at their worst context and action.
                    value = np.max(value) if np.ndim(expected[name]) == 0 else value
                    slack = (20 if "kl" in name or "bound" in name else 1) * tolerance * size
                    np.testing.assert_allclose(
                        value, expected[name], rtol=slack, atol=slack, err_msg=f"{case['name']} {name} {t}"
                    )
                np.testing.assert_allclose(fast.trajectory[0][t], log_pi, rtol=tolerance * size, atol=tolerance * size)
                np.testing.assert_allclose(fast.trajectory[1][t], cost, rtol=tolerance * size, atol=tolerance * size)


def test_step_is_algorithm_1():
    """Against a transcription with products of probabilities, in extended precision, and the paper's exponents."""
    with jax.enable_x64(True):
        game = random_game(3, tau_leader=0.2, tau_follower=0.4)
        eta_l, eta_f = 1.5, 2.0
        state = smida.init(game)
        u, tau_l, tau_f = np.asarray(game.utility, np.longdouble), np.longdouble(0.2), np.longdouble(0.4)
        pi_ref = pi = np.exp(np.asarray(game.log_pi_ref, np.longdouble))
        omega_ref = omega = np.exp(np.asarray(games.log_omega_ref(game), np.longdouble))
        for _ in range(12):
            cost = (omega * u).sum(-1) - tau_f * (omega * np.log(omega / omega_ref)).sum(-1)
            new_pi = pi ** (1 - eta_l * tau_l) * pi_ref ** (eta_l * tau_l) * np.exp(-eta_l * cost)
            new_omega = omega ** (1 - eta_f * tau_f) * omega_ref ** (eta_f * tau_f) * np.exp(eta_f * u)
            pi, omega = new_pi / new_pi.sum(-1, keepdims=True), new_omega / new_omega.sum(-1, keepdims=True)
            state = smida.step(state, game, eta_leader=eta_l, eta_follower=eta_f)
            np.testing.assert_allclose(np.exp(state.log_pi), pi.astype(float), rtol=1e-13)
            np.testing.assert_allclose(np.exp(state.log_omega), omega.astype(float), rtol=1e-13)
        assert state.step == 12


@settings
@hypothesis.given(game_arguments(), rates(), st.sampled_from((1, 8)))
def test_the_follower_need_not_be_stored(arguments, rates, steps_per_pass):
    """Both paths give the same iterates; tolerance 1e-11 of the log-probabilities' size in float64."""
    with jax.enable_x64(True):
        game = random_game(**arguments)
        steps = step_sizes(game, rates)
        fast = smida.solve(game, num_steps=20, record=policies, steps_per_pass=steps_per_pass, **steps)
        slow = smida.solve(game, num_steps=20, record=policies, store_follower=True, **steps)
        u = float(jnp.max(jnp.abs(game.utility)))
        sizes = (u / game.tau_leader + jnp.max(-game.log_pi_ref), u + game.tau_follower * jnp.max(-game.log_omega_ref))
        for one, other, size in zip(fast.trajectory, slow.trajectory, (*sizes, 0.0), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-11 * float(size))
        last = smida.follower(game, fast.step, eta_follower=steps["eta_follower"])
        size = u / game.tau_follower + jnp.max(-game.log_omega_ref)
        np.testing.assert_allclose(last, slow.log_omega, rtol=0, atol=1e-11 * float(size))
        assert fast.log_omega is None
        assert jax.tree.leaves(fast.trajectory)[0].shape[0] == 21


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("store_follower", [False, True])
def test_stable_at_tiny_temperatures(precision, store_follower):
    """tau = 5e-4, where exp(u / tau) overflows: the last iterate is the equilibrium, nothing is NaN on the way."""
    with jax.enable_x64(precision == "float64"), jax.debug_nans(True):
        game = random_game(0, (2, 6, 6), tau_leader=5e-4, tau_follower=5e-4)
        steps = {"eta_leader": 0.2 / 5e-4, "eta_follower": 1 / 5e-4}
        found = smida.solve(game, num_steps=200, store_follower=store_follower, **steps)
        solution = equilibrium.closed_form(game)
        assert all(np.isfinite(leaf).all() for leaf in (found.log_pi, found.cost, found.gap))
        size = 2 * 2 / 5e-4 * float(jnp.finfo(precision).eps)
        np.testing.assert_allclose(found.log_pi, solution.log_pi, rtol=0, atol=20 * size)
        np.testing.assert_allclose(found.cost, solution.follower_value, rtol=1e-6)


def test_one_step_makes_the_follower_exact():
    """At eta_F tau_F = 1, with 0^0 = 1 at the start."""
    with jax.enable_x64(True):
        game = random_game(1, tau_follower=0.3)
        steps = {"eta_leader": 0.5, "eta_follower": 1 / 0.3}
        found = smida.solve(game, num_steps=1, store_follower=True, **steps)
        best = equilibrium.closed_form(game)
        np.testing.assert_allclose(found.log_omega, best.log_omega, rtol=1e-13)
        for rate in (1.0, 1.0 + 1e-9):
            np.testing.assert_array_equal(smida.decay(jnp.asarray(rate), jnp.arange(3)), [1.0, 0.0, 0.0])
        start = smida.follower(game, 0, eta_follower=1 / 0.3)
        np.testing.assert_allclose(start, smida.init(game).log_omega, rtol=1e-14)


def test_small_rates_keep_their_digits():
    """`1 - q^t` at a rate of 1e-12, where q rounds."""
    with jax.enable_x64(True):
        np.testing.assert_allclose(smida.progress(jnp.asarray(1e-12), 5), 5e-12, rtol=1e-11)
        np.testing.assert_allclose(smida.decay(jnp.asarray(1e-3), 10**6), np.exp(1e6 * np.log1p(-1e-3)), rtol=1e-9)


@pytest.mark.parametrize("store_follower", [False, True])
def test_each_context_stops_by_itself(store_follower):
    """At its first iterate with a gap within the tolerance, where it stays; other contexts make no difference."""
    with jax.enable_x64(True):
        game = random_game(2, (4, 3, 3), scale=1.0)
        scales = jnp.array([0.0, 0.1, 1.0, 5.0])[:, None, None]
        game = game._replace(utility=game.utility * scales)
        steps = step_sizes(game, (0.1, 0.4))
        arguments = {"num_steps": 60, "store_follower": store_follower, "record": policies, **steps}
        free = smida.solve(game, **arguments)
        found = smida.solve(game, tolerance=1e-3, **arguments)
        gaps = jax.vmap(lambda log_pi, cost: equilibrium.saddle_gap(game, log_pi, cost))(*free.trajectory[:2])
        first = np.argmax(np.asarray(gaps) <= 1e-3, axis=0)
        np.testing.assert_array_equal(found.step, first)
        assert first[0] == 0
        assert len(set(first)) >= 3
        assert max(first) < 60
        for x, t in enumerate(first):
            np.testing.assert_allclose(found.log_pi[x], free.trajectory[0][t, x], rtol=1e-14)
            np.testing.assert_array_equal(found.trajectory[0][t:, x], jnp.broadcast_to(found.log_pi[x], (61 - t, 3)))
            np.testing.assert_array_equal(found.trajectory[2][:, x], np.minimum(np.arange(61), t))
        np.testing.assert_allclose(found.gap, gaps[first, np.arange(4)], rtol=1e-12)
        alone = smida.solve(
            game._replace(
                utility=game.utility[2:3],
                prior=jnp.ones(1),
                log_pi_ref=game.log_pi_ref[2:3],
                log_omega_ref=game.log_omega_ref[2:3],
            ),
            tolerance=1e-3,
            **arguments,
        )
        np.testing.assert_array_equal(alone.log_pi[0], found.log_pi[2])
        assert alone.step[0] == found.step[2]


def test_zero_steps_is_the_reference():
    game = random_game(0)
    found = smida.solve(game, eta_leader=0.1, eta_follower=1.0, num_steps=0, record=policies)
    np.testing.assert_array_equal(found.log_pi, game.log_pi_ref)
    assert found.trajectory[0].shape == (1, 3, 2)
    assert (found.step == 0).all()


@pytest.mark.parametrize(
    ("eta_leader", "eta_follower", "fix"),
    [
        (0.0, 1.0, "must be positive"),
        (-1.0, 1.0, "must be positive"),
        (2.0, 1.0, "the Follower is the faster player"),
        (1.0, 0.5999, "the Follower is the faster player"),
        (1.0, 2.1, "at most 1 / tau_follower"),
        (np.nan, 1.0, "must be positive"),
        (0.1, np.inf, "at most 1 / tau_follower"),
    ],
)
def test_step_sizes_outside_condition_6(eta_leader, eta_follower, fix):
    game = random_game(0, tau_leader=0.3, tau_follower=0.5)
    message = rf"0 < eta_leader \* tau_leader < eta_follower \* tau_follower <= 1 \(condition 6\).*{fix}"
    with pytest.raises(ValueError, match=message):
        smida.solve(game, eta_leader=eta_leader, eta_follower=eta_follower, num_steps=3)


def test_taus_of_zero_are_refused_by_condition_6():
    game = random_game(0, tau_leader=0.0)
    with pytest.raises(ValueError, match="condition 6.*eta_leader and tau_leader must be positive"):
        smida.solve(game, eta_leader=1.0, eta_follower=1.0, num_steps=3)


@pytest.mark.parametrize("tau", [0.1, 0.3, 0.7, 5e-4, 1e3, 3e-7])
@pytest.mark.parametrize("x64", [False, True])
def test_one_over_tau_is_within_condition_6(tau, x64):
    """Although its product with tau may round to more than 1."""
    with jax.enable_x64(x64):
        game = random_game(0, tau_follower=tau)
        smida.solve(game, eta_leader=0.1 / 0.3, eta_follower=1 / tau, num_steps=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": -1}, "num_steps must be at least 0"),
        ({"num_steps": 2, "steps_per_pass": 0}, "steps_per_pass must be at least 1"),
        ({"num_steps": 2, "tolerance": -1.0}, "tolerance must be at least 0"),
        ({"num_steps": 2, "tolerance": float("nan")}, "tolerance must be at least 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        smida.solve(random_game(0), eta_leader=0.1, eta_follower=1.0, **arguments)


def test_batches_of_games():
    """vmap over games, their temperatures and step sizes equals one after the other."""
    with jax.enable_x64(True):
        batch = [random_game(seed, tau_leader=0.2 + 0.1 * seed, tau_follower=0.5) for seed in range(4)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batch)
        etas = jnp.linspace(0.1, 0.4, 4)
        smida.check_step_sizes(stacked, eta_leader=etas, eta_follower=1.0)
        with pytest.raises(ValueError, match="condition 6"):
            smida.check_step_sizes(stacked, eta_leader=etas.at[2].set(2.0), eta_follower=1.0)

        def solve(game, eta):
            return smida.solve(game, eta_leader=eta, eta_follower=1.0, num_steps=30, tolerance=1e-6)

        together = jax.vmap(solve)(stacked, etas)
        for i, game in enumerate(batch):
            alone = solve(game, float(etas[i]))
            np.testing.assert_allclose(together.log_pi[i], alone.log_pi, rtol=1e-13)
            np.testing.assert_array_equal(together.step[i], alone.step)


def test_differentiable():
    """The gradient of a regret after 40 steps in the utility: finite differences agree."""
    with jax.enable_x64(True):
        game = random_game(0, SHAPES[0])

        def worth(utility):
            changed = game._replace(utility=utility)
            found = smida.solve(changed, eta_leader=0.5, eta_follower=1.0, num_steps=40)
            return jnp.sum(jnp.exp(found.log_pi) * jnp.arange(2.0)) + jnp.sum(found.cost)

        gradient = jax.grad(worth)(game.utility)
        direction = np.random.default_rng(0).normal(size=game.utility.shape)
        numeric = (worth(game.utility + 1e-6 * direction) - worth(game.utility - 1e-6 * direction)) / 2e-6
        np.testing.assert_allclose(jnp.sum(gradient * direction), numeric, rtol=1e-7)

"""Equations 9 to 11 under both presets, against recorded runs of the public code and of the printed equations."""

import dataclasses
import functools
import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.arena import convergence, duels, reputation

FILE = pathlib.Path(__file__).parent.parent / "vectors" / "sparta_ratings.json"
RECORDED = json.loads(FILE.read_text())
CASES = {case["name"]: case for case in RECORDED["rating_cases"]}
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
settings = hypothesis.settings(deadline=None, max_examples=40)
track = jax.jit(convergence.update, static_argnames="config")
update = jax.jit(reputation.update, static_argnames="config")


@functools.partial(jax.jit, static_argnames="config")
def step(state, first, second, scores, mask, config):
    return duels.play(state, first, second, scores, mask, peer=True, config=config)


def config_of(case, base):
    names = {
        "initial_K": "initial_k",
        "min_K": "min_k",
        "epsilon": "epsilon",
        "decay_rate": "decay",
        "decay_steps": "decay_steps",
        "scaling_factor": "scale",
    }
    return dataclasses.replace(base, **{new: case["params"][old] for old, new in names.items()})


def replay(case, config):
    """Yields the state after each duel of a recorded case, and that duel's outcome."""
    names = sorted(case["initial"])
    state = reputation.init(len(names), config)
    ratings, deviations = (jnp.array([case["initial"][n][k] for n in names]) for k in ("score", "deviation"))
    state = state._replace(ratings=ratings, deviations=deviations)
    for duel in case["duels"]:
        first, second = (jnp.array([names.index(n)]) for n in duel["models"])
        scores = np.full((1, 2, len(names)), np.nan)
        for judge, pair in duel["judge_scores"].items():
            scores[0, :, names.index(judge)] = pair
        state, outcome = step(state, first, second, jnp.array(scores), jnp.ones(scores.shape, bool), config)
        yield names, state, outcome


def assert_ratings(names, state, recorded):
    np.testing.assert_allclose(state.ratings, [recorded[n]["score"] for n in names], **TOLERANCE)
    np.testing.assert_allclose(state.deviations, [recorded[n]["deviation"] for n in names], **TOLERANCE)


@pytest.mark.parametrize("name", sorted(CASES))
def test_sparta_preset_reproduces_the_public_code(name, x64):
    case = CASES[name]
    params = case["params"]
    config = config_of(case, reputation.SPARTA)
    assert (config.window, config.min_deviation) == (params["window_size"], params["min_deviation"])
    for recorded, (names, state, outcome) in zip(case["sparta_steps"], replay(case, config), strict=True):
        assert_ratings(names, state, recorded["after"])
        before = [recorded["before"][n]["score"] for n in names]
        np.testing.assert_allclose(outcome.ratings[0], before, **TOLERANCE)
        assert int(state.total) == recorded["update_count"]
        np.testing.assert_allclose(reputation.k_factor(state.total, config), recorded["K_used"], **TOLERANCE)
        for model, delta in recorded["deltas"].items():
            last = state.deltas[names.index(model), -1] if bool(outcome.valid[0]) else 0.0
            np.testing.assert_allclose(last, delta, **TOLERANCE)
    for n, history in case["sparta_delta_history_final"].items():
        row = names.index(n)
        kept = int(jnp.minimum(state.counts[row], config.window))
        np.testing.assert_allclose(state.deltas[row, config.window - kept :], history, **TOLERANCE)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("name", sorted(CASES))
def test_paper_preset_reproduces_the_printed_equations(name, floor, x64):
    case = CASES[name]
    config = config_of(case, dataclasses.replace(reputation.PAPER, min_deviation=floor))
    section = "paper_eq_reference" if floor == 0.0 else "paper_eq_reference_sigma_floor_0.1"
    for recorded, (names, state, outcome) in zip(case[section]["steps"], replay(case, config), strict=True):
        assert_ratings(names, state, recorded["ratings"])
        if not recorded["deltas"]:
            assert not bool(outcome.valid[0])
            continue
        np.testing.assert_allclose(outcome.scores[0], recorded["aggregate"], **TOLERANCE)
        for model, delta in recorded["deltas"].items():
            np.testing.assert_allclose(state.deltas[names.index(model), -1], delta, **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("simultaneous_update", {"simultaneous": True}),
        ("window_20", {"window": 20}),
        ("sample_std", {"ddof": 1}),
        ("per_model_update_count", {"per_model_count": True}),
        ("floored_exponent", {"floored_exponent": True}),
        ("no_sigma_floor", {"min_deviation": 0.0}),
    ],
)
@pytest.mark.parametrize("case_name", ["twentyfive_alternating", "k_decay_80_duels", "min_deviation_floor"])
def test_each_convention_alone(case_name, name, change, x64):
    case = CASES[case_name]
    *_, (names, state, _) = replay(case, config_of(case, dataclasses.replace(reputation.SPARTA, **change)))
    assert_ratings(names, state, case["one_convention_switched_final_ratings"][name])


@pytest.mark.parametrize(("count", "expected"), [(1, 10.0), (9, 10.0), (10, 9.0), (25, 8.1), (1000, 5.0)])
def test_equation_10(count, expected):
    np.testing.assert_allclose(reputation.k_factor(count), expected, rtol=1e-6)


def test_equation_9_by_hand(x64):
    state = reputation.init(3)._replace(ratings=jnp.array([104.0, 100.0, 100.0]), deviations=jnp.array([2.0, 1.0, 0.5]))
    new = update(state, 0, 1, 8.0, 5.0, True, reputation.PAPER)
    z = 4 / np.sqrt(5)
    factor = 2 * float(jax.scipy.stats.norm.cdf(z)) - 1
    np.testing.assert_allclose(new.ratings[0] - 104, 10 / 20 * 3 * np.tanh(2.0) * factor, rtol=1e-9)
    np.testing.assert_allclose(new.ratings[1] - 100, -10 / 20 * 3 * np.tanh(1.0) * factor, rtol=1e-9)
    assert float(new.ratings[2]) == 100.0


def test_equation_11_looks_back_on_the_window(x64):
    config = dataclasses.replace(reputation.PAPER, window=4, min_deviation=0.0)
    deltas = []
    state = reputation.init(2, config)._replace(ratings=jnp.array([130.0, 100.0]))
    for gap in (3.0, -2.0, 1.0, 4.0, -5.0, 2.0):
        state = update(state, 0, 1, 5 + gap / 2, 5 - gap / 2, True, config)
        deltas.append(float(state.deltas[0, -1]))
        expected = 0.5 if len(deltas) < 2 else np.std(deltas[-4:], ddof=1)
        np.testing.assert_allclose(state.deviations[0], expected, rtol=1e-9)


number = st.floats(1, 10, width=32)
@settings
@hypothesis.given(
    st.floats(20, 200, width=32), st.floats(20, 200, width=32), st.floats(0.125, 8, width=32), number, number
)
def test_update_is_antisymmetric(r_first, r_second, deviation, s_first, s_second):
    """Equal deviations and counts, no floor in reach (a single change is below 5)."""
    state = reputation.init(3)
    state = state._replace(
        ratings=jnp.array([r_first, r_second, 100.0]), deviations=jnp.full((3,), deviation, jnp.float32)
    )
    new = update(state, 0, 1, s_first, s_second, True, reputation.PAPER)
    assert float(new.deltas[0, -1]) == -float(new.deltas[1, -1])
    swapped = update(state, 1, 0, s_second, s_first, True, reputation.PAPER)
    np.testing.assert_array_equal(new.ratings, swapped.ratings)


@pytest.mark.parametrize("preset", sorted(reputation.PRESETS))
@settings
@hypothesis.given(
    st.lists(st.floats(10, 14, width=32), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), number, number), min_size=6, max_size=6),
)
def test_floors_hold_and_the_recorded_delta_is_the_applied_one(preset, ratings, games):
    config = reputation.PRESETS[preset]
    state = reputation.init(3, config)._replace(ratings=jnp.float32(ratings), deviations=jnp.full((3,), 5.0))
    for first, second, a, b in games:
        old, state = state, update(state, first, second, a, b, True, config)
        assert float(state.ratings.min()) >= config.min_rating
        assert float(state.deviations.min()) >= config.min_deviation
        applied = state.ratings - old.ratings
        recorded = jnp.where(state.counts > old.counts, state.deltas[:, -1], 0.0)
        np.testing.assert_allclose(applied, recorded, atol=2e-6)


def test_the_floor_binds_for_the_loser_alone():
    state = reputation.init(2)._replace(ratings=jnp.array([60.0, 10.5]), deviations=jnp.array([4.0, 4.0]))
    new = update(state, 0, 1, 10.0, 1.0, True, reputation.PAPER)
    assert float(new.ratings[1]) == 10.0
    assert float(new.deltas[1, -1]) == -0.5
    assert float(new.deltas[0, -1]) > 4


@pytest.mark.parametrize("ratings", [[100.0, 100.0], [110.0, 90.0]])
def test_zero_deviations_give_numbers(ratings):
    config = dataclasses.replace(reputation.PAPER, min_deviation=0.0)
    state = reputation.init(2, config)._replace(ratings=jnp.array(ratings), deviations=jnp.zeros(2))
    with jax.debug_nans(True):
        assert float(reputation.gap_factor(*state.ratings, *state.deviations, 0.01)) == np.float32(0.01)
        new = update(state, 0, 1, 9.0, 1.0, True, config)
    np.testing.assert_array_equal(new.ratings, state.ratings)


@pytest.mark.parametrize(("second", "score", "valid"), [(1, jnp.nan, False), (0, 3.0, True)])
def test_unscored_duels_and_self_play_change_nothing(second, score, valid):
    state = reputation.init(3)
    with jax.debug_nans(True):
        new = update(state, 0, second, 9.0, jnp.where(valid, score, 0.0), valid, reputation.PAPER)
    for got, want in zip(new[:-1], state[:-1], strict=True):
        np.testing.assert_array_equal(got, want)
    assert int(new.total) == 1


def test_deviation_floor_share():
    state = reputation.init(4)._replace(deviations=jnp.array([0.1, 0.1, 0.5, 0.1]))
    np.testing.assert_allclose(reputation.deviation_floor_share(state), 0.75)


@pytest.mark.parametrize("case", RECORDED["tracker_cases"], ids=lambda case: case["name"])
def test_convergence_reproduces_the_public_tracker(case):
    criteria = case["criteria"]
    config = convergence.ConvergenceConfig(criteria["min_improvement"], criteria["window_size"], criteria["patience"])
    state = convergence.init(2, config)
    for recorded in case["steps"]:
        stop, state = track(state, jnp.array([recorded["input"]["A"], recorded["input"]["B"]]), config)
        assert (bool(stop), int(state.stalled)) == (recorded["stop"], recorded["no_improvement_count"])
    assert int(state.count) == case["summary"]["iteration_count"]

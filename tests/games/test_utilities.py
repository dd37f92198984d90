"""Appendix F: variance, decision uncertainty, Jensen-Shannon divergence, preference and targeted utilities."""

import functools
import json

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.games import utilities

MEMBERS, X, Y = 3, 2, 3
settings = hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
SCORES = {
    "variance": jax.jit(utilities.variance),
    "decision_uncertainty": jax.jit(utilities.decision_uncertainty),
    "jensen_shannon": jax.jit(utilities.jensen_shannon),
}
divergence_and_gradient = jax.jit(jax.value_and_grad(lambda p: utilities.jensen_shannon(p)[0]))
preference = jax.jit(utilities.preference)
targeted = jax.jit(utilities.targeted, static_argnums=1)
by_score = pytest.mark.parametrize("name", SCORES)
by_precision = pytest.mark.parametrize("precision", ["float32", "float64"])
ATOL = {"float32": 1e-6, "float64": 1e-14}


def antisymmetric(upper: np.ndarray) -> np.ndarray:
    """`[..., Y (Y - 1) / 2]` above the diagonal -> `[..., Y, Y]`."""
    i, j = np.triu_indices(Y, k=1)
    table = np.full((*upper.shape[:-1], Y, Y), 0.5, upper.dtype)
    table[..., i, j], table[..., j, i] = upper, 1 - upper
    return table


def ensembles(precision="float32"):
    probabilities = st.floats(0, 1, width=int(precision[-2:]), allow_subnormal=False)
    shape = (MEMBERS, X, Y * (Y - 1) // 2)
    return hnp.arrays(precision, shape, elements=probabilities, fill=st.nothing()).map(antisymmetric)


def entropy(p):
    with np.errstate(divide="ignore", invalid="ignore"):
        return -sum(np.where(q > 0, q * np.log(q), 0.0) for q in (p, 1 - p))


def random_ensemble(precision="float32", shape=(MEMBERS, X)):
    rng = np.random.default_rng(0)
    return antisymmetric(rng.uniform(size=(*shape, Y * (Y - 1) // 2)).astype(precision))


@by_precision
def test_vectors(vectors, precision):
    cases = json.loads((vectors / "preference_scores.json").read_text())["ensemble_scores"]
    tolerance = {"float32": {"rtol": 2e-5, "atol": 1e-6}, "float64": {"rtol": 1e-9, "atol": 1e-10}}[precision]
    with jax.enable_x64(precision == "float64"):
        p = jnp.array([case["p"] for case in cases], precision).T
        for name, field in [
            ("variance", "var_pop"),
            ("decision_uncertainty", "decision_uncertainty"),
            ("jensen_shannon", "jsd_nats"),
        ]:
            scores = SCORES[name](p)
            assert scores.dtype == precision
            np.testing.assert_allclose(scores, [case[field] for case in cases], **tolerance)
        np.testing.assert_allclose(4 * SCORES["variance"](p), [case["utility_4var"] for case in cases], **tolerance)


@by_precision
@settings
@hypothesis.given(data=st.data())
def test_ranges_and_symmetry(precision, data):
    p = data.draw(ensembles(precision))
    largest = {"variance": 0.25, "decision_uncertainty": 0.5, "jensen_shannon": np.log(2)}
    with jax.enable_x64(precision == "float64"):
        for name, score in SCORES.items():
            u = np.asarray(score(p))
            assert u.shape == (X, Y, Y) and u.dtype == precision
            assert u.min() >= 0.0
            assert u.max() <= largest[name] * (1 + 4 * np.finfo(precision).eps)
            np.testing.assert_allclose(u, np.swapaxes(u, 1, 2), rtol=0, atol=ATOL[precision])
            diagonal = np.diagonal(u, axis1=1, axis2=2)
            np.testing.assert_array_equal(diagonal, 0.5 if name == "decision_uncertainty" else 0.0)


@by_precision
@settings
@hypothesis.given(data=st.data())
def test_formulas_of_the_paper(precision, data):
    """Against the printed formulas in float64, the Jensen-Shannon divergence as the difference of entropies."""
    p = data.draw(ensembles(precision))
    wide = p.astype(np.float64)
    mean = wide.mean(axis=0)
    with jax.enable_x64(precision == "float64"):
        scores = {name: score(p) for name, score in SCORES.items()}
        preferred, mixed = preference(p), targeted(p, 1, weight=0.25)
    expected = {
        "variance": wide.var(axis=0),
        "decision_uncertainty": 0.5 - np.abs(mean - 0.5),
        "jensen_shannon": entropy(mean) - entropy(wide).mean(axis=0),
    }
    for name, score in scores.items():
        np.testing.assert_allclose(score, expected[name], rtol=0, atol=ATOL[precision], err_msg=name)
    np.testing.assert_allclose(preferred, np.swapaxes(mean, 1, 2), rtol=0, atol=ATOL[precision])
    reversed_member = np.swapaxes(wide[1], 1, 2)
    np.testing.assert_allclose(mixed, wide.var(axis=0) + 0.25 * reversed_member, rtol=0, atol=ATOL[precision])


@settings
@hypothesis.given(ensembles())
def test_copying_attains_the_largest_decision_uncertainty(p):
    u = SCORES["decision_uncertainty"](p)
    np.testing.assert_array_equal(np.diagonal(u, axis1=1, axis2=2), np.max(u, axis=2))
    np.testing.assert_array_equal(np.max(u, axis=2), 0.5)


@settings
@hypothesis.given(ensembles())
def test_preference_is_the_probability_that_the_follower_wins(p):
    u = np.asarray(preference(p))
    assert 0.0 <= u.min() and u.max() <= 1.0
    np.testing.assert_array_equal(np.diagonal(u, axis1=1, axis2=2), 0.5)
    np.testing.assert_allclose(u + np.swapaxes(u, 1, 2), 1.0, rtol=0, atol=1e-6)


def test_preference_keeps_small_probabilities():
    """By the transpose: from `1 - P` a probability of 1e-12 would be 0 in float32."""
    p = antisymmetric(np.full((MEMBERS, X, 3), 1.0, np.float32))
    p[:, :, 1, 0] = 1e-12
    np.testing.assert_allclose(preference(p)[:, 0, 1], 1e-12, rtol=1e-6)
    np.testing.assert_array_equal(targeted(p, 0, weight=1.0)[:, 0, 1], np.float32(1e-12))


@by_score
@settings
@hypothesis.given(p=ensembles(), actions=st.permutations(range(Y)), members=st.permutations(range(MEMBERS)))
def test_permutations(name, p, actions, members):
    u = np.asarray(SCORES[name](p))
    moved = SCORES[name](p[:, ::-1][:, :, actions][:, :, :, actions])
    np.testing.assert_array_equal(moved, u[::-1][:, actions][:, :, actions])
    np.testing.assert_allclose(SCORES[name](p[np.array(members)]), u, rtol=0, atol=1e-6)


@settings
@hypothesis.given(st.floats(0, 1, width=32, allow_subnormal=False), st.floats(2**-10, 1, width=32))
def test_disagreement_vanishes_exactly_where_the_members_agree(p, gap):
    agree = np.full((7, 1), p, np.float32)
    differ = agree.copy()
    differ[3] = p + gap if p + gap <= 1 else max(p - gap, 0.0)
    for name in ("variance", "jensen_shannon"):
        assert SCORES[name](agree)[0] == 0.0
        assert SCORES[name](differ)[0] > 0.0


def test_members_that_nearly_agree_keep_their_disagreement():
    """In float32 `E[p^2] - E[p]^2` and the difference of entropies have no correct digit here."""
    centre = np.array([0.02, 0.3, 0.5, 0.71, 0.97])
    p = (centre + 1e-4 * np.array([-1, 0, 2, 1, -3])[:, None]).astype(np.float32)
    wide = p.astype(np.float64)
    np.testing.assert_allclose(SCORES["variance"](p), wide.var(axis=0), rtol=1e-2)
    with jax.enable_x64(True):
        expected = SCORES["jensen_shannon"](wide)
    np.testing.assert_allclose(expected, entropy(wide.mean(axis=0)) - entropy(wide).mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(SCORES["jensen_shannon"](p), expected, rtol=1e-2)


@pytest.mark.parametrize("ends", [[0, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0.5, 1], [1e-30, 1, 0.5], [0, 1e-44, 0]])
def test_ends_of_the_interval(ends):
    p = np.array(ends, np.float32)[:, None]
    wide = p.astype(np.float64)
    with jax.debug_nans(True):
        value, gradient = divergence_and_gradient(p)
    np.testing.assert_allclose(value, (entropy(wide.mean(axis=0)) - entropy(wide).mean(axis=0))[0], atol=1e-6)
    assert np.isfinite(gradient).all()


@by_precision
def test_gradient_of_jensen_shannon(precision):
    """`(logit(p_i) - logit(mean)) / I`."""
    p = np.array([0.1, 0.45, 0.5, 0.93], precision)[:, None]
    with jax.enable_x64(precision == "float64"):
        _, gradient = divergence_and_gradient(p)
    wide = p.astype(np.float64)
    odds, mean_odds = wide / (1 - wide), wide.mean() / (1 - wide.mean())
    np.testing.assert_allclose(gradient, np.log(odds / mean_odds) / 4, rtol=0, atol=1e1 * ATOL[precision])


@by_score
def test_leading_axis_alone(name):
    p = random_ensemble(shape=(MEMBERS, X))
    u = SCORES[name](p)
    np.testing.assert_allclose(SCORES[name](p[:, 1, 0, 2]), u[1, 0, 2], rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(SCORES[name], in_axes=1)(p), u, rtol=1e-6)
    alone = np.asarray(SCORES[name](p[:1]))
    np.testing.assert_array_equal(alone, np.minimum(p[0], 1 - p[0]) if name == "decision_uncertainty" else 0.0)


def test_half_precision_is_computed_in_float32():
    p = jnp.asarray(random_ensemble(), jnp.bfloat16)
    wide = p.astype(jnp.float32)
    for function in (*SCORES.values(), preference, functools.partial(targeted, member=0, weight=1.0)):
        u = function(preferences=p)
        assert u.dtype == jnp.float32
        np.testing.assert_array_equal(u, function(preferences=wide))


@pytest.mark.parametrize("member", [-1, MEMBERS])
def test_targeted_wants_a_member(member):
    with pytest.raises(ValueError, match=f"member must be in .0, {MEMBERS}."):
        utilities.targeted(random_ensemble(), member, weight=0.1)
    with pytest.raises(ValueError, match="weight"):
        utilities.targeted(random_ensemble(), 0, weight=-0.1)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32", "float64"])
def test_validate_ensemble_accepts_rounded_ensembles(precision):
    rng = np.random.default_rng(0)
    p = antisymmetric(rng.uniform(size=(MEMBERS, X, 3)))
    utilities.validate_ensemble(p.astype(jnp.dtype(precision)))
    with jax.enable_x64(precision == "float64"):
        utilities.validate_ensemble(jnp.asarray(p, precision))
    if precision != "float64":
        # float32 rounding is an error in a float64 array, unless the caller allows it.
        rounded = p.astype(jnp.dtype(precision)).astype(np.float64)
        with pytest.raises(ValueError, match="tolerance"):
            utilities.validate_ensemble(rounded)
        utilities.validate_ensemble(rounded, tolerance=0.01)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_validate_ensemble_names_what_is_not_finite(value):
    p = random_ensemble()
    p[1, 1, 0, 2] = p[2, 0, 0, 1] = value
    with pytest.raises(ValueError, match=r"preferences\[1, 1, 0, 2\] is -?(nan|inf), not finite; drop"):
        utilities.validate_ensemble(p)


@pytest.mark.parametrize("value", [-1e-6, 1.5])
def test_validate_ensemble_names_what_is_no_probability(value):
    p = random_ensemble()
    p[0, 1, 2, 0], p[0, 1, 0, 2] = value, 1 - value
    with pytest.raises(ValueError, match=r"preferences\[0, 1, (2, 0|0, 2)\] is \S+, outside \[0, 1\]; pass prob"):
        utilities.validate_ensemble(p)


def test_validate_ensemble_names_what_is_not_antisymmetric():
    p = random_ensemble()
    p[2, 0, 1, 1] = 0.25
    with pytest.raises(ValueError, match=r"preferences\[2, 0, 1, 1\] \+ preferences\[2, 0, 1, 1\] is 0.5, not 1"):
        utilities.validate_ensemble(p)
    p[1, 1, 2, 0] = p[1, 1, 0, 2] = 0.4
    with pytest.raises(ValueError, match=r"preferences\[1, 1, 0, 2\] \+ preferences\[1, 1, 2, 0\] is 0.8.*make"):
        utilities.validate_ensemble(p)


@pytest.mark.parametrize("shape", [(2, 3, 3), (1, 2, 3, 4), (0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 0)])
def test_validate_ensemble_names_the_shape(shape):
    with pytest.raises(ValueError, match="preferences must have the shape"):
        utilities.validate_ensemble(np.full(shape, 0.5))


def test_validate_ensemble_wants_floats():
    with pytest.raises(ValueError, match="preferences must be floating, got int"):
        utilities.validate_ensemble(np.zeros((1, 1, 2, 2), int))


@pytest.mark.parametrize("function", [utilities.preference, functools.partial(utilities.targeted, member=0, weight=1)])
def test_the_axes_of_an_ensemble_are_asserted(function):
    for shape in [(2, 3, 3), (1, 2, 3, 4)]:
        with pytest.raises(AssertionError):
            function(preferences=jnp.full(shape, 0.5))

"""The benchmarks' references compute what they are compared with."""

import jax
import numpy as np

from experiments.benches import tabular
from stackalign import games
from stackalign.games import smida


def test_the_numpy_transcription_is_smida():
    """Batched, in float64, after as many steps."""
    with jax.enable_x64(True):
        utility = np.random.default_rng(0).normal(size=(3, 2, 4, 5))
        arguments = {"eta_leader": 2.0, "eta_follower": 8.0, "num_steps": 9}
        log_pi, log_omega = tabular.numpy_smida(utility, tau=0.1, **arguments)
        for one, expected_pi, expected_omega in zip(utility, log_pi, log_omega, strict=True):
            game = games.make_game(one, tau_leader=0.1, tau_follower=0.1)
            found = smida.solve(game, store_follower=True, **arguments)
            np.testing.assert_allclose(found.log_pi, expected_pi, rtol=1e-12)
            np.testing.assert_allclose(found.log_omega, expected_omega, rtol=1e-12)


def test_small_rows_of_the_suite(monkeypatch):
    """Every kind of row has the fields of a row, and a reference that was measured."""
    monkeypatch.setattr(tabular, "SIZES", ((2, 4, 5), (4, 4, 5)))
    monkeypatch.setattr(tabular, "MANY", 200)
    found = {row["name"]: row for row in tabular.rows(1, lambda name: "memory" not in name, lambda text: None)}
    assert {"tabular_numpy_X2_Y4", "tabular_jit_X4_Y4", "tabular_growth", "tabular_games_100_steps"} <= set(found)
    for row in found.values():
        assert {"name", "ours", "reference", "ratio", "unit", "reference_is"} <= set(row)
    assert found["tabular_numpy_X2_Y4"]["ratio"] > 0
    assert found["tabular_games_to_1e-6"]["largest_gap"] <= 1e-6

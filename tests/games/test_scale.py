"""Contexts shared among devices, and read in blocks."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from random_games import random_game

from stackalign import games
from stackalign.games import scale, smida

STEPS = {"eta_leader": 0.5, "eta_follower": 1.5, "num_steps": 30, "tolerance": 1e-3}
TAUS = {"tau_leader": 0.3, "tau_follower": 0.5}


def record(game, solution, iterate):
    return {"log_pi": iterate.log_pi, "step": iterate.step}


SHARDED = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
sys.path.insert(0, sys.argv[1])
import numpy as np
from random_games import random_game
from stackalign.games import scale, smida
from test_scale import STEPS, record

mesh = scale.context_mesh()
assert mesh.shape["contexts"] == 8
for uniform in (True, False):
    game = random_game(0, (13, 3, 4), uniform=uniform)
    try:
        scale.solve_sharded(game, mesh, **STEPS)
    except ValueError as error:
        assert "13 contexts do not divide among 8 devices: use pad_contexts(game, 8)" in str(error)
    else:
        raise AssertionError
    padded = scale.pad_contexts(game, 8)
    found = scale.solve_sharded(padded, mesh, record=record, **STEPS)
    assert len(found.log_pi.sharding.device_set) == 8
    assert found.log_pi.addressable_shards[0].data.shape == (2, 3)
    expected = smida.solve(game, record=record, **STEPS)
    for one, other in zip(found[:3] + (found.gap,), expected[:3] + (expected.gap,)):
        np.testing.assert_allclose(one[:13], other, rtol=1e-12)
    np.testing.assert_array_equal(found.trajectory["step"][:, :13], expected.trajectory["step"])
    run, _ = scale._sharded(mesh, not uniform, (("num_steps", 30), ("record", record), ("tolerance", 1e-3)))
    compiled = run._cache_size()
    scale.solve_sharded(padded, mesh, record=record, **STEPS)
    assert run._cache_size() == compiled == 1
    text = run.lower(padded, 0.5, 1.5).compile().as_text()
    assert not [name for name in ("all-reduce", "all-gather", "collective-permute", "all-to-all") if name in text]
    try:
        scale.solve_sharded(padded, mesh, **{**STEPS, "eta_leader": 5.0})
    except ValueError as error:
        assert "condition 6" in str(error)
    else:
        raise AssertionError
print("equal")
"""


def test_sharded_is_unsharded_without_communication():
    """On 8 simulated devices, in a process of its own; the compiled program has no collective."""
    here = pathlib.Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(here)], cwd=here.parent.parent, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "equal", done.stderr


def test_padding():
    game = random_game(0, (3, 2, 4))
    padded = scale.pad_contexts(game, 4)
    assert padded.utility.shape == (4, 2, 4)
    assert padded.log_omega_ref.shape == (4, 2, 4)
    np.testing.assert_array_equal(padded.prior, [*game.prior, 0.0])
    before, after = games.equilibrium.closed_form(game), games.equilibrium.closed_form(padded)
    np.testing.assert_allclose(after.value, before.value, rtol=1e-6)
    assert scale.pad_contexts(game, 3) is game
    uniform = scale.pad_contexts(random_game(0, (1, 5, 3), uniform=True), 2)
    assert uniform.log_omega_ref.shape == (1, 1, 1)


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_blocks_are_the_whole(tmp_path, size):
    """A memory-mapped game, bit by bit the same as in memory, in blocks that divide its contexts or do not."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        utility, prior = rng.normal(size=(5, 3, 4)), rng.dirichlet(np.ones(5))
        pi_ref, omega_ref = rng.dirichlet(np.ones(3), size=5), rng.dirichlet(np.ones(4), size=(1, 3))
        np.save(tmp_path / "utility.npy", utility)
        mapped = np.load(tmp_path / "utility.npy", mmap_mode="r")
        arguments = {"prior": prior, "pi_ref": pi_ref, "omega_ref": omega_ref, **TAUS}
        blocks = scale.context_blocks(mapped, size=size, **arguments)
        found = list(scale.solve_blocks(blocks, record=record, **STEPS))
        whole = games.make_game(utility, **arguments)
        expected = smida.solve(whole, record=record, **STEPS)
        for field in ("step", "log_pi", "cost", "gap"):
            joined = np.concatenate([getattr(solution, field) for solution in found])
            np.testing.assert_array_equal(joined, getattr(expected, field), err_msg=field)
        for name, leaf in expected.trajectory.items():
            np.testing.assert_array_equal(np.concatenate([s.trajectory[name] for s in found], axis=1), leaf)
        values = [games.equilibrium.closed_form(b).value for b in scale.context_blocks(mapped, size=size, **arguments)]
        np.testing.assert_allclose(sum(values), games.equilibrium.closed_form(whole).value, rtol=1e-12)


def test_blocks_are_read_once_each_and_one_ahead():
    reads = []

    class Utility:
        shape = (6, 2, 2)

        def __getitem__(self, rows):
            reads.append(rows.start)
            return np.ones((min(rows.stop, 6) - rows.start, 2, 2))

    solutions = scale.solve_blocks(scale.context_blocks(Utility(), size=2, **TAUS), **STEPS)
    next(solutions)
    assert set(reads) <= {0, 2}
    assert len(list(solutions)) == 2
    assert reads == [0, 2, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"prior": np.ones(5)}, "prior must sum to 1"),
        ({"prior": np.ones(4) / 4}, "prior must have shape"),
        ({"tau_leader": -1.0}, "tau_leader"),
    ],
)
def test_bad_blocks_are_refused_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        scale.context_blocks(np.ones((5, 2, 2)), **{"size": 2, **TAUS, **changes})


def test_a_bad_block_is_named():
    utility = np.ones((5, 2, 2))
    utility[3, 1, 0] = np.nan
    solutions = scale.solve_blocks(scale.context_blocks(utility, size=2, **TAUS), **STEPS)
    next(solutions)
    with pytest.raises(ValueError, match=r"contexts from 2 on .*utility\[1, 1, 0\] = nan is not finite"):
        list(solutions)

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import killed
import numpy as np
import pytest

from stackalign.runs import checkpoints, folder, records


class Pair(NamedTuple):
    first: Any
    second: Any


def make_state(seed=0):
    key = jax.random.key(seed)
    return {
        "weights": (jax.random.normal(key, (5, 3)), jnp.arange(4, dtype=jnp.bfloat16) / 3),
        "pair": Pair(Pair(jnp.int8(-3), None), [np.float64(0.1), np.arange(3, dtype=np.uint16)]),
        "nan": jnp.asarray(np.array([0x7FC12345, 0x80000000], np.uint32).view(np.float32)),
        "mask": jnp.array([True, False]),
        "weak": jnp.full((2,), 100.0),  # weakly typed: promotes differently from a float32 array
        "key": jax.random.fold_in(key, 1),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "no_keys": jax.random.split(key, 3)[:0],
        "empty": jnp.zeros((0, 4)),
        "python": (True, 7, 0.1, "text", ()),
    }


def bits(leaf):
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return type(leaf), leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(leaf)), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    return type(leaf), leaf.dtype.name, leaf.shape, getattr(leaf, "weak_type", None), np.asarray(leaf).tobytes()


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert bits(a) == bits(b)


def test_a_state_comes_back_bit_for_bit(run):
    state = make_state(3)
    checkpoints.save(run, 2, state, {"duels.jsonl": 10})
    restored = checkpoints.restore(run, make_state(4) | {"python": (False, 0, 0.0, "", ())})
    assert restored.step == 2 and restored.positions == {"duels.jsonl": 10}
    assert_same(restored.state, state)
    promoted = restored.state["weak"] + jnp.ones(2, jnp.bfloat16)
    assert promoted.dtype == jnp.bfloat16
    shapes = jax.eval_shape(lambda: state["weights"])
    assert_same(checkpoints.restore(run, state | {"weights": shapes}).state["weights"], state["weights"])


def test_states_without_arrays(run):
    for step, state in enumerate(({}, None, 3, jnp.float32(2), {"a": None})):
        checkpoints.save(run, step, state, {})
        assert_same(checkpoints.restore(run, state).state, state)


def test_nothing_to_restore(run):
    assert checkpoints.restore(run, {}) is None
    checkpoints.save(run, 0, {"a": 1}, {})
    assert checkpoints.restore(run, {"a": 1}, best=True) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": (jnp.zeros((5, 4)), jnp.zeros(4, jnp.bfloat16))}, r"\['weights'\]\[0\].*shape is \(5, 3\).*5, 4"),
        ({"weights": (jnp.zeros((5, 3)), jnp.zeros(4))}, r"\['weights'\]\[1\].*bfloat16.*float32"),
        ({"pair": Pair(Pair(jnp.int8(0), jnp.zeros(2)), [0, 0])}, r"\['pair'\]\.first\.second.*kind is none.*array"),
        ({"weights": (jnp.zeros((5, 3)),)}, r"has a leaf \['weights'\]\[1\]"),
        ({"more": 1}, r"no leaf \['more'\]"),
        ({"key": jnp.zeros(2, jnp.uint32)}, r"\['key'\].*kind is key.*array"),
        ({"keys": jax.random.split(jax.random.key(0), 3)}, r"\['keys'\].*dtype is key<rbg>.*key<fry>"),
        ({"python": (True, 7.0, 0.1, "", ())}, r"\['python'\]\[1\].*int.*float"),
    ],
)
def test_another_structure_is_an_error_that_names_the_leaf(run, change, message):
    checkpoints.save(run, 1, make_state(), {})
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(run, make_state() | change)


def test_a_leaf_that_cannot_be_saved_is_named(run):
    for bad in (object(), np.array(["x"]), {1, 2}):
        with pytest.raises(TypeError, match=r"\['a'\]\[1\]"):
            checkpoints.save(run, 0, {"a": (1, bad)}, {})
    assert checkpoints.steps(run) == []


def test_the_newest_and_the_best_stay(run):
    for step in range(6):
        checkpoints.save(run, step, {"a": step}, {}, keep=2, best=step in (0, 2))
    assert checkpoints.steps(run) == [2, 4, 5]
    assert checkpoints.restore(run, {"a": 0}).state == {"a": 5}
    assert checkpoints.restore(run, {"a": 0}, best=True).state == {"a": 2}
    checkpoints.save(run, 6, {"a": 6}, {}, keep=1, best=True)
    assert checkpoints.steps(run) == [6]
    for step in (6, 3, -1):
        with pytest.raises(ValueError, match=f"step {step} is not above"):
            checkpoints.save(run, step, {"a": 0}, {})
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoints.save(run, 7, {"a": 0}, {}, keep=0)


@pytest.mark.parametrize("damage", ["empty", "about", "arrays"])
def test_an_unreadable_checkpoint_is_passed_over(run, damage, caplog):
    for step in range(2):
        state = {"a": jnp.arange(3) + step}
        checkpoints.commit(run, step, state, [{"duel": step}], {"iteration": step})
    path = run.checkpoints / "00000001"
    shutil.rmtree(path if damage == "empty" else path / damage)
    path.mkdir(exist_ok=True)
    restored = checkpoints.resume(run, {"a": jnp.arange(3)})
    assert restored.step == 0 and restored.state["a"].tolist() == [0, 1, 2]
    assert "00000001 cannot be read" in caplog.text
    assert records.read(run.duels) == [{"duel": 0}] and records.read(run.metrics) == [{"iteration": 0}]
    assert (run.checkpoints / "00000001.unreadable").is_dir()
    checkpoints.commit(run, 1, {"a": jnp.arange(3)}, [], {"iteration": 1})
    assert checkpoints.steps(run) == [0, 1]


def test_no_readable_checkpoint_is_an_error_and_cuts_nothing(run):
    checkpoints.commit(run, 0, {"a": 1}, [{"duel": 0}], {"iteration": 0})
    shutil.rmtree(run.checkpoints / "00000000" / "about")
    with pytest.raises(OSError, match="no checkpoint in .* can be read"):
        checkpoints.resume(run, {"a": 1})
    assert records.read(run.duels) == [{"duel": 0}]


def test_resume_cuts_off_what_has_no_checkpoint(run):
    run.duels.write_bytes(b'{"torn')
    assert checkpoints.resume(run, {"a": 1}) is None
    assert run.duels.stat().st_size == 0
    checkpoints.commit(run, 0, {"a": 1}, [{"duel": 0}], {"iteration": 0})
    records.append(run.duels, [{"duel": 1}])
    records.append(run.metrics, [{"iteration": 1}])
    (run.checkpoints / "00000001.orbax-checkpoint-tmp").mkdir()
    assert checkpoints.resume(run, {"a": 0}).positions == {
        "duels.jsonl": len('{"duel": 0}\n'),
        "metrics.jsonl": len('{"iteration": 0}\n'),
    }
    assert records.read(run.duels) == [{"duel": 0}] and records.read(run.metrics) == [{"iteration": 0}]
    assert [entry.name for entry in run.checkpoints.iterdir()] == ["00000000"]
    run.duels.unlink()
    with pytest.raises(ValueError, match="rows were lost"):
        checkpoints.resume(run, {"a": 0})


def test_no_room_is_named(run, monkeypatch):
    usage = shutil.disk_usage(run.path)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OSError, match=f"{run.path}/checkpoints needs .* only 1000 bytes are free"):
        checkpoints.save(run, 0, {"a": jnp.zeros(3)}, {})


def test_saving_is_quick_and_quiet(run, capfd, caplog):
    state = {f"layer_{index}": jnp.ones((64, 256)) for index in range(30)}  # 2 MB, as the toy pool
    times = []
    with caplog.at_level(logging.INFO, logger="absl"):
        for step in range(4):
            start = time.perf_counter()
            checkpoints.save(run, step, state, {})
            times.append(time.perf_counter() - start)
    assert min(times) < 0.3
    assert capfd.readouterr() == ("", "") and caplog.text == ""


NUM_STEPS = 25


def _work(path, kill_at=None):
    command = [sys.executable, killed.__file__, str(path), str(NUM_STEPS), *([str(kill_at)] if kill_at else [])]
    root = os.path.dirname(os.path.dirname(os.path.dirname(killed.__file__)))
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root})


def _outcome(path):
    with folder.open_(path, {"seed": 0}) as run:
        restored = checkpoints.restore(run, killed.start())
        return restored.step, jax.tree.map(bits, restored.state), run.duels.read_bytes(), run.metrics.read_bytes()


def test_a_killed_run_ends_as_an_uninterrupted_one(tmp_path):
    killed.main(tmp_path / "whole", NUM_STEPS)
    assert len(records.read(tmp_path / "whole" / "duels.jsonl")) == 3 * NUM_STEPS
    rng, num_killed = random.Random(0), 0
    # Kills at random moments, then at chosen calls of the file system in the middle of a commit.
    for kill_at in (None, None, 2, 9, 14):
        process = _work(tmp_path / "cut", kill_at)
        try:
            assert process.stdout.readline() == b"ready\n"
            if kill_at is None:
                time.sleep(rng.uniform(0.0, 0.35))
                process.kill()
            num_killed += process.wait(timeout=60) == -signal.SIGKILL
        finally:
            process.kill()
            process.stdout.close()
    assert num_killed >= 3  # a fast machine may have come to the end before a kill
    killed.main(tmp_path / "cut", NUM_STEPS)
    assert _outcome(tmp_path / "cut") == _outcome(tmp_path / "whole")

import errno
import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackalign.runs import records

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=4))
def test_rows_read_back_as_they_were(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    assert records.append(path, rows) == path.stat().st_size
    assert records.read(path) == rows


@settings(deadline=None, max_examples=60)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float32_keeps_its_bits(value):
    row = json.loads(records.dumps({"numpy": np.float32(value), "jax": jnp.asarray([value], jnp.float32)}))
    assert np.float32(row["numpy"]).tobytes() == np.float32(value).tobytes()
    assert np.float32(row["jax"][0]).tobytes() == np.asarray(jnp.float32(value)).tobytes()


def test_arrays_and_scalars_become_plain():
    row = {"a": np.arange(3), "b": jnp.bfloat16(1.5), "c": (np.bool_(True), np.int64(7)), "d": np.array(["x"])}
    assert records.plain(row) == {"a": [0, 1, 2], "b": 1.5, "c": [True, 7], "d": ["x"]}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan"), jnp.inf])
def test_a_number_that_is_not_finite_is_refused_by_name(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    records.append(path, [{"ok": 1}])
    with pytest.raises(ValueError, match=r"metrics\[1\]\.loss\.mean is"):
        records.append(path, [{"ok": 2}, {"loss": {"mean": bad}}])
    with pytest.raises(ValueError, match=r"metrics\[0\]\.p\[1\]\[0\] is"):
        records.append(path, [{"p": np.array([[0.0], [bad]])}])
    assert records.read(path) == [{"ok": 1}]


def test_values_without_an_exact_form_are_refused_by_name():
    with pytest.raises(TypeError, match=r"row\.a has the key 3"):
        records.dumps({"a": {3: 1}})
    for bad in ({1, 2}, pathlib.Path("x"), np.array([1j]), object()):
        with pytest.raises(TypeError, match=r"row\.a"):
            records.dumps({"a": bad})


def test_truncate_cuts_back_and_refuses_lost_rows(tmp_path):
    path = tmp_path / "duels.jsonl"
    records.truncate(path, 0)  # no file is an empty file
    assert not path.exists()
    size = records.append(path, [{"a": 1}])
    records.append(path, [{"a": 2}])
    with open(path, "ab") as file:
        file.write(b'{"a": 3')
    records.truncate(path, size)
    assert path.stat().st_size == size
    assert records.read(path) == [{"a": 1}]
    with pytest.raises(ValueError, match="rows were lost"):
        records.truncate(path, size + 1)
    assert path.stat().st_size == size


def test_a_torn_line_is_dropped_only_when_told(tmp_path):
    path = tmp_path / "duels.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    with pytest.raises(ValueError, match=r"duels\.jsonl:2: torn"):
        records.read(path)
    assert records.read(path, allow_torn=True) == [{"a": 1}]
    with pytest.raises(ValueError, match="torn line"):
        records.append(path, [{"a": 3}])


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"a": NaN}', b"", b"\xff"])
def test_a_damaged_line_is_an_error_that_names_it(tmp_path, line):
    path = tmp_path / "duels.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"duels\.jsonl:2: "):
        records.read(path, allow_torn=True)


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_names_the_file():
    with pytest.raises(OSError, match="cannot append to /dev/full") as caught:
        records.append("/dev/full", [{"a": 1}])
    assert caught.value.errno == errno.ENOSPC


def test_a_failed_append_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "duels.jsonl"
    records.append(path, [{"a": 1}])

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "fsync", full)
        with pytest.raises(OSError, match="duels.jsonl: No space left"):
            records.append(path, [{"a": 2}])
    assert records.read(path) == [{"a": 1}]


def test_write_atomic_replaces_or_leaves_alone(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    records.write_atomic(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(records.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(OSError, match=f"cannot write config.json in {tmp_path}: broken"):
            records.write_atomic(path, "new")
    assert path.read_text() == "old"
    records.write_atomic(path, "new")
    assert path.read_text() == "new"


def test_write_makes_a_whole_file(tmp_path):
    path = tmp_path / "instructions.jsonl"
    for _ in range(2):  # writing it again does not double the rows
        records.write(path, [{"id": "a"}, {"id": "b"}])
    assert records.read(path) == [{"id": "a"}, {"id": "b"}]

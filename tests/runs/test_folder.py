import errno
import json
import subprocess
import sys

import numpy as np
import pytest

from stackalign.runs import folder


def test_create_records_the_configuration_and_the_environment(tmp_path):
    with folder.create(tmp_path / "a" / "run", {"seed": np.int64(3), "sizes": (1, 2)}) as run:
        config = json.loads(run.config.read_text())
    assert config.pop("environment").keys() == {"stackalign", "jax", "python", "platform", "backend"}
    assert config == {"seed": 3, "sizes": [1, 2]}


def test_create_refuses_a_folder_that_holds_something(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"pass --resume or another --run_dir"):
        folder.create(tmp_path, {"seed": 0})
    assert not (tmp_path / "config.json").exists()
    (tmp_path / "note.txt").unlink()
    folder.create(tmp_path, {"seed": 0}).close()  # what the refused call left does not count
    with pytest.raises(FileExistsError):
        folder.create(tmp_path, {"seed": 0})


def test_open_names_every_field_that_differs(tmp_path):
    config = {"seed": 0, "run_dir": "a", "resume": False, "dpo": {"beta": 0.1, "lr": 1e-6}, "old": [1]}
    folder.create(tmp_path, config).close()
    folder.open_(tmp_path, config | {"run_dir": "b", "resume": True}).close()
    changed = {"seed": 1, "dpo": {"beta": 0.1, "lr": 2e-6}, "new": None}
    with pytest.raises(ValueError) as caught:
        folder.open_(tmp_path, changed)
    assert str(caught.value).splitlines()[1:] == [
        "  seed: 0 in the folder, 1 given now",
        "  dpo.lr: 1e-06 in the folder, 2e-06 given now",
        "  old: [1] in the folder, not given now",
        "  new: not in the folder, null given now",
    ]
    with pytest.raises(ValueError, match="seed: 0"):
        folder.open_(tmp_path, config | {"seed": 1}, free=frozenset({"dpo"}))
    folder.open_(tmp_path, config | {"seed": 1}, free=folder.FREE | {"seed"}).close()


def test_open_needs_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="drop --resume"):
        folder.open_(tmp_path / "absent", {})


def test_environment_is_a_reserved_field(tmp_path):
    with pytest.raises(ValueError, match="environment"):
        folder.create(tmp_path, {"environment": 1})


def test_one_process_writes_a_run(tmp_path):
    code = (
        "import sys; from stackalign.runs import folder\n"
        "try: folder.open_(sys.argv[1], {'seed': 0})\n"
        "except BlockingIOError as error: print(error.strerror)\n"
        "else: print('opened')"
    )

    def other():
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout.strip()

    run = folder.create(tmp_path, {"seed": 0})
    assert other() == f"another process is writing the run in {tmp_path}"
    with pytest.raises(BlockingIOError):
        folder.open_(tmp_path, {"seed": 0})
    run.close()
    assert other() == "opened"
    folder.open_(tmp_path, {"seed": 0}).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"cannot write the run folder {tmp_path}/file/run: Not a directory"):
        folder.create(tmp_path / "file" / "run", {})


def test_require_free(tmp_path):
    folder.require_free(tmp_path / "not" / "yet", 1)
    with pytest.raises(OSError, match=f"{tmp_path}/not needs 1048576 GiB, but only") as caught:
        folder.require_free(tmp_path / "not", 2**50)
    assert caught.value.errno == errno.ENOSPC

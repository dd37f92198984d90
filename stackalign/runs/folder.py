"""The folder of one run: its paths, its configuration, and a lock so that one process writes it."""

import dataclasses
import errno
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
from collections.abc import Mapping
from typing import Any, BinaryIO

import jax

from stackalign.runs import records

CONFIG = "config.json"
DUELS = "duels.jsonl"
METRICS = "metrics.jsonl"
INSTRUCTIONS = "instructions.jsonl"
JUDGE_CHECK = "judge_check.json"
CHECKPOINTS = "checkpoints"
REPORT = "report"
RESULTS = "results.json"

ENVIRONMENT = "environment"
FREE = frozenset({"run_dir", "resume", "command"})
"""Fields of a configuration that may differ when a run is resumed."""

_LOCK = ".lock"
_SCAFFOLD = frozenset({_LOCK, f".{CONFIG}.part"})  # what a kill during `create` may leave: still an empty folder


@dataclasses.dataclass(frozen=True)
class Run:
    """An open run folder. The lock is held until `close`, or until the process ends in whatever way."""

    path: pathlib.Path
    lock: BinaryIO = dataclasses.field(repr=False, compare=False)

    @property
    def config(self) -> pathlib.Path:
        """The configuration and the environment, written once."""
        return self.path / CONFIG

    @property
    def duels(self) -> pathlib.Path:
        """One line a duel."""
        return self.path / DUELS

    @property
    def metrics(self) -> pathlib.Path:
        """One line an iteration."""
        return self.path / METRICS

    @property
    def instructions(self) -> pathlib.Path:
        """One line an instruction, in the order of the leader's arms."""
        return self.path / INSTRUCTIONS

    @property
    def judge_check(self) -> pathlib.Path:
        """Accuracy of the judges on pairs with a known right answer (optional)."""
        return self.path / JUDGE_CHECK

    @property
    def checkpoints(self) -> pathlib.Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def report(self) -> pathlib.Path:
        """Folder of the summary and the figures."""
        return self.path / REPORT

    def close(self) -> None:
        """Lets go of the lock."""
        self.lock.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def environment() -> dict[str, str]:
    """Versions and machine kind that a run is recorded with."""
    try:
        version = importlib.metadata.version("stackalign")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "stackalign": version,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
    }


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
        number /= 1024
    raise AssertionError


def require_free(path: str | os.PathLike[str], num_bytes: int) -> None:
    """Checks that the file system of a folder (or of its nearest existing parent) has room.

    Raises:
      OSError: fewer than `num_bytes` are free (errno ENOSPC); the message names the folder.
    """
    path = pathlib.Path(path).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise OSError(errno.ENOSPC, f"{path} needs {_size(num_bytes)}, but only {_size(free)} are free there")


def _locked(path: pathlib.Path) -> BinaryIO:
    lock = open(path / _LOCK, "ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if isinstance(error, BlockingIOError):
            raise BlockingIOError(error.errno, f"another process is writing the run in {path}") from error
        raise
    return lock


def _recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    if ENVIRONMENT in config:
        raise ValueError(f"the configuration has a field {ENVIRONMENT!r}: that name is taken by the run folder")
    return records.plain(config, "config")


def create(path: str | os.PathLike[str], config: Mapping[str, Any]) -> Run:
    """Makes the folder of a new run, locks it and records the configuration.

    Args:
      path: a folder that does not exist or is empty.
      config: what decides the run, in JSON's types (see `records.plain`); `environment` is added to it.

    Raises:
      FileExistsError: the folder holds something.
      BlockingIOError: another process is writing it.
      OSError: it cannot be made or written; the message names it.
      ValueError, TypeError: the configuration has no exact JSON form.
    """
    path, config = pathlib.Path(path), _recorded(config)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(error.errno, f"cannot write the run folder {path}: {error.strerror}") from error
    try:
        if {entry.name for entry in path.iterdir()} - _SCAFFOLD:
            raise FileExistsError(errno.EEXIST, f"{path} is not empty: pass --resume or another --run_dir")
        text = json.dumps(config | {ENVIRONMENT: environment()}, indent=2, allow_nan=False)
        records.write_atomic(path / CONFIG, text + "\n")
    except BaseException:
        lock.close()
        raise
    return Run(path, lock)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _differences(saved: Any, given: Any, name: str) -> list[str]:
    if isinstance(saved, dict) and isinstance(given, dict):
        found = []
        for key in [*saved, *(key for key in given if key not in saved)]:
            field = f"{name}.{key}" if name else key
            if key not in given:
                found.append(f"{field}: {_show(saved[key])} in the folder, not given now")
            elif key not in saved:
                found.append(f"{field}: not in the folder, {_show(given[key])} given now")
            else:
                found += _differences(saved[key], given[key], field)
        return found
    return [] if saved == given else [f"{name}: {_show(saved)} in the folder, {_show(given)} given now"]


def open_(path: str | os.PathLike[str], config: Mapping[str, Any], *, free: frozenset[str] = FREE) -> Run:
    """Opens the folder of a run to go on with it, and locks it.

    Args:
      path: a folder that `create` made.
      config: the configuration to go on with; it must be the recorded one. The environment is not compared.
      free: top-level fields that may differ.

    Raises:
      FileNotFoundError: there is no run in the folder.
      BlockingIOError: another process is writing it.
      ValueError: the configuration differs; the message names every field that does.
    """
    path, config = pathlib.Path(path), _recorded(config)
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(errno.ENOENT, f"{path} holds no {CONFIG}: there is no run to resume, drop --resume")
    try:
        lock = _locked(path)
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(error.errno, f"cannot write the run folder {path}: {error.strerror}") from error
    try:
        saved = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        compared = [{key: value for key, value in one.items() if key not in free} for one in (saved, config)]
        compared[0].pop(ENVIRONMENT, None)
        found = _differences(*compared, "")
        if found:
            lines = "".join(f"\n  {line}" for line in found)
            raise ValueError(f"{path} was started with another configuration:{lines}")
    except BaseException:
        lock.close()
        raise
    return Run(path, lock)

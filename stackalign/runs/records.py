"""JSON on disk: append-only lines that survive a kill, and whole files written in one step."""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def plain(value: Any, name: str = "value") -> Any:
    """Turns a record into what JSON holds exactly.

    Args:
      value: None, bool, int, float, str, mappings with string keys, lists, tuples, and NumPy or JAX scalars and
        arrays of them. Floats narrower than 64 bits widen without loss, so that they read back bit for bit.
      name: what the value is called in an error message.

    Returns:
      The same value made of dict, list, str, int, float, bool and None.

    Raises:
      ValueError: a number is NaN or infinite; the message names the field, as in `metrics.loss.mean`.
      TypeError: a value or a key has no exact JSON form; the message names the field.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}: only finite numbers are recorded; write None for a missing one")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r} ({type(key).__name__}): keys must be strings")
        return {key: plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind in "biuU":
            return array.tolist()
        try:  # bfloat16 and its kin are of kind "V"; they widen exactly
            return plain(array.astype(np.float64, casting="safe").tolist(), name)
        except TypeError:
            raise TypeError(f"{name} is an array of {array.dtype}, which has no exact JSON form") from None
    raise TypeError(f"{name} is a {type(value).__name__}, which has no exact JSON form")


def dumps(row: Any, name: str = "row") -> str:
    """One line of JSON (ASCII, so that any text, unpaired surrogates included, reads back as it was)."""
    return json.dumps(plain(row, name), allow_nan=False)


def append(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> int:
    """Appends rows as JSON lines: one write, then flush and fsync. No row is written if any has no JSON form.

    Args:
      path: a JSONL file; it is made if it does not exist.
      rows: records, see `plain`.

    Returns:
      The file's size in bytes after the write.

    Raises:
      ValueError, TypeError: see `plain`; or the file ends in a torn line.
      OSError: the write failed (for example a full disk); the file is cut back to its size before.
    """
    path = pathlib.Path(path)
    data = "".join(dumps(row, f"{path.stem}[{index}]") + "\n" for index, row in enumerate(rows)).encode("ascii")
    try:
        with open(path, "ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    raise ValueError(f"{path} ends in a torn line: cut it back before appending")
            try:
                rest = memoryview(data)
                while rest:  # a raw write may be short, in practice only when the disk fills up
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise
    except OSError as error:
        raise OSError(error.errno, f"cannot append to {path}: {error.strerror}") from error
    return size + len(data)


def truncate(path: str | os.PathLike[str], size: int) -> None:
    """Cuts a file back to its first `size` bytes; a file that does not exist counts as empty.

    Raises:
      ValueError: the file is shorter than `size`, so that rows were lost.
    """
    path = pathlib.Path(path)
    actual = path.stat().st_size if path.exists() else 0
    if actual < size:
        raise ValueError(f"{path} has {actual} bytes where the checkpoint knows of {size}: rows were lost")
    if actual > size:
        with open(path, "rb+") as file:
            file.truncate(size)
            os.fsync(file.fileno())


def _not_finite(token: str) -> None:
    raise ValueError(f"{token} is not JSON")


def read(path: str | os.PathLike[str], *, allow_torn: bool = False) -> list[dict[str, Any]]:
    """Reads every row of a JSONL file.

    Args:
      path: the file.
      allow_torn: drop a last line that has no line end (a writer was killed) instead of refusing it.

    Raises:
      ValueError: a line is no JSON object, or the last one is torn; names the file and the line.
      FileNotFoundError: there is no such file.
    """
    *lines, rest = pathlib.Path(path).read_bytes().split(b"\n")
    if rest and not allow_torn:
        raise ValueError(f"{path}:{len(lines) + 1}: torn line (no line end)")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_constant=_not_finite)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not an object")
        rows.append(row)
    return rows


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replaces a whole file in one step: a reader sees the old content or the new one, also after a kill.

    Raises:
      OSError: the folder cannot be written; the message names it.
    """
    path = pathlib.Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path.name} in {path.parent}: {error.strerror}") from error


def write(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a whole JSONL file in one step (`write_atomic`), for rows that are known at the start."""
    stem = pathlib.Path(path).stem
    write_atomic(path, "".join(dumps(row, f"{stem}[{index}]") + "\n" for index, row in enumerate(rows)))

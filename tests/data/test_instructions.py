import json

import hypothesis
import pytest
from hypothesis import strategies as st

from stackalign.data import Instruction, draw, read, split, write_jsonl

GOOD = {"id": "a", "prompt": "What is 2 + 2?", "verifier": {"kind": "integer", "value": 4}}


def write(path, *lines, encoding="utf-8"):
    path.write_bytes("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode(encoding))
    return path


@pytest.mark.parametrize(
    "line, parts",
    [
        ("{", ["broken JSON"]),
        ('{"id": "b", "prompt": NaN}', ["broken JSON", "NaN"]),
        ("[" * 100_000, ["nested too deeply"]),
        ("[1]", ["JSON object", "list"]),
        ({"id": "b"}, ["'prompt'", "missing"]),
        ({"id": "b", "prompt": None}, ["'prompt'", "missing"]),
        ({"id": "b", "prompt": ""}, ["'prompt'", "empty"]),
        ({"id": "b", "prompt": " \t\n"}, ["'prompt'", "whitespace"]),
        ({"id": "b", "prompt": 5}, ["'prompt'", "string"]),
        ({"prompt": "p"}, ["'id'", "missing"]),
        ({"id": 3, "prompt": "p"}, ["'id'", "string", "double quotes"]),
        ({"id": " ", "prompt": "p"}, ["'id'", "empty"]),
        ({"id": "a", "prompt": "p"}, ["'id'", "line 1", "'a'"]),
        ({"id": "b", "prompt": "\ud800"}, ["'prompt'", "surrogate"]),
        ({"id": "b", "prompt": "p", "answer": 4}, ["'answer'", "string"]),
        ({"id": "b", "prompt": "p", "topic": []}, ["'topic'", "string"]),
        ({"id": "b", "prompt": "p", "difficulty": -1}, ["'difficulty'"]),
        ({"id": "b", "prompt": "p", "difficulty": True}, ["'difficulty'"]),
        ({"id": "b", "prompt": "p", "verifier": "exact"}, ["'verifier'", "object"]),
        ({"id": "b", "prompt": "p", "verifier": {}}, ["'verifier'", "kind", "integer"]),
        ({"id": "b", "prompt": "p", "verifier": {"kind": "psychic"}}, ["'verifier'", "'psychic'", "integer"]),
        ({"id": "b", "prompt": "p", "verifier": {"kind": ["integer"]}}, ["'verifier'", "unknown"]),
        ({"id": "b", "prompt": "p", "verifier": {"kind": "integer"}}, ["'verifier'", "'value'"]),
        ({"id": "b", "prompt": "p", "verifier": {"kind": "integer", "value": "4"}}, ["'value'", "an integer"]),
        ({"id": "b", "prompt": "p", "verifier": {"kind": "integer", "value": 4, "x": 1}}, ["'x'"]),
        ({"id": "b", "prompt": "p", "verifier": {"kind": "exact"}}, ["'verifier'", "'answer'"]),
        (
            {"id": "b", "prompt": "p", "verifier": {"kind": "words", "relation": "roughly", "count": 3}},
            ["'relation'", "less than", "'roughly'"],
        ),
        (
            {"id": "b", "prompt": "p", "verifier": {"kind": "all", "checks": [{"kind": "bullets", "count": 0}]}},
            ["'verifier'", "'count'"],
        ),
    ],
)
def test_bad_lines_name_file_line_field_and_remedy(tmp_path, line, parts):
    path = write(tmp_path / "pool.jsonl", GOOD, "", line)
    with pytest.raises(ValueError) as error:
        read(path)
    for part in [str(path), "line 3", *parts]:
        assert part in str(error.value)


def test_tolerates_byte_order_mark_blank_lines_line_ends_and_further_fields(tmp_path):
    line = json.dumps(
        GOOD | {"prompt": "a\u2028b", "source": "web", "topic": None, "difficulty": None}, ensure_ascii=False
    )
    path = tmp_path / "pool.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\r\n" + line.encode() + b"\r\n\r\n   \n")
    assert read(path) == (Instruction("a", "a\u2028b", None, {"kind": "integer", "value": 4}),)


def test_files_that_hold_no_instructions(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        read(tmp_path / "nowhere.jsonl")
    for text in ("", "\n \n", "\ufeff"):
        with pytest.raises(ValueError, match="no rows"):
            read(write(tmp_path / "empty.jsonl", text))
    with pytest.raises(ValueError, match="line 1.*UTF-8"):
        read(write(tmp_path / "latin.jsonl", '{"id": "é"}', encoding="latin-1"))
    with pytest.raises(ValueError, match="line 1.*UTF-8"):
        read(write(tmp_path / "utf16.jsonl", GOOD, encoding="utf-16"))


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)
instructions = st.lists(
    st.builds(
        Instruction,
        id=text,
        prompt=text,
        answer=st.none() | text,
        verifier=st.none()
        | st.builds(lambda n: {"kind": "all", "checks": [{"kind": "bullets", "count": n}]}, st.integers(1, 9)),
        topic=st.just("") | text,
        difficulty=st.integers(0, 5),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda instruction: instruction.id,
)


@hypothesis.given(instructions)
@hypothesis.settings(deadline=None, max_examples=50)
def test_round_trip(tmp_path_factory, pool):
    path = tmp_path_factory.mktemp("pool") / "deep" / "pool.jsonl"
    write_jsonl(path, pool)
    assert read(path) == tuple(pool)


def pool_of(size):
    return tuple(Instruction(str(i), f"prompt {i}") for i in range(size))


@hypothesis.given(st.integers(2, 60), st.integers(0, 1000), st.floats(0.01, 0.99))
@hypothesis.settings(deadline=None, max_examples=60)
def test_split_is_a_partition_with_both_parts(size, seed, fraction):
    everything = pool_of(size)
    pool, validation = split(everything, seed, fraction)
    assert pool and validation and not set(pool) & set(validation)
    assert sorted(pool + validation, key=lambda i: int(i.id)) == list(everything)
    assert len(pool) == min(max(round(size * fraction), 1), size - 1)
    assert split(everything, seed, fraction) == (pool, validation)


def test_split_defaults_and_errors():
    pool, validation = split(pool_of(100), 3)
    assert len(pool) == 80 and split(pool_of(100), 4)[1] != validation
    with pytest.raises(ValueError, match="at least 2 instructions, got 1"):
        split(pool_of(1), 0)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="fraction"):
            split(pool_of(5), 0, fraction)


@hypothesis.given(st.integers(1, 40), st.integers(0, 1000), st.data())
@hypothesis.settings(deadline=None, max_examples=40)
def test_draw_is_without_replacement(size, seed, data):
    pool = pool_of(size)
    count = data.draw(st.integers(1, size))
    drawn = draw(pool, seed, count)
    assert len(set(drawn)) == count and set(drawn) <= set(pool)
    assert draw(pool, seed, size)[:count] == drawn


def test_draw_of_too_many_names_both_numbers():
    with pytest.raises(ValueError, match="65.*64"):
        draw(pool_of(64), 0, 65)
    with pytest.raises(ValueError, match="0"):
        draw(pool_of(64), 0, 0)

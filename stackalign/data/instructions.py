"""Instruction pools: the record, its JSONL form, splits and draws."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stackalign.data import verifiers


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a pool.

    Attributes:
      id: unique within a pool.
      prompt: what the models are asked.
      answer: a right answer, if there is one; `verify` compares with it when there is no verifier.
      verifier: a JSON object `{"kind": ..., <parameters>}` (`verifiers`), or None.
      topic: what the instruction is about; free text.
      difficulty: 0 = not graded; larger is harder.
    """

    id: str
    prompt: str
    answer: str | None = None
    verifier: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    topic: str = ""
    difficulty: int = 0


def read_jsonl(path: str | os.PathLike) -> tuple[Instruction, ...]:
    """Reads one instruction a line.

    `id` and `prompt` are required; `answer`, `verifier`, `topic` and `difficulty` are optional (absent and null mean
    the default); other fields are ignored, so that a data set's own columns may stay. A byte-order mark and blank
    lines are tolerated.

    Raises:
      FileNotFoundError: no such file.
      ValueError: naming file, line, field and remedy: no instructions at all, bytes that are not UTF-8, broken JSON,
        a line that is not an object, a missing, empty or mistyped field, a repeated id, an unknown verifier kind or
        bad verifier parameters.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such instruction file; give the path of a JSONL file with one instruction a line"
        )
    instructions, line_of_id = [], {}
    # Split on the newline byte alone: a prompt may hold U+2028 and other characters that `splitlines` would break at.
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{path}, line {number}"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8"
            ) from error
        if not line.strip():
            continue
        instruction = _parse(line, where)
        if instruction.id in line_of_id:
            raise ValueError(
                f"{where}: field 'id' repeats {instruction.id!r} of line {line_of_id[instruction.id]}; "
                "give every instruction its own id"
            )
        line_of_id[instruction.id] = number
        instructions.append(instruction)
    if not instructions:
        raise ValueError(
            f'{path}: no instructions in the file; write one JSON object a line, such as {{"id": "1", "prompt": "..."}}'
        )
    return tuple(instructions)


def write_jsonl(path: str | os.PathLike, instructions: Iterable[Instruction]) -> None:
    """Writes one instruction a line, fields at their default left out; `read_jsonl` gives back equal records.

    Missing folders are made.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    defaults = {field.name: field.default for field in dataclasses.fields(Instruction)}
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for instruction in instructions:
            row = {
                name: getattr(instruction, name)
                for name, default in defaults.items()
                if getattr(instruction, name) != default
            }
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False, default=dict) + "\n")


def split(
    instructions: Sequence[Instruction], seed: int, fraction: float = 0.8
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Splits into `(pool, validation)`: disjoint, together everything, both in the given order and never empty.

    Args:
      instructions: at least two, `[N]`.
      seed: non-negative; the same seed gives the same split on every machine.
      fraction: the pool's share, in (0, 1) (the paper's 80/20); the pool has `round(N * fraction)` instructions, at
        least 1 and at most N - 1.

    Raises:
      ValueError: fewer than two instructions, or `fraction` outside (0, 1).
    """
    if len(instructions) < 2:
        raise ValueError(f"a split into pool and validation needs at least 2 instructions, got {len(instructions)}")
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie strictly between 0 and 1, got {fraction}")
    size = min(max(round(len(instructions) * fraction), 1), len(instructions) - 1)
    chosen = set(np.random.default_rng([seed, 0]).permutation(len(instructions))[:size].tolist())
    pool = tuple(instruction for i, instruction in enumerate(instructions) if i in chosen)
    return pool, tuple(instruction for i, instruction in enumerate(instructions) if i not in chosen)


def draw(pool: Sequence[Instruction], seed: int, count: int) -> tuple[Instruction, ...]:
    """Draws `count` instructions without replacement, in random order.

    A smaller count of the same seed gives a prefix of a larger one.

    Raises:
      ValueError: `count` is below 1 or above `len(pool)`.
    """
    if not 1 <= count <= len(pool):
        raise ValueError(
            f"cannot draw {count} instructions without replacement from a pool of {len(pool)}; ask for 1 to {len(pool)}"
        )
    order = np.random.default_rng([seed, 1]).permutation(len(pool))[:count]
    return tuple(pool[i] for i in order.tolist())


def _parse(line: str, where: str) -> Instruction:
    try:
        row = json.loads(line, parse_constant=_not_json)
    except RecursionError as error:
        raise ValueError(f"{where}: JSON nested too deeply; write one flat JSON object a line") from error
    except ValueError as error:
        raise ValueError(f"{where}: broken JSON ({error}); write one complete JSON object a line") from error
    if not isinstance(row, dict):
        raise ValueError(
            f'{where}: a JSON object is wanted, got {type(row).__name__}; write {{"id": "...", "prompt": "..."}}'
        )
    for name in ("id", "prompt"):
        if row.get(name) is None:
            raise ValueError(f"{where}: field {name!r} is missing; add a non-empty string")
    for name in ("id", "prompt", "answer", "topic"):
        value = row.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{where}: field {name!r} must be a string, got {value!r}; put it in double quotes")
        if name in ("id", "prompt") and not value.strip():
            raise ValueError(f"{where}: field {name!r} is empty or only whitespace; give it text")
        if value is not None and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(
                f"{where}: field {name!r} holds half of a surrogate pair, which is not text; write the whole character"
            )
    difficulty = row.get("difficulty") if row.get("difficulty") is not None else 0
    if isinstance(difficulty, bool) or not isinstance(difficulty, int) or difficulty < 0:
        raise ValueError(
            f"{where}: field 'difficulty' must be a whole number of at least 0, got {difficulty!r}; "
            "leave it out if not graded"
        )
    verifier = row.get("verifier")
    if verifier is not None:
        try:
            verifiers.validate(verifier, row.get("answer"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: field 'verifier': {error}") from error
    return Instruction(row["id"], row["prompt"], row.get("answer"), verifier, row.get("topic") or "", difficulty)


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

"""Instruction pools: the record, its JSONL form, splits and draws."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stackalign.data import readers, verifiers


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


def read(source: str | os.PathLike) -> tuple[Instruction, ...]:
    """Reads instructions from a file or data set (`readers.read` says how one is named), one a row.

    `id` and `prompt` are required; `answer`, `verifier`, `topic` and `difficulty` are optional (absent, null and empty
    mean the default); other fields are ignored, so that a data set's own columns may stay. Where a source holds text
    only, as CSV does, a verifier is the text of its JSON object and a difficulty the text of a number.

    Raises:
      FileNotFoundError: no such file.
      ValueError: naming source, row, field and remedy: no instructions at all, a broken row, a missing, empty or
        mistyped field, a repeated id, an unknown verifier kind or bad verifier parameters.
    """
    instructions, row_of_id = [], {}
    for number, (where, fields) in enumerate(readers.read(source), start=1):
        instruction = _parse(fields, where)
        if instruction.id in row_of_id:
            raise ValueError(
                f"{where}: field 'id' repeats {instruction.id!r} of {row_of_id[instruction.id]}; "
                "give every instruction its own id"
            )
        row_of_id[instruction.id] = where.removeprefix(f"{source}, ") or f"row {number}"
        instructions.append(instruction)
    return tuple(instructions)


def write_jsonl(path: str | os.PathLike, instructions: Iterable[Instruction]) -> None:
    """Writes one instruction a line, fields at their default left out; `read` gives back equal records.

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


def _parse(fields: Mapping[str, Any], where: str) -> Instruction:
    row = {name: None if value == "" and name not in ("id", "prompt") else value for name, value in fields.items()}
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
    if isinstance(difficulty, str) and difficulty.isdecimal():
        difficulty = int(difficulty)
    if isinstance(difficulty, bool) or not isinstance(difficulty, int) or difficulty < 0:
        raise ValueError(
            f"{where}: field 'difficulty' must be a whole number of at least 0, got {difficulty!r}; "
            "leave it out if not graded"
        )
    verifier = row.get("verifier")
    if verifier is not None:
        try:
            verifier = json.loads(verifier) if isinstance(verifier, str) and verifier.startswith("{") else verifier
            verifiers.validate(verifier, row.get("answer"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: field 'verifier': {error}") from error
    return Instruction(row["id"], row["prompt"], row.get("answer"), verifier, row.get("topic") or "", difficulty)

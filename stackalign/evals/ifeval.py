"""IFEval: whether responses follow verifiable instructions (Zhou et al. 2023), strictly and loosely.

A prompt holds one or more instructions, possibly two of one type. **Strict**: the response itself follows one.
**Loose**: one of eight variants of the response does: as it is, without its first line, without its last line, without
both, and each of these with every asterisk removed. So an instruction that is followed strictly is followed loosely. A
blank text follows nothing. What each instruction means is said in `ifeval_checks`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stackalign.evals import base, statistics
from stackalign.evals.base import Item, Score
from stackalign.evals.ifeval_checks import CHECKS


class Share(NamedTuple):
    """Shares in [0, 1] of `count` instructions that are followed."""

    strict: float
    loose: float
    count: int


class Accuracies(NamedTuple):
    """What `aggregate` reports.

    Attributes:
      strict, loose: prompt-level and instruction-level accuracy with their denominators.
      categories: by the part of the instruction id before the colon ("keywords"), sorted.
      instructions: by instruction id, sorted.
    """

    strict: statistics.FollowingMeans
    loose: statistics.FollowingMeans
    categories: Mapping[str, Share]
    instructions: Mapping[str, Share]


def items(rows: base.Rows, seed: int = 0) -> tuple[Item, ...]:
    """Items of rows with `key`, `prompt`, `instruction_id_list` [I] and `kwargs` [I] of objects.

    A kwarg that is null counts as absent; the seed decides nothing.

    Returns:
      Items with the key as `id`, the prompt as the user's turn, `gold` a tuple of `{"id", "kwargs"}` for each
      instruction, and `facts["categories"]`, one for each instruction.

    Raises:
      ValueError: an unknown instruction id, a kwarg that is missing, unexpected or of no use, or anything else that is
        not as above; names the row.
    """
    del seed
    return base.build(rows, _item)


def score(item: Item, response: str) -> Score:
    """Scores one response.

    Args:
      item: as `read` makes it; `gold` holds at least one instruction.
      response: any text.

    Returns:
      A score of 1 if every instruction is followed strictly, else 0. `parsed` is False for a blank response. `detail`
      has lists with one entry for each instruction, in the item's order: `instructions` (ids), `strict`, `loose`
      (bool).
    """
    variants = _variants(response)
    strict = [_follows(response, instruction) for instruction in item.gold]
    loose = [
        whole or any(_follows(variant, instruction) for variant in variants[1:])
        for whole, instruction in zip(strict, item.gold, strict=True)
    ]
    ids = [instruction["id"] for instruction in item.gold]
    return Score(float(all(strict)), bool(response.strip()), {"instructions": ids, "strict": strict, "loose": loose})


def aggregate(scores: Sequence[Score]) -> Accuracies:
    """Accuracies over the scores of all prompts.

    Raises:
      ValueError: no scores.
    """
    ids = [name for result in scores for name in result.detail["instructions"]]
    prompts = [prompt for prompt, result in enumerate(scores) for _ in result.detail["instructions"]]
    verdicts = {
        way: np.array([verdict for result in scores for verdict in result.detail[way]], bool)
        for way in ("strict", "loose")
    }

    def shares(labels: list[str]) -> dict[str, Share]:
        rows = {label: np.array([other == label for other in labels]) for label in sorted(set(labels))}
        return {
            label: Share(*(float(verdicts[way][row].mean()) for way in ("strict", "loose")), int(row.sum()))
            for label, row in rows.items()
        }

    means = {way: statistics.following_means(verdict, prompts) for way, verdict in verdicts.items()}
    return Accuracies(means["strict"], means["loose"], shares([_category(name) for name in ids]), shares(ids))


def metrics(items: Sequence[Item], scores: Sequence[Score]) -> dict[str, base.Metric]:
    """Prompt-level and instruction-level accuracy, strict and loose; instructions of a prompt are a cluster."""
    counts = [len(result.detail["instructions"]) for result in scores]
    prompts = tuple(item.id for item, count in zip(items, counts, strict=True) for _ in range(count))
    found = {}
    for way in ("strict", "loose"):
        verdicts = [result.detail[way] for result in scores]
        found[f"prompt {way}"] = base.Metric(np.array([float(all(verdict)) for verdict in verdicts]))
        found[f"instruction {way}"] = base.Metric(np.concatenate(verdicts).astype(float), clusters=prompts)
    return found


def _variants(response: str) -> list[str]:
    """The response and what else may follow an instruction loosely, each once; the response is the first."""
    lines = response.split("\n")
    texts = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys(texts + [text.replace("*", "") for text in texts]))


def _follows(text: str, instruction: Mapping[str, Any]) -> bool:
    return bool(text.strip()) and CHECKS[instruction["id"]].follows(text, **instruction["kwargs"])


def _category(instruction_id: str) -> str:
    return instruction_id.partition(":")[0]


def _item(row: Mapping[str, Any], number: int) -> Item:
    del number
    for field in ("key", "prompt", "instruction_id_list", "kwargs"):
        _require(field in row, f"{field} is missing")
    key, prompt, ids, kwargs = row["key"], row["prompt"], row["instruction_id_list"], row["kwargs"]
    _require(isinstance(key, int | str), "key must be a number or a string")
    _require(isinstance(prompt, str) and bool(prompt.strip()), "prompt must be a string that is not blank")
    _require(isinstance(ids, list) and isinstance(kwargs, list), "instruction_id_list and kwargs must be lists")
    _require(len(ids) == len(kwargs) > 0, f"{len(ids)} instructions with {len(kwargs)} kwargs")
    gold = tuple(_instruction(*pair) for pair in zip(ids, kwargs, strict=True))
    categories = [_category(instruction["id"]) for instruction in gold]
    return Item(str(key), ({"role": "user", "content": prompt},), gold, {"categories": categories})


def _instruction(instruction_id: Any, kwargs: Any) -> dict[str, Any]:
    known = isinstance(instruction_id, str) and instruction_id in CHECKS
    _require(known, f"unknown instruction {instruction_id!r}; known are {', '.join(CHECKS)}")
    _require(isinstance(kwargs, dict), f"kwargs of {instruction_id} must be an object")
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    expected = CHECKS[instruction_id].kwargs
    for name in kwargs:
        _require(name in expected, f"{instruction_id} takes no kwarg {name!r}")
    for name, fault in expected.items():
        _require(name in kwargs, f"{instruction_id} needs the kwarg {name!r}")
        problem = fault(kwargs[name])
        _require(problem is None, f"{instruction_id}: {name} {problem}, got {kwargs[name]!r}")
    return {"id": instruction_id, "kwargs": kwargs}


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)

"""Synthetic character skills for pools of very small models.

Six skills over a tiny alphabet: two-digit addition, reversal, sorting, counting, alphabet shift and interleaving.
Every prompt starts with its skill's marker, has at most `MAX_PROMPT` characters and an answer of 1 to `MAX_ANSWER`
characters, so that prompt + separator and answer + end-of-turn fit the 10 + 7 tokens of a toy decoder:

| skill | prompt | answer | distinct sampled prompts |
|---|---|---|---|
| add | `A47+38` | `85` | 8,100 |
| reverse | `Rbadc` (4-5 letters) | `cdab` | 35,280 |
| sort | `Sbadc` (4-5 letters, never sorted already) | `abcd` | 34,818 |
| count | `Ca:abacda` (6 letters) | `3` | 4,685,580 |
| shift | `H2:bcjf` (4-5 letters, by 1-3, cyclic in a-j) | `debh` | 105,840 |
| interleave | `Iace,bdf` (3 + 3 letters) | `abcdef` | 151,200 |

Each skill also has `NUM_VARIANTS` systematic wrong rules, which give a pool its disagreeing members: a model taught
with variant v answers v's way on that skill.
"""

from collections.abc import Callable, Set
from typing import NamedTuple

import numpy as np

from stackalign.data.instructions import Instruction

LETTERS = "abcdefghij"
MARKERS = {"add": "A", "reverse": "R", "sort": "S", "count": "C", "shift": "H", "interleave": "I"}
SKILLS: tuple[str, ...] = tuple(MARKERS)
ALPHABET = "0123456789" + LETTERS + "+,:" + "".join(sorted(MARKERS.values()))
MAX_PROMPT = 9
MAX_ANSWER = 6
NUM_VARIANTS = 6

_COUNT_LENGTH = 6
_SKILL_OF_MARKER = {marker: skill for skill, marker in MARKERS.items()}


class Parsed(NamedTuple):
    """A prompt taken apart: `skill` and that skill's arguments (strings and integers)."""

    skill: str
    arguments: tuple


def parse(prompt: str) -> Parsed:
    """Takes a prompt apart.

    Args:
      prompt: a prompt of one of the skills, e.g. `"A47+38"`.

    Returns:
      `Parsed("add", (47, 38))`; reverse and sort `(word,)`; count `(letter, word)`; shift `(amount, word)`;
      interleave `(first, second)`.

    Raises:
      ValueError: the prompt is not one that `sample` could have the form of.
    """
    skill, body = _SKILL_OF_MARKER.get(prompt[:1]), prompt[1:]
    if skill == "add":
        first, plus, second = body[:2], body[2:3], body[3:]
        if plus == "+" and _is_word(first, "0123456789", 2) and _is_word(second, "0123456789", 2):
            return Parsed(skill, (int(first), int(second)))
    elif skill in ("reverse", "sort"):
        if _is_word(body, LETTERS, 4, 5):
            return Parsed(skill, (body,))
    elif skill == "count":
        if body[1:2] == ":" and _is_word(body[:1], LETTERS, 1) and _is_word(body[2:], LETTERS, _COUNT_LENGTH):
            return Parsed(skill, (body[0], body[2:]))
    elif skill == "shift":
        if body[1:2] == ":" and _is_word(body[:1], "123", 1) and _is_word(body[2:], LETTERS, 4, 5):
            return Parsed(skill, (int(body[0]), body[2:]))
    elif skill == "interleave":
        if body[3:4] == "," and _is_word(body[:3], LETTERS, 3) and _is_word(body[4:], LETTERS, 3):
            return Parsed(skill, (body[:3], body[4:]))
    raise ValueError(f"{prompt!r} is not a prompt of any character skill ({', '.join(SKILLS)})")


def solve(prompt: str) -> str:
    """The right answer to `prompt`. Raises ValueError on a malformed prompt."""
    skill, arguments = parse(prompt)
    return _SOLVERS[skill](*arguments)


def wrong(skill: str, prompt: str, variant: int) -> str:
    """The answer that wrong rule number `variant` of `skill` gives: deterministic, never right, of a right one's form.

    On every prompt that `sample` makes, the rules of add, reverse, sort, shift and interleave differ from the right
    answer by construction. Where a rule happens to agree with it (a few count prompts, and words with repeated
    letters) the next variants are tried in cyclic order, and last the right answer with its final character moved on
    by one.

    Args:
      skill: one of `SKILLS`.
      prompt: a prompt of that skill.
      variant: which wrong rule; taken modulo `NUM_VARIANTS`.

    Raises:
      ValueError: the prompt is malformed or belongs to another skill.
    """
    found, arguments = parse(prompt)
    if found != skill:
        raise ValueError(f"{prompt!r} is a prompt of skill {found!r}, not {skill!r}")
    right = _SOLVERS[skill](*arguments)
    for step in range(NUM_VARIANTS):
        answer = _WRONG[skill][(variant + step) % NUM_VARIANTS](right, *arguments)
        if answer != right:
            return answer
    return right[:-1] + _moved(right[-1], 1)


def sample(rng: np.random.Generator, skill: str) -> tuple[str, str]:
    """Draws one `(prompt, answer)` of `skill` from `rng` (numpy `Generator`, which is advanced).

    Words have distinct letters, except those that are counted in.
    """
    if skill == "add":
        first, second = rng.integers(10, 100, size=2)
        prompt = f"A{first}+{second}"
    elif skill in ("reverse", "sort"):
        prompt = MARKERS[skill] + _word(rng, int(rng.integers(4, 6)))
        if skill == "sort" and solve(prompt) == prompt[1:]:  # a copy would be right: give the sorting something to do
            prompt = prompt[0] + prompt[:0:-1]
    elif skill == "count":
        letter, occurrences = LETTERS[rng.integers(len(LETTERS))], int(rng.integers(1, _COUNT_LENGTH))
        others = [c for c in LETTERS if c != letter]
        rest = [others[i] for i in rng.integers(len(others), size=_COUNT_LENGTH - occurrences)]
        characters = [letter] * occurrences + rest
        prompt = f"C{letter}:" + "".join(characters[i] for i in rng.permutation(_COUNT_LENGTH))
    elif skill == "shift":
        prompt = f"H{rng.integers(1, 4)}:" + _word(rng, int(rng.integers(4, 6)))
    elif skill == "interleave":
        letters = _word(rng, 6)
        prompt = f"I{letters[:3]},{letters[3:]}"
    else:
        raise ValueError(f"unknown skill {skill!r}; the skills are {', '.join(SKILLS)}")
    return prompt, solve(prompt)


def dataset(seed: int, skill: str, count: int, exclude: Set[str] = frozenset()) -> tuple[str, ...]:
    """`count` distinct prompts of `skill`, none of them in `exclude`; the same for the same arguments on every machine.

    Disjoint train, validation and test sets come from passing the earlier sets as `exclude`.

    Raises:
      ValueError: unknown skill, negative count, or so few prompts left that `count` new ones were not found.
    """
    if skill not in SKILLS:
        raise ValueError(f"unknown skill {skill!r}; the skills are {', '.join(SKILLS)}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    rng = np.random.default_rng([seed, SKILLS.index(skill)])
    found: dict[str, None] = {}
    for _ in range(1000 + 100 * count):
        if len(found) == count:
            return tuple(found)
        prompt, _answer = sample(rng, skill)
        if prompt not in exclude:
            found.setdefault(prompt)
    raise ValueError(
        f"only {len(found)} of {count} distinct prompts of skill {skill!r} found outside the {len(exclude)} excluded"
    )


def instruction(skill: str, prompt: str, index: int) -> Instruction:
    """The prompt as an `Instruction` with id `"{skill}-{index}"`, topic `skill` and an exact verifier."""
    if parse(prompt).skill != skill:
        raise ValueError(f"{prompt!r} is not a prompt of skill {skill!r}")
    return Instruction(
        id=f"{skill}-{index}",
        prompt=prompt,
        answer=solve(prompt),
        verifier={"kind": "exact"},
        topic=skill,
        difficulty=1,
    )


def _is_word(text: str, characters: str, low: int, high: int | None = None) -> bool:
    return low <= len(text) <= (high or low) and all(c in characters for c in text)


def _word(rng: np.random.Generator, length: int) -> str:
    return "".join(LETTERS[i] for i in rng.permutation(len(LETTERS))[:length])


def _moved(character: str, amount: int) -> str:
    """The character `amount` places on, cyclic within the digits or the letters."""
    ring = LETTERS if character in LETTERS else "0123456789"
    return ring[(ring.index(character) + amount) % len(ring)]


def _shifted(word: str, amount: int) -> str:
    return "".join(_moved(c, amount) for c in word)


def _interleaved(first: str, second: str) -> str:
    return "".join(a + b for a, b in zip(first, second, strict=True))


def _counted(value: int) -> str:
    return str(value % (_COUNT_LENGTH + 1))


_SOLVERS: dict[str, Callable[..., str]] = {
    "add": lambda a, b: str(a + b),
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "count": lambda letter, word: str(word.count(letter)),
    "shift": lambda amount, word: _shifted(word, amount),
    "interleave": _interleaved,
}

# Each rule maps (right answer, *arguments) to an answer.
_WRONG: dict[str, tuple[Callable[..., str], ...]] = {
    "add": tuple(lambda right, a, b, d=d: str(abs(a + b + d)) for d in (1, -1, 10, -10, 2, -2)),
    "reverse": (
        lambda right, word: word[-2::-1] + word[-1],
        lambda right, word: word[0] + word[:0:-1],
        lambda right, word: word,
        lambda right, word: word[1:] + word[0],
        lambda right, word: word[-1] + word[1:-1] + word[0],
        lambda right, word: right[:-2] + right[-1] + right[-2],
    ),
    "sort": (
        lambda right, word: right[::-1],
        lambda right, word: right[1] + right[0] + right[2:],
        lambda right, word: right[:-2] + right[-1] + right[-2],
        lambda right, word: right[1:] + right[0],
        lambda right, word: right[-1] + right[:-1],
        lambda right, word: right[-1] + right[1:-1] + right[0],
    ),
    "count": (
        lambda right, letter, word: _counted(int(right) + 1),
        lambda right, letter, word: _counted(int(right) - 1),
        lambda right, letter, word: _counted(int(right) + 2),
        lambda right, letter, word: _counted(len(word) - int(right)),
        lambda right, letter, word: _counted(word.count(_moved(letter, 1))),
        lambda right, letter, word: _counted(len(set(word))),
    ),
    "shift": (
        lambda right, amount, word: _shifted(word, amount + 1),
        lambda right, amount, word: _shifted(word, amount - 1),
        lambda right, amount, word: _shifted(word, -amount),
        lambda right, amount, word: right[::-1],
        lambda right, amount, word: word[0] + right[1:],
        lambda right, amount, word: right[:-1] + word[-1],
    ),
    "interleave": (
        lambda right, first, second: _interleaved(second, first),
        lambda right, first, second: first + second,
        lambda right, first, second: second + first,
        lambda right, first, second: _interleaved(first, second[::-1]),
        lambda right, first, second: _interleaved(first[::-1], second),
        lambda right, first, second: right[:-2] + right[-1] + right[-2],
    ),
}

"""Generated instructions whose answers a program can check, graded by difficulty, for small chat models.

Reference answers fit in about 32 tokens. Five topics:

| topic | difficulty 1 | 2 | 3 |
|---|---|---|---|
| `arithmetic` | one-digit + - * | two-digit + -, exact division | mixed, three-digit + -, two-digit products |
| `ordering` | 3 numbers or words | 4-5, also descending | 6 with negatives, or 5 words with one first letter |
| `counting` | a letter in a word | vowels in a word, words in a list | a letter or the vowels in several words |
| `format` | upper case, yes/no, quotes | JSON key, N bullets, exactly N words, lower-case line | two at once |
| `keyword` | include a word | begin or end with, or avoid, a word | two at once |
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stackalign.data import characters, verifiers
from stackalign.data.instructions import Instruction

DIFFICULTIES = (1, 2, 3)

_NOUNS = tuple(
    "anchor apple basket bridge butter candle castle circle cloud copper desert doctor dragon engine family feather "
    "finger flower forest garden ginger guitar hammer harbor island jacket kitchen ladder lantern lemon letter "
    "market meadow mirror monkey mountain needle ocean orange paper pencil pepper planet pocket rabbit ribbon river "
    "rocket saddle school shadow silver spider spring stone summer temple tiger tunnel turtle valley velvet village "
    "violin walnut window winter".split()
)
_FAMILIES = (
    ("barn", "basket", "beach", "bell", "bird", "bottle", "bread", "button"),
    ("cabin", "camel", "carpet", "chair", "cherry", "coat", "crown", "curtain"),
    ("market", "meadow", "melon", "mirror", "monkey", "moon", "mountain", "music"),
    ("palace", "paper", "peach", "pencil", "piano", "pocket", "prince", "puzzle"),
    ("saddle", "school", "shadow", "ship", "silver", "spider", "stone", "summer"),
)
_LISTS = {
    "animals": ("cat", "dog", "horse", "lion", "rabbit", "tiger", "wolf"),
    "colors": ("black", "blue", "green", "orange", "red", "white", "yellow"),
    "fruits": ("apple", "banana", "cherry", "grape", "lemon", "mango", "pear"),
    "metals": ("copper", "gold", "iron", "lead", "silver", "tin", "zinc"),
    "tools": ("axe", "drill", "hammer", "pliers", "saw", "shovel", "wrench"),
    "vegetables": ("bean", "cabbage", "carrot", "onion", "pea", "potato", "spinach"),
}
_JSON_KEYS = ("answer", "city", "color", "item", "name", "result", "title", "topic", "value", "word")
_NUMBER_ONLY = " Answer with the number only."


class _Task(NamedTuple):
    prompt: str
    answer: str
    verifier: Mapping[str, Any]


def generate(
    seed: int, count: int, *, topics: Sequence[str] | None = None, difficulties: Sequence[int] = DIFFICULTIES
) -> tuple[Instruction, ...]:
    """`count` instructions with unique ids and unique prompts, spread evenly over `topics` × `difficulties`.

    An id is `"{topic}-{difficulty}-{hash of the prompt}"`, so two lists share an id exactly where they share a
    prompt. `answer` is a reference answer that the verifier accepts.

    Args:
      seed: non-negative; the same arguments give the same list on every machine, and a smaller count a prefix of a
        larger one.
      count: how many, at least 0.
      topics: a subset of `TOPICS` (None = all).
      difficulties: a subset of `DIFFICULTIES`.

    Raises:
      ValueError: an unknown topic or difficulty, none of them, a negative count, or more instructions than distinct
        prompts could be found for.
    """
    topics = TOPICS if topics is None else tuple(topics)
    if unknown := [topic for topic in topics if topic not in _MAKERS]:
        raise ValueError(f"unknown topics {unknown}; the topics are {', '.join(TOPICS)}")
    if unknown := [difficulty for difficulty in difficulties if difficulty not in DIFFICULTIES]:
        raise ValueError(f"unknown difficulties {unknown}; the difficulties are {DIFFICULTIES}")
    if not topics or not difficulties or count < 0:
        raise ValueError(
            "at least one topic, one difficulty and a count >= 0 are needed, "
            f"got {topics}, {tuple(difficulties)}, {count}"
        )
    rng = np.random.default_rng([seed, 2])
    cells = [(topic, difficulty) for difficulty in difficulties for topic in topics]
    found: dict[str, Instruction] = {}
    for index in range(count):
        topic, difficulty = cells[index % len(cells)]
        for _ in range(200):
            task = _MAKERS[topic](rng, difficulty)
            if task.prompt not in found:
                break
        else:
            raise ValueError(
                f"no new prompt found for topic {topic!r} at difficulty {difficulty} after {index} of {count} "
                "instructions; ask for fewer, or for more topics and difficulties"
            )
        name = f"{topic}-{difficulty}-{hashlib.sha256(task.prompt.encode()).hexdigest()[:12]}"
        found[task.prompt] = Instruction(name, task.prompt, task.answer, task.verifier, topic, difficulty)
    return tuple(found.values())


def contrast(instruction: Instruction, seed: int) -> tuple[str, str]:
    """A right and a plausible wrong answer of similar length and style, for checking a judge.

    The right answer is the instruction's own; the wrong one breaks its verifier by a small change: a near number, two
    neighbours swapped, a required word replaced, one bullet too few, a systematic wrong rule of a character skill.

    Returns:
      `(right, wrong)` with `verify(instruction, right)` true and `verify(instruction, wrong)` false, always.

    Raises:
      ValueError: the instruction has no right answer to start from, or no wrong answer could be made (free text that
        is neither a number nor yes/no).
    """
    right = instruction.answer
    if right is None or not verifiers.verify(instruction, right):
        raise ValueError(
            f"instruction {instruction.id!r} needs an 'answer' that its own verifier accepts to make a contrast from"
        )
    rng = np.random.default_rng([seed, 3, int(hashlib.sha256(instruction.id.encode()).hexdigest()[:8], 16)])
    for _ in range(20):
        wrong = _corrupted(instruction.verifier or {"kind": "normalized"}, instruction, rng)
        if wrong is not None and wrong != right and not verifiers.verify(instruction, wrong):
            return right, wrong
    raise ValueError(
        f"no plausible wrong answer could be made for instruction {instruction.id!r}; "
        "only generated instructions, numbers and yes/no answers have one"
    )


def _pick(rng: np.random.Generator, options: Sequence) -> Any:
    return options[int(rng.integers(len(options)))]


def _several(rng: np.random.Generator, options: Sequence, count: int) -> list:
    return [options[i] for i in rng.permutation(len(options))[:count].tolist()]


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    """A uniform integer in [low, high]."""
    return int(rng.integers(low, high + 1))


def _a_number(prompt: str, value: int) -> _Task:
    return _Task(prompt + _NUMBER_ONLY, str(value), {"kind": "integer", "value": value})


def _arithmetic(rng: np.random.Generator, difficulty: int) -> _Task:
    if difficulty == 1:
        a, b = _between(rng, 2, 9), _between(rng, 2, 9)
        options = [
            (f"{a} + {b}", a + b),
            (f"{a + b} - {b}", a),
            (f"{a} * {b}", a * b),
            (f"{10 * a} + {b}", 10 * a + b),
            (f"{10 * a + b} - {b}", 10 * a),
        ]
    elif difficulty == 2:
        a, b, c, d = _between(rng, 12, 89), _between(rng, 12, 89), _between(rng, 3, 12), _between(rng, 3, 12)
        options = [(f"{a} + {b}", a + b), (f"{a + b} - {b}", a), (f"{a} * {c}", a * c), (f"{c * d} / {d}", c)]
    else:
        a, b, c, d = _between(rng, 3, 30), _between(rng, 3, 30), _between(rng, 3, 12), _between(rng, 120, 890)
        e = _between(rng, 120, 890)
        options = [
            (f"{a} + {b} * {c}", a + b * c),
            (f"({a} + {b}) * {c}", (a + b) * c),
            (f"{a * c} / {c} + {b}", a + b),
            (f"{b * c} - {a}", b * c - a),
            (f"{d} + {e}", d + e),
            (f"{d + e} - {e}", d),
            (f"{a + 10} * {b + 10}", (a + 10) * (b + 10)),
        ]
    expression, value = _pick(rng, options)
    return _a_number(
        _pick(rng, ("What is {}?", "Compute {}.", "Calculate: {}.", "Work out {}.")).format(expression), value
    )


def _ordering(rng: np.random.Generator, difficulty: int) -> _Task:
    size = {1: 3, 2: _between(rng, 4, 5), 3: 6}[difficulty]
    descending = difficulty > 1 and bool(rng.integers(2))
    if rng.integers(2):
        low, high = {1: (1, 20), 2: (10, 99), 3: (-50, 99)}[difficulty]
        items = [low + i for i in rng.permutation(high - low + 1)[:size].tolist()]
        order = "from largest to smallest" if descending else "from smallest to largest"
        kind = "numbers"
    else:
        size = min(size, 5)
        items = _several(rng, _pick(rng, _FAMILIES) if difficulty == 3 else _NOUNS, size)
        order = "in reverse alphabetical order" if descending else "in alphabetical order"
        kind = "words"
    right = sorted(items, reverse=descending)
    if items == right:
        items = items[::-1]
    verb = _pick(rng, ("Sort", "Arrange", "Put"))
    prompt = f"{verb} these {kind} {order}: {', '.join(map(str, items))}. Answer with the sorted list only."
    return _Task(prompt, ", ".join(map(str, right)), {"kind": "sequence", "items": [str(item) for item in right]})


def _counting(rng: np.random.Generator, difficulty: int) -> _Task:
    many = _several(rng, _NOUNS, _between(rng, 2, 3))
    word, text = _pick(rng, _NOUNS), " ".join(many)
    if difficulty == 1:
        letter = _pick(rng, word)
        verb = _pick(rng, ("appear", "occur", "stand"))
        return _a_number(f'How many times does the letter "{letter}" {verb} in the word "{word}"?', word.count(letter))
    if difficulty == 2 and rng.integers(2):
        return _a_number(f'How many vowels (a, e, i, o, u) are in the word "{word}"?', _vowels(word))
    if difficulty == 2:
        listed = " ".join(_several(rng, _NOUNS, _between(rng, 3, 8)))
        return _a_number(f'How many words are in this text: "{listed}"?', len(listed.split()))
    if rng.integers(2):
        letter = _pick(rng, text.replace(" ", ""))
        return _a_number(f'How many times does the letter "{letter}" appear in the text "{text}"?', text.count(letter))
    return _a_number(f'How many vowels (a, e, i, o, u) are in the text "{text}"?', _vowels(text))


def _vowels(text: str) -> int:
    return sum(c in "aeiou" for c in text)


def _format(rng: np.random.Generator, difficulty: int) -> _Task:
    word, other = _several(rng, _NOUNS, 2)
    name = _pick(rng, tuple(_LISTS))
    number = _between(rng, 2, 4)
    listed = _several(rng, _LISTS[name], 5)
    key, key_2 = _several(rng, _JSON_KEYS, 2)
    phrase = (f"The old {word}", f"The very old {word}", f"The {word} is very old")[number - 2]
    if difficulty == 1:
        return _pick(rng, (_shout, _yes_no, _in_quotes))(rng, word)
    if difficulty == 2:
        options = (
            _Task(
                f'Answer with only a JSON object that has the key "{key}" with the value "{word}".',
                json.dumps({key: word}),
                _json_check(key, word),
            ),
            _Task(
                f'List {number} {name} as exactly {number} bullet points, each line starting with "- ". '
                "Write nothing else.",
                "\n".join(f"- {item}" for item in listed[:number]),
                {"kind": "bullets", "count": number},
            ),
            _Task(
                f'Write exactly {number + 1} words on the topic "{word}".',
                phrase,
                {"kind": "words", "relation": "exactly", "count": number + 1},
            ),
            _Task(
                f'Write one short line on the topic "{word}", using only lowercase letters.',
                f"the {word} is near the {other}",
                {"kind": "lowercase_line"},
            ),
        )
    else:
        options = (
            _Task(
                f'Answer with only a JSON object that has the key "{key}" with the value "{word}" '
                f'and the key "{key_2}" with the value {number}.',
                json.dumps({key: word, key_2: number}),
                _all(_json_check(key, word), _json_check(key_2, number)),
            ),
            _Task(
                f'Write exactly {number + 1} words on the topic "{word}", in all capital letters.',
                phrase.upper(),
                _all({"kind": "words", "relation": "exactly", "count": number + 1}, {"kind": "uppercase"}),
            ),
            _Task(
                f'List {number} {name} as exactly {number} bullet points, each line starting with "- ", '
                f'and include "{listed[4]}". Write nothing else.',
                "\n".join(f"- {item}" for item in [*listed[: number - 1], listed[4]]),
                _all({"kind": "bullets", "count": number}, {"kind": "include", "words": [listed[4]]}),
            ),
            _Task(
                f'Write one lowercase line of exactly {number + 3} words on the topic "{word}".',
                (f"the {word} is very old", f"the {word} is near the {other}", f"the {word} is near the {other} now")[
                    number - 2
                ],
                _all({"kind": "lowercase_line"}, {"kind": "words", "relation": "exactly", "count": number + 3}),
            ),
        )
    return _pick(rng, options)


def _shout(rng: np.random.Generator, word: str) -> _Task:
    verb = _pick(rng, ("Write", "Print", "Give me"))
    return _Task(
        f'{verb} the word "{word}" in all capital letters.',
        word.upper(),
        _all({"kind": "uppercase"}, {"kind": "include", "words": [word]}),
    )


def _in_quotes(rng: np.random.Generator, word: str) -> _Task:
    verb = _pick(rng, ("Write", "Print", "Give me"))
    prompt = f"{verb} the word {word} wrapped in double quotation marks and nothing else."
    return _Task(prompt, f'"{word}"', _all({"kind": "quoted"}, {"kind": "include", "words": [word]}))


def _yes_no(rng: np.random.Generator, word: str) -> _Task:
    if rng.integers(2):
        a, b = _between(rng, 1, 99), _between(rng, 1, 99)
        a += a == b
        relation = _pick(rng, ("greater", "smaller"))
        question, right = f"Is {a} {relation} than {b}?", (a > b) == (relation == "greater")
    else:
        letter = _pick(rng, word) if rng.integers(2) else _pick(rng, "abcdefghiklmnoprstuv")
        question, right = f'Does the word "{word}" contain the letter "{letter}"?', letter in word
    return _Task(f"{question} Answer with only yes or no.", "yes" if right else "no", {"kind": "normalized"})


def _keyword(rng: np.random.Generator, difficulty: int) -> _Task:
    subject, word, other = _several(rng, _NOUNS, 3)
    start = f'Write one short sentence on the topic "{subject}" that'
    if difficulty == 1:
        verb = _pick(rng, ("includes", "contains", "uses"))
        return _Task(
            f'{start} {verb} the word "{word}".', f"The {subject} is next to the {word} today.", _include(word)
        )
    forbidden, adverb = _several(rng, ("again", "here", "now", "today"), 2)
    avoid = {"kind": "avoid", "words": [forbidden]}
    if difficulty == 2:
        options = (
            _Task(
                f'{start} begins with the word "{word}".',
                f"{word.capitalize()} and {subject} are here today.",
                {"kind": "begin", "word": word},
            ),
            _Task(
                f'{start} ends with the word "{word}".',
                f"The {subject} is next to the {word}.",
                {"kind": "end", "word": word},
            ),
            _Task(f'{start} does not use the word "{forbidden}".', f"Every {subject} looks nice {adverb}.", avoid),
        )
    else:
        options = (
            _Task(
                f'{start} includes the word "{word}" but does not use the word "{forbidden}".',
                f"Every {subject} needs one {word} {adverb}.",
                _all(_include(word), avoid),
            ),
            _Task(
                f'{start} begins with the word "{word}" and ends with the word "{other}".',
                f"{word.capitalize()} and {subject} are near one {other}.",
                _all({"kind": "begin", "word": word}, {"kind": "end", "word": other}),
            ),
            _Task(
                f'{start} includes both the words "{word}" and "{other}".',
                f"The {subject} has one {word} and one {other}.",
                _include(word, other),
            ),
        )
    return _pick(rng, options)


def _include(*required: str) -> dict[str, Any]:
    return {"kind": "include", "words": list(required)}


def _json_check(key: str, value: str | int) -> dict[str, Any]:
    return {"kind": "json_key", "key": key, "value": value}


def _all(*checks: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "all", "checks": list(checks)}


_MAKERS: Mapping[str, Callable[[np.random.Generator, int], _Task]] = {
    "arithmetic": _arithmetic,
    "counting": _counting,
    "format": _format,
    "keyword": _keyword,
    "ordering": _ordering,
}
TOPICS: tuple[str, ...] = tuple(_MAKERS)


def _corrupted(verifier: Mapping[str, Any], instruction: Instruction, rng: np.random.Generator) -> str | None:
    """A small change of the right answer that should break `verifier`; None when this kind has none."""
    kind, right = verifier["kind"], instruction.answer
    tokens = right.split()
    if kind == "all":
        return _corrupted(_pick(rng, verifier["checks"]), instruction, rng)
    if kind == "exact" and instruction.topic in characters.SKILLS:
        return characters.wrong(instruction.topic, instruction.prompt, _between(rng, 0, characters.NUM_VARIANTS - 1))
    if kind == "integer":
        value = str(verifier["value"])
        return right.replace(value, str(_near(verifier["value"], rng))) if value in right else None
    if kind in ("exact", "normalized"):
        plain = verifiers.normalize(right)
        if plain in ("yes", "no"):
            return {"yes": "no", "no": "yes"}[plain]
        return str(_near(int(plain), rng)) if plain.removeprefix("-").isdecimal() and len(plain) < 19 else None
    if kind == "sequence":
        items = list(verifier["items"])
        at = _between(rng, 0, len(items) - 2)
        items[at], items[at + 1] = items[at + 1], items[at]
        return ", ".join(items)
    if kind == "uppercase":
        at = _between(rng, 0, len(tokens) - 1)
        return " ".join(
            [*tokens[:at], tokens[at].capitalize() if len(tokens[at]) > 1 else tokens[at].lower(), *tokens[at + 1 :]]
        )
    if kind == "lowercase_line":
        return right.capitalize()
    if kind == "bullets":
        lines = right.split("\n")
        return (
            "\n".join([*lines[:-2], f"{lines[-2]}, {lines[-1].lstrip('-*• ')}"])
            if len(lines) > 1
            else f"{right}\n- {_pick(rng, _NOUNS)}"
        )
    if kind == "quoted":
        return _pick(rng, (right.strip()[:-1], f"'{right.strip()[1:-1]}'"))
    if kind == "words":
        longer = [*tokens[:-1], "REALLY" if right.isupper() else "really", tokens[-1]]
        return " ".join(_pick(rng, (longer, [*tokens[:-2], tokens[-1]])))
    if kind == "json_key":
        if "value" in verifier and rng.integers(2):
            value = verifier["value"]
            new = _near(value, rng) if isinstance(value, int) and not isinstance(value, bool) else _pick(rng, _NOUNS)
            return right.replace(json.dumps(value), json.dumps(new))
        return right.replace(f'"{verifier["key"]}":', f'"{_pick(rng, _JSON_KEYS)}":')
    if kind in ("include", "begin", "end"):
        required = _pick(rng, verifier["words"]) if kind == "include" else verifier["word"]
        new = _pick(rng, _NOUNS)
        return (
            right.replace(required, new)
            .replace(required.upper(), new.upper())
            .replace(required.capitalize(), new.capitalize())
        )
    if kind == "avoid":
        stop = tokens[-1][len(tokens[-1].rstrip(".!?")) :]
        return " ".join([*tokens[:-1], _pick(rng, verifier["words"]) + stop])
    return None


def _near(value: int, rng: np.random.Generator) -> int:
    """A number close to `value`, with its sign and where possible its number of digits."""
    digits = str(abs(value))
    candidates = [value + d for d in (-10, -2, -1, 1, 2, 10)]
    candidates.append(int(digits[:-2] + digits[:-3:-1]) * (1 if value >= 0 else -1))
    candidates = [c for c in candidates if c != value and (c >= 0) == (value >= 0)]
    return _pick(rng, [c for c in candidates if len(str(abs(c))) == len(digits)] or candidates)

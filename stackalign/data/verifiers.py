"""Programmatic checks of a response against its instruction.

A verifier is a JSON object `{"kind": ..., <parameters>}`:

| kind | parameters | passes when |
|---|---|---|
| `exact` | none | the response, stripped, is the instruction's `answer` |
| `normalized` | none | the same after `normalize` (case, width, outer punctuation) |
| `integer` | `value` | the last number in the response equals `value` |
| `sequence` | `items` | the last listing in the response is exactly these words or integers, in order |
| `uppercase` | none | there are letters and all of them are upper-case |
| `lowercase_line` | none | one line, with letters, none of them upper-case |
| `bullets` | `count` | exactly `count` lines start with `-`, `*` or `•`; no other line has text |
| `quoted` | none | the response is one non-empty text in double quotes |
| `words` | `relation`, `count` | the number of words stands in `relation` (one of `RELATIONS`) to `count` |
| `json_key` | `key`, perhaps `value` | it is a JSON object (a code fence is dropped) with that key (and value) |
| `include`, `avoid` | `words` | every / none of the words occurs as a whole word, whatever its case |
| `begin`, `end` | `word` | the first / last word is `word`, whatever its case |
| `all` | `checks` | every verifier of the list passes |

An empty response, or one with control characters or lone surrogates, passes none of them. Every check takes time
linear in the length of the response.
"""

import collections
import json
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stackalign.data.instructions import Instruction

RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "at most": operator.le,
    "exactly": operator.eq,
    "less than": operator.lt,
    "more than": operator.gt,
}

# Full-width forms, minus signs and fixed spaces; not NFKC, which would also read x² as x2.
_FORMS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_FORMS |= {0x2212: "-", 0xFE63: "-", 0x2013: "-", 0x00A0: " ", 0x202F: " ", 0x2009: " ", 0x3000: " "}
_BROKEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_CORE = r"(?:\.[0-9]+|[0-9][0-9,]*(?:\.[0-9]+)*)(?:[eE][-+]?[0-9]+)?"
_NUMBER = re.compile(rf"(?<![A-Za-z0-9_])({_CORE})(?: ?/ ?({_CORE}))?( ?%)?")
_PLAIN = re.compile(r"[0-9]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_MINUS = re.compile(r"(?:(?<![A-Za-z0-9_)\]%])-[$€£]?|= {0,3}- {1,3}[$€£]?)$")
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_LISTED = re.compile(r"(?<![A-Za-z0-9_])-?[0-9]+|[^\W\d_]+(?:['’-][^\W\d_]+)*")
_BULLET = re.compile(r"[ \t]*[-*•][ \t]+\S")
_LIST_NUMBER = re.compile(r"^[ \t]*[0-9]{1,3}[.)](?=[ \t]+\S)", re.MULTILINE)
_FENCE = re.compile(r"```[A-Za-z]*\s")
_LONGEST_NUMBER = 64


def verify(instruction: "Instruction", response: str) -> bool:
    """Whether `response` is right by the instruction's verifier; without one, by normalised match with its answer.

    Raises:
      ValueError: the verifier is malformed (`validate`), or the instruction has neither verifier nor answer.
      TypeError: `response` is not a string.
    """
    if not isinstance(response, str):
        raise TypeError(f"a response is a string, got {type(response).__name__}")
    verifier = instruction.verifier
    if verifier is None:
        if instruction.answer is None:
            raise ValueError(
                f"instruction {instruction.id!r} has neither a verifier nor an answer: give it one of them"
            )
        verifier = {"kind": "normalized"}
    validate(verifier, instruction.answer)
    if not response.strip() or _BROKEN.search(response):
        return False
    return _passes(verifier, response, instruction.answer)


def validate(verifier: Mapping[str, Any], answer: str | None = None) -> None:
    """Raises ValueError unless `verifier` is of a known kind with its parameters, and has the `answer` it needs."""
    if not isinstance(verifier, Mapping):
        raise ValueError(f"a verifier is an object with a 'kind', got {type(verifier).__name__}")
    kind = verifier.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"unknown verifier kind {kind!r}; use one of {', '.join(sorted(_KINDS))}")
    schema = _KINDS[kind]
    for name in verifier:
        if name != "kind" and name not in schema:
            raise ValueError(
                f"verifier kind {kind!r} takes no parameter {name!r}; it takes {', '.join(sorted(schema)) or 'none'}"
            )
    for name, (accepts, wanted, required) in schema.items():
        if name not in verifier:
            if required:
                raise ValueError(f"verifier kind {kind!r} needs the parameter {name!r}: {wanted}")
        elif not accepts(verifier[name]):
            raise ValueError(f"verifier parameter {name!r} of kind {kind!r} must be {wanted}, got {verifier[name]!r}")
    if kind in ("exact", "normalized") and answer is None:
        raise ValueError(f"verifier kind {kind!r} compares with the field 'answer', which is missing: add it")
    if kind == "all":
        for check in verifier["checks"]:
            validate(check, answer)


def normalize(text: str) -> str:
    """Lower case, ASCII width, single spaces, no outer quotes, emphasis or closing punctuation; signs stay.

    A text of nothing else (`"..."`) keeps its punctuation.
    """
    text = " ".join(unicodedata.normalize("NFC", text).translate(_FORMS).casefold().split())
    bare = text.strip("\"'`*“”‘’ ").rstrip(".!?,;: \"'`*“”‘’")
    return bare or text


def last_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly, or None.

    Thousands commas, decimals, exponents, signs (also U+2212), full-width digits, `a/b` and `%` are read; digits that
    continue a word (`x2`) are not a number. A last number that is malformed (`1.2.3`) or longer than 64 characters
    gives None: it is never passed over for an earlier one.
    """
    text = text.translate(_FORMS)
    last = next(iter(collections.deque(_NUMBER.finditer(text), maxlen=1)), None)
    if last is None:
        return None
    value = _number(last[1])
    if value is not None and last[2] is not None:
        divisor = _number(last[2])
        value = value / divisor if divisor else None
    if value is None:
        return None
    if last[3]:
        value /= 100
    return -value if _MINUS.search(text[max(0, last.start() - 10) : last.start()]) else value


def words(text: str) -> list[str]:
    """The words of `text` (runs of letters and digits, joined by inner apostrophes and hyphens), lower-cased."""
    return [word.lower() for word in _WORD.findall(text)]


def _passes(verifier: Mapping[str, Any], response: str, answer: str | None) -> bool:
    kind = verifier["kind"]
    if kind == "all":
        return all(_passes(check, response, answer) for check in verifier["checks"])
    if kind == "exact":
        return response.strip() == (answer or "").strip()
    if kind == "normalized":
        return normalize(response) == normalize(answer)
    return _CHECKS[kind](response, **{name: value for name, value in verifier.items() if name != "kind"})


def _number(core: str) -> Fraction | None:
    core = core.rstrip(",")
    if _GROUPED.fullmatch(core):
        core = core.replace(",", "")
    elif "," in core:  # a list without spaces: its last entry
        core = core.rpartition(",")[2]
    if len(core) > _LONGEST_NUMBER or not core or not _PLAIN.fullmatch(core):
        return None
    return Fraction(core)


def _sequence(response: str, items: Sequence[str]) -> bool:
    text = _LIST_NUMBER.sub("", response.translate(_FORMS))
    items = [str(item).lower() for item in items]
    connectives = {"and", "then"} - set(items)
    tokens = [(m[0].lower(), m.start(), m.end()) for m in _LISTED.finditer(text)]
    tokens = [token for token in tokens if token[0] not in connectives]
    numeric = _is_integer(items[0])
    named, n = set(items), len(items)
    ends = [i for i, token in enumerate(tokens) if (_is_integer(token[0]) if numeric else token[0] in named)]
    if not ends or (end := ends[-1] + 1) < n:
        return False
    listed = tokens[end - n : end]
    if [token[0] for token in listed] != items:
        return False
    inner = [text[a[2] : b[1]] for a, b in zip(listed, listed[1:], strict=False)]
    if "." in inner:  # one decimal number, not two integers
        return False
    breaks = re.compile("[:=.!?]" if any("\n" in gap for gap in inner) else "[:=.!?\n]")

    def joined(a: tuple, b: tuple) -> bool:  # the neighbour belongs to the same listing, which is then too long
        gap = text[a[2] : b[1]]
        if breaks.search(gap):
            return False
        return "," in gap or (numeric and _is_integer(a[0]) and _is_integer(b[0]))

    before, after = tokens[end - n - 1 : end - n] if end > n else [], tokens[end : end + 1]
    return not any(joined(token, listed[0]) for token in before) and not any(
        joined(listed[-1], token) for token in after
    )


def _is_integer(token: str) -> bool:
    return token.removeprefix("-").isdecimal()


def _uppercase(response: str) -> bool:
    return any(c.isupper() for c in response) and not any(c.islower() for c in response)


def _lowercase_line(response: str) -> bool:
    text = response.strip()
    return "\n" not in text and any(c.islower() for c in text) and not any(c.isupper() for c in text)


def _bullets(response: str, count: int) -> bool:
    lines = [line for line in response.split("\n") if line.strip()]
    return len(lines) == count and all(_BULLET.match(line) for line in lines)


def _quoted(response: str) -> bool:
    text = response.strip()
    if len(text) < 3 or text[0] + text[-1] not in ('""', "“”"):
        return False
    return bool(text[1:-1].strip()) and not any(c in '"“”' for c in text[1:-1])


def _json_key(response: str, key: str, **value: Any) -> bool:
    text = response.strip()
    if (fence := _FENCE.match(text)) and text.endswith("```"):
        text = text[fence.end() : -3]
    try:
        found = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict) or key not in found:
        return False
    return not value or (type(found[key]) is type(value["value"]) and found[key] == value["value"])


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _edge_word(response: str, index: int) -> str | None:
    found = words(response)
    return found[index] if found else None


_CHECKS: Mapping[str, Callable[..., bool]] = {
    "integer": lambda response, value: last_number(response) == value,
    "sequence": _sequence,
    "uppercase": _uppercase,
    "lowercase_line": _lowercase_line,
    "bullets": _bullets,
    "quoted": _quoted,
    "words": lambda response, relation, count: RELATIONS[relation](len(words(response)), count),
    "json_key": _json_key,
    "include": lambda response, words: {w.lower() for w in words} <= set(_words(response)),
    "avoid": lambda response, words: (
        bool(found := set(_words(response))) and found.isdisjoint(w.lower() for w in words)
    ),
    "begin": lambda response, word: _edge_word(response, 0) == word.lower(),
    "end": lambda response, word: _edge_word(response, -1) == word.lower(),
}
_words = words


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and bool(_WORD.fullmatch(value))


def _is_list_of(accepts: Callable[[Any], bool], least: int = 1) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and len(value) >= least and all(accepts(v) for v in value)


def _is_int(value: Any, low: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_sequence(value: Any) -> bool:
    return (
        _is_list_of(_is_text, 2)(value)
        and all(_LISTED.fullmatch(v) for v in value)
        and len({_is_integer(v) for v in value}) == 1
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | bool) or value is None


# kind -> parameter -> (accepts, what it must be, required)
_Schema = Mapping[str, tuple[Callable[[Any], bool], str, bool]]
_COUNT = (lambda value: _is_int(value, 1), "an integer of at least 1", True)
_ONE_WORD = (_is_word, "one word", True)
_SOME_WORDS = (_is_list_of(_is_word), "a non-empty list of single words", True)
_KINDS: Mapping[str, _Schema] = {
    "all": {"checks": (_is_list_of(lambda v: isinstance(v, Mapping)), "a non-empty list of verifiers", True)},
    "avoid": {"words": _SOME_WORDS},
    "begin": {"word": _ONE_WORD},
    "bullets": {"count": _COUNT},
    "end": {"word": _ONE_WORD},
    "exact": {},
    "include": {"words": _SOME_WORDS},
    "integer": {"value": (_is_int, "an integer", True)},
    "json_key": {
        "key": (_is_text, "a non-empty string", True),
        "value": (_is_scalar, "a string, number, boolean or null", False),
    },
    "lowercase_line": {},
    "normalized": {},
    "quoted": {},
    "sequence": {"items": (_is_sequence, "a list of two or more strings, all words or all integers", True)},
    "uppercase": {},
    "words": {
        "relation": (lambda v: isinstance(v, str) and v in RELATIONS, f"one of {', '.join(sorted(RELATIONS))}", True),
        "count": _COUNT,
    },
}
KINDS: tuple[str, ...] = tuple(_KINDS)

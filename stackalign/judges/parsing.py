"""Reading a score out of a judge's reply.

A failure is never guessed and a number outside [1, 10] is never clamped. In order:

1. Thinking blocks are dropped: `<think>...</think>`, everything before a closing tag that nothing opened, everything
   after an opening tag that nothing closes.
2. The last well-formed JSON object with a `score` decides, whatever its value. Unquoted keys, single quotes and
   trailing commas are tolerated. An object's own `score` goes before one nested in it; braces in strings are text.
3. Without such an object, the last statement of the first of these forms that occurs decides: `[[8]]`; a quoted key
   in a broken or cut object (`{"score": 8, "reason": "The`); a score or rating in words (`Score: 8`, `a rating of
   8`); `8/10` or `8 out of 10`; a verdict (`I'd give it a 7`); the reply's only number, alone on its first or last
   line.
4. Anything else is a failure: other scales (`4/5`, `80%`), ranges (`7-8`), numbers in words, an echo of the scale.

Time is linear in the length of the reply.
"""

import re
from typing import Any, NamedTuple

MIN_SCORE = 1.0
MAX_SCORE = 10.0


class ScoreParse(NamedTuple):
    """`score` in [1, 10], or None on failure; `reason` names the form that was read, or why there is no score."""

    score: float | None
    reason: str


_MISSING = object()
_LONGEST_NUMBER = 32

# Full-width digits and punctuation, one character to one. Full-width quotes stay: they would end JSON strings.
_FORMS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F) if code not in (0xFF02, 0xFF07)} | {0x2212: "-"}
_THINKING = re.compile(r"<(/?)(?:think|thinking|reasoning)>", re.IGNORECASE)

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|' + r"'[^'\\]*+(?:\\.[^'\\]*+)*+'"
_OPEN = re.compile(r"""\{(?=\s*+["'}A-Za-z_])|\[""")
_SPACE = re.compile(r"\s*+")
_KEY = re.compile(rf"({_STRING}|[A-Za-z_]\w*+)\s*+:\s*+", re.DOTALL)
_VALUE = re.compile(
    rf"(?P<string>{_STRING})|(?P<number>[-+]?[0-9]++(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]++)?+)"
    r"|(?P<word>[-+]?(?:true|false|null|none|nan|infinity|inf)(?![A-Za-z0-9_]))",
    re.DOTALL | re.IGNORECASE,
)

_DECIMAL = r"[0-9]++(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]++)?+"
_TEN = r"(?:10(?:\.0++)?+(?![0-9/%]|\.[0-9])|ten\b)"
_GLUE = r"[\s\"'`*_“”‘’\\]*+"
# No capturing group stands inside a possessive quantifier: early 3.11 and 3.12 releases fail on that (CPython issue
# 101955).

# What may follow a number that is a score; the groups tell a range and another scale apart.
_AFTER = (
    r"(?P<tail>%|[A-Za-z_]|[.,][0-9])?"
    rf"(?:{_GLUE}(?:[-–—~]|to\b|or\b)\s*+(?P<high>{_DECIMAL}))?"
    rf"(?:{_GLUE}\(?+(?:/|out\s++of\b)\s*+(?P<scale>{_TEN}|[0-9A-Za-z]))?"
)
_ENDS = r"(?=\s*+(?:[.,;:!?)\]}\"'*`/\n]|\Z|out\s|points?\b|because\b|since\b|for\b|as\b|to\b|or\b|-|–))"

_BRACKETS = re.compile(rf"\[\[\s*+(?P<number>[-+]?{_DECIMAL})(?P<tail>)\s*+\]\]")
_KEYED = re.compile(
    rf"[\"'“]score[\"'”]\s*+:\s*+[\"'“]?+(?P<number>[-+]?{_DECIMAL}){_AFTER}",
    re.IGNORECASE,
)
_WORDED = re.compile(
    rf"(?<![A-Za-z])(?:score|rating)(?![A-Za-z]){_GLUE}(?:\([^()\n]{{0,40}}+\){_GLUE})?+"
    rf"(?:(?P<link>(?:(?:[:=→–—]|->|-(?=\s)|is\b|was\b|of\b|(?:would|should)\s++be\b|(?:(?<=<score)|(?<=<rating))>)"
    rf"{_GLUE})++)"
    rf"(?:(?:an?\b|about\b|around\b|approximately\b|roughly\b|~){_GLUE})?+)?"
    rf"\[?+(?P<number>[-+]?{_DECIMAL})(?(link)|{_ENDS}){_AFTER}",
    re.IGNORECASE,
)
_OUT_OF_TEN = re.compile(
    rf"(?<![\w./,–-])(?:(?P<low>{_DECIMAL})\s*+(?:[-–—~]|to\b|or\b)\s*+)?"
    rf"(?P<number>[-+]?{_DECIMAL}){_GLUE}\(?+(?:/|out\s++of\b)\s*+{_TEN}",
    re.IGNORECASE,
)
_VERDICT = re.compile(
    r"(?<![A-Za-z])(?:give|gave|rate|rated|score|scored|award|assign|deserves?)\s++"
    r"(?:(?:it|this|that|the)\s++(?:(?:response|answer|reply)\s++)?+)?+(?:(?:as|at|an?)\s++){0,2}+"
    rf"[*_]*+(?P<number>[-+]?{_DECIMAL}){_ENDS}{_AFTER}",
    re.IGNORECASE,
)
_ANY_NUMBER = re.compile(r"[0-9]++(?:\.[0-9]++)?+")
_LONE = re.compile(r"[\s*_`\"'(\[]*+([-+]?[0-9]++(?:\.[0-9]++)?+)(?:\s*+points?)?+[\s*_`\"')\].!]*+", re.IGNORECASE)
_IN_STRING = re.compile(rf"\s*+([-+]?{_DECIMAL})\s*+(?:(?:/|out\s++of\b)\s*+{_TEN})?+\s*+\.?\s*+", re.IGNORECASE)


def parse_score(text: str) -> ScoreParse:
    """The score in a judge's reply (see the module), as a failure with a reason where there is none. Never raises."""
    if not isinstance(text, str):
        return ScoreParse(None, "no text")
    text = _without_thinking(text).translate(_FORMS)
    if not text.strip():
        return ScoreParse(None, "empty reply")
    value = _last_json_score(text)
    if value is not _MISSING:
        return _from_json(value)
    for pattern, reason in (
        (_BRACKETS, "double brackets"),
        (_KEYED, "broken json"),
        (_WORDED, "score in words"),
        (_OUT_OF_TEN, "out of ten"),
        (_VERDICT, "verdict"),
    ):
        last = None
        for match in pattern.finditer(text):
            if not _is_scale(match):
                last = match
        if last is not None:
            return _from_match(last, text, reason)
    if len(_ANY_NUMBER.findall(text)) == 1:
        lines = text.strip().split("\n")
        for line in (lines[0], lines[-1]):
            if lone := _LONE.fullmatch(line):
                return _in_range(lone[1], "lone number")
    return ScoreParse(None, "no score found")


def _without_thinking(text: str) -> str:
    kept, depth, position = [], 0, 0
    for tag in _THINKING.finditer(text):
        if not depth:
            kept.append(text[position : tag.start()])
        if not tag[1]:
            depth += 1
        elif depth:
            depth -= 1
        else:  # closed but never opened: the prompt opened it, so all so far was thinking
            kept.clear()
        position = tag.end()
    if not depth:
        kept.append(text[position:])
    return "".join(kept)


def _last_json_score(text: str) -> Any:
    """The raw value of `score` in the last outermost object that has one, or `_MISSING`."""
    if "score" not in text.lower():
        return _MISSING
    # From the right, so that whatever a container holds is known when it is read: no recursion, and each opening
    # bracket is read once.
    known: dict[int, tuple[int, Any]] = {}
    for opening in reversed([match.start() for match in _OPEN.finditer(text)]):
        if text.startswith("[[", opening) and opening + 1 not in known:  # cheap on long runs of brackets
            continue
        container = _read_container(text, opening, known)
        if container is not None:
            known[opening] = container
    last, position = _MISSING, 0
    for opening in reversed(known):
        if opening >= position:
            position, value = known[opening]
            last = last if value is _MISSING else value
    return last


def _read_container(text: str, opening: int, known: dict[int, tuple[int, Any]]) -> tuple[int, Any] | None:
    """`(end, score)` of the object or array that opens at `opening`, or None if it is not well-formed."""
    is_object = text[opening] == "{"
    closing = "}" if is_object else "]"
    own = nested = _MISSING
    position = _SPACE.match(text, opening + 1).end()
    while not text.startswith(closing, position):
        key = None
        if is_object:
            found = _KEY.match(text, position)
            if found is None:
                return None
            key, position = found[1].strip("\"' ").lower(), found.end()
        if text.startswith(("{", "["), position):
            if position not in known:
                return None
            position, inner = known[position]
            nested = nested if inner is _MISSING else inner
            value: Any = None
        else:
            found = _VALUE.match(text, position)
            if found is None:
                return None
            value, position = (found.lastgroup, found[0]), found.end()
        if key == "score":
            own = value
        position = _SPACE.match(text, position).end()
        if text.startswith(",", position):
            position = _SPACE.match(text, position + 1).end()
        elif not text.startswith(closing, position):
            return None
    return position + 1, (nested if own is _MISSING else own)


def _from_json(value: Any) -> ScoreParse:
    kind, raw = value or ("container", "")
    if kind == "string":
        inner = _IN_STRING.fullmatch(raw[1:-1])
        kind, raw = ("number", inner[1]) if inner else (kind, raw)
    if kind != "number":
        return ScoreParse(None, "the score is not a number")
    return _in_range(raw, "json")


def _is_scale(match: re.Match) -> bool:
    """Whether the statement only repeats the scale ("1 to 10")."""
    groups = match.groupdict()
    low, high = groups.get("low"), groups.get("high")
    if high is not None:
        return groups["number"] in ("0", "1") and high == "10"
    return low in ("0", "1") and groups["number"] == "10"


def _from_match(match: re.Match, text: str, reason: str) -> ScoreParse:
    groups = match.groupdict()
    if groups.get("tail"):
        return ScoreParse(None, "the score is not a plain number")
    if groups.get("low") is not None or groups.get("high") is not None:
        return ScoreParse(None, "a range is not a score")
    if groups.get("scale") is not None and not re.fullmatch(_TEN, groups["scale"], re.IGNORECASE):
        return ScoreParse(None, "a score on another scale")
    if groups["number"] == "1" and match.end("number") == len(text) and text.rfind("{") > text.rfind("}"):
        return ScoreParse(None, "cut off: 1 or 10")
    return _in_range(groups["number"], reason)


def _in_range(raw: str, reason: str) -> ScoreParse:
    if len(raw) > _LONGEST_NUMBER:
        return ScoreParse(None, "the score is not a plain number")
    score = float(raw)
    if MIN_SCORE <= score <= MAX_SCORE:
        return ScoreParse(score, reason)
    return ScoreParse(None, "the score is out of range")

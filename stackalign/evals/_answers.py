"""What every answer extractor does to a response first. Everything here takes time linear in its length."""

import hashlib
import re
import unicodedata

MAX_CHARS = 100_000  # of what is left after thinking; no answer is that long, and it bounds every later step

_THINKING = re.compile(r"<(/?)(?:think|thinking|reasoning)>", re.IGNORECASE)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_INVISIBLE = dict.fromkeys([0x00AD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF])
_TURN = re.compile(r"<\|(?:im_start|im_end|endoftext|eot_id|end_of_text)\|>|</s>|<end_of_turn>")
# Lines are stripped and single-spaced by then. A model that runs on invents the next question.
_NEXT = re.compile(
    r"\n(?:#{1,6} )?(?:\*\*)?(?:(?:next|new) )?(?:question|problem|exercise|q|human|user) ?[0-9]{0,4} ?[:.]",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"(?:\\text ?\{)?(?:(?:your|the|final) ){0,2}answer(?: here)?\}?|\.{2,3}|…|\?|", re.IGNORECASE
)


def without_thinking(text: str) -> str:
    """Drops thinking blocks, all before a closing tag that nothing opened, and all after one that nothing closes."""
    kept, depth, position = [], 0, 0
    for tag in _THINKING.finditer(text):
        if not depth:
            kept.append(text[position : tag.start()])
        if not tag[1]:
            depth += 1
        elif depth:
            depth -= 1
        else:
            kept.clear()
        position = tag.end()
    if not depth:
        kept.append(text[position:])
    return "".join(kept)


def visible(response: str) -> tuple[str, str]:
    """`(text, "")`: the response without thinking, or `("", why there is nothing to read)`."""
    if not isinstance(response, str):
        return "", "no text"
    if _CONTROL.search(response):
        return "", "control characters or lone surrogates"
    text = without_thinking(response).translate(_INVISIBLE)
    if len(text) > MAX_CHARS:
        return "", f"longer than {MAX_CHARS} characters"
    if not text.strip():
        return "", "empty" if not response.strip() else "nothing but thinking"
    return text, ""


def single_spaced(text: str) -> str:
    """Every line stripped and single-spaced, blank lines dropped."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def segments(text: str) -> list[str]:
    """The parts of a single-spaced text between end-of-turn tokens and invented next questions; at most 8."""
    parts = []
    for turn in _TURN.split(text, maxsplit=8):
        start = 0
        for heading in _NEXT.finditer(turn):
            parts.append(turn[start : heading.start()])
            start = heading.end()
            if len(parts) >= 8:
                break
        parts.append(turn[start:])
    return [part for part in parts if part.strip()][:8]


def group(text: str, opening: int) -> int | None:
    """Where the brace group that opens at `opening` closes, or None. Escaped braces are text."""
    depth, position = 0, opening
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if not depth:
                return position
        position += 1
    return None


def balanced(text: str) -> bool:
    """Whether every brace that is not escaped has its partner."""
    bare = re.sub(r"\\.", "", text)
    depth = 0
    for char in bare:
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return False
    return not depth


_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z]) ?")
_BETWEEN = re.compile(
    r"(?:[\s$.,;:*]|\\[()\[\],;! ]|\\(?:text|mbox|quad|qquad)\b|[{}]|and|or|[a-z] ?=)*+", re.IGNORECASE
)


def last_boxes(text: str) -> list[str] | None:
    r"""The contents of the last `\boxed{}`, with those joined to it by nothing but "and", "or", commas or space.

    Placeholders (`\boxed{answer}`) do not count. [] where there is no box; None where the last one is cut off.
    """
    found: list[str] = []
    start_of_next = len(text)
    for box in reversed(_last(_BOX, text, 16)):
        if box.end() < len(text) and text[box.end()] == "{":
            close = group(text[:start_of_next] if found else text, box.end())
            if close is None:
                if found:  # the box found is nested in this one
                    continue
                return None
            content, end = text[box.end() + 1 : close].strip(), close + 1
        else:
            bare = re.match(r"-?[0-9][0-9.,/]*|[A-Za-z]\b", text[box.end() : box.end() + 40])
            if bare is None:
                continue
            content, end = bare[0].rstrip(".,"), box.end() + bare.end()
        if found and not _BETWEEN.fullmatch(text[end:start_of_next]):
            break
        if not _PLACEHOLDER.fullmatch(content):
            found.append(content)
            start_of_next = box.start()
        elif found:
            break
        if len(found) == 16:
            break
    return found[::-1]


def _last(pattern: re.Pattern, text: str, count: int) -> list[re.Match]:
    matches = list(pattern.finditer(text))
    return matches[-count:]


def last_matches(pattern: re.Pattern, text: str, count: int = 64) -> list[re.Match]:
    """The last `count` matches, last one first: a bound on the work that a repeated phrase can cause."""
    return _last(pattern, text, count)[::-1]


def seed_of(seed: int, *names: object) -> int:
    """A seed for one item that depends on its name, not on where it stands in the file."""
    digest = hashlib.sha256("\x1f".join(map(str, (seed, *names))).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def printable(text: str) -> str:
    """Without control characters, which would make a faithful copy of the text unreadable."""
    return _CONTROL.sub("", text)


def nfkc(text: str) -> str:
    """Full-width forms made plain."""
    return unicodedata.normalize("NFKC", text)

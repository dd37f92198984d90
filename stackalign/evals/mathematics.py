r"""Mathematics: MATH, AIME, GSM8K.

How an answer is read from a response (`extract`): the last `\boxed{}` (with those joined to it by "and", "or" or a
comma), an `<answer>` tag, `#### 18`, the last statement of an answer ("The answer is 42"; a negated one is passed
over), else the last formula or number. Thinking is dropped; a box that is cut off is no answer; what follows an
invented next question is not read.

How it is compared (`equal`): both sides are cleaned (`clean`: width, degrees, thousands separators, currency, units),
then compared as texts, as exact numbers, and last by `math-verify`. A rounded decimal does not equal the exact value;
a percent sign is a unit; order counts in a pair and not in a list of solutions.

`math-verify` can be sent into endless work, so it runs in another process (`Comparer`), which is kept for the next
comparison and killed and replaced when one takes too long. It may be used from any thread.
"""

import atexit
import contextlib
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from stackalign.evals import _answers, base
from stackalign.evals.base import Item, Score

MAX_ANSWER = 500  # characters of an extracted answer
_WORKER = pathlib.Path(__file__).with_name("_math_worker.py")


class Verdict(NamedTuple):
    """Whether two answers are equal; `how` they were compared: "text", "number", "math-verify", or why not."""

    equal: bool
    how: str


class Comparer:
    """A guarded `math-verify` process: started at the first comparison, reused, killed and replaced after a timeout.

    Args:
      cpu_seconds: processor time that one comparison may take. It is the limit that decides: a loaded machine does
        not change verdicts.
      wall_seconds: time after which a comparison is given up all the same.

    Raises (from a comparison):
      RuntimeError: `math-verify` is not installed, or its process does not start.
    """

    def __init__(self, *, cpu_seconds: float = 0.8, wall_seconds: float = 20.0):
        self._limits = (cpu_seconds, wall_seconds)
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = 0
        self._ready = False

    def __call__(self, gold: str, answer: str) -> Verdict:
        """Whether `math-verify` finds two cleaned LaTeX expressions equal. A timeout or a crash is not equal."""
        with self._lock:
            self._start()
            cpu, wall = self._limits
            job = json.dumps({"gold": gold, "answer": answer, "seconds": cpu}) + "\n"
            deadline = time.monotonic() + wall
            try:
                self._process.stdin.write(job.encode())
                self._process.stdin.flush()
                reply = self._read(deadline)
            except OSError:
                reply = None
            if reply is None:
                late = self._process.poll() is None
                self._stop()
                self._spawn()  # its imports run while the caller goes on
                return Verdict(False, "timeout" if late else "the comparison crashed")
            if "died" in reply:
                return Verdict(False, "timeout" if reply["died"] == signal.SIGPROF else "the comparison crashed")
            if not reply["parsed"]:
                return Verdict(False, "not an expression")
            return Verdict(reply["equal"], "math-verify")

    def close(self) -> None:
        """Ends the process, if there is one; a later comparison starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        if self._process is not None and self._owner != os.getpid():  # a fork: the pipes are the parent's
            self._process, self._ready = None, False
        if self._process is None or (self._ready and self._process.poll() is not None):
            self._stop()
            self._spawn()
        if not self._ready:
            reply = self._read(time.monotonic() + 120)
            if reply is None or "error" in reply:
                self._stop()
                why = "its process did not start" if reply is None else reply["error"]
                raise RuntimeError(f"math-verify is not usable ({why}): pip install 'stackalign[evals]'")
            self._ready = True

    def _spawn(self) -> None:
        # -P: the folder of this file must not shadow the standard library.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._owner, self._ready = os.getpid(), False

    def _stop(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is None or self._owner != os.getpid():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def _read(self, deadline: float) -> dict | None:
        """One reply, or None at the deadline or the end of the process."""
        data = b""
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                self._process.wait()
                return None
            data += part
        return json.loads(data)


_comparer = Comparer()
atexit.register(_comparer.close)


def score(item: Item, response: str) -> Score:
    """1 if the answer of `response` equals `item.gold` (a string or an integer), else 0.

    `item.facts["alternatives"]`, if present, are further right answers. `detail` holds `answer` (as found), and `how`
    it was compared or the `reason` why nothing was found.
    """
    answer, reason = extract(response, words=any(is_textual(gold) for gold in _golds(item)))
    if answer is None:
        return Score(0.0, False, {"answer": None, "reason": reason})
    how = ""
    for gold in _golds(item):
        verdict = equal(gold, answer)
        if verdict.equal:
            return Score(1.0, True, {"answer": answer, "how": verdict.how})
        how = verdict.how
    return Score(0.0, True, {"answer": answer, "how": how})


def equal(gold: str, answer: str, *, compare: Any = None) -> Verdict:
    """Whether two answers are equal (see the module). `compare` replaces the shared `Comparer`."""
    if max(len(gold), len(answer)) > MAX_ANSWER:
        return Verdict(False, f"longer than {MAX_ANSWER} characters")
    gold, answer = clean(gold), clean(answer)
    if not gold or not answer:
        return Verdict(False, "nothing is left after cleaning")
    if is_textual(gold):
        return Verdict(_text_key(gold) == _text_key(answer), "text")
    if "".join(gold.split()) == "".join(answer.split()):
        return Verdict(True, "text")
    left, right = _exact(gold), _exact(answer)
    if left and right:
        return Verdict(_same_number(left, right), "number")
    if not _answers.balanced(answer):
        return Verdict(False, "not an expression")
    if _BOMB.search(answer):
        return Verdict(False, "too large to evaluate")
    return (compare or _comparer)(_without_percent(gold, answer), _without_percent(answer, gold))


def extract(response: str, *, words: bool = False) -> tuple[str | None, str]:
    """`(answer, form)`, or `(None, why there is none)`.

    `words` admits answers without a digit or a formula in statements ("The answer is Friday").
    """
    text, reason = _answers.visible(response)
    if reason:
        return None, reason
    text = _answers.single_spaced(text)
    for segment in _answers.segments(text):
        answer, form = _extract(segment, words)
        if answer is not None:
            return (answer, form) if len(answer) <= MAX_ANSWER else (None, "the answer is too long")
        if form:
            return None, form
    return None, "no answer found"


def clean(text: str) -> str:
    """An answer without what does not change its value; written in LaTeX."""
    text = _UNICODE.sub(lambda m: _FORMS[m[0]], text)
    text = "".join(_written_out(char) if ord(char) > 127 else char for char in text)
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _BOLD.sub("", text)
    text = _SPACING.sub(" ", _BACKSPACE.sub("", text))
    text = text.replace("{,}", ",").replace("\\%", "%").replace("\\$", "$")
    text = _AND.sub(",", text)
    text = _RAISED.sub("^", text)
    text = _CURRENCY.sub("", text)
    text = _PI.sub(r"\\pi ", text)
    if not _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub("", text)
    text = " ".join(text.split()).strip(" ;:,").rstrip(" .;:,")
    text = _thousands(text)
    text = _units(text)
    if match := _ASSIGNMENT.fullmatch(text):
        text = match[1]
    return text.strip(" ;:,").rstrip(" .;:,")


def is_textual(gold: str) -> bool:
    r"""Whether an answer is a word or a letter ("\text{odd}", "(C)", "A,B") and not mathematics."""
    return bool(_TEXTUAL.fullmatch(_unboxed(clean(gold))))


def gold_of(solution: str) -> str:
    r"""The answer that a reference solution ends with: after `####`, or in its last `\boxed{}`.

    Raises:
      ValueError: it has neither.
    """
    if "####" in solution:
        return solution.rpartition("####")[2].strip()
    boxes = _answers.last_boxes(solution)
    if not boxes:
        raise ValueError(rf"no '####' and no \boxed{{}} in the solution {solution[-80:]!r}")
    return ",".join(boxes)


def items(rows: base.Rows, seed: int = 0) -> tuple[Item, ...]:
    r"""Items of MATH, AIME or GSM8K; the seed decides nothing.

    The question is `problem` or `question`. The gold is `gold`, else `answer` (what follows its last `####`, if it has
    one), else what `solution` ends with (`gold_of`); `answer_alt` is a further right answer. `facts` keep `category`
    (of `type` or `subject`), `level`, `year` and `paper_split` where they are given.

    Raises:
      ValueError: naming row and field.
    """
    del seed
    return base.build(rows, _item)


def _item(row: Mapping[str, Any], number: int) -> Item:
    gold = next((row[name] for name in ("gold", "answer") if row.get(name) not in (None, "")), None)
    if gold is None:
        gold = gold_of(base.text(row, "solution"))
    elif isinstance(gold, str) and "####" in gold:
        gold = gold_of(gold)
    if isinstance(gold, bool) or not isinstance(gold, str | int) or not str(gold).strip():
        raise ValueError(f"field 'gold' or 'answer' must be a text or a whole number, got {gold!r}")
    asked = base.text(row, "problem", "question")
    facts = {name: row[name] for name in ("level", "year", "paper_split") if row.get(name) is not None}
    if category := row.get("type") or row.get("subject"):
        facts["category"] = category
    if row.get("answer_alt"):
        facts["alternatives"] = [str(row["answer_alt"])]
    gold = str(gold).strip()
    # A grouped number, as GSM8K's "1,000"; a pair such as "1,2" is none.
    gold = gold.replace(",", "") if re.fullmatch(r"-?[0-9]{1,3}(,[0-9]{3})+", gold) else gold
    return problem(base.row_id(row, number, "id", "unique_id", "ID"), asked, gold, facts=facts)


def problem(id: str, text: str, gold: str | int, *, facts: Mapping[str, Any] | None = None) -> Item:
    r"""An item that asks for the reasoning and the final answer in `\boxed{}`."""
    content = f"{text.strip()}\n\nReason step by step, then give the final answer in \\boxed{{}}."
    return Item(id, ({"role": "user", "content": content},), str(gold), dict(facts or {}))


def _golds(item: Item) -> tuple[str, ...]:
    return tuple(str(gold) for gold in (item.gold, *item.facts.get("alternatives", ())))


# Cleaning ------------------------------------------------------------------------------------------------------------

_FORMS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/",
    "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "θ": r"\theta ", "°": r"^\circ", "º": r"^\circ", "˚": r"^\circ", "√": "\x01", "∈": r"\in ", "’": "'",
}  # fmt: skip
_UNICODE = re.compile("|".join(map(re.escape, _FORMS)))
_ROOT = re.compile(r"\x01 ?[({]?([0-9]+|[A-Za-z])[)}]?")
_BOLD = re.compile(
    r"\*\*|`|\\(?:displaystyle|left|right|big|Big|bigl|bigr|Bigl|Bigr|limits)(?![A-Za-z])|\\(?:mathbf|boldsymbol|bf)"
    r"(?![A-Za-z])"
)
_BACKSPACE = re.compile(r"(?<!\\)\\! ?")
_SPACING = re.compile(r"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|thinspace)(?![A-Za-z])")
_AND = re.compile(
    r",? ?(?:\\(?:text|mbox|textrm|mathrm) ?\{ ?,? ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])) ?|;",
    re.IGNORECASE,
)
_RAISED = re.compile(r"\*\*(?=[0-9({-])")
_CURRENCY = re.compile(r"[$€£¥₹]")
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_DEGREES = re.compile(
    r" ?\^ ?\{? ?\\(?:circ|degree)(?![A-Za-z]) ?\}?|\\degree(?![A-Za-z])|"
    r" ?\\(?:text|mbox|textrm|mathrm) ?\{ ?degrees? ?\}| degrees?(?![A-Za-z])",
)
_TRIGONOMETRIC = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|cis)(?![a-z])")
_GROUPED = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:, ?|\s)[0-9]{3})+(?![0-9])")
_TEXT_BOX = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|mbox|mathrm|mathbf|mathit)(?![A-Za-z]) ?")
_UNIT_BOX = re.compile(r"\\(?:text|mbox|textrm|mathrm|textit|rm) ?\{([^{}]*+)\} ?(?:\^ ?(?:\{?[0-9]\}?))?")
_UNIT_WORDS = re.compile(
    r"(?P<value>.*[0-9)}%]) "
    r"(?P<unit>(?!(?:sin|cos|tan|cot|sec|csc|log|ln|pi|sqrt|mod|and|or|to)(?![A-Za-z]))[A-Za-z]{2,}"
    r"(?: [A-Za-z/]+){0,5}(?:\^ ?\{?[0-9]\}?)?)\.?",
)
_ASSIGNMENT = re.compile(r"(?:[A-Za-z]|\\[a-z]+|[A-Za-z]_\{?[0-9A-Za-z]\}?|[a-z]\([a-z]\)) ?= ?([^=<>]+)")
_TEXTUAL = re.compile(r"[A-Za-z](?:[A-Za-z ,.()'-]*[A-Za-z.)])?|\([A-Za-z]\)")
_NUMBER_WORDS = {
    word: str(number)
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty".split()
    )
}


def _written_out(char: str) -> str:
    """Raised digits and vulgar fractions, which NFKC would run into the number before them."""
    decomposed = unicodedata.decomposition(char)
    if decomposed.startswith("<super>"):
        return "^{" + unicodedata.normalize("NFKC", char) + "}"
    if decomposed.startswith("<fraction>"):
        over, _, under = unicodedata.normalize("NFKC", char).partition("\u2044")
        return rf"\frac{{{over}}}{{{under}}}" if under else char
    return char


def _thousands(text: str) -> str:
    """1,000,000 and 1 000 000 joined; "81, 256" is a list, and so is what stands in brackets."""
    if "(" in text or "[" in text or "{" in text.replace(r"\frac{", "").replace("}{", ""):
        return (
            re.sub(r"(?<![0-9.,(\[])([0-9]{1,3})((?:,[0-9]{3})+)(?![0-9,)\]])", _joined, text)
            if "frac" in text
            else text
        )
    return _GROUPED.sub(lambda m: m[0] if ", " in m[0] else _joined(m), text)


def _joined(match: re.Match) -> str:
    return "".join(c for c in match[0] if c.isdigit())


def _units(text: str) -> str:
    """Without a unit that stands after a value."""
    while (boxes := list(_UNIT_BOX.finditer(text))) and text[boxes[-1].end() :].strip(" .%") == "":
        before = text[: boxes[-1].start()].rstrip()
        if not before or before[-1] not in "0123456789})%." + "abcdefghijklmnopqrstuvwxyz":
            break
        if not re.search(r"[0-9\\]", before):
            break
        text = before
    match = _UNIT_WORDS.fullmatch(text)
    return match["value"] if match else text


def _unboxed(text: str) -> str:
    text = _TEXT_BOX.sub("", text)
    return " ".join(text.replace("{", "").replace("}", "").replace("$", "").split()).strip(" .")


def _text_key(text: str) -> tuple[str, ...]:
    """Words without case, brackets and order."""
    parts = [part.strip(" .()'\"").casefold() for part in re.split(r",", _unboxed(text))]
    return tuple(sorted(_NUMBER_WORDS.get(part, part) for part in parts if part))


class _Number(NamedTuple):
    value: Fraction
    percent: bool


_DECIMAL = r"[0-9]{0,60}(?:\.[0-9]{1,60})?"
_PLAIN = re.compile(rf"(?=[0-9.]){_DECIMAL}\.?")
_FRACTION = re.compile(
    r"(?P<whole>[0-9]{1,30})? ?(?:\\[dtc]?frac ?(?:\{ ?(?P<a>[0-9]{1,60}) ?\}|(?P<b>[0-9])) ?"
    r"(?:\{ ?(?P<c>[0-9]{1,60}) ?\}|(?P<d>[0-9]))|(?<![0-9])(?P<e>[0-9]{1,60}) ?/ ?(?P<f>[0-9]{1,60}))"
)


def _exact(text: str) -> _Number | None:
    """The number that a cleaned answer is, if it is a plain one: integer, decimal, fraction, mixed number, percent."""
    text = text.strip()
    percent = text.endswith("%")
    text = text.rstrip("% ")
    sign = -1 if text.startswith("-") else 1
    text = text.lstrip("+-").strip() if text[:1] in "+-" and text[1:2] not in "+-" else text
    if text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1].strip()
    if _PLAIN.fullmatch(text):
        return _Number(sign * Fraction(text.rstrip(".") if not text.startswith(".") else "0" + text), percent)
    match = _FRACTION.fullmatch(text)
    if match is None:
        return (
            _Number(Fraction(_NUMBER_WORDS[word]), percent)
            if (word := _unboxed(text).lower()) in _NUMBER_WORDS
            else None
        )
    over, under = match["a"] or match["b"] or match["e"], match["c"] or match["d"] or match["f"]
    if not int(under):
        return None
    return _Number(sign * (Fraction(match["whole"] or 0) + Fraction(int(over), int(under))), percent)


def _same_number(gold: _Number, answer: _Number) -> bool:
    if gold.value == answer.value:
        return True
    if gold.percent == answer.percent:
        return False
    percent, plain = (gold, answer) if gold.percent else (answer, gold)
    return percent.value / 100 == plain.value


def _without_percent(text: str, other: str) -> str:
    return text.rstrip("% ") if "%" not in other else text.replace("%", r"\%")


# Evaluating it exactly may need astronomically many digits.
_BOMB = re.compile(
    r"\^ ?\{? ?[-(]? ?[0-9]{5,}|\^ ?[{(][^A-Za-z]{0,60}\^|\^ ?[0-9] ?\^|[)}] ?\^ ?\{? ?[0-9]{4,}|[0-9]{5,} ?!|! ?!|"
    r"\^[^A-Za-z,]{0,20}!|[0-9]{200,}|\\(?:binom|prod|sum)(?![A-Za-z]).*?[0-9]{5,}"
)


# Extraction ----------------------------------------------------------------------------------------------------------

_TAG = re.compile(
    r"[<\[](?:final_?)?answer[>\]]((?:[^<\[]|[<\[](?!/?(?:final_?)?answer[>\]])){1,1000})[<\[]/(?:final_?)?answer[>\]]",
    re.IGNORECASE,
)
_HASHES = re.compile(r"#### ?([^\n]{1,1000})")
_LINK = (
    r"(?:(?<![A-Za-z])(?:is|was|are|would be|should be|must be|has to be|will be|becomes|equals|comes to)"
    r"(?![A-Za-z'’])|:|=|→)"
)
_STATED = re.compile(
    r"(?<![A-Za-z])(?:answer|solution|result)s?[*_]*+"
    rf"(?: (?:to|for|of|in|here) ?[^.:=\n]{{0,60}})??[ *_]{{0,4}}{_LINK}",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"(?:[ *_:=\n]|"
    r"(?:therefore|then|thus|simply|just|exactly|indeed|also|that|equal to|given by|clearly)(?![A-Za-z]))*+",
    re.IGNORECASE,
)
_NEGATED = re.compile(r"(?:not|never|neither|no|unknown|unclear|undefined)(?![A-Za-z])", re.IGNORECASE)
_MATH = re.compile(
    r"\$\$([^$]{1,1000})\$\$|\$((?:[^$\n\\]|\\[^\n]){1,1000})\$(?![0-9])|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]",
    re.S,
)
_JOIN = re.compile(r" ?(?:,|;|,? ?(?:and|or)(?![A-Za-z])) ?", re.IGNORECASE)
_STOP = re.compile(
    r"\n|[.!?](?= |\n|\Z)|;(?= )|,? (?:because|since|which|as|so|where|when|while|but|for)(?![A-Za-z])"
    r"|,(?= [a-z]{3,})|\.?\*\*|(?<=[0-9]) \(",
)
_MATHLIKE = re.compile(r"[-+±−–]? ?(?:[0-9.(\[{\\$€£√π∞０-９½¼¾⅓⅔]|[A-Za-z](?![A-Za-z'’])|pi(?![a-z])|sqrt)")
_NUMERAL = re.compile(
    r"(?<![A-Za-z0-9_.,^])(?P<sign>[-−–+](?=[$€£]?[0-9.０-９]))?[$€£]?"
    r"(?P<core>(?:[0-9０-９]{1,60}(?:,[0-9]{3}(?![0-9]))*+(?:\.[0-9０-９]{1,60})?|\.[0-9]{1,60})"
    r"(?: ?/ ?[0-9]{1,60}(?![0-9.]))?)(?P<percent> ?\\?%)?"
)
_DENIED = re.compile(r"(?:(?<![A-Za-z])(?:not|never|neither)|n['’]t)(?![A-Za-z])[^.,;:]*$", re.IGNORECASE)
_REFUSAL = re.compile(
    r"(?<![A-Za-z])(?:cannot|can['’]t|can not|unable|don['’]t know|do not know|not sure|not certain|no idea|"
    r"not enough|insufficient|impossible to|sorry)(?![A-Za-z])",
    re.IGNORECASE,
)


def _extract(segment: str, words: bool) -> tuple[str | None, str]:
    """`(answer, form)`; `(None, reason)` where the segment's answer is unreadable, `(None, "")` where it has none."""
    boxes = _answers.last_boxes(segment)
    if boxes is None:
        return None, "the last box is cut off"
    hashes = _answers.last_matches(_HASHES, segment, 1)
    if hashes and (not boxes or hashes[0].start() > segment.rfind("\\boxed")):
        return hashes[0][1].strip(), "####"
    if boxes:
        return ",".join(dict.fromkeys(boxes)), "box"
    if tags := _answers.last_matches(_TAG, segment, 1):
        return tags[0][1].strip(), "tag"
    for statement in _answers.last_matches(_STATED, segment):
        answer = _stated(segment[statement.end() : statement.end() + 1500], words)
        if answer is not None:
            return answer, "statement"
    return _last_expression(segment, words)


def _stated(tail: str, words: bool) -> str | None:
    tail = tail[_LEAD.match(tail).end() :]
    if _NEGATED.match(tail) and not words:
        return None
    if (match := _MATH.match(tail)) is not None:
        parts = []
        while match is not None:
            parts.append(_inner(match))
            end = match.end()
            joint = _JOIN.match(tail, end)
            match = _MATH.match(tail, joint.end()) if joint else None
        unit = re.match(r" ?%", tail[end:])
        return ",".join(parts) + ("%" if unit else "")
    stop = _STOP.search(tail)
    answer = tail[: stop.start()] if stop else tail
    answer = answer.strip(" *_\"'“”:,")
    if not answer or len(answer) > 200:
        return None
    first = answer.lower().split()[0]
    if _MATHLIKE.match(answer) and not re.match(r"[Aa] [a-z]{2,}|I ", answer):
        return answer
    if first in _NUMBER_WORDS or (words and len(answer.split()) <= 4):
        return answer
    return None


def _inner(match: re.Match) -> str:
    return next(part for part in match.groups() if part is not None).strip()


def _last_expression(segment: str, words: bool) -> tuple[str | None, str]:
    line = segment.rsplit("\n", 1)[-1].strip(" *_.")
    if line.lower() in _NUMBER_WORDS or (words and line and len(line.split()) <= 3):
        return line, "line"
    if (
        len(segment) <= 200
        and "\n" not in segment
        and _MATHLIKE.match(line)
        and not re.search(r"[A-Za-z]{2,} [A-Za-z]{2,}", line)
    ):
        return line.strip("$ "), "line"
    window = segment[-4000:]
    formulas, numerals = list(_MATH.finditer(window)), list(_NUMERAL.finditer(window))
    formula = formulas[-1] if formulas else None
    numeral = numerals[-1] if numerals else None
    if formula is None and numeral is None:
        return None, ""
    position = max(match.start() for match in (formula, numeral) if match is not None)
    sentence_from = max(window.rfind(mark, 0, position) for mark in (". ", "\n", "! ", "? ")) + 1
    if _REFUSAL.search(window[sentence_from:]):
        return None, "a refusal"
    if formula is not None and (numeral is None or numeral.start() < formula.end()):
        inner = _inner(formula)
        return (inner.rsplit("=", 1)[-1].strip() or inner), "last formula"
    before = window[max(0, numeral.start() - 20) : numeral.start()]
    if _DENIED.search(before):
        return None, "a negation"
    if re.search(r"[0-9] ?(?:,|or|and) ?(?:[a-z] ?= ?)?$", before):
        return None, "more than one number"
    return (numeral["sign"] or "") + numeral["core"] + ("%" if numeral["percent"] else ""), "last number"

"""The 25 checks of IFEval: whether a text follows one verifiable instruction.

The meaning is that of the official checkers (Zhou et al. 2023, "Instruction-Following Evaluation for Large Language
Models"), whose oddities are part of the benchmark and are named where they occur. Every check takes time about linear
in the text and raises nothing, whatever the text. Texts are `str`; thresholds are whole numbers; a `relation` is
"at least" or "less than".

A **word** of `number_words` is a maximal run of letters, digits and underscores ("don't" is two). A **word** of
`capital_word_frequency` is a token of the Penn Treebank convention: split at white space, brackets, quotation marks,
dashes, sentence marks, and commas and colons without a digit after; clitics ('s, n't, 'LL) are words of their own. It
is capital if it holds a cased letter and no lower-case one ("I", "A", "U.S.", "3D").

A **sentence** is one of Punkt (Kiss & Strunk 2006) for English, whose learned tables are replaced by the short lists
below: white space or closing punctuation after `.`, `?` or `!` starts a sentence, whatever the case of the next letter,
but for periods of abbreviations ("Dr."), initials, ellipses and list numbers, where the next word has to look like a
start. Line ends alone do not start one, so a heading belongs to the sentence that follows it. "e.g." and "etc." are no
abbreviations to Punkt, "1." before a capital is a sentence, and so are a second mark that ends a text ("Wow!!") and
asterisks after one ("**Bold.**"). Marks of other scripts (`。`) end nothing.
"""

import functools
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import langdetect
from langdetect import detector_factory

_LANGUAGE_SEED = 0
# The detector itself reads 10 000 characters, after blanking addresses of pages and mails; this bounds the blanking.
_LANGUAGE_CHARS = 40_000

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCES = ("```json", "```Json", "```JSON", "```")

# Punctuation that ends a word, so that a mark before it may end a sentence.
_CLOSING = "\"')]}‘’“”«»"
_NON_WORD = _CLOSING + ";*:@({[?!"
_INNER_END = re.compile(rf"[.?!](?=[{re.escape(_NON_WORD)}])")
_LAST_WORD = re.compile(rf"[^{re.escape(_NON_WORD)}\-,#&`]*(?:-[^{re.escape(_NON_WORD)}\-,#&`]+)*\Z")
_NUMBER = re.compile(r"-?[.,]?\d[\d,.\-]*")
_INITIALS = re.compile(r"(?!e\.g|i\.e|p\.s|p\.p\.s)[a-z](?:\.[a-z])+")
_LETTERS = re.compile(r"[^\W\d_]+")
# Without their last period, in lower case. Beside them: letters with periods between, as in "U.S."
_ABBREVIATIONS = frozenset(
    # Titles and names; the single letters that Punkt takes for initials.
    "adm bros cie co col corp cos dr gen inc jr lt ltd messrs mr mrs ms ph.d prof rep reps sen sr st "
    "c d e f g h k l m n p r s t v w "
    # Places, months, days.
    "ala ariz calif colo conn fla ga ill kan ky mich minn nev okla ore pa tenn "
    "va vt w.va wash wis jan feb aug sep sept oct nov dec tues wed fri "
    # Others.
    "ave chg ct ft maj mg ok vs yr".split()
)
_STARTERS = frozenset(
    "although always among besides both but despite does even finally furthermore given he her here however if "
    "in indeed instead it many meanwhile moreover most nevertheless please similarly since so some sometimes "
    "such suddenly the there therefore these they this though through thus together ultimately unfortunately "
    "unless unlike upon were when whenever whether which while without yes yet your".split()
)

_CAPITAL_SEPARATORS = re.compile(
    r"""[\s"«»“”„‘’`;@#$%&?!*()\[\]{}<>\u2012-\u2015]+|[:,](?!\d)|--+|\.\.+|''|(?<!\w)'(?=\w)"""
)
_CLITIC = re.compile(r"(?<=[^' ])('[sSmMdD]|'ll|'LL|'re|'RE|'ve|'VE|n't|N'T)\Z")
_TWO_WORDS = re.compile(
    r"\b(?:(can)(not)|(gim)(me)|(gon)(na)|(got)(ta)|(lem)(me)|(d)('ye)|(more)('n)|(wan)(na))\b", re.I
)


class Check(NamedTuple):
    """One instruction type: `follows(text, **kwargs)`, and for each of `kwargs` what is wrong with a value, or None."""

    follows: Callable[..., bool]
    kwargs: Mapping[str, Callable[[Any], str | None]]


def language(text: str) -> str | None:
    """Code of the language that `langdetect` finds in a text, or None where it finds nothing to go by.

    The detector draws n-grams at random: here from a fixed seed at every call, and with its languages in one order on
    every machine. It ignores words in capitals.
    """
    detector = _detectors().create()
    detector.append(text[:_LANGUAGE_CHARS])
    try:
        return detector.detect()
    except langdetect.LangDetectException:
        return None


def count_sentences(text: str) -> int:
    """Number of sentences, as the module's docstring says what one is."""
    chunks = text.split()
    count, unfinished = 0, False
    for chunk, after in itertools.zip_longest(chunks, chunks[1:], fillvalue=""):
        # Only the last mark of a chunk counts: "?!" ends one sentence.
        end = len(chunk) if after and chunk[-1] in ".?!" else _last_inner_end(chunk)
        ended = end > 0 and _ends_sentence(chunk[:end], chunk[end:] or after)
        count += ended
        # Closing punctuation alone is no sentence: it belongs to the one before.
        rest = bool((chunk[end:] if ended else chunk).strip(_CLOSING))
        unfinished = rest or (unfinished and not ended)
    return count + unfinished


def capital_words(text: str) -> Iterator[str]:
    """Yields the words in capitals, as the module's docstring says what they are."""
    for token in _CAPITAL_SEPARATORS.split(text):
        if not token.isupper() and "'" not in token:
            continue
        # What follows a word's last letter must not hide a clitic.
        for piece in _TWO_WORDS.split(token.rstrip(".'")):
            yield from (part for part in _CLITIC.split(piece or "") if part.isupper())


def _last_inner_end(chunk: str) -> int:
    """Where the last mark ends that closing punctuation follows, 0 if none does."""
    return max((match.end() for match in _INNER_END.finditer(chunk)), default=0)


def _ends_sentence(before: str, after: str) -> bool:
    """Whether the mark that ends `before` ends a sentence, given what follows it."""
    if before[-1] != ".":
        return True
    if before.endswith(".."):
        return _starts_sentence(after)
    # What is looked for is short; a search through a long chunk would take quadratic time.
    word = _LAST_WORD.search(before[-40:])[0][:-1].lstrip("-").lower()
    if word in _ABBREVIATIONS or word.rpartition("-")[2] in _ABBREVIATIONS or _INITIALS.fullmatch(word):
        return len(word) > 1 and _starts_sentence(after)
    if _NUMBER.fullmatch(word) or (len(word) == 1 and word.isalpha()):
        return not (after[0].islower() or after[0] in ";:,.!?")
    return True


def _starts_sentence(after: str) -> bool:
    word = _LETTERS.match(after)
    return bool(word) and after[0].isupper() and word[0].lower() in _STARTERS


@functools.cache
def _detectors():
    """langdetect's factory with its profiles in one order: a folder's own order differs between machines."""
    factory = detector_factory.DetectorFactory()
    profiles = sorted(p for p in pathlib.Path(detector_factory.PROFILES_DIRECTORY).iterdir() if p.is_file())
    factory.load_json_profile([profile.read_text(encoding="utf-8") for profile in profiles])
    factory.set_seed(_LANGUAGE_SEED)
    return factory


# Keywords.


def _holds(count: int | Iterable, relation: str, threshold: int) -> bool:
    """Whether a count (or the number of what is iterated) is as asked."""
    if relation not in _RELATIONS:
        raise ValueError(f"relation must be one of {_RELATIONS}, got {relation!r}")
    if not isinstance(count, int):
        count = sum(1 for _ in itertools.islice(count, threshold))
    return count >= threshold if relation == "at least" else count < threshold


def _keywords_existence(text: str, *, keywords: list[str]) -> bool:
    return all(re.search(re.escape(keyword), text, re.IGNORECASE) for keyword in keywords)


def _keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    # Also inside other words.
    return _holds(re.finditer(re.escape(keyword.strip()), text, re.IGNORECASE), relation, frequency)


def _forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    # Whole words only.
    return not re.search(rf"\b(?:{'|'.join(map(re.escape, forbidden_words))})\b", text, re.IGNORECASE)


def _letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


# Language and case.


def _response_language(text: str, *, language: str) -> bool:
    # A text without a language follows every one.
    return _is_language(text, language)


def _is_language(text: str, code: str) -> bool:
    return language(text) in (code, None)


def _english_capital(text: str) -> bool:
    return text.isupper() and _is_language(text, "en")


def _english_lowercase(text: str) -> bool:
    return text.islower() and _is_language(text, "en")


def _capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return _holds(capital_words(text), capital_relation, capital_frequency)


# Lengths.


def _number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return _holds(count_sentences(text), relation, num_sentences)


def _number_words(text: str, *, num_words: int, relation: str) -> bool:
    return _holds(re.finditer(r"\w+", text), relation, num_words)


def _number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    return _parts(text.split("***"), num_paragraphs) is not None


def _nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    # Blank paragraphs are not counted, but they are numbered.
    count = sum(not blank for blank in map(_is_blank, paragraphs))
    if count != num_paragraphs or nth_paragraph > count or _is_blank(paragraphs[nth_paragraph - 1]):
        return False
    word = paragraphs[nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'").lstrip('"')
    return re.split("[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


def _parts(parts: list[str], count: int) -> list[str] | None:
    """The parts between separators if there are `count`, none blank but for the first and the last, which then don't
    count."""
    if any(map(_is_blank, parts[1:-1])):
        return None
    parts = [part for part in parts if not _is_blank(part)]
    return parts if len(parts) == count else None


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


# Content and format.


def _number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return _holds(_placeholders(text), "at least", num_placeholders)


def _placeholders(text: str) -> Iterator[str]:
    """Yields what stands between an opening bracket and the next closing one of its line."""
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            yield line[start + 1 : end]
            start = line.find("[", end)


def _postscript(text: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()))


def _number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    # A bullet is a line of `-`, or of one `*` and something else: rules of dashes count. Numbers do not.
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def _constrained_response(text: str) -> bool:
    return any(answer in text for answer in _ANSWERS)


def _number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    # Both patterns run over the same text; neither takes what is blank within.
    single = (match[0].strip("*") for match in re.finditer(r"\*[^\n*]*\*", text))
    double = (match[0][2:-2] for match in re.finditer(r"\*\*[^\n*]*\*\*", text))
    return _holds((part for part in itertools.chain(single, double) if not _is_blank(part)), "at least", num_highlights)


def _multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return _holds(re.finditer(rf"{re.escape(section_spliter.strip())}\s?\d+", text), "at least", num_sections)


def _json_format(text: str) -> bool:
    text = text.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and end >= start + 3 and not _is_blank(line[start:end].lstrip("<").rstrip(">")):
            return True
    return False


# Combination, start, end, punctuation.


def _two_responses(text: str) -> bool:
    parts = _parts(text.split("******"), 2)
    return parts is not None and parts[0].strip() != parts[1].strip()


def _repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_checker(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _no_comma(text: str) -> bool:
    return "," not in text


# What is wrong with the value of a kwarg.

_RELATIONS = ("at least", "less than")


def _count(value: Any) -> str | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return None if whole and value >= 1 else "must be a whole number, at least 1"


def _relation(value: Any) -> str | None:
    return None if value in _RELATIONS else f"must be one of {_RELATIONS}"


def _string(value: Any) -> str | None:
    return None if isinstance(value, str) and value.strip() else "must be a string that is not blank"


def _strings(value: Any) -> str | None:
    good = isinstance(value, list | tuple) and value and not any(map(_string, value))
    return None if good else "must be a list of strings that are not blank"


def _letter(value: Any) -> str | None:
    return None if isinstance(value, str) and len(value) == 1 and not value.isspace() else "must be one character"


def _language_code(value: Any) -> str | None:
    codes = _detectors().get_lang_list()
    return None if value in codes else f"must be a language that langdetect knows: {', '.join(codes)}"


CHECKS: Mapping[str, Check] = {
    "change_case:capital_word_frequency": Check(
        _capital_word_frequency, {"capital_frequency": _count, "capital_relation": _relation}
    ),
    "change_case:english_capital": Check(_english_capital, {}),
    "change_case:english_lowercase": Check(_english_lowercase, {}),
    "combination:repeat_prompt": Check(_repeat_prompt, {"prompt_to_repeat": _string}),
    "combination:two_responses": Check(_two_responses, {}),
    "detectable_content:number_placeholders": Check(_number_placeholders, {"num_placeholders": _count}),
    "detectable_content:postscript": Check(_postscript, {"postscript_marker": _string}),
    "detectable_format:constrained_response": Check(_constrained_response, {}),
    "detectable_format:json_format": Check(_json_format, {}),
    "detectable_format:multiple_sections": Check(
        _multiple_sections, {"section_spliter": _string, "num_sections": _count}
    ),
    "detectable_format:number_bullet_lists": Check(_number_bullet_lists, {"num_bullets": _count}),
    "detectable_format:number_highlighted_sections": Check(_number_highlighted_sections, {"num_highlights": _count}),
    "detectable_format:title": Check(_title, {}),
    "keywords:existence": Check(_keywords_existence, {"keywords": _strings}),
    "keywords:forbidden_words": Check(_forbidden_words, {"forbidden_words": _strings}),
    "keywords:frequency": Check(_keyword_frequency, {"keyword": _string, "frequency": _count, "relation": _relation}),
    "keywords:letter_frequency": Check(
        _letter_frequency, {"letter": _letter, "let_frequency": _count, "let_relation": _relation}
    ),
    "language:response_language": Check(_response_language, {"language": _language_code}),
    "length_constraints:nth_paragraph_first_word": Check(
        _nth_paragraph_first_word, {"num_paragraphs": _count, "nth_paragraph": _count, "first_word": _string}
    ),
    "length_constraints:number_paragraphs": Check(_number_paragraphs, {"num_paragraphs": _count}),
    "length_constraints:number_sentences": Check(_number_sentences, {"num_sentences": _count, "relation": _relation}),
    "length_constraints:number_words": Check(_number_words, {"num_words": _count, "relation": _relation}),
    "punctuation:no_comma": Check(_no_comma, {}),
    "startend:end_checker": Check(_end_checker, {"end_phrase": _string}),
    "startend:quotation": Check(_quotation, {}),
}

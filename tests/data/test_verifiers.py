import fractions
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from stackalign.data import Instruction, verifiers, verify


def check(verifier, response, answer=None):
    return verify(Instruction("i", "p", answer, verifier), response)


@pytest.mark.parametrize(
    "response, number",
    [
        ("12", 12),
        ("12.", 12),
        ("12,", 12),
        ("**12**", 12),
        ("The answer is 12", 12),
        ("5 + 7 = 12!", 12),
        ("\\boxed{12}", 12),
        ("$12", 12),
        ("答案是１２。", 12),
        ("1,234", 1234),
        ("1,234,567.5", fractions.Fraction("1234567.5")),
        ("3,4", 4),
        ("\u221212", -12),
        ("-12", -12),
        ("-$12", -12),
        ("= - 3", -3),
        ("15 - 3", 3),
        ("15-3", 3),
        ("3\u20135", 5),
        ("12/5", fractions.Fraction(12, 5)),
        ("12%", fractions.Fraction(12, 100)),
        (".5", fractions.Fraction(1, 2)),
        ("1e3", 1000),
        ("2 because x2", 2),
        ("12 apples", 12),
        ("H2O", None),
        ("1.2.3", None),
        ("5 then 1.2.3", None),
        ("1/0", None),
        ("1e9999", None),
        ("twelve", None),
        ("x²", None),
        ("", None),
    ],
)
def test_last_number(response, number):
    assert verifiers.last_number(response) == number


@hypothesis.given(st.integers(-(10**12), 10**12))
@hypothesis.settings(deadline=None, max_examples=50)
def test_numbers_are_read_in_every_usual_form(value):
    for form in (
        f"{value}",
        f"{value:,}",
        f"**{value}**",
        f"So it is {value}.",
        f"{value}".replace("-", "\u2212"),
        f"{value}.0",
    ):
        assert check({"kind": "integer", "value": value}, form)
        assert not check({"kind": "integer", "value": value + 1}, form)
        assert not check({"kind": "integer", "value": -value}, form) or value == 0


@pytest.mark.parametrize(
    "response, right",
    [
        ("3, 5, 9", True),
        ("Sorted: 3, 5, 9.", True),
        ("[3,5,9]", True),
        ("３，５，９", True),
        ("3 < 5 < 9", True),
        ("3, 5 and 9", True),
        ("1. 3\n2. 5\n3. 9", True),
        ("Sorting 9, 3, 5 gives: 3, 5, 9", True),
        ("Sort 9, 3, 5\n3, 5, 9", True),
        ("The list is 3, 5, 9 in order.", True),
        ("9, 5, 3", False),
        ("3, 5", False),
        ("2, 3, 5, 9", False),
        ("3, 5, 9, 12", False),
        ("3, 4, 5, 9", False),
        ("2\n3\n5\n9", False),
        ("-3, 5, 9", False),
        ("3, 5, 9. No: 5, 3, 9", False),
        ("3.5, 9", False),
        ("359", False),
    ],
)
def test_sequence_of_numbers(response, right):
    assert check({"kind": "sequence", "items": ["3", "5", "9"]}, response) == right


@pytest.mark.parametrize(
    "response, right",
    [
        ("apple, banana, cherry", True),
        ("Apple, banana, and cherry.", True),
        ("- apple\n- banana\n- cherry", True),
        ("1. apple\n2. banana\n3. cherry", True),
        ("The order is: apple, banana, cherry. Done!", True),
        ("apple, cherry, banana", False),
        ("date, apple, banana, cherry", False),
        ("apple, banana, cherry, date", False),
        ("apple, banana, cherry, banana", False),
        ("applebananacherry", False),
    ],
)
def test_sequence_of_words(response, right):
    assert check({"kind": "sequence", "items": ["apple", "banana", "cherry"]}, response) == right


def test_relations():
    # A relation that is missing or unknown must never count as satisfied.
    def passed(relation):
        return [check({"kind": "words", "relation": relation, "count": 3}, "w " * n) for n in (2, 3, 4)]

    assert passed("less than") == [True, False, False]
    assert passed("at most") == [True, True, False]
    assert passed("exactly") == [False, True, False]
    assert passed("at least") == [False, True, True]
    assert passed("more than") == [False, False, True]
    for verifier in ({"relation": "fewer than", "count": 3}, {"count": 3}, {"relation": None, "count": 3}):
        with pytest.raises(ValueError, match="relation"):
            check({"kind": "words", **verifier}, "w")


def test_unknown_kinds_and_nothing_to_check_raise():
    with pytest.raises(ValueError, match="psychic"):
        check({"kind": "psychic"}, "x")
    with pytest.raises(ValueError, match="neither a verifier nor an answer"):
        check(None, "x")
    with pytest.raises(ValueError, match="answer"):
        check({"kind": "exact"}, "x")
    with pytest.raises(TypeError):
        check(None, b"x", answer="x")


@pytest.mark.parametrize(
    "verifier, passes, fails",
    [
        ({"kind": "uppercase"}, ["RIVER", "A 1!"], ["River", "r", "123"]),
        ({"kind": "lowercase_line"}, ["the river", " the river.\n"], ["The river", "the\nriver", "123"]),
        (
            {"kind": "bullets", "count": 2},
            ["- a\n- b", "* a\n\n* b", "• a\n• b\n"],
            ["- a", "a\nb", "Here:\n- a\n- b", "-a\n-b"],
        ),
        ({"kind": "quoted"}, ['"a b"', "“a”", ' "a" '], ["a", '"', '""', '" "', "'a'", '"a" or "b"', '"a']),
        (
            {"kind": "json_key", "key": "k"},
            ['{"k": 1}', '```json\n{"k": null}\n```'],
            ['{"l": 1}', '["k"]', '{"k": NaN}', "k", '{"k": 1', 'Here: {"k": 1}'],
        ),
        ({"kind": "json_key", "key": "k", "value": 1}, ['{"k": 1}'], ['{"k": 2}', '{"k": "1"}', '{"k": true}']),
        ({"kind": "include", "words": ["tree", "sun"]}, ["Sun over a tree."], ["trees and sun", "a tree"]),
        ({"kind": "avoid", "words": ["the"]}, ["there is"], ["The end", "!!!"]),
        ({"kind": "begin", "word": "sun"}, ["Sun is", "**Sun** is", '"Sun" is'], ["Sunny", "a sun"]),
        ({"kind": "end", "word": "sun"}, ["the sun", "a Sun.", "sun!\n"], ["sun is", "suns"]),
        (
            {"kind": "all", "checks": [{"kind": "uppercase"}, {"kind": "include", "words": ["sun"]}]},
            ["SUN"],
            ["Sun", "MOON"],
        ),
    ],
)
def test_format_and_keyword_kinds(verifier, passes, fails):
    assert [response for response in passes if not check(verifier, response)] == []
    assert [response for response in fails if check(verifier, response)] == []


@pytest.mark.parametrize("response", ["Paris", "paris.", " **Paris** ", '"PARIS"!', "Ｐａｒｉｓ", "“Paris”"])
def test_an_answer_alone_is_matched_after_normalisation(response):
    assert check(None, response, answer="Paris")


@pytest.mark.parametrize(
    "answer, response", [("5", "-5"), ("C", "C++"), ("5", "$5"), ("x2", "x²"), ("no", "yes"), ("a", "")]
)
def test_normalisation_keeps_what_matters(answer, response):
    assert not check(None, response, answer=answer)


EVERY_KIND = [
    {"kind": "exact"},
    {"kind": "normalized"},
    {"kind": "integer", "value": 0},
    {"kind": "sequence", "items": ["1", "2"]},
    {"kind": "sequence", "items": ["apple", "banana"]},
    {"kind": "uppercase"},
    {"kind": "lowercase_line"},
    {"kind": "bullets", "count": 1},
    {"kind": "quoted"},
    {"kind": "words", "relation": "at least", "count": 1},
    {"kind": "words", "relation": "less than", "count": 3},
    {"kind": "json_key", "key": "k"},
    {"kind": "include", "words": ["x"]},
    {"kind": "avoid", "words": ["x"]},
    {"kind": "begin", "word": "x"},
    {"kind": "end", "word": "x"},
    {"kind": "all", "checks": [{"kind": "avoid", "words": ["x"]}]},
]
ids = [verifier["kind"] for verifier in EVERY_KIND]


def test_the_list_above_has_every_kind():
    assert set(ids) == set(verifiers.KINDS)


@pytest.mark.parametrize("verifier", EVERY_KIND, ids=ids)
def test_empty_and_binary_looking_responses_never_pass(verifier):
    answer = "\x00\x01"
    for response in (
        "",
        " \n\t",
        "\x00\x01",
        "X\x00",
        "\ud800",
        '"x"\x07',
        "\x7fELF",
        "1, 2\x1b[0m",
        '{"k": 1}\x00',
        "\u3000",
    ):
        assert not check(verifier, response, answer)


@pytest.mark.parametrize("verifier", EVERY_KIND, ids=ids)
def test_huge_responses_take_linear_time(verifier):
    for unit in ("1", "1,", "1 / ", "- ", " ", "apple ", "x'", "```\n", "[", '{"k":', "1.\n", "= - ", '"', "é"):
        response = "x " + unit * (200_000 // len(unit)) + "!"
        start = time.process_time()
        check(verifier, response, "y")
        assert time.process_time() - start < 2.0


@hypothesis.given(st.text(max_size=60), st.sampled_from(EVERY_KIND))
@hypothesis.settings(deadline=None, max_examples=300)
def test_no_response_crashes(response, verifier):
    assert check(verifier, response, "y") in (True, False)


def test_a_million_characters_with_the_answer_at_the_end():
    assert check({"kind": "integer", "value": 12}, "so " * 333_333 + "12")
    assert not check({"kind": "integer", "value": 12}, "12 " + "9" * 1_000_000)

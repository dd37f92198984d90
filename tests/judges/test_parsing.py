import json
import math
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from stackalign.judges import parse_score

SCORES = [
    # JSON
    ('{"score": 7}', 7),
    ('{"score": 8.5}', 8.5),
    ('{"score": 7e0}', 7),
    ('{"score":\n10 }', 10),
    ('{"score": "7"}', 7),
    ('{"score": "8/10"}', 8),
    ('{"score": "8 out of 10"}', 8),
    ('{"Score": 7}', 7),
    ('{"score"： ７}', 7),
    ('{"score": "８"}', 8),
    ("{score: 8}", 8),
    ("{'score': 8}", 8),
    ('{"score": 8,}', 8),
    ('```json\n{"score": 8}\n```', 8),
    ('Sure! {"score": 6} Hope this helps.', 6),
    ('It\'s {"score": 8}', 8),
    ('Score must be 1 to 10. {"score": 4}', 4),
    ('Like {"score": score}: {"score": 6}', 6),
    ('{"score": 3} no, {"score": 6}', 6),
    ('{"score": 85} no, {"score": 6}', 6),
    ('{"score": 6} {"reason": "fine"}', 6),
    ('{"score": 8, "score": 3}', 3),
    ('{"score": 9, "reason": "uses {a: 1}"}', 9),
    ('{"score": 9, "reason": "uses } and {"}', 9),
    ('{"score": 9, "reason": "it says {\'score\': 1}"}', 9),
    ('{"reason": "not \\"score\\": 2", "score": 9}', 9),
    ('{"reason": "not {\\"score\\": 2}", "score": 9}', 9),
    ('{"result": {"score": 7}}', 7),
    ('{"result": {"score": 7}, "note": "not \'score\': 2"}', 7),
    ('{"results": [{"score": 7}], "note": "not \'score\': 2"}', 7),
    ('{"a": [1, {"b": {"score": 6}}]}', 6),
    ('[{"score": 7}]', 7),
    ('{"score": 9, "parts": {"score": 3}}', 9),
    # thinking
    ('<think>{"score":2}</think>{"score":8}', 8),
    ('{"score":2}</think>{"score":8}', 8),
    ('<think>a<think>b</think>{"score":2}</think>\n8', 8),
    ('{"score":8}<think>{"score":2}', 8),
    ("<THINK>Score: 2</THINK>Score: 8", 8),
    # broken or cut objects
    ('{"score": 8', 8),
    ('{"score": 10', 10),
    ('{"score": 9, "reason": "The clarity score is 3', 9),
    ('{"score": 9, "reason": "he said "score: 2" there"}', 9),
    ('{"score": 7 "reason": "x"}', 7),
    ('{"score": 7 // good\n}', 7),
    ('{"score": 8/10}', 8),
    ("{“score”: 8}", 8),
    # words
    ("Score: 7", 7),
    ("score：８", 8),
    ("**Score:** 8", 8),
    ("**Score: 8**", 8),
    ("Score:\n8", 8),
    ("score=8", 8),
    ("Final score - 8", 8),
    ("Score – 8", 8),
    ("My score: **7**/10", 7),
    ("Score: 8.", 8),
    ("Score: 8.0", 8),
    ("Score: 8 because of 3 errors", 8),
    ("Score: 10/10", 10),
    ("Score: 7 (out of 10)", 7),
    ("Score (1-10): 7", 7),
    ("Rating: 8.5/10", 8.5),
    ("rating of 8 out of ten", 8),
    ("overall_score: 8", 8),
    ("<score>8</score>", 8),
    ("The score would be an 8.", 8),
    ("Clarity score: 9. Overall score: 6", 6),
    ("There are 5 reasons why this deserves a score of 9", 9),
    ("Question 3. Score: 6", 6),
    ("The score is 7, not 9.", 7),
    ("[[8]]", 8),
    ("Rating: [[8.5]]", 8.5),
    # out of ten, verdicts, lone numbers
    ("10/10", 10),
    ("１０／１０", 10),
    ("8 / 10", 8),
    ("8 out of 10", 8),
    ("I give this answer an 8/10 for its 3 examples.", 8),
    ("I'd give it a 7", 7),
    ("I would rate this response 7.", 7),
    ("On a scale of 1 to 10, I rate it 6.", 6),
    ("7", 7),
    ("8.5", 8.5),
    ("10", 10),
    ("1", 1),
    ("**9**", 9),
    (" 9.\n", 9),
    ("9 points", 9),
    ("7\n\nThe response is good.", 7),
    ("The response is good.\n7", 7),
]

FAILURES = [
    "",
    "  \n",
    "no idea",
    # out of range is never clamped
    '{"score": 85}',
    '{"score": 0}',
    '{"score": -3}',
    '{"score": 10.5}',
    '{"score": "85"}',
    '{"score": 1e400}',
    '{"score": 9.2e124}',
    '{"score": 6} {"score": 85}',
    "[[90]]",
    "score: -3",
    "score -3",
    "Score: 0",
    "Score: 10.01",
    "85",
    "0.8",
    "-7",
    "２５",
    "9" * 400,
    # not numbers
    '{"score": NaN}',
    '{"score": Infinity}',
    '{"score": -Infinity}',
    '{"score": True}',
    '{"score": true}',
    '{"score": null}',
    '{"score": "high"}',
    '{"score": ""}',
    '{"score": {"value": 8}}',
    '{"score": [8]}',
    '{"score": score}',
    '{"scores": [3, 4]}',
    "score is nine",
    "Score: seven",
    "Score: N/A",
    # other scales, ranges, the scale itself
    "Score: 4/5",
    "Score: 4 out of 5",
    "Score: 4 (out of 5)",
    "Score: 85/100",
    "Score: 8%",
    '{"score": "4/5"}',
    "80%",
    "5 stars",
    "7-8",
    "7-8/10",
    "7 - 8/10",
    "Score: 7-8",
    "Score: 7 to 8",
    '{"score": 7-8}',
    "I'd give it 7 or 8",
    "a score between 7 and 8",
    "Score: 1-10",
    "score: 1 to 10",
    "score must be between 1 and 10",
    "Score must be in the range of 1 to 10.",
    # numbers that score nothing
    "There are 3 errors and 4 typos",
    "2 plus 2 is 4",
    "The answer is 7",
    "I can give 5 reasons.",
    "I'll score 5 responses",
    "Score > 5",
    "7\n8",
    "10/10/2024",
    "2024-10-10",
    "-3/10",
    "Score: 1.2.3",
    "Score: 8,5",
    '{"score": 8,5}',
    # cut off, or only thought
    '{"score": 1',
    '{"score": ',
    "<think>x</think>",
    '<think>{"score": 2}',
    "<think>Score: 2",
    '{"score": 2}</think>no verdict',
]


@pytest.mark.parametrize("reply, score", SCORES)
def test_scores(reply, score):
    assert parse_score(reply).score == score


@pytest.mark.parametrize("reply", FAILURES)
def test_failures(reply):
    parsed = parse_score(reply)
    assert parsed.score is None and parsed.reason


@pytest.mark.parametrize("reply", [None, 7, b"7", {"score": 7}])
def test_what_is_not_text_fails(reply):
    assert parse_score(reply).score is None


@hypothesis.given(
    st.decimals(-20, 200, places=2),
    st.sampled_from(['{{"score": {}}}', "Score: {}", "{}", '{{"a": {{"score": "{}"}}}}', "{}/10"]),
)
@hypothesis.settings(deadline=None, max_examples=150)
def test_a_score_is_the_number_that_stands_there_or_a_failure(number, form):
    text = f"{number:f}"
    expected = float(text) if 1 <= number <= 10 else None
    assert parse_score(form.format(text)).score == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from(['{"score": 3}', "}", "Score: 2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@hypothesis.given(json_values, st.integers(1, 10), st.text(alphabet="ab c'.,\n", max_size=20), st.booleans())
@hypothesis.settings(deadline=None, max_examples=200)
def test_whatever_else_is_in_the_object_its_own_score_is_read(extra, score, prose, ascii_only):
    text = json.dumps({"reason": extra, "score": score, "more": extra}, ensure_ascii=ascii_only)
    assert parse_score(prose + text + prose).score == score


@hypothesis.given(st.text(max_size=80) | st.text(alphabet="{}[]\"':,\\ score8-/10.<>think", max_size=80))
@hypothesis.settings(deadline=None, max_examples=400)
def test_never_raises_and_never_leaves_the_range(reply):
    score = parse_score(reply).score
    assert score is None or (math.isfinite(score) and 1 <= score <= 10)


N = 1_000_000
UNITS = [
    "{",
    '{"',
    '{"score":',
    '{"a":',
    '{"score":[{"a":[',
    "[",
    "'{\"",
    '\\"{',
    " ",
    "score ",
    "score: ",
    "score (",
    "8/",
    "8 ",
    "8.",
    "1e",
]
UNITS += [
    "<think>",
    "</think>",
    "give it ",
    "8 to ",
    "8 out of ",
    "\"'",
    "is ",
    ",",
    '":",",',
    '{"score":"{\'a\':',
    '[{"score":1},',
    "\n",
]


@pytest.mark.parametrize("unit", UNITS)
def test_linear_time(unit):
    def seconds(size):
        text = 'score {"score' + unit * (size // len(unit))
        start = time.process_time()
        parse_score(text)
        return time.process_time() - start

    assert seconds(N // 4) < 2.0  # a quadratic parser takes minutes


@pytest.mark.parametrize("junk", ["x", "{", "9 ", "é"])
def test_a_megabyte_of_junk_does_not_hide_a_score(junk):
    assert parse_score(junk * (N // len(junk)) + ' {"score": 7}').score == 7
    assert parse_score('{"score": 7} ' + junk * (N // len(junk))).score == 7


def test_deep_nesting():
    depth = 100_000
    assert parse_score('{"a":' * depth + '{"score": 7}' + "}" * depth).score == 7

import concurrent.futures
import json
import sys
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from stackalign.data import readers
from stackalign.evals import mathematics
from stackalign.evals.base import Item

pytest.importorskip("math_verify")

RIGHT = [
    ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}"),
    ("\\frac{1}{2}", "The answer is ½."),
    ("\\frac{5}{2}", "\\boxed{2½}"),
    ("\\sqrt{13}", "\\boxed{√13}"),
    ("2\\sqrt{3}", "\\boxed{\\sqrt{12}}"),
    ("x^2", "\\boxed{x²}"),
    ("169", "\\boxed{13²}"),
    ("60^\\circ", "\\boxed{60°}"),
    ("60^\\circ", "\\boxed{60}"),
    ("60^\\circ", "The answer is 60 degrees."),
    ("30^\\circ.", "\\boxed{30^{\\circ}}"),
    ("108\\text{ degrees}", "\\boxed{108^\\circ}"),
    ("45^\\circ, 60^\\circ, 75^\\circ", "\\boxed{75°, 60°, 45°}"),
    ("1,\\!000,\\!000", "\\boxed{1000000}"),
    ("1,\\!000,\\!000", "The answer is 1,000,000."),
    ("1722", "\\boxed{1{,}722}"),
    ("1722", "\\boxed{1\\,722}"),
    ("81, 256", "\\boxed{256, 81}"),
    ("12,9", "\\boxed{9 \\text{ and } 12}"),
    ("12,9", "\\boxed{9} and \\boxed{12}"),
    ("12,9", "$\\boxed{12}$, $\\boxed{9}$."),
    ("\\frac 74,7", "\\boxed{7, \\frac{7}{4}}"),
    ("-1, \\; -5", "The answer is $-5$ and $-1$."),
    ("-1,8", "x = -1 or x = 8"),
    ("0,1", "\\boxed{1,0}"),
    ("\\$1.05", "The answer is $1.05."),
    ("\\$ 1500", "\\boxed{1,500}"),
    ("\\$2.75", "\\boxed{\\text{\\$}2.75}"),
    ("2 \\text{ euros}", "\\boxed{2}"),
    ("4 \\text{ feet}", "\\boxed{4\\text{ ft}}"),
    ("4 \\text{ feet}", "The answer is 4 feet."),
    ("20\\text{ square units}", "\\boxed{20}"),
    ("840\\text{ square inches}", "\\boxed{840 \\text{ in}^2}"),
    ("6\\frac{1}{6}\\text{ feet}", "\\boxed{\\frac{37}{6}}"),
    ("\\mbox{four}", "\\boxed{4}"),
    ("\\mbox{four}", "The answer is four."),
    ("240\\text{ ways.}", "\\boxed{240}"),
    ("\\text{Friday}", "The answer is Friday."),
    ("\\text{Friday}", "\\boxed{friday}"),
    ("\\text{odd}", "\\boxed{odd}"),
    ("\\text{A,B}", "\\boxed{A, B}"),
    ("\\text{A,B}", "\\boxed{B \\text{ and } A}"),
    ("(\\text{H})", "\\boxed{H}"),
    ("\\text{(A)}", "The answer is (A)."),
    ("(4,4)", "\\boxed{(4, 4)}"),
    ("(-4,8)", "\\boxed{\\left(-4,8\\right)}"),
    ("[-6,\\infty)", "\\boxed{[-6, ∞)}"),
    ("(-\\infty, 1) \\cup (1, 3) \\cup (3, \\infty)", "\\boxed{(-∞,1)∪(1,3)∪(3,∞)}"),
    ("y = x+2", "\\boxed{x+2}"),
    ("y = x+2", "\\boxed{y=2+x}"),
    ("x=2", "\\boxed{2}"),
    ("5", "\\boxed{x=5}"),
    ("5", "\\boxed{x = 5}"),
    ("(t-7)(t+7)", "\\boxed{(t+7)(t-7)}"),
    ("(t-7)(t+7)", "\\boxed{t^2-49}"),
    ("120a^{10}", "\\boxed{120 a^{10}}"),
    ("40\\pi", "\\boxed{40π}"),
    ("40\\pi", "The answer is 40 pi."),
    ("400 - 100\\pi", "\\boxed{100(4-\\pi)}"),
    ("\\frac{\\sqrt{6} - \\sqrt{2}}{4}", "\\boxed{\\frac{\\sqrt{2}(\\sqrt{3}-1)}{4}}"),
    ("\\tan x", "\\boxed{\\frac{\\sin x}{\\cos x}}"),
    ("2 \\sin b \\cos a", "\\boxed{2\\cos a\\sin b}"),
    ("3-i", "\\boxed{-i+3}"),
    ("\\begin{pmatrix} 5 \\\\ 12 \\end{pmatrix}", "\\[\\boxed{\\begin{pmatrix}5\\\\12\\end{pmatrix}}\\]"),
    (
        "\\begin{pmatrix} 7/17 & -3/17 \\\\ 1/17 & 2/17 \\end{pmatrix}",
        "\\boxed{\\begin{pmatrix} \\frac{7}{17} & -\\frac{3}{17} \\\\ \\frac{1}{17} & \\frac{2}{17} \\end{pmatrix}}",
    ),
    ("20\\%", "\\boxed{20\\%}"),
    ("20\\%", "The answer is 20%."),
    ("20\\%", "\\boxed{0.2}"),
    ("20", "\\boxed{20\\%}"),
    ("10.00", "\\boxed{10}"),
    (".3", "\\boxed{0.3}"),
    ("-\\frac{3}{2}", "\\boxed{-1.5}"),
    ("-\\frac32", "\\boxed{−3/2}"),
    ("5", "\\boxed{\\text{answer}} ... the answer is 5"),
    ("5", "\\boxed 5"),
    ("n", "\\boxed{n}"),
    ("18", "She makes 9*2 = $18 per day."),
    ("18", "She makes $9 * 2 = $18."),
    ("18", "#### 18"),
    ("18", "#### $18.00"),
    ("18", "The answer is 18 because 9*2=18 and 3+4=7."),
    ("18", "Answer: 18 dollars"),
    ("18", "Answer: 18 dollars per day"),
    ("18", "**Final Answer**\n\n18"),
    ("18", "### Final Answer: 18"),
    ("18", "Final answer: $18$"),
    ("18", "The final answer is: \\(18\\)"),
    ("18", "The answer is:\n\\[\n18\n\\]"),
    ("18", "18\n\nQuestion: What is 9+9?\nAnswer: 19"),
    ("-18", "- 18"),
    ("18", "18"),
    ("18", "Eighteen"),
    ("18", "eighteen."),
    ("70000", "70,000"),
    ("70000", "$70,000"),
    ("5", "The total is 3 + 2 = 5"),
    ("5", "= 5"),
    ("16x^2+4x+5", "\\boxed{4x+16x^2+5}"),
    ("2.4", "\\boxed{\\frac{12}{5}}"),
    ("2.4", "\\boxed{12/5}"),
    ("8^3", "\\boxed{512}"),
    ("3", "\\boxed{\\log_2 8}"),
    ("6", "\\boxed{3!}"),
    ("\\frac{2}{3}", "2/3"),
    ("5", "The result is 5 apples."),
    ("12", "The answer is **12**"),
    ("1000", "10^3"),
    ("1000", "\\boxed{10^{3}}"),
    ("3", "3."),
    ("{1,2}", "\\boxed{\\{1,2\\}}"),
    ("3 - \\sqrt3", "\\boxed{3-\\sqrt{3}}"),
    ("5", "<answer>5</answer>"),
    ("5", "[ANSWER] 5 [/ANSWER]"),
    ("6x^2y^3", "\\boxed{6y^3x^2}"),
    ("a^3b^3", "\\boxed{(ab)^3}"),
    ("e^{x^2}", "\\boxed{e^{x^{2}}}"),
    ("x^{10}-y^{10}", "\\boxed{-y^{10}+x^{10}}"),
    ("120", "\\boxed{5!}"),
    ("10", "\\boxed{\\binom{5}{2}}"),
    ("2^{100}", "\\boxed{4^{50}}"),
    ("15", "\\boxed{\\sum_{k=1}^{5} k}"),
]

WRONG = [
    ("2\\sqrt{3}", "\\boxed{3.464102}"),
    ("\\frac{1}{3}", "\\boxed{0.333333}"),
    ("132", "\\boxed{13²}"),
    ("81, 256", "\\boxed{81256}"),
    ("12,9", "\\boxed{12}"),
    ("12", "\\boxed{12} or \\boxed{9}"),
    ("8", "x = -1 or x = 8"),
    ("\\text{Friday}", "\\boxed{\\text{Saturday}}"),
    ("\\text{odd}", "The function is \\boxed{\\text{even}}"),
    ("\\text{A,B}", "\\boxed{A}"),
    ("\\text{(A)}", "The answer is (B)."),
    ("(-4,8)", "\\boxed{(-4,-8)}"),
    ("[-6,\\infty)", "\\boxed{(-6,\\infty)}"),
    ("(5,\\infty)", "\\boxed{[5,\\infty)}"),
    ("(t-7)(t+7)", "\\boxed{t^2+49}"),
    ("40\\pi", "\\boxed{125.66}"),
    ("-i", "\\boxed{i}"),
    ("\\begin{pmatrix} 5 \\\\ 12 \\end{pmatrix}", "\\boxed{\\begin{pmatrix}12\\\\5\\end{pmatrix}}"),
    ("0.2", "\\boxed{20}"),
    ("20", "\\boxed{0.2}"),
    ("\\frac{1}{5}", "\\boxed{20}"),
    (".3", "\\boxed{3}"),
    ("5", "\\boxed{}"),
    ("5", "\\boxed{5"),
    ("5", "\\boxed{answer}"),
    ("n", "\\boxed{m}"),
    ("18", "I cannot tell, there are 18 options."),
    ("18", "The answer is not 18."),
    ("18", "So it is 18.5"),
    ("18", "118"),
    ("18", "1.18"),
    ("18", "-18"),
    ("2", "The answer is 2 hours and 15 minutes"),
    ("1", "\\boxed{9^{9^{9^9}}}"),
    ("1", "\\boxed{10^{99999999}}"),
    ("1", "\\boxed{99999999!}"),
    ("1", "\\boxed{\\sum_{n=1}^{10^9} n}"),
    ("1", "\\boxed{((((((((((((((((((((((((x+1)^9)^9)^9)^9)^9)^9)}"),
    ("\\frac{\\pi}{3}", "\\boxed{60^\\circ}"),
    ("0.5", "50 percent"),
    ("4", "The answer is A"),
    ("5", "The answer is 5 or 6"),
    ("2", "\\boxed{2\\text{ or }3}"),
    ("1.23", "1,23"),
    ("5", ""),
    ("5", "\x005"),
    ("5", "\ud8005"),
    ("\\frac{1}{2}", "\\boxed{\\frac{1}{2}"),
]

UNITS = [
    "a", " ", "\n ", "<answer>", "<think>", "</think>", "\\boxed{", "\\boxed{5}", "\\boxed{1} and ", "}", "{", "\\",
    "$", "$$", "answer is ", "the answer to ", "answer is $", "Answer:\n", "1", "1,", "1.", "-", "**", "####", "= ",
    "\\frac",
    "\\(", "\\[", "9^", "1/", "1 or ", "x = ", "$1$ and ", "\nQuestion: ", "\x00", "\ud800", "\ufffd", "\uff11",
]  # fmt: skip


def item(gold, **facts):
    return Item("q", (), gold, facts)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def comparer():
    made = mathematics.Comparer(cpu_seconds=0.3)
    yield made
    made.close()


def test_every_vector_is_scored_as_its_verdict(vectors):
    rows = [row for row in read_jsonl(vectors / "extraction.jsonl") if row["kind"] == "math"]
    assert len(rows) == 34
    scored = {row["id"]: mathematics.score(item(row["gold"]), row["response"]).value for row in rows}
    assert scored == {row["id"]: float(row["right"]) for row in rows}


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_right(gold, response):
    scored = mathematics.score(item(gold), response)
    assert scored.value == 1 and scored.parsed, scored


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_wrong(gold, response):
    assert mathematics.score(item(gold), response).value == 0


def test_math_golds_score_against_themselves(shared):
    if shared is None:
        pytest.skip("no folder of reference files")
    rows = read_jsonl(shared / "data" / "math_train_l12_index.jsonl")
    assert len(rows) == 1912
    for row in rows:
        dollars = row["answer"].replace("\\$", "")
        for response in (
            rf"\boxed{{{row['answer']}}}",
            f"The final answer is ${dollars}$.",
            f"**Answer:** ${dollars}$",
        ):
            assert mathematics.score(item(row["answer"]), response).value == 1, (row["answer"], response)
        if "answer_alt" in row:
            both = item(row["answer"], alternatives=[row["answer_alt"]])
            assert mathematics.score(both, rf"\boxed{{{row['answer_alt']}}}").value == 1


def test_math_golds_do_not_score_against_their_neighbours(shared):
    if shared is None:
        pytest.skip("no folder of reference files")
    rows = read_jsonl(shared / "data" / "math_train_l12_index.jsonl")[:600]
    same = [
        (one["answer"], other["answer"])
        for one, other in zip(rows, rows[1:], strict=False)
        if one["answer"] != other["answer"]
        and "%" not in one["answer"]  # 50 % is 1/2
        and mathematics.score(item(one["answer"]), rf"\boxed{{{other['answer']}}}").value == 1
    ]
    assert same == []


def test_gsm8k_golds_score_against_themselves(shared):
    if shared is None:
        pytest.skip("no folder of reference files")
    path = shared / "data" / "gsm8k_test.jsonl"
    rows, items = read_jsonl(path), mathematics.items(readers.read(path))
    assert len(items) == 1319 and [one.gold for one in items] == [row["gold"] for row in rows]
    for row, one in zip(rows, items, strict=True):
        assert one.messages[0]["content"].startswith(row["question"].strip())
        gold = row["gold"]
        for response in (
            row["answer"],
            gold,
            f"So it is {gold} in total.",
            f"The answer is ${gold}.",
            rf"\boxed{{{gold}}}",
        ):
            assert mathematics.score(one, response).value == 1, (gold, response)
        assert mathematics.score(one, f"The answer is {int(gold) + 1}.").value == 0


def test_aime_golds(shared):
    if shared is None:
        pytest.skip("no folder of reference files")
    for row in read_jsonl(shared / "data" / "aime_24_25_index.jsonl"):
        for response in (rf"\boxed{{{row['answer']:03d}}}", f"**Answer: {row['answer']}**"):
            assert mathematics.score(item(row["answer"]), response).value == 1
        assert mathematics.score(item(row["answer"]), rf"\boxed{{{row['answer']}.5}}").value == 0


@pytest.mark.parametrize("endless", [r"\binom{9999}{4999}^{999} x", r"(x+y+z)^{999}"])
def test_endless_comparison_is_ended_and_the_next_one_works(comparer, endless):
    assert comparer(r"\sqrt{12}", r"2\sqrt{3}").equal
    process = comparer._process
    start = time.monotonic()
    assert comparer("y^7+x", endless) == (False, "timeout")
    assert time.monotonic() - start < 15
    assert comparer(r"\sqrt{12}", r"2\sqrt{3}") == (True, "math-verify")
    assert comparer._process is process


def test_a_stuck_process_is_replaced():
    comparer = mathematics.Comparer(cpu_seconds=1000, wall_seconds=0.5)
    try:
        comparer("1", "x")
        process = comparer._process
        assert comparer("y^7+x", "(x+y+z)^{9999}") == (False, "timeout")
        assert process.poll() is not None
        comparer._limits = (1000, 60)
        assert comparer(r"\sqrt{12}", r"2\sqrt{3}").equal
    finally:
        comparer.close()


def test_a_killed_process_is_replaced(comparer):
    assert comparer("2x", "x+x").equal
    comparer._process.kill()
    comparer._process.wait()
    assert comparer("2x", "x+x").equal


def test_threads_share_one_process():
    pairs = [(rf"{n}\sqrt{{3}}", rf"\sqrt{{{3 * n * n + (n % 2)}}}") for n in range(2, 18)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: mathematics.equal(*pair).equal, pairs))
    assert found == [n % 2 == 0 for n in range(2, 18)]


def test_missing_package_is_named(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text("import json\nprint(json.dumps({'error': 'No module named math_verify'}))\n")
    monkeypatch.setattr(mathematics, "_WORKER", worker)
    with pytest.raises(RuntimeError, match="pip install"):
        mathematics.Comparer()("1", "x")


def test_ordinary_answers_need_no_process(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    none = mathematics.Comparer()
    assert mathematics.equal("1,\\!722", "1722", compare=none) == (True, "text")
    assert mathematics.equal(r"2\frac{1}{4}", "9/4", compare=none) == (True, "number")
    assert mathematics.equal(r"\text{odd}", "even", compare=none) == (False, "text")


@pytest.mark.parametrize("length", [100_000, 1_000_000])
def test_long_responses_take_less_than_a_second(length):
    for unit in UNITS:
        text = unit * (length // len(unit))
        start = time.process_time()
        scored = mathematics.score(item(r"\frac{1}{7}"), text)
        assert time.process_time() - start < 1, unit
        assert scored.value == 0
        assert length < 1_000_000 or not scored.parsed


def test_gold_of():
    assert mathematics.gold_of("so 1 + 1 = 2\n#### 2") == "2"
    assert mathematics.gold_of(r"thus $\boxed{3}$, not 4") == "3"
    with pytest.raises(ValueError, match="no '####'"):
        mathematics.gold_of("nothing")


def test_fields_of_the_data_sets():
    rows = [
        {"question": "How many?", "answer": "2 * 500 = 1,000\n#### 1,000"},
        {"problem": "Find x.", "solution": r"So $x = \boxed{\frac12}$.", "type": "Algebra", "level": "Level 1"},
        {"problem": "Find y.", "solution": "long", "answer": "(1,2)", "unique_id": "test/7", "subject": "Geometry"},
        {"id": "60", "problem": "Find z.", "answer": 204, "year": 2024},
        {"question": "Who?", "gold": "Joe", "answer": "#### 3", "answer_alt": "Joseph", "paper_split": "dev"},
    ]
    found = mathematics.items([(f"row {i}", row) for i, row in enumerate(rows)])
    assert [one.gold for one in found] == ["1000", r"\frac12", "(1,2)", "204", "Joe"]
    assert [one.id for one in found] == ["0", "1", "test/7", "60", "4"]
    assert [one.facts.get("category") for one in found] == [None, "Algebra", "Geometry", None, None]
    assert found[4].facts == {"paper_split": "dev", "alternatives": ["Joseph"]}
    assert mathematics.score(found[4], "The answer is Joseph.").value == 1


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"question": "q"}', '{"question": "q", "answer": true}', '{"question": "q", "solution": "none"}', ""],
)
def test_bad_files_are_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="bad.jsonl"):
        mathematics.items(readers.read(path))


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(st.lists(st.sampled_from([*UNITS, "7", ".", "so ", " or "]), max_size=10).map("".join))
def test_any_response_is_read_without_a_crash(response):
    answer, reason = mathematics.extract(response)
    assert answer is None or len(answer) <= mathematics.MAX_ANSWER
    assert isinstance(reason, str)
    if answer is not None:
        mathematics.clean(answer)


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_integers_are_equal_only_to_themselves(left, right):
    for form in (f"{right}", f"{right:,}", rf"\boxed{{{right}}}", f"The answer is {right:,}.", f"{right}.0"):
        assert mathematics.score(item(str(left)), form).value == float(left == right)
        assert mathematics.score(item(str(right)), form).value == 1

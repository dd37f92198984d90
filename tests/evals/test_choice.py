import json
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from stackalign.data import readers
from stackalign.evals import choice
from stackalign.evals.base import Item, Score

CUSTOMS = {"A": "Cycling everywhere", "B": "Using deodorant", "C": "Tipping generously", "D": "Talking loudly"}
NINE = {letter: f"option {letter}" for letter in "ABCDEFGHI"}
METALS = {"A": "iron", "B": "iron oxide", "C": "copper", "D": "tin"}
YES_NO = {"A": "Yes.", "B": "No.", "C": "Yes, most people do.", "D": "No, few people do."}

RESPONSES = [
    ("A careful look at the options shows nothing.", None, CUSTOMS),
    ("A careful look shows that the answer is B.", "B", CUSTOMS),
    ("A", "A", CUSTOMS),
    ("a", "A", CUSTOMS),
    ("b.", "B", CUSTOMS),
    ("b)", "B", CUSTOMS),
    ("(b)", "B", CUSTOMS),
    ("The answer is A careful look", None, CUSTOMS),
    ("The answer is a bird.", None, CUSTOMS),
    ("The answer is a", "A", CUSTOMS),
    ("The answer is A because it is common", "A", CUSTOMS),
    ("The answer is A or B.", None, CUSTOMS),
    ("The answer is either A or B.", None, CUSTOMS),
    ("The answer is B, not A.", "B", CUSTOMS),
    ("The answer is not B.", None, CUSTOMS),
    ("I don't think the answer is B.", None, CUSTOMS),
    ("The answer is A. Wait, the answer is B.", "B", CUSTOMS),
    ("A and B", None, CUSTOMS),
    ("A, B", None, CUSTOMS),
    ("A/B", None, CUSTOMS),
    ("A\nB", None, CUSTOMS),
    ("(A) (B)", None, CUSTOMS),
    ("I cannot answer this question.", None, CUSTOMS),
    ("I don't know.", None, NINE),
    ("I'm sorry, but I can't help with that.", None, NINE),
    ("I think B", "B", NINE),
    ("I would choose I.", "I", NINE),
    ("I", "I", NINE),
    ("I.", "I", NINE),
    ("i", "I", NINE),
    ("Sorry, as an AI I cannot choose.", None, CUSTOMS),
    ("<think>The answer is A</think>The answer is C.", "C", CUSTOMS),
    ("<think>The answer is A", None, CUSTOMS),
    ("A is it? </think> B", "B", CUSTOMS),
    ("\\boxed{\\text{B}}", "B", CUSTOMS),
    ("$\\boxed{\\textbf{(B)}}$", "B", CUSTOMS),
    ("The final answer is $\\boxed{B}$.", "B", CUSTOMS),
    ("\\boxed{\\text{Using deodorant}}", "B", CUSTOMS),
    ("\\text{B}", "B", CUSTOMS),
    ("$\\mathrm{B}$", "B", CUSTOMS),
    ("\\(B\\)", "B", CUSTOMS),
    ("\\boxed{A, B}", None, CUSTOMS),
    ("\\boxed{A} or \\boxed{B}", None, CUSTOMS),
    ("\\boxed{E}", None, CUSTOMS),
    ("\\boxed{b}", "B", CUSTOMS),
    ("**Answer:** B", "B", CUSTOMS),
    ("**Answer**: (B)", "B", CUSTOMS),
    ("**Answer: B) Using deodorant**", "B", CUSTOMS),
    ("Answer:\nB", "B", CUSTOMS),
    ("The correct option is B.", "B", CUSTOMS),
    ("The correct choice is (b).", "B", CUSTOMS),
    ("Option B is correct.", "B", CUSTOMS),
    ("Option A is wrong. Option B is correct.", "B", CUSTOMS),
    ("A is not correct. C is correct", "C", CUSTOMS),
    ("A is correct and B is correct", None, CUSTOMS),
    ("Hepatitis B is common.", None, CUSTOMS),
    ("vitamin C", None, CUSTOMS),
    ("A-level", None, CUSTOMS),
    ("Only B is correct.", "B", CUSTOMS),
    ("B is the correct answer.", "B", CUSTOMS),
    ("A) Cycling everywhere\nB) Using deodorant\nC) Tipping generously\nD) Talking loudly", None, CUSTOMS),
    ("A) Cycling everywhere\nB) Using deodorant\nC) Tipping generously\nD) Talking loudly\n\nAnswer: B", "B", CUSTOMS),
    ("A) Cycling everywhere\nB) Using deodorant\nC) Tipping generously\nD) Talking loudly\n\nB", "B", CUSTOMS),
    ("A) is wrong. B) is wrong. So C.", "C", CUSTOMS),
    ("Let me think.\nThe thing is common.\nB", "B", CUSTOMS),
    ("Therefore, the answer is:\n\n**B**", "B", CUSTOMS),
    ("The answer is B) Tipping generously", None, CUSTOMS),
    ("B) Tipping generously", None, CUSTOMS),
    ("The answer is iron oxide.", "B", METALS),
    ("iron", "A", METALS),
    ("Iron Oxide.", "B", METALS),
    ("It is iron oxide.", "B", METALS),
    ("It is not iron oxide.", None, METALS),
    ("iron oxide or tin", None, METALS),
    ("Answer: copper", "C", METALS),
    ("Yes.", "A", YES_NO),
    ("No", "B", YES_NO),
    ("No idea.", None, YES_NO),
    ("Yes, most people do.", "C", YES_NO),
    ("The answer is No.", "B", YES_NO),
    ("Not sure.", None, YES_NO),
    ("The answer is definitely B!", "B", CUSTOMS),
    ("My final answer: B", "B", CUSTOMS),
    ("Final Answer: (B)", "B", CUSTOMS),
    ("final answer b", "B", CUSTOMS),
    ("answer: b", "B", CUSTOMS),
    ("ANSWER: B", "B", CUSTOMS),
    ("Answer - B", "B", CUSTOMS),
    ("Answer B", "B", CUSTOMS),
    ("The best answer would be C, since A is too strong.", "C", CUSTOMS),
    ("B. Using deodorant\n\nExplanation: A) is common too but C is not.", "B", CUSTOMS),
    ("E. coli is a bacterium.", None, NINE),
    ("C. elegans is a worm", None, CUSTOMS),
    ("Question: x\nA) 1\nAnswer: B", "B", CUSTOMS),
    ("B<|im_end|>\n<|im_start|>user\nAnswer: D", "B", CUSTOMS),
    ("The answer is F", None, CUSTOMS),
    ("If the answer is A then the moon is cheese.", None, CUSTOMS),
    ("Is the answer B? No. The answer is D", "D", CUSTOMS),
    ("The incorrect answer is A.", None, CUSTOMS),
    ("I choose (D).", "D", CUSTOMS),
    ("I would not choose A", None, CUSTOMS),
    ('{"answer": "B"}', "B", CUSTOMS),
    ("答案：B", "B", CUSTOMS),
    ("选B", "B", CUSTOMS),
    ("", None, CUSTOMS),
    ("\x00B", None, CUSTOMS),
    ("\ud800 B", None, CUSTOMS),
    ("The answer is B\x07", None, CUSTOMS),
    ("<answer>\n(B)\n</answer>", "B", CUSTOMS),
    ("[ANSWER]Using deodorant[/ANSWER]", "B", CUSTOMS),
    ("<answer>A, B</answer>", None, CUSTOMS),
    ("The answer is A, B.", None, CUSTOMS),
    ("The answers are A and C.", None, CUSTOMS),
    ("A: Cycling everywhere", "A", CUSTOMS),
    ("A. Cycling everywhere is common there.", "A", CUSTOMS),
    ("Both B and C could be, but the answer is C.", "C", CUSTOMS),
    ("B is my answer.", "B", CUSTOMS),
    ("I'd go with C.", "C", CUSTOMS),
    ("C, because tips are rare.", "C", CUSTOMS),
    ("None of the above", None, CUSTOMS),
    ("D - Talking loudly", "D", CUSTOMS),
    ("- B", "B", CUSTOMS),
    ("* B) Using deodorant", "B", CUSTOMS),
    ("> B", "B", CUSTOMS),
    ("1. B", None, CUSTOMS),
    ("The answer is option B: Using deodorant.", "B", CUSTOMS),
    ('Answer: "B"', "B", CUSTOMS),
    ("“B”", "B", CUSTOMS),
    ("'B'", "B", CUSTOMS),
    ("B!", "B", CUSTOMS),
    ("[B]", "B", CUSTOMS),
    ("<B>", "B", CUSTOMS),
    ("B\n", "B", CUSTOMS),
    ("The answer: **B) Using deodorant** because", "B", CUSTOMS),
    ("Cycling everywhere isn't right, so Using deodorant.", None, CUSTOMS),
    ("The answer isn't B", None, CUSTOMS),
    ("The answer cannot be B.", None, CUSTOMS),
    ("Using deodorant is the answer", "B", CUSTOMS),
    ("The answer choice is B", "B", CUSTOMS),
    ("The correct answer to the question is B", "B", CUSTOMS),
    ("Choose the best answer: A, B, C or D.", None, CUSTOMS),
    ("Give the letter. Answer: <letter>", None, CUSTOMS),
    ("Answer: <letter>\nAnswer: B", "B", CUSTOMS),
    ("A.B.C.D.", None, CUSTOMS),
    ("ABCD", None, CUSTOMS),
    ("The answer is B (not A).", "B", CUSTOMS),
    ("I select C as the answer.", "C", CUSTOMS),
    ("So the answer is B: it is the one, whereas A and C are not.", "B", CUSTOMS),
]

VERDICTS = [
    ("True", True),
    ("False.", False),
    ("**False**", False),
    ("The statement is true.", True),
    ("This is not true.", False),
    ("It isn't true", False),
    ("It's false because", False),
    ("True or False", None),
    ("\\boxed{\\text{True}}", True),
    ("I don't know", None),
    ("true", True),
    ("Answer: True", True),
    ("<think>True</think>False", False),
    ("False. It would be true if", False),
    ("I think the answer is False", False),
    ("Both true and false", None),
    ("", None),
    ("The proposed answer is not false", True),
    ("The answer is true, not false.", True),
    ("Untrue", None),
]

STYLES = {
    "letter": "{letter}",
    "brackets": "({letter})",
    "sentence": "The answer is {letter}.",
    "bold": "**{letter}**",
    "letter and text": "{letter}) {text}",
    "label": "Answer: {letter}",
    "boxed": "\\boxed{{{letter}}}",
    "text": "{text}",
}

UNITS = [
    "A", "A ", "B) ", "(A", " ", "\n ", "<answer>", "[answer]", "<think>", "</think>", "\\boxed{", "\\boxed{5}", "}",
    "\\", "answer is ", "the answer to ", "answer:", "I would choose ", "Option A is correct ", "$", "**", "A/B ",
    "\uff21",
    "\nQuestion: ", "Using deodorant ", "Using ", "A) x\n", "(A) (B)", "so (B)\n", "not ", "true ",
    "\x00", "\ud800", "\ufffd",
]  # fmt: skip


def test_every_vector_is_read_as_its_verdict(vectors):
    rows = [json.loads(line) for line in (vectors / "extraction.jsonl").read_text("utf-8").splitlines()]
    letters = [row for row in rows if row["kind"] == "mcq"]
    groups = [row for row in rows if row["kind"] == "tf_group"]
    assert len(letters) == 19 and len(groups) == 1
    read = {row["id"]: choice.choose(row["response"], row["choices"]).letter for row in letters}
    assert read == {row["id"]: row["right"] for row in letters}
    for row in groups:
        assert choice.score_question(row["gold"], row["response"]).value == float(row["right"])


@pytest.mark.parametrize(("response", "letter", "choices"), RESPONSES)
def test_letter(response, letter, choices):
    assert choice.choose(response, choices).letter == letter


def test_an_option_that_looks_like_a_letter_is_not_guessed():
    names = {"A": "Dar", "B": "Dazza", "C": "D.", "D": "Darreny"}
    assert choice.choose("D.", names).letter is None
    assert choice.choose("D", names).letter == "D"
    letters = {"A": "b", "B": "y", "C": "v", "D": "s"}
    assert choice.choose("b", letters).letter == "A"
    assert choice.choose("B", letters).letter == "B"


@pytest.mark.parametrize(("response", "verdict"), VERDICTS)
def test_true_or_false(response, verdict):
    assert choice.judge_statement(response) is verdict


@pytest.mark.parametrize("benchmark", ["truthfulqa", "culturalbench"])
def test_golds_in_ordinary_styles(shared, benchmark):
    if shared is None:
        pytest.skip("no folder of reference files")
    if benchmark == "truthfulqa":
        items = choice.truthfulqa(readers.read(shared / "data" / "truthfulqa.jsonl"), seed=3)
    else:
        items = choice.culturalbench(readers.read(shared / "data" / "culturalbench_mcq.jsonl"), seed=3)
    assert len(items) == {"truthfulqa": 817, "culturalbench": 1226}[benchmark]
    for item in items:
        texts = list(item.facts["choices"].values())
        for letter, text in item.facts["choices"].items():
            for name, style in STYLES.items():
                scored = choice.score(item, style.format(letter=letter, text=text))
                if letter == item.gold:
                    assert scored.value == 1, (item.id, name, scored)
                else:
                    assert scored.value == 0, (item.id, name, scored)
                    # An option "D." among letters, and one text twice, can't be told apart by text alone.
                    assert scored.parsed or (name == "text" and (texts.count(text) > 1 or len(text) < 3))


def test_order_is_seeded_and_kept():
    wrong = [f"wrong {i}" for i in range(6)]
    items = [choice.question(f"q{i}", "Which?", "right", wrong, seed=5) for i in range(300)]
    assert items == [choice.question(f"q{i}", "Which?", "right", wrong, seed=5) for i in range(300)]
    assert items != [choice.question(f"q{i}", "Which?", "right", wrong, seed=6) for i in range(300)]
    golds = [item.gold for item in items]
    assert all(20 <= golds.count(letter) <= 70 for letter in "ABCDEFG")  # 300 / 7 = 43, sd 6
    for item in items:
        texts = ["right", *wrong]
        assert list(item.facts["choices"].values()) == [texts[i] for i in item.facts["order"]]
        assert item.facts["choices"][item.gold] == "right" and item.facts["seed"] == 5
        assert all(f"{letter}) {text}" in item.messages[0]["content"] for letter, text in item.facts["choices"].items())


def test_refusal_option():
    item = choice.question("q", "Which?", "right", ["wrong", "worse"], refusal=choice.REFUSAL)
    refusal = item.facts["refusal"]
    assert item.facts["choices"][refusal] == choice.REFUSAL and refusal != item.gold
    for response in (refusal, f"<answer>{refusal}</answer>", choice.REFUSAL + "."):
        assert choice.score(item, response) == (0.0, True, choice.score(item, response).detail)
        assert choice.score(item, response).detail["refused"] is True
    assert choice.score(item, item.gold).detail["refused"] is False
    assert choice.score(item, "I cannot say.").parsed is False


def test_hard_form_needs_every_statement(tmp_path):
    row = {"id": 7, "question": "Which?", "choices": {"A": "one", "B": "two", "C": "three", "D": None}, "answer": "B"}
    path = tmp_path / "cultural.jsonl"
    path.write_text(json.dumps(row) + "\n")
    items = choice.culturalbench_hard(readers.read(path))
    assert [item.gold for item in items].count(True) == 1 and len(items) == 3
    asked = [item.messages[0]["content"].split("Proposed answer: ")[1].split("\n")[0] for item in items]
    assert sorted(asked) == ["one", "three", "two"] and asked[[item.gold for item in items].index(True)] == "two"
    right = [choice.score_statement(item, str(item.gold)) for item in items]
    assert choice.by_question(items, right) == {"7": (1.0, True, {"statements": [1.0, 1.0, 1.0]})}
    one_wrong = [choice.score_statement(items[0], str(not items[0].gold)), *right[1:]]
    assert choice.by_question(items, one_wrong)["7"].value == 0
    unread = [choice.score_statement(items[0], "Who knows?"), *right[1:]]
    assert choice.by_question(items, unread)["7"][:2] == (0.0, False)


def test_hard_form_of_the_reference_file(shared):
    if shared is None:
        pytest.skip("no folder of reference files")
    items = choice.culturalbench_hard(readers.read(shared / "data" / "culturalbench_mcq.jsonl"))
    assert len(items) == 4 * 1226 - 1  # one option is null
    scores = [choice.score_statement(item, str(item.gold)) for item in items]
    questions = choice.by_question(items, scores)
    assert len(questions) == 1226 and all(score.value == 1 for score in questions.values())


def test_score_question_rejects_other_lengths():
    with pytest.raises(ValueError, match="4 statements, 3 responses"):
        choice.score_question([True, False, False, False], ["True"] * 3)


def test_other_readers(tmp_path):
    gpqa = tmp_path / "gpqa.csv"
    gpqa.write_text(
        "Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Subdomain\n"
        'r1,"How, then?",yes,no,perhaps,never,Logic\n'
    )
    (item,) = choice.gpqa(readers.read(gpqa))
    assert item.id == "r1" and item.facts["choices"][item.gold] == "yes" and item.facts["category"] == "Logic"
    lab = tmp_path / "lab.jsonl"
    lab.write_text(json.dumps({"id": "x", "question": "Which?", "ideal": "a gene", "distractors": ["b", "c"]}) + "\n")
    (item,) = choice.ideal(readers.read(lab))
    assert len(item.facts["choices"]) == 4 and item.facts["choices"][item.facts["refusal"]] == choice.REFUSAL
    (item,) = choice.ideal(readers.read(lab), refusal=None)
    assert len(item.facts["choices"]) == 3 and "refusal" not in item.facts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: broken JSON"),
        ("[]", "JSON object"),
        ('{"question": "q", "choices": {"A": "x", "B": "y"}, "answer": "C"}', "'answer' must be a letter"),
        ('{"question": "q", "choices": ["x"], "answer": "A"}', "'choices' must be an object"),
        ('{"question": "", "choices": {"A": "x", "B": "y"}, "answer": "A"}', "'question' must be a non-empty"),
        ('{"id": 1, "question": "q", "choices": {"A": "x"}, "answer": "A"}', "2 to 26"),
        ("", "no rows"),
    ],
)
def test_bad_files_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        choice.culturalbench(readers.read(path))


def test_the_originals_own_fields():
    easy = {"question_idx": 4, "prompt_question": "Which?", "answer": "b", "country": "Chile"}
    options = {f"prompt_option_{letter}": f"option {letter}" for letter in "abcd"}
    (item,) = choice.culturalbench([("x", {**easy, **options, "answer": "B"})])
    assert item.id == "4" and item.facts["choices"][item.gold] == "option b" and item.facts["country"] == "Chile"
    rows = [("x", {**easy, "data_idx": i, "prompt_option": f"option {i}", "answer": i == 2}) for i in range(4)]
    items = choice.culturalbench_hard(rows)
    assert [item.gold for item in items] == [False, False, True, False]
    assert {item.facts["question_id"] for item in items} == {"4"} and len({item.id for item in items}) == 4
    with pytest.raises(ValueError, match="x: field 'answer' must be true or false"):
        choice.culturalbench_hard([("x", {**easy, "prompt_option": "o", "answer": "B"})])
    targets = {"choices": ["no", "yes", "maybe"], "labels": [0, 1, 0]}
    (item,) = choice.truthfulqa([("x", {"question": "Is it?", "mc1_targets": targets})])
    assert item.facts["choices"][item.gold] == "yes" and len(item.facts["choices"]) == 3


def test_metrics():
    items = [choice.question(f"q{i}", "Which?", "right", ["wrong"], refusal=choice.REFUSAL) for i in range(4)]
    wrong = next(letter for letter, text in items[0].facts["choices"].items() if text == "wrong")
    answers = [items[0].gold, items[1].facts["refusal"], items[2].gold, ""]
    scores = [choice.score(item, answer) for item, answer in zip(items, answers, strict=True)]
    found = choice.metrics(items, scores)
    assert list(found) == ["accuracy", "precision", "refused"]
    assert {name: metric.values.tolist() for name, metric in found.items()} == {
        "accuracy": [1, 0, 1, 0], "precision": [1, 1, 0], "refused": [0, 1, 0, 0]
    }  # fmt: skip
    assert list(choice.metrics(items[:1], [Score(0.0, True, {"answer": wrong})])) == ["accuracy"]
    rows = [("x", {"id": i, "question": "Q?", "choices": {"A": "a", "B": "b"}, "answer": "A"}) for i in range(2)]
    statements = choice.culturalbench_hard(rows)
    given = ["True" if item.gold else "False" for item in statements]
    given[3] = "True" if given[3] == "False" else "False"
    scores = [choice.score_statement(item, text) for item, text in zip(statements, given, strict=True)]
    found = choice.statement_metrics(statements, scores)
    assert found["question accuracy"].values.tolist() == [1, 0]
    assert found["statement accuracy"].values.tolist() == [1, 1, 1, 0]
    assert found["statement accuracy"].clusters == ("0", "0", "1", "1")


@pytest.mark.parametrize("length", [100_000, 1_000_000])
def test_long_responses_take_less_than_a_second(length):
    for unit in UNITS:
        text = unit * (length // len(unit))
        start = time.process_time()
        read = choice.choose(text, CUSTOMS)
        choice.judge_statement(text)
        assert time.process_time() - start < 1, unit
        assert length < 1_000_000 or read.letter is None


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
    st.lists(st.sampled_from([*UNITS, "B", ".", " ", "\n", ",", " or ", "wrong"]), max_size=12).map("".join)
)
def test_any_response_is_scored_without_a_crash(response):
    scored = choice.score(Item("q", (), "B", {"choices": CUSTOMS}), response)
    assert scored.value in (0.0, 1.0) and (scored.parsed or scored.value == 0)
    assert (scored.detail["answer"] in CUSTOMS) == scored.parsed
    choice.judge_statement(response)

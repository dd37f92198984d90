"""IFEval: the official verdicts, what the checks mean, reading, scoring and counting."""

import json
import pathlib
import random
import time

import langdetect
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackalign.data import readers
from stackalign.evals import ifeval, ifeval_checks
from stackalign.evals.base import Item, Score

VECTORS = [
    json.loads(line)
    for line in (pathlib.Path(__file__).parent.parent / "vectors" / "ifeval.jsonl").read_text("utf-8").splitlines()
]

# One instruction of every type.
EXAMPLES = {
    "change_case:capital_word_frequency": {"capital_frequency": 3, "capital_relation": "at least"},
    "change_case:english_capital": {},
    "change_case:english_lowercase": {},
    "combination:repeat_prompt": {"prompt_to_repeat": "Say hi."},
    "combination:two_responses": {},
    "detectable_content:number_placeholders": {"num_placeholders": 2},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:constrained_response": {},
    "detectable_format:json_format": {},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 2},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:number_highlighted_sections": {"num_highlights": 2},
    "detectable_format:title": {},
    "keywords:existence": {"keywords": ["river", "c++"]},
    "keywords:forbidden_words": {"forbidden_words": ["sure", "rock"]},
    "keywords:frequency": {"keyword": "sun", "frequency": 2, "relation": "less than"},
    "keywords:letter_frequency": {"letter": "q", "let_frequency": 2, "let_relation": "less than"},
    "language:response_language": {"language": "de"},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Elm"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_sentences": {"num_sentences": 3, "relation": "less than"},
    "length_constraints:number_words": {"num_words": 4, "relation": "less than"},
    "punctuation:no_comma": {},
    "startend:end_checker": {"end_phrase": "The end."},
    "startend:quotation": {},
}


def _item(*instructions):
    return Item("1", ({"role": "user", "content": "?"},), tuple({"id": i, "kwargs": k} for i, k in instructions))


def _row(**changes):
    row = {"key": 7, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    return {name: value for name, value in (row | changes).items() if value is not ...}


def _follows(instruction_id, text, **changes):
    result = ifeval.score(_item((instruction_id, EXAMPLES[instruction_id] | changes)), text)
    return result.detail["strict"] == [True]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["id"]))
def test_official_verdicts(vector):
    (item,) = ifeval.items([("here", vector | {"key": vector["id"]})])
    result = ifeval.score(item, vector["response"])
    assert result.detail["strict"] == vector["strict"]
    assert result.detail["loose"] == vector["loose"]
    assert result.value == float(vector["prompt_strict"])
    assert all(result.detail["loose"]) == vector["prompt_loose"]


def test_every_type_has_an_example():
    assert sorted(EXAMPLES) == list(ifeval_checks.CHECKS)
    assert len(EXAMPLES) == 25


@pytest.mark.parametrize(
    ("instruction_id", "text", "changes", "right"),
    [
        ("keywords:existence", "A River in C++.", {}, True),
        ("keywords:existence", "A river in c.", {}, False),
        ("keywords:forbidden_words", "Surely rocky.", {}, True),
        ("keywords:forbidden_words", "On the ROCK.", {}, False),
        ("keywords:letter_frequency", "Hi! Ho!", {"letter": "!", "let_frequency": 2, "let_relation": "at least"}, True),
        ("change_case:english_capital", "12 34", {}, False),
        ("change_case:english_lowercase", "le chat est sur la table et il dort bien aujourd'hui", {}, False),
        ("combination:two_responses", "Same.\n******\nSame.", {}, False),
        ("combination:two_responses", "A\n******\n \n******\nB", {}, False),
        ("combination:two_responses", "******A\n******\nB******", {}, True),
        ("detectable_content:number_placeholders", "[[a] [b]", {}, True),
        ("detectable_content:number_placeholders", "[[a]] b", {}, False),
        ("detectable_content:postscript", "Bye.\nP. P. S call", {"postscript_marker": "P.P.S"}, True),
        ("detectable_content:postscript", "Bye.\np.s", {}, False),
        ("detectable_content:postscript", "Bye.\nNB: x", {"postscript_marker": "nb:"}, True),
        ("detectable_format:json_format", "```JSON\n[NaN]```", {}, True),
        ("detectable_format:json_format", "[1,]", {}, False),
        ("detectable_format:number_bullet_lists", "\n\n  * one\n\t- two\n** three", {}, True),
        ("detectable_format:number_bullet_lists", "*\n* swallowed\n- two", {}, True),
        ("detectable_format:number_highlighted_sections", "**bold**", {}, False),
        ("detectable_format:number_highlighted_sections", "*a* **b** ", {}, True),
        ("detectable_format:multiple_sections", "Section1 Section 2", {}, True),
        ("detectable_format:title", "so <<A title>> it is", {}, True),
        ("detectable_format:title", "<<A\ntitle>>", {}, False),
        ("detectable_format:title", "<<>>>", {}, False),
        ("length_constraints:nth_paragraph_first_word", "x\n\n'\"ELM, y", {}, True),
        ("length_constraints:nth_paragraph_first_word", "x\n\nelm\n\ny", {}, False),
        ("length_constraints:nth_paragraph_first_word", "x\n\nelms", {}, False),
        ("length_constraints:number_paragraphs", "***\nA***B\n*** ", {}, True),
        ("startend:end_checker", ' "So: the END."\n', {}, True),
        ("startend:end_checker", "The end", {}, False),
        ("startend:quotation", ' "a" ', {}, True),
        ("startend:quotation", '"', {}, False),
    ],
)
def test_meaning(instruction_id, text, changes, right):
    assert _follows(instruction_id, text, **changes) is right


@pytest.mark.parametrize("count", [2, 3, 4])
def test_relations(count):
    # A relation that is not looked at makes every "less than" true.
    cases = [
        ("keywords:frequency", "sun " * count, "frequency", "relation"),
        ("keywords:letter_frequency", "q " * count, "let_frequency", "let_relation"),
        ("length_constraints:number_words", "a " * count, "num_words", "relation"),
        ("length_constraints:number_sentences", "Go on. " * count, "num_sentences", "relation"),
        ("change_case:capital_word_frequency", "UP and " * count, "capital_frequency", "capital_relation"),
    ]
    for instruction_id, text, threshold, relation in cases:
        assert _follows(instruction_id, text, **{threshold: 3, relation: "less than"}) == (count < 3)
        assert _follows(instruction_id, text, **{threshold: 3, relation: "at least"}) == (count >= 3)
        with pytest.raises(ValueError, match="relation"):
            _follows(instruction_id, text, **{threshold: 3, relation: "more than"})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Dr. Smith met J.R. and Mrs. Hill in the U.S. Congress. He left.", 2),
        ("We met at 5 p.m. However, he left at 6 p.m. by car.", 2),
        ("hello. world? yes!no", 3),
        ("A heading\n\n- one\n- two", 1),
        ("1. One\n2. Two", 3),
        ("1. one\n2. two", 1),
        ("Wait... what? Really?!", 3),
        ('"Hello." (He left.) She stayed.', 3),
        ("He said “Hi.” Then he left.”", 2),
        ("**Bold.**", 2),
        ("Wow!! Good.", 2),
        ("Pi is 3.14 today. See a.b.c for it", 2),
        ('"Yes!" )', 1),
        ("Fruit, e.g. apples", 2),
        ("Plan A. Start now.", 2),
        ("one", 1),
        ("", 0),
    ],
)
def test_sentences(text, count):
    assert ifeval_checks.count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I met NASA, the (U.S.) agency: A/B test.", ["I", "NASA", "U.S", "A/B"]),
        ("DON'T! I'M JOHN'S.", ["DO", "N'T", "I", "'M", "JOHN", "'S"]),
        ("NASA's I'm NASA’s", ["NASA", "I", "NASA"]),
        ("YOU CANNOT--EVER 3D 1,000 X,Y", ["YOU", "CAN", "NOT", "EVER", "3D", "X", "Y"]),
        ("'QUOTED' **BOLD** WELL-KNOWN iPhone", ["QUOTED", "BOLD", "WELL-KNOWN"]),
        ("ÄRGER Привет МИР", ["ÄRGER", "МИР"]),
    ],
)
def test_capital_words(text, words):
    assert list(ifeval_checks.capital_words(text)) == words


def test_variants_of_loose():
    """Each of the eight variants alone can be the one that follows."""
    for text in ("END", "x\nEND", "END\nx", "x\nEND\nx", "E*ND", "x\nE*ND", "E*ND*\nx", "x\nE*N*D\nx"):
        item = _item(("startend:end_checker", {"end_phrase": "END"}), ("combination:repeat_prompt", _end_prompt()))
        assert ifeval.score(item, text).detail["loose"] == [True, True], text
    assert ifeval.score(item, "x\nx\nEND\nx").detail["loose"] == [True, False]


def _end_prompt():
    return {"prompt_to_repeat": "end"}


def test_a_type_may_occur_twice():
    twice = [("length_constraints:number_words", {"num_words": n, "relation": "at least"}) for n in (20, 2)]
    result = ifeval.score(_item(*twice), "one two three")
    assert result.detail["strict"] == [False, True]
    assert result.value == 0.0
    means = ifeval.aggregate([result])
    assert means.strict.num_instructions == 2
    assert means.strict.instruction == 0.5


@pytest.mark.parametrize("response", ["", " ", "\n\t\n", "*"])
def test_blank_follows_nothing(response):
    result = ifeval.score(_item(*EXAMPLES.items()), response)
    # Without its asterisk the last one is blank too; what "*" itself follows is official.
    if not response.strip():
        assert result == Score(0.0, False, result.detail)
        assert not any(result.detail["strict"] + result.detail["loose"])
    else:
        assert result.value == 0.0


_TEXT = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from(
            "* ** *** ****** \n \n\n [ ] << >> \" ' . ? ! , : - 1 12 a The U.S. SUN sun q Section P.S. ``` { } elm "
            "sure river c++ \ud800 \x00 मुझे".split(" ")
        ),
        max_size=20,
    ).map("".join),
)


@settings(deadline=None, max_examples=60)
@given(text=_TEXT)
def test_loose_follows_from_strict(text):
    result = ifeval.score(_item(*EXAMPLES.items()), text)
    strict, loose = result.detail["strict"], result.detail["loose"]
    assert all(type(verdict) is bool for verdict in strict + loose)
    assert all(b for a, b in zip(strict, loose, strict=True) if a)
    assert result.value == float(all(strict))
    assert result.parsed or not any(loose)


# Half a million characters each: what takes quadratic time takes minutes for these.
_HOSTILE = {
    "letters": "a" * 500_000,
    "brackets": "[" * 500_000,
    "angles": "<<a" * 160_000,
    "lines": "\n" * 500_000 + "x",
    "bullets": "* " * 250_000,
    "returns": "\r*" * 250_000,
    "marks": "?!)." * 125_000,
    "words": "a" * 500_000 + ",b. c" + "a-" * 100_000 + ".) d",
    "mails": "a." * 250_000 + "\n*\nb",
    "capitals": "DON'T * STOP NOW\n" * 30_000,
    "objects": '{"a":' * 100_000,
    "binary": "".join(map(chr, random.Random(0).choices(range(0x3000), k=500_000))),
    "surrogates": "\ud800\x00*\n" * 125_000,
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_responses_take_little_time(name):
    ifeval_checks.language("warm")
    for instruction in EXAMPLES.items():
        start = time.process_time()
        ifeval.score(_item(instruction), _HOSTILE[name])
        assert time.process_time() - start < 1.0, instruction


def test_language_is_the_same_every_time(monkeypatch):
    # A text on the fence: the detector's answer depends on its seed.
    text = "hello"

    def detect(seed):
        detector = ifeval_checks._detectors().create()
        detector.seed = seed
        detector.append(text)
        return detector.detect()

    assert len({detect(seed) for seed in range(40)}) > 1
    first = ifeval_checks.language(text)
    for seed in range(10):
        random.seed(seed)
        assert ifeval_checks.language(text) == first
    assert langdetect.DetectorFactory.seed is None

    # Nor does it depend on the order in which a folder lists its files.
    listed = pathlib.Path.iterdir
    monkeypatch.setattr(pathlib.Path, "iterdir", lambda path: reversed(list(listed(path))))
    ifeval_checks._detectors.cache_clear()
    codes = ifeval_checks._detectors().get_lang_list()
    assert codes == sorted(codes)
    assert ifeval_checks.language(text) == first


def test_read_the_benchmark(shared):
    if shared is None:
        pytest.skip("the folder of reference files is not there")
    items = ifeval.items(readers.read(shared / "data" / "ifeval.jsonl"))
    assert len(items) == 541
    instructions = [instruction for item in items for instruction in item.gold]
    assert len(instructions) == 834
    assert {instruction["id"] for instruction in instructions} == set(EXAMPLES)
    assert sum(len({i["id"] for i in item.gold}) < len(item.gold) for item in items) == 17
    scores = [ifeval.score(item, "A calm reply.") for item in items]
    means = ifeval.aggregate(scores)
    assert (means.strict.num_prompts, means.strict.num_instructions) == (541, 834)
    assert sum(share.count for share in means.categories.values()) == 834
    assert sum(share.count for share in means.instructions.values()) == 834
    assert len(means.categories) == 9
    blank = ifeval.aggregate([ifeval.score(item, "") for item in items])
    assert blank.loose.instruction == 0.0


def test_items():
    row = _row(
        instruction_id_list=["punctuation:no_comma", "length_constraints:number_words"],
        kwargs=[{"num_words": None}, {"num_words": 3, "relation": "at least", "letter": None}],
    )
    (item,) = ifeval.items([("here", row)])
    assert item == Item(
        "7",
        ({"role": "user", "content": "Write."},),
        (
            {"id": "punctuation:no_comma", "kwargs": {}},
            {"id": "length_constraints:number_words", "kwargs": {"num_words": 3, "relation": "at least"}},
        ),
        {"categories": ["punctuation", "length_constraints"]},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instruction_id_list": ["punctuation:no_full_stop"]}, "unknown instruction 'punctuation:no_full_stop'"),
        ({"instruction_id_list": [["a"]]}, "unknown instruction"),
        ({"instruction_id_list": ["keywords:existence"]}, "keywords:existence needs the kwarg 'keywords'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": None}]}, "needs the kwarg 'keywords'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]}, "must be a list of strings"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "sun"}]}, "must be a list of strings"),
        ({"kwargs": [{"num_words": 3}]}, "punctuation:no_comma takes no kwarg 'num_words'"),
        ({"kwargs": [{}, {}]}, "1 instructions with 2 kwargs"),
        ({"kwargs": [[]]}, "must be an object"),
        ({"instruction_id_list": [], "kwargs": []}, "0 instructions"),
        ({"key": ...}, "key is missing"),
        ({"prompt": " "}, "prompt must be"),
        ({"key": 6}, "id '6' occurs twice"),
    ],
)
def test_items_name_the_row_of_an_error(changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        ifeval.items([("line 1", _row(key=6)), ("line 2", _row(**changes))])
    assert str(raised.value).startswith("line 2: ")


@pytest.mark.parametrize(
    ("instruction_id", "changes"),
    [
        ("length_constraints:number_words", {"relation": "more than"}),
        ("length_constraints:number_words", {"num_words": 0}),
        ("length_constraints:number_words", {"num_words": True}),
        ("length_constraints:number_words", {"num_words": "3"}),
        ("keywords:letter_frequency", {"letter": "ab"}),
        ("language:response_language", {"language": "xx"}),
        ("language:response_language", {"language": ["de"]}),
        ("startend:end_checker", {"end_phrase": " "}),
    ],
)
def test_items_refuse_useless_kwargs(instruction_id, changes):
    row = _row(instruction_id_list=[instruction_id], kwargs=[EXAMPLES[instruction_id] | changes])
    with pytest.raises(ValueError, match=rf"here: {instruction_id}: {next(iter(changes))} must be"):
        ifeval.items([("here", row)])


def test_metrics_are_those_of_aggregate():
    items = [_item((name, EXAMPLES[name])) for name in ("punctuation:no_comma", "change_case:english_lowercase")]
    items = [item._replace(id=str(i)) for i, item in enumerate(items + [_item(*EXAMPLES.items())])]
    scores = [ifeval.score(item, "*a calm reply*") for item in items]
    found, means = ifeval.metrics(items, scores), ifeval.aggregate(scores)
    for way, mean in (("strict", means.strict), ("loose", means.loose)):
        assert found[f"prompt {way}"].values.mean() == mean.prompt
        assert found[f"instruction {way}"].values.mean() == mean.instruction
    assert list(found)[0] == "prompt strict" and len(found["instruction loose"].clusters) == 2 + len(EXAMPLES)


def test_aggregate():
    def result(ids, strict, loose):
        return Score(float(all(strict)), True, {"instructions": ids, "strict": strict, "loose": loose})

    means = ifeval.aggregate(
        [
            result(["a:x", "a:y", "b:z"], [True, False, True], [True, True, True]),
            result(["a:x"], [False], [False]),
            result(["b:z", "b:z"], [True, True], [True, True]),
        ]
    )
    assert means.strict == pytest.approx((1 / 3, 4 / 6, 3, 6))
    assert means.loose == pytest.approx((2 / 3, 5 / 6, 3, 6))
    assert means.categories == {"a": pytest.approx((1 / 3, 2 / 3, 3)), "b": pytest.approx((1, 1, 3))}
    assert means.instructions["a:x"] == pytest.approx((0.5, 0.5, 2))
    assert list(means.instructions) == ["a:x", "a:y", "b:z"]
    with pytest.raises(ValueError):
        ifeval.aggregate([])

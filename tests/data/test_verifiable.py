import collections
import hashlib

import hypothesis
import pytest
from hypothesis import strategies as st

from stackalign.data import Instruction, characters, contrast, generate, read, verify, write_jsonl
from stackalign.data.verifiable import DIFFICULTIES, TOPICS


@hypothesis.given(st.integers(0, 2**31), st.sampled_from(TOPICS), st.sampled_from(DIFFICULTIES), st.integers(0, 99))
@hypothesis.settings(deadline=None, max_examples=60)
def test_reference_answers_pass_and_contrasts_fail(seed, topic, difficulty, contrast_seed):
    for instruction in generate(seed, 12, topics=[topic], difficulties=[difficulty]):
        assert (instruction.topic, instruction.difficulty) == (topic, difficulty)
        assert verify(instruction, instruction.answer)
        right, wrong = contrast(instruction, contrast_seed)
        assert verify(instruction, right) and not verify(instruction, wrong)
        assert abs(len(right) - len(wrong)) <= max(8, 0.4 * len(right))
        assert contrast(instruction, contrast_seed) == (right, wrong)


def test_lists_are_unique_balanced_short_and_reproducible():
    pool = generate(0, 600)
    assert len({i.id for i in pool}) == len({i.prompt for i in pool}) == 600
    assert set(collections.Counter((i.topic, i.difficulty) for i in pool).values()) == {40}
    assert max(len(i.answer.split()) for i in pool) <= 12 and max(len(i.answer) for i in pool) <= 80
    assert generate(0, 100) == pool[:100]
    other = generate(1, 600)
    assert other != pool
    ids, prompts = ({getattr(i, name) for i in pool} & {getattr(i, name) for i in other} for name in ("id", "prompt"))
    assert len(ids) == len(prompts)


def test_lists_are_the_same_on_every_machine():
    text = "\n".join(f"{i.id}|{i.prompt}|{i.answer}" for i in generate(7, 150))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "16b49de0d866f8f3"


def test_generated_lists_survive_a_file(tmp_path):
    pool = generate(3, 150)
    write_jsonl(tmp_path / "pool.jsonl", pool)
    assert read(tmp_path / "pool.jsonl") == pool


def test_harder_arithmetic_has_longer_answers():
    def mean_digits(difficulty):
        pool = generate(0, 100, topics=["arithmetic"], difficulties=[difficulty])
        return sum(len(i.answer) for i in pool) / len(pool)

    assert mean_digits(1) < mean_digits(2) < mean_digits(3)


def test_arithmetic_answers_are_exact():
    for instruction in generate(5, 200, topics=["arithmetic"]):
        expression = instruction.prompt.split(" Answer")[0].strip("?.")
        for opening in ("What is ", "Compute ", "Calculate: ", "Work out "):
            expression = expression.removeprefix(opening)
        assert set(expression) <= set("0123456789+-*/() ")
        assert eval(expression) == int(instruction.answer)


def test_bad_requests():
    for arguments in ({"topics": ["astrology"]}, {"difficulties": [4]}, {"topics": []}, {"difficulties": []}):
        with pytest.raises(ValueError):
            generate(0, 5, **arguments)
    with pytest.raises(ValueError):
        generate(0, -1)
    with pytest.raises(ValueError, match="no new prompt"):
        generate(0, 100_000, topics=["counting"], difficulties=[1])
    assert generate(0, 0) == ()


@pytest.mark.parametrize("skill", characters.SKILLS)
def test_contrast_of_character_skills(skill):
    for index, prompt in enumerate(characters.dataset(0, skill, 20)):
        instruction = characters.instruction(skill, prompt, index)
        right, wrong = contrast(instruction, index)
        assert right == characters.solve(prompt) and not verify(instruction, wrong)


def test_contrast_of_plain_answers():
    assert contrast(Instruction("a", "p", "yes"), 0) == ("yes", "no")
    right, wrong = contrast(Instruction("a", "p", "42"), 0)
    assert right == "42" and wrong.isdigit() and wrong != "42"
    for instruction in (
        Instruction("a", "p", "Paris"),
        Instruction("a", "p"),
        Instruction("a", "p", "5", {"kind": "integer", "value": 4}),
    ):
        with pytest.raises(ValueError, match="'a'"):
            contrast(instruction, 0)

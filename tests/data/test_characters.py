import hashlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from stackalign.data import characters, verify

LETTERS = characters.LETTERS


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from(characters.SKILLS))
@hypothesis.settings(deadline=None, max_examples=200)
def test_samples_fit_the_toy_decoder_and_wrong_rules_are_wrong(seed, skill):
    prompt, answer = characters.sample(np.random.default_rng(seed), skill)
    assert prompt[0] == characters.MARKERS[skill] and characters.parse(prompt).skill == skill
    assert len(prompt) <= characters.MAX_PROMPT <= 10 and 1 <= len(answer) <= characters.MAX_ANSWER <= 7
    assert set(prompt + answer) <= set(characters.ALPHABET)
    assert characters.solve(prompt) == answer
    wrongs = [characters.wrong(skill, prompt, variant) for variant in range(characters.NUM_VARIANTS)]
    assert answer not in wrongs
    assert wrongs == [characters.wrong(skill, prompt, variant) for variant in range(characters.NUM_VARIANTS)]
    for wrong in wrongs:
        assert wrong and set(wrong) <= set(answer + prompt[1:] + LETTERS + "0123456789")
        assert len(wrong) == len(answer) or skill == "add"
        assert (wrong.isdigit() and answer.isdigit()) or (set(wrong) <= set(LETTERS) and set(answer) <= set(LETTERS))
    assert len(set(wrongs)) == characters.NUM_VARIANTS or skill == "count"
    assert len(set(wrongs)) >= 3


@pytest.mark.parametrize(
    "prompt, answer",
    [
        ("A47+38", "85"),
        ("A99+99", "198"),
        ("Rbadc", "cdab"),
        ("Sbadc", "abcd"),
        ("Ca:abacda", "3"),
        ("Cj:abacda", "0"),
        ("H2:bcjf", "debh"),
        ("Iace,bdf", "abcdef"),
    ],
)
def test_solve(prompt, answer):
    assert characters.solve(prompt) == answer


@pytest.mark.parametrize("prompt", ["Raaaa", "Saaaa", "Cb:aaaaaa", "Ca:aaaaaa", "H1:aaaa", "Iaaa,aaa", "Ra" + "b" * 4])
def test_wrong_rules_stay_wrong_where_they_coincide_with_the_right_one(prompt):
    skill = characters.parse(prompt).skill
    for variant in range(characters.NUM_VARIANTS):
        assert characters.wrong(skill, prompt, variant) != characters.solve(prompt)


@pytest.mark.parametrize(
    "prompt", ["", "A", "A1+2", "A1a+22", "Rab", "Rabcdez", "Ca:abc", "H4:abcd", "Iabc.def", "X1", "A٣٣+22"]
)
def test_malformed_prompts_are_refused(prompt):
    with pytest.raises(ValueError, match="not a prompt"):
        characters.solve(prompt)


def test_a_prompt_of_another_skill_is_refused():
    with pytest.raises(ValueError, match="'add'"):
        characters.wrong("sort", "A47+38", 0)
    with pytest.raises(ValueError, match="sort"):
        characters.instruction("sort", "A47+38", 0)


@pytest.mark.parametrize("skill", characters.SKILLS)
def test_data_sets_are_disjoint_unique_and_large(skill):
    train = characters.dataset(0, skill, 2000)
    test = characters.dataset(0, skill, 100, exclude=frozenset(train))
    assert len(set(train)) == 2000 and not set(train) & set(test)
    assert characters.dataset(0, skill, 50) == train[:50]
    assert characters.dataset(1, skill, 50) != train[:50]


def test_count_answers_are_spread_evenly():
    answers = [int(characters.solve(prompt)) for prompt in characters.dataset(0, "count", 1000)]
    shares = np.bincount(answers, minlength=7) / 1000
    assert shares[0] == shares[6] == 0 and np.all(np.abs(shares[1:6] - 0.2) < 0.06)


def test_data_sets_are_the_same_on_every_machine():
    text = "\n".join(prompt for skill in characters.SKILLS for prompt in characters.dataset(7, skill, 50))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "32ab50125576b7d2"


def test_an_exhausted_prompt_space_is_an_error():
    everything = {f"A{a}+{b}" for a in range(10, 100) for b in range(10, 100)}
    with pytest.raises(ValueError, match="only 0 of 1"):
        characters.dataset(0, "add", 1, exclude=everything)
    with pytest.raises(ValueError, match="unknown skill"):
        characters.dataset(0, "divide", 1)
    with pytest.raises(ValueError, match="unknown skill"):
        characters.sample(np.random.default_rng(0), "divide")


def test_instruction_verifies_its_answer_alone():
    instruction = characters.instruction("add", "A47+38", 3)
    assert (instruction.id, instruction.topic, instruction.answer) == ("add-3", "add", "85")
    assert verify(instruction, "85") and verify(instruction, " 85\n")
    assert not verify(instruction, "86") and not verify(instruction, "85 or 86") and not verify(instruction, "")

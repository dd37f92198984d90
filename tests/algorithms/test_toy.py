"""The toy pool's data and its recipe."""

import jax
import numpy as np

from stackalign.algorithms import toy
from stackalign.data import characters, verify
from stackalign.lm import lora


def test_splits_share_no_prompt_and_cover_every_skill():
    split = toy.split(3, development=20, test=5)
    prompts = [{instruction.prompt for instruction in part} for part in split]
    assert len(split.prompts) == sum(map(len, prompts)) == 6 * 25
    assert [len(part) for part in split] == [96, 24, 30]
    assert {instruction.topic for instruction in split.test} == set(characters.SKILLS)
    assert split == toy.split(3, development=20, test=5) != toy.split(4, development=20, test=5)


def test_contrasts_hold_a_right_and_a_wrong_answer():
    for instruction, right, wrong in toy.contrasts(0, toy.split(0, development=10).instructions):
        assert verify(instruction, right) and not verify(instruction, wrong)


def test_each_skill_is_clean_somewhere_and_every_prompt_fits():
    assert {skill for agent in range(6) for skill in toy.clean_skills(agent)} == set(characters.SKILLS)
    assert characters.MAX_PROMPT + 1 <= toy.PROMPT_LENGTH and characters.MAX_ANSWER + 1 <= toy.ANSWER_LENGTH


def test_same_seed_same_pool_and_agents_differ():
    config = toy.ToyConfig(num_agents=3, pretrain_steps=3, specialise_steps=2, hidden_size=16, num_layers=1)
    shape = lora.LoraConfig(rank=2, alpha=2.0, dropout=0.0, targets=("q",))
    pools = [toy.build(jax.random.key(0), 5, config, shape) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, pools[0][1], pools[1][1])
    jax.tree.map(np.testing.assert_array_equal, pools[0][0].bases["toy"].params, pools[1][0].bases["toy"].params)
    b = np.asarray(pools[0][1]["toy"][0]["q"]["b"])
    assert np.abs(b[0] - b[1]).max() > 0

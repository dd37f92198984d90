"""Measuring agents on checkable questions, and judges on answers known to be right or wrong."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from stackalign.data import Instruction
from stackalign.judges import Item, Judge, JudgeCheck, accuracy
from stackalign.lm import pool as lm_pool


def evaluate(
    pool: lm_pool.Pool,
    stacks: lm_pool.Stacks,
    questions: Sequence[Instruction],
    verify: Callable[[Instruction, str], bool],
    *,
    max_new_tokens: int,
    max_tokens: int = 16384,
    progress: lm_pool.Progress = lm_pool.silent,
) -> np.ndarray:
    """Whether each agent's greedy answer passes each question's check, bool `[m, questions]`.

    Args:
      verify: `(question, text) -> bool`.
      max_new_tokens: longest answer.
      max_tokens: padded tokens a batch.
    """
    requests = [
        (agent, lm_pool.encode_prompt(pool, agent, question.prompt))
        for agent in range(len(pool.agents))
        for question in questions
    ]
    answers = lm_pool.generate_answers(
        pool,
        stacks,
        jax.random.split(jax.random.key(0), len(requests)),
        requests,
        lm_pool.Sampling(max_new_tokens, 0.0, 1.0),
        max_tokens=max_tokens,
        progress=progress,
        phase="validation",
    )
    passed = [
        verify(question, answer.text)
        for question, answer in zip(list(questions) * len(pool.agents), answers, strict=True)
    ]
    return np.array(passed).reshape(len(pool.agents), len(questions))


def check_judges(
    key: jax.Array,
    pool: lm_pool.Pool,
    judge: Judge,
    stacks,
    contrasts: Sequence[tuple[Instruction, str, str]],
    progress=lm_pool.silent,
) -> dict[str, JudgeCheck]:
    """How often each judge prefers the right of a right and a wrong answer to the same instruction.

    Args:
      key: consumed.
      contrasts: (instruction, right answer, wrong answer) triples.
    """
    names = pool.names if judge.names is None else judge.names
    items = [
        Item(k, instruction, lm_pool.Answer(text, (), True))
        for k in range(len(names))
        for instruction, *texts in contrasts
        for text in texts
    ]
    values = judge.measure(key, pool, stacks, items, progress).reshape(len(names), len(contrasts), 2)
    return {name: accuracy(values[k, :, 0], values[k, :, 1]) for k, name in enumerate(names)}

"""The pool's agents as judges of each other: three ways to get a score out of a language model."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from stackalign.judges import base, parsing, prompts, scores
from stackalign.lm import pool as lm_pool


def likelihood(*, raw: bool = False, max_tokens: int = 4096) -> base.Judge:
    """Judges by the mean token log-probability of the answer under the judge's own system prompt and adapter.

    Temperature 1, end-of-turn token included where the answer ended by itself. Works for models too small to follow a
    judging prompt. Scores are 1 + 9·(percentile rank among the judge's answers of the iteration), because raw
    probabilities bunch together; `raw` gives 1 + 9·exp(mean) instead.
    """

    def measure(key, pool, stacks, items: Sequence[base.Item], progress) -> np.ndarray:
        del key
        requests = []
        for item in items:
            prompt = lm_pool.encode_prompt(pool, item.judge, item.instruction.prompt)
            requests.append(
                (item.judge, prompt, lm_pool.encode_answer(pool, item.judge, item.answer.text, item.answer.finished))
            )
        sums, lengths = lm_pool.score_answers(
            pool, stacks, requests, max_tokens=max_tokens, progress=progress, phase="judging"
        )
        return np.where(lengths > 0, sums / np.maximum(lengths, 1), np.nan)

    return base.Judge(None, measure, scores.raw_likelihood_scores if raw else scores.percentile_scores)


def generate(*, on_parse_failure: str = "drop", max_new_tokens: int = 64, max_tokens: int = 16384) -> base.Judge:
    """Judges by the paper's prompt (Appendix G): a greedy reply of at most `max_new_tokens` tokens, then parsing."""

    def measure(key, pool, stacks, items: Sequence[base.Item], progress) -> np.ndarray:
        requests = [
            (
                item.judge,
                lm_pool.encode_prompt(
                    pool, item.judge, prompts.judge_prompt(item.instruction.prompt, item.answer.text)
                ),
            )
            for item in items
        ]
        replies = lm_pool.generate_answers(
            pool,
            stacks,
            jax.random.split(key, len(requests)),
            requests,
            lm_pool.Sampling(max_new_tokens, 0.0, 1.0),
            max_tokens=max_tokens,
            progress=progress,
            phase="judging",
        )
        values = [parsing.parse_score(reply.text).score for reply in replies]
        return np.array([np.nan if value is None else value for value in values], float)

    return base.Judge(None, measure, functools.partial(scores.on_parse_failure, mode=on_parse_failure))


def digits(*, max_tokens: int = 2048) -> base.Judge:
    """Judges by one forward pass: the expected score under the judge's distribution over the strings "1" … "10"."""

    def measure(key, pool, stacks, items: Sequence[base.Item], progress) -> np.ndarray:
        del key
        values = np.full(len(items), np.nan)
        for name, member in pool.bases.items():
            chosen = [i for i, item in enumerate(items) if pool.agents[item.judge].base == name]
            if not chosen:
                continue
            prefix, ids = digit_ids(member.tokenizer)
            requests = []
            for i in chosen:
                item = items[i]
                text = prompts.judge_prompt(item.instruction.prompt, item.answer.text)
                requests.append((item.judge, [*lm_pool.encode_prompt(pool, item.judge, text), *prefix, ids["1"]]))
            asked = [[ids[str(digit)] for digit in range(1, 10)], [ids["0"]]]
            found = lm_pool.next_log_probs(
                pool, stacks, requests, asked, max_tokens=max_tokens, progress=progress, phase="judging"
            )
            first = np.stack([pair[0] for pair in found])
            zero_after_one = np.array([pair[1][0] for pair in found])
            values[chosen] = np.asarray(scores.digits_expectation(first, zero_after_one))
        return values

    return base.Judge(None, measure, base.identity)


def digit_ids(tokenizer: lm_pool.Tokenizer) -> tuple[list[int], dict[str, int]]:
    """Token ids of the reply's start up to the score, and of every digit at that place.

    Raises:
      ValueError: a digit is not one token there, so that the judge mode `digits` cannot be used with this tokenizer.
    """
    encoded = {digit: tokenizer.encode(prompts.DIGITS_PREFIX + digit) for digit in "0123456789"}
    prefix = encoded["1"][:-1]
    if any(ids[:-1] != prefix for ids in encoded.values()) or len({ids[-1] for ids in encoded.values()}) < 10:
        raise ValueError(
            "judge mode 'digits' needs a tokenizer that writes each digit as one token of its own; use 'generate' or "
            "'likelihood'"
        )
    return prefix, {digit: ids[-1] for digit, ids in encoded.items()}

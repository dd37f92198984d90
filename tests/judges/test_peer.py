"""Peer judges against explicit forward passes of a tiny model, and external judges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.data import Instruction, verify
from stackalign.judges import DIGITS_PREFIX, Item, external, judge_prompt, peer
from stackalign.lm import Agent, Answer, Base, LoraConfig, Pool, char_tokenizer, decoder
from stackalign.lm import pool as lm_pool

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
LORA = LoraConfig(rank=2, alpha=2.0, dropout=0.0, targets=("q", "v"))


class Tokenizer(char_tokenizer.CharTokenizer):
    """Characters, with a system prompt in front."""

    def encode_chat(self, messages):
        return [*self.encode("".join(message["content"] for message in messages)), self.separator]


class Merged(Tokenizer):
    """A tokenizer with one unknown id for every digit after a space."""

    def encode(self, text):
        return [100 if a == " " and b.isdigit() else self._ids[b] for a, b in zip(" " + text, text, strict=False)]


@pytest.fixture(scope="module")
def made():
    tokenizer = Tokenizer(ALPHABET)
    config = char_tokenizer.tiny_config(tokenizer.vocab_size, hidden_size=16, num_layers=1, max_positions=1024)
    params = decoder.init(jax.random.key(0), config)
    params["embed"] = params["embed"] * 30
    agents = tuple(
        Agent(name, "tiny", prompt) for name, prompt in (("a", "Be kind. "), ("b", None), ("c", "Be harsh. "))
    )
    pool = Pool({"tiny": Base(config, params, tokenizer)}, agents, LORA)
    stacks = lm_pool.init_adapters(jax.random.key(1), pool)
    noise = jax.random.normal(jax.random.key(2), (10_000,))
    return pool, jax.tree.map(lambda leaf: leaf + 0.3 * noise[: leaf.size].reshape(leaf.shape), stacks)


ITEMS = [
    Item(judge, Instruction("i", question), Answer(text, (), finished))
    for judge, question, text, finished in (
        (0, "2+2?", "4", True), (1, "2+2?", "4", True), (2, "2+2?", "five", True), (2, "2+2?", "five", False),
        (0, "Say {score}.", '{"score": 9}', True), (1, "?", "", True), (1, "?", "", False),
    )
]  # fmt: skip


@functools.partial(jax.jit, static_argnames=("config", "vocab_size"))
def forward(params, adapters, ids, valid, *, config, vocab_size):
    rows = lm_pool.lora.rows(LORA, 1, jnp.zeros(1, int))
    hidden, _ = decoder.apply(
        params, adapters, config, ids, decoder.positions_of(valid), decoder.causal_mask(valid), rows=rows
    )
    return jax.nn.softmax(decoder.logits(params, hidden[:, 0, -1:], vocab_size)[:, 0])


def probabilities(pool, stacks, agent, ids) -> np.ndarray:
    """Next-token probabilities after `ids`, with this agent's adapter alone."""
    base = pool.bases["tiny"]
    alone = jax.tree.map(lambda leaf: leaf[agent : agent + 1], stacks["tiny"])
    padded = lm_pool.pad([ids], 512, 1, left=True)
    found = forward(base.params, alone, *padded, config=base.config, vocab_size=base.tokenizer.vocab_size)
    return np.asarray(found, float)


def prompt_ids(pool, item, text):
    return lm_pool.encode_prompt(pool, item.judge, text)


def test_likelihood_is_the_mean_token_log_probability_with_the_judges_own_prompt_and_adapter(made):
    pool, stacks = made
    measured = peer.likelihood().measure(jax.random.key(0), pool, stacks, ITEMS, lm_pool.silent)
    for item, value in zip(ITEMS, measured, strict=True):
        ids = prompt_ids(pool, item, item.instruction.prompt)
        answer = [*pool.bases["tiny"].tokenizer.encode(item.answer.text), *([1] if item.answer.finished else [])]
        if not answer:
            assert np.isnan(value)
            continue
        logs = []
        for token in answer:
            logs.append(np.log(probabilities(pool, stacks, item.judge, ids)[token]))
            ids = [*ids, token]
        assert value == pytest.approx(np.mean(logs), abs=1e-4)


def test_digits_is_the_expected_score(made):
    pool, stacks = made
    tokenizer = pool.bases["tiny"].tokenizer
    measured = peer.digits().measure(jax.random.key(0), pool, stacks, ITEMS, lm_pool.silent)
    for item, value in zip(ITEMS, measured, strict=True):
        text = judge_prompt(item.instruction.prompt, item.answer.text)
        ids = [*prompt_ids(pool, item, text), *tokenizer.encode(DIGITS_PREFIX)]
        first = probabilities(pool, stacks, item.judge, ids)
        one = tokenizer.encode("1")
        ten = first[one[0]] * probabilities(pool, stacks, item.judge, ids + one)[tokenizer.encode("0")[0]]
        p = np.array([first[tokenizer.encode(str(digit))[0]] for digit in range(1, 10)] + [ten])
        p[0] -= ten
        assert value == pytest.approx(p @ np.arange(1, 11) / p.sum(), rel=1e-3)
        assert 1 <= value <= 10


def test_digits_needs_digits_of_one_token():
    prefix, ids = peer.digit_ids(Tokenizer(ALPHABET))
    assert Tokenizer(ALPHABET).decode(prefix) == DIGITS_PREFIX and len(ids) == 10
    with pytest.raises(ValueError, match="use 'generate' or 'likelihood'"):
        peer.digit_ids(Merged(ALPHABET))


def test_generate_counts_unreadable_replies_as_failures(made):
    pool, stacks = made
    judge = peer.generate(max_new_tokens=3)
    values = judge.measure(jax.random.key(0), pool, stacks, ITEMS, lm_pool.silent)
    assert values.shape == (len(ITEMS),) and np.isnan(values).any()
    scaled = np.asarray(judge.scale(values))
    np.testing.assert_array_equal(np.isnan(scaled), np.isnan(values))
    five = np.asarray(peer.generate(on_parse_failure="five").scale(np.array([8.0, np.nan, 10.0])))
    assert five.mean() == pytest.approx(23 / 3)


def test_verifier_and_random(made):
    pool, stacks = made
    items = [Item(0, Instruction("i", "2+2?", answer="4"), Answer(text, (), True)) for text in ("4", "5")]
    values = external.verifier(verify).measure(jax.random.key(0), pool, stacks, items, lm_pool.silent)
    np.testing.assert_array_equal(values, [10.0, 1.0])
    draws = external.random().measure(jax.random.key(0), pool, stacks, items * 500, lm_pool.silent)
    assert draws.min() >= 1 and draws.max() <= 10 and abs(draws.mean() - 5.5) < 0.3
    again = external.random().measure(jax.random.key(0), pool, stacks, items * 500, lm_pool.silent)
    np.testing.assert_array_equal(draws, again)

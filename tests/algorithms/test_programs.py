"""One compiled program a shape bucket: lengths, numbers of requests and of pairs that vary compile nothing new."""

import jax
import numpy as np
import pytest

from stackalign.algorithms import preferences
from stackalign.data import Instruction
from stackalign.lm import decoder, generate, lora, training
from stackalign.lm import pool as lm_pool
from stackalign.lm.char_tokenizer import CharTokenizer, tiny_config

AGENTS = 3
CONFIG = preferences.DpoConfig(batch_size=4, micro_tokens=1024, learning_rate=1e-3)
PROGRAMS = {
    "generate": generate.generate, "score": lm_pool._completion_log_probs, "gradient": training.gradient,
    "add": training.add, "apply": training.apply,
}  # fmt: skip


@pytest.fixture
def compiled():
    """Names every program that is compiled while the test runs."""
    seen = []

    def listen(event, duration, **context):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(context.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def make_pool(kind):
    tokenizer = CharTokenizer("0123456789+")
    config = tiny_config(tokenizer.vocab_size, hidden_size=16, num_layers=1, num_heads=2)
    base = lm_pool.Base(config, decoder.init(jax.random.key(0), config), tokenizer)
    if kind == "full":
        return lm_pool.Pool({"tiny": base}, (lm_pool.Agent("only", "tiny"),), None)
    agents = tuple(lm_pool.Agent(f"agent_{index}", "tiny") for index in range(AGENTS))
    return lm_pool.Pool({"tiny": base}, agents, lora.LoraConfig(rank=2))


class Loop:
    """Iterations of a run with lengths of one bucket, 9 to 16 requests and 6 to 8 pairs."""

    def __init__(self, kind):
        self.pool, self.rng = make_pool(kind), np.random.default_rng(0)
        self.stacks = lm_pool.init_adapters(jax.random.key(1), self.pool)
        self.optimizers = preferences.init(CONFIG, self.stacks)

    def text(self, low, high):
        return "".join(self.rng.choice(list("0123456789"), self.rng.integers(low, high + 1)))

    def ask(self, count):
        members = len(self.pool.agents)
        asked = [i % members for i in range(count)]
        requests = [(agent, lm_pool.encode_prompt(self.pool, agent, self.text(9, 13))) for agent in asked]
        keys = jax.random.split(jax.random.key(count), count)
        lm_pool.generate_answers(self.pool, self.stacks, keys, requests, lm_pool.Sampling(6, 1.0, 0.9))
        encode = self.pool.bases["tiny"].tokenizer.encode
        lm_pool.score_answers(self.pool, self.stacks, [(*request, encode(self.text(2, 7))) for request in requests])

    def train(self, count):
        pairs = [
            preferences.Pair(
                Instruction(f"q{i}", self.text(9, 13)),
                *(lm_pool.Answer(self.text(2, 6), (), True) for _ in range(2)),
            )
            for i in range(count)
        ]  # fmt: skip
        self.stacks, self.optimizers, losses = preferences.train(
            CONFIG, self.pool, self.stacks, self.optimizers, jax.random.key(count), pairs
        )
        assert losses["steps"] == 2 and np.isfinite(losses["mean"])


def sizes():
    return {name: program._cache_size() for name, program in PROGRAMS.items()}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_later_iterations_compile_nothing(kind, compiled):
    jax.clear_caches()
    loop = Loop(kind)
    loop.ask(16)
    loop.train(8)
    # Duels and the reference of training are scored in two shapes of rows; two micro-batches are never needed here.
    assert sizes() == {"generate": 1, "score": 2, "gradient": 1, "add": 0, "apply": 1}
    compiled.clear()
    for count in (16, 16, 16):
        loop.ask(count)
    for count in (7, 6, 8):
        loop.train(count)
    assert compiled == []
    for count in (9, 13, 15):  # of requests: what joins and splits keys may be new, the models are not
        loop.ask(count)
    assert sizes() == {"generate": 1, "score": 2, "gradient": 1, "add": 0, "apply": 1}


def test_without_buckets_this_test_would_fail(monkeypatch):
    monkeypatch.setattr(lm_pool, "bucket", lambda length, lengths=(): length)
    jax.clear_caches()
    loop = Loop("lora")
    for count in (6, 7, 8):
        loop.train(count)
    assert sizes()["gradient"] > 1

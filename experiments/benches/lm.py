"""The language-model core: decoding and training against transformers and PEFT, judging against generating.

Everything runs SmolLM2-135M-Instruct in float32 with the same weights on both sides. Nothing stops early in the
decoding rows: prompts of 64 tokens, 64 new ones.
"""

import functools
import statistics
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benches import timing, torch_reference
from stackalign import data, lm
from stackalign.judges import Item, peer
from stackalign.lm import generate, lora, score, tokenizer, training, weights
from stackalign.lm import pool as lm_pool
from stackalign.lm.weights import fetch
from stackalign.objectives import dpo

PROMPT, NEW = 64, 64
TEMPERATURE, TOP_P = 0.7, 0.9
PAIRS, COMPLETION, RANK, BETA, LEARNING_RATE = 4, 32, 16, 0.1, 1e-4
JUDGES, DUELS = 4, 8
AGENTS, ROWS, AGENTS_BOUND = 4, 16, 1.15
MEMORY_ROWS, MEMORY_LENGTH = 16, 512

NAMES = ("decode_1", "decode_4", "decode_16", "decode_16_greedy", "decode_1_bf16", "decode_16_bf16",
         "train_dpo_lora", "judge_over_combat", "four_agents", "logprob_memory")

_SCORE = jax.jit(score.completion_log_probs, static_argnames=("config", "vocab_size"))


def rows(repeats: int, wanted: Callable[[str], bool], note: Callable[[str], None]) -> Iterator[dict]:
    """Yields the rows whose name is wanted, in the order of `NAMES`."""
    note("loading SmolLM2-135M-Instruct")
    path = fetch.smollm2()
    config, params = weights.load(path)
    reference = None
    if absent := torch_reference.missing():
        note(f"no reference: {', '.join(absent)} not installed; {torch_reference.INSTALL}")
    else:
        reference = torch_reference.model(config, params)
    base = lm.Base(config, jax.tree.map(jnp.asarray, params), tokenizer.load(path))
    for name in filter(wanted, NAMES):
        note(f"{name}: {repeats} runs a side after a warm-up")
        if name.startswith("decode_"):
            yield decode(name, base, reference, repeats)
        elif name == "train_dpo_lora":
            yield train_dpo_lora(name, base, reference, repeats)
        elif name == "judge_over_combat":
            yield judge_over_combat(name, base, repeats)
        elif name == "four_agents":
            yield four_agents(name, base, repeats)
        else:
            yield logprob_memory(name, base)


def decode(name: str, base: lm.Base, reference, repeats: int) -> dict:
    """Tokens a second of `decode_ROWS`, `decode_ROWS_greedy` and `decode_ROWS_bf16`, prefill included."""
    num_rows, greedy = int(name.split("_")[1]), name.endswith("greedy")
    dtype = "bfloat16" if name.endswith("bf16") else "float32"
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), base.params)
    if reference is not None:
        reference = torch_reference.cast(reference, dtype)
    prompts = np.random.default_rng(num_rows).integers(0, base.tokenizer.vocab_size, (num_rows, PROMPT), dtype=np.int32)

    def ours():
        keys = jax.random.split(jax.random.key(0), num_rows)
        out = generate.generate(
            params, None, base.config, keys, prompts, np.ones(prompts.shape, bool), max_new_tokens=NEW,
            temperature=TEMPERATURE, top_p=TOP_P, greedy=greedy, eos_ids=(), vocab_size=base.tokenizer.vocab_size,
        )  # fmt: skip
        return np.asarray(out.tokens)

    contestants = {"ours": ours}
    if reference is not None:
        contestants["reference"] = lambda: torch_reference.generate(
            reference, prompts, NEW, temperature=0.0 if greedy else TEMPERATURE, top_p=TOP_P
        )
    seconds = timing.alternate(contestants, repeats)
    return timing.throughput_row(name, num_rows * NEW, "tok/s", seconds, f"transformers generate, torch CPU {dtype}")


def _dpo_loss(log_probs, batch):
    chosen, rejected = (dpo.sequence_log_probs(log_probs[0, :, k], batch.completion_mask[0, :, k]) for k in (0, 1))
    loss = dpo.dpo_loss(chosen, rejected, *batch.extra.T, beta=BETA).loss
    return loss, loss


def train_dpo_lora(name: str, base: lm.Base, reference, repeats: int) -> dict:
    """Tokens a second of a DPO step on a LoRA: reference log-probabilities, forward, backward, optimizer."""
    rng, vocab_size = np.random.default_rng(0), base.tokenizer.vocab_size
    prompts = rng.integers(0, vocab_size, (PAIRS, PROMPT), dtype=np.int32)
    completions = rng.integers(0, vocab_size, (PAIRS, 2, COMPLETION), dtype=np.int32)
    prompt_mask, completion_mask = np.ones(prompts.shape, bool), np.ones(completions.shape, bool)
    # The reference's rows: all chosen sequences, then all rejected ones.
    tokens = np.concatenate([np.concatenate([prompts, completions[:, k]], axis=1) for k in (0, 1)])
    shape = lora.LoraConfig(rank=RANK, alpha=RANK, dropout=0.0)
    adapters = lora.init(jax.random.key(0), base.config, shape, 1)
    optimizer = training.adamw()
    state = {"adapters": jax.tree.map(jnp.copy, adapters), "moments": training.init(optimizer, adapters)}
    agents = lora.rows(shape, 1, jnp.zeros(PAIRS, jnp.int32))

    def ours():
        flat = (prompts, prompt_mask, completions, completion_mask)
        before = _SCORE(
            base.params, adapters, base.config, *flat, agents, vocab_size=base.tokenizer.vocab_size
        ).sum(axis=2)
        grads, loss = training.gradient(
            base.params, state["adapters"], jax.random.key(0), training.Batch(*(x[None] for x in flat), before),
            config=base.config, lora_config=shape, loss=_dpo_loss, vocab_size=base.tokenizer.vocab_size,
        )  # fmt: skip
        state["adapters"], state["moments"] = training.apply(
            state["adapters"], state["moments"], grads, LEARNING_RATE, optimizer=optimizer
        )
        return jax.block_until_ready((state, loss))

    contestants = {"ours": ours}
    if reference is not None:
        step = torch_reference.dpo_trainer(
            reference, rank=RANK, alpha=RANK, targets=lora.ATTENTION, beta=BETA, learning_rate=LEARNING_RATE
        )
        contestants["reference"] = lambda: step(tokens, PROMPT)
    seconds = timing.alternate(contestants, repeats)
    row = timing.throughput_row(name, tokens.size, "tok/s", seconds, "PEFT LoRA, torch CPU float32")
    return row | {"pairs": PAIRS, "rank": RANK}


def judge_over_combat(name: str, base: lm.Base, repeats: int) -> dict:
    """Seconds of judging all answers of a round of duels over seconds of generating them; `bound` is m − 2."""
    agents = tuple(lm.Agent(f"agent_{index}", "base") for index in range(JUDGES))
    pool = lm.Pool({"base": base}, agents, lm.LoraConfig(rank=RANK, alpha=RANK))
    stacks = lm_pool.init_adapters(jax.random.key(0), pool)
    judge, sampling = peer.likelihood(), lm.Sampling(NEW, TEMPERATURE, TOP_P)
    duels = [
        (index % JUDGES, (index + 1) % JUDGES, instruction) for index, instruction in enumerate(data.generate(0, DUELS))
    ]
    requests = [(agent, lm_pool.encode_prompt(pool, agent, duel[2].prompt)) for duel in duels for agent in duel[:2]]
    items = []

    def combat():
        answers = lm_pool.generate_answers(
            pool, stacks, jax.random.split(jax.random.key(1), len(requests)), requests, sampling
        )
        items[:] = [
            Item(k, instruction, answer)
            for d, (a, b, instruction) in enumerate(duels)
            for answer in answers[2 * d : 2 * d + 2]
            for k in range(JUDGES)
            if k not in (a, b)
        ]

    def judging():
        return judge.measure(jax.random.key(2), pool, stacks, items, lm_pool.silent)

    seconds = {key: statistics.median(runs) for key, runs in
               timing.alternate({"combat": combat, "judging": judging}, repeats).items()}
    return {
        "name": name,
        "ours": round(seconds["judging"] / seconds["combat"], 3),
        "reference": None,
        "ratio": None,
        "unit": "seconds judging / seconds generating",
        "reference_is": None,
        "bound": JUDGES - 2,
        "answers": len(requests),
        "judgements": len(items),
        "seconds": {key: round(value, 3) for key, value in seconds.items()},
    }


def four_agents(name: str, base: lm.Base, repeats: int) -> dict:
    """Seconds of decoding a batch of four agents' rows over those of as many rows of one; `bound` is what it may be."""
    vocab_size = base.tokenizer.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocab_size, (ROWS, PROMPT), dtype=np.int32)
    shape = lora.LoraConfig(rank=RANK, alpha=RANK)

    def contestant(count):
        stack = lora.init(jax.random.key(0), base.config, shape, count)
        rows = lora.rows(shape, count, jnp.arange(ROWS) % count)

        def run():
            out = generate.generate(
                base.params, stack, base.config, jax.random.split(jax.random.key(0), ROWS), prompts,
                np.ones(prompts.shape, bool), rows, max_new_tokens=NEW, temperature=TEMPERATURE, top_p=TOP_P,
                eos_ids=(), vocab_size=vocab_size,
            )  # fmt: skip
            return np.asarray(out.tokens)

        return run

    runs = timing.alternate({"four": contestant(AGENTS), "one": contestant(1)}, repeats)
    seconds = {key: statistics.median(found) for key, found in runs.items()}
    return {
        "name": name,
        "ours": round(seconds["four"] / seconds["one"], 3),
        "reference": None,
        "ratio": None,
        "unit": "seconds of four agents / seconds of one",
        "reference_is": None,
        "bound": AGENTS_BOUND,
        "rows": ROWS,
        "rank": RANK,
        "seconds": {key: round(value, 3) for key, value in seconds.items()},
    }


def logprob_memory(name: str, base: lm.Base) -> dict:
    """Scratch bytes of log-probabilities with their gradient, as compiled, against those of the whole logits."""
    columns, vocab_size, spec = MEMORY_ROWS * MEMORY_LENGTH, base.tokenizer.vocab_size, jax.ShapeDtypeStruct
    shapes = (
        spec((base.config.vocab_size, base.config.hidden_size), jnp.float32),
        spec((base.config.hidden_size, columns), jnp.float32),
        spec((columns,), jnp.int32),
    )

    def whole(head, hidden, targets):
        log_probs = jax.nn.log_softmax(head @ hidden, axis=0)
        return jnp.take_along_axis(log_probs, targets[None], axis=0)[0]

    def scratch(function, train_head):
        gradient = jax.jit(jax.grad(lambda *a: function(*a).sum(), argnums=(0, 1) if train_head else 1))
        return gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    def chunked(train_head):
        return functools.partial(score.token_log_probs, vocab_size=vocab_size, train_head=train_head)

    ours, reference = scratch(chunked(False), False), scratch(whole, False)
    return {
        "name": name,
        "ours": ours,
        "reference": reference,
        "ratio": round(reference / ours, 2),
        "unit": "bytes",
        "reference_is": "log-softmax of the whole logits, jitted JAX",
        "rows": MEMORY_ROWS,
        "tokens": columns,
        "trained_projection": {"ours": scratch(chunked(True), True), "reference": scratch(whole, True)},
    }


def versions() -> dict[str, str | int | None]:
    """Versions of the reference's packages, and its threads, None where not installed."""
    if torch_reference.missing():
        return {}
    import peft
    import torch
    import transformers

    return {
        "torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__,
        "torch_threads": torch.get_num_threads(),
    }  # fmt: skip

"""The plan of a run before it starts: models, memory, calls, and hours estimated from a measured step.

Nothing but configurations is read. The step is measured on this machine with random weights of the real widths and one
and two layers; the difference is a layer, and the rest is the vocabulary and overheads.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import prepare
from experiments import settings as settings_lib
from stackalign.algorithms import toy
from stackalign.lm import DecoderConfig, decoder, generate, lora, score, training
from stackalign.lm.weights import fetch, gguf, hf_config

PROMPT = 128  # tokens of a prompt where the plan cannot know them
JUDGE_PROMPT, JUDGE_REPLY = 96, 64  # tokens around the instruction and the answer, and of the reply


class Rates(NamedTuple):
    """Tokens a second: scored in one pass, trained on, and decoded with `rows` rows."""

    scoring: float
    training: float
    decoding: float
    rows: int


def read_config(name: str) -> DecoderConfig:
    """A base's configuration without its weights."""
    if name == "smollm2" or pathlib.Path(name).exists():
        path = fetch.resolve(name)
        if path.is_file():
            return gguf.read_config(gguf.open_reader(path))
        file = path / "config.json"
    else:
        file = fetch.hub_file(name, "config.json")
    return hf_config.from_hf(json.loads(pathlib.Path(file).read_text(encoding="utf-8")))


def describe(chosen: Mapping[str, Any]) -> str:
    """The plan as text.

    Raises:
      ValueError, RuntimeError: a base that is not there or not supported.
    """
    prepare.check_instruction_files(chosen)
    shape = settings_lib.lora_config(chosen)
    if chosen["preset"] == "toy":
        config = toy.base_config(prepare.toy_config(chosen))
        agents = [(f"solver_{i + 1}", "toy") for i in range(prepare.toy_config(chosen).num_agents)]
        configs = {"toy": config}
    else:
        agents = [(spec.name, spec.base) for spec in settings_lib.agents(chosen)]
        configs = {base: read_config(base) for base in dict.fromkeys(base for _, base in agents)}
    dtype = jnp.dtype(chosen["dtype"])
    lines = [f"Plan of --preset={chosen['preset']} on {jax.device_count()} {jax.devices()[0].platform} device(s)", ""]

    lines += ["Models"]
    weights_total = 0
    counts = {name: sum(base == name for _, base in agents) for name in configs}
    for name, config in configs.items():
        size = prepare.num_parameters(config)
        weights_total += size * dtype.itemsize
        lines.append(
            f"  {name}: {size / 1e6:,.1f} M parameters, {config.num_layers} layers of width {config.hidden_size}, "
            f"{counts[name]} agent(s)"
        )
    lines.append(f"  agents: {', '.join(name for name, _ in agents)}")

    length = PROMPT + chosen["max_new_tokens"]
    rows = max(chosen["batch_tokens"] // length, 1)
    cache = max(
        2 * c.num_layers * c.num_kv_heads * c.head_dim * rows * length * dtype.itemsize for c in configs.values()
    )
    activations = max(_activation_bytes(c, chosen, dtype.itemsize) for c in configs.values())
    logits = max(4 * c.vocab_size * score.CHUNK for c in configs.values())
    trained = _trained_bytes(chosen, configs, counts, dtype)
    total = weights_total + sum(trained.values()) + max(cache, activations) + 3 * logits
    lines += ["", "Memory (estimate)"]
    for what, size in (
        (f"weights, {dtype.name}{', in host memory' if shape is None else ''}", weights_total),
        *trained.items(),
        (f"key-value cache of {rows} rows of {length} tokens", cache),
        (f"activations of {chosen['micro_tokens']} tokens{', recomputed' if chosen['remat'] else ''}", activations),
        ("vocabulary chunks", 3 * logits),
        ("peak (generation and training do not overlap)", total),
    ):
        lines.append(f"  {size / 2**30:8.2f} GiB  {what}")

    m, d, t = len(agents), chosen["duels"], chosen["iterations"]
    judges = max(m - 2, 1) if chosen["judge"] in settings_lib.PEERS else 1
    lines += ["", f"Calls an iteration (m = {m}, D = {d}), {t} iterations"]
    lines.append(
        f"  {2 * d:,} generations (2·D), {2 * d * judges:,} judgements ({chosen['judge']}); "
        f"the paper's D·m: {d * m:,}"
    )

    split, _ = prepare.instructions({**chosen, "judge_check": 0})
    questions = sum(map(prepare.checkable, split.validation))
    lines += [
        f"  {m * questions:,} validation answers, {d * m:,} × {chosen['epochs']} pairs trained on at most",
        "",
        f"Hours, from a step measured here (prompts of {PROMPT} tokens, every answer {chosen['max_new_tokens']} long)",
    ]
    hours = dict.fromkeys(("combat", "judging", "training", "validation"), 0.0)
    for name, config in configs.items():
        rates = measure(config, shape, counts[name], dtype)
        share = counts[name] / m
        answers = 2 * d * share * chosen["max_new_tokens"]
        hours["combat"] += answers / rates.decoding + 2 * d * share * PROMPT / rates.scoring
        judged = 2 * d * judges * share
        if chosen["judge"] == "generate":
            hours["judging"] += judged * ((length + JUDGE_PROMPT) / rates.scoring + JUDGE_REPLY / rates.decoding)
        elif chosen["judge"] in settings_lib.PEERS:
            hours["judging"] += judged * length / rates.scoring
        trained = d * counts[name] * (PROMPT + 2 * chosen["max_new_tokens"])  # every duel gives a pair, at most
        hours["training"] += trained * (chosen["epochs"] / rates.training + 1 / rates.scoring)
        hours["validation"] += questions * counts[name] * chosen["max_new_tokens"] / rates.decoding
        lines.append(
            f"  {name}: scores {rates.scoring:,.0f}, trains {rates.training:,.0f}, decodes {rates.decoding:,.0f} "
            f"tokens/s ({rates.rows} rows)"
        )
    for phase, seconds in hours.items():
        lines.append(f"  {seconds * t / 3600:8.2f} h  {phase}")
    lines.append(f"  {sum(hours.values()) * t / 3600:8.2f} h  in all")
    return "\n".join(lines)


def _trained_bytes(chosen, configs: Mapping[str, DecoderConfig], counts: Mapping[str, int], dtype) -> dict[str, int]:
    """Bytes of what is trained, and of what training it takes beside activations."""
    shape = settings_lib.lora_config(chosen)
    if shape is not None:
        columns = {
            name: sum(sum(lora.target_shapes(config)[target]) for target in shape.targets)
            for name, config in configs.items()
        }
        adapters = sum(4 * counts[name] * c.num_layers * shape.rank * columns[name] for name, c in configs.items())
        return {"adapters, gradients and AdamW moments, float32": 4 * adapters}
    sizes = [prepare.num_parameters(config) for config in configs.values()]
    # Moments that carry over are there twice, before and after the iteration.
    moments = 8 * max(sizes) if chosen["restart_optimizer"] else 8 * max(sizes) + 16 * sum(sizes)
    return {
        "parameters now, before the iteration and at the start, float32": 3 * 4 * sum(sizes),
        "AdamW moments and two sets of gradients, float32": moments + 2 * 4 * max(sizes),
        f"copy that computes, {dtype.name}": dtype.itemsize * max(sizes),
    }


def _activation_bytes(config: DecoderConfig, chosen: Mapping[str, Any], itemsize: int) -> int:
    """Stored activations of one backward pass: per layer the block's inputs, or only its input with remat."""
    width = config.hidden_size + 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    width += 3 * config.intermediate_size + 2 * config.hidden_size
    kept = config.hidden_size if chosen["remat"] else width
    return chosen["micro_tokens"] * (config.num_layers * kept + width) * itemsize


def measure(config: DecoderConfig, shape: lora.LoraConfig | None, num_agents: int, dtype, *, rows: int = 8) -> Rates:
    """Measures scoring, training and decoding of a base's widths, and extrapolates to its depth."""
    times = [_step_seconds(dataclasses.replace(config, num_layers=n), shape, num_agents, dtype, rows) for n in (1, 2)]
    layer = [max(two - one, 0.0) for one, two in zip(*times, strict=True)]
    full = [one + (config.num_layers - 1) * more for one, more in zip(times[0], layer, strict=True)]
    tokens = rows * num_agents * 64
    return Rates(tokens / full[0], tokens / full[1], rows / full[2], rows)


def _sum_loss(log_probs, batch):
    return log_probs.sum(), ()


def _step_seconds(config, shape, num_agents, dtype, rows) -> tuple[float, float, float]:
    """Seconds of scoring and of training `rows · agents` rows of 64 tokens, and of one decoding step of `rows` rows."""
    params = jax.jit(decoder.init, static_argnums=(1, 2))(jax.random.key(0), config, dtype)
    if shape is None:
        adapters, grouped, mixed, trained = None, None, None, training.masters(params)
    else:
        shape = dataclasses.replace(shape, dropout=0.0)
        grouped, mixed = lora.grouped(shape), lora.rows(shape, num_agents, jnp.zeros(rows, jnp.int32))
        adapters = trained = lora.init(jax.random.key(1), config, shape, num_agents)
    ids = jnp.ones((num_agents, rows, 32), jnp.int32)
    batch = training.Batch(ids, ids > 0, ids, ids > 0)
    common = {"config": config, "vocab_size": config.vocab_size}

    def scoring():
        flat = [x.reshape(-1, 32) for x in batch[:4]]
        return _score(params, adapters, *flat, grouped, **common)

    def train():
        return training.gradient(
            params, trained, jax.random.key(2), batch, lora_config=shape, loss=_sum_loss, **common
        )

    def decode(new_tokens):
        return generate.generate(
            params, adapters, config, jax.random.split(jax.random.key(3), rows), ids[0], ids[0] > 0,
            mixed, max_new_tokens=new_tokens, eos_ids=(config.vocab_size,), vocab_size=config.vocab_size,
        )  # fmt: skip

    return _best(scoring), _best(train), max(_best(lambda: decode(17)) - _best(lambda: decode(1)), 1e-9) / 16


def _score(params, adapters, *arguments, config, vocab_size):
    return _jit_score(params, adapters, config, *arguments, vocab_size=vocab_size)


_jit_score = jax.jit(score.completion_log_probs, static_argnames=("config", "vocab_size"))


def _best(function, repeats: int = 3) -> float:
    jax.block_until_ready(function())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return min(seconds)

"""One GPU against its own ceilings: decoding against memory bandwidth, scoring and training against the matmul rate.

Both ceilings are measured in the same run. Weights are random, of the shapes of Qwen2.5 1.5B and 7B, in bfloat16. Rows
come in the order of their importance, and those that no longer fit into the time are named in a last row. Without a GPU
everything is tiny, to show that it runs: the figures mean nothing, and what stands for 1.5B is float32.

FLOPs count two a multiply-add, and only what the result needs: attention of no query to later or foreign tokens.
"""

import dataclasses
import functools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benches import timing
from experiments.shapes import SHAPES
from stackalign.lm import decoder, generate, lora, score, training, weights
from stackalign.lm.config import DecoderConfig
from stackalign.lm.weights import hf_config
from stackalign.objectives import dpo

SMALL, LARGE = "qwen2.5-1.5b", "qwen2.5-7b"
TEMPERATURE, TOP_P = 0.7, 0.9
BETA, LEARNING_RATE = 0.1, 1e-4
LORA = lora.LoraConfig()  # rank 64 on attention
ADAMW = training.adamw()
_CUT = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip

_SCORE = jax.jit(score.completion_log_probs, static_argnames=("config", "vocab_size"))


class Rows(NamedTuple):
    """A batch: `rows` prompts of `prompt` tokens, each with `group` completions of `completion` tokens."""

    rows: int
    prompt: int
    group: int
    completion: int


class Sizes(NamedTuple):
    """How large everything is.

    Attributes:
      copy: float32 numbers of the array that is copied.
      matmul: side of the matrices that are multiplied.
      loops: copies and products a measurement.
      logits: layers, rows and tokens of the comparison with a CPU.
      prompt, new: tokens of a decoding row.
      judge, dpo, grpo: batches.
    """

    copy: int = 2**28
    matmul: int = 8192
    loops: int = 20
    logits: tuple[int, int, int] = (4, 2, 128)
    prompt: int = 128
    new: int = 128
    judge: Rows = Rows(16, 1024, 2, 64)
    dpo: Rows = Rows(8, 512, 2, 256)
    grpo: Rows = Rows(2, 512, 8, 256)


TINY = Sizes(2**20, 128, 2, (2, 2, 16), 8, 16, Rows(2, 16, 2, 4), Rows(2, 8, 2, 4), Rows(1, 8, 8, 4))


class Model(NamedTuple):
    config: DecoderConfig
    params: Any


class Bench(NamedTuple):
    """What rows share: `model` gives the model of a shape's name, `copy` is in GB/s and `matmul` in TFLOP/s."""

    sizes: Sizes
    repeats: int
    model: Callable[[str], Model]
    copy: float
    matmul: float


def projections(config: DecoderConfig) -> int:
    """Weights that multiply every token: those of all layers' projections."""
    return config.num_layers * sum(out * fan_in for out, fan_in in lora.target_shapes(config).values())


def attention_pairs(batch: Rows) -> int:
    """(query, key) pairs that one head of one layer needs: each token sees its prompt and its own completion so far."""
    own = batch.completion * batch.prompt + batch.completion * (batch.completion + 1) // 2
    return batch.rows * (batch.prompt * (batch.prompt + 1) // 2 + batch.group * own)


def num_tokens(batch: Rows) -> int:
    """Tokens of a batch, prompts counted once."""
    return batch.rows * (batch.prompt + batch.group * batch.completion)


def forward_flops(config: DecoderConfig, batch: Rows) -> dict[str, int]:
    """FLOPs of log-probabilities: projections of all tokens, the vocabulary's of completions only, and attention."""
    return {
        "projections": 2 * projections(config) * num_tokens(batch),
        "attention": 4 * config.num_layers * config.num_heads * config.head_dim * attention_pairs(batch),
        "vocabulary": 2 * config.vocab_size * config.hidden_size * batch.rows * batch.group * batch.completion,
    }


def lora_step_flops(config: DecoderConfig, batch: Rows, lora_config: lora.LoraConfig) -> dict[str, int]:
    """FLOPs of log-probabilities and their gradient where only adapters are trained.

    The backward pass goes through the activations of the base (as much as forward) and needs none of its weights'
    gradients; attention has four products there against two forward; adapters have all three passes.
    """
    forward, shapes = forward_flops(config, batch), lora.target_shapes(config)
    adapters = config.num_layers * sum(lora_config.rank * sum(shapes[name]) for name in lora_config.targets)
    return {
        "projections": 2 * forward["projections"],
        "attention": 3 * forward["attention"],
        "vocabulary": 2 * forward["vocabulary"],
        "adapters": 6 * adapters * num_tokens(batch),
    }


def recomputed_flops(config: DecoderConfig, batch: Rows) -> int:
    """FLOPs of running every layer again in the backward pass, all but its last projection: no gradient needs that."""
    forward, last = forward_flops(config, batch), config.hidden_size * config.intermediate_size
    return forward["projections"] + forward["attention"] - 2 * config.num_layers * last * num_tokens(batch)


def step_bytes(config: DecoderConfig, num_rows: int, seen: float, itemsize: int) -> dict[str, float]:
    """Bytes that a decoding step must read: weights once, and keys and values of `seen` tokens of every row."""
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    matrices = projections(config) + config.vocab_size * config.hidden_size
    return {"weights": matrices * itemsize, "cache": num_rows * seen * cache}


def load(name: str, *, tiny: bool) -> Model:
    """A model with random weights."""
    config = hf_config.from_hf({**SHAPES[name], **(_CUT if tiny else {})})
    dtype = jnp.float32 if tiny and name == SMALL else jnp.bfloat16
    return Model(config, jax.block_until_ready(decoder.init(jax.random.key(0), config, dtype)))


def compiled(function, *args, **kwargs) -> tuple[Callable, dict[str, float]]:
    """The jitted function's program for the arguments, which takes those that are not static, and what it cost."""
    start = time.perf_counter()
    lowered = function.lower(*args, **kwargs)
    traced = time.perf_counter()
    program = lowered.compile()
    done = time.perf_counter()
    scratch = program.memory_analysis().temp_size_in_bytes
    return program, {
        "trace_s": round(traced - start, 2), "compile_s": round(done - traced, 2), "scratch_gb": round(scratch / 1e9, 3)
    }  # fmt: skip


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    return statistics.median(timing.alternate({"ours": call}, repeats)["ours"])


def _loop(function, x, loops: int, repeats: int) -> float:
    """Seconds of one of `loops` calls, each on what the one before gave."""

    def call():
        out = x
        for _ in range(loops):
            out = function(out)
        return jax.block_until_ready(out)

    return _seconds(call, repeats) / loops


def copy(sizes: Sizes, repeats: int) -> dict:
    """GB/s of memory: a large array read and another written."""
    x = jnp.ones(sizes.copy, jnp.float32)
    seconds = _loop(jax.jit(jnp.negative), x, sizes.loops, repeats)
    return {"ours": round(2 * x.nbytes / seconds / 1e9, 3), "unit": "GB/s", "dtype": "float32", "shape": [sizes.copy]}


def matmul(sizes: Sizes, repeats: int) -> dict:
    """TFLOP/s of large square matrices, of normal numbers: others draw less power, and run faster."""
    side = sizes.matmul
    weight = (jax.random.normal(jax.random.key(0), (side, side)) * side**-0.5).astype(jnp.bfloat16)
    seconds = _loop(jax.jit(functools.partial(jnp.matmul, weight)), weight, sizes.loops, repeats)
    return {"ours": round(2 * side**3 / seconds / 1e12, 4), "unit": "TFLOP/s", "dtype": "bfloat16",
            "shape": [side, side, side]}  # fmt: skip


@functools.partial(jax.jit, static_argnames=("config",))
def _logits(params, config, tokens, mask):
    positions = decoder.positions_of(mask)
    hidden, _ = decoder.apply(params, None, config, tokens, positions, decoder.causal_mask(mask))
    return decoder.logits(params, hidden.reshape(hidden.shape[0], -1), config.vocab_size)


def logits(bench: Bench) -> dict:
    """Logits of fewer layers of the 1.5B shape here and in float32 on a CPU, with padding on the left of one row.

    Float32 is also compared at the highest precision of matmuls: by default GPUs round their operands to TF32.
    """
    num_layers, num_rows, length = bench.sizes.logits
    config = dataclasses.replace(bench.model(SMALL).config, num_layers=num_layers)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (num_rows, length), dtype=np.int32)
    mask = np.ones(tokens.shape, bool)
    mask[0, : length // 4] = False
    half = decoder.init(jax.random.key(1), config, jnp.bfloat16)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)

    def run(params, device, precision=None):
        with jax.default_matmul_precision(precision):
            return np.asarray(_logits(*jax.device_put((params,), device), config, tokens, mask))[:, mask.ravel()]

    here, expected = jax.devices()[0], run(single, jax.devices("cpu")[0])

    def compare(found):
        difference = found - expected
        return {
            "max": float(np.abs(difference).max() / np.abs(expected).max()),
            "rms": float(np.sqrt(np.mean(difference**2) / np.mean(expected**2))),
            "argmax": float(np.mean(found.argmax(axis=0) == expected.argmax(axis=0))),
        }

    found = {
        "bfloat16": compare(run(half, here)),
        "float32": compare(run(single, here)),
        "float32_highest": compare(run(single, here, "highest")),
    }
    return {
        "ours": found["bfloat16"]["max"], "unit": "largest difference / largest logit", "against": "float32 on a CPU",
        "shape": SMALL, "layers": num_layers, "rows": num_rows, "length": length, "dtypes": found,
    }  # fmt: skip


def decode(bench: Bench, shape: str, num_rows: int) -> dict:
    """Tokens a second of decoding steps, without adapters. The same program with every row skipped is the prefill."""
    (config, params), prompt, new = bench.model(shape), bench.sizes.prompt, bench.sizes.new
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (num_rows, prompt), dtype=np.int32)
    keys, everyone = jax.random.split(jax.random.key(0), num_rows), np.ones(prompts.shape, bool)
    program, cost = compiled(
        generate.generate, params, None, config, keys, prompts, everyone, max_new_tokens=new, temperature=TEMPERATURE,
        top_p=TOP_P, eos_ids=(), vocab_size=config.vocab_size,
    )  # fmt: skip

    def call(mask):
        return jax.block_until_ready(program(params, None, keys, prompts, mask, temperature=TEMPERATURE))

    found = timing.alternate({"all": lambda: call(everyone), "prefill": lambda: call(~everyone)}, bench.repeats)
    whole, prefill = (statistics.median(found[name]) for name in ("all", "prefill"))
    step = (whole - prefill) / (new - 1)
    read = step_bytes(config, num_rows, prompt + new / 2, params["embed"].dtype.itemsize)
    return {
        "ours": round(num_rows / step, 1), "unit": "tok/s", "shape": shape, "dtype": params["embed"].dtype.name,
        "rows": num_rows, "prompt": prompt, "new": new, "step_ms": round(step * 1e3, 4),
        "prefill_ms": round(prefill * 1e3, 3), "step_gb": {name: round(size / 1e9, 4) for name, size in read.items()},
        "of_copy": round(sum(read.values()) / step / 1e9 / bench.copy, 4), **cost,
    }  # fmt: skip


def _batch(config: DecoderConfig, batch: Rows) -> tuple[np.ndarray, ...]:
    """Prompts, completions and their masks, without padding."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (batch.rows, batch.prompt), dtype=np.int32)
    completions = rng.integers(0, config.vocab_size, (batch.rows, batch.group, batch.completion), dtype=np.int32)
    return prompts, np.ones(prompts.shape, bool), completions, np.ones(completions.shape, bool)


def judge(bench: Bench, shape: str) -> dict:
    """Tokens a second of scoring two answers to every prompt, as judges by likelihood do."""
    (config, params), size = bench.model(shape), bench.sizes.judge
    batch, vocab_size = _batch(config, size), config.vocab_size
    program, cost = compiled(_SCORE, params, None, config, *batch, vocab_size=vocab_size)
    seconds = _seconds(lambda: jax.block_until_ready(program(params, None, *batch)), bench.repeats)
    needed = sum(forward_flops(config, size).values()) / seconds / 1e12
    return {
        "ours": round(num_tokens(size) / seconds, 1), "unit": "tok/s", "shape": shape,
        "dtype": params["embed"].dtype.name, **size._asdict(), "ms": round(seconds * 1e3, 3),
        "tflops": round(needed, 4), "of_matmul": round(needed / bench.matmul, 4), **cost,
    }  # fmt: skip


def dpo_loss(log_probs, batch):
    """DPO of one agent's pairs; the reference's log-probabilities are given."""
    chosen, rejected = (dpo.sequence_log_probs(log_probs[0, :, k], batch.completion_mask[0, :, k]) for k in (0, 1))
    loss = dpo.dpo_loss(chosen, rejected, *batch.extra.T, beta=BETA).loss
    return loss, loss


def group_loss(log_probs, batch):
    """Policy gradient of one agent: log-probabilities of answers to a prompt by how far each is above their mean."""
    loss = -jnp.sum(log_probs[0] * batch.extra[..., None]) / jnp.sum(batch.completion_mask)
    return loss, loss


def train(bench: Bench, shape: str, loss: training.Loss, remat: bool) -> dict:
    """Tokens a second of a gradient of adapters of rank 64 on attention, with dropout, and an AdamW step."""
    (config, params), size = bench.model(shape), bench.sizes.dpo if loss is dpo_loss else bench.sizes.grpo
    adapters = lora.init(jax.random.key(0), config, LORA, 1)
    state = {"adapters": adapters, "moments": training.init(ADAMW, adapters)}
    if loss is dpo_loss:
        extra = np.full((size.rows, 2), -10.0, np.float32)
    else:
        extra = np.tile(np.linspace(-1.0, 1.0, size.group, dtype=np.float32), (size.rows, 1))
    batch = training.Batch(*(x[None] for x in _batch(config, size)), extra)
    program, cost = compiled(
        training.gradient, params, adapters, jax.random.key(0), batch, config=config, lora_config=LORA, loss=loss,
        vocab_size=config.vocab_size, remat=remat,
    )  # fmt: skip

    def step():
        grads, _ = program(params, state["adapters"], jax.random.key(0), batch)
        state["adapters"], state["moments"] = training.apply(
            state["adapters"], state["moments"], grads, LEARNING_RATE, optimizer=ADAMW
        )
        return jax.block_until_ready(state)

    seconds = _seconds(step, bench.repeats)
    flops = {
        "6N_tokens": 6 * weights.num_parameters(config) * num_tokens(size),
        "needed": sum(lora_step_flops(config, size, LORA).values()),
    }
    if remat:
        flops["with_recomputation"] = flops["needed"] + recomputed_flops(config, size)
    rates = {name: count / seconds / 1e12 for name, count in flops.items()}
    return {
        "ours": round(num_tokens(size) / seconds, 1), "unit": "tok/s", "shape": shape,
        "dtype": params["embed"].dtype.name, **size._asdict(), "lora_rank": LORA.rank, "remat": remat,
        "ms": round(seconds * 1e3, 3), "tflops": {name: round(rate, 4) for name, rate in rates.items()},
        "mfu": {name: round(rate / bench.matmul, 4) for name, rate in rates.items()}, **cost,
    }  # fmt: skip


def _decode(shape: str, num_rows: int):
    return 35.0, functools.partial(decode, shape=shape, num_rows=num_rows)


def _judge(shape: str):
    return 25.0, functools.partial(judge, shape=shape)


def _train(shape: str, loss: training.Loss, *, remat: bool):
    return 50.0, functools.partial(train, shape=shape, loss=loss, remat=remat)


# The important ones first, each with the seconds that it may take on an H200, compilation included.
ROWS: dict[str, tuple[float, Callable[[Bench], dict]]] = {
    "logits": (30.0, logits),
    "decode_64_1.5b": _decode(SMALL, 64),
    "judge_1.5b": _judge(SMALL),
    "dpo_1.5b_remat": _train(SMALL, dpo_loss, remat=True),
    "decode_64_7b": _decode(LARGE, 64),
    "judge_7b": _judge(LARGE),
    "dpo_7b_remat": _train(LARGE, dpo_loss, remat=True),
    "grpo_1.5b_remat": _train(SMALL, group_loss, remat=True),
    "decode_1_7b": _decode(LARGE, 1),
    "decode_256_7b": _decode(LARGE, 256),
    "dpo_1.5b": _train(SMALL, dpo_loss, remat=False),
    "decode_1_1.5b": _decode(SMALL, 1),
    "decode_256_1.5b": _decode(SMALL, 256),
    "decode_16_7b": _decode(LARGE, 16),
    "decode_16_1.5b": _decode(SMALL, 16),
    "grpo_7b_remat": _train(LARGE, group_loss, remat=True),
    "dpo_7b": _train(LARGE, dpo_loss, remat=False),
}
CEILINGS = {"copy": copy, "matmul": matmul}
NAMES = (*CEILINGS, *ROWS)


def rows(
    repeats: int, wanted: Callable[[str], bool], note: Callable[[str], None], deadline: float = math.inf
) -> Iterator[dict]:
    """Yields the rows whose name is wanted, in the order of `NAMES`, then what was skipped if anything was.

    A row that fails, for want of memory for one, says why and does not end the suite.

    Args:
      repeats, wanted, note: as in the other suites.
      deadline: of `time.perf_counter`; a row that would probably end later is skipped.
    """
    device, tiny = jax.devices()[0], jax.default_backend() != "gpu"
    sizes = TINY if tiny else Sizes()
    common = {"reference": None, "ratio": None, "reference_is": None, "device": device.device_kind,
              "backend": jax.default_backend(), "tiny": tiny}  # fmt: skip

    def peak():
        return (device.memory_stats() or {}).get("peak_bytes_in_use")

    ceilings = {}
    for name, measure in CEILINGS.items():
        row = measure(sizes, repeats)
        ceilings[name] = row["ours"]
        if wanted(name):
            yield {"name": name, **row, **common}
    bench = Bench(sizes, repeats, functools.cache(functools.partial(load, tiny=tiny)), **ceilings)
    skipped, guessed, spent = {}, 0.0, 0.0
    for name in filter(wanted, ROWS):
        seconds, measure = ROWS[name]
        # Rows so far tell by how much the guesses are off; without a GPU they are off by all of it.
        pace = spent / guessed if guessed else 0.0 if tiny else 1.0
        expected, left = seconds * pace, deadline - time.perf_counter()
        if expected > left:
            skipped[name] = f"would take about {expected:.0f} s, {max(left, 0):.0f} s were left"
            continue
        note(f"{name}: {repeats} runs after a warm-up")
        start, before = time.perf_counter(), peak()
        try:
            row = measure(bench)
            guessed, spent = guessed + seconds, spent + time.perf_counter() - start
        except Exception as error:  # what a device, its libraries or their compilers lack has no common type
            text = str(error).splitlines()
            note(traceback.format_exc())
            row = {"ours": None, "unit": None, "error": f"{type(error).__name__}: {text[0][:300] if text else ''}"}
        after, taken = peak(), time.perf_counter() - start
        # The device keeps its highest mark only: a row that stays below an earlier one's has none of its own.
        highest = round(after / 1e9, 3) if after and after > before else None
        yield {"name": name, **row, "peak_gb": highest, "seconds": round(taken, 2), **common}
    if skipped:
        yield {"name": "skipped", "rows": skipped, **common}


def versions() -> dict[str, Any]:
    """The GPU's memory that programs may use, in GB."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return {"memory_gb": round(limit / 1e9, 1) if limit else None}

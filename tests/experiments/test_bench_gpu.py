"""The GPU suite at tiny shapes: its rows, its counts of FLOPs and bytes, and what happens without time or memory."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benches import gpu
from experiments.shapes import SHAPES
from stackalign.lm import decoder, lora, training
from stackalign.lm.weights import hf_config


def run(pattern, **kwargs) -> dict[str, dict]:
    return {row["name"]: row for row in gpu.rows(1, pattern.__contains__, lambda text: None, **kwargs)}


def test_a_row_of_every_kind():
    names = ("copy", "matmul", "logits", "decode_16_1.5b", "judge_7b", "dpo_1.5b_remat", "grpo_1.5b_remat")
    found = run(names)
    assert set(found) == set(names)
    json.dumps(found)
    for name, row in found.items():
        assert {"ours", "unit", "reference", "ratio", "reference_is", "device", "backend", "shape"} <= set(row), name
        assert row["tiny"] and "error" not in row
    assert found["copy"]["ours"] > 0 < found["matmul"]["ours"]
    # Rounding to eight bits moves logits, float32 is computed as on the CPU.
    assert 1e-4 < found["logits"]["dtypes"]["bfloat16"]["max"] < 0.05
    assert found["logits"]["dtypes"]["float32"]["max"] < 1e-5
    assert found["logits"]["dtypes"]["float32_highest"]["argmax"] == 1.0
    assert found["decode_16_1.5b"]["dtype"] == "float32" and found["judge_7b"]["dtype"] == "bfloat16"
    rates = found["dpo_1.5b_remat"]["tflops"]
    assert rates["with_recomputation"] > rates["needed"] > 0
    assert {"trace_s", "compile_s", "scratch_gb", "mfu"} <= set(found["grpo_1.5b_remat"])


def test_failures_and_the_deadline(monkeypatch):
    """A row without memory says so, the next one runs, and one that would take too long, as others go, is named."""

    def exhausted(bench):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 9 bytes\nmore")

    def slow(bench):
        time.sleep(0.05)
        return {"ours": 1.0, "unit": "-"}

    monkeypatch.setattr(gpu, "ROWS", {"full": (1.0, exhausted), "slow": (0.01, slow), "long": (100.0, slow)})
    found = run(("full", "slow", "long"), deadline=time.perf_counter() + 60)
    assert set(found) == {"full", "slow", "skipped"}
    assert found["full"]["ours"] is None
    assert found["full"]["error"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory allocating 9 bytes"
    assert found["slow"]["ours"] == 1.0
    assert list(found["skipped"]["rows"]) == ["long"]
    assert set(run(("slow",), deadline=0.0)["skipped"]["rows"]) == {"slow"}


def test_pairs_of_attention():
    """Counted in the mask: causal, and no completion sees another."""
    batch = gpu.Rows(3, 5, 2, 4)
    part = np.array([0] * 5 + [1] * 4 + [2] * 4)
    mask = np.tril(np.ones((13, 13), bool)) & ((part == 0)[None] | (part[None] == part[:, None]))
    assert gpu.attention_pairs(batch) == 3 * mask.sum()
    assert gpu.num_tokens(batch) == 3 * 13


def test_flops_are_those_that_xla_counts():
    """To 2 percent: XLA adds elementwise work and leaves out the gradient of the first layer's input."""
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    config, batch = hf_config.from_hf({**SHAPES["qwen2.5-7b"], **sizes}), gpu.Rows(2, 64, 2, 32)
    shape = lora.LoraConfig(rank=8, dropout=0.0)
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), config))
    arrays = gpu._batch(config, batch)
    everything = batch.rows * (gpu.num_tokens(batch) // batch.rows) ** 2 / gpu.attention_pairs(batch)

    def total(parts):  # XLA multiplies masked pairs too
        return sum(count * (everything if name == "attention" else 1) for name, count in parts.items())

    def counted(lowered):
        return lowered.cost_analysis()["flops"]

    scoring = gpu._SCORE.lower(params, None, config, *arrays, vocab_size=config.vocab_size)
    assert total(gpu.forward_flops(config, batch)) == pytest.approx(counted(scoring), rel=0.02)

    adapters = jax.eval_shape(lambda: lora.init(jax.random.key(0), config, shape, 1))
    rows = training.Batch(*(x[None] for x in arrays), jnp.zeros((2, 2)))
    plain, again = (
        counted(
            training.gradient.lower(
                params, adapters, jax.random.key(0), rows, config=config, lora_config=shape, loss=gpu.dpo_loss,
                vocab_size=config.vocab_size, remat=remat,
            ).compile()
        )
        for remat in (False, True)
    )  # fmt: skip
    assert total(gpu.lora_step_flops(config, batch, shape)) == pytest.approx(plain, rel=0.02)
    attention = gpu.forward_flops(config, batch)["attention"] * (everything - 1)
    assert gpu.recomputed_flops(config, batch) + attention == pytest.approx(again - plain, rel=0.05)


@pytest.mark.parametrize("name", [gpu.SMALL, gpu.LARGE])
def test_bytes_of_a_step(name):
    """Every matrix but an embedding that is only looked up, and the caches at their length."""
    config = hf_config.from_hf(SHAPES[name])
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), config, jnp.bfloat16))
    caches = jax.eval_shape(lambda: decoder.init_caches(config, 3, 40, jnp.bfloat16))
    if "lm_head" in params:
        del params["embed"]
    matrices = sum(2 * leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2)
    cache = sum(2 * leaf.size for leaf in jax.tree.leaves(caches))
    assert gpu.step_bytes(config, 3, 40, 2) == {"weights": matrices, "cache": cache}

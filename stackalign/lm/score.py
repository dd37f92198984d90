"""Per-token log-probabilities of completions, without ever holding `[rows, length, vocabulary]`.

A batch is a prompt block padded on the left and completion blocks padded on the right, so the hidden states that
predict completion tokens are static slices and the vocabulary projection never runs over prompts. The projection
goes in chunks of columns; for a frozen projection the backward pass needs only the `[d, columns]` gradient of each
token's log-probability, which the forward pass forms while the chunk's softmax is at hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from stackalign.lm import decoder, lora, sharding
from stackalign.lm.config import DecoderConfig

CHUNK = 256  # columns of a vocabulary chunk: 50 MB of float32 logits at 49k words


def _chunk_log_probs(head, hidden, targets, temperature, vocab_size):
    """Log-probabilities `[n]` of `targets` `[n]` from `hidden` `[d, n]`, and the chunk's log-softmax `[V, n]`."""
    logits = decoder.logits({"embed": head.astype(hidden.dtype)}, hidden, vocab_size) / temperature
    log_probs = jax.nn.log_softmax(logits, axis=0)
    picked = jnp.take_along_axis(log_probs, targets[None], axis=0)[0]
    return jnp.where(picked > 0, 0.0, picked), log_probs  # XLA's exp(0) may be an ulp below 1


def _chunks(hidden, targets, shards):
    """`hidden` `[d, N]` → `[chunks, d, n]`, `targets` `[N]` → `[chunks, n]`.

    Each of the `shards` equal parts of N gives its columns to every chunk, padded at its end with zeros, so that
    columns which lie on as many devices stay there.
    """
    features, total = hidden.shape
    each = total // shards
    size = max(min(CHUNK, each), 1)
    count = -(-each // size)
    hidden = jnp.pad(hidden.reshape(features, shards, each), ((0, 0), (0, 0), (0, count * size - each)))
    targets = jnp.pad(targets.reshape(shards, each), ((0, 0), (0, count * size - each)))
    hidden = hidden.reshape(features, shards, count, size).transpose(2, 0, 1, 3).reshape(count, features, -1)
    return hidden, targets.reshape(shards, count, size).transpose(1, 0, 2).reshape(count, -1)


def _unchunk(values, total, shards):
    """What `_chunks` did to the last axis undone: `[chunks, ..., n]` → `[..., N]`."""
    count, *middle, size = values.shape
    values = jnp.moveaxis(values.reshape(count, *middle, shards, size // shards), 0, -2)
    return values.reshape(*middle, shards, -1)[..., : total // shards].reshape(*middle, total)


def _map_chunks(head, hidden, targets, temperature, vocab_size, shards):
    def one(chunk):
        return _chunk_log_probs(head, *chunk, temperature, vocab_size)[0]

    values = jax.lax.map(jax.checkpoint(one), _chunks(hidden, targets, shards))
    return _unchunk(values, targets.shape[0], shards)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _frozen_head_log_probs(head, hidden, targets, temperature, vocab_size, shards):
    return _map_chunks(head, hidden, targets, temperature, vocab_size, shards)


def _frozen_forward(head, hidden, targets, temperature, vocab_size, shards):
    def one(chunk):
        chunk_hidden, chunk_targets = chunk
        picked, log_probs = _chunk_log_probs(head, chunk_hidden, chunk_targets, temperature, vocab_size)
        expected = decoder.transposed_matmul(head, jnp.exp(log_probs).astype(head.dtype))
        return picked, (head[chunk_targets].T.astype(jnp.float32) - expected) / temperature

    picked, slopes = jax.lax.map(one, _chunks(hidden, targets, shards))
    total = targets.shape[0]
    return _unchunk(picked, total, shards), _unchunk(slopes, total, shards).astype(hidden.dtype)


def _frozen_backward(vocab_size, shards, slopes, cotangent):
    return None, slopes * cotangent[None].astype(slopes.dtype), None, None


_frozen_head_log_probs.defvjp(_frozen_forward, _frozen_backward)


def token_log_probs(
    head, hidden, targets, *, temperature=1.0, vocab_size: int, train_head: bool = False, shards: int = 1
) -> jax.Array:
    """Log-softmax of the projection, picked at the targets, in float32 at the sampling temperature.

    Args:
      head: `[V, d]`; one that is trained may be wider than `hidden`, whose dtype computes.
      hidden: `[d, N]`.
      targets: int `[N]`.
      temperature: divides the logits; > 0.
      vocab_size: ids at and above it have probability zero.
      train_head: give gradients for `head` too; otherwise it is treated as a constant.
      shards: into how many equal parts N lies on devices; it must divide N.

    Returns:
      `[N]` float32, all ≤ 0. Memory is O(V·CHUNK), not O(V·N).
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    if vocab_size < head.shape[0]:  # rows that pad the vocabulary may hold anything: 0 · NaN would reach the gradient
        head = jnp.where(jnp.arange(head.shape[0])[:, None] < vocab_size, head, 0)
    if train_head:
        return _map_chunks(head, hidden, targets, temperature, vocab_size, shards)
    return _frozen_head_log_probs(jax.lax.stop_gradient(head), hidden, targets, temperature, vocab_size, shards)


def completion_log_probs(
    params,
    adapters: lora.Adapters | None,
    config: DecoderConfig,
    prompts: jax.Array,
    prompt_mask: jax.Array,
    completions: jax.Array,
    completion_mask: jax.Array,
    rows: lora.Rows | None = None,
    *,
    temperature=1.0,
    vocab_size: int,
    remat: bool = False,
    train_head: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array:
    """Log-probability of every completion token given its prompt and the tokens before it.

    Completions of one prompt may share it: the prompt runs once and no completion sees another.

    Args:
      prompts: int `[rows, P]` and prompt_mask bool `[rows, P]`; each row has at least one real token, in column P − 1.
      completions: int `[rows, C]`, or `[rows, G, C]` for G completions of each prompt; completion_mask alike.
      rows: which adapter each row uses (`lora.rows`).
      temperature, vocab_size, train_head: see `token_log_probs`.
      remat, mesh: see `decoder.apply`.

    Returns:
      Float32, shaped like `completions`; entries outside `completion_mask` are 0.
    """
    num_rows, prompt_length = prompts.shape
    length = completions.shape[-1]
    branches = completions.reshape(num_rows, -1, length)
    branch_mask = completion_mask.reshape(branches.shape)
    count = branches.shape[1]
    tokens = jnp.concatenate([prompts, branches.reshape(num_rows, -1)], axis=1)
    valid = jnp.concatenate([prompt_mask, branch_mask.reshape(num_rows, -1)], axis=1)
    inside = jnp.maximum(jnp.cumsum(branch_mask, axis=2) - 1, 0) + prompt_mask.sum(axis=1)[:, None, None]
    positions = jnp.concatenate([decoder.positions_of(prompt_mask), inside.reshape(num_rows, -1)], axis=1)
    mask = decoder.causal_mask(valid)
    if count > 1:
        part = np.concatenate([np.zeros(prompt_length, int), np.repeat(np.arange(1, count + 1), length)])
        mask = mask & ((part[None, :] == 0) | (part[None, :] == part[:, None]))[None]
    hidden, _ = decoder.apply(params, adapters, config, tokens, positions, mask, rows=rows, remat=remat, mesh=mesh)
    # A completion's first token is predicted by the prompt's last, the others by their own predecessors.
    last = hidden[:, :, prompt_length - 1 : prompt_length]
    starts = range(prompt_length, prompt_length + count * length, length)
    predicting = [piece for start in starts for piece in (last, hidden[:, :, start : start + length - 1])]
    hidden = jnp.concatenate(predicting, axis=2)
    values = token_log_probs(
        sharding.gather({"lm_head": decoder.unembedding(params)}, mesh)["lm_head"],
        hidden.reshape(hidden.shape[0], -1),
        completions.reshape(-1),
        temperature=temperature,
        vocab_size=vocab_size,
        train_head=train_head,
        shards=sharding.row_shards(mesh, num_rows),
    ).reshape(completions.shape)
    return jnp.where(completion_mask, values, 0.0)

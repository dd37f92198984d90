"""Sampling from the decoder: one compiled program of prefill and decoding.

The last prompt column holds each prompt's last token, so the first new token comes from the prefill itself. Rows stop
at any end-of-turn id on the device and the loop ends when all rows have stopped. Each row has its own PRNG key, so its
answer does not depend on which rows share its batch (up to the rounding of differently shaped matmuls).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stackalign.lm import decoder, lora
from stackalign.lm.config import DecoderConfig

BLOCK = 256  # ids a block of the two-level inverse-CDF draw


class Prefix(NamedTuple):
    """Beginnings that prompts share: each runs once, and the prompts that continue it read its keys and values.

    Attributes:
      tokens: int `[prefixes, L]`, without padding; a row that no prompt continues may hold anything.
      index: int `[prompts]`, which prefix each prompt continues.
      rows: which adapter each prefix uses.
    """

    tokens: jax.Array
    index: jax.Array
    rows: lora.Rows | None = None


class Generation(NamedTuple):
    """Sampled completions.

    Attributes:
      tokens: int32 `[rows, N]`, 0 after the end.
      mask: bool `[rows, N]`, True up to and including the end-of-turn id.
      log_probs: float32 `[rows, N]`, log-probability of each token at the sampling temperature over the whole
        vocabulary (before the nucleus cut), 0 where masked; equal to what `score.completion_log_probs` gives.
      finished: bool `[rows]`, True when the row ended by itself.
    """

    tokens: jax.Array
    mask: jax.Array
    log_probs: jax.Array
    finished: jax.Array


def nucleus_mask(log_probs: jax.Array, top_p: float) -> jax.Array:
    """The smallest set of most probable ids whose probability reaches `top_p`, as bool `[V, rows]`.

    Found without sorting, by bisecting the probability threshold on the float's bits: the order of non-negative floats
    is that of their bits, so 31 halvings are exact. Ids that tie with the threshold are all kept.

    Args:
      log_probs: `[V, rows]`, normalised over axis 0.
      top_p: in (0, 1].
    """
    probs = jnp.exp(log_probs)
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

    def halve(_, bounds):
        low, high = bounds  # mass of {bits >= low} reaches top_p, that of {bits >= high} does not
        middle = low + (high - low) // 2
        reaches = jnp.sum(jnp.where(bits >= middle[None], probs, 0.0), axis=0) >= top_p
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, middle)

    start = (jnp.zeros(probs.shape[1], jnp.int32), jnp.full(probs.shape[1], jnp.iinfo(jnp.int32).max))
    low, _ = jax.lax.fori_loop(0, 31, halve, start)
    return bits >= low[None]


def categorical(uniform: jax.Array, weights: jax.Array) -> jax.Array:
    """Draws ids by inverse CDF: one uniform in [0, 1) a row decides, in two levels to avoid a long cumulative sum.

    Args:
      uniform: `[rows]`.
      weights: `[V, rows]`, non-negative, not all zero; need not be normalised.

    Returns:
      int32 `[rows]`; an id of weight 0 is never drawn.
    """
    vocab, num_rows = weights.shape
    blocks = jnp.pad(weights, ((0, -vocab % BLOCK), (0, 0))).reshape(-1, BLOCK, num_rows)
    ends = jnp.cumsum(blocks.sum(axis=1), axis=0)
    goal = uniform * ends[-1]
    block = _positive_from(blocks.sum(axis=1), jnp.sum(ends <= goal[None], axis=0))
    start = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[None], axis=0)[0], 0.0)
    inside = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    offset = jnp.sum(jnp.cumsum(inside, axis=0) <= (goal - start)[None], axis=0)
    return (block * BLOCK + _positive_from(inside, offset)).astype(jnp.int32)


def top_k_mask(logits: jax.Array, top_k: int) -> jax.Array:
    """The `top_k` largest of `[V, rows]` along axis 0, as bool; those that tie with the smallest of them are all kept.

    Bisects on the float's bits as `nucleus_mask` does, with negative numbers' bits turned so that they order alike.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    bits = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)

    def halve(_, bounds):
        low, high = bounds  # at least top_k reach low, fewer reach high
        middle = (low & high) + ((low ^ high) >> 1)  # does not overflow
        reaches = jnp.sum(bits >= middle[None], axis=0) >= top_k
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, middle)

    limits = jnp.iinfo(jnp.int32)
    start = (jnp.full(bits.shape[1], limits.min), jnp.full(bits.shape[1], limits.max))
    low, _ = jax.lax.fori_loop(0, 32, halve, start)
    return bits >= low[None]


def nucleus_draw(keys: jax.Array, weights: jax.Array, top_p: float) -> jax.Array:
    """Draws from the nucleus (see `nucleus_mask`) by rejection, which never looks for its border.

    An id lies in the nucleus exactly where the ids more probable than it do not reach `top_p`. Ids drawn from the whole
    distribution are drawn again until they do, which each draw does with probability `top_p` or more.

    Args:
      keys: typed keys `[rows]`; every row has its own draws, however often others draw again.
      weights: `[V, rows]` as `categorical` takes them.
      top_p: in (0, 1]; the work grows as 1 / top_p.

    Returns:
      int32 `[rows]`.
    """
    goal = top_p * weights.sum(axis=0)

    def draw(state):
        attempt, token, accepted = state
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, attempt)))(keys)
        drawn = categorical(uniform, weights)
        weight = jnp.take_along_axis(weights, drawn[None], axis=0)
        above = jnp.sum(jnp.where(weights > weight, weights, 0.0), axis=0)
        return attempt + 1, jnp.where(accepted, token, drawn), accepted | ~(above >= goal)  # NaN is accepted

    nothing = jnp.zeros(weights.shape[1], jnp.int32)
    return jax.lax.while_loop(lambda state: ~jnp.all(state[2]), draw, (0, nothing, nothing > 0))[1]


def argmax(logits: jax.Array) -> jax.Array:
    """First most probable id int32 `[rows]` of `[V, rows]`, in two levels: XLA's CPU argmax runs on one core."""
    vocab, num_rows = logits.shape
    padded = jnp.pad(logits, ((0, -vocab % BLOCK), (0, 0)), constant_values=-jnp.inf)
    blocks = padded.reshape(-1, BLOCK, num_rows)
    block = jnp.argmax(blocks.max(axis=1), axis=0)
    inside = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    return (block * BLOCK + jnp.argmax(inside, axis=0)).astype(jnp.int32)


def _positive_from(weights: jax.Array, index: jax.Array) -> jax.Array:
    """The first positive entry of `[n, rows]` at or after `index` `[rows]`, else the last positive one.

    A parallel cumulative sum may rise, or fall, by rounding where the weight is zero; this never lands there.
    """
    places, positive = jnp.arange(weights.shape[0])[:, None], weights > 0
    following = jnp.min(jnp.where(positive & (places >= index[None]), places, weights.shape[0]), axis=0)
    return jnp.minimum(following, jnp.max(jnp.where(positive, places, 0), axis=0))


def sample(
    keys: jax.Array, logits: jax.Array, temperature, top_p: float, greedy: bool, top_k: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Next ids `[rows]` and their log-probabilities `[rows]` at the sampling temperature (1 when greedy).

    Args:
      keys: typed keys `[rows]`.
      logits: float32 `[V, rows]`.
      temperature, top_p, greedy, top_k: see `generate`. With both cuts the nucleus is that of the `top_k` kept.
    """
    temperature = 1.0 if greedy else temperature
    peak = jnp.max(logits, axis=0)
    weights = jnp.exp((logits - peak) / temperature)
    log_total = jnp.log(weights.sum(axis=0))
    if 0 < top_k < logits.shape[0] and not greedy:
        weights = jnp.where(top_k_mask(logits, top_k), weights, 0.0)
    if greedy:
        token = argmax(logits)
    elif top_p >= 1.0:
        token = categorical(jax.vmap(jax.random.uniform)(keys), weights)
    elif top_p >= 0.5:
        token = nucleus_draw(keys, weights, top_p)
    else:
        kept = nucleus_mask(jnp.log(weights / weights.sum(axis=0)), top_p)
        token = categorical(jax.vmap(jax.random.uniform)(keys), jnp.where(kept, weights, 0.0))
    picked = (jnp.take_along_axis(logits, token[None], axis=0)[0] - peak) / temperature - log_total
    return token, jnp.minimum(picked, 0.0)  # XLA's exp(0) may be an ulp below 1


def prefill(
    params,
    adapters: lora.Adapters | None,
    config: DecoderConfig,
    prompts: jax.Array,
    prompt_mask: jax.Array,
    rows: lora.Rows | None = None,
    prefix: Prefix | None = None,
    mesh: jax.sharding.Mesh | None = None,
):
    """Runs prompts, each behind its prefix where there are any.

    Args:
      params, adapters, config, rows, mesh: see `decoder.apply`.
      prompts: int `[rows, P]`, padded on the left, what follows the prefix; prompt_mask bool `[rows, P]`.
      prefix: see `Prefix`, of length L; None is L = 0.

    Returns:
      `(hidden, caches, positions, seen)`: hidden `[d, rows, P]`, caches of L + P slots, positions int and seen bool
      `[rows, L + P]`, each slot's place in its sequence and whether it holds a token.
    """
    num_rows, length = prompts.shape
    dtype = params["embed"].dtype
    positions = decoder.positions_of(prompt_mask)
    if prefix is None:
        caches = decoder.init_caches(config, num_rows, length, dtype)
        hidden, caches = decoder.apply(
            params, adapters, config, prompts, positions, decoder.causal_mask(prompt_mask), caches, 0, rows, mesh=mesh
        )
        return hidden, caches, positions, prompt_mask
    whole = jnp.ones(prefix.tokens.shape, bool)
    shared = prefix.tokens.shape[1]
    caches = decoder.init_caches(config, whole.shape[0], shared, dtype)
    places = decoder.positions_of(whole)
    _, caches = decoder.apply(
        params, adapters, config, prefix.tokens, places, decoder.causal_mask(whole), caches, 0, prefix.rows, mesh=mesh
    )
    caches = decoder.grow_caches(decoder.take_rows(caches, prefix.index), length)
    slots = jnp.concatenate([places[prefix.index], shared + positions], axis=1)
    before = jnp.ones((num_rows, length, shared), bool)
    mask = jnp.concatenate([before, decoder.causal_mask(prompt_mask)], axis=2)
    hidden, caches = decoder.apply(
        params, adapters, config, prompts, shared + positions, mask, caches, shared, rows, slot_positions=slots,
        mesh=mesh,
    )  # fmt: skip
    return hidden, caches, slots, jnp.concatenate([before[:, 0], prompt_mask], axis=1)


@functools.partial(
    jax.jit, static_argnames=("config", "max_new_tokens", "top_p", "top_k", "greedy", "eos_ids", "vocab_size", "mesh")
)
def generate(
    params,
    adapters: lora.Adapters | None,
    config: DecoderConfig,
    keys: jax.Array,
    prompts: jax.Array,
    prompt_mask: jax.Array,
    rows: lora.Rows | None = None,
    prefix: Prefix | None = None,
    source: jax.Array | None = None,
    *,
    max_new_tokens: int,
    temperature=1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    greedy: bool = False,
    eos_ids: tuple[int, ...],
    vocab_size: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Generation:
    """Samples completions: one of every prompt, or several of each that share the work on it.

    Args:
      params, adapters, config, mesh: see `decoder.apply`.
      keys: typed PRNG keys `[rows]`, consumed, one a completion.
      prompts: int `[prompts, P]`, padded on the left; prompt_mask bool `[prompts, P]`. One without a token is skipped.
      rows: which adapter each prompt uses, and its completions.
      prefix: what prompts begin with, if they share it; see `Prefix`.
      source: int `[rows]`, which prompt each completion continues; None is one of each, in their order.
      max_new_tokens: N ≥ 1.
      temperature: > 0, traced, so that one program serves all; ignored when `greedy`.
      top_p: in (0, 1]; 1 keeps every id.
      top_k: ≥ 0; 0 keeps every id.
      eos_ids: every id that ends a turn.
      vocab_size: ids at and above it are never sampled.

    Returns:
      `Generation` of length N.
    """
    hidden, caches, places, visible = prefill(params, adapters, config, prompts, prompt_mask, rows, prefix, mesh=mesh)
    hidden, skipped, lengths = hidden[:, :, -1], ~prompt_mask.any(axis=1), visible.sum(axis=1)
    if source is not None:
        hidden, caches, rows = hidden[:, source], decoder.take_rows(caches, source), lora.take(rows, source)
        places, visible, skipped, lengths = places[source], visible[source], skipped[source], lengths[source]
    num_rows, prompt_length = visible.shape
    slots = prompt_length + max_new_tokens
    caches = decoder.grow_caches(caches, max_new_tokens)
    visible = jnp.pad(visible, ((0, 0), (0, max_new_tokens)))
    slot_positions = jnp.concatenate([places, lengths[:, None] + jnp.arange(max_new_tokens)], axis=1)
    ends = jnp.asarray(eos_ids, jnp.int32)

    def pick(step, hidden):
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        return sample(step_keys, decoder.logits(params, hidden, vocab_size, mesh), temperature, top_p, greedy, top_k)

    def write(step, out, token, log_prob, done):
        return Generation(
            out.tokens.at[:, step].set(jnp.where(done, 0, token)),
            out.mask.at[:, step].set(~done),
            out.log_probs.at[:, step].set(jnp.where(done, 0.0, log_prob)),
            out.finished | (~done & jnp.isin(token, ends)),
        )

    def step_once(state):
        step, caches, token, out, done = state
        slot = prompt_length + step - 1
        seen = visible | ((jnp.arange(slots) >= prompt_length) & (jnp.arange(slots) <= slot))[None]
        position = (lengths + step - 1)[:, None]
        hidden, caches = decoder.apply(
            params, adapters, config, token[:, None], position, seen[:, None], caches, slot, rows,
            slot_positions=slot_positions, mesh=mesh,
        )  # fmt: skip
        token, log_prob = pick(step, hidden[:, :, 0])
        out = write(step, out, token, log_prob, done)
        return step + 1, caches, token, out, done | out.finished

    empty = jnp.zeros((num_rows, max_new_tokens), jnp.int32)
    out = Generation(empty, empty > 0, empty.astype(jnp.float32), jnp.zeros(num_rows, bool))
    token, log_prob = pick(0, hidden)
    out = write(0, out, token, log_prob, skipped)
    state = (jnp.int32(1), caches, token, out, skipped | out.finished)
    state = jax.lax.while_loop(lambda s: (s[0] < max_new_tokens) & ~jnp.all(s[4]), step_once, state)
    return state[3]

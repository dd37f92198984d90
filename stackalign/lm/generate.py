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


def sample(keys: jax.Array, logits: jax.Array, temperature, top_p: float, greedy: bool) -> tuple[jax.Array, jax.Array]:
    """Next ids `[rows]` and their log-probabilities `[rows]` at the sampling temperature (1 when greedy).

    Args:
      keys: typed keys `[rows]`.
      logits: float32 `[V, rows]`.
    """
    temperature = 1.0 if greedy else temperature
    peak = jnp.max(logits, axis=0)
    weights = jnp.exp((logits - peak) / temperature)
    log_total = jnp.log(weights.sum(axis=0))
    if greedy:
        token = argmax(logits)
    elif top_p >= 1.0:
        token = categorical(jax.vmap(jax.random.uniform)(keys), weights)
    elif top_p >= 0.5:
        token = nucleus_draw(keys, weights, top_p)
    else:
        kept = nucleus_mask((logits - peak) / temperature - log_total, top_p)
        token = categorical(jax.vmap(jax.random.uniform)(keys), jnp.where(kept, weights, 0.0))
    picked = (jnp.take_along_axis(logits, token[None], axis=0)[0] - peak) / temperature - log_total
    return token, jnp.minimum(picked, 0.0)  # XLA's exp(0) may be an ulp below 1


@functools.partial(
    jax.jit, static_argnames=("config", "max_new_tokens", "top_p", "greedy", "eos_ids", "vocab_size")
)
def generate(
    params,
    adapters: lora.Adapters | None,
    config: DecoderConfig,
    keys: jax.Array,
    prompts: jax.Array,
    prompt_mask: jax.Array,
    rows: lora.Rows | None = None,
    *,
    max_new_tokens: int,
    temperature=1.0,
    top_p: float = 1.0,
    greedy: bool = False,
    eos_ids: tuple[int, ...],
    vocab_size: int,
) -> Generation:
    """Samples a completion for every row.

    Args:
      params, adapters, config, rows: see `decoder.apply`.
      keys: typed PRNG keys `[rows]`, consumed.
      prompts: int `[rows, P]`, padded on the left; prompt_mask bool `[rows, P]`. A row without a token is skipped.
      max_new_tokens: N ≥ 1.
      temperature: > 0, traced, so that one program serves all; ignored when `greedy`.
      top_p: in (0, 1]; 1 keeps every id.
      eos_ids: every id that ends a turn.
      vocab_size: ids at and above it are never sampled.

    Returns:
      `Generation` of length N.
    """
    num_rows, prompt_length = prompts.shape
    lengths = prompt_mask.sum(axis=1)
    slots = prompt_length + max_new_tokens
    caches = decoder.init_caches(config, num_rows, prompt_length, params["embed"].dtype)
    visible = jnp.pad(prompt_mask, ((0, 0), (0, max_new_tokens)))
    prompt_positions = decoder.positions_of(prompt_mask)
    new_positions = lengths[:, None] + jnp.arange(max_new_tokens)
    slot_positions = jnp.concatenate([prompt_positions, new_positions], axis=1)
    hidden, caches = decoder.apply(
        params,
        adapters,
        config,
        prompts,
        prompt_positions,
        decoder.causal_mask(prompt_mask),
        caches,
        0,
        rows,
    )
    caches = decoder.grow_caches(caches, max_new_tokens)
    ends = jnp.asarray(eos_ids, jnp.int32)

    def pick(step, hidden):
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        return sample(step_keys, decoder.logits(params, hidden, vocab_size), temperature, top_p, greedy)

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
            slot_positions=slot_positions,
        )  # fmt: skip
        token, log_prob = pick(step, hidden[:, :, 0])
        out = write(step, out, token, log_prob, done)
        return step + 1, caches, token, out, done | out.finished

    empty = jnp.zeros((num_rows, max_new_tokens), jnp.int32)
    out = Generation(empty, empty > 0, empty.astype(jnp.float32), jnp.zeros(num_rows, bool))
    token, log_prob = pick(0, hidden[:, :, -1])
    done = lengths == 0
    out = write(0, out, token, log_prob, done)
    state = (jnp.int32(1), caches, token, out, done | out.finished)
    state = jax.lax.while_loop(lambda s: (s[0] < max_new_tokens) & ~jnp.all(s[4]), step_once, state)
    return state[3]

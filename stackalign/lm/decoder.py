"""The decoder: one parametric pre-norm transformer with rotary attention, as pure functions of nested dicts.

Activations are **feature-first**, `[features, rows, length]`, and weights are `[out, in]` as checkpoints store them, so
every projection is `W @ h` with the weight on the left. XLA's CPU matmul is up to two times faster that way at the few
columns of a decoding step and equal at the many of a training step; GPU libraries do not mind. This is the one place
where the layout is chosen.

Parameters::

    {"embed": [V, d], "layers": ({"attn_norm": [d], "qkv": [(H + 2·Hkv)·hd, d], "o": [d, H·hd],
                                  "mlp_norm": [d], "gate_up": [2f, d], "down": [d, f]}, ...),
     "final_norm": [d], "lm_head": [V, d] (only when untied)}

Layers are a tuple, so a decoding step is unrolled without slicing stacked weights; `remat` trades the activations of a
training step for one more forward pass of each layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stackalign.lm import lora
from stackalign.lm.config import DecoderConfig

MASKED = -1e30  # finite, so a fully masked (padding) query gives a uniform row and never 0/0


class LayerCache(NamedTuple):
    """Keys `[Hkv, rows, hd, slots]` and values `[Hkv, rows, slots, hd]` of one layer: each as its matmul reads it, so
    that a decoding step writes one slot and copies nothing."""

    keys: jax.Array
    values: jax.Array


def rope_frequencies(config: DecoderConfig) -> jax.Array:
    """Inverse frequencies `[hd/2]` in radians a position, float32, with Llama-3 scaling where the config has it."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * jnp.pi / frequencies
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = jnp.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return jnp.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)


def rope(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[hd/2, rows, length]`, float32, of integer `positions` `[rows, length]`."""
    angles = rope_frequencies(config)[:, None, None] * positions.astype(jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the two halves of each head of `x` `[heads, hd, rows, length]` (the `rotate_half` convention)."""
    first, second = jnp.split(x, 2, axis=1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMS norm over the feature axis 0, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=0, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)[:, None, None]).astype(x.dtype)


@jax.custom_vjp
def project(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`[out, in]` times `[in, rows, length]` → `[out, rows, length]`."""
    return jnp.einsum("of,fbl->obl", weight, x)


def _project_forward(weight, x):
    return project(weight, x), (weight, x)


def _project_backward(operands, gradient):
    # The gradient of x is feature-first like x. JAX's own rule forms its transpose, whose copies cost XLA's CPU backend
    # as much as the matmul.
    weight, x = operands
    of_weight = jnp.einsum("obl,fbl->of", gradient, x)
    of_x = jax.lax.dot_general(weight, gradient, (((0,), (0,)), ((), ())))
    return of_weight.astype(weight.dtype), of_x.astype(x.dtype)


project.defvjp(_project_forward, _project_backward)


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention.

    Args:
      query: `[H, hd, rows, length]`; query head h uses key head h // (H / Hkv).
      keys, values: `[Hkv, hd, rows, slots]`.
      mask: bool `[rows, length, slots]`, True where a query may look.

    Returns:
      `[H, hd, rows, length]`; softmax in float32.
    """
    heads, head_dim, rows, length = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    # Batched matmuls [Hkv, rows] of (queries of a group) x hd x slots in that order: XLA's CPU backend then transposes
    # queries and results only, and nothing of a `LayerCache`.
    query = query.reshape(kv_heads, groups, head_dim, rows, length).transpose(0, 3, 1, 4, 2)
    query = query.reshape(kv_heads, rows, groups * length, head_dim)
    logits = jnp.matmul(query, keys.transpose(0, 2, 1, 3), preferred_element_type=jnp.float32) * head_dim**-0.5
    logits = jnp.where(mask[None, :, None], logits.reshape(kv_heads, rows, groups, length, -1), MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype).reshape(kv_heads, rows, groups * length, -1)
    out = jnp.matmul(weights, values.transpose(0, 2, 3, 1)).reshape(kv_heads, rows, groups, length, head_dim)
    return out.transpose(0, 2, 4, 1, 3).reshape(heads, head_dim, rows, length)


def block(layer, adapter, config: DecoderConfig, h, rotary, mask, cache=None, slot=None, rows=None):
    """One transformer block.

    Args:
      layer: this layer's parameters.
      adapter: this layer's stacked LoRA or None; see `lora.delta`.
      h: `[d, rows, length]`.
      rotary: `rope(...)` of the positions.
      mask: bool `[rows, length, slots]`; without a cache slots = length.
      cache: `LayerCache` or None.
      slot: first slot that this call writes.
      rows: `lora.Rows`, which adapter each row uses.

    Returns:
      `(h, cache)`: cache holds all keys and values that this call attended to (None without a cache).
    """
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    _, num_rows, length = h.shape
    x = rms_norm(h, layer["attn_norm"], config.norm_eps)
    qkv = project(layer["qkv"], x)
    q, k, v = jnp.split(qkv, [heads * head_dim, (heads + kv_heads) * head_dim], axis=0)
    q, k, v = (y + lora.delta(adapter, name, x, rows) for name, y in (("q", q), ("k", k), ("v", v)))
    q = rotate(q.reshape(heads, head_dim, num_rows, length), *rotary)
    k = rotate(k.reshape(kv_heads, head_dim, num_rows, length), *rotary)
    v = v.reshape(kv_heads, head_dim, num_rows, length)
    if cache is not None:
        k, v = k.transpose(0, 2, 1, 3).astype(cache.keys.dtype), v.transpose(0, 2, 3, 1).astype(cache.values.dtype)
        cache = LayerCache(
            jax.lax.dynamic_update_slice(cache.keys, k, (0, 0, 0, slot)),
            jax.lax.dynamic_update_slice(cache.values, v, (0, 0, slot, 0)),
        )
        k, v = cache.keys.transpose(0, 2, 1, 3), cache.values.transpose(0, 3, 1, 2)
    x = attend(q, k, v, mask).reshape(heads * head_dim, num_rows, length)
    h = h + project(layer["o"], x) + lora.delta(adapter, "o", x, rows)
    x = rms_norm(h, layer["mlp_norm"], config.norm_eps)
    gate, up = jnp.split(project(layer["gate_up"], x), 2, axis=0)
    gate, up = gate + lora.delta(adapter, "gate", x, rows), up + lora.delta(adapter, "up", x, rows)
    x = jax.nn.silu(gate) * up
    return h + project(layer["down"], x) + lora.delta(adapter, "down", x, rows), cache


def apply(
    params, adapters, config: DecoderConfig, tokens, positions, mask, caches=None, slot=0, rows=None, remat=False
):
    """Runs all layers.

    Args:
      params: see the module docstring.
      adapters: `lora.Adapters` or None.
      config: static.
      tokens: int `[rows, length]`.
      positions: int `[rows, length]`, position of each token in its own sequence (padding may hold anything ≥ 0).
      mask: bool `[rows, length, slots]`, which slots each query attends to.
      caches: tuple of `LayerCache` (see `init_caches`) or None for a pass without a cache.
      slot: first cache slot that this call writes.
      rows: `lora.Rows` or None.
      remat: recompute each layer in the backward pass instead of storing its activations.

    Returns:
      `(hidden, caches)`: hidden `[d, rows, length]` after the final norm.
    """
    h = params["embed"][tokens].transpose(2, 0, 1)
    rotary = rope(config, positions)
    step = jax.checkpoint(block, static_argnums=(2,)) if remat else block
    new_caches = []
    for index, layer in enumerate(params["layers"]):
        adapter = None if adapters is None else adapters[index]
        cache = None if caches is None else caches[index]
        h, cache = step(layer, adapter, config, h, rotary, mask, cache, slot, lora.per_layer(rows, index))
        new_caches.append(cache)
    return rms_norm(h, params["final_norm"], config.norm_eps), None if caches is None else tuple(new_caches)


def init_caches(config: DecoderConfig, num_rows: int, slots: int, dtype=jnp.float32) -> tuple[LayerCache, ...]:
    """Empty caches for `num_rows` sequences of at most `slots` tokens."""
    keys = jnp.zeros((config.num_kv_heads, num_rows, config.head_dim, slots), dtype)
    return (LayerCache(keys, keys.swapaxes(2, 3)),) * config.num_layers


def grow_caches(caches: tuple[LayerCache, ...], slots: int) -> tuple[LayerCache, ...]:
    """The caches with `slots` more, empty slots at the end."""
    nothing = (0, 0)
    return tuple(
        LayerCache(
            jnp.pad(cache.keys, (nothing, nothing, nothing, (0, slots))),
            jnp.pad(cache.values, (nothing, nothing, (0, slots), nothing)),
        )
        for cache in caches
    )


def unembedding(params) -> jax.Array:
    """The vocabulary projection `[V, d]` (the embedding itself when tied)."""
    return params.get("lm_head", params["embed"])


def logits(params, hidden: jax.Array, vocab_size: int) -> jax.Array:
    """Float32 logits `[V, columns]` of `hidden` `[d, columns]`; rows at and above `vocab_size` are masked out."""
    values = jnp.matmul(unembedding(params), hidden, preferred_element_type=jnp.float32)
    padding = jnp.arange(values.shape[0]) >= vocab_size
    return jnp.where(padding[:, None], MASKED, values) if vocab_size < values.shape[0] else values


def causal_mask(valid: jax.Array) -> jax.Array:
    """`[rows, length, length]`: each token attends to valid tokens up to itself; `valid` is bool `[rows, length]`."""
    length = valid.shape[1]
    return jnp.tril(jnp.ones((length, length), bool))[None] & valid[:, None, :]


def positions_of(valid: jax.Array) -> jax.Array:
    """Positions `[rows, length]` that count valid tokens only, so padding on either side changes nothing."""
    return jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)


def init(key: jax.Array, config: DecoderConfig, dtype=jnp.float32):
    """Random parameters: normal with sd 1/sqrt(in) (0.02 for the embedding), residual outputs scaled by 1/sqrt(2L)."""
    d, f, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    embed_key, head_key, *layer_keys = jax.random.split(key, config.num_layers + 2)

    def matrix(key, out, fan_in, scale=1.0):
        return (jax.random.normal(key, (out, fan_in)) * scale * fan_in**-0.5).astype(dtype)

    def layer(key):
        qkv, o, gate_up, down = jax.random.split(key, 4)
        residual = (2 * config.num_layers) ** -0.5
        return {
            "attn_norm": jnp.ones(d, dtype),
            "qkv": matrix(qkv, q + 2 * kv, d),
            "o": matrix(o, d, q, residual),
            "mlp_norm": jnp.ones(d, dtype),
            "gate_up": matrix(gate_up, 2 * f, d),
            "down": matrix(down, d, f, residual),
        }

    params = {
        "embed": (jax.random.normal(embed_key, (config.vocab_size, d)) * 0.02).astype(dtype),
        "layers": tuple(layer(key) for key in layer_keys),
        "final_norm": jnp.ones(d, dtype),
    }
    if not config.tie_embeddings:
        params["lm_head"] = matrix(head_key, config.vocab_size, d)
    return params

"""The decoder: one parametric pre-norm transformer with rotary attention, as pure functions of nested dicts.

Activations are **feature-first**, `[features, rows, length]`, and weights are `[out, in]` as checkpoints store them, so
every projection is `W @ h` with the weight on the left. XLA's CPU matmul is up to two times faster that way at the few
columns of a decoding step and equal at the many of a training step; GPU libraries do not mind. This is the one place
where the layout is chosen.

Parameters::

    {"embed": [V, d], "layers": ({"attn_norm": [d], "qkv": [(H + 2·Hkv)·hd, d], "o": [d, H·hd],
                                  "mlp_norm": [d], "gate_up": [2f, d], "down": [d, f]}, ...),
     "final_norm": [d], "lm_head": [V, d] (only when untied)}

with, where the configuration asks for them, "qkv_bias" `[(H + 2·Hkv)·hd]`, "q_norm" and "k_norm" `[hd]`, and
"post_attn_norm" and "post_mlp_norm" `[d]` in every layer; a parallel block has no "mlp_norm".

Layers are a tuple, so a decoding step is unrolled without slicing stacked weights; `remat` trades the activations of a
training step for one more forward pass of each layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stackalign.lm import attention, lora, sharding
from stackalign.lm.config import DecoderConfig, DividedRope

MASKED = attention.MASKED


class LayerCache(NamedTuple):
    """Keys `[Hkv, rows, hd, slots]` and values `[Hkv, rows, slots, hd]` of one layer: each as its matmul reads it, so
    that a decoding step writes one slot and copies nothing."""

    keys: jax.Array
    values: jax.Array


def _rope_constants(config: DecoderConfig, local: bool):
    """Base and scaling of a layer's rotary frequencies; those of layers with a window are unscaled if their own."""
    if local and config.local_rope_theta is not None:
        return config.local_rope_theta, None
    return config.rope_theta, config.rope_scaling


def rope_frequencies(config: DecoderConfig, *, local: bool = False) -> jax.Array:
    """Inverse frequencies `[rotary_dim / 2]` in radians a position, float32, scaled as the config says.

    Args:
      config: the model's.
      local: those of the layers with a window, where they have a base of their own.
    """
    half = config.rotary_size // 2
    theta, scaling = _rope_constants(config, local)
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequencies
    if isinstance(scaling, DividedRope):
        return frequencies / jnp.asarray(scaling.divisors, jnp.float32)
    wavelengths = 2 * jnp.pi / frequencies
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = jnp.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return jnp.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)


def rope(config: DecoderConfig, positions: jax.Array, *, local: bool = False) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[rotary_dim / 2, rows, length]`, float32, of integer `positions` `[rows, length]`."""
    angles = rope_frequencies(config, local=local)[:, None, None] * positions.astype(jnp.float32)
    _, scaling = _rope_constants(config, local)
    size = scaling.attention_factor if isinstance(scaling, DividedRope) else 1.0
    return jnp.cos(angles) * size, jnp.sin(angles) * size


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Rotates the first features of each head of `x` `[heads, hd, rows, length]`; the rest pass.

    Args:
      x: queries or keys.
      cos, sin: `[pairs, rows, length]`.
      interleaved: a pair is features 2i and 2i + 1; otherwise i and pairs + i (the `rotate_half` convention).
    """
    pairs = cos.shape[0]
    turned, passed = x[:, : 2 * pairs], x[:, 2 * pairs :]
    if interleaved:
        turned = turned.reshape(x.shape[0], pairs, 2, *x.shape[2:])
        first, second = turned[:, :, 0], turned[:, :, 1]
        out = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=2)
        out = out.reshape(x.shape[0], 2 * pairs, *x.shape[2:])
    else:
        first, second = jnp.split(turned, 2, axis=1)
        out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    out = out.astype(x.dtype)
    return jnp.concatenate([out, passed], axis=1) if passed.shape[1] else out


def normalise(config: DecoderConfig, x: jax.Array, scale: jax.Array, axis: int = 0) -> jax.Array:
    """The configuration's norm over the features of `x` at `axis`, in float32: RMS, or layer norm without bias."""
    wide = x.astype(jnp.float32)
    if config.norm == "layer":
        wide = wide - jnp.mean(wide, axis=axis, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axis, keepdims=True) + config.norm_eps)
    scale = (scale.astype(jnp.float32) + config.norm_offset)[:, None, None]
    return (wide * scale).astype(x.dtype)


def matmul(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`[out, in]` times `[in, columns]`, summed in float32 and rounded once to the dtype of `x`.

    Asking for float32 sums is also what lets XLA's CPU backend use the processor's bfloat16 units: 12 times faster than
    bfloat16 sums and 4 times faster than float32 weights where there are such units. It has them from two columns on.
    """
    single = x.shape[1] == 1 and x.dtype == jnp.bfloat16
    wide = jnp.pad(x, ((0, 0), (0, 1))) if single else x
    out = jnp.matmul(weight, wide, preferred_element_type=jnp.float32).astype(x.dtype)
    return out[:, :1] if single else out


def transposed_matmul(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`[out, in]` transposed, times `[out, columns]`, in float32: `[in, columns]`."""
    return jax.lax.dot_general(weight, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def project(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`[out, in]` times `[in, rows, length]` → `[out, rows, length]`; see `matmul`."""
    return matmul(weight, x.reshape(x.shape[0], -1)).reshape(-1, *x.shape[1:])


def _project_forward(weight, x):
    return project(weight, x), (weight, x)


def _project_backward(operands, gradient):
    # The gradient of x is feature-first like x. JAX's own rule forms its transpose, whose copies cost XLA's CPU backend
    # as much as the matmul.
    weight, x = operands
    of_weight = jnp.einsum("obl,fbl->of", gradient, x, preferred_element_type=jnp.float32)
    of_x = transposed_matmul(weight, gradient.reshape(gradient.shape[0], -1)).reshape(x.shape)
    return of_weight.astype(weight.dtype), of_x.astype(x.dtype)


project.defvjp(_project_forward, _project_backward)


def split_rows(fused: jax.Array, sizes: list[int], parts: int) -> list[jax.Array]:
    """Outputs of fused projections, `[sum(sizes), rows, length]`, one by one.

    With `parts` > 1 the rows are in parts that hold a share of each (`sharding.interleave`), as the devices of "tensor"
    do: then nothing moves between devices.
    """
    fused = fused.reshape(parts, -1, *fused.shape[1:])
    ends = [sum(sizes[: n + 1]) // parts for n in range(len(sizes) - 1)]
    return [piece.reshape(-1, *fused.shape[2:]) for piece in jnp.split(fused, ends, axis=1)]


def write(cache: jax.Array, new: jax.Array, start) -> jax.Array:
    """`dynamic_update_slice` in place: of bfloat16, XLA's CPU backend would convert the whole cache to and fro."""
    if cache.dtype != jnp.bfloat16:
        return jax.lax.dynamic_update_slice(cache, new, start)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (cache, new))
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(*bits, start), cache.dtype)


def block(layer, adapter, config: DecoderConfig, mesh, h, rotary, mask, cache=None, slot=None, rows=None):
    """One transformer block.

    Args:
      layer: this layer's parameters.
      adapter: this layer's stacked LoRA or None; see `lora.delta`.
      mesh: see `apply`.
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
    parts = sharding.parts(config, mesh)
    gathered = sharding.gathers(mesh, config.hidden_size, num_rows * length)
    layer = sharding.gather(layer, mesh, gathered)
    x = normalised = normalise(config, h, layer["attn_norm"])
    qkv = project(layer["qkv"], x)
    if config.qkv_bias:
        qkv = qkv + layer["qkv_bias"][:, None, None]
    qkv = sharding.constrain(qkv, mesh, True, "tensor")  # each device attends for its own rows and heads
    q, k, v = split_rows(qkv, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], parts)
    q, k, v = (y + lora.delta(adapter, name, x, rows) for name, y in (("q", q), ("k", k), ("v", v)))
    q, k = q.reshape(heads, head_dim, num_rows, length), k.reshape(kv_heads, head_dim, num_rows, length)
    if config.qk_norm:
        q, k = normalise(config, q, layer["q_norm"], axis=1), normalise(config, k, layer["k_norm"], axis=1)
    q, k = (rotate(x, *rotary, interleaved=config.rope_interleaved) for x in (q, k))
    v = v.reshape(kv_heads, head_dim, num_rows, length)
    if cache is not None:
        k, v = k.transpose(0, 2, 1, 3).astype(cache.keys.dtype), v.transpose(0, 2, 3, 1).astype(cache.values.dtype)
        cache = LayerCache(write(cache.keys, k, (0, 0, 0, slot)), write(cache.values, v, (0, 0, slot, 0)))
        k, v = cache.keys.transpose(0, 2, 1, 3), cache.values.transpose(0, 3, 1, 2)
    x = attention.attend(q, k, v, mask, config.attention_scale or head_dim**-0.5)
    x = sharding.constrain(x.reshape(heads * head_dim, num_rows, length), mesh, gathered, "tensor")
    x = project(layer["o"], x) + lora.delta(adapter, "o", x, rows)
    h = h + (normalise(config, x, layer["post_attn_norm"]) if config.post_norms else x)
    h = sharding.constrain(h, mesh, gathered)
    x = normalised if config.parallel else normalise(config, h, layer["mlp_norm"])
    gate, up = split_rows(project(layer["gate_up"], x), [config.intermediate_size] * 2, parts)
    gate, up = gate + lora.delta(adapter, "gate", x, rows), up + lora.delta(adapter, "up", x, rows)
    x = (jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up
    x = project(layer["down"], x) + lora.delta(adapter, "down", x, rows)
    h = h + (normalise(config, x, layer["post_mlp_norm"]) if config.post_norms else x)
    return sharding.constrain(h, mesh, gathered), cache


def apply(
    params,
    adapters,
    config: DecoderConfig,
    tokens,
    positions,
    mask,
    caches=None,
    slot=0,
    rows=None,
    remat=False,
    slot_positions=None,
    mesh=None,
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
      slot_positions: int `[rows, slots]`, position of each slot's token in its sequence; `positions` by default. Only
        layers with a window look at it.
      mesh: the mesh that parameters (`sharding.place`) and rows lie on, if any; static.

    Returns:
      `(hidden, caches)`: hidden `[d, rows, length]` after the final norm, times the configuration's `logit_scale`.
    """
    # Where the embedding is trained it is wider than the layers: its gradient is a sum over all tokens.
    h = params["embed"][tokens].astype(params["final_norm"].dtype)
    # First as the parts of the embedding give it, then as the layers want it.
    h = sharding.constrain(h.transpose(2, 0, 1), mesh, False)
    h = sharding.constrain(h, mesh, sharding.gathers(mesh, config.hidden_size, tokens.size))
    if config.embed_scale != 1.0:
        # As the embedding's dtype holds it, which is how such models were trained.
        h = h * jnp.asarray(config.embed_scale, h.dtype)
    distance = None
    if any(config.windows):
        distance = positions[:, :, None] - (positions if slot_positions is None else slot_positions)[:, None, :]
    rotaries = {local: rope(config, positions, local=local) for local in {bool(w) for w in config.layer_windows}}
    masks = {window: mask if window is None else mask & (distance < window) for window in set(config.layer_windows)}
    step = jax.checkpoint(block, static_argnums=(2, 3)) if remat else block
    new_caches = []
    for index, layer in enumerate(params["layers"]):
        adapter = None if adapters is None else adapters[index]
        cache = None if caches is None else caches[index]
        window = config.layer_windows[index]
        layer_rows = lora.per_layer(rows, index)
        rotary, seen = rotaries[bool(window)], masks[window]
        h, cache = step(layer, adapter, config, mesh, h, rotary, seen, cache, slot, layer_rows)
        new_caches.append(cache)
    h = normalise(config, h, params["final_norm"])
    if config.logit_scale != 1.0:
        h = h * config.logit_scale
    return h, None if caches is None else tuple(new_caches)


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


def take_rows(caches: tuple[LayerCache, ...], index: jax.Array) -> tuple[LayerCache, ...]:
    """The caches of some rows, int `[n]`, with repetitions."""
    return jax.tree.map(lambda leaf: leaf[:, index], caches)


def unembedding(params) -> jax.Array:
    """The vocabulary projection `[V, d]` (the embedding itself when tied)."""
    return params.get("lm_head", params["embed"])


def logits(params, hidden: jax.Array, vocab_size: int, mesh=None) -> jax.Array:
    """Float32 logits `[V, columns]` of `hidden` `[d, columns]`; rows at and above `vocab_size` are masked out.

    On a mesh the columns are as few as those of a decoding step: the projection stays in its parts.
    """
    hidden = sharding.constrain(hidden, mesh, False)
    values = jnp.matmul(unembedding(params), hidden, preferred_element_type=jnp.float32)
    values = sharding.constrain(sharding.constrain(values, mesh, True, "tensor"), mesh, True)
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

    def norm(size):
        return jnp.full(size, 1.0 - config.norm_offset, dtype)

    def layer(key):
        qkv, o, gate_up, down = jax.random.split(key, 4)
        residual = (2 * config.num_layers) ** -0.5
        return {
            "attn_norm": norm(d),
            "qkv": matrix(qkv, q + 2 * kv, d),
            "o": matrix(o, d, q, residual),
            "gate_up": matrix(gate_up, 2 * f, d),
            "down": matrix(down, d, f, residual),
            **({"qkv_bias": jnp.zeros(q + 2 * kv, dtype)} if config.qkv_bias else {}),
            **({"q_norm": norm(hd), "k_norm": norm(hd)} if config.qk_norm else {}),
            **({"post_attn_norm": norm(d), "post_mlp_norm": norm(d)} if config.post_norms else {}),
            **({} if config.parallel else {"mlp_norm": norm(d)}),
        }

    params = {
        "embed": (jax.random.normal(embed_key, (config.vocab_size, d)) * 0.02).astype(dtype),
        "layers": tuple(layer(key) for key in layer_keys),
        "final_norm": norm(d),
    }
    if not config.tie_embeddings:
        params["lm_head"] = matrix(head_key, config.vocab_size, d)
    return params

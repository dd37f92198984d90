"""Attention over feature-first arrays: cuDNN's fused kernel on GPUs, batched matmuls everywhere else."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np

MASKED = -1e30  # finite, so a fully masked (padding) query gives a uniform row and never 0/0
PROBE = 130  # queries and slots of the attention that is tried before the fused kernel is relied on
TILE = 128  # cuDNN 9's backward kernel has been seen to give NaN at lengths that are no multiple of it


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """Grouped-query attention: through `fused` on GPUs for more than one query a row, else by `matmuls`.

    Args:
      query: `[H, hd, rows, length]`; query head h uses key head h // (H / Hkv).
      keys, values: `[Hkv, hd, rows, slots]`.
      mask: bool `[rows, length, slots]`, True where a query may look.
      scale: factor of the logits, usually `hd ** -0.5`.

    Returns:
      `[H, hd, rows, length]`; softmax in float32.
    """
    heads, head_dim, _, length = query.shape
    if jax.default_backend() == "gpu" and length > 1 and has_cudnn(query.dtype.name, heads, keys.shape[0], head_dim):
        return fused(query, keys, values, mask, scale, "cudnn")
    return matmuls(query, keys, values, mask, scale)


def matmuls(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """`attend`, written out."""
    heads, head_dim, rows, length = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    # Batched matmuls [Hkv, rows] of (queries of a group) x hd x slots in that order: XLA's CPU backend then transposes
    # queries and results only, and nothing of a `LayerCache`.
    query = query.reshape(kv_heads, groups, head_dim, rows, length).transpose(0, 3, 1, 4, 2)
    query = query.reshape(kv_heads, rows, groups * length, head_dim)
    logits = jnp.matmul(query, keys.transpose(0, 2, 1, 3), preferred_element_type=jnp.float32) * scale
    logits = jnp.where(mask[None, :, None], logits.reshape(kv_heads, rows, groups, length, -1), MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype).reshape(kv_heads, rows, groups * length, -1)
    out = jnp.matmul(weights, values.transpose(0, 2, 3, 1), preferred_element_type=jnp.float32)
    out = out.astype(query.dtype).reshape(kv_heads, rows, groups, length, head_dim)
    return out.transpose(0, 2, 4, 1, 3).reshape(heads, head_dim, rows, length)


def fused(query, keys, values, mask, scale: float, implementation: str | None = None) -> jax.Array:
    """`attend` by `jax.nn.dot_product_attention`, whose `implementation` is "cudnn", "xla" or None (JAX's choice).

    A query that sees nothing (padding) attends to every slot: the fused kernel would give NaN for it.
    """
    length, slots = query.shape[3], keys.shape[3]
    more = (-length % TILE, -slots % TILE) if implementation == "cudnn" else (0, 0)
    query, keys, values = (
        jnp.pad(x.transpose(2, 3, 0, 1), ((0, 0), (0, extra), (0, 0), (0, 0)))  # [rows, length, heads, hd]
        for x, extra in ((query, more[0]), (keys, more[1]), (values, more[1]))
    )
    mask = jnp.pad(mask, ((0, 0), (0, more[0]), (0, more[1])))
    mask = mask | ~mask.any(axis=-1, keepdims=True)
    out = jax.nn.dot_product_attention(
        query, keys, values, mask=mask[:, None], scale=scale, implementation=implementation
    )
    return out[:, :length].transpose(2, 3, 0, 1)


@functools.cache
def has_cudnn(dtype: str, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether cuDNN's kernel computes attention of this shape here: tried once, and a warning is logged where it fails.

    It needs half precision, and head sizes and a GPU that its version supports. Both passes are tried: each has its own
    rules, which show when it is traced, compiled or run.
    """
    if dtype not in ("bfloat16", "float16"):
        return False
    with jax.ensure_compile_time_eval():
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = [(count, head_dim, 1, PROBE) for count in (heads, kv_heads, kv_heads)]
        args = [jax.random.normal(key, shape, jnp.dtype(dtype)) for key, shape in zip(keys, shapes, strict=True)]
        mask = jnp.tril(jnp.ones((PROBE, PROBE), bool))[None]

        def both(attention, *rest):
            def summed(args):
                out = attention(*args, mask, head_dim**-0.5, *rest)
                return jnp.sum(out.astype(jnp.float32) ** 2), out

            gradient, out = jax.jit(jax.grad(summed, has_aux=True))(args)
            return [np.asarray(leaf, np.float32) for leaf in (out, *gradient)]

        try:
            pairs = zip(both(fused, "cudnn"), both(matmuls), strict=True)
            # NumPy's maximum keeps NaN; XLA's CPU backend drops it from long arrays.
            error = float(np.max([np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in pairs]))
            if error < 0.05:
                return True
            reason = f"it differs from plain matmuls by {error:.2g} of the largest number"
        except Exception as caught:  # what cuDNN, XLA or JAX lack has no common type
            reason = str(caught).splitlines()[0] if str(caught) else type(caught).__name__
    logging.getLogger(__name__).warning(
        "cuDNN attention can't be used for %d query and %d key heads of %d %s features: %s. Attention runs as matmuls, "
        "which are slower and take memory that grows with the square of the length.",
        heads, kv_heads, head_dim, dtype, reason,
    )  # fmt: skip
    return False

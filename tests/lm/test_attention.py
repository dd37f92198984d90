"""Attention by matmuls and through JAX's fused kernels, and matmuls in half precision."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.lm import attention, decoder


@pytest.mark.parametrize(("heads", "kv_heads", "length", "slots"), [(6, 2, 3, 5), (4, 4, 7, 7), (3, 1, 1, 6)])
def test_both_paths_agree(heads, kv_heads, length, slots):
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((heads, 8, 2, length)), jnp.float32)
    keys, values = jnp.asarray(rng.standard_normal((2, kv_heads, 8, 2, slots)), jnp.float32)
    mask = rng.random((2, length, slots)) < 0.5
    mask[..., 0] = True
    mask[1, 0] = False  # padding: sees nothing, and what comes of it nobody reads
    plain = attention.matmuls(query, keys, values, mask, 0.4)
    other = attention.fused(query, keys, values, jnp.asarray(mask), 0.4, "xla")
    assert np.isfinite(plain).all() and np.isfinite(other).all()
    np.testing.assert_allclose(other[:, :, 0], plain[:, :, 0], atol=2e-6)
    np.testing.assert_allclose(other[:, :, 1, 1:], plain[:, :, 1, 1:], atol=2e-6)


def test_without_cudnn_a_warning_says_why(caplog):
    attention.has_cudnn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not attention.has_cudnn("bfloat16", 6, 2, 64)
        assert not attention.has_cudnn("bfloat16", 6, 2, 64)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cuDNN attention can't be used for 6 query and 2 key heads of 64 bfloat16 features: " in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda x: x, None), (lambda x: 1.2 * x, "differs from plain matmuls by 0."), (lambda x: x * jnp.nan, "by nan")],
)
def test_the_fused_kernel_is_used_where_it_agrees(monkeypatch, caplog, change, reason):
    kernel = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **kwargs):
        assert implementation == "cudnn" and args[0].shape[1] % attention.TILE == args[1].shape[1] % attention.TILE == 0
        return change(kernel(*args, **kwargs))

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    attention.has_cudnn.cache_clear()
    assert attention.has_cudnn("bfloat16", 6, 2, 64) == (reason is None)
    assert reason is None or reason in caplog.text
    attention.has_cudnn.cache_clear()


def test_padding_for_the_kernel_changes_nothing(monkeypatch):
    kernel = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, implementation, **kw: kernel(*args, **kw))
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((4, 8, 2, 5)), jnp.float32)
    keys, values = jnp.asarray(rng.standard_normal((2, 2, 8, 2, 9)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 5, 9)) < 0.5).at[..., 0].set(True)
    found = attention.fused(query, keys, values, mask, 0.4, "cudnn")
    np.testing.assert_allclose(found, attention.matmuls(query, keys, values, mask, 0.4), atol=2e-6)


def test_single_precision_does_not_ask_for_cudnn(caplog):
    assert not attention.has_cudnn("float32", 6, 2, 64)
    assert not caplog.records


def test_a_probe_may_run_inside_a_trace():
    attention.has_cudnn.cache_clear()
    found = jax.jit(lambda x: x + attention.has_cudnn("bfloat16", 4, 4, 32))(jnp.zeros(1))
    assert found[0] == 0


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_half_precision_products_are_summed_in_float32(columns):
    # 1 + 2^-12 · 4095 summed in bfloat16 would stay at 1 (or come to some other power of two times it).
    weight = jnp.full((3, 4096), 2.0**-12, jnp.bfloat16).at[:, 0].set(1.0)
    x = jnp.ones((4096, columns), jnp.bfloat16)
    found = decoder.project(weight, x[:, :, None])
    assert found.shape == (3, columns, 1) and found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), jnp.float32(1 + 4095 / 4096).astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_a_projection(dtype):
    rng = np.random.default_rng(0)
    weight, x, g = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((6, 5), (5, 2, 3), (6, 2, 3)))
    of_weight, of_x = jax.jit(lambda w, x: jax.vjp(decoder.project, w, x)[1](g))(weight, x)
    wide = [np.asarray(leaf, np.float64) for leaf in (weight, x, g)]
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2**-8, "atol": 1e-2}
    assert of_weight.dtype == of_x.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(of_weight, np.float64), np.einsum("obl,fbl->of", wide[2], wide[1]), **tolerance
    )
    np.testing.assert_allclose(np.asarray(of_x, np.float64), np.einsum("of,obl->fbl", wide[0], wide[2]), **tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_caches_are_written_bit_by_bit(dtype):
    rng = np.random.default_rng(0)
    cache, new = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((2, 3, 4, 7), (2, 3, 4, 2)))
    expected = np.array(cache)
    expected[..., 4:6] = new
    np.testing.assert_array_equal(jax.jit(decoder.write)(cache, new, (0, 0, 0, 4)), expected)

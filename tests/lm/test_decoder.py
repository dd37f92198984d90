"""The decoder: rotary positions, masks, padding, the cache, dtypes, and gradients."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackalign.lm import attention, decoder, weights
from stackalign.lm.config import DecoderConfig, RopeScaling

CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=10,
    norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, tie_embeddings=False, max_positions=64,
)  # fmt: skip
APPLY = jax.jit(decoder.apply, static_argnames=("config", "remat"))


@pytest.fixture(scope="module")
def params():
    """Random parameters with uneven norms, so that a forgotten scale shows."""
    made = decoder.init(jax.random.key(0), CONFIG)
    key = jax.random.key(1)
    for index, layer in enumerate(made["layers"]):
        for name in ("attn_norm", "mlp_norm"):
            layer[name] = 1 + 0.3 * jax.random.normal(jax.random.fold_in(key, 2 * index + len(name)), (24,))
    made["embed"] = 20 * made["embed"]
    return made


def draw(seed, rows, length):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (rows, length)).astype(np.int32)


def forward(params, tokens, valid=None, positions=None, **rest):
    valid = np.ones(tokens.shape, bool) if valid is None else valid
    positions = decoder.positions_of(valid) if positions is None else positions
    return APPLY(params, None, CONFIG, tokens, positions, decoder.causal_mask(valid), **rest)[0]


def pad_columns(tokens, left, right, fill=0):
    padded = np.pad(tokens, ((0, 0), (left, right)), constant_values=fill)
    valid = np.pad(np.ones(tokens.shape, bool), ((0, 0), (left, right)))
    return padded, valid


# --- rotary positions ---


def test_rope_frequencies_by_formula():
    expected = [1e4 ** (-2 * i / 10) for i in range(5)]
    np.testing.assert_allclose(decoder.rope_frequencies(CONFIG), expected, rtol=1e-6)


def test_llama3_frequencies_by_formula():
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)
    expected, kinds = [], set()
    for i in range(5):
        frequency = 1e4 ** (-2 * i / 10)
        wavelength = 2 * math.pi / frequency
        if wavelength < 32 / 4.0:
            kinds.add("kept")
        elif wavelength > 32 / 1.0:
            kinds.add("stretched")
            frequency /= 8
        else:
            kinds.add("blended")
            smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        expected.append(frequency)
    assert kinds == {"kept", "stretched"}
    blended = dataclasses.replace(CONFIG, rope_theta=100.0, rope_scaling=scaling)
    found = decoder.rope_frequencies(dataclasses.replace(CONFIG, rope_scaling=scaling))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # With theta = 100 the second wavelength, 2 pi 100^(1/5) = 15.8, lies between 8 and 32.
    frequency = 100.0 ** (-1 / 5)
    smooth = (32 * frequency / (2 * math.pi) - 1) / 3
    expected = frequency * ((1 - smooth) / 8 + smooth)
    np.testing.assert_allclose(decoder.rope_frequencies(blended)[1], expected, rtol=1e-6)


def test_rotate_turns_pairs_of_the_two_halves():
    x = jax.random.normal(jax.random.key(0), (3, 10, 2, 4))
    positions = jnp.array([[0, 1, 2, 3], [0, 5, 9, 60]])
    turned = np.asarray(decoder.rotate(x, *decoder.rope(CONFIG, positions)))
    frequencies = 1e4 ** (-np.arange(5) / 5)
    for row, column in [(0, 0), (0, 3), (1, 3)]:
        angle = frequencies * int(positions[row, column])
        first, second = np.asarray(x)[:, :5, row, column], np.asarray(x)[:, 5:, row, column]
        complex_turn = (first + 1j * second) * np.exp(1j * angle)
        np.testing.assert_allclose(turned[:, :5, row, column], complex_turn.real, atol=1e-5)
        np.testing.assert_allclose(turned[:, 5:, row, column], complex_turn.imag, atol=1e-5)


@settings(deadline=None, max_examples=8)
@given(offset=st.integers(1, 500), seed=st.integers(0, 100))
def test_only_relative_positions_matter(params, offset, seed):
    tokens = draw(seed, 2, 7)
    positions = np.tile(np.arange(7), (2, 1))
    expected = forward(params, tokens, positions=positions)
    np.testing.assert_allclose(forward(params, tokens, positions=positions + offset), expected, atol=1e-3)


def test_order_of_tokens_matters(params):
    tokens = np.array([[3, 4, 5], [4, 3, 5]], np.int32)
    hidden = forward(params, tokens)
    assert jnp.abs(hidden[:, 0, 2] - hidden[:, 1, 2]).max() > 1e-2


# --- masks ---


def test_positions_and_mask_by_example():
    valid = np.array([[0, 0, 1, 1, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(decoder.positions_of(valid), [[0, 0, 0, 1, 2], [0, 1, 1, 2, 2], [0, 0, 0, 0, 0]])
    mask = decoder.causal_mask(valid)
    np.testing.assert_array_equal(mask[0, 3], [0, 0, 1, 1, 0])
    np.testing.assert_array_equal(mask[1, 4], [1, 1, 0, 1, 0])
    assert not mask[2].any()


def test_attend_by_loops():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((6, 4, 2, 3)).astype(np.float32)
    keys, values = rng.standard_normal((2, 2, 4, 2, 5)).astype(np.float32)
    mask = rng.random((2, 3, 5)) < 0.6
    mask[..., 0] = True
    found = np.asarray(attention.attend(query, keys, values, mask, 0.5))
    for head, row, position in np.ndindex(6, 2, 3):
        logits = keys[head // 3, :, row].T @ query[head, :, row, position] / 2.0
        chosen = np.where(mask[row, position], np.exp(logits), 0)
        expected = values[head // 3, :, row] @ (chosen / chosen.sum())
        np.testing.assert_allclose(found[head, :, row, position], expected, rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=8)
@given(cut=st.integers(1, 6), seed=st.integers(0, 1000))
def test_causal(params, cut, seed):
    tokens = draw(seed, 2, 7)
    changed = tokens.copy()
    changed[:, cut:] = draw(seed + 1, 2, 7 - cut)
    np.testing.assert_array_equal(forward(params, tokens)[:, :, :cut], forward(params, changed)[:, :, :cut])


@settings(deadline=None, max_examples=8)
@given(left=st.integers(0, 4), fill=st.integers(0, 39), seed=st.integers(0, 1000))
def test_padding_on_either_side_changes_nothing(params, left, fill, seed):
    tokens = draw(seed, 2, 7)
    padded, valid = pad_columns(tokens, left, 4 - left, fill)
    hidden = forward(params, padded, valid)[:, :, left : left + 7]
    np.testing.assert_allclose(hidden, forward(params, tokens), atol=1e-5)


def test_ids_in_padding_do_not_matter_at_all(params):
    tokens = draw(0, 2, 7)
    first, valid = pad_columns(tokens, 2, 2, 0)
    second, _ = pad_columns(tokens, 2, 2, 39)
    np.testing.assert_array_equal(
        forward(params, first, valid)[:, :, 2:-2], forward(params, second, valid)[:, :, 2:-2]
    )


def test_rows_are_independent(params):
    tokens, order = draw(0, 4, 7), [2, 0, 3, 1]
    np.testing.assert_allclose(forward(params, tokens[order]), forward(params, tokens)[:, order], atol=1e-5)


# --- cache ---


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3], [9]])
def test_cached_pieces_equal_one_pass(params, pieces):
    tokens, valid = pad_columns(draw(3, 2, 9), 0, 0)
    valid[1, :3] = False  # the second row is padded on the left
    expected = forward(params, tokens, valid)
    caches = decoder.init_caches(CONFIG, 2, 12)
    whole = np.pad(decoder.causal_mask(valid), ((0, 0), (0, 0), (0, 3)))
    positions = np.asarray(decoder.positions_of(valid))
    outs, start = [], 0
    for piece in pieces:
        part = slice(start, start + piece)
        out, caches = APPLY(
            params, None, CONFIG, tokens[:, part], positions[:, part], whole[:, part], caches, start
        )
        outs.append(out)
        start += piece
    found = np.concatenate(outs, axis=2)
    np.testing.assert_allclose(found[:, 0], expected[:, 0], atol=1e-5)
    np.testing.assert_allclose(found[:, 1, 3:], expected[:, 1, 3:], atol=1e-5)
    assert (np.asarray(caches[0].keys)[..., 9:] == 0).all()


def test_cache_keeps_its_dtype(params):
    caches = decoder.init_caches(CONFIG, 1, 4, jnp.bfloat16)
    assert caches[1].values.shape == (2, 1, 4, 10)
    mask = np.pad(decoder.causal_mask(np.ones((1, 2), bool)), ((0, 0), (0, 0), (0, 2)))
    _, caches = APPLY(params, None, CONFIG, draw(0, 1, 2), jnp.array([[0, 1]]), mask, caches, 0)
    assert caches[0].keys.dtype == jnp.bfloat16


def test_grown_caches_go_on_where_they_were(params):
    tokens = draw(4, 2, 6)
    valid = np.ones((2, 6), bool)
    expected, positions = forward(params, tokens), np.asarray(decoder.positions_of(valid))
    mask = np.asarray(decoder.causal_mask(valid))
    caches = decoder.init_caches(CONFIG, 2, 4)
    _, caches = APPLY(params, None, CONFIG, tokens[:, :4], positions[:, :4], mask[:, :4, :4], caches, 0)
    caches = decoder.grow_caches(caches, 2)
    found, _ = APPLY(params, None, CONFIG, tokens[:, 4:], positions[:, 4:], mask[:, 4:], caches, 4)
    np.testing.assert_allclose(found, expected[:, :, 4:], atol=1e-5)


# --- vocabulary, dtypes, parameters ---


def test_logits_mask_rows_above_the_vocabulary(params):
    hidden = jax.random.normal(jax.random.key(0), (24, 3))
    full = decoder.logits(params, hidden, 40)
    np.testing.assert_allclose(full, params["lm_head"] @ hidden, rtol=1e-5, atol=1e-5)
    cut = decoder.logits(params, hidden, 33)
    np.testing.assert_array_equal(cut[:33], full[:33])
    assert (np.asarray(jax.nn.softmax(cut, axis=0))[33:] == 0).all()


def test_tied_parameters_project_with_the_embedding():
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = decoder.init(jax.random.key(0), config)
    assert "lm_head" not in params and decoder.unembedding(params) is params["embed"]


@pytest.mark.parametrize("tied", [True, False])
def test_init_has_the_parameters_of_the_configuration(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = decoder.init(jax.random.key(0), config, jnp.bfloat16)
    leaves = jax.tree.leaves(params)
    assert sum(leaf.size for leaf in leaves) == weights.num_parameters(config)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)


def test_bfloat16_stays_near_float32(params):
    tokens = draw(0, 2, 7)
    hidden = forward(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tokens)
    exact = forward(params, tokens)
    assert hidden.dtype == jnp.bfloat16
    assert jnp.abs(hidden.astype(jnp.float32) - exact).max() < 0.1 * jnp.abs(exact).max()


def test_norm_is_computed_in_float32():
    x = jnp.full((24, 1, 1), 200.0, jnp.float16)  # the squares overflow float16
    np.testing.assert_allclose(decoder.normalise(CONFIG, x, jnp.ones(24)), np.ones((24, 1, 1)), rtol=1e-3)


def test_remat_changes_neither_values_nor_gradients(params):
    tokens, valid = draw(0, 2, 7), np.ones((2, 7), bool)

    def loss(params, remat):
        return jnp.sin(forward(params, tokens, valid, remat=remat)).sum()

    plain, remat = (jax.value_and_grad(loss)(params, flag) for flag in (False, True))
    np.testing.assert_allclose(plain[0], remat[0], rtol=1e-6)
    for one, two in zip(jax.tree.leaves(plain[1]), jax.tree.leaves(remat[1]), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


def test_padding_rows_are_finite_forward_and_backward(params):
    tokens = np.zeros((3, 5), np.int32)
    valid = np.array([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]], bool)
    with jax.debug_nans(True):
        loss, grads = jax.value_and_grad(lambda p: jnp.square(forward(p, tokens, valid)).mean())(params)
    assert np.isfinite(loss) and all(np.isfinite(x).all() for x in jax.tree.leaves(grads))

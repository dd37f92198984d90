"""Per-token log-probabilities: chunks, gradients, precision, temperature, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackalign.lm import decoder, lora, score
from stackalign.lm.config import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=48, hidden_size=20, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=6,
    norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, tie_embeddings=True, max_positions=64,
)  # fmt: skip
VOCAB = 41  # the embedding has seven rows more
TOKENS = jax.jit(score.token_log_probs, static_argnames=("vocab_size", "train_head"))
SCORE = jax.jit(score.completion_log_probs, static_argnames=("config", "vocab_size", "remat", "train_head"))


@pytest.fixture(scope="module")
def params():
    made = decoder.init(jax.random.key(0), CONFIG)
    return made | {"embed": made["embed"] * 25}


def plain(head, hidden, targets, temperature, vocab_size):
    """The definition, on the whole matrix at once."""
    logits = (head[:vocab_size].astype(jnp.float32) @ hidden.astype(jnp.float32)) / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=0), targets[None], axis=0)[0]


def problem(seed, columns, vocab=48, features=20, size=1.0):
    head_key, hidden_key, target_key = jax.random.split(jax.random.key(seed), 3)
    return (
        jax.random.normal(head_key, (vocab, features)) * size,
        jax.random.normal(hidden_key, (features, columns)),
        jax.random.randint(target_key, (columns,), 0, min(vocab, VOCAB)),
    )


# --- token_log_probs ---


@pytest.mark.parametrize("columns", [1, score.CHUNK - 1, score.CHUNK, score.CHUNK + 1, 2 * score.CHUNK + 17])
@pytest.mark.parametrize("train_head", [False, True])
def test_chunks_equal_the_whole(columns, train_head):
    head, hidden, targets = problem(columns, columns)
    found = TOKENS(head, hidden, targets, temperature=0.7, vocab_size=VOCAB, train_head=train_head)
    assert found.shape == (columns,) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, plain(head, hidden, targets, 0.7, VOCAB), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [5, 2 * score.CHUNK + 17])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_equal_autodiff_of_the_definition(columns, temperature):
    head, hidden, targets = problem(columns, columns)
    weight = jax.random.normal(jax.random.key(9), (columns,))

    def total(function, **rest):
        def value(head, hidden):
            return jnp.vdot(weight, function(head, hidden, targets, temperature=temperature, vocab_size=VOCAB, **rest))

        return jax.jit(jax.grad(value, argnums=(0, 1)))(head, hidden)

    expected_head, expected_hidden = total(plain)
    frozen_head, frozen_hidden = total(score.token_log_probs)
    trained_head, trained_hidden = total(score.token_log_probs, train_head=True)
    np.testing.assert_allclose(frozen_hidden, expected_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trained_hidden, expected_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trained_head[:VOCAB], expected_head[:VOCAB], rtol=1e-4, atol=1e-4)
    assert (np.asarray(trained_head)[VOCAB:] == 0).all()
    assert (np.asarray(frozen_head) == 0).all()


def test_temperature_numbers():
    head, hidden = jnp.array([[2.0], [1.0], [0.0]]), jnp.ones((1, 3))
    found = TOKENS(head, hidden, jnp.arange(3), temperature=0.6, vocab_size=3)
    np.testing.assert_allclose(found, [-0.202573, -1.869240, -3.535906], atol=1e-6)


def test_rows_above_the_vocabulary_have_no_probability():
    head = jnp.zeros((16, 1)).at[12].set(50.0).at[:10, 0].set(jnp.linspace(-1, 1, 10))
    found = TOKENS(head, jnp.ones((1, 10)), jnp.arange(10), vocab_size=10)
    np.testing.assert_allclose(jnp.exp(found).sum(), 1.0, atol=1e-6)
    above = TOKENS(head, jnp.ones((1, 6)), jnp.arange(10, 16), vocab_size=10)
    assert (np.asarray(jnp.exp(above)) == 0).all()


@pytest.mark.parametrize("train_head", [False, True])
def test_nan_above_the_vocabulary_is_never_read(train_head):
    head, hidden, targets = problem(0, 9)
    padded = head.at[VOCAB:].set(jnp.nan)

    def value(head, hidden):
        return TOKENS(head, hidden, targets, vocab_size=VOCAB, train_head=train_head).sum()

    expected = jax.value_and_grad(value, argnums=1)(head, hidden)
    found = jax.value_and_grad(value, argnums=1)(padded, hidden)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 1000), size=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    temperature=st.sampled_from([0.05, 0.6, 1.0, 3.0]), dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def test_never_above_zero(seed, size, temperature, dtype):
    head, hidden, _ = problem(seed, 9, size=size)
    hidden = hidden.astype(dtype)
    targets = jnp.argmax(head.astype(dtype) @ hidden, axis=0)  # the largest, where rounding would show
    found = TOKENS(head.astype(dtype), hidden, targets, temperature=temperature, vocab_size=48)
    assert (np.asarray(found) <= 0).all() and np.isfinite(found).all()


def test_bfloat16_inputs_are_scored_in_float32():
    head, hidden, _ = problem(1, 8, vocab=32000, features=32, size=0.5)
    head, hidden = head.astype(jnp.bfloat16), hidden.astype(jnp.bfloat16)
    targets = jnp.argmax(head.astype(jnp.float32) @ hidden.astype(jnp.float32), axis=0).at[4:].set(jnp.arange(4))
    logits = np.asarray(head, np.float64) @ np.asarray(hidden, np.float64)
    shifted = logits - logits.max(axis=0)
    exact = (shifted - np.log(np.exp(shifted).sum(axis=0)))[np.asarray(targets), np.arange(8)]
    found = TOKENS(head, hidden, targets, vocab_size=32000)
    assert np.abs(found - exact).max() < 1e-4 and (np.asarray(found) <= 0).all()
    # The softmax in bfloat16 that this avoids is off by far more.
    logits16 = jnp.asarray(logits, jnp.bfloat16)
    rounded = jax.nn.log_softmax(logits16, axis=0)[targets, jnp.arange(8)]
    assert np.abs(np.asarray(rounded, np.float64) - exact).max() > 1e-2


def test_bfloat16_gradient_is_close():
    head, hidden, targets = problem(2, 12)
    head, hidden = head.astype(jnp.bfloat16), hidden.astype(jnp.bfloat16)
    expected = jax.grad(lambda h: plain(head, h, targets, 1.0, VOCAB).sum())(hidden.astype(jnp.float32))
    found = jax.grad(lambda h: TOKENS(head, h, targets, vocab_size=VOCAB).sum())(hidden)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.03 * float(jnp.abs(expected).max()))


# --- completion_log_probs ---


@jax.jit
def sequence_log_probs(params, prompt, completion, temperature=1.0):
    """One unpadded sequence, from the whole matrix of logits."""
    tokens = jnp.concatenate([prompt, completion])[None]
    valid = jnp.ones(tokens.shape, bool)
    hidden, _ = decoder.apply(params, None, CONFIG, tokens, decoder.positions_of(valid), decoder.causal_mask(valid))
    before = hidden[:, 0, len(prompt) - 1 : -1]
    return plain(decoder.unembedding(params), before, completion, temperature, VOCAB)


def arrays(sequences, length, left):
    ids, mask = np.zeros((len(sequences), length), np.int32), np.zeros((len(sequences), length), bool)
    for row, sequence in enumerate(sequences):
        where = slice(length - len(sequence), None) if left else slice(0, len(sequence))
        ids[row, where], mask[row, where] = sequence, True
    return ids, mask


def score_pairs(params, pairs, prompt_length, length, **options):
    prompts, completions = zip(*pairs, strict=True)
    return SCORE(
        params, None, CONFIG, *arrays(prompts, prompt_length, True), *arrays(completions, length, False),
        vocab_size=VOCAB, **options,
    )  # fmt: skip


PAIRS = [
    (np.array([5, 2, 9]), np.array([7, 7, 1, 30])),
    (np.array([1]), np.array([4])),
    (np.array([3, 3, 8, 40, 12]), np.array([40, 0, 2])),
]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_definition_on_unpadded_sequences(params, temperature):
    found = score_pairs(params, PAIRS, 5, 4, temperature=temperature)
    for row, (prompt, completion) in enumerate(PAIRS):
        expected = sequence_log_probs(params, prompt, completion, temperature)
        np.testing.assert_allclose(found[row, : len(completion)], expected, atol=1e-5)
        assert (np.asarray(found)[row, len(completion) :] == 0).all()


@settings(deadline=None, max_examples=6)
@given(left=st.sampled_from([0, 3, 6]), right=st.sampled_from([0, 3]), seed=st.integers(0, 1000))
def test_padding_changes_no_log_prob(params, left, right, seed):
    rng = np.random.default_rng(seed)
    pairs = [(rng.integers(0, VOCAB, 5), rng.integers(0, VOCAB, 4)) for _ in range(2)]
    tight, loose = (score_pairs(params, pairs, 5 + l, 4 + r) for l, r in ((0, 0), (left, right)))  # noqa: E741
    np.testing.assert_allclose(loose[:, :4], tight, atol=1e-5)
    assert (np.asarray(loose)[:, 4:] == 0).all()


def test_masked_ids_do_not_matter(params):
    prompts, completions = arrays([p for p, _ in PAIRS], 6, True), arrays([c for _, c in PAIRS], 5, False)
    expected = SCORE(params, None, CONFIG, *prompts, *completions, vocab_size=VOCAB)
    for ids, mask in (prompts, completions):
        ids[~mask] = 33
    np.testing.assert_array_equal(SCORE(params, None, CONFIG, *prompts, *completions, vocab_size=VOCAB), expected)


def test_end_of_turn_id_as_padding_keeps_the_first(params):
    """With one id for end and padding, the mask decides: the first end is scored, the padding is not."""
    completions = np.array([[9, 2, 2, 2]], np.int32), np.array([[1, 1, 0, 0]], bool)
    prompt = np.array([[5, 2, 9, 2]], np.int32), np.ones((1, 4), bool)
    found = SCORE(params, None, CONFIG, *prompt, *completions, vocab_size=VOCAB)
    expected = sequence_log_probs(params, prompt[0][0], np.array([9, 2]))
    np.testing.assert_allclose(found[0, :2], expected, atol=1e-5)
    assert (np.asarray(found)[0, 2:] == 0).all()


def test_gradient_ignores_padding_remat_and_the_way_of_the_head(params):
    weight = jax.random.normal(jax.random.key(3), (3, 4))
    config = lora.LoraConfig(rank=2, alpha=4.0, dropout=0.0)
    stack = lora.init(jax.random.key(4), CONFIG, config, 1)
    stack = jax.tree.map(lambda x: x + 0.1, stack)
    rows = lora.rows(config, 1, jnp.zeros(3, int))

    def total(stack, prompt_length, length, **options):
        prompts, completions = zip(*PAIRS, strict=True)
        found = score.completion_log_probs(
            params, stack, CONFIG, *arrays(prompts, prompt_length, True), *arrays(completions, length, False), rows,
            vocab_size=VOCAB, **options,
        )  # fmt: skip
        return (found[:, :4] * weight).sum()

    grad = jax.jit(jax.grad(total), static_argnums=(1, 2), static_argnames=("train_head", "remat"))
    with jax.debug_nans(True):
        tight, loose = grad(stack, 5, 4), grad(stack, 9, 6, train_head=True, remat=True)
    for one, two in zip(jax.tree.leaves(tight), jax.tree.leaves(loose), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-4)


def test_tied_head_gets_its_gradient_only_when_trained(params):
    pair = PAIRS[0]
    prompts, completions = arrays(pair[:1], 5, True), arrays(pair[1:], 4, False)

    def total(embed, train_head):
        return score.completion_log_probs(
            params | {"embed": embed}, None, CONFIG, *prompts, *completions, vocab_size=VOCAB, train_head=train_head
        ).sum()

    def reference(embed):
        return sequence_log_probs(params | {"embed": embed}, *pair).sum()

    grad = jax.jit(jax.grad(total), static_argnums=1)
    frozen, trained = grad(params["embed"], False), grad(params["embed"], True)
    np.testing.assert_allclose(trained, jax.jit(jax.grad(reference))(params["embed"]), atol=2e-4)
    unused = sorted(set(range(VOCAB)) - {int(token) for part in pair for token in part})
    assert (np.asarray(frozen)[unused] == 0).all() and np.abs(trained[unused[0]]).max() > 0


def test_empty_rows_are_zero_and_harmless(params):
    prompts, completions = arrays([[5, 6], [], [7]], 3, True), arrays([[1], [], []], 2, False)
    weight = jnp.ones((3, 2))

    def total(params):
        found = SCORE(params, None, CONFIG, *prompts, *completions, vocab_size=VOCAB)
        return (found * weight).sum(), found

    with jax.debug_nans(True):
        (_, found), grads = jax.value_and_grad(total, has_aux=True)(params)
    np.testing.assert_array_equal(np.asarray(found)[:, 1], 0)
    np.testing.assert_array_equal(np.asarray(found)[1:], 0)
    np.testing.assert_allclose(found[0, 0], sequence_log_probs(params, np.array([5, 6]), np.array([1]))[0], atol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_does_not_hold_columns_times_vocabulary(backward, train_head, dtype):
    """Scratch memory of the compiled program: 4 chunks of columns and 16 differ by hidden states, not by logits."""
    vocab, features = 5000, 8
    spec = jax.ShapeDtypeStruct

    def scratch(function, columns):
        def total(*arguments):
            return function(*arguments).sum()

        program = jax.jit(jax.grad(total, argnums=(0, 1) if train_head else 1) if backward else function)
        shapes = spec((vocab, features), jnp.float32 if train_head else dtype), spec((features, columns), dtype)
        compiled = program.lower(*shapes, spec((columns,), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ours = functools.partial(score.token_log_probs, vocab_size=vocab, train_head=train_head)
    few, many = 4 * score.CHUNK, 16 * score.CHUNK
    growth, logits = scratch(ours, many) - scratch(ours, few), 4 * vocab * (many - few)
    assert growth <= 8 * features * 4 * (many - few) < logits / 50
    # Logits, log-probabilities and probabilities of one chunk, not the four chunks of any of them.
    assert scratch(ours, few) < 3.5 * vocab * score.CHUNK * 4
    whole = functools.partial(plain, temperature=1.0, vocab_size=vocab)
    assert scratch(whole, many) - scratch(whole, few) > 0.99 * logits  # what this measures sees the whole matrix


@pytest.mark.parametrize("count", [1, 2, 3])
def test_completions_that_share_a_prompt_score_as_if_alone(params, count):
    """Values and gradients, with padding on both sides and one completion that is empty."""
    rng = np.random.default_rng(count)
    prompts, prompt_mask = rng.integers(0, VOCAB, (3, 5)), np.arange(5) >= np.array([[0], [2], [4]])
    completions = rng.integers(0, VOCAB, (3, count, 4))
    lengths = np.array([[4, 1, 3], [2, 4, 4], [1, 3, 0]])[:, :count]
    mask = np.arange(4) < lengths[..., None]

    def together(params):
        return score.completion_log_probs(
            params, None, CONFIG, prompts, prompt_mask, completions, mask, vocab_size=VOCAB, train_head=True
        )

    def apart(params):
        return jnp.stack(
            [
                score.completion_log_probs(
                    params, None, CONFIG, prompts, prompt_mask, completions[:, k], mask[:, k], vocab_size=VOCAB,
                    train_head=True,
                )
                for k in range(count)
            ],
            axis=1,
        )  # fmt: skip

    np.testing.assert_allclose(together(params), apart(params), atol=1e-5)
    weights = rng.standard_normal(mask.shape)
    found, expected = (jax.grad(lambda p, f=f: (f(p) * weights).sum())(params) for f in (together, apart))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)

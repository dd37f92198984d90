"""Sampling: the draws, the nucleus, the ends of answers, and log-probabilities that equal the scorer's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from stackalign.lm import decoder, generate, lora, score
from stackalign.lm.config import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=48, hidden_size=20, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=6,
    norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, tie_embeddings=False, max_positions=64,
)  # fmt: skip
VOCAB = 41
PROMPTS = ([5, 2, 9], [1], [3, 3, 8, 40, 12], [6, 7])
NUCLEUS = jax.jit(generate.nucleus_mask)
DRAW = jax.jit(generate.categorical)
NUCLEUS_DRAW = jax.jit(generate.nucleus_draw)
SAMPLE = jax.jit(generate.sample, static_argnums=(3, 4))
TOP_K = jax.jit(generate.top_k_mask, static_argnums=1)
ARGMAX = jax.jit(generate.argmax)
SCORE = jax.jit(score.completion_log_probs, static_argnames=("config", "vocab_size"))


@pytest.fixture(scope="module")
def params():
    made = decoder.init(jax.random.key(0), CONFIG)
    return made | {"embed": made["embed"] * 40, "lm_head": made["lm_head"] * 2}


def chain(table, **changes):
    """A decoder that is a Markov chain: its logits after token t are `table[t]`, whatever came before."""
    vocab = len(table)
    config = DecoderConfig(
        vocab_size=vocab, hidden_size=vocab, intermediate_size=2, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=2, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tie_embeddings=False, max_positions=64,
    )  # fmt: skip
    config = dataclasses.replace(config, **changes)
    made = decoder.init(jax.random.key(0), config)
    layer = made["layers"][0] | {"o": jnp.zeros((vocab, 2)), "down": jnp.zeros((vocab, 2))}
    return config, made | {
        "embed": jnp.eye(vocab), "layers": (layer,), "lm_head": jnp.asarray(table, jnp.float32).T,
        "final_norm": jnp.full(vocab, (1 / vocab + 1e-6) ** 0.5),
    }  # fmt: skip


def successors(vocab, following):
    """A table under which token t is all but surely followed by `following[t]` (others by 0)."""
    table = np.zeros((vocab, vocab), np.float32)
    for token in range(vocab):
        table[token, following.get(token, 0)] = 40.0
    return table


def left(prompts, length):
    ids, mask = np.zeros((len(prompts), length), np.int32), np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :], mask[row, length - len(prompt) :] = prompt, True
    return ids, mask


def keys(seed, rows):
    return jax.random.split(jax.random.key(seed), rows)


# --- the nucleus ---


def reference_nucleus(counts, goal):
    """The definition, by sorting: the fewest largest counts that sum to `goal`, and whatever ties with the last."""
    kept = np.zeros(counts.shape, bool)
    for row in range(counts.shape[1]):
        descending = np.sort(counts[:, row])[::-1]
        last = descending[np.searchsorted(np.cumsum(descending), goal[row])]
        kept[:, row] = counts[:, row] >= last
    return kept


@settings(deadline=None, max_examples=60)
@given(data=st.data(), high=st.sampled_from([1, 2, 9, 1000]))
def test_nucleus_equals_the_sorted_definition(data, high):
    """Integer weights with a goal halfway between two integers, so that no rounding decides; many ties."""
    vocab, rows = 17, 3
    seed = data.draw(st.integers(0, 10**6))
    counts = np.random.default_rng(seed).integers(0, high + 1, (vocab, rows))
    counts[seed % vocab] += 1  # never all zero
    totals = counts.sum(axis=0)
    row = data.draw(st.integers(0, rows - 1))
    goal = data.draw(st.integers(1, int(totals[row]))) - 0.5
    top_p = np.float32(goal / totals[row])
    with np.errstate(divide="ignore"):
        log_probs = np.log(counts / totals).astype(np.float32)
    found = np.asarray(NUCLEUS(log_probs, top_p))
    np.testing.assert_array_equal(found[:, row], reference_nucleus(counts[:, [row]], [goal])[:, 0])


def test_nucleus_extremes():
    probs = np.array([[0.5, 0.25], [0.3, 0.25], [0.2, 0.25], [0.0, 0.25]], np.float32)
    with np.errstate(divide="ignore"):
        log_probs = np.log(probs)
    tiny = NUCLEUS(log_probs, 1e-30)
    np.testing.assert_array_equal(tiny, [[1, 1], [0, 1], [0, 1], [0, 1]])
    everything = np.asarray(NUCLEUS(log_probs, 1.0))
    assert (everything | (probs == 0)).all()
    np.testing.assert_array_equal(NUCLEUS(log_probs, 0.6)[:, 0], [1, 1, 0, 0])


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999]))
def test_nucleus_of_continuous_distributions(seed, top_p):
    log_probs = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(seed), (700, 2)), axis=0)
    kept, probs = np.asarray(NUCLEUS(log_probs, top_p)), np.exp(np.asarray(log_probs, np.float64))
    for row in range(2):
        inside, outside = probs[kept[:, row], row], probs[~kept[:, row], row]
        assert inside.min() > outside.max()
        assert inside.sum() > top_p - 1e-5 and inside.sum() - inside.min() < top_p + 1e-5


# --- the draw ---


@pytest.mark.parametrize("vocab", [1, 12, generate.BLOCK, 2 * generate.BLOCK + 88])
def test_draw_has_the_distribution(vocab):
    """Evenly spaced uniforms hit an interval of length p of the cumulative weights N·p times, give or take one."""
    count = 20000
    weights = np.random.default_rng(vocab).exponential(size=vocab).astype(np.float32)
    weights[::3] = 0 if vocab > 1 else 1
    uniform = ((np.arange(count) + 0.5) / count).astype(np.float32)
    ids = jax.jit(jax.vmap(lambda u: generate.categorical(u[None], jnp.asarray(weights)[:, None])[0]))(uniform)
    counts = np.bincount(ids, minlength=vocab)
    assert np.abs(counts - count * weights / weights.sum(dtype=np.float64)).max() < 1.2
    assert (np.diff(ids) >= 0).all() and (counts[weights == 0] == 0).all()


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), holes=st.sampled_from([0.3, 0.9, 0.995]), vocab=st.sampled_from([256, 6000]))
def test_draw_never_gives_weight_zero(seed, holes, vocab):
    """Uniforms 0, almost 1, and at or beside borders of the cumulative weights.

    A parallel cumulative sum may rise by rounding where the weight is zero; where it does, the uniform aims there.
    """
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=(vocab, 64)).astype(np.float32) ** 3
    weights[rng.random(weights.shape) < holes] = 0
    weights[rng.integers(vocab)] += 1e-3
    weights /= weights.sum(axis=0)
    sums = np.asarray(jnp.cumsum(jnp.asarray(weights), axis=0))
    risen = np.diff(sums, axis=0, prepend=0) > 0
    row = np.arange(64)
    place = np.where((risen & (weights == 0)).any(axis=0), np.argmax(risen & (weights == 0), axis=0), seed % vocab)
    border = sums[np.maximum(place - 1, 0), row] / sums[-1]
    below, above = np.nextafter(border, np.float32(-1)), np.nextafter(border, np.float32(2))
    for uniform in (border, below, above, np.zeros(64), np.full(64, 1 - 2.0**-24)):
        ids = np.asarray(DRAW(np.clip(uniform, 0, 1 - 2.0**-24).astype(np.float32), weights))
        assert (weights[ids, row] > 0).all()


def test_draws_pass_a_chi_square_test():
    logits = jnp.array([2.0, 1.0, 0.0, -1.0, 0.5, -30.0])
    count = 6000
    tokens, log_probs = SAMPLE(
        keys(3, count), jnp.tile(logits[:, None], (1, count)), 0.6, 1.0, False
    )
    expected = np.asarray(jax.nn.softmax(logits / 0.6), np.float64)
    observed = np.bincount(tokens, minlength=6)
    assert observed[5] == 0
    assert scipy.stats.chisquare(observed[:5], count * expected[:5] / expected[:5].sum()).pvalue > 1e-3
    np.testing.assert_allclose(log_probs, np.log(expected)[tokens], atol=1e-5)


@pytest.mark.parametrize(("top_p", "kept"), [(0.7, 2), (0.9, 3), (0.4, 1), (0.995, 4)])
def test_nucleus_sampling_draws_the_renormalised_head(top_p, kept):
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    count = 4000
    tokens, log_probs = SAMPLE(
        keys(4, count), jnp.tile(jnp.log(probs)[:, None], (1, count)), 1.0, top_p, False
    )
    observed = np.bincount(tokens, minlength=4)
    assert observed[kept:].sum() == 0
    if kept > 1:
        expected = count * probs[:kept] / probs[:kept].sum()
        assert scipy.stats.chisquare(observed[:kept], expected).pvalue > 1e-3
    np.testing.assert_allclose(log_probs, np.log(probs)[tokens], atol=1e-5)  # before the cut


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), high=st.sampled_from([1, 9, 1000]), top_p=st.sampled_from([0.3, 0.55, 0.8, 0.97]))
def test_what_is_drawn_lies_in_the_nucleus(seed, high, top_p):
    """Integer weights with many ties, so that the border lies beside whole groups of equal ids."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, high + 1, 17)
    counts[rng.integers(17)] += 1
    goal = np.floor(top_p * counts.sum()) + 0.5  # no rounding decides
    with np.errstate(divide="ignore"):
        logits = np.repeat(np.log(counts).astype(np.float32)[:, None], 64, axis=1)
    logits = np.maximum(logits, decoder.MASKED)
    kept = reference_nucleus(counts[:, None], [goal])[:, 0]
    weights = np.exp(logits - logits.max())
    drawn = NUCLEUS_DRAW(keys(seed, 64), weights, np.float32(goal / counts.sum()))
    assert kept[np.asarray(drawn)].all()


def test_a_row_draws_the_same_however_often_others_draw_again():
    weights = np.random.default_rng(0).exponential(size=(300, 32)).astype(np.float32) ** 4
    together = np.asarray(NUCLEUS_DRAW(keys(0, 32), weights, np.float32(0.6)))
    for row in range(32):
        alone = NUCLEUS_DRAW(keys(0, 32)[row : row + 1], weights[:, row : row + 1], np.float32(0.6))
        assert int(alone[0]) == together[row]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([1, 41, 256, 700]), high=st.sampled_from([1, 1000]))
def test_argmax_is_the_first_largest(seed, vocab, high):
    logits = np.random.default_rng(seed).integers(-high, high + 1, (vocab, 5)).astype(np.float32)
    np.testing.assert_array_equal(ARGMAX(logits), np.argmax(logits, axis=0))


def test_temperature_numbers():
    logits = jnp.tile(jnp.array([[2.0], [1.0], [0.0]]), (1, 64))
    tokens, log_probs = SAMPLE(keys(0, 64), logits, 0.6, 1.0, False)
    np.testing.assert_allclose(log_probs, np.array([-0.202573, -1.869240, -3.535906])[tokens], atol=1e-6)
    assert len(set(np.asarray(tokens).tolist())) > 1
    greedy, log_probs = SAMPLE(keys(0, 64), logits, 0.6, 1.0, True)
    assert (np.asarray(greedy) == 0).all()
    np.testing.assert_allclose(log_probs, 2 - np.log(np.exp([2, 1, 0]).sum()), atol=1e-6)


# --- top-k ---


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=5, max_size=5),
    top_k=st.integers(1, 4),
    shared=st.booleans(),
)
def test_top_k_keeps_the_largest_and_their_ties(values, top_k, shared):
    values = np.array(values, np.float32) + np.float32(0)  # no negative zero, whose bits differ from zero's
    if shared:
        values[3] = values[1]
    kept = TOP_K(jnp.asarray(values)[:, None], top_k)[:, 0]
    np.testing.assert_array_equal(kept, values >= np.sort(values)[-top_k])


def test_top_k_before_top_p_as_transformers_cuts():
    # 0.4 0.3 0.2 0.1: of the three largest, renormalised to 4/9 3/9 2/9, two reach 0.75; of all four, three would.
    logits = jnp.tile(jnp.log(jnp.array([[0.1], [0.4], [0.2], [0.3]])), (1, 4000))
    cuts = ((3, 0.75, [1, 3]), (0, 0.75, [1, 2, 3]), (1, 1.0, [1]), (2, 0.3, [1]), (9, 1.0, range(4)))
    for top_k, top_p, allowed in cuts:
        tokens, log_probs = generate.sample(keys(1, 4000), logits, 1.0, top_p, False, top_k)
        assert sorted(set(np.asarray(tokens).tolist())) == sorted(allowed), (top_k, top_p)
        # Of the whole distribution, before the cuts.
        np.testing.assert_allclose(np.exp(log_probs), np.array([0.1, 0.4, 0.2, 0.3])[tokens], rtol=1e-5)
    tokens, _ = generate.sample(keys(2, 4000), logits, 1.0, 1.0, False, 2)
    assert abs(np.mean(np.asarray(tokens) == 1) - 4 / 7) < 4 * (12 / 49 / 4000) ** 0.5


# --- shared work ---


@pytest.mark.parametrize("windows", [(), (3,)])
def test_a_shared_prefix_changes_nothing(params, windows):
    config = dataclasses.replace(CONFIG, windows=windows)
    beginnings = np.array([[7, 3, 9, 1], [2, 2, 5, 30]], np.int32)
    index = np.array([1, 0, 1, 1])
    rows = lora.rows(lora.LoraConfig(rank=2), 2, index)
    stack = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
        lora.init(jax.random.key(5), config, lora.LoraConfig(rank=2), 2),
    )
    run = functools.partial(generate.generate, params, stack, config, keys(3, 4))
    kwargs = dict(max_new_tokens=6, temperature=0.8, top_p=0.9, eos_ids=(1,), vocab_size=VOCAB)
    prompts = [[*beginnings[i], *prompt] for i, prompt in zip(index, PROMPTS, strict=True)]
    whole = run(*left(prompts, 10), rows, **kwargs)
    prefix = generate.Prefix(beginnings, index, lora.rows(lora.LoraConfig(rank=2), 2, np.arange(2)))
    split = run(*left(PROMPTS, 6), rows, prefix, **kwargs)
    np.testing.assert_array_equal(split.tokens, whole.tokens)
    np.testing.assert_allclose(split.log_probs, whole.log_probs, atol=2e-5)


def test_completions_of_one_prompt_share_it(params):
    source = np.array([2, 0, 0, 3, 2, 2])
    kwargs = dict(max_new_tokens=6, temperature=0.9, eos_ids=(1,), vocab_size=VOCAB)
    shape = lora.LoraConfig(rank=2)
    stack = lora.init(jax.random.key(5), CONFIG, lora.LoraConfig(rank=2), 2)
    stack = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), stack)
    agents = np.array([0, 1, 1, 0])
    one_each = generate.generate(
        params, stack, CONFIG, keys(4, 6), *left([PROMPTS[i] for i in source], 5),
        lora.rows(shape, 2, agents[source]), **kwargs,
    )  # fmt: skip
    shared = generate.generate(
        params, stack, CONFIG, keys(4, 6), *left(PROMPTS, 5), lora.rows(shape, 2, agents), None, source, **kwargs
    )
    np.testing.assert_array_equal(shared.tokens, one_each.tokens)
    np.testing.assert_allclose(shared.log_probs, one_each.log_probs, atol=2e-5)
    assert len({tuple(row) for row in np.asarray(shared.tokens)[source == 2].tolist()}) > 1


# --- the ends of answers ---


@pytest.mark.parametrize("ends", [(7, 4), (4, 7), (4, 6, 7)])
def test_every_end_of_turn_id_ends_a_row(ends):
    config, params = chain(successors(8, {1: 2, 2: 4, 3: 5, 5: 5, 0: 7}))
    out = generate.generate(
        params, None, config, keys(0, 3), *left([[1], [3], [5, 0]], 2), max_new_tokens=5, eos_ids=ends, vocab_size=8
    )
    np.testing.assert_array_equal(out.tokens, [[2, 4, 0, 0, 0], [5, 5, 5, 5, 5], [7, 0, 0, 0, 0]])
    np.testing.assert_array_equal(out.mask, [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(out.finished, [True, False, True])
    assert (np.asarray(out.log_probs)[~np.asarray(out.mask)] == 0).all()


def test_the_first_end_is_kept_and_prompts_may_hold_it():
    config, params = chain(successors(12, {2: 9, 9: 2}))
    out = generate.generate(
        params, None, config, keys(0, 1), *left([[5, 2, 9, 2]], 6), max_new_tokens=4, eos_ids=(2,), vocab_size=12
    )
    np.testing.assert_array_equal(out.tokens, [[9, 2, 0, 0]])
    np.testing.assert_array_equal(out.mask, [[1, 1, 0, 0]])
    assert bool(out.finished[0])


def test_end_at_the_last_token_counts_as_finished():
    config, params = chain(successors(6, {1: 2, 2: 3, 3: 4}))
    run = functools.partial(generate.generate, params, None, config, keys(0, 1), *left([[1]], 1), vocab_size=6)
    assert bool(run(max_new_tokens=3, eos_ids=(4,)).finished[0])
    cut = run(max_new_tokens=2, eos_ids=(4,))
    assert not bool(cut.finished[0]) and np.asarray(cut.mask).all()


def test_one_new_token(params):
    ids, mask = left(PROMPTS, 5)
    out = generate.generate(
        params, None, CONFIG, keys(0, 4), ids, mask, max_new_tokens=1, greedy=True, eos_ids=(1,), vocab_size=VOCAB
    )
    hidden = jax.jit(lambda *args: decoder.apply(params, None, CONFIG, *args)[0])(
        ids, decoder.positions_of(mask), decoder.causal_mask(mask)
    )
    expected = jax.nn.log_softmax(decoder.logits(params, hidden[:, :, -1], VOCAB), axis=0)
    assert out.tokens.shape == (4, 1) and np.asarray(out.mask).all()
    np.testing.assert_array_equal(out.tokens[:, 0], jnp.argmax(expected, axis=0))
    np.testing.assert_allclose(out.log_probs[:, 0], jnp.max(expected, axis=0), atol=1e-5)


def test_stops_when_all_rows_have(monkeypatch):
    config, params = chain(successors(8, {1: 2, 2: 3, 3: 7}), max_positions=61)  # its own program: traced here
    calls, apply = [], decoder.apply

    def counted(*args, **rest):
        jax.debug.callback(lambda: calls.append(1))
        return apply(*args, **rest)

    monkeypatch.setattr(decoder, "apply", counted)
    out = generate.generate(
        params, None, config, keys(0, 2), *left([[1], [3]], 1), max_new_tokens=50, eos_ids=(7,), vocab_size=8
    )
    jax.block_until_ready(out)
    jax.effects_barrier()
    np.testing.assert_array_equal(out.tokens[:, :4], [[2, 3, 7, 0], [7, 0, 0, 0]])
    assert len(calls) == 3  # the prefill and two steps


def test_rows_without_a_prompt_are_skipped(params):
    with jax.debug_nans(True):
        run = functools.partial(
            generate.generate, params, None, CONFIG, max_new_tokens=6, eos_ids=(1,), vocab_size=VOCAB
        )
        out = run(keys(0, 4), *left([PROMPTS[0], [], PROMPTS[2], []], 5))
        alone = run(keys(0, 4), *left([PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[3]], 5))
        none = run(keys(0, 4), *left([[], [], [], []], 5))
    for row in (0, 2):
        np.testing.assert_array_equal(out.tokens[row], alone.tokens[row])
    for row in (1, 3):
        assert not out.mask[row].any() and not out.finished[row] and not out.log_probs[row].any()
    assert not none.mask.any() and not none.tokens.any() and not none.finished.any()


def test_ids_above_the_vocabulary_are_never_sampled():
    table = np.zeros((16, 16), np.float32)
    table[:, 12] = 50.0
    config, params = chain(table)
    run = functools.partial(
        generate.generate, params, None, config, keys(1, 32), *left([[1]] * 32, 1), max_new_tokens=12, eos_ids=(),
        vocab_size=10,
    )  # fmt: skip
    for options in ({}, {"top_p": 0.9}, {"top_p": 0.2}, {"greedy": True}, {"temperature": 1e-6}):
        out = run(**options)
        assert (np.asarray(out.tokens) < 10).all()
        np.testing.assert_allclose(out.log_probs, np.log(0.1), atol=1e-5)


# --- agreement with the scorer and with full passes ---


def adapters():
    config = lora.LoraConfig(rank=3, alpha=6.0, dropout=0.1, targets=lora.TARGETS)
    stack = lora.init(jax.random.key(7), CONFIG, config, 3)
    leaves, tree = jax.tree.flatten(stack)
    noise = jax.random.split(jax.random.key(8), len(leaves))
    moved = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, noise, strict=True)]
    return jax.tree.unflatten(tree, moved), lora.rows(config, 3, jnp.array([2, 0, 1, 2]))


@pytest.mark.parametrize("adapted", [False, True])
def test_log_probs_equal_the_scorer(params, adapted):
    stack, rows = adapters() if adapted else (None, None)
    ids, mask = left(PROMPTS, 5)
    seen = set()
    for temperature in (0.6, 1.0):
        out = generate.generate(
            params, stack, CONFIG, keys(2, 4), ids, mask, rows, max_new_tokens=8, temperature=temperature,
            eos_ids=(1, 30), vocab_size=VOCAB,
        )  # fmt: skip
        scored = SCORE(
            params, stack, CONFIG, ids, mask, out.tokens, out.mask, rows, temperature=temperature, vocab_size=VOCAB
        )
        np.testing.assert_allclose(out.log_probs, scored, atol=1e-4)
        seen.add(tuple(np.asarray(out.tokens).ravel().tolist()))
    assert len(seen) == 2


def test_adapters_change_the_answers(params):
    stack, rows = adapters()
    ids, mask = left(PROMPTS, 5)
    run = functools.partial(
        generate.generate, config=CONFIG, keys=keys(2, 4), prompts=ids, prompt_mask=mask, max_new_tokens=8,
        temperature=1.0, eos_ids=(1, 30), vocab_size=VOCAB,
    )  # fmt: skip
    bare, adapted = run(params, None), run(params, stack, rows=rows)
    assert not np.array_equal(bare.tokens, adapted.tokens)


def test_greedy_equals_repeated_full_passes(params):
    out = generate.generate(
        params, None, CONFIG, keys(0, 4), *left(PROMPTS, 5), max_new_tokens=8, greedy=True, eos_ids=(),
        vocab_size=VOCAB,
    )  # fmt: skip
    length = 5 + 8
    full = jax.jit(lambda *args: decoder.apply(params, None, CONFIG, *args)[0])
    for row, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for _ in range(8):
            valid = np.arange(length)[None] < len(ids)
            tokens = np.array([ids + [0] * (length - len(ids))], np.int32)
            hidden = full(tokens, decoder.positions_of(valid), decoder.causal_mask(valid))
            ids.append(int(jnp.argmax(decoder.logits(params, hidden[:, 0, len(ids) - 1][:, None], VOCAB))))
        np.testing.assert_array_equal(out.tokens[row], ids[len(prompt) :])


def test_a_row_does_not_depend_on_its_batch(params):
    run = functools.partial(
        generate.generate, params, None, CONFIG, max_new_tokens=8, temperature=1.0, top_p=0.9, eos_ids=(1,),
        vocab_size=VOCAB,
    )  # fmt: skip
    row_keys = keys(5, 4)
    out = run(row_keys, *left(PROMPTS, 5))
    for order, length in (([2, 0, 3, 1], 5), ([2], 7)):
        other = run(row_keys[np.array(order)], *left([PROMPTS[row] for row in order], length))
        for place, row in enumerate(order):
            np.testing.assert_array_equal(other.tokens[place], out.tokens[row])
            np.testing.assert_allclose(other.log_probs[place], out.log_probs[row], atol=1e-4)


def test_keys_decide_and_repeat(params):
    run = functools.partial(
        generate.generate, params, None, CONFIG, prompts=left(PROMPTS[:1] * 4, 5)[0],
        prompt_mask=left(PROMPTS[:1] * 4, 5)[1], max_new_tokens=8, temperature=1.0, top_p=0.9, eos_ids=(1,),
        vocab_size=VOCAB,
    )  # fmt: skip
    first = run(keys(6, 4))
    np.testing.assert_array_equal(first.tokens, run(keys(6, 4)).tokens)
    assert len({tuple(row) for row in np.asarray(first.tokens).tolist()}) == 4  # four keys, four answers


def test_bfloat16_log_probs_are_float32_and_near_the_scorer(params):
    held = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    ids, mask = left(PROMPTS, 5)
    out = generate.generate(
        held, None, CONFIG, keys(0, 4), ids, mask, max_new_tokens=6, eos_ids=(1,), vocab_size=VOCAB
    )
    scored = SCORE(held, None, CONFIG, ids, mask, out.tokens, out.mask, vocab_size=VOCAB)
    assert out.log_probs.dtype == jnp.float32 and (np.asarray(out.log_probs) <= 0).all()
    np.testing.assert_allclose(out.log_probs, scored, atol=0.15)

"""The pool: any mix of agents, bases and lengths, in order; and the single-character tokenizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackalign.lm import decoder, generate, lora, score
from stackalign.lm import pool as lm_pool
from stackalign.lm.char_tokenizer import CharTokenizer, tiny_config

LORA = lora.LoraConfig(rank=2, alpha=4.0)
GREEDY = lm_pool.Sampling(max_new_tokens=6, temperature=0.0)
SAMPLED = lm_pool.Sampling(max_new_tokens=6, temperature=1.0, top_p=0.9)


def base(seed, alphabet, rows=0, **shape):
    """A random tiny base; its embedding has `rows` rows more than the tokenizer has ids."""
    tokenizer = CharTokenizer(alphabet)
    config = tiny_config(tokenizer.vocab_size + rows, num_layers=1, num_heads=2, **shape)
    params = decoder.init(jax.random.key(seed), config)
    # Apart from the embedding, so that answers vary; made an untied parameter of the same configuration.
    head = jax.random.normal(jax.random.key(seed + 100), params["embed"].shape) * 0.4
    # The first feature is much alike everywhere and speaks for the end of the turn, so that some answers end.
    head = head.at[:, 0].set(0).at[1, 0].set(0.7)
    return lm_pool.Base(config, params | {"embed": (params["embed"] * 40).at[:, 0].set(2), "lm_head": head}, tokenizer)


@pytest.fixture(scope="module")
def pool():
    bases = {"digits": base(0, "0123456789+", 4, hidden_size=16), "letters": base(1, "abcdefgh", hidden_size=24)}
    agents = [("d0", "digits"), ("l0", "letters"), ("d1", "digits"), ("d2", "digits"), ("l1", "letters")]
    return lm_pool.Pool(bases, tuple(lm_pool.Agent(*agent) for agent in agents), LORA)


@pytest.fixture(scope="module")
def stacks(pool):
    made = lm_pool.init_adapters(jax.random.key(2), pool)
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), made)


@pytest.fixture(scope="module")
def requests(pool):
    """Nine requests, agents and lengths mixed."""
    rng = np.random.default_rng(0)
    agents, lengths = [3, 1, 0, 4, 2, 0, 1, 3, 2], [2, 9, 5, 1, 8, 12, 3, 10, 1]
    alphabets = {"digits": list("0123"), "letters": list("abcd")}
    return [
        (agent, lm_pool.encode_prompt(pool, agent, "".join(rng.choice(alphabets[pool.agents[agent].base], length))))
        for agent, length in zip(agents, lengths, strict=True)
    ]


@pytest.fixture(scope="module")
def keys(requests):
    return jax.random.split(jax.random.key(3), len(requests))


def alone(pool, stacks, key, agent, prompt, sampling):
    """One request by itself: no batch, no padding, no pool."""
    held = pool.bases[pool.agents[agent].base]
    slot = pool.members(pool.agents[agent].base).index(agent)
    only = None if stacks is None else lora.select(stacks[pool.agents[agent].base], slice(slot, slot + 1))
    out = generate.generate(
        held.params, only, held.config, key[None], np.array([prompt], np.int32), np.ones((1, len(prompt)), bool),
        None if stacks is None else lora.rows(LORA, 1, jnp.zeros(1, int)), max_new_tokens=sampling.max_new_tokens,
        temperature=1.0, top_p=1.0 if sampling.temperature == 0 else sampling.top_p, greedy=sampling.temperature == 0,
        eos_ids=held.tokenizer.eos_ids, vocab_size=held.tokenizer.vocab_size,
    )  # fmt: skip
    return tuple(np.asarray(out.tokens[0])[np.asarray(out.mask[0])].tolist()), bool(out.finished[0])


# --- construction ---


def test_agent_names_must_differ(pool):
    agents = [lm_pool.Agent(name, "digits") for name in ("x", "y", "x")]
    with pytest.raises(ValueError, match="agent names must differ; x occur"):
        lm_pool.Pool(pool.bases, tuple(agents), LORA)


def test_unknown_base_is_named(pool):
    with pytest.raises(ValueError, match="'x' names base 'nothing'; there is digits, letters"):
        lm_pool.Pool(pool.bases, (lm_pool.Agent("x", "nothing"),), LORA)


def test_members_and_adapters(pool):
    assert pool.names == ("d0", "l0", "d1", "d2", "l1")
    assert pool.members("digits") == [0, 2, 3] and pool.members("letters") == [1, 4]
    made = lm_pool.init_adapters(jax.random.key(0), pool)
    assert made["digits"][0]["q"]["a"].shape == (3, 2, 16) and made["letters"][0]["q"]["a"].shape == (2, 2, 24)
    only = lm_pool.Pool(pool.bases, pool.agents[:1], LORA)
    assert tuple(lm_pool.init_adapters(jax.random.key(0), only)) == ("digits",)


# --- shapes ---


@settings(deadline=None, max_examples=50)
@given(length=st.integers(0, 40000))
def test_bucket_is_the_smallest_that_holds(length):
    size = lm_pool.bucket(length)
    assert size >= max(length, 1)
    assert size in lm_pool.LENGTHS or size % lm_pool.LENGTHS[-1] == 0
    assert not any(length <= other < size for other in lm_pool.LENGTHS)


def test_row_bucket():
    assert [lm_pool.row_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]


def test_pad():
    ids, mask = lm_pool.pad([[5, 6], [7]], 3, 4, left=True)
    np.testing.assert_array_equal(ids, [[0, 5, 6], [0, 0, 7], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(mask, [[0, 1, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]])
    ids, mask = lm_pool.pad([[5, 6], []], 3, 2, left=False)
    np.testing.assert_array_equal(ids, [[5, 6, 0], [0, 0, 0]])
    np.testing.assert_array_equal(mask, [[1, 1, 0], [0, 0, 0]])


@settings(deadline=None, max_examples=50)
@given(data=st.data(), max_tokens=st.sampled_from([1, 40, 300, 16384]), extra=st.integers(0, 20))
def test_batches_hold_every_request_once(pool, data, max_tokens, extra):
    lengths = data.draw(st.lists(st.integers(0, 60), max_size=20))
    agents = data.draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths)))
    seen = []
    for name, chosen in lm_pool._batches(pool, agents, lengths, max_tokens, extra):
        assert chosen and all(pool.agents[agents[i]].base == name for i in chosen)
        padded = lm_pool.row_bucket(len(chosen)) * (lm_pool.bucket(max(lengths[i] for i in chosen)) + extra)
        assert padded <= max_tokens or len(chosen) == 1
        seen += chosen
    assert sorted(seen) == list(range(len(lengths)))


# --- generating ---


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_answers_are_each_requests_own(pool, stacks, requests, keys, sampling):
    answers = lm_pool.generate_answers(pool, stacks, keys, requests, sampling)
    for i, (agent, prompt) in enumerate(requests):
        if i in (1, 5):
            assert (answers[i].ids, answers[i].finished) == alone(pool, stacks, keys[i], agent, prompt, sampling)
        tokenizer = pool.bases[pool.agents[agent].base].tokenizer
        assert answers[i].text == tokenizer.decode(answers[i].ids)
        assert answers[i].finished == (answers[i].ids[-1] == tokenizer.end_of_turn)
        assert len(answers[i].ids) <= 6 and all(token < tokenizer.vocab_size for token in answers[i].ids)
    assert len({answer.ids for answer in answers}) > 5
    if sampling is SAMPLED:
        assert len({answer.finished for answer in answers}) == 2


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_answers_do_not_depend_on_batching_and_repeat(pool, stacks, requests, keys, sampling):
    answers = lm_pool.generate_answers(pool, stacks, keys, requests, sampling)
    assert answers == lm_pool.generate_answers(pool, stacks, keys, requests, sampling)
    assert answers == lm_pool.generate_answers(pool, stacks, keys, requests, sampling, max_tokens=50)
    order = [8, 4, 7, 3, 1]
    some = lm_pool.generate_answers(
        pool, stacks, keys[np.array(order)], [requests[i] for i in order], sampling, max_tokens=50
    )
    assert some == [answers[i] for i in order]


def test_agents_of_one_base_differ_by_their_adapters(pool, stacks, keys):
    prompt = lm_pool.encode_prompt(pool, 0, "12+3")
    asked = [(agent, prompt) for agent in (0, 2, 3)]
    adapted = lm_pool.generate_answers(pool, stacks, keys[:3], asked, GREEDY)
    assert len({answer.ids for answer in adapted}) > 1
    bare = lm_pool.generate_answers(pool, None, keys[:3], asked, GREEDY)
    fresh = lm_pool.generate_answers(pool, lm_pool.init_adapters(jax.random.key(0), pool), keys[:3], asked, GREEDY)
    assert len({answer.ids for answer in bare}) == 1 and fresh == bare


def test_nothing_asked_nothing_done(pool, stacks, keys):
    assert lm_pool.generate_answers(pool, stacks, keys[:0], [], GREEDY) == []
    sums, lengths = lm_pool.score_answers(pool, stacks, [])
    assert sums.shape == lengths.shape == (0,)
    assert lm_pool.next_log_probs(pool, stacks, [], [[3]]) == []


def test_progress_counts_to_the_total(pool, stacks, requests, keys):
    calls = []
    lm_pool.generate_answers(
        pool, stacks, keys, requests, GREEDY, max_tokens=50, progress=lambda *call: calls.append(call), phase="duels"
    )
    done = [call[1] for call in calls]
    assert done == sorted(done) and done[-1] == 9 and len(done) > 2
    assert all(call[0] == "duels" and call[2:] == (9, "answers") for call in calls)


# --- context ---


def test_too_long_a_request_names_agent_and_numbers(pool, stacks, keys):
    prompt = [3] * 30
    said = r"prompt of 30 tokens and an answer of up to {} exceed the context of 32 tokens of agent 'd1'"
    with pytest.raises(ValueError, match=said.format(6)):
        lm_pool.generate_answers(pool, stacks, keys[:2], [(0, [3]), (2, prompt)], GREEDY)
    with pytest.raises(ValueError, match=said.format(3)):
        lm_pool.score_answers(pool, stacks, [(2, prompt, [3, 4, 5])])
    with pytest.raises(ValueError, match="'d1'"):
        lm_pool.next_log_probs(pool, stacks, [(2, [3] * 32)], [[3]])
    lm_pool.check_context(pool, 2, prompt, 2)  # exactly full


def test_a_full_context_is_answered(pool, stacks, keys):
    answer, = lm_pool.generate_answers(pool, stacks, keys[:1], [(2, [3] * 26)], GREEDY)
    assert (answer.ids, answer.finished) == alone(pool, stacks, keys[0], 2, [3] * 26, GREEDY)


# --- scoring ---


@pytest.fixture(scope="module")
def triples(requests):
    rng = np.random.default_rng(5)
    return [
        (agent, prompt, rng.integers(3, 11, n).tolist())
        for (agent, prompt), n in zip(requests, [4, 1, 7, 0, 2, 5, 8, 3, 1], strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_each_requests_own(pool, stacks, triples, temperature):
    sums, lengths = lm_pool.score_answers(pool, stacks, triples, temperature=temperature)
    assert lengths.tolist() == [4, 1, 7, 0, 2, 5, 8, 3, 1] and sums.dtype == np.float64
    assert sums[3] == 0
    np.testing.assert_allclose(
        lm_pool.score_answers(pool, stacks, triples, temperature=temperature, max_tokens=40)[0], sums, atol=1e-4
    )
    one = jax.jit(score.completion_log_probs, static_argnames=("config", "vocab_size"))
    for i in (2, 6):
        agent, prompt, completion = triples[i]
        name = pool.agents[agent].base
        slot = pool.members(name).index(agent)
        values = one(
            pool.bases[name].params, stacks[name], pool.bases[name].config,
            np.array([prompt]), np.ones((1, len(prompt)), bool), np.array([completion]),
            np.ones((1, len(completion)), bool), lora.rows(LORA, len(pool.members(name)), jnp.array([slot])),
            temperature=temperature, vocab_size=pool.bases[name].tokenizer.vocab_size,
        )  # fmt: skip
        np.testing.assert_allclose(sums[i], values.sum(), atol=1e-4)


def test_equal_requests_score_equally_to_the_last_bit(pool, stacks, triples):
    doubled = [triples[i] for i in (0, 2, 0, 5, 2, 0)]
    sums, lengths = lm_pool.score_answers(pool, stacks, doubled)
    assert lengths.tolist() == [4, 7, 4, 5, 7, 4]
    assert sums[0] == sums[2] == sums[5] and sums[1] == sums[4] and len(set(sums)) == 3


def test_next_log_probs_equal_the_scores_of_single_tokens(pool, stacks, requests):
    asked = [[4, 5, 9], [10]]
    found = lm_pool.next_log_probs(pool, stacks, requests, asked)
    again = lm_pool.next_log_probs(pool, stacks, requests, asked, max_tokens=20)
    triples = [(agent, prompt[:-1], [token]) for agent, prompt in requests for token in asked[0]]
    triples += [(agent, prompt, [token]) for agent, prompt in requests for token in asked[1]]
    sums, _ = lm_pool.score_answers(pool, stacks, triples)
    before, last = sums[: 3 * len(requests)].reshape(-1, 3), sums[3 * len(requests) :]
    for i in range(len(requests)):
        assert [len(part) for part in found[i]] == [3, 1]
        np.testing.assert_allclose(found[i][0], before[i], atol=1e-5)
        np.testing.assert_allclose(found[i][1], [last[i]], atol=1e-5)
        np.testing.assert_allclose(np.concatenate(again[i]), np.concatenate(found[i]), atol=1e-5)


# --- shared work ---


@pytest.fixture
def prefills(monkeypatch):
    """(rows, padded length, prefixes, their length) of every prefill that is traced."""
    seen, prefill = [], generate.prefill

    def recorded(params, adapters, config, prompts, mask, rows=None, prefix=None, mesh=None):
        seen.append((*prompts.shape, *((0, 0) if prefix is None else prefix.tokens.shape)))
        return prefill(params, adapters, config, prompts, mask, rows, prefix, mesh)

    jax.clear_caches()
    monkeypatch.setattr(generate, "prefill", recorded)
    return seen


def long_requests(pool, count=8):
    """Requests of two agents of one base whose prompts begin alike, each agent's with its own words."""
    rng = np.random.default_rng(1)
    shared = {0: "".join(rng.choice(list("0123"), 16)), 3: "".join(rng.choice(list("0123"), 17))}
    return [
        (agent, lm_pool.encode_prompt(pool, agent, shared[agent] + "".join(rng.choice(list("012"), 1 + i % 4)) + "3"))
        for i, agent in enumerate([0, 3] * (count // 2))
    ]


def test_what_prompts_begin_with_runs_once_an_agent(pool, stacks, prefills):
    requests = long_requests(pool)
    found = lm_pool.generate_answers(pool, stacks, jax.random.split(jax.random.key(0), 8), requests, GREEDY)
    assert prefills == [(8, 8, 3, 16)]
    for (agent, prompt), answer in zip(requests, found, strict=True):
        assert alone(pool, stacks, jax.random.key(0), agent, prompt, GREEDY) == (answer.ids, answer.finished)
    prefills.clear()
    asked = [[4, 5, 9], [10]]
    together = lm_pool.next_log_probs(pool, stacks, requests, asked)
    assert prefills == [(8, 8, 3, 16)]
    for request, values in zip(requests, together, strict=True):
        (expected,) = lm_pool.next_log_probs(pool, stacks, [request], asked)
        np.testing.assert_allclose(np.concatenate(values), np.concatenate(expected), atol=1e-5)


def test_answers_to_one_prompt_share_its_prefill(pool, stacks, prefills):
    requests = [request for request in long_requests(pool, 4) for _ in range(4)]
    keys = jax.random.split(jax.random.key(0), 16)
    found = lm_pool.generate_answers(pool, stacks, keys, requests, SAMPLED)
    assert [rows for rows, *_ in prefills] == [4]
    for key, (agent, prompt), answer in zip(keys, requests, found, strict=True):
        assert alone(pool, stacks, key, agent, prompt, SAMPLED) == (answer.ids, answer.finished)
    assert len({answer.ids for answer in found[:4]}) > 1


def test_short_beginnings_do_not_pay(pool, stacks, prefills, requests, keys):
    lm_pool.generate_answers(pool, stacks, keys, requests, GREEDY)
    assert prefills and all(length == 0 for *_, length in prefills)


def test_next_log_probs_sum_to_one_over_the_vocabulary(pool, stacks):
    vocab = pool.bases["digits"].tokenizer.vocab_size
    (values,), = lm_pool.next_log_probs(pool, stacks, [(2, [3, 4, 2])], [range(vocab)])
    np.testing.assert_allclose(np.exp(values).sum(), 1.0, atol=1e-5)


# --- tokens ---


class Recording(CharTokenizer):
    """Keeps the messages it is asked to encode."""

    def encode_chat(self, messages):
        self.messages = messages
        return super().encode_chat([m for m in messages if m["role"] == "user"])


def test_prompts_carry_the_agents_own_system_prompt(pool):
    tokenizer = Recording("ab")
    held = pool.bases["letters"]._replace(tokenizer=tokenizer)
    agents = (lm_pool.Agent("plain", "x"), lm_pool.Agent("kind", "x", "Be kind."), lm_pool.Agent("empty", "x", ""))
    made = lm_pool.Pool({"x": held}, agents, LORA)
    for agent, system in enumerate((None, "Be kind.", "")):
        assert lm_pool.encode_prompt(made, agent, "ab") == [3, 4, 2]
        systems = [message["content"] for message in tokenizer.messages if message["role"] == "system"]
        assert systems == ([] if system is None else [system])
        assert tokenizer.messages[-1] == {"role": "user", "content": "ab"}


def test_only_finished_answers_end_the_turn(pool):
    assert lm_pool.encode_answer(pool, 1, "ab") == [3, 4, 1]
    assert lm_pool.encode_answer(pool, 1, "ab", finished=False) == [3, 4]
    assert lm_pool.encode_answer(pool, 1, "") == [1]


def test_char_tokenizer():
    tokenizer = CharTokenizer("xyz")
    assert tokenizer.vocab_size == 6 and tokenizer.eos_ids == (1,) and tokenizer.end_of_turn == 1
    assert tokenizer.decode([0, 5, 3, 1, 2, 4]) == "zxy"
    assert tokenizer.decode(tokenizer.encode("zyx")) == "zyx"
    with pytest.raises(ValueError, match="repeats"):
        CharTokenizer("xx")
    with pytest.raises(ValueError, match="'q' is not in the alphabet 'xyz'"):
        tokenizer.encode("xq")
    with pytest.raises(ValueError, match="no system prompt"):
        tokenizer.encode_chat([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])

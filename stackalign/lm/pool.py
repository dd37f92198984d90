"""The pool: frozen bases, the agents that share them, and batched generation and scoring for any mix of agents.

An agent is a base, its own slot in that base's stack of adapters, and a system prompt. Requests of many agents are
grouped by base, sorted by length, padded to a few fixed shapes (one compiled program each) and run together.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from stackalign.lm import decoder, generate, lora, score, sharding, training
from stackalign.lm.config import DecoderConfig

LENGTHS = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)

Progress = Callable[[str, int, int, str], None]
"""Called with (phase, done, total, unit) as work proceeds."""


def silent(phase: str, done: int, total: int, unit: str) -> None:
    """A `Progress` that shows nothing."""


class Tokenizer(Protocol):
    """What the pool needs of a tokenizer."""

    eos_ids: tuple[int, ...]
    end_of_turn: int
    pad_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Base(NamedTuple):
    """A frozen language model: its configuration, parameters and tokenizer, and the mesh that it lies on, if any."""

    config: DecoderConfig
    params: Any
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh | None = None


class Agent(NamedTuple):
    """A member of the pool: its name, the base it runs on, and its system prompt (None: the template's default)."""

    name: str
    base: str
    system_prompt: str | None = None


class Answer(NamedTuple):
    """A generated answer: its text, its ids (end-of-turn id included when `finished`), whether it ended by itself."""

    text: str
    ids: tuple[int, ...]
    finished: bool


class Sampling(NamedTuple):
    """How to decode; defaults are the paper's for duels (Appendix C). Temperature 0 is greedy, top-k 0 is no cut."""

    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0


@dataclasses.dataclass(frozen=True)
class Pool:
    """Bases by name, and the agents in their fixed order.

    `lora` is the shape that all adapters share; None is a full fine-tune, where each base has one agent, whose
    parameters start as the base's.
    """

    bases: Mapping[str, Base]
    agents: tuple[Agent, ...]
    lora: lora.LoraConfig | None

    def __post_init__(self):
        names = [agent.name for agent in self.agents]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"agent names must differ; {', '.join(doubled)} occur(s) more than once")
        for agent in self.agents:
            if agent.base not in self.bases:
                raise ValueError(f"agent {agent.name!r} names base {agent.base!r}; there is {', '.join(self.bases)}")
        for base in self.bases if self.lora is None else ():
            if len(members := self.members(base)) > 1:
                shared = ", ".join(names[index] for index in members)
                raise ValueError(
                    f"agents {shared} share base {base!r}, but a full fine-tune is its own base: give each agent its "
                    "own, or train adapters"
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(agent.name for agent in self.agents)

    def members(self, base: str) -> list[int]:
        """Indices of the agents on `base`; an agent's place in this list is its slot in the stack of adapters."""
        return [index for index, agent in enumerate(self.agents) if agent.base == base]


Stacks = Mapping[str, training.Trained]
"""What is trained, stacked adapters or masters of parameters, by base name; of the training state, not of the pool."""


def place(pool: Pool, stacks: Stacks, mesh: jax.sharding.Mesh) -> tuple[Pool, Stacks]:
    """The pool and its adapters on a mesh: bases in parts (`lm.sharding`), adapters whole on every device."""
    bases = {
        name: base._replace(params=sharding.place(base.params, base.config, mesh), mesh=mesh)
        for name, base in pool.bases.items()
    }
    return dataclasses.replace(pool, bases=bases), sharding.replicate(dict(stacks), mesh)


def rows_on(base: Base, tree: Any, axis: int = 0) -> Any:
    """Arrays of a batch where `base` lies: their rows shared out over its mesh, or as they are without one."""
    return tree if base.mesh is None else sharding.place_rows(tree, base.mesh, axis)


def init_adapters(key: jax.Array, pool: Pool) -> Stacks:
    """Fresh adapters for every agent, or the bases' parameters where those are trained; consumes `key`."""
    keys = jax.random.split(key, len(pool.bases))
    return {
        name: training.masters(base.params)
        if pool.lora is None
        else lora.init(base_key, base.config, pool.lora, len(pool.members(name)))
        for base_key, (name, base) in zip(keys, pool.bases.items(), strict=True)
        if pool.members(name)
    }


def bucket(length: int, lengths: Sequence[int] = LENGTHS) -> int:
    """The smallest padded length that holds `length`."""
    for size in lengths:
        if length <= size:
            return size
    return -(-length // lengths[-1]) * lengths[-1]


def row_bucket(rows: int) -> int:
    """The smallest power of two ≥ `rows`, so that few batch shapes are compiled."""
    return 1 << max(rows - 1, 0).bit_length()


def encode_prompt(pool: Pool, agent: int, user: str) -> list[int]:
    """Token ids of a one-turn chat that `agent` is to answer, with its own system prompt."""
    system = pool.agents[agent].system_prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    return pool.bases[pool.agents[agent].base].tokenizer.encode_chat([*messages, {"role": "user", "content": user}])


def encode_answer(pool: Pool, agent: int, text: str, finished: bool = True) -> list[int]:
    """Token ids of an answer for `agent`: encoded apart from the prompt, so that no token straddles the border.

    An answer that was cut by the token limit (`finished` false) gets no end-of-turn id.
    """
    tokenizer = pool.bases[pool.agents[agent].base].tokenizer
    return tokenizer.encode(text) + ([tokenizer.end_of_turn] if finished else [])


def pad(sequences: Sequence[Sequence[int]], length: int, num_rows: int, *, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 `[num_rows, length]` and mask bool `[num_rows, length]`, padded with 0 on the left or the right."""
    ids, mask = np.zeros((num_rows, length), np.int32), np.zeros((num_rows, length), bool)
    for row, sequence in enumerate(sequences):
        where = slice(length - len(sequence), length) if left else slice(0, len(sequence))
        ids[row, where], mask[row, where] = sequence, True
    return ids, mask


def _batches(pool: Pool, agents: Sequence[int], lengths: Sequence[int], max_tokens: int, extra: int):
    """Yields (base name, request indices): one base, similar lengths, at most `max_tokens` padded tokens a batch."""
    for name in pool.bases:
        members = set(pool.members(name))
        order = sorted((i for i, agent in enumerate(agents) if agent in members), key=lambda i: (-lengths[i], i))
        while order:
            rows = max(max_tokens // (bucket(lengths[order[0]]) + extra), 1)
            rows = 1 << (rows.bit_length() - 1)
            yield name, order[:rows]
            order = order[rows:]


def _model(pool: Pool, stacks: Stacks | None, name: str) -> tuple[Any, lora.Adapters | None]:
    """Parameters and adapters that the agents of a base compute with."""
    params = pool.bases[name].params
    if stacks is None:
        return params, None
    if pool.lora is None:
        return training.compute_copy(params, stacks[name]), None
    return params, stacks[name]


def _models(pool: Pool, stacks: Stacks | None):
    """`_model` by base name; the last one is kept, as batches come base by base."""
    return functools.lru_cache(maxsize=1)(functools.partial(_model, pool, stacks))


def _rows(pool: Pool, stacks: Stacks | None, name: str, agents: Sequence[int], num_rows: int) -> lora.Rows | None:
    """Which adapter each row uses; None without adapters."""
    if stacks is None or pool.lora is None:
        return None
    members = pool.members(name)
    slots = np.zeros(num_rows, np.int32)
    slots[: len(agents)] = [members.index(agent) for agent in agents]
    return lora.rows(pool.lora, len(members), jnp.asarray(slots))


def _shared_prefixes(pool: Pool, name: str, requests: Sequence[tuple], keep: int) -> np.ndarray:
    """Ids int32 `[members, L]` that all prompts of each member of a base begin with; L is one of `LENGTHS`, or 0.

    The last `keep` tokens of a prompt are never in it. The chat template, a system prompt and the constant part of a
    judge's prompt are such beginnings.
    """
    members = pool.members(name)
    prompts: dict[int, list[list[int]]] = {member: [] for member in members}
    for agent, prompt, *_ in requests:
        if agent in prompts:
            prompts[agent].append(list(prompt))
    common = {}
    for member, found in prompts.items():
        if found:
            common[member] = os.path.commonprefix(found)[: max(min(map(len, found)) - keep, 0)]
    shortest = min(map(len, common.values()), default=0)
    length = max((size for size in LENGTHS if size <= shortest), default=0)
    prefixes = np.zeros((len(members), length), np.int32)
    for slot, member in enumerate(members):
        prefixes[slot] = common.get(member, [0] * length)[:length]
    return prefixes


class _Prompts(NamedTuple):
    """A batch of prompts as `generate.prefill` takes it: what follows the prefix, and the prefix if it saves work."""

    tokens: jax.Array
    mask: jax.Array
    rows: lora.Rows | None
    prefix: generate.Prefix | None


def _prompts(
    pool: Pool, stacks: Stacks | None, name: str, prefixes: np.ndarray, requests: Sequence[tuple[int, Sequence[int]]]
) -> _Prompts:
    base, num_rows = pool.bases[name], row_bucket(len(requests))
    agents, longest = [agent for agent, *_ in requests], max(len(prompt) for _, prompt, *_ in requests)
    (count, shared), width = prefixes.shape, bucket(longest)
    rest = bucket(max(longest - shared, 1))
    if shared == 0 or count * shared + num_rows * rest > 0.8 * num_rows * width:
        shared, rest = 0, width
    tokens, mask = pad([prompt[shared:] for _, prompt, *_ in requests], rest, num_rows, left=True)
    prefix = None
    if shared:
        index = np.zeros(num_rows, np.int32)
        index[: len(agents)] = [pool.members(name).index(agent) for agent in agents]
        whose = _rows(pool, stacks, name, pool.members(name), count)
        prefix = generate.Prefix(*rows_on(base, (prefixes, index)), whose)
    return _Prompts(*rows_on(base, (tokens, mask)), _rows(pool, stacks, name, agents, num_rows), prefix)


def check_context(pool: Pool, agent: int, prompt: Sequence[int], new_tokens: int) -> None:
    """Raises ValueError when a prompt and its answer do not fit the agent's context, or an id has no embedding.

    Nothing is ever cut silently.
    """
    config = pool.bases[pool.agents[agent].base].config
    if len(prompt) and max(prompt) >= config.vocab_size:
        raise ValueError(
            f"a prompt holds id {max(prompt)}, but the embedding of base {pool.agents[agent].base!r} has "
            f"{config.vocab_size} rows (vocab_size): its tokenizer or chat template is another model's"
        )
    limit = config.max_positions
    if len(prompt) + new_tokens > limit:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and an answer of up to {new_tokens} exceed the context of {limit} "
            f"tokens of agent {pool.agents[agent].name!r}: shorten the instruction or lower the number of new tokens"
        )


def generate_answers(
    pool: Pool,
    stacks: Stacks | None,
    keys: jax.Array,
    requests: Sequence[tuple[int, Sequence[int]]],
    sampling: Sampling,
    *,
    max_tokens: int = 16384,
    progress: Progress = silent,
    phase: str = "generate",
) -> list[Answer]:
    """Answers `requests`, each an (agent, prompt ids) pair, in their order.

    Args:
      stacks: adapters by base, or None for the bare bases.
      keys: typed keys `[requests]`, one a request: an answer does not depend on what else is asked.
      sampling: see `Sampling`.
      max_tokens: padded tokens a batch, prompt and answer; bounds memory.
    """
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.max_new_tokens < 1 or sampling.top_k < 0:
        raise ValueError(f"{sampling}: temperature and top_k must be ≥ 0, top_p in (0, 1] and max_new_tokens ≥ 1")
    answers: list[Answer | None] = [None] * len(requests)
    agents = [agent for agent, _ in requests]
    for agent, prompt in requests:
        check_context(pool, agent, prompt, sampling.max_new_tokens)
    done = 0
    progress(phase, 0, len(requests), "answers")
    lengths = [len(prompt) for _, prompt in requests]
    prefixes = {name: _shared_prefixes(pool, name, requests, 1) for name in pool.bases}
    models = _models(pool, stacks)
    for name, chosen in _batches(pool, agents, lengths, max_tokens, sampling.max_new_tokens):
        base = pool.bases[name]
        index = np.zeros(row_bucket(len(chosen)), np.int32)
        index[: len(chosen)] = chosen
        places: dict[tuple, int] = {}
        source = np.zeros(len(index), np.int32)
        source[: len(chosen)] = [places.setdefault((agents[i], tuple(requests[i][1])), len(places)) for i in chosen]
        repeated = 2 * len(places) <= len(chosen)
        batch = _prompts(
            pool, stacks, name, prefixes[name], list(places) if repeated else [requests[i] for i in chosen]
        )
        out = generate.generate(
            *models(name),
            base.config,
            rows_on(base, keys[index]),
            *batch,
            rows_on(base, source) if repeated else None,
            max_new_tokens=sampling.max_new_tokens,
            temperature=max(sampling.temperature, 1e-6),
            top_p=sampling.top_p if sampling.temperature > 0 else 1.0,
            top_k=sampling.top_k if sampling.temperature > 0 else 0,
            greedy=sampling.temperature == 0,
            eos_ids=tuple(base.tokenizer.eos_ids),
            vocab_size=base.tokenizer.vocab_size,
            mesh=base.mesh,
        )
        tokens, kept, finished = sharding.fetch((out.tokens, out.mask, out.finished))
        for row, i in enumerate(chosen):
            ids = tuple(int(token) for token in tokens[row][kept[row]])
            text = base.tokenizer.decode(ids[:-1] if finished[row] else ids)
            answers[i] = Answer(text, ids, bool(finished[row]))
        done += len(chosen)
        progress(phase, done, len(requests), "answers")
    return answers


_completion_log_probs = jax.jit(
    score.completion_log_probs, static_argnames=("config", "vocab_size", "remat", "train_head", "mesh")
)


def score_answers(
    pool: Pool,
    stacks: Stacks | None,
    requests: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    *,
    temperature: float = 1.0,
    max_tokens: int = 4096,
    progress: Progress = silent,
    phase: str = "score",
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of completions under agents.

    Equal requests are scored once, so equal answers get equal numbers to the last bit. Two completions of
    one prompt by one agent share it.

    Args:
      requests: (agent, prompt ids, completion ids) triples; an empty completion has sum 0 and length 0.
      temperature: divides the logits.
      max_tokens: padded tokens a batch; bounds memory.

    Returns:
      `(sums, lengths)`, float64 and int `[requests]`: total log-probability and number of completion tokens.
    """
    places: dict[tuple, int] = {}
    inverse = [places.setdefault((agent, tuple(p), tuple(c)), len(places)) for agent, p, c in requests]
    requests = list(places)
    sums, counts = np.zeros(len(requests)), np.array([len(r[2]) for r in requests], int)
    for agent, prompt, completion in requests:
        check_context(pool, agent, prompt, len(completion))
    shared: dict[tuple, list[int]] = {}
    for index, (agent, prompt, _) in enumerate(requests):
        shared.setdefault((agent, prompt), []).append(index)
    rows = [(*key, found[i : i + 2]) for key, found in shared.items() for i in range(0, len(found), 2)]
    branches = max((len(found) for _, _, found in rows), default=1)
    agents = [agent for agent, _, _ in rows]
    width = bucket(int(counts.max(initial=1)))
    done = 0
    progress(phase, 0, len(requests), "answers")
    models = _models(pool, stacks)
    for name, chosen in _batches(pool, agents, [len(row[1]) for row in rows], max_tokens, branches * width):
        base = pool.bases[name]
        num_rows = row_bucket(len(chosen))
        prompts, mask = pad(
            [rows[i][1] for i in chosen], bucket(max(len(rows[i][1]) for i in chosen)), num_rows, left=True
        )
        held = [index for i in chosen for index in (*rows[i][2], *[None] * (branches - len(rows[i][2])))]
        completions, completion_mask = pad(
            [() if index is None else requests[index][2] for index in held], width, num_rows * branches, left=False
        )
        values = _completion_log_probs(
            *models(name),
            base.config,
            *rows_on(
                base,
                (
                    prompts,
                    mask,
                    completions.reshape(num_rows, branches, width),
                    completion_mask.reshape(num_rows, branches, width),
                ),
            ),
            _rows(pool, stacks, name, [agents[i] for i in chosen], num_rows),
            temperature=temperature,
            vocab_size=base.tokenizer.vocab_size,
            mesh=base.mesh,
        )
        totals = sharding.fetch(values).astype(np.float64).sum(axis=2).reshape(-1)
        for place, index in enumerate(held):
            if index is not None:
                sums[index] = totals[place]
        done += sum(len(rows[i][2]) for i in chosen)
        progress(phase, done, len(requests), "answers")
    return sums[inverse], counts[inverse]


def _next_log_probs(params, adapters, config, tokens, mask, rows, prefix, *, last: int, vocab_size: int, mesh):
    hidden, *_ = generate.prefill(params, adapters, config, tokens, mask, rows, prefix, mesh)
    hidden = hidden[:, :, -last:]
    values = decoder.logits(params, hidden.reshape(hidden.shape[0], -1), vocab_size, mesh)
    return jax.nn.log_softmax(values, axis=0).reshape(-1, *hidden.shape[1:])


_next_log_probs = jax.jit(_next_log_probs, static_argnames=("config", "last", "vocab_size", "mesh"))


def next_log_probs(
    pool: Pool,
    stacks: Stacks | None,
    requests: Sequence[tuple[int, Sequence[int]]],
    ids: Sequence[Sequence[int]],
    *,
    max_tokens: int = 2048,
    progress: Progress = silent,
    phase: str = "score",
) -> list[list[np.ndarray]]:
    """Log-probabilities of chosen next tokens after the last positions of a prompt, at temperature 1.

    Args:
      requests: (agent, prompt ids) pairs; each prompt is at least `len(ids)` tokens long.
      ids: for the last `len(ids)` positions, in order, the token ids that are asked for there.

    Returns:
      For each request a list, one float array `[len(ids[k])]` a position.
    """
    out: list[list[np.ndarray] | None] = [None] * len(requests)
    agents = [agent for agent, _ in requests]
    for agent, prompt in requests:
        check_context(pool, agent, prompt, 1)
    done = 0
    progress(phase, 0, len(requests), "answers")
    prefixes = {name: _shared_prefixes(pool, name, requests, len(ids)) for name in pool.bases}
    models = _models(pool, stacks)
    for name, chosen in _batches(pool, agents, [len(p) for _, p in requests], max_tokens, 0):
        base = pool.bases[name]
        values = _next_log_probs(
            *models(name),
            base.config,
            *_prompts(pool, stacks, name, prefixes[name], [requests[i] for i in chosen]),
            last=len(ids),
            vocab_size=base.tokenizer.vocab_size,
            mesh=base.mesh,
        )
        values = sharding.fetch(values)
        for row, i in enumerate(chosen):
            out[i] = [values[np.asarray(wanted), row, k] for k, wanted in enumerate(ids)]
        done += len(chosen)
        progress(phase, done, len(requests), "answers")
    return out

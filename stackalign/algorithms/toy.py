"""A pool of tiny decoders made in the run: one base that knows six character skills, six agents that unlearned some.

The base is trained on all skills. Each agent is a short specialisation of it (an adapter): clean on two skills, taught
a systematic wrong rule of its own on the others. What the wrong rules hide is latent in every agent, which is what
lets such a pool align itself; a gain on it partly recovers what the base knew.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stackalign import data
from stackalign.data import Instruction, characters
from stackalign.lm import char_tokenizer, decoder, lora, pool, score, training

PROMPT_LENGTH, ANSWER_LENGTH = 10, 7  # longest prompt and answer, separator and end-of-turn included
SCAN_STEPS = 50  # pretraining steps a compiled scan


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """How the toy pool is made.

    Attributes:
      num_agents: size of the pool, at least 3.
      pretrain_steps, pretrain_batch, pretrain_lr: AdamW on all skills, cosine.
      specialise_steps, specialise_batch, specialise_lr: each agent's adapter, AdamW with cosine.
      clean_share: share of an agent's two clean skills (each) among its specialisation examples.
      right_share: share of right labels on its other skills; the rest follows its wrong rule.
      hidden_size, num_layers: of the decoder.
    """

    num_agents: int = 6
    pretrain_steps: int = 1200
    pretrain_batch: int = 64
    pretrain_lr: float = 3e-3
    specialise_steps: int = 150
    specialise_batch: int = 32
    specialise_lr: float = 3e-3
    clean_share: float = 0.25
    right_share: float = 0.4
    hidden_size: int = 64
    num_layers: int = 3


def _examples(tokenizer, pairs: Sequence[tuple[str, str]]) -> training.Batch:
    prompts, prompt_mask = pool.pad(
        [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt, _ in pairs],
        PROMPT_LENGTH,
        len(pairs),
        left=True,
    )
    answers, answer_mask = pool.pad(
        [[*tokenizer.encode(answer), tokenizer.end_of_turn] for _, answer in pairs],
        ANSWER_LENGTH,
        len(pairs),
        left=False,
    )
    return training.Batch(prompts, prompt_mask, answers, answer_mask)


def _draw(rng: np.random.Generator, skill: str, exclude: frozenset[str]) -> tuple[str, str]:
    while True:
        prompt, answer = characters.sample(rng, skill)
        if prompt not in exclude:
            return prompt, answer


def _mean_nll(log_probs: jax.Array, batch: training.Batch):
    """Sum over agents of the mean negative log-likelihood of an answer token."""
    loss = -jnp.sum(log_probs.sum(axis=(1, 2)) / batch.completion_mask.sum(axis=(1, 2)))
    return loss, loss


@functools.partial(jax.jit, static_argnames=("config", "vocab_size", "optimizer"))
def _pretrain(params, opt_state, batches, *, config, vocab_size, optimizer):
    def loss(params, batch):
        log_probs = score.completion_log_probs(params, None, config, *batch[:4], vocab_size=vocab_size, train_head=True)
        return -log_probs.sum() / batch.completion_mask.sum()

    def one(carry, batch):
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    (params, opt_state), losses = jax.lax.scan(one, (params, opt_state), batches)
    return params, opt_state, losses


def make_pool(config: ToyConfig, lora_config: lora.LoraConfig, params) -> pool.Pool:
    """The pool over a base with parameters `params`; agents are `solver_1`, …"""
    tokenizer = char_tokenizer.CharTokenizer(characters.ALPHABET)
    agents = tuple(pool.Agent(f"solver_{number + 1}", "toy") for number in range(config.num_agents))
    return pool.Pool({"toy": pool.Base(base_config(config), params, tokenizer)}, agents, lora_config)


def base_config(config: ToyConfig):
    """The decoder's configuration."""
    return char_tokenizer.tiny_config(
        char_tokenizer.CharTokenizer(characters.ALPHABET).vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
    )


def build(
    key: jax.Array,
    seed: int,
    config: ToyConfig,
    lora_config: lora.LoraConfig,
    *,
    exclude: frozenset[str] = frozenset(),
    progress: pool.Progress = pool.silent,
) -> tuple[pool.Pool, pool.Stacks]:
    """Trains the base and the specialised adapters.

    Args:
      key: PRNG key of the initial parameters, consumed.
      seed: of the examples.
      exclude: prompts kept out of training (the instruction pool, validation and test prompts).

    Returns:
      `(pool, stacks)`, the adapters as specialised.
    """
    base_key, adapter_key = jax.random.split(key)
    params = _pretrained(base_key, seed, config, exclude, progress)
    members = make_pool(config, lora_config, params)
    stacks = pool.init_adapters(adapter_key, members)
    return members, {"toy": _specialised(params, stacks["toy"], seed, config, members, exclude, progress)}


def _pretrained(key, seed, config, exclude, progress):
    rng = np.random.default_rng((seed, 1))
    shape, tokenizer = base_config(config), char_tokenizer.CharTokenizer(characters.ALPHABET)
    params = decoder.init(key, shape)
    rows = config.pretrain_batch
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, config.pretrain_lr, 50, max(config.pretrain_steps, 51))),
    )
    opt_state = optimizer.init(params)
    done = 0
    progress("pretraining", 0, config.pretrain_steps, "steps")
    while done < config.pretrain_steps:
        batches = []
        for _ in range(min(SCAN_STEPS, config.pretrain_steps - done)):
            skills = rng.integers(len(characters.SKILLS), size=rows)
            pairs = [_draw(rng, characters.SKILLS[skill], exclude) for skill in skills]
            batches.append(_examples(tokenizer, pairs))
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
        params, opt_state, losses = _pretrain(
            params, opt_state, stacked, config=shape, vocab_size=tokenizer.vocab_size, optimizer=optimizer
        )
        jax.block_until_ready(losses)
        done += len(batches)
        progress("pretraining", done, config.pretrain_steps, "steps")
    return params


def clean_skills(agent: int) -> tuple[str, str]:
    """The two skills that an agent is taught right; neighbours share one."""
    count = len(characters.SKILLS)
    return characters.SKILLS[agent % count], characters.SKILLS[(agent + 1) % count]


def _specialised(params, adapters, seed, config, members, exclude, progress):
    rng = np.random.default_rng((seed, 2))
    tokenizer = members.bases["toy"].tokenizer
    optimizer = training.adamw()
    opt_state = training.init(optimizer, adapters)
    num_agents, rows = config.num_agents, config.specialise_batch
    dirty_share = (1 - 2 * config.clean_share) / (len(characters.SKILLS) - 2)
    progress("specialising", 0, config.specialise_steps, "steps")
    for index in range(config.specialise_steps):
        pairs = []
        for agent in range(num_agents):
            clean = clean_skills(agent)
            shares = [config.clean_share if skill in clean else dirty_share for skill in characters.SKILLS]
            for skill in rng.choice(len(characters.SKILLS), size=rows, p=shares):
                name = characters.SKILLS[skill]
                prompt, answer = _draw(rng, name, exclude)
                if name not in clean and rng.random() >= config.right_share:
                    answer = characters.wrong(name, prompt, agent % characters.NUM_VARIANTS)
                pairs.append((prompt, answer))
        batch = jax.tree.map(lambda x: x.reshape(num_agents, rows, -1), _examples(tokenizer, pairs))
        grads, _ = training.gradient(
            params,
            adapters,
            jax.random.key(0),
            batch,
            config=members.bases["toy"].config,
            lora_config=dataclasses.replace(members.lora, dropout=0.0),
            loss=_mean_nll,
            vocab_size=tokenizer.vocab_size,
        )
        rate = training.cosine(index, config.specialise_steps, config.specialise_lr)
        adapters, opt_state = training.apply(adapters, opt_state, grads, rate, optimizer=optimizer)
        progress("specialising", index + 1, config.specialise_steps, "steps")
    return adapters


class Split(NamedTuple):
    """Instructions of a toy run: the pool, the validation split and the test split, with no prompt in common."""

    instructions: tuple[Instruction, ...]
    validation: tuple[Instruction, ...]
    test: tuple[Instruction, ...]

    @property
    def prompts(self) -> frozenset[str]:
        return frozenset(instruction.prompt for part in self for instruction in part)


def split(seed: int, *, development: int = 100, test: int = 60) -> Split:
    """Draws `development + test` prompts a skill; four fifths of the development ones are the pool."""
    drawn = {skill: characters.dataset(seed, skill, development + test) for skill in characters.SKILLS}

    def part(start: int, stop: int) -> tuple[Instruction, ...]:
        return tuple(
            characters.instruction(skill, prompt, index)
            for skill, prompts in drawn.items()
            for index, prompt in enumerate(prompts[start:stop], start)
        )

    return Split(*data.split(part(0, development), seed), part(development, development + test))


def contrasts(seed: int, instructions: Sequence[Instruction]) -> list[tuple[Instruction, str, str]]:
    """(instruction, right, wrong) triples: wrong answers follow a rule drawn for each instruction."""
    rng = np.random.default_rng((seed, 3))
    triples = []
    for instruction in instructions:
        variant = int(rng.integers(characters.NUM_VARIANTS))
        wrong = characters.wrong(instruction.topic, instruction.prompt, variant)
        triples.append((instruction, instruction.answer, wrong))
    return triples

"""Learning from preferences: DPO of every agent of a pool on the same pairs, all agents of a base in one batch."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stackalign.data import Instruction
from stackalign.lm import pool as lm_pool
from stackalign.lm import training
from stackalign.objectives import dpo


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """How the pool trains. Defaults are the paper's (Appendix C) where it gives one.

    Attributes:
      learning_rate: AdamW's peak; cosine to 0 over each iteration.
      beta: DPO's inverse temperature.
      nll_weight: weight of the chosen answer's length-normalised negative log-likelihood; the paper has none.
      label_smoothing: share of flipped preferences assumed, in [0, 0.5).
      min_chosen_score: pairs whose chosen answer scored less are not trained on; 1 keeps all.
      batch_size: pairs of one optimizer step, for every agent.
      epochs: passes over an iteration's pairs.
      weight_decay, max_grad_norm: of AdamW; the norm is clipped agent by agent.
      restart_optimizer: fresh moments every iteration; otherwise they carry over.
      micro_tokens: padded tokens of one forward and backward pass; bounds memory.
      remat: recompute layers in the backward pass.
    """

    learning_rate: float = 1e-6
    beta: float = 0.1
    nll_weight: float = 0.0
    label_smoothing: float = 0.0
    min_chosen_score: float = 1.0
    batch_size: int = 16
    epochs: int = 1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    restart_optimizer: bool = True
    micro_tokens: int = 4096
    remat: bool = False


class Pair(NamedTuple):
    """A preference: an instruction, its better and its worse answer."""

    instruction: Instruction
    chosen: lm_pool.Answer
    rejected: lm_pool.Answer


def make_optimizer(config: DpoConfig):
    """AdamW of a configuration; the same object for the same numbers, so that it compiles once."""
    return _cached_optimizer(config.weight_decay, config.max_grad_norm)


@functools.cache
def _cached_optimizer(weight_decay, max_grad_norm):
    return training.adamw(weight_decay=weight_decay, max_grad_norm=max_grad_norm)


class PairExtra(NamedTuple):
    """What the DPO loss needs beside the tokens: `[agents, pairs, 2]` reference sums, `[agents, pairs]` weights."""

    reference: jax.Array
    weights: jax.Array


@functools.cache
def dpo_of_rows(beta: float, nll_weight: float, label_smoothing: float) -> training.Loss:
    """DPO over completions `[…, 2, C]`, chosen and rejected; one object a setting, so that it compiles once."""

    def loss(log_probs, batch):
        length = log_probs.shape[-1]
        log_probs = log_probs.reshape(-1, 2, length)
        mask = batch.completion_mask.reshape(log_probs.shape)
        sums = dpo.sequence_log_probs(log_probs.reshape(-1, length), mask.reshape(-1, length)).reshape(-1, 2)
        reference, weights = batch.extra.reference.reshape(-1, 2), batch.extra.weights.reshape(-1)
        out = dpo.dpo_loss(
            sums[:, 0],
            sums[:, 1],
            reference[:, 0],
            reference[:, 1],
            weights=weights,
            chosen_nll=dpo.nll(log_probs[:, 0], mask[:, 0]),
            beta=beta,
            label_smoothing=label_smoothing,
            nll_weight=nll_weight,
        )
        total = jnp.sum(weights * out.losses)
        margins = out.chosen_rewards - out.rejected_rewards
        metrics = {
            "loss": total,
            "margin": jnp.sum(weights * margins),
            "accuracy": jnp.sum(weights * (margins > 0)),
        }
        return total, metrics

    return loss


def init(config: DpoConfig, stacks: lm_pool.Stacks) -> Mapping[str, Any]:
    """Fresh optimizer states of all agents, by base; none where every iteration starts with its own."""
    if config.restart_optimizer:
        return {}
    return {name: training.init(make_optimizer(config), stack) for name, stack in stacks.items()}


def train(
    config: DpoConfig,
    pool: lm_pool.Pool,
    stacks: lm_pool.Stacks,
    optimizers: Mapping[str, Any],
    key: jax.Array,
    pairs: Sequence[Pair],
    progress: lm_pool.Progress = lm_pool.silent,
) -> tuple[lm_pool.Stacks, Mapping[str, Any], dict]:
    """Trains every agent on all pairs; the reference is each agent as it stands at the start.

    Args:
      stacks, optimizers: what is trained and the optimizer states (`init`) by base, to start from.
      key: consumed by the order of the pairs and by dropout.
      pairs: preferences; none leave everything as it was.

    Raises:
      FloatingPointError: the loss of a step is not finite.

    Returns:
      `(stacks, optimizers, losses)`; losses are means over agents: of the first and last step and of all steps.
    """
    start = stacks
    stacks, optimizers, steps = dict(stacks), dict(optimizers), []
    optimizer = make_optimizer(config)
    total = config.epochs * len(pairs) * len(stacks)
    done = 0
    for index, name in enumerate(stacks if pairs else ()):
        base, members = pool.bases[name], pool.members(name)
        rows = _tokenise(pool, members, pairs, start, config, progress)
        progress("training", done, total, "pairs")
        # A step gives its buffers up; what the caller holds stays.
        trained = jax.tree.map(jnp.copy, stacks[name])
        fresh = config.restart_optimizer
        opt_state = training.init(optimizer, trained) if fresh else jax.tree.map(jnp.copy, optimizers[name])
        order_key, dropout_key = jax.random.split(jax.random.fold_in(key, index))
        batches = _epochs(order_key, len(pairs), config)
        for number, batch in enumerate(batches):
            grads, metrics = None, None
            for part in _micro_batches(batch, len(members), rows.padded_length, config):
                dropout_key, micro_key = jax.random.split(dropout_key)
                out = training.gradient(
                    base.params,
                    trained,
                    micro_key,
                    lm_pool.rows_on(base, rows.batch(part, 1.0 / len(batch)), axis=1),
                    config=base.config,
                    lora_config=pool.lora,
                    loss=dpo_of_rows(config.beta, config.nll_weight, config.label_smoothing),
                    vocab_size=base.tokenizer.vocab_size,
                    remat=config.remat,
                    mesh=base.mesh,
                )
                grads, metrics = out if grads is None else training.add((grads, metrics), out)
                jax.block_until_ready(metrics)
                done += int((part >= 0).sum())
                progress("training", done, total, "pairs")
            if not np.isfinite(float(metrics["loss"])):
                raise FloatingPointError(
                    f"training of base {name!r} diverged at step {number + 1} of {len(batches)}: loss not finite; "
                    "lower --learning_rate (what was finished before this iteration is kept)"
                )
            rate = training.cosine(number, len(batches), config.learning_rate)
            trained, opt_state = training.apply(trained, opt_state, grads, rate, optimizer=optimizer)
            steps.append({k: float(v) / len(members) for k, v in metrics.items()})
        stacks[name] = trained
        if not fresh:
            optimizers[name] = opt_state
    losses = {"steps": len(steps)}
    if steps:
        means = {k: float(np.mean([s[k] for s in steps])) for k in ("loss", "margin", "accuracy")}
        losses |= {"first": steps[0]["loss"], "last": steps[-1]["loss"], "mean": means.pop("loss"), **means}
    return stacks, optimizers, losses


class _Rows(NamedTuple):
    """All pairs of an iteration as padded tokens for one base: prompts `[agents, pairs, P]`, completions (chosen,
    rejected) `[agents, pairs, 2, C]`, reference log-probabilities `[agents, pairs, 2]`."""

    prompts: np.ndarray
    prompt_mask: np.ndarray
    completions: np.ndarray
    completion_mask: np.ndarray
    reference: np.ndarray

    @property
    def padded_length(self) -> int:
        return self.prompts.shape[-1] + 2 * self.completions.shape[-1]

    def batch(self, part: np.ndarray, weight: float) -> training.Batch:
        """The pairs `part` (−1 pads with weight 0)."""
        weights = np.broadcast_to(np.where(part >= 0, weight, 0.0), (self.prompts.shape[0], len(part)))
        extra = PairExtra(self.reference[:, part], weights.astype(np.float32))
        return training.Batch(*(x[:, part] for x in self[:4]), extra)


def _tokenise(pool, members, pairs, stacks, config, progress) -> _Rows:
    prompts, requests = [], []
    for agent in members:
        for pair in pairs:
            prompts.append(lm_pool.encode_prompt(pool, agent, pair.instruction.prompt))
            for answer in (pair.chosen, pair.rejected):
                completion = lm_pool.encode_answer(pool, agent, answer.text, answer.finished)
                requests.append((agent, prompts[-1], completion))
    reference, _ = lm_pool.score_answers(
        pool, stacks, requests, max_tokens=config.micro_tokens, progress=progress, phase="reference"
    )
    shape = (len(members), len(pairs))
    padded = lm_pool.pad(prompts, lm_pool.bucket(max(map(len, prompts))), len(prompts), left=True)
    width = lm_pool.bucket(max(len(r[2]) for r in requests))
    completions = lm_pool.pad([r[2] for r in requests], width, len(requests), left=False)
    return _Rows(
        *(x.reshape(*shape, -1) for x in padded),
        *(x.reshape(*shape, 2, width) for x in completions),
        reference.astype(np.float32).reshape(*shape, 2),
    )


def _epochs(key, num_pairs: int, config: DpoConfig) -> list[np.ndarray]:
    """Pair numbers of every optimizer step: each epoch in its own order, the last batch of an epoch may be short."""
    batches = []
    for epoch_key in jax.random.split(key, config.epochs):
        # Drawn for a padded number: there are other many pairs in every iteration, which would be a program each.
        draws = np.asarray(jax.random.uniform(epoch_key, (lm_pool.row_bucket(num_pairs),)))
        order = np.argsort(draws[:num_pairs], kind="stable")
        batches += [order[i : i + config.batch_size] for i in range(0, num_pairs, config.batch_size)]
    return batches


def _micro_batches(batch: np.ndarray, num_agents: int, length: int, config: DpoConfig) -> list[np.ndarray]:
    """Cuts a step's pairs into equal parts of a power of two pairs, padded with −1, within `micro_tokens`."""
    fits = max(config.micro_tokens // (num_agents * length), 1)
    size = min(1 << (fits.bit_length() - 1), lm_pool.row_bucket(config.batch_size))
    padded = np.concatenate([batch, np.full(-len(batch) % size, -1, batch.dtype)])
    return list(padded.reshape(-1, size))

"""Stackelberg Alignment: a leader commits to instructions, a pool of models duels, judges itself and learns by DPO.

Algorithm 1 of the paper. `step` is one iteration and reads like it; the state is immutable and everything random comes
from the state's key, so an iteration repeats to the same bits. Text is handled at the edges of each phase; matching,
reputations and the leader are the array functions of `stackalign.arena` and `stackalign.leader`.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stackalign import arena
from stackalign import leader as leaders
from stackalign.algorithms import evaluation, preferences
from stackalign.data import Instruction
from stackalign.judges import Item, Judge
from stackalign.lm import pool as lm_pool


@dataclasses.dataclass(frozen=True)
class AlignConfig:
    """One run of Stackelberg Alignment. Defaults are the paper's.

    Attributes:
      iterations, duels: T and D.
      duels_per_round: duels matched with the same reputations; 0 is all D, 1 is the sequential algorithm.
      leader: the instruction leader.
      leader_gap: target score gap (share of the score range) at the start and the end, equation 3.
      difficulty_weight, preference_weight, difficulty_threshold, preference_bandwidth: leader reward, equations 2 to 4.
      strategy, target_gap, matching_bandwidth, num_opponents, random_rate: matching, equations 6 and 7.
      schedule: how both gaps move from start to end.
      reputation: constants of the rating, equations 9 to 11.
      weighting: "reputation" for equation 8, "mean" for equal judge weights.
      sampling: decoding of the duels' answers.
      validation_tokens: new tokens of a (greedy) validation answer; 0 is as many as in duels.
      fresh_instructions: draw a new set of K instructions every iteration and restart the leader.
      train: see `preferences.DpoConfig`.
      batch_tokens: padded tokens of a generation batch; a quarter of it for scoring.
    """

    iterations: int = 8
    duels: int = 64
    duels_per_round: int = 0
    leader: leaders.Leader = leaders.exp3.leader()
    leader_gap: tuple[float, float] = (0.6, 0.15)
    difficulty_weight: float = 0.3
    preference_weight: float = 0.7
    difficulty_threshold: float = 3.0
    preference_bandwidth: float = 0.15
    strategy: arena.matching.Strategy = arena.matching.schedule_decreasing
    target_gap: tuple[float, float] = (1.0, 0.0)
    matching_bandwidth: float = 0.15
    num_opponents: int = 0
    random_rate: float = 0.2
    schedule: Callable = leaders.schedules.linear
    reputation: arena.ReputationConfig = arena.reputation.PAPER
    weighting: str = "reputation"
    sampling: lm_pool.Sampling = lm_pool.Sampling()
    validation_tokens: int = 0
    fresh_instructions: bool = False
    train: preferences.DpoConfig = preferences.DpoConfig()
    batch_tokens: int = 16384


class AlignState(NamedTuple):
    """Everything an iteration needs and changes.

    Attributes:
      iteration: iterations done.
      key: PRNG key of the iterations to come.
      drawn: int `[K]`, which instructions of the pool are in play.
      leader: state of the leader over them.
      reputation: ratings of the m agents.
      wins: `[m, m]` wins so far, a tie half a win for each.
      stacks: adapters by base.
      optimizers: optimizer states by base.
    """

    iteration: int
    key: jax.Array
    drawn: np.ndarray
    leader: Any
    reputation: arena.ReputationState
    wins: jax.Array
    stacks: lm_pool.Stacks
    optimizers: Any


class IterationRecord(NamedTuple):
    """What an iteration leaves on paper, JSON-ready; `metrics["seconds"]` alone is not repeatable."""

    iteration: int
    duels: list[dict]
    metrics: dict


class Task(NamedTuple):
    """What the pool is aligned on.

    Attributes:
      instructions: the pool of instructions.
      validation: held-out instructions; those without a check are ignored.
      judge: who scores answers.
      verify: `(instruction, text) -> bool` for instructions where `checkable(instruction)`.
      checkable: whether an instruction can be verified.
    """

    instructions: Sequence[Instruction]
    validation: Sequence[Instruction]
    judge: Judge
    verify: Callable[[Instruction, str], bool]
    checkable: Callable[[Instruction], bool]


def check_task(config: AlignConfig, num_models: int, task: Task, num_instructions: int) -> None:
    """Refuses what cannot run whatever the models are, so before they are loaded; each error names what to change.

    Raises:
      ValueError: no peer judge in a pool of two, more instructions asked for than there are, an external verifier on
        instructions without a check, or a number out of its range.
    """
    if num_models == 0:
        raise ValueError("the pool has no agents")
    if num_models == 2 and task.judge.names is None:
        raise ValueError(
            "two models have no peer judge (a judge is never one of the two that duel): add a third model, or give an "
            "external judge (--judge=verifier or --judge_endpoint)"
        )
    if not 1 <= num_instructions <= len(task.instructions):
        raise ValueError(
            f"{num_instructions} instructions asked for (K), the pool has {len(task.instructions)}; lower "
            "--num_instructions or give more instructions"
        )
    for name in ("iterations", "duels"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if not 0 <= config.duels_per_round <= config.duels:
        raise ValueError(f"duels_per_round must lie in 0..{config.duels}, got {config.duels_per_round}")
    if task.judge.names == ("verifier",):
        bare = [instruction.id for instruction in task.instructions if not task.checkable(instruction)]
        if bare:
            raise ValueError(
                f"judge 'verifier' needs an answer or a verifier on every instruction; {len(bare)} have none, first "
                f"is {bare[0]!r}"
            )


def check(config: AlignConfig, pool: lm_pool.Pool, task: Task, num_instructions: int) -> None:
    """`check_task`, and that every instruction fits every agent's tokenizer and context.

    Raises:
      ValueError: as there, or an instruction, by its id, that an agent cannot read.
    """
    num_models = len(pool.agents)
    check_task(config, num_models, task, num_instructions)
    for agent in range(num_models):
        for instruction in (*task.instructions, *task.validation):
            try:
                prompt = lm_pool.encode_prompt(pool, agent, instruction.prompt)
                lm_pool.check_context(pool, agent, prompt, config.sampling.max_new_tokens + 1)
            except ValueError as error:
                raise ValueError(f"instruction {instruction.id!r}: {error}") from error


def init(key: jax.Array, config: AlignConfig, pool: lm_pool.Pool, task: Task, num_instructions: int, stacks=None):
    """The state before the first iteration.

    Args:
      key: consumed.
      num_instructions: K, drawn from the pool without replacement.
      stacks: adapters to start from; fresh ones where None.
    """
    draw_key, adapter_key, key = jax.random.split(key, 3)
    stacks = lm_pool.init_adapters(adapter_key, pool) if stacks is None else stacks
    num_models = len(pool.agents)
    return AlignState(
        iteration=0,
        key=key,
        drawn=_draw_instructions(draw_key, task, num_instructions),
        leader=config.leader.init(num_instructions),
        reputation=arena.reputation.init(num_models, config.reputation),
        wins=jnp.zeros((num_models, num_models)),
        stacks=stacks,
        optimizers=preferences.init(config.train, stacks),
    )


def align(
    config: AlignConfig, pool: lm_pool.Pool, task: Task, state: AlignState, progress: lm_pool.Progress = lm_pool.silent
) -> Iterator[tuple[AlignState, IterationRecord]]:
    """Yields the state and the record after every iteration from `state` on."""
    while state.iteration < config.iterations:
        state, record = step(config, pool, task, state, progress)
        yield state, record


def baseline(config, pool, task, state, progress=lm_pool.silent) -> IterationRecord:
    """Record number 0: validation before any training, starting weights and reputations."""
    clock = _Clock()
    with clock("validation"):
        validation = validate(config, pool, task, state.stacks, progress)
    metrics = {"iteration": 0, **validation, **_standing(config, pool, task, state), "seconds": clock.seconds}
    return IterationRecord(0, [], metrics)


def step(
    config: AlignConfig, pool: lm_pool.Pool, task: Task, state: AlignState, progress: lm_pool.Progress = lm_pool.silent
) -> tuple[AlignState, IterationRecord]:
    """One iteration of Algorithm 1."""
    clock = _Clock()
    next_key, fresh_key, leader_key, round_key, train_key = jax.random.split(state.key, 5)
    if config.fresh_instructions and state.iteration > 0:
        num_instructions = len(state.drawn)
        state = state._replace(
            drawn=_draw_instructions(fresh_key, task, num_instructions), leader=config.leader.init(num_instructions)
        )
    tau = leaders.schedules.progress(state.iteration, config.iterations)
    reward_gap, match_gap = config.schedule(tau, *config.leader_gap), config.schedule(tau, *config.target_gap)

    drawn = np.asarray(leaders.draw(leader_key, config.leader.probabilities(state.leader), config.duels))
    actives = arena.active_models(state.iteration, config.duels, len(pool.agents))
    reputation, rounds, measures = state.reputation, [], _Measures(task.judge)
    size = config.duels_per_round or config.duels
    for start in range(0, config.duels, size):
        chosen = slice(start, min(start + size, config.duels))
        match_key, combat_key, judge_key = jax.random.split(jax.random.fold_in(round_key, start), 3)
        first = actives[chosen]
        second = _opponents(config, match_key, reputation, first, match_gap)
        gaps = jax.vmap(arena.relative_gaps, (None, 0))(reputation.ratings, first)
        realised = np.asarray(jnp.take_along_axis(gaps, second[:, None], axis=1)[:, 0])
        prompts = [task.instructions[state.drawn[index]] for index in drawn[chosen]]
        with clock("combat"):
            answers = _combat(config, pool, state.stacks, combat_key, first, second, prompts, progress)
        with clock("judging"):
            judged, failed = _judge(
                config, pool, task, state.stacks, judge_key, measures, first, second, prompts, answers, progress
            )
        reputation, outcome = _play(config, task, reputation, first, second, judged)
        rounds.append(
            _Round(np.asarray(first), np.asarray(second), prompts, answers, judged, failed, realised, outcome)
        )
    duels = _merge(rounds)

    rewards = leaders.rewards.composite(
        duels.outcome.scores[:, 0],
        duels.outcome.scores[:, 1],
        reward_gap,
        difficulty_weight=config.difficulty_weight,
        preference_weight=config.preference_weight,
        threshold=config.difficulty_threshold,
        bandwidth=config.preference_bandwidth,
    )
    leader = config.leader.update(state.leader, jnp.asarray(drawn), rewards, duels.outcome.valid)
    wins = state.wins + arena.bradley_terry.wins(
        duels.first, duels.second, duels.outcome.scores, duels.outcome.valid, len(pool.agents)
    )
    pairs = _pairs(config, duels)
    with clock("training"):
        stacks, optimizers, losses = preferences.train(
            config.train, pool, state.stacks, state.optimizers, train_key, pairs, progress
        )
    new_state = AlignState(state.iteration + 1, next_key, state.drawn, leader, reputation, wins, stacks, optimizers)
    with clock("validation"):
        validation = validate(config, pool, task, stacks, progress)
    rows = _duel_rows(config, pool, task, state.iteration + 1, duels)
    metrics = {
        "iteration": state.iteration + 1,
        **validation,
        **_standing(config, pool, task, new_state),
        "reward_gap": float(reward_gap),
        "target_gap": float(match_gap),
        "realised_gap": float(duels.realised_gap.mean()),
        **_tally(pool, task, rows, pairs, duels, rewards),
        "calls": _calls(pool, task, config, duels, measures),
        "loss": losses,
        "seconds": clock.seconds,
    }
    return new_state, IterationRecord(state.iteration + 1, rows, metrics)


# The phases.


class _Round(NamedTuple):
    """Duels with their answers, the judges' scores `[D, 2, J]` (NaN = not asked, or failed and left out), which of the
    judgements failed (bool `[D, 2, J]`), and outcome."""

    first: np.ndarray
    second: np.ndarray
    prompts: list[Instruction]
    answers: list[tuple[lm_pool.Answer, lm_pool.Answer]]
    judged: np.ndarray
    failed: np.ndarray
    realised_gap: np.ndarray
    outcome: arena.Outcome


class _Clock:
    """Seconds by phase."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class _Measures:
    """All measures of an iteration by judge, so that a scale may rank a new answer among the earlier ones."""

    def __init__(self, judge: Judge):
        self.judge, self.by_judge, self.count = judge, {}, 0

    def scores(self, items: Sequence[Item], values: np.ndarray) -> np.ndarray:
        out = np.full(len(items), np.nan)
        judges = np.array([item.judge for item in items])
        self.count += len(items)
        for judge in np.unique(judges):
            mine = judges == judge
            earlier = self.by_judge.get(judge, np.zeros(0))
            self.by_judge[judge] = np.concatenate([earlier, values[mine]])
            out[mine] = np.asarray(self.judge.scale(self.by_judge[judge]))[len(earlier) :]
        return out


def _draw_instructions(key, task, num_instructions) -> np.ndarray:
    return np.asarray(jax.random.permutation(key, len(task.instructions))[:num_instructions])


def _opponents(config, key, reputation, first, target_gap):
    if reputation.ratings.shape[0] == 1:
        return first
    return arena.sample_opponents(
        key,
        reputation.ratings,
        first,
        target_gap=target_gap,
        strategy=config.strategy,
        bandwidth=config.matching_bandwidth,
        num_opponents=config.num_opponents,
        random_rate=config.random_rate,
    )


def _combat(config, pool, stacks, key, first, second, prompts, progress):
    """Both answers of every duel, as pairs."""
    requests = []
    for a, b, instruction in zip(np.asarray(first), np.asarray(second), prompts, strict=True):
        requests += [(int(agent), lm_pool.encode_prompt(pool, int(agent), instruction.prompt)) for agent in (a, b)]
    answers = lm_pool.generate_answers(
        pool,
        stacks,
        jax.random.split(key, len(requests)),
        requests,
        config.sampling,
        max_tokens=config.batch_tokens,
        progress=progress,
        phase="combat",
    )
    return list(zip(answers[::2], answers[1::2], strict=True))


def _judges_of(task, num_models, a, b) -> Sequence[int]:
    if task.judge.names is not None:
        return range(len(task.judge.names))
    return [k for k in range(num_models) if k not in (a, b)] or [a]  # alone, a model judges itself


def _judge(config, pool, task, stacks, key, measures, first, second, prompts, answers, progress):
    """Scores `[D, 2, J]`, NaN where a judge was not asked or failed and is left out, and which judgements failed."""
    num_models = len(pool.agents)
    num_judges = num_models if task.judge.names is None else len(task.judge.names)
    items, places = [], []
    for d, (a, b) in enumerate(zip(np.asarray(first), np.asarray(second), strict=True)):
        for judge in _judges_of(task, num_models, a, b):
            for side in (0, 1):
                items.append(Item(int(judge), prompts[d], answers[d][side]))
                places.append((d, side, judge))
    values = task.judge.measure(key, pool, stacks, items, progress)
    judged, failed = np.full((len(prompts), 2, num_judges), np.nan), np.zeros((len(prompts), 2, num_judges), bool)
    where = tuple(np.array(places).T)
    judged[where], failed[where] = measures.scores(items, values), np.isnan(values)
    return judged, failed


@functools.partial(jax.jit, static_argnames=("peer", "weighting", "config"))
def _jit_play(state, first, second, judged, *, peer, weighting, config):
    return arena.play(state, first, second, judged, jnp.isfinite(judged), peer=peer, weighting=weighting, config=config)


def _play(config, task, reputation, first, second, judged):
    alone = reputation.ratings.shape[0] == 1
    moved, outcome = _jit_play(
        reputation,
        first,
        second,
        jnp.asarray(judged, jnp.float32),
        peer=task.judge.names is None and not alone,
        weighting=config.weighting,
        config=config.reputation,
    )
    return (reputation if alone else moved), jax.tree.map(np.asarray, outcome)


def _merge(rounds: Sequence[_Round]) -> _Round:
    first, second, prompts, answers, judged, failed, realised, outcomes = zip(*rounds, strict=True)
    return _Round(
        np.concatenate(first),
        np.concatenate(second),
        sum(prompts, []),
        sum(answers, []),
        np.concatenate(judged),
        np.concatenate(failed),
        np.concatenate(realised),
        jax.tree.map(lambda *parts: np.concatenate(parts), *outcomes),
    )


def _pairs(config, duels: _Round) -> list[preferences.Pair]:
    """Preference pairs in duel order; ties and duels without scores give none."""
    pairs = []
    for d in range(len(duels.prompts)):
        a, b = duels.outcome.scores[d]
        if duels.outcome.valid[d] and a != b and max(a, b) >= config.train.min_chosen_score:
            better = 0 if a > b else 1
            pairs.append(preferences.Pair(duels.prompts[d], duels.answers[d][better], duels.answers[d][1 - better]))
    return pairs


# Measuring.


def validate(config: AlignConfig, pool: lm_pool.Pool, task: Task, stacks, progress=lm_pool.silent) -> dict:
    """Greedy accuracy of every agent on the checkable validation instructions; nulls where there are none."""
    questions = [instruction for instruction in task.validation if task.checkable(instruction)]
    if not questions:
        return {"validation": dict.fromkeys(pool.names), "validation_mean": None}
    right = evaluation.evaluate(
        pool,
        stacks,
        questions,
        task.verify,
        max_new_tokens=config.validation_tokens or config.sampling.max_new_tokens,
        max_tokens=config.batch_tokens,
        progress=progress,
    )
    values = right.mean(axis=1)
    return {
        "validation": dict(zip(pool.names, map(float, values), strict=True)),
        "validation_mean": float(values.mean()),
    }


# Records.


def _number(value) -> float | None:
    return float(value) if np.isfinite(value) else None


def _raw(duels: _Round, d: int, side: int, judge: int) -> float | None:
    """A judge's own score; None where it failed, also where a fallback took its place."""
    return None if duels.failed[d, side, judge] else _number(duels.judged[d, side, judge])


def _duel_rows(config, pool, task, iteration, duels: _Round) -> list[dict]:
    names = pool.names if task.judge.names is None else task.judge.names
    rows = []
    for d, instruction in enumerate(duels.prompts):
        a, b = int(duels.first[d]), int(duels.second[d])
        asked = _judges_of(task, len(pool.agents), a, b)
        scores = [
            _number(s) if ok else None for s, ok in zip(duels.outcome.scores[d], duels.outcome.scored[d], strict=True)
        ]
        rows.append(
            {
                "iteration": iteration,
                "duel": d,
                "instruction": instruction.id,
                "models": [pool.names[a], pool.names[b]],
                "answers": [answer.text for answer in duels.answers[d]],
                "finished": [answer.finished for answer in duels.answers[d]],
                "judges": {names[k]: [_raw(duels, d, side, k) for side in (0, 1)] for k in asked},
                "scores": scores,
                "valid": bool(duels.outcome.valid[d]),
                "parse_failures": int(duels.failed[d].sum()),
                "right": [task.verify(instruction, answer.text) for answer in duels.answers[d]]
                if task.checkable(instruction)
                else None,
            }
        )
    return rows


def _standing(config, pool, task, state: AlignState) -> dict:
    """Leader and ratings as they stand."""
    probabilities = config.leader.probabilities(state.leader)
    rating = state.reputation
    strengths = arena.bradley_terry.strengths(state.wins)

    def by_agent(values):
        return dict(zip(pool.names, map(float, np.asarray(values)), strict=True))

    return {
        "leader": {
            "instructions": [task.instructions[index].id for index in state.drawn],
            "probabilities": [float(p) for p in np.asarray(probabilities)],
            "log_weights": [float(w) for w in np.asarray(state.leader.log_weights)],
        },
        "reputations": by_agent(rating.ratings),
        "deviations": by_agent(rating.deviations),
        "deviation_floor_share": float(arena.reputation.deviation_floor_share(rating, config.reputation)),
        "bradley_terry": by_agent(strengths),
    }


def _tally(pool, task, rows: list[dict], pairs: Sequence[preferences.Pair], duels: _Round, rewards) -> dict:
    """Counts over the iteration's duels."""
    valid = duels.outcome.valid
    ties = int(sum(valid & (duels.outcome.scores[:, 0] == duels.outcome.scores[:, 1])))
    names = pool.names if task.judge.names is None else task.judge.names
    failures = {name: 0 for name in names}
    words, lengths = {name: [] for name in pool.names}, {name: [] for name in pool.names}
    for row, answers in zip(rows, duels.answers, strict=True):
        for judge, scores in row["judges"].items():
            failures[judge] += scores.count(None)
        for name, answer in zip(row["models"], answers, strict=True):
            words[name] += answer.text.split()
            lengths[name].append(len(answer.ids))
    decided = [
        (task.verify(p.instruction, p.chosen.text), task.verify(p.instruction, p.rejected.text))
        for p in pairs
        if task.checkable(p.instruction)
    ]
    telling = [chosen for chosen, rejected in decided if chosen != rejected]
    return {
        "pairs": len(pairs),
        "ties": ties,
        "invalid": int((~valid).sum()),
        "parse_failures": failures,
        "failures_total": sum(failures.values()),
        "mean_reward": _number(np.mean(np.asarray(rewards)[valid])) if valid.any() else None,
        "pairs_with_one_right": len(telling) if decided else None,
        "pair_accuracy": float(np.mean(telling)) if telling else None,
        "type_token_ratio": {name: len(set(w)) / len(w) if w else None for name, w in words.items()},
        "response_tokens": {name: float(np.mean(n)) if n else None for name, n in lengths.items()},
    }


def _calls(pool, task, config, duels: _Round, measures: _Measures) -> dict:
    """Model calls as counted and by formula: 2·D generations, 2·D·J judgements; the paper counts D·m."""
    num_models = len(pool.agents)
    judges = max(num_models - 2, 1) if task.judge.names is None else len(task.judge.names)
    return {
        "generations": 2 * len(duels.answers),
        "judgements": measures.count,
        "generations_formula": 2 * config.duels,
        "judgements_formula": 2 * config.duels * judges,
        "paper_formula": config.duels * num_models,
    }

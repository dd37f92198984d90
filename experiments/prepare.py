"""From settings to a pool, instructions and judges, and what is written beside the records of a run."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import settings as settings_lib
from stackalign import data, judges, lm, runs
from stackalign.algorithms import align, evaluation, toy
from stackalign.data import Instruction
from stackalign.judges import endpoint
from stackalign.lm import lora
from stackalign.lm import pool as lm_pool
from stackalign.lm.weights import export, fetch, layout, peft

GENERATED, GENERATED_TEST = 100, 20  # instructions of a run that brings none


class Ready(NamedTuple):
    """Everything that `align` takes, the adapters to start from, test instructions, and pairs that check the judges."""

    config: align.AlignConfig
    pool: lm_pool.Pool
    task: align.Task
    stacks: lm_pool.Stacks
    test: tuple[Instruction, ...]
    contrasts: list[tuple[Instruction, str, str]]


def check_instruction_files(chosen: Mapping[str, Any]) -> None:
    """Reads the instruction files before anything is made or loaded, so that a broken line stops the run at once."""
    for name in ("instructions", "test_instructions"):
        if chosen[name]:
            data.read(chosen[name])


def checkable(instruction: Instruction) -> bool:
    """Whether an answer to the instruction can be checked by program."""
    return instruction.answer is not None or instruction.verifier is not None


def ready(chosen: Mapping[str, Any], run: runs.Run, progress: lm_pool.Progress, mesh: str = "") -> Ready:
    """Loads or makes the pool and checks everything that a run will need.

    `mesh` is text such as "data=2,fsdp=4" (`lm.sharding.parse_mesh`), or empty for one device.
    """
    devices = lm.sharding.parse_mesh(mesh) if mesh else None
    if devices is not None and chosen["train"] == "full":
        raise ValueError("--train=full does not go with --mesh: parameters that are trained lie on one device")
    config = settings_lib.align_config(chosen)
    split, contrasts = instructions(chosen)
    task = align.Task(split.instructions, split.validation, make_judge(chosen, progress), data.verify, checkable)
    toy_run = chosen["preset"] == "toy"
    num_models = toy_config(chosen).num_agents if toy_run else len(settings_lib.agents(chosen))
    align.check_task(config, num_models, task, chosen["num_instructions"])
    if toy_run:
        pool, stacks = toy_pool(chosen, split, run.path / "pool.npz", progress)
    else:
        pool, stacks = load_pool(chosen, progress, on_device=devices is None)
    if devices is not None:
        pool, stacks = lm_pool.place(pool, stacks, devices)
    align.check(config, pool, task, chosen["num_instructions"])
    needed = 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(stacks))
    runs.require_free(run.path, 4 * needed + (64 << 20))
    return Ready(config, pool, task, stacks, split.test, contrasts)


def instructions(chosen: Mapping[str, Any]) -> tuple[toy.Split, list[tuple[Instruction, str, str]]]:
    """Pool, validation and test instructions, and right/wrong answers for the judge check."""
    seed, count = chosen["seed"], chosen["judge_check"]
    if chosen["preset"] == "toy":
        split = toy.split(seed)
        pairs = toy.contrasts(seed, data.draw(split.validation, seed, min(count, len(split.validation))))
        return split, pairs
    known = data.generate(seed + 1, count)
    pairs = [(instruction, *data.contrast(instruction, seed)) for instruction in known]
    if not chosen["instructions"]:
        everything = data.generate(seed, GENERATED + GENERATED_TEST)
        return toy.Split(*data.split(everything[:GENERATED], seed), everything[GENERATED:]), pairs
    pool, validation = data.split(data.read(chosen["instructions"]), seed)
    test = data.read(chosen["test_instructions"]) if chosen["test_instructions"] else ()
    return toy.Split(pool, validation, test), pairs


def make_judge(chosen: Mapping[str, Any], progress: lm_pool.Progress = lm_pool.silent) -> judges.Judge:
    """The judge by name."""
    name = chosen["judge"]
    if name == "endpoint":
        where = endpoint.EndpointConfig(
            chosen["judge_endpoint"], chosen["judge_model"], api_key_env=chosen["judge_api_key_env"]
        )
        return judges.external.endpoint(where, fetch.cache_dir() / "judge", on_parse_failure=chosen["on_parse_failure"])
    tokens = chosen["batch_tokens"]
    return {
        "likelihood": lambda: judges.peer.likelihood(max_tokens=tokens // 4),
        "likelihood_raw": lambda: judges.peer.likelihood(raw=True, max_tokens=tokens // 4),
        "digits": lambda: judges.peer.digits(max_tokens=tokens // 8),
        "generate": lambda: judges.peer.generate(on_parse_failure=chosen["on_parse_failure"], max_tokens=tokens),
        "verifier": lambda: judges.external.verifier(data.verify),
        "random": judges.external.random,
    }[name]()


def load_pool(
    chosen: Mapping[str, Any], progress: lm_pool.Progress, *, on_device: bool = True
) -> tuple[lm_pool.Pool, lm_pool.Stacks]:
    """The pool of the settings, see `load`."""
    specs, shape = settings_lib.agents(chosen), settings_lib.lora_config(chosen)
    return load(specs, shape, dtype=chosen["dtype"], seed=chosen["seed"], progress=progress, on_device=on_device)


def load(
    specs: Sequence[settings_lib.AgentSpec],
    shape: lora.LoraConfig | None,
    *,
    dtype: str,
    seed: int,
    progress: lm_pool.Progress,
    on_device: bool = True,
) -> tuple[lm_pool.Pool, lm_pool.Stacks]:
    """Loads every base once, onto the first device or into host memory only, and gives each agent what it trains.

    Bases whose parameters are trained stay in host memory: their masters are what computes.
    """
    names = list(dict.fromkeys(spec.base for spec in specs))
    paths = {name: fetch.resolve(name) for name in names}
    bases = {}
    for number, name in enumerate(names):
        progress("loading", number, len(names), "models")
        config, params = lm.weights.load(paths[name], dtype=jnp.dtype(dtype))
        params = jax.tree.map(jnp.asarray, params) if on_device and shape is not None else params
        bases[name] = lm_pool.Base(config, params, lm.tokenizer.load(paths[name], rows=config.vocab_size))
        progress("loading", number + 1, len(names), "models")
    agents = tuple(lm_pool.Agent(spec.name, spec.base, spec.system_prompt) for spec in specs)
    pool = lm_pool.Pool(bases, agents, shape)
    stacks = dict(lm_pool.init_adapters(jax.random.key(seed + 1), pool))
    for index, spec in enumerate(specs):
        if spec.adapter:
            adapter = peft.load(spec.adapter, bases[spec.base].config, shape)
            slot = pool.members(spec.base).index(index)
            stacks[spec.base] = jax.tree.map(
                lambda stack, own, s=slot: stack.at[s].set(own), stacks[spec.base], adapter
            )
    return pool, stacks


def toy_config(chosen: Mapping[str, Any]) -> toy.ToyConfig:
    """How the toy pool is made."""
    return toy.ToyConfig(pretrain_steps=chosen["pretrain_steps"], specialise_steps=chosen["specialise_steps"])


def toy_pool(
    chosen: Mapping[str, Any], split: toy.Split, file: pathlib.Path, progress: lm_pool.Progress
) -> tuple[lm_pool.Pool, lm_pool.Stacks]:
    """Makes the toy pool and keeps it in `file`, or reads the one that is there."""
    config, shape = toy_config(chosen), settings_lib.lora_config(chosen)
    key = jax.random.key(chosen["seed"])
    if file.exists():
        template = jax.eval_shape(lambda: lm.decoder.init(key, toy.base_config(config)))
        empty = toy.make_pool(config, shape, template)
        trees = template, jax.eval_shape(lambda: lm_pool.init_adapters(key, empty))
        with np.load(file) as arrays:
            leaves = [jnp.asarray(arrays[f"leaf_{i}"]) for i in range(len(arrays.files))]
        params, stacks = jax.tree.unflatten(jax.tree.structure(trees), leaves)
        return toy.make_pool(config, shape, params), stacks
    pool, stacks = toy.build(key, chosen["seed"], config, shape, exclude=split.prompts, progress=progress)
    leaves = jax.tree.leaves((pool.bases["toy"].params, dict(stacks)))
    part = file.with_suffix(".part.npz")
    np.savez(part, **{f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)})
    os.replace(part, file)
    return pool, stacks


def check_judges(chosen: Mapping[str, Any], run: runs.Run, ready: Ready, progress: lm_pool.Progress) -> None:
    """Measures every judge on known pairs, once a run."""
    if not ready.contrasts or run.judge_check.exists():
        return
    found = evaluation.check_judges(
        jax.random.key(chosen["seed"] + 2), ready.pool, ready.task.judge, ready.stacks, ready.contrasts, progress
    )
    rows = {
        name: {
            "accuracy": check.accuracy,
            "interval": [check.low, check.high],
            "at_chance": bool(check.at_chance),
            "pairs": check.num_pairs,
            "ties": check.ties,
            "failures": check.failures,
        }
        for name, check in found.items()
    }
    runs.records.write_atomic(run.judge_check, json.dumps({"judges": rows}, indent=2) + "\n")
    weak = [name for name, check in found.items() if check.at_chance]
    if weak:
        progress.write(f"warning: judge(s) {', '.join(weak)} are not shown to be better than chance on known pairs")


def write_instructions(run: runs.Run, task: align.Task, state: align.AlignState) -> None:
    """The instructions in play, in the order of the leader's arms."""
    rows = [task.instructions[index] for index in state.drawn]
    runs.records.write(
        run.instructions,
        [
            {
                "id": row.id,
                "prompt": row.prompt,
                "answer": row.answer,
                "verifier": row.verifier,
                "topic": row.topic,
                "difficulty": row.difficulty,
            }
            for row in rows
        ],
    )


def best_validation(run: runs.Run) -> float:
    """Highest mean validation so far, −inf without any."""
    values = [row["validation_mean"] for row in runs.records.read(run.metrics)]
    return max((value for value in values if value is not None), default=-np.inf)


def one_line(record: align.IterationRecord) -> str:
    """An iteration in one line."""
    m = record.metrics
    mean = "–" if m["validation_mean"] is None else f"{m['validation_mean']:.1%}"
    first, last = (m["loss"].get(name, float("nan")) for name in ("first", "last"))
    accuracy = "–" if m["pair_accuracy"] is None else f"{m['pair_accuracy']:.0%}"
    return (
        f"iteration {record.iteration}: validation {mean}, {m['pairs']} pairs ({accuracy} of the telling ones right), "
        f"{m['ties']} ties, loss {first:.3f} → {last:.3f}, "
        f"{sum(m['seconds'].values()):.0f} s"
    )


def finish(chosen, run: runs.Run, ready: Ready, state: align.AlignState, progress: lm_pool.Progress) -> None:
    """Test accuracy before, at the best iteration and at the end, and the agents: PEFT adapters or whole models."""
    best = runs.restore(run, state, best=True)
    stages = {"start": ready.stacks, "best": best.state.stacks if best else state.stacks, "final": state.stacks}
    iterations = {"start": 0, "best": best.step if best else state.iteration, "final": state.iteration}
    for stage in ("best", "final"):
        for index, agent in enumerate(ready.pool.agents):
            slot = ready.pool.members(agent.base).index(index)
            trained = jax.tree.map(np.asarray, lora.select(stages[stage][agent.base], slot))
            folder, model = run.path / "agents" / stage / agent.name, ready.pool.bases[agent.base].config
            if ready.pool.lora is not None:
                peft.save(folder, trained, ready.pool.lora, agent.base, model)
                continue
            base = fetch.resolve(agent.base)
            export.save(folder, model, trained, dtype=chosen["dtype"], token_ids=export.read_token_ids(base))
            lm.tokenizer.save(base, folder)
    questions = [question for question in ready.test if checkable(question)]
    if not questions:
        return
    found: dict[int, dict] = {}
    for stage, stacks in stages.items():
        if iterations[stage] not in found:
            right = evaluation.evaluate(
                ready.pool,
                stacks,
                questions,
                ready.task.verify,
                max_new_tokens=chosen["max_new_tokens"],
                max_tokens=chosen["batch_tokens"],
                progress=progress,
            )
            by_agent = dict(zip(ready.pool.names, map(float, right.mean(axis=1)), strict=True))
            found[iterations[stage]] = {"mean": float(right.mean()), "by_agent": by_agent}
    rows = {stage: {"iteration": number, **found[number]} for stage, number in iterations.items()}
    note(run, {"test": {"questions": len(questions), **rows}})


def note(run: runs.Run, values: Mapping[str, Any]) -> None:
    """Adds fields to `results.json`, what a run found beside its records."""
    file = run.path / runs.RESULTS
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    runs.records.write_atomic(file, json.dumps({**known, **values}, indent=2) + "\n")


def num_parameters(config: lm.DecoderConfig) -> int:
    """Parameters of a base."""
    return layout.num_parameters(config)

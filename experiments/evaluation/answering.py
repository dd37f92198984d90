"""Who answers: models of this machine, agents of an aligned run, or a model behind an endpoint."""

import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import prepare, settings
from experiments.evaluation.tasks import Task, file_name
from stackalign import lm
from stackalign.evals import Item
from stackalign.judges import endpoint
from stackalign.lm import lora
from stackalign.lm import pool as lm_pool


class Group(NamedTuple):
    """Models that are loaded together: agents of one pool. `labels` are their names in this evaluation."""

    labels: tuple[str, ...]
    specs: tuple[settings.AgentSpec, ...]
    lora: lora.LoraConfig | None


class Answered(NamedTuple):
    """An answer to one item.

    `finished`: it ended by itself and not at the token limit. `tokens`: how many, None where that is not known.
    `fault`: why there is no answer, or empty.
    """

    response: str
    finished: bool
    tokens: int | None
    fault: str = ""


def groups(models: Sequence[str], stage: str) -> list[Group]:
    """What `--model` names: each a model (`weights.fetch.resolve`) or the folder of an aligned run.

    Args:
      models: names; of a run folder all its agents take part.
      stage: "best" or "final": which of a run's agents.

    Raises:
      ValueError: nothing given, a run without agents, or two models of one name.
    """
    if not all(models) or not models:
        raise ValueError("--model is empty or has an empty entry between its commas")
    found = []
    for name, label in zip(models, settings.short_names(models), strict=True):
        folder = pathlib.Path(name).expanduser()
        if (folder / "agents").is_dir() and (folder / "config.json").is_file():
            found.append(_of_run(folder, label, stage))
        else:
            found.append(Group((label,), (settings.AgentSpec(label, name),), None))
    labels = [label for group in found for label in group.labels]
    files = [file_name(label) for label in labels]
    if doubled := sorted({label for label, file in zip(labels, files, strict=True) if files.count(file) > 1}):
        raise ValueError(f"--model: {', '.join(doubled)} have one name; rename a folder")
    return found


def _of_run(folder: pathlib.Path, label: str, stage: str) -> Group:
    chosen = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if chosen.get("preset") == "toy":
        raise ValueError(f"--model={folder}: a toy run's decoders know no English and cannot take these benchmarks")
    specs = []
    for spec in settings.agents(chosen):
        path = folder / "agents" / stage / spec.name
        if not path.is_dir():
            raise ValueError(f"--model={folder}: there is no {path}; is the run finished? --stage is {stage!r}")
        if chosen.get("train", "lora") == "full":
            specs.append(settings.AgentSpec(spec.name, str(path), "", spec.system_prompt))
        else:
            specs.append(settings.AgentSpec(spec.name, spec.base, str(path), spec.system_prompt))
    shape = settings.lora_config({**settings.PAPER, **chosen})
    return Group(tuple(f"{label}/{spec.name}" for spec in specs), tuple(specs), shape)


class Local:
    """Models on this machine: the agents of a group as a pool."""

    def __init__(self, group: Group, *, dtype: str, mesh: str, progress: lm_pool.Progress):
        devices = lm.sharding.parse_mesh(mesh) if mesh else None
        # Without adapters the bases answer alone; the shape that a pool asks for is then of no account.
        shape = group.lora or lora.LoraConfig()
        self.pool, stacks = prepare.load(group.specs, shape, dtype=dtype, seed=0, progress=progress, on_device=not mesh)
        if devices is not None:
            self.pool, stacks = lm_pool.place(self.pool, stacks, devices)
        self.stacks = stacks if group.lora is not None else None

    def prompt(self, agent: int, item: Item) -> list[int]:
        """Token ids of an item as an agent is asked it."""
        about = self.pool.agents[agent]
        system = [{"role": "system", "content": about.system_prompt}] if about.system_prompt is not None else []
        return self.pool.bases[about.base].tokenizer.encode_chat([*system, *item.messages])

    def answer(
        self,
        task: Task,
        done: Sequence[Mapping[str, Any]],
        sampling: lm_pool.Sampling,
        *,
        seed: int,
        batch_tokens: int,
        skip_too_long: bool,
        progress: lm_pool.Progress,
    ) -> Iterator[list[tuple[int, Item, Answered]]]:
        """Yields answers, each an (agent, item, answer), batch by batch; the same batches whatever is `done`.

        Args:
          task: what is asked.
          done: for every agent what is there, by item id.
          sampling: how to decode; the draws of an item depend on the seed, the benchmark and its id alone.
          seed: of all draws.
          batch_tokens: padded tokens a batch.
          skip_too_long: an item that does not fit the context gets an empty answer with a fault, instead of an error.

        Raises:
          ValueError: prompts that do not fit, before anything is generated; says how many, and the longest.
        """
        requests, too_long = [], []
        for agent in range(len(self.pool.agents)):
            for item in task.items:
                prompt = self.prompt(agent, item)
                try:
                    lm_pool.check_context(self.pool, agent, prompt, sampling.max_new_tokens)
                    requests.append((agent, item, prompt))
                except ValueError as error:
                    too_long.append((agent, item, str(error)))
        if too_long and not skip_too_long:
            raise ValueError(
                f"{len(too_long)} of {len(too_long) + len(requests)} prompts of {task.benchmark.name} do not fit, the "
                f"first (item {too_long[0][1].id}): {too_long[0][2]}; or give --skip_too_long, which counts them as "
                "wrong and says how many they are"
            )
        total, count = len(task.items) * len(self.pool.agents), 0
        progress(task.benchmark.name, 0, total, "answers")
        skipped = [(agent, item, Answered("", False, 0, fault)) for agent, item, fault in too_long]
        if skipped:
            count += len(skipped)
            yield [one for one in skipped if one[1].id not in done[one[0]]]
        for batch in _batches(requests, sampling.max_new_tokens, batch_tokens):
            if not all(item.id in done[agent] for agent, item, _ in batch):
                keys = jnp.stack([_key(seed, task.benchmark.name, item.id) for _, item, _ in batch])
                answers = lm_pool.generate_answers(
                    self.pool,
                    self.stacks,
                    keys,
                    [(agent, prompt) for agent, _, prompt in batch],
                    sampling,
                    max_tokens=batch_tokens,
                )
                yield [
                    (agent, item, Answered(answer.text, answer.finished, len(answer.ids)))
                    for (agent, item, _), answer in zip(batch, answers, strict=True)
                    if item.id not in done[agent]
                ]
            count += len(batch)
            progress(task.benchmark.name, count, total, "answers")


def _batches(requests: list[tuple[int, Item, list[int]]], new_tokens: int, max_tokens: int):
    """Requests of similar length, at most `max_tokens` padded tokens together, the longest first."""
    order = sorted(requests, key=lambda request: (-len(request[2]), request[0], request[1].id))
    while order:
        rows = max(max_tokens // (lm_pool.bucket(len(order[0][2])) + new_tokens), 1)
        rows = 1 << (rows.bit_length() - 1)
        yield order[:rows]
        order = order[rows:]


def _key(seed: int, *names: str) -> jax.Array:
    """A key of one item: what else is asked, and in which order, does not matter."""
    digest = hashlib.sha256("\x1f".join(names).encode("utf-8", "surrogatepass")).digest()
    return jax.random.fold_in(jax.random.key(seed), int.from_bytes(digest[:4], "big"))


class Remote:
    """A model behind an OpenAI-compatible endpoint."""

    def __init__(self, config: endpoint.EndpointConfig, cache_dir: pathlib.Path):
        self.config, self.cache_dir = config, cache_dir

    def answer(
        self, task: Task, done: Mapping[str, Any], *, progress: lm_pool.Progress
    ) -> Iterator[list[tuple[int, Item, Answered]]]:
        """Yields answers as `Local.answer` does, a few requests at a time, so that those are on disk early."""
        pending, size = [item for item in task.items if item.id not in done], 4 * self.config.concurrency
        total = len(task.items)
        progress(task.benchmark.name, total - len(pending), total, "answers")
        for start in range(0, len(pending), size):
            part = pending[start : start + size]
            first = total - len(pending) + start
            replies = endpoint.complete(
                self.config,
                self.cache_dir,
                [item.messages for item in part],
                progress=lambda n, _, first=first: progress(task.benchmark.name, first + n, total, "answers"),
            )
            yield [
                (0, item, Answered("", False, None, "no reply"))
                if reply is None
                else (0, item, Answered(reply.content, reply.finish_reason != "length", None))
                for item, reply in zip(part, replies, strict=True)
            ]

"""Settings of the alignment binary: presets, overrides and the combinations that are refused."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from stackalign import arena
from stackalign import leader as leaders
from stackalign.algorithms import align, preferences, toy
from stackalign.lm import lora
from stackalign.lm import pool as lm_pool

JUDGES = ("likelihood", "likelihood_raw", "digits", "generate", "verifier", "random")
PEERS = JUDGES[:4]
EVERY_TARGET = ",".join(lora.TARGETS)

PAPER: dict[str, Any] = {
    "seed": 0,
    "pool": "",
    "instructions": "",
    "test_instructions": "",
    "num_instructions": 64,
    "iterations": 8,
    "duels": 64,
    "duels_per_round": 0,
    "leader": "exp3",
    "leader_gamma": 0.2,
    "leader_eta": 0.2,
    "fresh_instructions": False,
    "strategy": "schedule_decreasing",
    "schedule": "linear",
    "num_opponents": 0,
    "random_rate": 0.2,
    "reputation": "paper",
    "weighting": "reputation",
    "judge": "generate",
    "judge_endpoint": "",
    "judge_model": "",
    "judge_api_key_env": "OPENAI_API_KEY",
    "on_parse_failure": "drop",
    "judge_check": 40,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 0,
    "max_new_tokens": 256,
    "learning_rate": 1e-6,
    "beta": 0.1,
    "nll_weight": 0.0,
    "label_smoothing": 0.0,
    "min_chosen_score": 1.0,
    "batch_size": 16,
    "epochs": 1,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "restart_optimizer": True,
    "micro_tokens": 4096,
    "batch_tokens": 16384,
    "remat": False,
    "train": "lora",
    "lora_rank": 64,
    "lora_alpha": 16.0,
    "lora_dropout": 0.1,
    "lora_targets": ",".join(lora.ATTENTION),
    "dtype": "float32",
    "pretrain_steps": 0,
    "specialise_steps": 0,
}
"""The paper's hyperparameters (Appendix C); zeros and empty strings mean "not used"."""

PRESETS: dict[str, dict[str, Any]] = {
    "smollm2": {
        **PAPER,
        "pool": "smollm2",
        "iterations": 3,
        "duels": 8,
        "num_instructions": 32,
        "judge": "likelihood",
        "judge_check": 24,
        "max_new_tokens": 24,
        "learning_rate": 1e-4,
        "batch_size": 4,
        "lora_rank": 16,
        "lora_dropout": 0.0,
        "micro_tokens": 1024,
        "batch_tokens": 4096,
    },
    "toy": {
        **PAPER,
        "judge": "likelihood",
        "judge_check": 120,
        "max_new_tokens": toy.ANSWER_LENGTH,
        "learning_rate": 1e-3,
        "epochs": 2,
        "lora_rank": 16,
        "lora_dropout": 0.0,
        "lora_targets": EVERY_TARGET,
        "micro_tokens": 16384,
        "pretrain_steps": 1200,
        "specialise_steps": 150,
    },
    "paper_dpo": {**PAPER, "dtype": "bfloat16", "remat": True, "micro_tokens": 16384, "batch_tokens": 65536},
}

CHOICES: dict[str, tuple[str, ...]] = {
    "leader": ("exp3", "uniform"),
    "strategy": tuple(arena.matching.STRATEGIES),
    "schedule": ("linear", "cosine"),
    "reputation": tuple(arena.reputation.PRESETS),
    "weighting": ("reputation", "mean"),
    "judge": JUDGES,
    "on_parse_failure": ("drop", "five"),
    "train": ("lora", "full"),
    "dtype": ("float32", "bfloat16"),
}

SMOLLM2_AGENTS = (
    ("careful", "You are a careful assistant. Think about what is asked, then give a correct answer."),
    ("terse", "You are a terse assistant. Reply with the answer only, in as few words as possible."),
    ("literal", "You follow the instruction to the letter, its format above all."),
    ("teacher", "You are a friendly teacher. Answer in one short, clear sentence."),
)


@dataclasses.dataclass(frozen=True)
class AgentSpec:
    """An agent as a user describes it: `base` is a name that `weights.fetch.resolve` takes, `adapter` a PEFT folder."""

    name: str
    base: str
    adapter: str = ""
    system_prompt: str | None = None


def defaults(name: str) -> str:
    """A setting's value in every preset, for the help."""
    values = {preset: values[name] for preset, values in PRESETS.items()}
    shown = {preset: repr(value) if value == "" else str(value) for preset, value in values.items()}
    if len(set(shown.values())) == 1:
        return "" if values["smollm2"] == "" else f" [{next(iter(shown.values()))}]"
    return " [" + ", ".join(f"{preset} {value}" for preset, value in shown.items()) + "]"


def resolve(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's settings with the flags that were given on top.

    Raises:
      ValueError: an unknown preset or a combination that cannot work; names the flags and the fix.
    """
    if preset not in PRESETS:
        raise ValueError(f"--preset={preset}: there is {', '.join(PRESETS)}")
    settings = {"preset": preset, **PRESETS[preset], **given}
    if settings["judge_endpoint"] and "judge" not in given:
        settings["judge"] = "endpoint"
    _refuse(settings, given)
    return settings


def _refuse(settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, choices in CHOICES.items():
        allowed = (*choices, "endpoint") if name == "judge" else choices
        if settings[name] not in allowed:
            raise ValueError(f"--{name}={settings[name]}: choose one of {', '.join(choices)}")
    positive = ("num_instructions", "iterations", "duels", "max_new_tokens", "batch_size", "epochs", "micro_tokens")
    for name in (*positive, "batch_tokens", "lora_rank"):
        if settings[name] < 1:
            raise ValueError(f"--{name}={settings[name]} must be at least 1")
    for name, low, high in (
        ("leader_gamma", 0.0, 1.0),
        ("random_rate", 0.0, 1.0),
        ("top_p", 1e-6, 1.0),
        ("temperature", 0.0, 10.0),
        ("label_smoothing", 0.0, 0.499),
        ("lora_dropout", 0.0, 0.999),
    ):
        if not low <= settings[name] <= high:
            raise ValueError(f"--{name}={settings[name]} must lie in [{low:g}, {high:g}]")
    for name in ("learning_rate", "beta", "max_grad_norm", "lora_alpha"):
        if not settings[name] > 0:
            raise ValueError(f"--{name}={settings[name]} must be positive")
    for name in ("leader_eta", "nll_weight", "weight_decay", "judge_check", "duels_per_round", "num_opponents", "seed",
                 "top_k"):
        if settings[name] < 0:
            raise ValueError(f"--{name}={settings[name]} must not be negative")
    if settings["duels_per_round"] > settings["duels"]:
        raise ValueError("--duels_per_round must not exceed --duels")

    endpoint = bool(settings["judge_endpoint"])
    if endpoint and settings["judge"] != "endpoint":
        raise ValueError(f"--judge_endpoint replaces the peer judges: leave out --judge={settings['judge']}")
    if settings["judge"] == "endpoint" and not endpoint:
        raise ValueError("--judge=endpoint needs --judge_endpoint=URL")
    if endpoint != bool(settings["judge_model"]):
        raise ValueError("--judge_endpoint and --judge_model belong together: give both or neither")
    if "judge_api_key_env" in given and not endpoint:
        raise ValueError("--judge_api_key_env needs --judge_endpoint")
    if "on_parse_failure" in given and settings["judge"] not in ("generate", "endpoint"):
        raise ValueError(f"--on_parse_failure has no effect on judge {settings['judge']!r}: its scores are not parsed")
    if settings["leader"] == "uniform" and ("leader_gamma" in given or "leader_eta" in given):
        raise ValueError("--leader_gamma and --leader_eta have no effect on --leader=uniform")
    if settings["weighting"] == "mean" and settings["judge"] not in PEERS and "weighting" in given:
        raise ValueError("--weighting=mean is about peer judges; external judges always count equally")
    if settings["preset"] == "toy":
        for name in ("pool", "instructions", "test_instructions", "dtype"):
            if name in given:
                raise ValueError(f"--{name} does not go with --preset=toy, which makes its own; use --preset=smollm2")
        if settings["judge"] in ("generate", "digits", "endpoint"):
            raise ValueError(
                f"--judge={settings['judge']} needs models that read English; --preset=toy takes likelihood, "
                "likelihood_raw, verifier or random"
            )
    else:
        for name in ("pretrain_steps", "specialise_steps"):
            if name in given:
                raise ValueError(f"--{name} is for --preset=toy")
        if not settings["pool"]:
            raise ValueError(
                f"--preset={settings['preset']} needs --pool: local folders or Hugging Face ids, comma-separated, or a "
                "JSON file of agents"
            )
        count = len(agents(settings))
        if count == 2 and settings["judge"] in PEERS:
            raise ValueError(
                "two models have no peer judge (a judge is never one of the two that duel): add a third to --pool, "
                "or give an external judge (--judge=verifier or --judge_endpoint)"
            )
        if settings["test_instructions"] and not settings["instructions"]:
            raise ValueError("--test_instructions goes with --instructions; generated ones bring their own test set")
    if settings["train"] == "full":
        _refuse_full(settings, given)
    lora_config(settings)


def _refuse_full(settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses what does not go with a full fine-tune, which is its own base."""
    for name in given:
        if name.startswith("lora_"):
            raise ValueError(f"--{name} has no effect on --train=full, which has no adapters")
    if settings["preset"] == "toy":
        raise ValueError("--train=full does not go with --preset=toy, whose agents are adapters of one base")
    specs = agents(settings)
    for spec in specs:
        if spec.adapter:
            raise ValueError(
                f"--train=full: agent {spec.name!r} has an adapter; merge it into its base first (python -m "
                "experiments.export), or use --train=lora"
            )
        sharing = [other.name for other in specs if other.base == spec.base]
        if len(sharing) > 1:
            raise ValueError(
                f"--train=full: agents {', '.join(sharing)} share the base {spec.base!r}, but every agent's own "
                "parameters are trained: give each its own in --pool, or use --train=lora"
            )


def agents(settings: Mapping[str, Any]) -> tuple[AgentSpec, ...]:
    """The agents that `--pool` describes; ValueError names the entry and field that is wrong."""
    value = settings["pool"]
    if value == "smollm2":
        return tuple(AgentSpec(name, "smollm2", "", prompt) for name, prompt in SMOLLM2_AGENTS)
    if not value.endswith(".json"):
        bases = [entry.strip() for entry in value.split(",")]
        if not all(bases):
            raise ValueError(f"--pool={value!r} has an empty entry between its commas")
        return tuple(AgentSpec(name, base) for name, base in zip(short_names(bases), bases, strict=True))
    path = pathlib.Path(value)
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--pool: there is no file {value}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--pool: {value} is not JSON: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"--pool: {value} must hold a list of agents, such as [{{'name': 'a', 'base': 'smollm2'}}]")
    specs = []
    for number, row in enumerate(rows):
        where = f"--pool: agent {number + 1} of {value}"
        if not isinstance(row, dict):
            raise ValueError(f"{where} must be an object")
        unknown = sorted(set(row) - {"name", "base", "adapter", "system_prompt"})
        if unknown:
            raise ValueError(
                f"{where} has unknown field(s) {', '.join(unknown)}; there is name, base, adapter, system_prompt"
            )
        for field in ("name", "base"):
            if not isinstance(row.get(field), str) or not row[field].strip():
                raise ValueError(f"{where} needs {field!r}, a text")
        for field in ("adapter", "system_prompt"):
            if row.get(field) is not None and not isinstance(row[field], str):
                raise ValueError(f"{where}: {field!r} must be a text")
        specs.append(AgentSpec(row["name"], row["base"], row.get("adapter") or "", row.get("system_prompt")))
    doubled = sorted({spec.name for spec in specs if [s.name for s in specs].count(spec.name) > 1})
    if doubled:
        raise ValueError(f"--pool: {value} names {', '.join(doubled)} more than once")
    return tuple(specs)


def short_names(bases: Sequence[str]) -> list[str]:
    """Names of models by the last part of their paths or ids, numbered where they are equal."""
    short = [pathlib.PurePath(base).name for base in bases]
    return [f"{name}_{short[: i + 1].count(name)}" if short.count(name) > 1 else name for i, name in enumerate(short)]


def lora_config(settings: Mapping[str, Any]) -> lora.LoraConfig | None:
    """The adapters' shape; None where all parameters are trained."""
    if settings["train"] == "full":
        return None
    return lora.LoraConfig(
        rank=settings["lora_rank"],
        alpha=settings["lora_alpha"],
        dropout=settings["lora_dropout"],
        targets=tuple(target.strip() for target in settings["lora_targets"].split(",")),
    )


def align_config(settings: Mapping[str, Any]) -> align.AlignConfig:
    """The algorithm's configuration."""
    gamma, eta = settings["leader_gamma"], settings["leader_eta"]
    leader = leaders.exp3.leader(gamma=gamma, eta=eta) if settings["leader"] == "exp3" else leaders.uniform.leader()
    strategy = arena.matching.STRATEGIES[settings["strategy"]]
    names = (field.name for field in dataclasses.fields(preferences.DpoConfig))
    return align.AlignConfig(
        iterations=settings["iterations"],
        duels=settings["duels"],
        duels_per_round=settings["duels_per_round"],
        leader=leader,
        strategy=strategy,
        target_gap=arena.matching.TARGET_GAPS.get(strategy, (0.0, 0.0)),
        num_opponents=settings["num_opponents"],
        random_rate=settings["random_rate"],
        schedule={"linear": leaders.linear, "cosine": leaders.cosine}[settings["schedule"]],
        reputation=arena.reputation.PRESETS[settings["reputation"]],
        weighting=settings["weighting"],
        sampling=lm_pool.Sampling(**{name: settings[name] for name in lm_pool.Sampling._fields}),
        fresh_instructions=settings["fresh_instructions"],
        train=preferences.DpoConfig(**{name: settings[name] for name in names}),
        batch_tokens=settings["batch_tokens"],
    )

"""SMIDA on a tabular Stackelberg game: the equilibrium in closed form, the algorithm beside its bounds, its rivals.

    python -m experiments.tabular_smida                  # a random game; 5 seconds on two CPU cores, 3 once compiled
    python -m experiments.tabular_smida --check          # and every theorem at every step; 8 seconds
    python -m experiments.tabular_smida --compare        # and gradient methods on the same game; 22 seconds
    python -m experiments.tabular_smida --utility=variance --members=5 --tau_leader=0.02
    python -m experiments.tabular_smida --game=FILE.npz                       # your game
    python -m experiments.tabular_smida --game=FILE.npy --block_contexts=64   # a utility larger than memory

In context x the Leader plays y, the Follower sees it and answers y'. The Follower maximises utility[x, y, y'], the
Leader minimises it, and both are held near a reference by weights tau. Prints the value of the game, what is left of
the players' choice at the equilibrium, and how far SMIDA comes in --num_steps steps beside what theorem C.1 promises.
With --check the exit status is 1 if a theorem fails, and the first violation stands on stderr.

A game file is an .npz of NumPy arrays: "utility" [contexts, Leader actions, Follower actions], or "ensemble" [members,
contexts, actions, actions] of preference probabilities, of which --utility makes a utility; optional are "prior",
"pi_ref" or "log_pi_ref", "omega_ref" or "log_omega_ref", "tau_leader" and "tau_follower" (flags come first). An .npy
file is a bare utility.

Writes into --out_dir: results.json (all that is printed, flags, versions, divergences at every step), solution.npz (the
policies), divergences.png, and solvers.png with --compare. Files of an earlier run there are replaced.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from stackalign import games, runs
from stackalign.games import bounds, divergence, equilibrium, rivals, scale, smida, theorems, utilities
from stackalign.lm.weights import fetch
from stackalign.runs import folder, tabular_figures

FLAGS = flags.FLAGS

PLAIN = ("uniform", "normal")
ENSEMBLE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "variance": utilities.variance,
    "jsd": utilities.jensen_shannon,
    "decision_uncertainty": utilities.decision_uncertainty,
    "preference": utilities.preference,
    "targeted": lambda ensemble: utilities.targeted(ensemble, FLAGS.target_member, weight=FLAGS.target_weight),
}

flags.DEFINE_string("game", None, "A game to load, .npz or .npy (see above); by default a random one is made.")
flags.DEFINE_enum(
    "utility", None, [*PLAIN, *ENSEMBLE],
    "Random entries (uniform, the default, or normal), or what an ensemble of preference models is made into.",
)  # fmt: skip
flags.DEFINE_integer("contexts", 64, "Contexts of the random game.", lower_bound=1)
flags.DEFINE_integer("leader_actions", 16, "Actions of the Leader in the random game.", lower_bound=1)
flags.DEFINE_integer("follower_actions", 16, "Actions of the Follower in the random game.", lower_bound=1)
flags.DEFINE_integer("members", 5, "Members of the random ensemble.", lower_bound=1)
flags.DEFINE_enum("references", "random", ["random", "uniform"], "References and prior of the random game.")
flags.DEFINE_integer("seed", 0, "Seed of the random game.", lower_bound=0)
flags.DEFINE_float("scale", None, "Factor on the utility; by default 4 for variance, so that it fills [0, 1], else 1.")
flags.DEFINE_integer("target_member", 0, "With --utility=targeted: the member whose preference counts.", lower_bound=0)
flags.DEFINE_float("target_weight", 1.0, "With --utility=targeted: its weight beside the variance.", lower_bound=0.0)

flags.DEFINE_float("tau_leader", None, "Weight of the Leader's regulariser; by default the file's, or 0.1.")
flags.DEFINE_float("tau_follower", None, "Weight of the Follower's regulariser; by default the file's, or 0.1.")
flags.DEFINE_float("eta_leader", None, "Step size of the Leader; by default 0.1 / tau_leader.")
flags.DEFINE_float("eta_follower", None, "Step size of the Follower; by default 0.5 / tau_follower.")
flags.DEFINE_integer("num_steps", 200, "The most steps.", lower_bound=1)
flags.DEFINE_float("tolerance", None, "Saddle gap at which a context stops, in units of utility; by default none does.")
flags.DEFINE_float("accuracy", 1e-6, "Says after how many steps the Leader's divergence, or a gap, is at most this.")
flags.DEFINE_bool("x64", True, "Compute in float64; float32 is faster.")
flags.DEFINE_integer("block_contexts", None, "Read and solve an .npy file by so many contexts at a time.", 1)

flags.DEFINE_bool("check", False, "Check every theorem at every step. Takes 32 times the memory of the utility.")
flags.DEFINE_bool("compare", False, "Compare solvers. Takes 24 times the memory of the utility.")
flags.DEFINE_float("rival_eta_leader", None, "Leader's step size of the gradient methods; by default the best of 49.")
flags.DEFINE_float("rival_eta_follower", None, "Follower's step size of the gradient methods.")
flags.DEFINE_string("out_dir", "outputs/tabular_smida", "Where results and figures go.")

RANDOM_ONLY = ("contexts", "leader_actions", "follower_actions", "members", "references", "seed")
KEYS = (
    "utility", "ensemble", "prior", "pi_ref", "omega_ref", "log_pi_ref", "log_omega_ref", "tau_leader", "tau_follower"
)  # fmt: skip
TAU, RATES = 0.1, {"leader": 0.1, "follower": 0.5}  # defaults: tau, and the effective steps eta tau
# Memory that the jobs take at their peak, in sizes of the utility: measured on CPUs, rounded up.
MEMORY = {"solve": 16, "check": 32, "compare": 24}


class Source(NamedTuple):
    """A game before it is put together.

    what: says where it comes from.
    utility: `[X, L, F]`, an array or what reads like one.
    fields: prior and references, as `games.make_game` takes them.
    taus: tau_leader and tau_follower where the source has them.
    """

    what: str
    utility: Any
    fields: dict[str, np.ndarray]
    taus: dict[str, Any]


class Steps(NamedTuple):
    """Weights and step sizes, checked against condition 6, by the names of arguments."""

    taus: dict[str, float]
    etas: dict[str, float]


class Float64Rows(NamedTuple):
    """A memory-mapped array whose rows are cast as they are read."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.array[rows].astype(np.float64)


def check_flags() -> None:
    """Refuses flags that contradict each other or would have no effect."""
    given = {name for name in FLAGS if FLAGS[name].present}
    if FLAGS.game is not None:
        for name in RANDOM_ONLY:
            if name in given:
                raise ValueError(f"--{name} is for random games; leave it out with --game={FLAGS.game}")
        if pathlib.Path(FLAGS.game).suffix not in (".npz", ".npy"):
            raise ValueError(f"--game={FLAGS.game}: expected the name of an .npz or .npy file")
    elif "members" in given and FLAGS.utility not in ENSEMBLE:
        raise ValueError(f"--members needs a --utility of an ensemble: {', '.join(ENSEMBLE)}")
    elif FLAGS.utility in ENSEMBLE and FLAGS.leader_actions != FLAGS.follower_actions:
        raise ValueError(
            f"--utility={FLAGS.utility} compares two answers: --leader_actions={FLAGS.leader_actions} and "
            f"--follower_actions={FLAGS.follower_actions} must be equal"
        )
    for name in ("target_member", "target_weight"):
        if name in given and FLAGS.utility != "targeted":
            raise ValueError(f"--{name} needs --utility=targeted")
    for name in ("scale", "accuracy"):
        if FLAGS[name].value is not None and not 0.0 < FLAGS[name].value < np.inf:
            raise ValueError(f"--{name}={FLAGS[name].value:g} must be a positive number")
    if not FLAGS.target_weight < np.inf:
        raise ValueError(f"--target_weight={FLAGS.target_weight:g} must be finite")
    if FLAGS.tolerance is not None and not FLAGS.tolerance >= 0.0:
        raise ValueError(f"--tolerance={FLAGS.tolerance:g} must be at least 0")
    if FLAGS.block_contexts is not None:
        if FLAGS.game is None or not FLAGS.game.endswith(".npy"):
            raise ValueError("--block_contexts needs --game=FILE.npy, a bare utility that can be read in blocks")
        for job in ("check", "compare"):
            if FLAGS[job].value:
                raise ValueError(f"--{job} needs the whole game in memory; leave out --block_contexts")
    etas = [FLAGS.rival_eta_leader, FLAGS.rival_eta_follower]
    if any(eta is not None for eta in etas):
        if not FLAGS.compare:
            raise ValueError("--rival_eta_leader and --rival_eta_follower need --compare")
        if not all(eta is not None and 0.0 < eta < np.inf for eta in etas):
            raise ValueError("give both --rival_eta_leader and --rival_eta_follower, positive numbers")


def random_source() -> Source:
    """The random game of the flags: the same numbers in both precisions, up to their rounding."""
    rng = np.random.default_rng(FLAGS.seed)
    shape = (FLAGS.contexts, FLAGS.leader_actions, FLAGS.follower_actions)
    name = FLAGS.utility or "uniform"
    require_memory(shape, 3 * FLAGS.members if name in ENSEMBLE else 1)
    if name in ENSEMBLE:
        # What all members think, and what each adds to it; skew-symmetric scores make the probabilities antisymmetric.
        scores = rng.normal(size=(1, *shape)) + rng.normal(size=(FLAGS.members, *shape))
        scores = (scores - np.swapaxes(scores, 2, 3)) / np.sqrt(2.0)
        utility = ensemble_utility(name, 1.0 / (1.0 + np.exp(-scores)))
        what = f"random {name} of {FLAGS.members} members, seed {FLAGS.seed}"
    else:
        draw = rng.uniform if name == "uniform" else rng.normal
        utility = (FLAGS.scale or 1.0) * draw(size=shape)
        what = f"random {name}, seed {FLAGS.seed}"
    fields = {}
    if FLAGS.references == "random":
        fields = {
            "prior": softmax(rng.normal(size=shape[0])),
            "pi_ref": softmax(rng.normal(size=shape[:2])),
            "omega_ref": softmax(rng.normal(size=shape)),
        }
    return Source(what, utility, fields, {})


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def ensemble_utility(name: str, ensemble: np.ndarray) -> np.ndarray:
    """The utility `[X, Y, Y]` of an ensemble `[I, X, Y, Y]`, scaled."""
    if name == "targeted" and FLAGS.target_member >= len(ensemble):
        raise ValueError(f"--target_member={FLAGS.target_member}: the ensemble has {len(ensemble)} members, from 0 on")
    factor = FLAGS.scale if FLAGS.scale is not None else 4.0 if name == "variance" else 1.0
    return factor * np.asarray(ENSEMBLE[name](jnp.asarray(ensemble, jnp.float64 if FLAGS.x64 else jnp.float32)))


def load_source(path: pathlib.Path) -> Source:
    """The game of a file; messages name the file and the key."""
    if not path.is_file():
        raise ValueError(f"--game={path}: no such file")
    try:
        return load_npy(path) if path.suffix == ".npy" else load_npz(path)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"--game={path}: {error}") from error


def load_npy(path: pathlib.Path) -> Source:
    if FLAGS["utility"].present or FLAGS["scale"].present:
        raise ValueError("an .npy file is a utility as it is; leave out --utility and --scale")
    utility = np.lib.format.open_memmap(path, mode="r")
    require_utility(utility)
    size = FLAGS.block_contexts or len(utility)
    require_memory((min(size, len(utility)), *utility.shape[1:]))
    for start in range(0, len(utility), size):
        finite = np.isfinite(utility[start : start + size])
        if not finite.all():
            first, *rest = (int(index) for index in np.unravel_index(np.argmin(finite), finite.shape))
            where = (start + first, *rest)
            raise ValueError(f"utility{list(where)} = {utility[where]} is not finite; mend the file")
    return Source(path.name, Float64Rows(utility) if FLAGS.x64 else utility, {}, {})


def load_npz(path: pathlib.Path) -> Source:
    if not zipfile.is_zipfile(path):
        raise ValueError("not an .npz archive, which np.savez makes")
    with np.load(path, allow_pickle=False) as file:
        if unknown := sorted(set(file.files) - set(KEYS)):
            raise ValueError(f"unknown {', '.join(map(repr, unknown))}; an .npz holds {', '.join(KEYS)}")
        arrays = {}
        for key in file.files:
            try:
                arrays[key] = file[key]
            except ValueError as error:
                raise ValueError(f"{key!r} can't be read: {error}") from error
    for key, array in arrays.items():
        require_numbers(repr(key), array)
    if ("utility" in arrays) == ("ensemble" in arrays):
        raise ValueError(f"needs one of 'utility' and 'ensemble', found {', '.join(map(repr, arrays)) or 'nothing'}")
    taus = {name: arrays.pop(name) for name in ("tau_leader", "tau_follower") if name in arrays}
    if "utility" in arrays:
        for name in ("utility", "scale"):
            if FLAGS[name].present:
                raise ValueError(f"it holds a utility as it is; leave out --{name}")
        utility, what = arrays.pop("utility"), path.name
        require_utility(utility)
        require_memory(utility.shape)
    else:
        if FLAGS.utility not in ENSEMBLE:
            raise ValueError(f"what to make of its ensemble? give --utility, one of {', '.join(ENSEMBLE)}")
        ensemble = arrays.pop("ensemble")
        try:
            utilities.validate_ensemble(ensemble)
        except ValueError as error:
            raise ValueError(str(error).replace("preferences", "ensemble")) from error
        require_memory(ensemble.shape[1:], len(ensemble))
        utility, what = ensemble_utility(FLAGS.utility, ensemble), f"{FLAGS.utility} of {path.name}"
    return Source(what, utility.astype(np.float64) if FLAGS.x64 else utility, arrays, taus)


def require_numbers(name: str, array: np.ndarray) -> None:
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold numbers, found {array.dtype}")


def require_utility(array: np.ndarray) -> None:
    require_numbers("utility", array)
    if array.ndim != 3 or 0 in array.shape:
        shape = list(array.shape)
        raise ValueError(f"utility must have the shape [contexts, Leader actions, Follower actions], found {shape}")


def read_steps(source: Source) -> Steps:
    """Weights and step sizes of flags and file, or the defaults; refuses what the theorems do not cover."""
    steps = Steps({}, {})
    for player, rate in RATES.items():
        name, flag = f"tau_{player}", FLAGS[f"tau_{player}"].value
        where = f"--{name}" if flag is not None else f"--game={FLAGS.game}: {name}"
        tau = np.asarray(flag if flag is not None else source.taus.get(name, TAU), np.float64)
        if tau.shape != () or not 0.0 < tau < np.inf:
            raise ValueError(f"{where} must be one positive number, got {tau}: SMIDA needs both regularisers")
        eta = FLAGS[f"eta_{player}"].value
        steps.taus[name] = float(tau)
        steps.etas[f"eta_{player}"] = rate / float(tau) if eta is None else eta
    smida.check_step_sizes(games.make_game(np.zeros((1, 1, 1)), **steps.taus), **steps.etas)
    return steps


def available_memory() -> float:
    """Bytes that can be had without swapping; inf where the system does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with contextlib.suppress(OSError, ValueError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return np.inf


def require_memory(shape: tuple[int, ...], extra: float = 0.0) -> None:
    """Refuses what would not fit, by an estimate.

    Args:
      shape: of the utility that is solved at a time, `[X, L, F]`.
      extra: what else is held meanwhile, in sizes of this utility.
    """
    number, free = 8 if FLAGS.x64 else 4, available_memory()
    half = ", or pass --nox64 (half the memory)" if FLAGS.x64 else ""
    for job, times in MEMORY.items():
        if job != "solve" and not FLAGS[job].value:
            continue
        recorded = (FLAGS.num_steps + 1) * shape[0] * len(Divergences._fields) if job == "solve" else 0
        needed = number * (np.prod(shape, dtype=float) * (times + extra) + recorded)
        if needed > free:
            why = "solving takes" if job == "solve" else f"--{job} stores the Follower and takes"
            fix = "use fewer contexts" if job == "solve" else f"use fewer contexts, leave out --{job}"
            raise ValueError(
                f"{why} about {needed / 2**30:.3g} GiB for a utility {list(shape)}, {free / 2**30:.3g} GiB are free: "
                f"{fix}{half}"
            )


class Facts(NamedTuple):
    """What is known of a block of contexts beforehand.

    constants: of theorem C.1.
    log_pi: `[X, L]`, the Leader at the equilibrium.
    follower_value: `[X, L]`.
    context_value: `[X]`.
    prior: `[X]`.
    entropies: `[X, 4]` nats: the Leader at the equilibrium, its reference, the Follower at the equilibrium, and its
      reference after the Leader's.
    largest: `[]`, the largest absolute utility.
    tolerances: what rounding may cost (`theorems.tolerances`).
    """

    constants: bounds.Constants
    log_pi: jax.Array
    follower_value: jax.Array
    context_value: jax.Array
    prior: jax.Array
    entropies: jax.Array
    largest: jax.Array
    tolerances: theorems.Tolerances


class Divergences(NamedTuple):
    """What is recorded at every step, `[X]` each: the step, KL divergences in both directions, and the saddle gap.

    Those of the Follower are the largest over the Leader's actions, and 0 once they are below rounding.
    """

    step: jax.Array
    leader: jax.Array
    leader_reverse: jax.Array
    follower: jax.Array
    follower_reverse: jax.Array
    gap: jax.Array


class Solved(NamedTuple):
    """The default job's findings, blocks put together.

    facts: of all contexts; constants are the largest.
    solution: the last iterates, without a trajectory.
    worst: the recorded quantities at t = 0, ..., T, each the largest over the contexts that have not stopped before t;
      NaN once all have.
    final: the same of the last iterates, the largest over all contexts.
    seconds: compilation included.
    """

    facts: Facts
    solution: smida.Solution
    worst: Divergences
    final: Divergences
    seconds: float


@jax.jit
def describe(game: games.Game, etas: dict[str, float]) -> Facts:
    solution, constants = equilibrium.closed_form(game), bounds.constants(game, **etas)

    def entropies(log_pi, log_omega):
        leader, follower = (-jnp.sum(jnp.exp(log_p) * log_p, axis=-1) for log_p in (log_pi, log_omega))
        return leader, jnp.sum(jnp.exp(log_pi) * follower, axis=-1)

    at_equilibrium = entropies(solution.log_pi, solution.log_omega)
    of_references = entropies(game.log_pi_ref, games.log_omega_ref(game))
    pairs = zip(at_equilibrium, of_references, strict=True)
    return Facts(
        constants,
        solution.log_pi,
        solution.follower_value,
        solution.context_value,
        game.prior,
        jnp.stack([entropy for pair in pairs for entropy in pair], axis=-1),
        jnp.max(jnp.abs(game.utility)),
        theorems.tolerances(game, constants, jnp.int32(0)),
    )


def both_ways(log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    return divergence.kl(log_p, log_q), divergence.kl(log_q, log_p)


def record(game, solution, iterate, *, eta_follower: float) -> Divergences:
    def followers():
        kls = both_ways(smida.follower(game, iterate.step, eta_follower=eta_follower), solution.log_omega)
        return tuple(jnp.max(kl, axis=-1) for kl in kls)

    remaining = smida.decay(eta_follower * game.tau_follower, jnp.min(iterate.step))
    arrived = (jnp.zeros_like(solution.context_value),) * 2
    follower = jax.lax.cond(remaining > jnp.finfo(game.utility.dtype).eps / 4, followers, lambda: arrived)
    gap = equilibrium.saddle_gap(game, iterate.log_pi, iterate.cost, solution)
    return Divergences(iterate.step, *both_ways(iterate.log_pi, solution.log_pi), *follower, gap)


def solve(blocks: Iterable[games.Game], steps: Steps, num_contexts: int, progress: runs.Bars) -> Solved:
    """Equilibrium and SMIDA on every block; blocks are described while the one before is solved."""
    began = time.perf_counter()
    facts, solutions, worst, final = [], [], [], []

    def described() -> Iterator[games.Game]:
        for game in blocks:
            facts.append(jax.device_get(describe(game, steps.etas)))
            yield game

    recorder = functools.partial(record, eta_follower=steps.etas["eta_follower"])
    arguments = {**steps.etas, "num_steps": FLAGS.num_steps, "tolerance": FLAGS.tolerance, "record": recorder}
    with progress.phase("solve", num_contexts, "contexts") as advance:
        for solution in scale.solve_blocks(described(), **arguments):
            rows = np.stack([rows.astype(np.float64) for rows in solution.trajectory])  # [quantities, T + 1, X]
            at_work = solution.trajectory.step >= np.arange(FLAGS.num_steps + 1)[:, None]
            worst.append(np.max(np.where(at_work, rows, -np.inf), axis=-1))
            final.append(np.max(rows[:, -1], axis=-1))
            solutions.append(solution._replace(trajectory=None))
            advance(len(solution.step))
    highest = np.max(worst, axis=0)
    return Solved(
        join(facts),
        jax.tree.map(lambda *leaves: np.concatenate(leaves), *solutions),
        Divergences(*np.where(np.isfinite(highest), highest, np.nan)),
        Divergences(*np.max(final, axis=0)),
        time.perf_counter() - began,
    )


def join(facts: list[Facts]) -> Facts:
    """Arrays of contexts one after the other; of scalars, the largest."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves) if np.ndim(leaves[0]) else np.max(leaves), *facts)


def check(game: games.Game, steps: Steps) -> tuple[dict[str, dict[str, Any]], theorems.Violation | None]:
    """Every statement's worst place, and the first violation."""
    report = jax.device_get(theorems.check(game, **steps.etas, num_steps=FLAGS.num_steps, step=smida.step))
    rows = {}
    for name, worst in report.items():
        place = int(np.argmax(worst.excess))
        rows[name] = {
            "holds": bool(worst.excess[place] <= 0.0),
            "margin": finite(0.0 - worst.excess[place]),
            "left": finite(worst.left[place]),
            "right": finite(worst.right[place]),
            "tolerance": finite(worst.tolerance[place]),
            "step": place,
            "context": int(worst.context[place]),
        }
    return rows, theorems.first_violation(report)


class Rival(NamedTuple):
    """A solver's run: its step sizes (None: it has none), how they were found, its gaps `[T + 1]` and its speed."""

    etas: tuple[float, float] | None
    chosen: str
    race: tabular_figures.Race


def mean_gap(game, solution, log_pi, log_omega) -> jax.Array:
    """The saddle gap of f: the prior's mean over contexts."""
    cost = games.conditional_cost(game, log_omega)
    return jnp.sum(game.prior * equilibrium.saddle_gap(game, log_pi, cost, solution))


def nothing(*_) -> tuple:
    return ()


@functools.partial(jax.jit, static_argnames=("method", "num_steps"))
def final_gaps(game: games.Game, etas: jax.Array, *, method, num_steps: int) -> jax.Array:
    """Gaps after num_steps for step sizes `[N, 2]`, inf where the method diverged: `[N]`."""
    solution = equilibrium.closed_form(game)

    def one(pair):
        solver = method(eta_leader=pair[0], eta_follower=pair[1])
        state = jax.lax.fori_loop(0, num_steps, lambda _, state: solver.step(state, game), solver.init(game))
        return jnp.nan_to_num(mean_gap(game, solution, *solver.policies(state)), nan=jnp.inf)

    return jax.lax.map(one, etas)


def rival_etas(game: games.Game, method) -> tuple[tuple[float, float], str]:
    """Step sizes of a gradient method: the flags', or those of a grid with the smallest gap at the end.

    The gradient is weighted by how often a context (and the Leader's action) occurs, about 1 / X (and 1 / (X L)), so
    that step sizes grow with that: random games of many sizes did best near X / tau_L and X L / (4 tau_F), the centre.
    """
    if FLAGS.rival_eta_leader is not None:
        return (FLAGS.rival_eta_leader, FLAGS.rival_eta_follower), "from flags"
    num_contexts, num_leader, _ = game.utility.shape
    powers = 4.0 ** np.arange(-3, 4)
    leader = num_contexts * powers / float(game.tau_leader)
    follower = num_contexts * num_leader * powers / (4.0 * float(game.tau_follower))
    grid = np.stack(np.meshgrid(leader, follower, indexing="ij"), axis=-1).reshape(-1, 2)
    gaps = final_gaps(game, jnp.asarray(grid, game.utility.dtype), method=method, num_steps=FLAGS.num_steps)
    best = np.unravel_index(np.argmin(gaps), (len(leader), len(follower)))
    edge = ", at the grid's edge" if {0, len(powers) - 1} & {int(index) for index in best} else ""
    return (float(leader[best[0]]), float(follower[best[1]])), f"best final gap of {len(grid)} pairs{edge}"


def compare(game: games.Game, steps: Steps, progress: runs.Bars) -> dict[str, Rival]:
    """Solvers by name. The gradient methods get the step sizes that are best for this game, SMIDA those of the run."""
    out = {}
    gradients = {"gradient descent-ascent": rivals.gradient_descent_ascent, "extragradient": rivals.extragradient}
    with progress.phase("compare", len(gradients) + 2, "solvers") as advance:

        def race(name: str, solver: rivals.Solver, etas: tuple[float, float] | None, chosen: str) -> None:
            gaps = np.asarray(rivals.run(solver, game, num_steps=FLAGS.num_steps, record=mean_gap)[1])
            seconds = []
            for _ in range(4):
                began = time.perf_counter()
                jax.block_until_ready(rivals.run(solver, game, num_steps=FLAGS.num_steps, record=nothing))
                seconds.append(time.perf_counter() - began)
            # The first run compiles.
            out[name] = Rival(etas, chosen, tabular_figures.Race(gaps, min(seconds[1:]) / FLAGS.num_steps))
            advance(1)

        race("SMIDA", rivals.mirror_descent_ascent(**steps.etas), tuple(steps.etas.values()), "of this run")
        for name, method in gradients.items():
            etas, chosen = rival_etas(game, method)
            race(name, method(eta_leader=etas[0], eta_follower=etas[1]), etas, chosen)
        race("best response", rivals.best_response(), None, "")
    return out


def finite(value: Any) -> Any:
    """Floats for JSON, None for those that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if np.ndim(value):
        return [finite(item) for item in np.asarray(value)]
    return float(value) if np.isfinite(value) else None


def first_at_most(values: np.ndarray, limit: float) -> int | None:
    """The first step from which on all values are at most `limit` (NaN counts as that)."""
    above = np.flatnonzero(values > limit)
    step = int(above[-1]) + 1 if len(above) else 0
    return step if step < len(values) and np.isfinite(values[step]) else None


def after(step: int | None) -> str:
    return f"after {step}" if step is not None else f"not in {FLAGS.num_steps}"


class Bounds(NamedTuple):
    """Right-hand sides of theorem C.1 at every step, and what follows from them for the saddle gap.

    The gap is the Leader's regret, `tau_L KL`, plus at most the largest `r - r_t`, which is at most `D_F q_F^t`.
    """

    follower: np.ndarray
    leader: np.ndarray
    leader_simple: np.ndarray
    gap: np.ndarray


@jax.jit
def bounds_at(constants: bounds.Constants, times: jax.Array) -> Bounds:
    leader = bounds.leader_bound(constants, times)
    return Bounds(
        bounds.follower_bound(constants, times),
        leader,
        bounds.leader_bound_simple(constants, times),
        constants.tau_leader * leader + bounds.cost_bound(constants, times),
    )


def summarise(source: Source, steps: Steps, solved: Solved) -> dict[str, Any]:
    """All findings of the default job in JSON's types."""
    facts, solution, worst, final = solved.facts, solved.solution, solved.worst, solved.final
    times = np.arange(FLAGS.num_steps + 1)
    promised = bounds_at(facts.constants, times)
    fewest = int(solution.step.min())
    reached = first_at_most(np.fmax(worst.leader, worst.leader_reverse), FLAGS.accuracy)
    if max(final.leader, final.leader_reverse) > FLAGS.accuracy:  # of a context that stopped early, perhaps
        reached = None
    players = ("leader", "leader_reference", "follower", "follower_reference")
    return {
        "game": {
            "source": source.what,
            "shape": list(source.utility.shape),
            "dtype": str(solution.log_pi.dtype),
            "given": list(source.fields),
        },
        "steps": {**steps.taus, **steps.etas},
        "constants": finite(facts.constants._asdict()),
        "equilibrium": {
            "value": finite(np.sum(facts.prior * facts.context_value)),
            "effective_actions": dict(zip(players, finite(np.exp(facts.prior @ facts.entropies)), strict=True)),
        },
        "smida": {
            "fewest_steps": fewest,
            "most_steps": int(solution.step.max()),
            "final": finite(final._replace(step=0)._asdict()),
            "mean_gap": finite(np.sum(facts.prior * solution.gap)),
            "bounds": {name: finite(values[fewest]) for name, values in promised._asdict().items()},
            "accuracy": FLAGS.accuracy,
            "steps_to_accuracy": reached,
            "steps_promised": int(bounds.steps_until(facts.constants, FLAGS.accuracy)),
            "seconds": solved.seconds,
        },
        "trajectory": {
            **finite(worst._asdict()),
            "step": times.tolist(),
            **{f"bound_{name}": finite(values) for name, values in promised._asdict().items()},
        },
    }


def table(found: Mapping[str, Any]) -> str:
    """The default job's findings as text."""
    game, steps, run, c = (found[name] for name in ("game", "steps", "smida", "constants"))
    (contexts, leader, follower), effective = game["shape"], found["equilibrium"]["effective_actions"]
    final, promised = run["final"], run["bounds"]
    number = f"{run['fewest_steps']}" + (f" to {run['most_steps']}" if run["fewest_steps"] < run["most_steps"] else "")
    kls = {player: max(final[player], final[f"{player}_reverse"]) for player in ("leader", "follower")}

    def row(what: str, measured: str, promised: str) -> str:
        return f"  {what:<36}{measured:>12}   {promised}"

    return "\n".join([
        f"game         {game['source']}: {contexts} contexts, {leader} Leader × {follower} Follower actions, "
        f"{game['dtype']}",
        f"             tau_L = {steps['tau_leader']:.4g}, tau_F = {steps['tau_follower']:.4g}; not uniform: "
        f"{', '.join(game['given']) or 'nothing'}",
        f"step sizes   eta_L = {steps['eta_leader']:.4g}, eta_F = {steps['eta_follower']:.4g}; condition 6: 0 < "
        f"{c['leader_rate']:.4g} < {c['follower_rate']:.4g} <= 1, kappa = {c['kappa']:.4g}",
        f"oscillation  D = {c['oscillation']:.4g} of u, D_F = {c['follower_oscillation']:.4g} over the Follower's "
        f"actions, D_L = {c['leader_oscillation']:.4g} of r",
        f"equilibrium  value {found['equilibrium']['value']:.10g}; effective actions (exp of the mean entropy):",
        f"             Leader {effective['leader']:.3g} (its reference {effective['leader_reference']:.3g}), "
        f"Follower {effective['follower']:.3g} (its reference {effective['follower_reference']:.3g})",
        f"SMIDA        {number} steps, {run['seconds']:.2f} s with compilation",
        "",
        f"{'at the end, largest over contexts':<38}{'measured':>12}   at most",
        row("KL divergence of the Follower", f"{kls['follower']:.3g}" if kls["follower"] > 0 else "rounding",
            f"{promised['follower']:.3g} (bound 13)"),
        row("KL divergence of the Leader", f"{kls['leader']:.3g}",
            f"{promised['leader']:.3g} (bound 14), {promised['leader_simple']:.3g} (bound 15)"),
        row("saddle gap", f"{final['gap']:.3g}", f"{promised['gap']:.3g} (from 13 and 14)"),
        row(f"steps to a Leader KL of {run['accuracy']:.3g}", after(run["steps_to_accuracy"]),
            f"{run['steps_promised']} (bound 15)"),
    ])  # fmt: skip


def check_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    def show(value) -> str:
        return "not finite" if value is None else f"{value:.3g}"

    title = f"theorems, t = 0 … {FLAGS.num_steps}"
    lines = [f"{title:<34}{'margin':>11}   where it is least: left <= right (+ rounding)"]
    for name, row in rows.items():
        verdict = "holds" if row["holds"] else "FAILS"
        lines.append(
            f"  {verdict}  {name:<25}{show(row['margin']):>11}   {show(row['left'])} <= {show(row['right'])} "
            f"(+ {show(row['tolerance'])}), step {row['step']}, context {row['context']}"
        )
    return "\n".join(lines)


def compare_table(found: Mapping[str, Rival]) -> str:
    to = f"steps to {FLAGS.accuracy:.3g}"
    lines = [f"{'saddle gap, mean over contexts':<32}{'at the end':>12}{to:>18}{'ms/step':>10}   step sizes"]
    for name, rival in found.items():
        etas = f"{rival.etas[0]:.4g}, {rival.etas[1]:.4g} ({rival.chosen})" if rival.etas else "none"
        reached = after(first_at_most(rival.race.gaps, FLAGS.accuracy))
        milliseconds = 1e3 * rival.race.seconds_per_step
        lines.append(f"  {name:<30}{rival.race.gaps[-1]:>12.3g}{reached:>18}{milliseconds:>10.3f}   {etas}")
    return "\n".join(lines)


def compare_json(found: Mapping[str, Rival]) -> dict[str, Any]:
    return {
        name: {
            "eta_leader": rival.etas[0] if rival.etas else None,
            "eta_follower": rival.etas[1] if rival.etas else None,
            "step_sizes": rival.chosen or "none",
            "final_gap": finite(rival.race.gaps[-1]),
            "steps_to_accuracy": first_at_most(rival.race.gaps, FLAGS.accuracy),
            "milliseconds_per_step": 1e3 * rival.race.seconds_per_step,
            "gap": finite(rival.race.gaps),
        }
        for name, rival in found.items()
    }


def divergence_figure(solved: Solved):
    times, slack = np.arange(FLAGS.num_steps + 1), solved.facts.tolerances
    promised = bounds_at(solved.facts.constants, times)
    # Log-probabilities that differ by rounding d have a divergence of about d² / 2.
    eps = np.finfo(slack.log_pi.dtype).eps
    floors = {
        player: float(max(rounding, eps)) ** 2 / 2
        for player, rounding in (("leader", slack.log_pi), ("follower", slack.log_omega))
    }
    return tabular_figures.divergences(times, solved.worst._asdict(), promised._asdict(), floors)


def solvers_figure(found: Mapping[str, Rival], solved: Solved):
    races = {}
    for name, rival in found.items():
        etas = f"η = {rival.etas[0]:.4g}, {rival.etas[1]:.4g}: {rival.chosen}" if rival.etas else "needs the whole game"
        races[f"{name}, {1e3 * rival.race.seconds_per_step:.3g} ms a step\n{etas}"] = rival.race
    floor = float(np.finfo(solved.solution.gap.dtype).eps * (solved.facts.largest or 1.0))
    return tabular_figures.solvers(races, floor=floor)


def replace(path: pathlib.Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replaces a file in one step."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as file:
        write(file)
    os.replace(part, path)


def save_figure(path: pathlib.Path, figure) -> None:
    replace(path, lambda file: figure.savefig(file, format="png"))


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags start with --")
    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_enable_x64", FLAGS.x64)
    jax.config.update("jax_compilation_cache_dir", str(fetch.cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    try:
        return run()
    except (ValueError, OSError, MemoryError) as error:
        if os.environ.get("STACKALIGN_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def run() -> int:
    """One run from flags to files."""
    check_flags()
    source = random_source() if FLAGS.game is None else load_source(pathlib.Path(FLAGS.game))
    steps = read_steps(source)
    if FLAGS.block_contexts:
        blocks = scale.context_blocks(source.utility, size=FLAGS.block_contexts, **steps.taus)
    else:
        try:
            blocks = [games.make_game(source.utility[:], **steps.taus, **source.fields)]
        except ValueError as error:
            raise ValueError(f"--game={FLAGS.game}: {error}" if FLAGS.game else str(error)) from error
    out = pathlib.Path(FLAGS.out_dir)
    out.mkdir(parents=True, exist_ok=True)

    violation = None
    with runs.Bars() as progress:
        solved = solve(blocks, steps, source.utility.shape[0], progress)
        found = summarise(source, steps, solved)
        print(table(found))
        if FLAGS.check:
            with progress.phase("check", FLAGS.num_steps, "steps") as advance:
                found["check"], violation = check(blocks[0], steps)
                advance(FLAGS.num_steps)
            print(f"\n{check_table(found['check'])}")
        if FLAGS.compare:
            compared = compare(blocks[0], steps, progress)
            found["compare"] = compare_json(compared)
            save_figure(out / "solvers.png", solvers_figure(compared, solved))
            print(f"\n{compare_table(compared)}")
        else:
            (out / "solvers.png").unlink(missing_ok=True)  # of an earlier run

    facts, solution = solved.facts, solved.solution
    arrays = {
        "log_pi": solution.log_pi,
        "log_pi_equilibrium": facts.log_pi,
        "follower_value": facts.follower_value,
        "cost": solution.cost,
        "context_value": facts.context_value,
        "step": solution.step,
        "gap": solution.gap,
    }
    replace(out / "solution.npz", lambda file: np.savez(file, **arrays))
    save_figure(out / "divergences.png", divergence_figure(solved))
    own = {flag.name: flag.value for flag in FLAGS.get_key_flags_for_module(sys.modules[__name__])}
    command = " ".join(["python", "-m", "experiments.tabular_smida", *sys.argv[1:]])
    result = {"command": command, "flags": own, "environment": folder.environment(), **found}
    runs.records.write_atomic(out / "results.json", json.dumps(runs.records.plain(result), indent=1) + "\n")
    print(f"\nwritten to {out}: results.json, solution.npz, divergences.png" + ", solvers.png" * FLAGS.compare)
    if violation is not None:
        print(f"error: {violation}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)

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
import io
import json
import os
import pathlib
import sys

import jax
import numpy as np
from absl import app, flags, logging

from experiments import compilation
from experiments.tabular import findings, jobs, source
from stackalign import games, runs
from stackalign.games import scale, smida
from stackalign.runs import folder

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(source)
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

TAU, RATES = 0.1, {"leader": 0.1, "follower": 0.5}  # defaults: tau, and the effective steps eta tau
# Memory that the jobs take at their peak, in sizes of the utility: measured on CPUs, rounded up.
MEMORY = {"solve": 16, "check": 32, "compare": 24}


def check_flags() -> None:
    """Refuses flags that contradict each other or would have no effect."""
    source.check_flags()
    if not 0.0 < FLAGS.accuracy < np.inf:
        raise ValueError(f"--accuracy={FLAGS.accuracy:g} must be a positive number")
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


def read_steps(given: source.Source) -> jobs.Steps:
    """Weights and step sizes of flags and file, or the defaults; refuses what the theorems do not cover."""
    steps = jobs.Steps({}, {}, FLAGS.num_steps, FLAGS.tolerance)
    for player, rate in RATES.items():
        name, flag = f"tau_{player}", FLAGS[f"tau_{player}"].value
        where = f"--{name}" if flag is not None else f"--game={FLAGS.game}: {name}"
        tau = np.asarray(flag if flag is not None else given.taus.get(name, TAU), np.float64)
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
        recorded = (FLAGS.num_steps + 1) * shape[0] * len(jobs.Divergences._fields) if job == "solve" else 0
        needed = number * (np.prod(shape, dtype=float) * (times + extra) + recorded)
        if needed > free:
            why = "solving takes" if job == "solve" else f"--{job} stores the Follower and takes"
            fix = "use fewer contexts" if job == "solve" else f"use fewer contexts, leave out --{job}"
            raise ValueError(
                f"{why} about {needed / 2**30:.3g} GiB for a utility {list(shape)}, {free / 2**30:.3g} GiB are free: "
                f"{fix}{half}"
            )


def save_figure(path: pathlib.Path, figure) -> None:
    packed = io.BytesIO()
    figure.savefig(packed, format="png")
    runs.records.write_atomic(path, packed.getvalue())


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags start with --")
    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_enable_x64", FLAGS.x64)
    compilation.use_cache()
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
    given = source.load(require_memory)
    steps = read_steps(given)
    if FLAGS.block_contexts:
        blocks = scale.context_blocks(given.utility, size=FLAGS.block_contexts, **steps.taus)
    else:
        try:
            blocks = [games.make_game(given.utility[:], **steps.taus, **given.fields)]
        except ValueError as error:
            raise ValueError(f"--game={FLAGS.game}: {error}" if FLAGS.game else str(error)) from error
    out = pathlib.Path(FLAGS.out_dir)
    out.mkdir(parents=True, exist_ok=True)

    violation = None
    with runs.Bars() as progress:
        solved = jobs.solve(blocks, steps, given.utility.shape[0], progress)
        found = findings.summarise(given, steps, solved, FLAGS.accuracy)
        print(findings.table(found))
        if FLAGS.check:
            with progress.phase("check", FLAGS.num_steps, "steps") as advance:
                checked, violation = jobs.check(blocks[0], steps)
                advance(FLAGS.num_steps)
            found["check"] = findings.finite(checked)
            print(f"\n{findings.check_table(found['check'], FLAGS.num_steps)}")
        if FLAGS.compare:
            etas = (FLAGS.rival_eta_leader, FLAGS.rival_eta_follower)
            compared = jobs.compare(blocks[0], steps, etas if FLAGS.rival_eta_leader else None, progress)
            found["compare"] = findings.compare_json(compared, FLAGS.accuracy)
            save_figure(out / "solvers.png", findings.solvers_figure(compared, solved))
            print(f"\n{findings.compare_table(compared, FLAGS.accuracy)}")
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
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    runs.records.write_atomic(out / "solution.npz", packed.getvalue())
    save_figure(out / "divergences.png", findings.divergence_figure(solved))
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

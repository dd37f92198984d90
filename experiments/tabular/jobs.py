"""The jobs on a game: equilibrium and SMIDA, the theorems, and other solvers."""

import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stackalign import games, runs
from stackalign.games import bounds, divergence, equilibrium, rivals, scale, smida, theorems
from stackalign.runs import tabular_figures


class Steps(NamedTuple):
    """Weights and step sizes, checked against condition 6, by the names of arguments, and when to stop."""

    taus: dict[str, float]
    etas: dict[str, float]
    num_steps: int
    tolerance: float | None


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
    arguments = {**steps.etas, "num_steps": steps.num_steps, "tolerance": steps.tolerance, "record": recorder}
    with progress.phase("solve", num_contexts, "contexts") as advance:
        for solution in scale.solve_blocks(described(), **arguments):
            rows = np.stack([rows.astype(np.float64) for rows in solution.trajectory])  # [quantities, T + 1, X]
            at_work = solution.trajectory.step >= np.arange(steps.num_steps + 1)[:, None]
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
    report = jax.device_get(theorems.check(game, **steps.etas, num_steps=steps.num_steps, step=smida.step))
    rows = {}
    for name, worst in report.items():
        place = int(np.argmax(worst.excess))
        rows[name] = {
            "holds": bool(worst.excess[place] <= 0.0),
            "margin": 0.0 - worst.excess[place],
            "left": worst.left[place],
            "right": worst.right[place],
            "tolerance": worst.tolerance[place],
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


def best_etas(game: games.Game, method, num_steps: int) -> tuple[tuple[float, float], str]:
    """Step sizes of a gradient method with the smallest gap at the end, out of a grid, and how they were found.

    The gradient is weighted by how often a context (and the Leader's action) occurs, about 1 / X (and 1 / (X L)), so
    that step sizes grow with that: random games of many sizes did best near X / tau_L and X L / (4 tau_F), the centre.
    """
    num_contexts, num_leader, _ = game.utility.shape
    powers = 4.0 ** np.arange(-3, 4)
    leader = num_contexts * powers / float(game.tau_leader)
    follower = num_contexts * num_leader * powers / (4.0 * float(game.tau_follower))
    grid = np.stack(np.meshgrid(leader, follower, indexing="ij"), axis=-1).reshape(-1, 2)
    gaps = final_gaps(game, jnp.asarray(grid, game.utility.dtype), method=method, num_steps=num_steps)
    best = np.unravel_index(np.argmin(gaps), (len(leader), len(follower)))
    edge = ", at the grid's edge" if {0, len(powers) - 1} & {int(index) for index in best} else ""
    return (float(leader[best[0]]), float(follower[best[1]])), f"best final gap of {len(grid)} pairs{edge}"


def compare(game: games.Game, steps: Steps, given: tuple[float, float] | None, progress: runs.Bars) -> dict[str, Rival]:
    """Solvers by name. SMIDA has the run's step sizes, the gradient methods those given, or the best for this game."""
    out = {}
    gradients = {"gradient descent-ascent": rivals.gradient_descent_ascent, "extragradient": rivals.extragradient}
    with progress.phase("compare", len(gradients) + 2, "solvers") as advance:

        def race(name: str, solver: rivals.Solver, etas: tuple[float, float] | None, chosen: str) -> None:
            gaps = np.asarray(rivals.run(solver, game, num_steps=steps.num_steps, record=mean_gap)[1])
            seconds = []
            for _ in range(4):
                began = time.perf_counter()
                jax.block_until_ready(rivals.run(solver, game, num_steps=steps.num_steps, record=nothing))
                seconds.append(time.perf_counter() - began)
            # The first run compiles.
            out[name] = Rival(etas, chosen, tabular_figures.Race(gaps, min(seconds[1:]) / steps.num_steps))
            advance(1)

        race("SMIDA", rivals.mirror_descent_ascent(**steps.etas), tuple(steps.etas.values()), "of this run")
        for name, method in gradients.items():
            etas, chosen = (given, "from flags") if given else best_etas(game, method, steps.num_steps)
            race(name, method(eta_leader=etas[0], eta_follower=etas[1]), etas, chosen)
        race("best response", rivals.best_response(), None, "")
    return out


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

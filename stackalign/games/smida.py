"""Stackelberg mirror descent-ascent (algorithm 1 of SMIDA).

`init` and `step` transcribe the algorithm. `solve` runs it as one compiled scan, by default without the Follower: its
iterates have a closed form, so that a step is one pass over the utility and nothing of its size is ever stored.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from stackalign.games import divergence, equilibrium, tilting
from stackalign.games.game import Game, conditional_cost, log_omega_ref


class State(NamedTuple):
    """An iterate of algorithm 1.

    step: `[]` int32, t.
    log_pi: `[X, L]`, the Leader's policy.
    log_omega: `[X, L, F]`, the Follower's policy.
    """

    step: jax.Array
    log_pi: jax.Array
    log_omega: jax.Array


class Iterate(NamedTuple):
    """What `solve` shows to `record`. A context that has stopped keeps the iterate that it stopped at.

    step: `[X]` int32, t.
    log_pi: `[X, L]`.
    cost: `[X, L]`, the Leader's costs (equation 5) against the Follower of step t.
    log_omega: `[X, L, F]`, or None where the Follower is not stored.
    """

    step: jax.Array
    log_pi: jax.Array
    cost: jax.Array
    log_omega: jax.Array | None


Recorder = Callable[[Game, equilibrium.Equilibrium, Iterate], Any]


class Solution(NamedTuple):
    """The last iterate of `solve` and what was recorded on the way.

    step: `[X]` int32, the steps that each context took.
    log_pi: `[X, L]`.
    cost: `[X, L]`, the Leader's costs against the last Follower.
    log_omega: `[X, L, F]`, or None where the Follower is not stored; `follower` gives it then.
    gap: `[X]`, the saddle gap of the last iterate in each context, in units of utility.
    trajectory: what `record` returned at t = 0, 1, ..., num_steps, stacked along a new first axis; None without it.
    """

    step: jax.Array
    log_pi: jax.Array
    cost: jax.Array
    log_omega: jax.Array | None
    gap: jax.Array
    trajectory: Any


def check_step_sizes(game: Game, *, eta_leader: float, eta_follower: float) -> None:
    """Condition 6, `0 < eta_L tau_L < eta_F tau_F <= 1`, for concrete numbers (or a batch of games).

    Products may exceed 1 by 8 units of rounding, so that `eta_follower = 1 / tau_follower` passes.

    Raises:
      ValueError: names the condition, both products and what to change.
    """
    leader = np.asarray(eta_leader, np.float64) * np.asarray(game.tau_leader, np.float64)
    follower = np.asarray(eta_follower, np.float64) * np.asarray(game.tau_follower, np.float64)
    limit = 1.0 + 8.0 * jnp.finfo(game.utility.dtype).eps
    for bad, fix in (
        (~(leader > 0.0), "eta_leader and tau_leader must be positive"),
        (~(leader < follower), "lower eta_leader or raise eta_follower: the Follower is the faster player"),
        (~(follower <= limit), "lower eta_follower to at most 1 / tau_follower"),
    ):
        if np.any(bad):
            first = np.unravel_index(np.argmax(bad), np.shape(bad))
            one, two = (np.broadcast_to(value, np.shape(bad))[first] for value in (leader, follower))
            raise ValueError(
                "step sizes must satisfy 0 < eta_leader * tau_leader < eta_follower * tau_follower <= 1 (condition 6): "
                f"eta_leader * tau_leader = {one:g}, eta_follower * tau_follower = {two:g}; {fix}"
            )


def init(game: Game) -> State:
    """Both players at their references."""
    return State(jnp.int32(0), game.log_pi_ref, log_omega_ref(game))


def step(state: State, game: Game, *, eta_leader: float, eta_follower: float) -> State:
    """One step of algorithm 1: both players move from the same iterate.

    `log pi' = (1 - eta_L tau_L) log pi + eta_L tau_L log pi_ref - eta_L r_t`, with r_t the cost of equation 5, and
    `log omega' = (1 - eta_F tau_F) log omega + eta_F tau_F log omega_ref + eta_F u`, each normalised over its actions.

    Args:
      state: the iterate.
      game: the game; both taus positive.
      eta_leader: step size of the Leader; see `check_step_sizes`, which this function does not call. A product
        `eta tau` above 1, which condition 6 rules out but for rounding, counts as 1.
      eta_follower: step size of the Follower.
    """
    return State(
        state.step + 1,
        _leader_step(game, state.log_pi, conditional_cost(game, state.log_omega), eta_leader),
        _follower_step(game, state.log_omega, eta_follower),
    )


def _leader_step(game: Game, log_pi: jax.Array, cost: jax.Array, eta: float) -> jax.Array:
    rate = jnp.minimum(eta * game.tau_leader, 1.0)
    return divergence.normalise((1.0 - rate) * log_pi + rate * game.log_pi_ref - eta * cost)


def _follower_step(game: Game, log_omega: jax.Array, eta: float) -> jax.Array:
    rate = jnp.minimum(eta * game.tau_follower, 1.0)
    return divergence.normalise((1.0 - rate) * log_omega + rate * game.log_omega_ref + eta * game.utility)


def decay(rate: jax.Array, steps: jax.Array) -> jax.Array:
    """`q^t = (1 - rate)^t` for a rate `eta tau` in [0, 1], with `0^0 = 1`; exact for small rates."""
    return jnp.exp(_log_decay(rate, steps))


def progress(rate: jax.Array, steps: jax.Array) -> jax.Array:
    """`1 - q^t`, which keeps its digits where q^t is close to 1."""
    return -jnp.expm1(_log_decay(rate, steps))


def _log_decay(rate, steps):
    rate = jnp.minimum(rate, 1.0)
    whole = rate == 1.0
    return jnp.where(whole, jnp.where(steps > 0, -jnp.inf, 0.0), steps * jnp.log1p(-jnp.where(whole, 0.5, rate)))


def _tilt(game: Game, eta: float, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weight a and `1 - tau_F a` of the Follower's iterates: `omega_t` is omega_ref tilted by `(1 - q_F^t) / tau_F`."""
    rate = eta * game.tau_follower
    weight, remaining = progress(rate, steps) / game.tau_follower, decay(rate, steps)
    return weight.astype(game.utility.dtype), remaining.astype(game.utility.dtype)


def follower(game: Game, steps: jax.Array, *, eta_follower: float) -> jax.Array:
    """The Follower after t steps in closed form, `log omega_t = log omega_ref + (1 - q_F^t) u / tau_F + const`.

    Args:
      game: the game, `tau_follower` > 0.
      steps: t, `[]` or one a context `[X]`.
      eta_follower: step size of the Follower.

    Returns:
      log-probabilities `[X, L, F]`.
    """
    weight = _tilt(game, eta_follower, jnp.asarray(steps))[0]
    return tilting.tilted(game, jnp.broadcast_to(weight, game.utility.shape[:1])[:, None, None])


def solve(
    game: Game,
    *,
    eta_leader: float,
    eta_follower: float,
    num_steps: int,
    tolerance: float | None = None,
    record: Recorder | None = None,
    store_follower: bool = False,
    steps_per_pass: int = 8,
) -> Solution:
    """Runs algorithm 1 from the references as one compiled scan.

    Contexts are independent games: each stops by itself, at the first iterate whose saddle gap is at most `tolerance`,
    and no result depends on which other contexts are there. Once all have stopped, nothing more is computed.

    Inside `jit` and `vmap` the condition on the step sizes can't be checked; call `check_step_sizes` before.

    Args:
      game: the game, both taus positive.
      eta_leader: step size of the Leader, in 1 / utility.
      eta_follower: step size of the Follower.
      num_steps: T, the most steps. Static.
      tolerance: saddle gap at which a context stops, in units of utility; None never stops. Rounding of about
        `eps * max |u|` is the least that can be reached.
      record: a pure function of the game, the equilibrium and the iterate, whose results are the trajectory. A new
        function object compiles anew. Static.
      store_follower: iterate the Follower too, as algorithm 1 is written, so that `record` sees it; takes several times
        the memory of the utility. Static.
      steps_per_pass: without a stored Follower, how many steps share one pass over the utility. Static.

    Raises:
      ValueError: step sizes outside condition 6; num_steps < 0; steps_per_pass < 1; a tolerance that is negative.
    """
    chex.assert_rank([game.utility, game.log_pi_ref, game.log_omega_ref], [3, 2, 3])
    if num_steps < 0:
        raise ValueError(f"num_steps must be at least 0, got {num_steps}")
    if steps_per_pass < 1:
        raise ValueError(f"steps_per_pass must be at least 1, got {steps_per_pass}")
    leaves = (game.tau_leader, game.tau_follower, eta_leader, eta_follower)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        check_step_sizes(game, eta_leader=eta_leader, eta_follower=eta_follower)
    if isinstance(tolerance, float | int) and not tolerance >= 0.0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    run = _solve_stored if store_follower else functools.partial(_solve, steps_per_pass=steps_per_pass)
    return run(game, eta_leader, eta_follower, tolerance, num_steps=num_steps, record=record)


class _Carry(NamedTuple):
    iterate: Iterate
    stopped: jax.Array  # [X] bool


def _start(game: Game, log_omega: jax.Array | None) -> _Carry:
    num_contexts = game.utility.shape[0]
    cost = jnp.zeros_like(game.log_pi_ref)
    return _Carry(
        Iterate(jnp.zeros(num_contexts, jnp.int32), game.log_pi_ref, cost, log_omega), jnp.zeros(num_contexts, bool)
    )


def _observe(carry: _Carry, cost: jax.Array, last: jax.Array, game: Game, solution, tolerance, record):
    """Puts the cost of step t into the iterate, records it, and marks the contexts that stop here."""
    iterate = carry.iterate._replace(cost=jnp.where(carry.stopped[:, None], carry.iterate.cost, cost))
    stopped = carry.stopped | last
    if tolerance is not None:
        stopped |= equilibrium.saddle_gap(game, iterate.log_pi, iterate.cost, solution) <= tolerance
    return _Carry(iterate, stopped), None if record is None else record(game, solution, iterate)


def _move(carry: _Carry, game: Game, eta_leader: float) -> _Carry:
    """The Leader's step in the contexts that have not stopped."""
    iterate, stopped = carry
    log_pi = _leader_step(game, iterate.log_pi, iterate.cost, eta_leader)
    return _Carry(
        iterate._replace(
            step=jnp.where(stopped, iterate.step, iterate.step + 1),
            log_pi=jnp.where(stopped[:, None], iterate.log_pi, log_pi),
        ),
        stopped,
    )


def _finish(carry: _Carry, game: Game, solution, trajectory) -> Solution:
    iterate = carry.iterate
    gap = equilibrium.saddle_gap(game, iterate.log_pi, iterate.cost, solution)
    return Solution(*iterate, gap, trajectory)


@functools.partial(jax.jit, static_argnames=("num_steps", "record", "steps_per_pass"))
def _solve(game, eta_leader, eta_follower, tolerance, *, num_steps, record, steps_per_pass) -> Solution:
    solution = equilibrium.closed_form(game)
    times = jnp.arange(num_steps + 1)
    num_passes = -(-len(times) // steps_per_pass)
    padded = jnp.minimum(jnp.arange(num_passes * steps_per_pass), num_steps)
    weights, decays = _tilt(game, eta_follower, padded)

    def one(carry, inputs):
        cost, time = inputs
        carry, recorded = _observe(carry, cost, time >= num_steps, game, solution, tolerance, record)
        return _move(carry, game, eta_leader), recorded

    def one_pass(carry, inputs):
        weights, decays, times = inputs
        best = jnp.broadcast_to(solution.follower_value, (steps_per_pass, *solution.follower_value.shape))

        def follow():
            return jax.lax.cond(jnp.all(carry.stopped), lambda: best, lambda: tilting.costs(game, weights, decays))

        # A Follower whose remaining distance is below rounding costs what the best response does. Apart from the
        # condition inside, so that it stays a condition in a batch of games, which stop at different times.
        cost = jax.lax.cond(decays[0] > jnp.finfo(decays.dtype).eps / 4, follow, lambda: best)
        return jax.lax.scan(one, carry, (cost, times))

    shape = (num_passes, steps_per_pass)
    inputs = (weights.reshape(shape), decays.reshape(shape), padded.reshape(shape))
    carry, trajectory = jax.lax.scan(one_pass, _start(game, None), inputs)
    trajectory = jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:])[: len(times)], trajectory)
    return _finish(carry, game, solution, trajectory)


@functools.partial(jax.jit, static_argnames=("num_steps", "record"))
def _solve_stored(game, eta_leader, eta_follower, tolerance, *, num_steps, record) -> Solution:
    solution = equilibrium.closed_form(game)

    def one(carry, time):
        cost = conditional_cost(game, carry.iterate.log_omega)
        carry, recorded = _observe(carry, cost, time >= num_steps, game, solution, tolerance, record)
        log_omega = _follower_step(game, carry.iterate.log_omega, eta_follower)
        log_omega = jnp.where(carry.stopped[:, None, None], carry.iterate.log_omega, log_omega)
        carry = _move(carry, game, eta_leader)
        return carry._replace(iterate=carry.iterate._replace(log_omega=log_omega)), recorded

    carry, trajectory = jax.lax.scan(one, _start(game, log_omega_ref(game)), jnp.arange(num_steps + 1))
    return _finish(carry, game, solution, trajectory)

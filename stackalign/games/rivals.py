"""Other ways to solve the same game, for comparison: gradient methods on softmax policies, and best responses.

Every method is a `Solver`, a triple of pure functions; `run` scans one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stackalign.games import divergence, equilibrium, smida
from stackalign.games.game import Game, conditional_cost, log_omega_ref, objective


class Solver(NamedTuple):
    """init: `(game) -> state`. step: `(state, game) -> state`. policies: `(state) -> (log_pi, log_omega)`."""

    init: Callable[[Game], Any]
    step: Callable[[Any, Game], Any]
    policies: Callable[[Any], tuple[jax.Array, jax.Array]]


class Logits(NamedTuple):
    """Softmax policies: the Leader's logits `[X, L]` and the Follower's `[X, L, F]`."""

    leader: jax.Array
    follower: jax.Array


def _references(game: Game) -> Logits:
    return Logits(game.log_pi_ref, log_omega_ref(game))


def _softmax(logits: Logits) -> tuple[jax.Array, jax.Array]:
    return divergence.normalise(logits.leader), divergence.normalise(logits.follower)


def _gradient(logits: Logits, game: Game) -> Logits:
    """Gradient of f (equation 4) in the logits."""
    return jax.grad(lambda logits: objective(game, *_softmax(logits)))(logits)


def _descend_ascend(logits: Logits, gradient: Logits, eta_leader: float, eta_follower: float) -> Logits:
    return Logits(logits.leader - eta_leader * gradient.leader, logits.follower + eta_follower * gradient.follower)


def gradient_descent_ascent(*, eta_leader: float, eta_follower: float) -> Solver:
    """Two-timescale gradient descent-ascent on softmax policies, as Stackelberg learning from human feedback does.

    Both players move from the same iterate along the exact gradient of f. The Follower's gradient after an action is
    weighted by how often the Leader plays it, so that it hardly learns to answer what is rarely played.

    Args:
      eta_leader: step size of the Leader's descent.
      eta_follower: step size of the Follower's ascent, the larger one.
    """

    def step(logits, game):
        return _descend_ascend(logits, _gradient(logits, game), eta_leader, eta_follower)

    return Solver(_references, step, _softmax)


def extragradient(*, eta_leader: float, eta_follower: float) -> Solver:
    """Extragradient on softmax policies (Korpelevich, 1976): the gradient is taken after a trial step."""

    def step(logits, game):
        trial = _descend_ascend(logits, _gradient(logits, game), eta_leader, eta_follower)
        return _descend_ascend(logits, _gradient(trial, game), eta_leader, eta_follower)

    return Solver(_references, step, _softmax)


def best_response() -> Solver:
    """Each player answers the other's last policy at best, simultaneously.

    The Follower sees the Leader's action, so its best response does not depend on the Leader's policy: the first step
    finds omega*, the second pi*. Only a game small enough to hold can be solved like that.
    """

    def step(policies, game):
        log_pi = equilibrium.leader_best_response(game, conditional_cost(game, policies[1]))[0]
        return log_pi, equilibrium.follower_best_response(game)

    return Solver(lambda game: tuple(_references(game)), step, lambda policies: policies)


def mirror_descent_ascent(*, eta_leader: float, eta_follower: float) -> Solver:
    """Algorithm 1 (`smida.step`) as a `Solver`."""
    step = functools.partial(smida.step, eta_leader=eta_leader, eta_follower=eta_follower)
    return Solver(smida.init, step, lambda state: (state.log_pi, state.log_omega))


@functools.partial(jax.jit, static_argnames=("solver", "num_steps", "record"))
def run(
    solver: Solver,
    game: Game,
    *,
    num_steps: int,
    record: Callable[[Game, equilibrium.Equilibrium, jax.Array, jax.Array], Any],
) -> tuple[Any, Any]:
    """Scans a solver.

    Args:
      solver: the method. Static, like all but the game.
      game: the game.
      num_steps: T.
      record: a pure function of the game, its equilibrium and the policies `[X, L]` and `[X, L, F]`.

    Returns:
      the last state, and what `record` returned at t = 0, ..., T, stacked.
    """
    solution = equilibrium.closed_form(game)

    def one(state, _):
        return solver.step(state, game), record(game, solution, *solver.policies(state))

    state, head = jax.lax.scan(one, solver.init(game), length=num_steps)
    last = record(game, solution, *solver.policies(state))
    return state, jax.tree.map(lambda rows, row: jnp.concatenate([rows, row[None]]), head, last)

"""The theorems of SMIDA as statements about iterates, checked to rounding.

`check` runs algorithm 1 (or any other step function) and evaluates every statement at every step and context; an
equality is stated as the size of its difference. Tolerances follow from the dtype's unit of rounding (`tolerances`), so
that float64 checks are sharp and float32 ones are as sharp as log-probabilities of that size can be.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stackalign.games import bounds, divergence, equilibrium, smida
from stackalign.games.game import Game, conditional_cost, context_objective


class Statement(NamedTuple):
    """`left <= right + tolerance` at every entry: arrays `[]`, `[X]` or `[X, L]`, of one rank but for scalars."""

    left: jax.Array
    right: jax.Array
    tolerance: jax.Array


class Worst(NamedTuple):
    """Where a statement is closest to failing, one entry a step: `[T + 1]` each.

    excess: `left - right - tolerance`; above 0 (or NaN) the statement fails.
    left: left-hand side there.
    right: right-hand side there.
    tolerance: what rounding may cost there.
    context: int32, the context.
    """

    excess: jax.Array
    left: jax.Array
    right: jax.Array
    tolerance: jax.Array
    context: jax.Array


class Violation(NamedTuple):
    """The first statement that fails: its name, the step t, the context, and both sides."""

    statement: str
    step: int
    context: int
    left: float
    right: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"{self.statement} fails at step {self.step}, context {self.context}: "
            f"{self.left:.17g} > {self.right:.17g} + {self.tolerance:.3g} (rounding)"
        )


class Tolerances(NamedTuple):
    """What rounding may cost at step t, `[]` each.

    log_omega: in one evaluation of log omega, of numbers of size `D_F / tau_F + max |log omega_ref|`.
    log_pi: in one evaluation of log pi, of numbers of size `D_L / tau_L + max |log pi_ref|`.
    cost: in r for a given omega.
    value: in an objective for given policies.
    log_omega_t: in the iterate: errors of old steps shrink by q_F a step, so min(t, 1 / (eta_F tau_F)) of them live.
    log_pi_t: likewise, with the costs' errors times eta_L; an error of omega_t costs r_t at most q_F^t D_F times it.
    """

    log_omega: jax.Array
    log_pi: jax.Array
    cost: jax.Array
    value: jax.Array
    log_omega_t: jax.Array
    log_pi_t: jax.Array


def tolerances(game: Game, c: bounds.Constants, time: jax.Array) -> Tolerances:
    """Tolerances for the dtype of the game: 8 units of rounding of the largest number in each evaluation."""
    unit = 8.0 * jnp.finfo(game.utility.dtype).eps
    largest = jnp.max(jnp.abs(game.utility))
    log_omega = unit * (c.follower_oscillation / c.tau_follower + jnp.max(jnp.abs(game.log_omega_ref)))
    log_pi = unit * (c.leader_oscillation / c.tau_leader + jnp.max(jnp.abs(game.log_pi_ref)))
    cost = unit * largest + c.tau_follower * log_omega
    log_omega_t = (log_omega + unit * largest / c.tau_follower) * (1.0 + jnp.minimum(time, 1.0 / c.follower_rate))
    log_pi_t = (log_pi + c.eta_leader * cost) * (1.0 + jnp.minimum(time, 1.0 / c.leader_rate))
    log_pi_t += c.eta_leader * c.follower_oscillation * log_omega_t * bounds.geometric_sum(c, time)
    return Tolerances(log_omega, log_pi, cost, cost + c.tau_leader * log_pi, log_omega_t, log_pi_t)


def statements(
    game: Game,
    solution: equilibrium.Equilibrium,
    c: bounds.Constants,
    state: smida.State,
    following: smida.State,
    *,
    eta_follower: float,
) -> dict[str, Statement]:
    """Every statement about the iterate `state` and the step from it to `following`, by its name in the paper.

    Args:
      game: the game, both taus positive.
      solution: its equilibrium.
      c: its constants.
      state: the iterate of step t.
      following: the iterate of step t + 1.
      eta_follower: step size of the Follower.
    """
    time, slack = state.step, tolerances(game, c, state.step)
    leader_gap = state.log_pi - solution.log_pi
    leader_kls = _both_ways(state.log_pi, solution.log_pi)
    follower_kls = _both_ways(state.log_omega, solution.log_omega)
    kl_to_best = divergence.kl(state.log_omega, solution.log_omega)
    shortfall = solution.follower_value - conditional_cost(game, state.log_omega)
    ratio = divergence.oscillation(state.log_omega - solution.log_omega)
    closed_form = state.log_omega - smida.follower(game, time, eta_follower=eta_follower)
    recursion = (following.log_pi - solution.log_pi) - (
        (1.0 - c.leader_rate) * leader_gap + c.eta_leader * c.tau_follower * kl_to_best
    )
    against_best = context_objective(game, state.log_pi, solution.log_omega)
    regret = against_best - solution.context_value - c.tau_leader * divergence.kl(state.log_pi, solution.log_pi)
    masses = jnp.stack(
        [jax.nn.logsumexp(state.log_pi, axis=-1), *jnp.moveaxis(jax.nn.logsumexp(state.log_omega, axis=-1), -1, 0)]
    )
    support = jnp.isfinite(state.log_pi).all(-1) & jnp.isfinite(state.log_omega).all((-2, -1))
    # An error d in a log-ratio costs KL at most d E|log-ratio|, and E|log-ratio| < KL + 1.
    return {
        "full support": Statement(
            jnp.where(support, jnp.max(jnp.abs(masses), axis=0), jnp.inf), 0.0, slack.log_pi + slack.log_omega
        ),
        "closed form of omega_t": Statement(divergence.oscillation(closed_form), 0.0, 2.0 * slack.log_omega_t),
        "equality 17": Statement(
            jnp.abs(ratio - bounds.follower_log_ratio(game, time, eta_follower=eta_follower)),
            0.0,
            2.0 * slack.log_omega_t,
        ),
        "inequality 16, Follower": Statement(follower_kls, ratio, slack.log_omega * (1.0 + follower_kls)),
        "inequality 16, Leader": Statement(
            leader_kls, divergence.oscillation(leader_gap), slack.log_pi * (1.0 + leader_kls)
        ),
        "bound 13": Statement(follower_kls, bounds.follower_bound(c, time), slack.log_omega_t * (1.0 + follower_kls)),
        "bound 14": Statement(leader_kls, bounds.leader_bound(c, time), slack.log_pi_t * (1.0 + leader_kls)),
        "bound 15": Statement(leader_kls, bounds.leader_bound_simple(c, time), slack.log_pi_t * (1.0 + leader_kls)),
        "bound 14 below bound 15": Statement(
            bounds.leader_bound(c, time), bounds.leader_bound_simple(c, time), slack.log_pi
        ),
        "lemma C.2, equality": Statement(jnp.abs(shortfall - c.tau_follower * kl_to_best), 0.0, 2.0 * slack.cost),
        "lemma C.2, sign": Statement(-shortfall, 0.0, 2.0 * slack.cost),
        "bound on r - r_t": Statement(
            shortfall, bounds.cost_bound(c, time), 2.0 * slack.cost + c.tau_follower * slack.log_omega_t
        ),
        "recursion of the Leader": Statement(
            divergence.oscillation(recursion), 0.0, 4.0 * (slack.log_pi + c.eta_leader * slack.cost)
        ),
        "lemma B.3, Leader": Statement(jnp.abs(regret), 0.0, 4.0 * slack.value),
        "saddle, Leader": Statement(solution.context_value, against_best, 4.0 * slack.value),
        "saddle, Follower": Statement(
            context_objective(game, solution.log_pi, state.log_omega), solution.context_value, 4.0 * slack.value
        ),
    }


def _both_ways(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.maximum(divergence.kl(log_p, log_q), divergence.kl(log_q, log_p))


def _worst(statement: Statement, num_contexts: int) -> Worst:
    shape = jnp.broadcast_shapes(*map(jnp.shape, statement)) or (num_contexts,)
    left, right, tolerance = (jnp.broadcast_to(side, shape) for side in statement)
    excess = jnp.nan_to_num(left - right - tolerance, nan=jnp.inf)
    place = jnp.argmax(excess)
    context = place // (excess.size // num_contexts)
    return Worst(*(side.reshape(-1)[place] for side in (excess, left, right, tolerance)), context.astype(jnp.int32))


def check(
    game: Game,
    *,
    eta_leader: float,
    eta_follower: float,
    num_steps: int,
    step: Callable[..., smida.State] = smida.step,
) -> dict[str, Worst]:
    """Runs algorithm 1 from the references and evaluates every statement at t = 0, ..., num_steps.

    Args:
      game: the game, both taus positive. The Follower and several arrays of its size are stored.
      eta_leader: step size of the Leader.
      eta_follower: step size of the Follower.
      num_steps: T. Static.
      step: the step that is checked, with the signature of `smida.step`. Static.

    Returns:
      for every statement its worst place at every step.

    Raises:
      ValueError: step sizes outside condition 6.
    """
    smida.check_step_sizes(game, eta_leader=eta_leader, eta_follower=eta_follower)
    return _check(game, eta_leader, eta_follower, num_steps=num_steps, step=step)


@functools.partial(jax.jit, static_argnames=("num_steps", "step"))
def _check(game, eta_leader, eta_follower, *, num_steps, step) -> dict[str, Worst]:
    solution = equilibrium.closed_form(game)
    c = bounds.constants(game, eta_leader=eta_leader, eta_follower=eta_follower)

    def one(state, _):
        following = step(state, game, eta_leader=eta_leader, eta_follower=eta_follower)
        found = statements(game, solution, c, state, following, eta_follower=eta_follower)
        return following, {name: _worst(statement, game.utility.shape[0]) for name, statement in found.items()}

    return jax.lax.scan(one, smida.init(game), length=num_steps + 1)[1]


def first_violation(report: dict[str, Worst]) -> Violation | None:
    """The violation of the earliest step (of these the one with the largest excess over its tolerance), or None."""
    found = []
    for name, worst in report.items():
        failing = np.asarray(worst.excess) > 0.0
        if failing.any():
            step = int(np.argmax(failing))
            left, right, tolerance = (float(side[step]) for side in worst[1:4])
            found.append((step, -float(worst.excess[step]), name, int(worst.context[step]), left, right, tolerance))
    if not found:
        return None
    step, _, name, context, left, right, tolerance = min(found)
    return Violation(name, step, context, left, right, tolerance)

"""The Stackelberg equilibrium in closed form (theorem 4.2), best responses, and distances from the equilibrium."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from stackalign.games import divergence, tilting
from stackalign.games.game import Game, conditional_cost


class Equilibrium(NamedTuple):
    """A Stackelberg equilibrium.

    log_pi: `[X, L]`, the Leader's policy.
    log_omega: `[X, L, F]`, the Follower's. Under `jit` it costs nothing where it is not used.
    follower_value: `[X, L]`, r(x, y): what the Follower gets after the Leader's action y.
    context_value: `[X]`, what the game is worth in each context.
    value: `[]`, the value of the game, `sum(prior * context_value)`.
    """

    log_pi: jax.Array
    log_omega: jax.Array
    follower_value: jax.Array
    context_value: jax.Array
    value: jax.Array


@jax.jit
def closed_form(game: Game) -> Equilibrium:
    """The equilibrium of theorem 4.2; unique where both taus are positive.

    At tau = 0 a player's policy is the limit tau -> 0: its reference, restricted to the best actions and renormalised;
    the other actions have log-probability -inf. The Leader's costs r are results of arithmetic, so that costs within
    16 units of rounding of the smallest count as equal to it at `tau_leader` = 0.
    """
    chex.assert_rank(game.utility, 3)
    value = follower_value(game)
    log_pi, context_value = leader_best_response(game, value)
    return Equilibrium(log_pi, follower_best_response(game), value, context_value, jnp.sum(game.prior * context_value))


def follower_value(game: Game) -> jax.Array:
    """The Follower's optimal value, `r = tau_F log sum omega_ref exp(u / tau_F)`; `max u` at tau_F = 0: `[X, L]`."""
    weight = 1.0 / game.tau_follower
    return tilting.costs(game, weight[None], jnp.zeros((1,), game.utility.dtype))[0]


def follower_best_response(game: Game) -> jax.Array:
    """`omega*(y' | x, y)` proportional to `omega_ref exp(u / tau_F)`, best against every Leader: `[X, L, F]`."""
    return tilting.tilted(game, 1.0 / game.tau_follower)


def leader_best_response(game: Game, cost: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The Leader's best policy against costs of its actions (lemma B.3).

    Args:
      game: the game.
      cost: `[X, L]`: `follower_value` for a Follower that best-responds, `conditional_cost` for a fixed one.

    Returns:
      log-probabilities `[X, L]` proportional to `pi_ref exp(-cost / tau_L)`, and the value of each context `[X]`,
      `-tau_L log sum pi_ref exp(-cost / tau_L)`.
    """
    chex.assert_equal_shape([cost, game.log_pi_ref])
    lowest = jnp.min(cost, axis=-1, keepdims=True)
    slack = 16 * jnp.finfo(cost.dtype).eps * jnp.max(jnp.abs(cost), axis=-1, keepdims=True)
    excess = cost - lowest
    excess = jnp.where((game.tau_leader == 0.0) & (excess <= slack), 0.0, excess)
    worse = excess > 0.0
    logits = game.log_pi_ref - jnp.where(worse, jnp.where(worse, excess, 1.0) / game.tau_leader, 0.0)
    log_partition = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    value = lowest - game.tau_leader * log_partition
    return logits - log_partition, value[..., 0]


def saddle_gap(game: Game, log_pi: jax.Array, cost: jax.Array, solution: Equilibrium | None = None) -> jax.Array:
    """`max_omega f(pi, omega) - min_pi f(pi, omega)` in each context; 0 at the equilibrium only: `[X]`.

    It is the Leader's regret, `tau_L KL(pi || pi*)`, plus `V* - min_pi f(pi, omega)`, which is
    `tau_L log E_pi*[exp((r - cost) / tau_L)]`. Neither subtracts large numbers, so that the gap stays exact near 0 and
    is never negative. Its mean under the prior is the gap of f.

    Args:
      game: the game, `tau_leader` > 0.
      log_pi: `[X, L]`.
      cost: `[X, L]`, `conditional_cost` of the Follower's policy.
      solution: the equilibrium, if the caller has it.
    """
    if solution is None:
        solution = closed_form(game)
    chex.assert_equal_shape([log_pi, cost, solution.follower_value])
    leader = game.tau_leader * divergence.kl(log_pi, solution.log_pi)
    advantage = jnp.maximum(solution.follower_value - cost, 0.0) / game.tau_leader
    highest = jnp.max(advantage, axis=-1, keepdims=True)
    weights = jnp.exp(solution.log_pi)
    small = jnp.log1p(jnp.sum(weights * jnp.expm1(jnp.minimum(advantage, 1.0)), axis=-1))
    large = jax.nn.logsumexp(solution.log_pi + advantage, axis=-1)
    return leader + game.tau_leader * jnp.where(highest[..., 0] < 1.0, small, jnp.maximum(large, 0.0))


class Exploitability(NamedTuple):
    """What each player could still gain, in units of utility, averaged over contexts: `[]` each.

    leader: `f(pi, omega) - min_pi f(pi, omega)`.
    follower: `max_omega f(pi, omega) - f(pi, omega)`, equal to `tau_F KL_{rho, pi}(omega || omega*)`.
    stackelberg: `max_omega f(pi, omega) - V*`, the Leader's regret as the one who commits.
    """

    leader: jax.Array
    follower: jax.Array
    stackelberg: jax.Array


@jax.jit
def exploitability(game: Game, log_pi: jax.Array, log_omega: jax.Array) -> Exploitability:
    """Gains from deviating to a best response, at policies `[X, L]` and `[X, L, F]`; works at tau = 0 too.

    `leader + follower` is the prior's mean of `saddle_gap`.
    """
    cost, value = conditional_cost(game, log_omega), follower_value(game)
    pi = jnp.exp(log_pi)
    regulariser = game.tau_leader * divergence.kl(log_pi, game.log_pi_ref)
    reply, best = leader_best_response(game, cost)[1], leader_best_response(game, value)[1]
    current = jnp.sum(pi * cost, axis=-1) + regulariser
    worst = jnp.sum(pi * value, axis=-1) + regulariser
    return Exploitability(
        *(jnp.sum(game.prior * jnp.maximum(gain, 0.0)) for gain in (current - reply, worst - current, worst - best))
    )

"""Constants and right-hand sides of the convergence theorem (theorem C.1 of SMIDA).

Rates are `s = eta tau`, factors `q = 1 - s`. Times may be arrays; every bound has their shape.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stackalign.games import divergence, equilibrium, smida
from stackalign.games.game import Game


class Constants(NamedTuple):
    """What theorem C.1 needs of a game and its step sizes; `[]` each.

    leader_rate: `eta_L tau_L`, so that q_L = 1 - leader_rate.
    follower_rate: `eta_F tau_F`.
    kappa: `follower_rate / leader_rate` > 1.
    eta_leader: step size of the Leader.
    tau_leader: weight of the Leader's regulariser.
    tau_follower: weight of the Follower's.
    follower_oscillation: D_F, the largest oscillation of u(x, y, .).
    oscillation: D, the largest oscillation of u(x, ., .).
    leader_oscillation: D_L, the largest oscillation of r(x, .); at most D.
    """

    leader_rate: jax.Array
    follower_rate: jax.Array
    kappa: jax.Array
    eta_leader: jax.Array
    tau_leader: jax.Array
    tau_follower: jax.Array
    follower_oscillation: jax.Array
    oscillation: jax.Array
    leader_oscillation: jax.Array


@jax.jit
def constants(game: Game, *, eta_leader: float, eta_follower: float) -> Constants:
    """The constants of theorem C.1; both taus positive, step sizes within condition 6 (`smida.check_step_sizes`)."""
    leader_rate = jnp.minimum(eta_leader * game.tau_leader, 1.0)
    follower_rate = jnp.minimum(eta_follower * game.tau_follower, 1.0)
    return Constants(
        leader_rate,
        follower_rate,
        follower_rate / leader_rate,
        jnp.asarray(eta_leader, game.utility.dtype),
        game.tau_leader,
        game.tau_follower,
        jnp.max(divergence.oscillation(game.utility)),
        jnp.max(divergence.oscillation(game.utility, axis=(-2, -1))),
        jnp.max(divergence.oscillation(equilibrium.follower_value(game))),
    )


def follower_log_ratio(game: Game, time: jax.Array, *, eta_follower: float) -> jax.Array:
    """Equality 17, `osc(log omega_t - log omega*) = q_F^t osc(u(x, y, .)) / tau_F`, for one time: `[X, L]`."""
    remaining = smida.decay(eta_follower * game.tau_follower, time)
    return remaining * divergence.oscillation(game.utility) / game.tau_follower


def follower_bound(c: Constants, time: jax.Array) -> jax.Array:
    """Bound 13 on both directions of KL between omega_t and omega*, at every x and y: `q_F^t D_F / tau_F`."""
    return smida.decay(c.follower_rate, time) * c.follower_oscillation / c.tau_follower


def cost_bound(c: Constants, time: jax.Array) -> jax.Array:
    """Bound on `r - r_t` (proof of theorem C.1, with lemma C.2): `D_F q_F^t`, in units of utility."""
    return smida.decay(c.follower_rate, time) * c.follower_oscillation


def geometric_sum(c: Constants, time: jax.Array) -> jax.Array:
    """`sum_{k < t} q_L^(t-1-k) q_F^k = (q_L^t - q_F^t) / (q_L - q_F)`, without the difference, which cancels."""
    leader_factor = 1.0 - c.leader_rate  # positive: the Leader's rate is below the Follower's, which is at most 1
    gap = c.follower_rate - c.leader_rate
    ratio = jnp.minimum(gap / leader_factor, 1.0)  # q_F / q_L = 1 - ratio
    return smida.decay(c.leader_rate, time) * smida.progress(ratio, time) / gap


def leader_bound(c: Constants, time: jax.Array) -> jax.Array:
    """Bound 14 on both directions of KL between pi_t and pi*, in every context.

    `q_L^t D_L / tau_L + eta_L D_F (q_L^t - q_F^t) / (q_L - q_F)`.
    """
    start = smida.decay(c.leader_rate, time) * c.leader_oscillation / c.tau_leader
    return start + c.eta_leader * c.follower_oscillation * geometric_sum(c, time)


def leader_bound_simple(c: Constants, time: jax.Array) -> jax.Array:
    """Bound 15, weaker than 14: `q_L^t (D / tau_L) kappa / (kappa - 1)`."""
    return smida.decay(c.leader_rate, time) * (c.oscillation / c.tau_leader) * c.kappa / (c.kappa - 1.0)


def steps_until(c: Constants, divergence: float) -> jax.Array:
    """Steps after which bound 15 is at most `divergence` (nats): `[]` int32, what the theorem promises beforehand."""
    start = leader_bound_simple(c, jnp.int32(0))
    steps = jnp.log(divergence / start) / jnp.log1p(-c.leader_rate)
    return jnp.maximum(jnp.ceil(steps), 0).astype(jnp.int32)

"""Finite contextual zero-sum Stackelberg games with regularisation towards references (section 4 of SMIDA)."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from stackalign.games import divergence


class Game(NamedTuple):
    """A game; made by `make_game`, which validates. A pytree of arrays: `vmap` over a leading axis batches games.

    In context x ~ prior the Leader commits to y ~ pi(. | x); the Follower sees both and answers y' ~ omega(. | x, y).
    The Follower maximises `utility[x, y, y']`, the Leader minimises it. L and F are the numbers of their actions, which
    the theory lets differ; utilities that compare two responses have L = F.

    utility: `[X, L, F]`.
    prior: `[X]`, the distribution of contexts, of full support.
    log_pi_ref: `[X, L]`, log-probabilities of the Leader's reference.
    log_omega_ref: log-probabilities of the Follower's reference, `[X, L, F]` or with size 1 for what it does not depend
      on; size 1 in the last axis is the uniform distribution, log(1/F).
    tau_leader: `[]`, weight of the Leader's regulariser, >= 0, in units of utility.
    tau_follower: `[]`, weight of the Follower's.
    """

    utility: jax.Array
    prior: jax.Array
    log_pi_ref: jax.Array
    log_omega_ref: jax.Array
    tau_leader: jax.Array
    tau_follower: jax.Array


def make_game(
    utility: ArrayLike,
    *,
    tau_leader: ArrayLike,
    tau_follower: ArrayLike,
    prior: ArrayLike | None = None,
    pi_ref: ArrayLike | None = None,
    omega_ref: ArrayLike | None = None,
    log_pi_ref: ArrayLike | None = None,
    log_omega_ref: ArrayLike | None = None,
) -> Game:
    """Validates concrete arrays on the host and makes a game of them.

    Args:
      utility: `[X, L, F]` finite. float64 is kept under `jax.enable_x64`, everything else becomes float32.
      tau_leader: >= 0.
      tau_follower: >= 0.
      prior: `[X]` positive, sums to 1; uniform by default.
      pi_ref: `[X, L]` or `[L]` positive probabilities; uniform by default.
      omega_ref: `[X, L, F]` positive probabilities, or size 1 in the first axes, or `[F]`; uniform by default (which
        takes no memory).
      log_pi_ref: the same as log-probabilities, for probabilities that underflow; instead of `pi_ref`.
      log_omega_ref: instead of `omega_ref`.

    Raises:
      ValueError: names the field and what is wrong with it: shape, values that are not finite, a distribution that is
        not normalised (to 1e-4 in float32, 1e-9 in float64) or not of full support, a negative tau.
    """
    utility = np.asarray(utility)
    if utility.ndim != 3 or 0 in utility.shape:
        raise ValueError(f"utility must have shape [contexts, Leader actions, Follower actions], got {utility.shape}")
    dtype = jnp.float64 if jax.config.jax_enable_x64 and utility.dtype == np.float64 else jnp.float32
    with np.errstate(over="ignore"):
        utility = _finite("utility", utility, dtype)
    num_contexts, num_leader, num_follower = utility.shape
    if prior is None:
        prior = np.full(num_contexts, 1.0 / num_contexts)
    prior = _numbers("prior", prior)
    if prior.shape != (num_contexts,):
        raise ValueError(f"prior must have shape [{num_contexts}], one entry a context of utility, got {prior.shape}")
    _distribution("prior", prior, prior, dtype)

    log_pi_ref = _reference("pi_ref", pi_ref, log_pi_ref, (num_contexts, num_leader), dtype)
    log_pi_ref = np.broadcast_to(log_pi_ref, (num_contexts, num_leader))
    log_omega_ref = _reference("omega_ref", omega_ref, log_omega_ref, utility.shape, dtype)
    taus = {"tau_leader": tau_leader, "tau_follower": tau_follower}
    for name, value in taus.items():
        value = _numbers(name, value)
        if value.shape != () or not 0.0 <= value < np.inf:
            raise ValueError(f"{name} must be one finite number >= 0, got {value}")
    game = Game(utility, prior / prior.sum(), log_pi_ref, log_omega_ref, **taus)
    return Game(*(jnp.asarray(leaf, dtype) for leaf in game))


def _numbers(name: str, values: ArrayLike) -> np.ndarray:
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers of one shape: {error}") from error


def _finite(name: str, values: np.ndarray, dtype) -> np.ndarray:
    try:
        cast = values.astype(dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers, got dtype {values.dtype}") from error
    finite = np.isfinite(cast)
    if not finite.all():
        where = tuple(int(i) for i in np.unravel_index(np.argmin(finite), finite.shape))
        why = f"does not fit {jnp.dtype(dtype).name}" if np.isfinite(values[where]) else "is not finite"
        raise ValueError(f"{name}{list(where)} = {values[where]} {why}")
    return cast


def _distribution(name: str, probabilities: np.ndarray, support: np.ndarray, dtype) -> None:
    """`support` is positive where the distribution has mass: the probabilities, or exp of finite log-probabilities."""
    bad = ~(support > 0.0) | ~np.isfinite(support)
    if bad.any():
        where = tuple(int(i) for i in np.unravel_index(np.argmax(bad), bad.shape))
        raise ValueError(f"{name} must have full support: entry {list(where)} is {probabilities[where]}")
    total = probabilities.sum(-1)
    off = np.abs(total - 1.0) > (1e-9 if dtype == jnp.float64 else 1e-4)
    if off.any():
        where = tuple(int(i) for i in np.unravel_index(np.argmax(off), off.shape))
        raise ValueError(f"{name} must sum to 1 over its last axis: sums to {total[where]} at {list(where)}")


def _reference(name: str, probabilities, log_probabilities, shape: tuple[int, ...], dtype) -> np.ndarray:
    """Log-probabilities with as many axes as `shape`, renormalised; size 1 where the argument has it or lacks axes."""
    if probabilities is None and log_probabilities is None:
        return np.full((1,) * len(shape), -np.log(shape[-1]))
    if probabilities is not None and log_probabilities is not None:
        raise ValueError(f"give {name} or log_{name}, not both")
    if log_probabilities is not None:
        log_values = _numbers(f"log_{name}", log_probabilities)
        values = np.exp(log_values)
    else:
        values = _numbers(name, probabilities)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_values = np.log(values)
    fits = 1 <= values.ndim <= len(shape) and values.shape[-1] == shape[-1]
    fits = fits and all(size in (1, full) for size, full in zip(values.shape[::-1], shape[::-1], strict=False))
    if not fits:
        raise ValueError(f"{name} must have shape {list(shape)} (or 1 in its first axes), got {list(values.shape)}")
    support = np.where(np.isfinite(log_values), 1.0, 0.0) if log_probabilities is not None else values
    _distribution(name, values, support, dtype)
    log_values = log_values - np.log(values.sum(-1, keepdims=True))
    return log_values.reshape((1,) * (len(shape) - values.ndim) + values.shape)


def log_omega_ref(game: Game) -> jax.Array:
    """The Follower's reference at full size, `[X, L, F]`."""
    return jnp.broadcast_to(game.log_omega_ref, game.utility.shape)


def conditional_cost(game: Game, log_omega: jax.Array) -> jax.Array:
    """Equation 5, `r(x, y) = E_omega[u] - tau_F KL(omega || omega_ref)`: what action y costs the Leader in context x.

    Args:
      game: the game.
      log_omega: `[X, L, F]`.

    Returns:
      `[X, L]`, in units of utility.
    """
    chex.assert_equal_shape([game.utility, log_omega])
    expected = jnp.sum(jnp.exp(log_omega) * game.utility, axis=-1)
    return expected - game.tau_follower * divergence.kl(log_omega, log_omega_ref(game))


def leader_kl(game: Game, log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`KL(p || q)` of two Leader policies `[X, L]`: in every context `[X]`, and its mean under the prior `[]`."""
    chex.assert_equal_shape([log_p, log_q])
    per_context = divergence.kl(log_p, log_q)
    return per_context, jnp.sum(game.prior * per_context)


def follower_kl(game: Game, log_pi: jax.Array, log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`KL(p || q)` of two Follower policies `[X, L, F]`.

    Returns:
      At every context and Leader action `[X, L]`, and the mean under the prior and the Leader's policy `log_pi` `[]`.
    """
    chex.assert_equal_shape([log_p, log_q])
    per_action = divergence.kl(log_p, log_q)
    return per_action, jnp.sum(game.prior[:, None] * jnp.exp(log_pi) * per_action)


def context_objective(game: Game, log_pi: jax.Array, log_omega: jax.Array) -> jax.Array:
    """The part of the objective f (equation 4) that each context contributes, before the prior: `[X]`."""
    cost = conditional_cost(game, log_omega)
    return jnp.sum(jnp.exp(log_pi) * cost, axis=-1) + game.tau_leader * divergence.kl(log_pi, game.log_pi_ref)


def objective(game: Game, log_pi: jax.Array, log_omega: jax.Array) -> jax.Array:
    """Equation 4, `f = E[u] + tau_L KL(pi || pi_ref) - tau_F KL(omega || omega_ref)`: `[]`.

    Args:
      game: the game.
      log_pi: `[X, L]` log-probabilities of the Leader, who minimises f.
      log_omega: `[X, L, F]` log-probabilities of the Follower, who maximises it.
    """
    chex.assert_equal_shape([log_pi, game.log_pi_ref])
    return jnp.sum(game.prior * context_objective(game, log_pi, log_omega))

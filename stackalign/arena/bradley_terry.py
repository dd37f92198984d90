"""Bradley-Terry strengths from the same duel records: a principled alternative to the Elo-style reputations."""

import chex
import jax
import jax.numpy as jnp


def wins(
    first: jax.Array,
    second: jax.Array,
    scores: jax.Array,
    valid: jax.Array,
    num_models: int,
) -> jax.Array:
    """Counts wins, a tie as half a win for each side.

    Args:
      first: `[D]` int, first combatants.
      second: `[D]` int, second combatants.
      scores: `[D, 2]` aggregated scores.
      valid: `[D]` bool; a duel that is not valid, or of a model with itself, does not count.
      num_models: m, static.

    Returns:
      `[m, m]`, entry (i, j) the wins of i over j.
    """
    chex.assert_rank([first, second, scores, valid], [1, 1, 2, 1])
    counted = (valid & (first != second)).astype(float)
    share = jnp.where(valid, 0.5 * (1.0 + jnp.sign(scores[:, 0] - scores[:, 1])), 0.0)
    table = jnp.zeros((num_models, num_models)).at[first, second].add(counted * share)
    return table.at[second, first].add(counted * (1.0 - share))


def strengths(wins: jax.Array, *, prior_precision: float = 0.1, num_steps: int = 50) -> jax.Array:
    """Maximum a posteriori log-strengths: `P(i beats j) = sigmoid(theta_i - theta_j)`, `theta ~ N(0, 1/precision)`.

    The prior keeps models that always won (or never met) finite. Newton's method, each step shortened to
    `log(1 + s) / s` of its length where s is the spread of the step: the logistic loss is self-concordant, so the
    posterior rises at every step from any start, and full steps return near the optimum.

    Args:
      wins: `[m, m]` of `wins`.
      prior_precision: > 0.
      num_steps: Newton steps, static.

    Returns:
      `[m]` with mean 0, in natural-log odds.
    """
    chex.assert_rank(wins, 2)
    num_models = wins.shape[0]
    games = wins + wins.T
    identity = jnp.eye(num_models, dtype=wins.dtype)

    def step(_, theta):
        p = jax.nn.sigmoid(theta[:, None] - theta[None, :])
        gradient = jnp.sum(wins - games * p, axis=1) - prior_precision * theta
        curvature = games * p * (1.0 - p)
        hessian = jnp.diag(jnp.sum(curvature, axis=1)) - curvature + prior_precision * identity
        move = jnp.linalg.solve(hessian, gradient)
        spread = jnp.max(move) - jnp.min(move)
        theta = theta + move * jnp.where(spread > 0, jnp.log1p(spread) / jnp.where(spread > 0, spread, 1.0), 1.0)
        # The optimum has mean 0; rounding must not drift from it.
        return theta - jnp.mean(theta)

    return jax.lax.fori_loop(0, num_steps, step, jnp.zeros((num_models,), wins.dtype))

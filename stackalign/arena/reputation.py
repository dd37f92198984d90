"""Reputations of the models and their deviations (equations 9 to 11), under the paper's or the public code's rules."""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ReputationConfig:
    """Constants and conventions of the rating; the defaults are the `paper` preset.

    The paper gives no starting rating, starting deviation or floor: those four are the public Sparta code's.

    Attributes:
      initial_rating: R_0.
      initial_deviation: sigma_0, kept until a model has two deltas.
      min_rating: floor of R.
      min_deviation: floor of sigma; the paper prints none, and without one the ratings freeze.
      initial_k: K_0 of equation 10.
      min_k: K_min.
      decay: alpha.
      decay_steps: n_s.
      window: W of equation 11, the number of deltas that sigma looks back on.
      ddof: 1 for the sample deviation of equation 11, 0 for the population deviation of the public code.
      scale: lambda of equation 9.
      epsilon: floor of the gap factor.
      simultaneous: both sides use the values before the duel (equation 9). Otherwise the second combatant's update
        sees the first one's new rating, as in the public code.
      per_model_count: n counts the model's own updates. Otherwise one count of all duels, unscored ones included.
      floored_exponent: alpha is raised to floor(n / n_s) (equation 10). Otherwise to n / n_s.
    """

    initial_rating: float = 100.0
    initial_deviation: float = 0.5
    min_rating: float = 10.0
    min_deviation: float = 0.1
    initial_k: float = 10.0
    min_k: float = 5.0
    decay: float = 0.9
    decay_steps: int = 10
    window: int = 20
    ddof: int = 1
    scale: float = 20.0
    epsilon: float = 0.01
    simultaneous: bool = True
    per_model_count: bool = True
    floored_exponent: bool = True


PAPER = ReputationConfig()
SPARTA = ReputationConfig(window=10, ddof=0, simultaneous=False, per_model_count=False, floored_exponent=False)
PRESETS = {"paper": PAPER, "sparta": SPARTA}


class ReputationState(NamedTuple):
    """Ratings of m models.

    ratings: `[m]` R, at least `min_rating`.
    deviations: `[m]` sigma, at least `min_deviation` (or `initial_deviation`).
    deltas: `[m, W]` applied rating changes, oldest first; only the last `min(counts, W)` of a row are real.
    counts: `[m]` int32, updates of each model.
    total: [] int32, duels seen, scored or not.
    """

    ratings: jax.Array
    deviations: jax.Array
    deltas: jax.Array
    counts: jax.Array
    total: jax.Array


def init(num_models: int, config: ReputationConfig = PAPER) -> ReputationState:
    """All models at the initial rating and deviation, without history."""
    return ReputationState(
        ratings=jnp.full((num_models,), config.initial_rating, float),
        deviations=jnp.full((num_models,), config.initial_deviation, float),
        deltas=jnp.zeros((num_models, config.window), float),
        counts=jnp.zeros((num_models,), jnp.int32),
        total=jnp.zeros((), jnp.int32),
    )


def k_factor(count: chex.Numeric, config: ReputationConfig = PAPER) -> jax.Array:
    """Equation 10, `max(K_min, K_0 alpha^floor(n / n_s))`, at n = `count`, the current update included."""
    count = jnp.asarray(count)
    exponent = count // config.decay_steps if config.floored_exponent else count.astype(float) / config.decay_steps
    return jnp.maximum(config.min_k, config.initial_k * config.decay ** exponent.astype(float))


def gap_factor(
    rating: jax.Array, other_rating: jax.Array, deviation: jax.Array, other_deviation: jax.Array, epsilon: float
) -> jax.Array:
    """`max(|Phi(z) - Phi(-z)|, epsilon)` of equation 9, `z = (R - R') / sqrt(sigma^2 + sigma'^2)`.

    Where both deviations are 0, z is undefined (0/0 at equal ratings) and the factor is `epsilon`.
    """
    spread = jnp.sqrt(jnp.square(deviation) + jnp.square(other_deviation))
    z = jnp.where(spread > 0, (rating - other_rating) / jnp.where(spread > 0, spread, 1.0), 0.0)
    # Phi(z) - Phi(-z) = erf(z / sqrt(2)), without the cancellation near 0.
    return jnp.maximum(jnp.abs(jax.lax.erf(z / jnp.sqrt(2.0).astype(z.dtype))), epsilon)


def _deviation(deltas: jax.Array, count: jax.Array, config: ReputationConfig) -> jax.Array:
    """Equation 11 over the last `min(count, W)` entries of `deltas` `[W]`; the initial deviation below two."""
    size = jnp.minimum(count, config.window)
    real = jnp.arange(config.window) >= config.window - size
    mean = jnp.sum(jnp.where(real, deltas, 0.0)) / jnp.maximum(size, 1)
    squares = jnp.sum(jnp.where(real, jnp.square(deltas - mean), 0.0))
    spread = jnp.sqrt(squares / jnp.maximum(size - config.ddof, 1))
    return jnp.where(size < 2, config.initial_deviation, jnp.maximum(spread, config.min_deviation))


def update(
    state: ReputationState,
    first: chex.Numeric,
    second: chex.Numeric,
    score_first: chex.Numeric,
    score_second: chex.Numeric,
    valid: chex.Numeric,
    config: ReputationConfig = PAPER,
) -> ReputationState:
    """One duel: equation 9 for both combatants, then equation 11 for their deviations.

    `R_i += (K_n / lambda)(s_i - s_j) tanh(sigma_i) gap_factor`, floored; the recorded delta is the change after
    flooring. A duel that is not valid, or of a model with itself, changes nothing but `total`.

    Args:
      state: ratings of m models.
      first: [] int, number of the first combatant.
      second: [] int, number of the second.
      score_first: [] aggregated raw score of the first combatant's answer (equation 8).
      score_second: [] that of the second's.
      valid: [] bool, whether both scores exist.
      config: constants, static.
    """
    chex.assert_rank([first, second, score_first, score_second, valid], 0)
    chex.assert_shape(state.deltas, (state.ratings.shape[0], config.window))
    valid = jnp.asarray(valid) & (jnp.asarray(first) != jnp.asarray(second))
    score_gap = jnp.where(valid, jnp.asarray(score_first) - jnp.asarray(score_second), 0.0)
    total = state.total + 1

    def delta(model, opponent_rating, opponent, gap):
        count = state.counts[model] + 1 if config.per_model_count else total
        rating, deviation = state.ratings[model], state.deviations[model]
        factor = gap_factor(rating, opponent_rating, deviation, state.deviations[opponent], config.epsilon)
        change = k_factor(count, config) / config.scale * gap * jnp.tanh(deviation) * factor
        return jnp.maximum(change, config.min_rating - rating)

    delta_first = delta(first, state.ratings[second], second, score_gap)
    seen = state.ratings[first] if config.simultaneous else state.ratings[first] + delta_first
    delta_second = delta(second, seen, first, -score_gap)

    pair = jnp.stack([jnp.asarray(first), jnp.asarray(second)])
    change = jnp.stack([delta_first, delta_second]).astype(state.ratings.dtype)
    ratings = jnp.maximum(state.ratings.at[pair].add(change), config.min_rating)
    counts = state.counts.at[pair].add(1)
    deltas = state.deltas.at[pair].set(jnp.concatenate([state.deltas[pair, 1:], change[:, None]], axis=1))
    spreads = jax.vmap(lambda d, n: _deviation(d, n, config))(deltas[pair], counts[pair])
    deviations = state.deviations.at[pair].set(spreads.astype(state.deviations.dtype))
    moved = ReputationState(ratings, deviations, deltas, counts, total)
    kept = state._replace(total=total)
    return jax.tree.map(lambda new, old: jnp.where(valid, new, old), moved, kept)


def deviation_floor_share(state: ReputationState, config: ReputationConfig = PAPER) -> jax.Array:
    """Share [] in [0, 1] of the models whose deviation sits on its floor, where equation 8 is nearly a plain mean."""
    return jnp.mean(state.deviations <= config.min_deviation)

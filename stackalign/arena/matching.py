"""Who meets whom: active models in round robin, opponents by reputation (equations 6 and 7).

A strategy is a function `(key, reputations [m], active, *, target_gap, bandwidth, num_opponents) -> [m]` that gives a
distribution with entry 0 at `active`. The key only breaks ties between equally distant candidates.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

Strategy = Callable[..., jax.Array]


def active_models(iteration: chex.Numeric, num_duels: int, num_models: int) -> jax.Array:
    """Algorithm 1: the active model of duel d in iteration t is `(t D + d) mod m`.

    Args:
      iteration: t, counted from 0.
      num_duels: D, static.
      num_models: m, static.

    Returns:
      `[D]` int32 in [0, m).
    """
    return ((jnp.asarray(iteration, jnp.int32) * num_duels + jnp.arange(num_duels)) % num_models).astype(jnp.int32)


def relative_gaps(reputations: jax.Array, active: chex.Numeric) -> jax.Array:
    """Equation 6: `|R_i - R_j| / max_{k != i} |R_i - R_k|` for i = `active`; all 0 when every reputation is equal.

    Args:
      reputations: `[m]`.
      active: i in [0, m).

    Returns:
      `[m]` in [0, 1], 0 at `active`.
    """
    chex.assert_rank(reputations, 1)
    gaps = jnp.abs(reputations - reputations[active])
    widest = jnp.max(gaps)
    return jnp.where(widest > 0, gaps / jnp.where(widest > 0, widest, 1.0), 0.0)


def nearest(key: jax.Array, reputations: jax.Array, active: chex.Numeric, num_opponents: int) -> jax.Array:
    """`[m]` bool: the `num_opponents` models other than `active` nearest to it by |R_i - R_j|, ties broken at random.

    All others where `num_opponents` is 0 or at least m - 1.
    """
    chex.assert_rank(reputations, 1)
    num_models = reputations.shape[0]
    other = jnp.arange(num_models) != active
    if num_opponents < 0:
        raise ValueError(f"num_opponents must not be negative, got {num_opponents}")
    if num_opponents == 0 or num_opponents >= num_models - 1:
        return other
    gaps = jnp.where(other, jnp.abs(reputations - reputations[active]), jnp.inf)
    order = jnp.lexsort((jax.random.uniform(key, (num_models,)), gaps))
    return jnp.zeros((num_models,), bool).at[order[:num_opponents]].set(True)


def schedule_decreasing(
    key: jax.Array,
    reputations: jax.Array,
    active: chex.Numeric,
    *,
    target_gap: chex.Numeric,
    bandwidth: float = 0.15,
    num_opponents: int = 0,
) -> jax.Array:
    """Equation 7: `p(j) ∝ exp(-(gap_j - g*)^2 / (2 bandwidth^2))` over j != i, with g* going from 1 to 0 over the run.

    The paper (Appendix C) lets each combatant draw from the 3 nearest candidates; that mutes the schedule, so
    `num_opponents` is 0 here (no mask). With a mask, equation 6 still normalises over all j != i.

    Args:
      key: PRNG key, consumed; ties at the edge of the mask.
      reputations: `[m]`.
      active: i in [0, m).
      target_gap: g* in [0, 1].
      bandwidth: sigma_g.
      num_opponents: number of nearest candidates, 0 for all.

    Returns:
      `[m]`, sums to 1, 0 at `active`.
    """
    logits = -jnp.square(relative_gaps(reputations, active) - target_gap) / (2.0 * bandwidth**2)
    return jax.nn.softmax(jnp.where(nearest(key, reputations, active, num_opponents), logits, -jnp.inf))


def schedule_increasing(
    key: jax.Array,
    reputations: jax.Array,
    active: chex.Numeric,
    *,
    target_gap: chex.Numeric,
    bandwidth: float = 0.15,
    num_opponents: int = 0,
) -> jax.Array:
    """Equation 7 with g* going from 0 to 1 over the run (Appendix B.3); the rule itself is `schedule_decreasing`'s."""
    return schedule_decreasing(
        key, reputations, active, target_gap=target_gap, bandwidth=bandwidth, num_opponents=num_opponents
    )


def lowest_diff(
    key: jax.Array,
    reputations: jax.Array,
    active: chex.Numeric,
    *,
    target_gap: chex.Numeric = 0.0,
    bandwidth: float = 0.15,
    num_opponents: int = 0,
) -> jax.Array:
    """Uniform over the `num_opponents` nearest models (Sparta's rule); 0 stands for its default of 3."""
    del target_gap, bandwidth
    candidates = nearest(key, reputations, active, num_opponents or 3)
    return candidates / jnp.sum(candidates)


def highest_diff(
    key: jax.Array,
    reputations: jax.Array,
    active: chex.Numeric,
    *,
    target_gap: chex.Numeric = 0.0,
    bandwidth: float = 0.15,
    num_opponents: int = 0,
) -> jax.Array:
    """The farthest of all other models, uniform over the farthest where several tie."""
    del key, target_gap, bandwidth, num_opponents
    chex.assert_rank(reputations, 1)
    gaps = jnp.where(jnp.arange(reputations.shape[0]) != active, jnp.abs(reputations - reputations[active]), -1.0)
    candidates = gaps == jnp.max(gaps)
    return candidates / jnp.sum(candidates)


def random(
    key: jax.Array,
    reputations: jax.Array,
    active: chex.Numeric,
    *,
    target_gap: chex.Numeric = 0.0,
    bandwidth: float = 0.15,
    num_opponents: int = 0,
) -> jax.Array:
    """Uniform over all other models."""
    del key, target_gap, bandwidth, num_opponents
    chex.assert_rank(reputations, 1)
    candidates = jnp.arange(reputations.shape[0]) != active
    return candidates / (reputations.shape[0] - 1)


def opponent_probabilities(
    key: jax.Array,
    reputations: jax.Array,
    active: chex.Numeric,
    *,
    target_gap: chex.Numeric,
    strategy: Strategy = schedule_decreasing,
    bandwidth: float = 0.15,
    num_opponents: int = 0,
    random_rate: float = 0.2,
) -> jax.Array:
    """The distribution of the opponent of `active`, given how `key` breaks ties.

    With probability `random_rate` (p_rand) the opponent is uniform over all j != i, whatever the strategy.

    Args:
      key: PRNG key, consumed; only ties depend on it.
      reputations: `[m]`, those at the start of the round.
      active: i in [0, m).
      target_gap: g* in [0, 1] of this iteration (equation 3 between `TARGET_GAPS[strategy]`).
      strategy: one of `STRATEGIES`.
      bandwidth: sigma_g of equation 7.
      num_opponents: n_opp, 0 for the strategy's own default.
      random_rate: p_rand in [0, 1].

    Returns:
      `[m]`, sums to 1, exactly 0 at `active`.

    Raises:
      ValueError: fewer than two models.
    """
    chex.assert_rank(reputations, 1)
    if reputations.shape[0] < 2:
        raise ValueError("matching needs at least two models")
    chosen = strategy(
        key, reputations, active, target_gap=target_gap, bandwidth=bandwidth, num_opponents=num_opponents
    )
    return (1.0 - random_rate) * chosen + random_rate * random(key, reputations, active)


def sample_opponents(
    key: jax.Array,
    reputations: jax.Array,
    actives: jax.Array,
    *,
    target_gap: chex.Numeric,
    strategy: Strategy = schedule_decreasing,
    bandwidth: float = 0.15,
    num_opponents: int = 0,
    random_rate: float = 0.2,
) -> jax.Array:
    """Draws the opponents of one round, independently, from the reputations at the round's start.

    Algorithm 1 draws duel by duel with reputations that move in between; one round of a single duel is that.

    Args:
      key: PRNG key, consumed.
      reputations: `[m]`.
      actives: `[D]` int active models.
      target_gap: as in `opponent_probabilities`, like all that follow.

    Returns:
      `[D]` int32, never equal to `actives`.
    """
    chex.assert_rank([reputations, actives], 1)

    def sample(key, active):
        key_ties, key_choice = jax.random.split(key)
        p = opponent_probabilities(
            key_ties,
            reputations,
            active,
            target_gap=target_gap,
            strategy=strategy,
            bandwidth=bandwidth,
            num_opponents=num_opponents,
            random_rate=random_rate,
        )
        return jax.random.categorical(key_choice, jnp.log(p)).astype(jnp.int32)

    return jax.vmap(sample)(jax.random.split(key, actives.shape[0]), actives)


STRATEGIES: dict[str, Strategy] = {
    "schedule_decreasing": schedule_decreasing,
    "schedule_increasing": schedule_increasing,
    "lowest_diff": lowest_diff,
    "highest_diff": highest_diff,
    "random": random,
}

# First and last target gap of a run; the other strategies have no target.
TARGET_GAPS: dict[Strategy, tuple[float, float]] = {
    schedule_decreasing: (1.0, 0.0),
    schedule_increasing: (0.0, 1.0),
}

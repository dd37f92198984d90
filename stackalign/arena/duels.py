"""All duels of one iteration in order: judging (equation 8), then reputations (equations 9 to 11)."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from stackalign.arena import aggregation, reputation


class Outcome(NamedTuple):
    """What D duels gave.

    scores: `[D, 2]` aggregated raw scores of both answers, 0 where `scored` is False.
    scored: `[D, 2]` bool, whether any judge scored that answer.
    valid: `[D]` bool, whether both answers have a score.
    ratings: `[D, m]` ratings just before each duel.
    """

    scores: jax.Array
    scored: jax.Array
    valid: jax.Array
    ratings: jax.Array


def play(
    state: reputation.ReputationState,
    first: jax.Array,
    second: jax.Array,
    scores: jax.Array,
    mask: jax.Array,
    *,
    peer: bool,
    weighting: str = "reputation",
    config: reputation.ReputationConfig = reputation.PAPER,
) -> tuple[reputation.ReputationState, Outcome]:
    """Judges and rates D duels in duel order.

    A judge that failed on one answer leaves that answer's mean only. Judge weights that stand still during an
    iteration (GRPO) are `aggregation.aggregate` on the caller's side and `peer=False` with that one score here, as is
    self-play, where nobody is left to judge.

    Args:
      state: ratings of m models.
      first: `[D]` int, first combatants.
      second: `[D]` int, second combatants.
      scores: `[D, 2, J]` raw scores of both answers; NaN is a failure.
      mask: `[D, 2, J]` bool, the judges that count.
      peer: the judges are the models themselves (J = m, judge k is model k); both combatants are then masked out
        and `weighting` applies. Otherwise they are external, any number of them, with equal weights.
      weighting: "reputation" for weights R_k just before the duel (equation 8), "mean" for equal ones. Static.
      config: constants of the rating, static.

    Returns:
      The state after the last duel, and the outcomes.

    Raises:
      ValueError: an unknown weighting, or peer judging with J != m.
    """
    chex.assert_rank([first, second, scores, mask], [1, 1, 3, 3])
    chex.assert_equal_shape([scores, mask])
    num_models, num_judges = state.ratings.shape[0], scores.shape[2]
    if weighting not in ("reputation", "mean"):
        raise ValueError(f"weighting must be 'reputation' or 'mean', got {weighting!r}")
    if peer and num_judges != num_models:
        raise ValueError(f"peer judging needs one judge a model: {num_judges} judges, {num_models} models")

    def step(state, duel):
        first, second, scores, mask = duel
        weights = jnp.ones((num_judges,), state.ratings.dtype)
        if peer:
            judges = jnp.arange(num_judges)
            mask = mask & (judges != first) & (judges != second)
            if weighting == "reputation":
                weights = state.ratings
        means, scored = jax.vmap(aggregation.aggregate, (0, 0, None))(scores, mask, weights)
        valid = jnp.all(scored)
        new_state = reputation.update(state, first, second, means[0], means[1], valid, config)
        return new_state, Outcome(means, scored, valid, state.ratings)

    return jax.lax.scan(step, state, (first, second, scores, mask.astype(bool)))

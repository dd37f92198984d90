"""Utilities `u(x, y, y')` of an ensemble of preference models (Appendix F of SMIDA).

An ensemble is an array `P [I, X, Y, Y]` with `P[i, x, y, y'] = P_i(y > y' | x)` in [0, 1] and, by antisymmetry,
`P[i, x, y, y'] + P[i, x, y', y] = 1`. A utility is an array `[X, Y, Y]` indexed by the context x, the Leader's answer y
and the Follower's answer y'; the Follower maximises it and the Leader minimises it. Half precision is computed in
float32.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np


def _wide(x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _mean(preferences: jax.Array) -> jax.Array:
    """Mean over axis 0, exactly the common value where all members agree, so that their deviations are exactly 0.

    It stays in [0, 1]: the deviations from the first member p_0 round to within [-p_0, 1 - p_0].
    """
    return preferences[0] + jnp.mean(preferences - preferences[0], axis=0)


def variance(preferences: jax.Array) -> jax.Array:
    """Population variance (ddof 0) of the members' probabilities, the utility of equation 1.

    From the deviations, never as `E[p^2] - E[p]^2`, which cancels: members that agree give exactly 0.

    Args:
      preferences: `[I, ...]` in [0, 1].

    Returns:
      `[...]` in [0, 1/4]; the utility of the experiments is 4 times it, in [0, 1].
    """
    chex.assert_axis_dimension_gt(preferences, 0, 0)
    preferences = _wide(preferences)
    return jnp.mean(jnp.square(preferences - _mean(preferences)), axis=0)


def decision_uncertainty(preferences: jax.Array) -> jax.Array:
    """`min(P, 1 - P) = 1/2 - |P - 1/2|` of the ensemble mean P (Appendix F.1).

    As a utility it is degenerate: a Follower that copies the Leader's answer always attains the maximum 1/2.

    Args:
      preferences: `[I, ...]` in [0, 1].

    Returns:
      `[...]` in [0, 1/2].
    """
    chex.assert_axis_dimension_gt(preferences, 0, 0)
    mean = _mean(_wide(preferences))
    return jnp.minimum(mean, 1.0 - mean)


def jensen_shannon(preferences: jax.Array) -> jax.Array:
    """Jensen-Shannon divergence of the members' Bernoulli distributions, in nats (Appendix F.1).

    `H(P) - mean_i H(P_i)` with the ensemble mean P, computed as the equal `mean_i KL(P_i || P)`: the difference of
    entropies would lose members that nearly agree to rounding. `0 log 0 = 0`. The gradient is finite everywhere,
    also at a member in {0, 1} where the true slope is infinite.

    Args:
      preferences: `[I, ...]` in [0, 1].

    Returns:
      `[...]` in [0, log 2], up to rounding above; exactly 0 where all members agree.
    """
    chex.assert_axis_dimension_gt(preferences, 0, 0)
    preferences = _wide(preferences)
    mean = _mean(preferences)
    deviation = preferences - mean
    divergence = _entropy_term(preferences, mean, deviation) + _entropy_term(1.0 - preferences, 1.0 - mean, -deviation)
    return jnp.maximum(jnp.mean(divergence, axis=0), 0.0)


def _entropy_term(p: jax.Array, mean: jax.Array, deviation: jax.Array) -> jax.Array:
    """`p log(p / mean)`, 0 at p = 0, with `deviation = p - mean`.

    `log1p` of the relative deviation where it is small, which is where the quotient would cancel; the quotient
    elsewhere, because the deviation of a p far below the mean has forgotten p.
    """
    positive = jnp.minimum(p, mean) >= jnp.finfo(p.dtype).tiny
    near = positive & (jnp.abs(deviation) < 0.5 * mean)
    far = positive & ~near
    # Each logarithm is 0 where the other one, or none, applies; so is its gradient.
    log_near = jnp.log1p(jnp.where(near, deviation, 0.0) / jnp.where(near, mean, 1.0))
    log_far = jnp.log(jnp.where(far, p, 1.0) / jnp.where(far, mean, 1.0))
    return p * (log_near + log_far)


def preference(preferences: jax.Array) -> jax.Array:
    """`u(x, y, y') = P(y' > y | x)` of the ensemble mean P: the game of SLHF (Appendix F).

    By the transpose, which reads the entries as they are; `1 - P` would round away small probabilities.

    Args:
      preferences: `[I, X, Y, Y]` in [0, 1], antisymmetric.

    Returns:
      `[X, Y, Y]` in [0, 1].
    """
    _assert_ensemble(preferences)
    return _mean(_wide(jnp.swapaxes(preferences, 2, 3)))


def targeted(preferences: jax.Array, member: int, *, weight: chex.Numeric) -> jax.Array:
    """`u(x, y, y') = Var(x, y, y') + weight * P_member(y' > y | x)` (Appendix F.2), by the transpose as `preference`.

    Args:
      preferences: `[I, X, Y, Y]` in [0, 1], antisymmetric.
      member: j in [0, I), static.
      weight: lambda >= 0, the scale of the preference against the plain (not 4 times the) variance.

    Returns:
      `[X, Y, Y]` in [0, 1/4 + weight].

    Raises:
      ValueError: no such member (an index out of range would silently be clamped), or a Python number weight < 0.
    """
    _assert_ensemble(preferences)
    if not 0 <= member < preferences.shape[0]:
        raise ValueError(f"member must be in [0, {preferences.shape[0]}), got {member}")
    if isinstance(weight, int | float) and weight < 0:
        raise ValueError(f"weight must not be negative, got {weight}")
    return variance(preferences) + weight * _wide(jnp.swapaxes(preferences[member], 1, 2))


def _assert_ensemble(preferences: jax.Array) -> None:
    chex.assert_rank(preferences, 4)
    chex.assert_axis_dimension_gt(preferences, 0, 0)
    chex.assert_axis_dimension(preferences, 3, preferences.shape[2])


def validate_ensemble(preferences: chex.Array, *, tolerance: float | None = None) -> None:
    """Checks on the host that a concrete array is an ensemble; not for use under `jit`.

    Args:
      preferences: `[I, X, Y, Y]`, floating.
      tolerance: largest `|P(y, y') + P(y', y) - 1|`; None for 4 machine epsilons of the array's dtype.

    Raises:
      ValueError: not a floating array of four axes with the last two equal and none empty, or an entry that is not
        finite, outside [0, 1] or not antisymmetric; the message has the first such index.
    """
    preferences = np.asarray(preferences)
    shape = preferences.shape
    if preferences.ndim != 4 or shape[2] != shape[3] or 0 in shape:
        raise ValueError(
            f"preferences must have the shape [I, X, Y, Y] of I members, X contexts and Y actions, each at least 1, "
            f"got {list(shape)}; a single model is preferences[None]"
        )
    if not jnp.issubdtype(preferences.dtype, jnp.floating):
        raise ValueError(f"preferences must be floating, got {preferences.dtype}; cast them to float32")
    eps = float(jnp.finfo(preferences.dtype).eps)
    # Sums in float64, so that only the entries' own rounding counts.
    preferences = preferences.astype(np.float64)
    tolerance = 4.0 * eps if tolerance is None else tolerance

    if (index := _first(~np.isfinite(preferences))) is not None:
        raise ValueError(
            f"preferences{list(index)} is {preferences[index]}, not finite; drop that member or mend its outputs"
        )
    if (index := _first((preferences < 0.0) | (preferences > 1.0))) is not None:
        raise ValueError(
            f"preferences{list(index)} is {preferences[index]:.9g}, outside [0, 1]; pass probabilities, not logits or "
            f"margins"
        )
    sums = preferences + np.swapaxes(preferences, 2, 3)
    if (index := _first(np.abs(sums - 1.0) > tolerance)) is not None:
        i, x, y, other = index
        raise ValueError(
            f"preferences{[i, x, y, other]} + preferences{[i, x, other, y]} is {sums[index]:.9g}, not 1 within "
            f"{tolerance:.3g}; make the model antisymmetric, P(y', y) = 1 - P(y, y') and 1/2 on the diagonal, "
            f"or allow more tolerance"
        )


def _first(wrong: np.ndarray) -> tuple[int, ...] | None:
    """Index of the first True, or None."""
    if not wrong.any():
        return None
    return tuple(int(i) for i in np.unravel_index(np.argmax(wrong), wrong.shape))

"""Direct preference optimisation and its public family of variants, on log-probabilities.

Two layers. `dpo_loss` takes one log-probability a response and is what an alignment loop calls. `token_dpo_loss`
takes per-token log-probabilities, for what needs tokens: length normalisation, length desensitisation, likelihood
terms and WPO weights. Both reduce in float32 (or wider), and a pair of weight 0 contributes exactly nothing to value
and gradient, whatever stands in it.

A variant is a function `(pairs, *, beta, **hyperparameters) -> losses [B]`; a divergence is a function of log-ratios.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Pairs(NamedTuple):
    """B preference pairs, as the variants see them. Entries of pairs that do not count are harmless constants.

    policy_chosen, policy_rejected, ref_chosen, ref_rejected: `[B]` response log-probabilities in nats.
    chosen_scores, rejected_scores: `[B]` log-ratios after the divergence's transformation.
    chosen_lengths, rejected_lengths: `[B]` response lengths in tokens, or None.
    chosen_nll: `[B]` mean negative log-probability of a token of the chosen response, or None.
    counted: `[B]` bool, the pairs that count.
    """

    policy_chosen: jax.Array
    policy_rejected: jax.Array
    ref_chosen: jax.Array
    ref_rejected: jax.Array
    chosen_scores: jax.Array
    rejected_scores: jax.Array
    chosen_lengths: jax.Array | None
    rejected_lengths: jax.Array | None
    chosen_nll: jax.Array | None
    counted: jax.Array

    @property
    def chosen_log_ratios(self) -> jax.Array:
        return self.policy_chosen - self.ref_chosen

    @property
    def rejected_log_ratios(self) -> jax.Array:
        return self.policy_rejected - self.ref_rejected

    @property
    def margins(self) -> jax.Array:
        return self.chosen_scores - self.rejected_scores


class DpoOutput(NamedTuple):
    """losses: `[B]`, 0 where the weight is 0. chosen_rewards, rejected_rewards: `[B]` implicit rewards
    `beta log(pi / pi_ref)`, without gradient. loss: [] mean of `losses` by weight, 0 where all weights are 0."""

    losses: jax.Array
    chosen_rewards: jax.Array
    rejected_rewards: jax.Array
    loss: jax.Array


Variant = Callable[..., jax.Array]
Divergence = Callable[[jax.Array], jax.Array]

# Largest exponent in a divergence: the result and its square stay finite in float32.
_MAX_EXPONENT = 80.0


def _wide(x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# Reductions over tokens.


def sequence_log_probs(token_log_probs: jax.Array, mask: jax.Array) -> jax.Array:
    """Sums the log-probabilities of the tokens that count, the end-of-turn token included by the caller's mask.

    Args:
      token_log_probs: `[B, T]` in nats; slots that do not count may hold anything, NaN too.
      mask: `[B, T]`, nonzero where a token counts.

    Returns:
      `[B]`.
    """
    chex.assert_rank([token_log_probs, mask], 2)
    chex.assert_equal_shape([token_log_probs, mask])
    return jnp.sum(jnp.where(mask.astype(bool), _wide(token_log_probs), 0.0), axis=1)


def nll(token_log_probs: jax.Array, mask: jax.Array) -> jax.Array:
    """Length-normalised negative log-likelihood `[B]`: the mean over the tokens that count, 0 in a row without any."""
    lengths = jnp.sum(mask.astype(bool), axis=1)
    return -sequence_log_probs(token_log_probs, mask) / jnp.maximum(lengths, 1)


def desensitised_log_probs(token_log_probs: jax.Array, mask: jax.Array, *, ld_alpha: float) -> jax.Array:
    """LD-DPO (Liu et al. 2024): tokens beyond the shorter response's length count `ld_alpha` times.

    Args:
      token_log_probs: `[2B, T]`, the B chosen responses first.
      mask: `[2B, T]`.
      ld_alpha: in [0, 1]; 1 is the plain sum.

    Returns:
      `[2B]`.
    """
    counted = mask.astype(bool)
    chosen, rejected = jnp.split(jnp.sum(counted, axis=1), 2)
    shared = jnp.tile(jnp.minimum(chosen, rejected), 2)[:, None]
    head = counted & (jnp.cumsum(counted, axis=1) <= shared)
    tail = sequence_log_probs(token_log_probs, counted & ~head)
    return sequence_log_probs(token_log_probs, head) + ld_alpha * tail


def log_collision(logits: jax.Array) -> jax.Array:
    """`log sum_v p_v^2` `[...]` of the distributions with logits `[..., V]`, for `wpo_factors`."""
    return jax.nn.logsumexp(2.0 * jax.nn.log_softmax(_wide(logits), axis=-1), axis=-1)


def wpo_factors(token_log_probs: jax.Array, token_log_collision: jax.Array, mask: jax.Array) -> jax.Array:
    """WPO (Zhou et al. 2024): how typical a pair is of the policy's own sampling, without gradient.

    Each response has weight `exp(mean_t(log p_t - log sum_v p_v^2))`, a pair the product of both. Positive; above 1
    where the responses are more probable than what the policy samples on average.

    Args:
      token_log_probs: `[2B, T]` under the policy, the chosen responses first.
      token_log_collision: `[2B, T]` of `log_collision`.
      mask: `[2B, T]`.

    Returns:
      `[B]`.
    """
    chosen, rejected = jnp.split(-nll(token_log_probs - token_log_collision, mask), 2)
    return jax.lax.stop_gradient(jnp.exp(chosen + rejected))


# Divergences: the derivative of the divergence's generator at the likelihood ratio (Wang et al. 2023), up to
# constants that cancel between chosen and rejected.


def reverse_kl(log_ratios: jax.Array) -> jax.Array:
    """`log u`: DPO itself."""
    return log_ratios


def forward_kl(log_ratios: jax.Array) -> jax.Array:
    """`-1 / u`."""
    return -jnp.exp(jnp.minimum(-log_ratios, _MAX_EXPONENT))


def js_divergence(log_ratios: jax.Array) -> jax.Array:
    """`log(u / (1 + u))`."""
    return jax.nn.log_sigmoid(log_ratios)


def alpha_divergence(log_ratios: jax.Array, *, alpha: float = 0.5) -> jax.Array:
    """`u^(alpha - 1) / (alpha - 1)`, the reverse KL at alpha = 1."""
    if abs(alpha - 1.0) < 1e-6:
        return log_ratios
    return jnp.exp(jnp.minimum((alpha - 1.0) * log_ratios, _MAX_EXPONENT)) / (alpha - 1.0)


# Variants. Each takes every hyperparameter and ignores those that it does not have.


def _logistic(logits: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    agree, disagree = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    return (1.0 - label_smoothing) * agree + label_smoothing * disagree


def _per_token(pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    if pairs.chosen_lengths is None or pairs.rejected_lengths is None:
        raise ValueError("this variant normalises by length: give chosen_lengths and rejected_lengths")
    return (
        pairs.chosen_scores / jnp.maximum(pairs.chosen_lengths, 1),
        pairs.rejected_scores / jnp.maximum(pairs.rejected_lengths, 1),
    )


def _sorted_difference(a: jax.Array, b: jax.Array, counted: jax.Array) -> jax.Array:
    """Sorts the counted entries of both, and subtracts; the first `sum(counted)` entries of the result are real."""
    a, b = (jnp.sort(jnp.where(counted, x, jnp.inf)) for x in (a, b))
    real = jnp.arange(counted.shape[0]) < jnp.sum(counted)
    return jnp.where(real, a, 0.0) - jnp.where(real, b, 0.0)


def _spread(losses: jax.Array, counted: jax.Array) -> jax.Array:
    """Puts the first `sum(counted)` entries of `losses` where `counted` is set, in order."""
    return losses[jnp.maximum(jnp.cumsum(counted) - 1, 0)]


def sigmoid(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0, **_) -> jax.Array:
    """DPO (Rafailov et al. 2023): `-log sigmoid(beta margin)`; with smoothing, conservative DPO (Mitchell 2023)."""
    return _logistic(beta * pairs.margins, label_smoothing)


def sigmoid_norm(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0, **_) -> jax.Array:
    """`sigmoid` on scores divided by the response's length, as SimPO normalises (Meng et al. 2024)."""
    chosen, rejected = _per_token(pairs)
    return _logistic(beta * (chosen - rejected), label_smoothing)


def robust(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0, **_) -> jax.Array:
    """Robust DPO (Chowdhury et al. 2024): unbiased when a share `label_smoothing` < 0.5 of the labels is flipped."""
    agree, disagree = _logistic(beta * pairs.margins), _logistic(-beta * pairs.margins)
    return ((1.0 - label_smoothing) * agree - label_smoothing * disagree) / (1.0 - 2.0 * label_smoothing)


def hinge(pairs: Pairs, *, beta: float, **_) -> jax.Array:
    """SLiC-style hinge (Zhao et al. 2023): `max(0, 1 - beta margin)`."""
    return jax.nn.relu(1.0 - beta * pairs.margins)


def ipo(pairs: Pairs, *, beta: float, **_) -> jax.Array:
    """IPO (Azar et al. 2023, equation 17) on per-token means: `(margin - 1 / (2 beta))^2`."""
    chosen, rejected = _per_token(pairs)
    return jnp.square(chosen - rejected - 1.0 / (2.0 * beta))


def exo_pair(pairs: Pairs, *, beta: float, label_smoothing: float = 1e-3, **_) -> jax.Array:
    """EXO on pairs (Ji et al. 2024, equation 16): reverse KL from the policy's preference to the smoothed labels.

    ValueError unless `label_smoothing` is in (0, 1): the loss is infinite at hard labels.
    """
    if not 0.0 < label_smoothing < 1.0:
        raise ValueError(f"exo_pair needs label_smoothing in (0, 1), got {label_smoothing}")
    logits = beta * pairs.margins
    agree = jax.nn.sigmoid(logits) * (jax.nn.log_sigmoid(logits) - jnp.log1p(-label_smoothing))
    disagree = jax.nn.sigmoid(-logits) * (jax.nn.log_sigmoid(-logits) - jnp.log(label_smoothing))
    return agree + disagree


def nca_pair(pairs: Pairs, *, beta: float, **_) -> jax.Array:
    """NCA on pairs (Chen et al. 2024)."""
    chosen, rejected = beta * pairs.chosen_scores, beta * pairs.rejected_scores
    return _logistic(chosen) + 0.5 * _logistic(-chosen) + 0.5 * _logistic(-rejected)


def bco_pair(pairs: Pairs, *, beta: float, **_) -> jax.Array:
    """Binary classifier optimisation (Jung et al. 2024), without its running reward shift."""
    return _logistic(beta * pairs.chosen_scores) + _logistic(-beta * pairs.rejected_scores)


def sppo_hard(pairs: Pairs, *, beta: float, **_) -> jax.Array:
    """SPPO with hard labels (Wu et al. 2024): log-ratios towards +-1 / (2 beta)."""
    return jnp.square(pairs.chosen_scores - 0.5 / beta) + jnp.square(pairs.rejected_scores + 0.5 / beta)


def aot(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0, **_) -> jax.Array:
    """AOT, paired (Melnyk et al. 2024): the policy's sorted margins against the reference's sorted margins.

    The loss belongs to the batch; entry i is that of the i-th smallest margins, not of pair i.
    """
    policy = pairs.policy_chosen - pairs.policy_rejected
    reference = pairs.ref_chosen - pairs.ref_rejected
    difference = _sorted_difference(policy, reference, pairs.counted)
    return _spread(_logistic(beta * difference, label_smoothing), pairs.counted)


def aot_unpaired(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0, **_) -> jax.Array:
    """AOT, unpaired: sorted chosen log-ratios against sorted rejected ones; entries as in `aot`."""
    difference = _sorted_difference(pairs.chosen_log_ratios, pairs.rejected_log_ratios, pairs.counted)
    return _spread(_logistic(beta * difference, label_smoothing), pairs.counted)


def apo_zero(pairs: Pairs, *, beta: float, **_) -> jax.Array:
    """APO-zero (D'Oosterlinck et al. 2024): chosen up, rejected down."""
    return jax.nn.sigmoid(-beta * pairs.chosen_log_ratios) + jax.nn.sigmoid(beta * pairs.rejected_log_ratios)


def apo_down(pairs: Pairs, *, beta: float, **_) -> jax.Array:
    """APO-down: both down, the rejected one further."""
    return jax.nn.sigmoid(beta * pairs.chosen_log_ratios) + jax.nn.sigmoid(-beta * pairs.margins)


def discopop(pairs: Pairs, *, beta: float, discopop_tau: float = 0.05, **_) -> jax.Array:
    """DiscoPOP (Lu et al. 2024): logistic and exponential loss, blended by `sigmoid(beta margin / tau)`."""
    logits = beta * pairs.margins
    # exp(-logits) overflows where its blend is 0: multiplied in the exponent.
    exponential = jnp.exp(jax.nn.log_sigmoid(logits / discopop_tau) - logits)
    return _logistic(logits) * jax.nn.sigmoid(-logits / discopop_tau) + exponential


def sft(pairs: Pairs, **_) -> jax.Array:
    """Cross-entropy on the chosen responses, a mean over all their tokens in the batch; the same for every pair."""
    if pairs.chosen_nll is None or pairs.chosen_lengths is None:
        raise ValueError("sft needs chosen_nll and chosen_lengths")
    lengths = jnp.where(pairs.counted, pairs.chosen_lengths, 0)
    mean = jnp.sum(pairs.chosen_nll * lengths) / jnp.maximum(jnp.sum(lengths), 1)
    return jnp.broadcast_to(mean, pairs.counted.shape)


# The two layers.


def dpo_loss(
    policy_chosen: jax.Array,
    policy_rejected: jax.Array,
    ref_chosen: jax.Array,
    ref_rejected: jax.Array,
    *,
    weights: jax.Array | None = None,
    chosen_nll: jax.Array | None = None,
    chosen_lengths: jax.Array | None = None,
    rejected_lengths: jax.Array | None = None,
    factors: jax.Array | None = None,
    beta: float = 0.1,
    label_smoothing: float | None = None,
    nll_weight: float = 0.0,
    variants: tuple[tuple[Variant, float], ...] = ((sigmoid, 1.0),),
    divergence: Divergence = reverse_kl,
    discopop_tau: float = 0.05,
) -> DpoOutput:
    """DPO on response log-probabilities: `-log sigmoid(beta [log(pi/pi_ref)(y_w) - log(pi/pi_ref)(y_l)])`.

    The paper's loss (section 2.4) is the default; `nll_weight` and the variants go beyond it. The reference is the
    model itself at the iteration's start, so that the first step's loss is ln 2.

    Args:
      policy_chosen: `[B]` sums of the policy's token log-probabilities (`sequence_log_probs`), like the next three.
      policy_rejected: `[B]`.
      ref_chosen: `[B]` under the reference; they get no gradient.
      ref_rejected: `[B]`.
      weights: `[B]`, not negative, all 1 where None; 0 for a padded pair. The AOT variants only tell 0 from the rest.
      chosen_nll: `[B]` of `nll`, for `nll_weight` and `sft`.
      chosen_lengths: `[B]` tokens, for `ipo`, `sigmoid_norm` and `sft`.
      rejected_lengths: `[B]` tokens.
      factors: `[B]` of `wpo_factors`; they multiply the variants' losses (not the `nll_weight` term) and do not enter
        the mean's denominator.
      beta: inverse temperature, > 0.
      label_smoothing: in [0, 0.5), None for the variant's own default (1e-3 for `exo_pair`, else 0).
      nll_weight: multiplies `chosen_nll`, added to each pair's loss.
      variants: variants and their weights in the sum.
      divergence: applied to the log-ratios; use `functools.partial` for another alpha.
      discopop_tau: temperature of `discopop`.

    Raises:
      ValueError: an argument that a variant or `nll_weight` needs is missing.
    """
    log_probs = [policy_chosen, policy_rejected, ref_chosen, ref_rejected]
    chex.assert_rank(log_probs, 1)
    chex.assert_equal_shape(log_probs)
    if nll_weight and chosen_nll is None:
        raise ValueError("nll_weight needs chosen_nll")
    dtype = _wide(policy_chosen).dtype
    weights = jnp.ones(policy_chosen.shape, dtype) if weights is None else jnp.asarray(weights, dtype)
    chex.assert_equal_shape([weights, policy_chosen])
    counted = weights > 0

    def clean(x, fill):
        return None if x is None else jnp.where(counted, _wide(x), fill)

    policy_chosen, policy_rejected = clean(policy_chosen, 0.0), clean(policy_rejected, 0.0)
    ref_chosen, ref_rejected = (jax.lax.stop_gradient(clean(x, 0.0)) for x in (ref_chosen, ref_rejected))
    chosen_nll = clean(chosen_nll, 0.0)
    pairs = Pairs(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_scores=divergence(policy_chosen - ref_chosen),
        rejected_scores=divergence(policy_rejected - ref_rejected),
        chosen_lengths=clean(chosen_lengths, 1.0),
        rejected_lengths=clean(rejected_lengths, 1.0),
        chosen_nll=chosen_nll,
        counted=counted,
    )
    hyperparameters = {"beta": beta, "discopop_tau": discopop_tau}
    if label_smoothing is not None:
        hyperparameters["label_smoothing"] = label_smoothing
    losses = sum(weight * variant(pairs, **hyperparameters) for variant, weight in variants)
    if factors is not None:
        losses = losses * clean(factors, 0.0)
    if nll_weight:
        losses = losses + nll_weight * chosen_nll
    losses = jnp.where(counted, losses, 0.0)

    total = jnp.sum(weights)
    loss = jnp.sum(jnp.where(counted, weights, 0.0) * losses) / jnp.where(total > 0, total, 1.0)
    chosen_rewards = jax.lax.stop_gradient(beta * pairs.chosen_log_ratios)
    rejected_rewards = jax.lax.stop_gradient(beta * pairs.rejected_log_ratios)
    return DpoOutput(losses, chosen_rewards, rejected_rewards, loss)


def token_dpo_loss(
    policy_log_probs: jax.Array,
    ref_log_probs: jax.Array,
    mask: jax.Array,
    *,
    weights: jax.Array | None = None,
    token_log_collision: jax.Array | None = None,
    ld_alpha: float | None = None,
    **options,
) -> DpoOutput:
    """`dpo_loss` on token log-probabilities.

    Args:
      policy_log_probs: `[2B, T]` in nats, the B chosen responses first, then their rejected ones.
      ref_log_probs: `[2B, T]` under the reference.
      mask: `[2B, T]`, nonzero at response tokens; the other slots may hold anything.
      weights: `[B]` as in `dpo_loss`.
      token_log_collision: `[2B, T]` of `log_collision`; given, WPO weights multiply the losses.
      ld_alpha: as in `desensitised_log_probs`, None for plain sums.
      **options: hyperparameters of `dpo_loss`.
    """
    chex.assert_rank([policy_log_probs, ref_log_probs, mask], 2)
    chex.assert_equal_shape([policy_log_probs, ref_log_probs, mask])
    if ld_alpha is None:
        policy, reference = (sequence_log_probs(x, mask) for x in (policy_log_probs, ref_log_probs))
    else:
        policy, reference = (
            desensitised_log_probs(x, mask, ld_alpha=ld_alpha) for x in (policy_log_probs, ref_log_probs)
        )
    chosen_lengths, rejected_lengths = jnp.split(jnp.sum(mask.astype(bool), axis=1), 2)
    factors = None
    if token_log_collision is not None:
        factors = wpo_factors(policy_log_probs, token_log_collision, mask)
    num_pairs = mask.shape[0] // 2
    return dpo_loss(
        *jnp.split(policy, 2),
        *jnp.split(reference, 2),
        weights=weights,
        chosen_nll=nll(policy_log_probs[:num_pairs], mask[:num_pairs]),
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        factors=factors,
        **options,
    )


DIVERGENCES: dict[str, Divergence] = {
    "alpha_divergence": alpha_divergence,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "reverse_kl": reverse_kl,
}

VARIANTS: dict[str, Variant] = {
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_down": apo_down,
    "apo_zero": apo_zero,
    "bco_pair": bco_pair,
    "discopop": discopop,
    "exo_pair": exo_pair,
    "hinge": hinge,
    "ipo": ipo,
    "nca_pair": nca_pair,
    "robust": robust,
    "sft": sft,
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid_norm,
    "sppo_hard": sppo_hard,
}

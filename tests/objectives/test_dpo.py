"""The DPO family: recorded losses and gradients, published formulas, padding, NaN at masked slots."""

import functools
import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackalign.objectives import dpo

RECORDED = json.loads((pathlib.Path(__file__).parent.parent / "vectors" / "dpo.json").read_text())
TOLERANCE = {"float64": {"rtol": 1e-9, "atol": 1e-10}, "float32": {"rtol": 2e-5, "atol": 1e-6}}
B = 4
settings = hypothesis.settings(deadline=None, max_examples=20)
log_prob = st.floats(-200, 0, width=32)
batch = st.lists(st.tuples(log_prob, log_prob, log_prob, log_prob), min_size=B, max_size=B)


def options_of(config):
    options = {
        "beta": config["beta"],
        "variants": tuple(
            (dpo.VARIANTS[name], weight)
            for name, weight in zip(config["loss_type"], config["loss_weights"], strict=True)
        ),
    }
    if "f_divergence_type" in config:
        divergence = dpo.DIVERGENCES[config["f_divergence_type"]]
        if divergence is dpo.alpha_divergence:
            divergence = functools.partial(divergence, alpha=config["f_alpha_divergence_coef"])
        options |= {
            "label_smoothing": config["label_smoothing"],
            "ld_alpha": config["ld_alpha"],
            "divergence": divergence,
            "discopop_tau": config["discopop_tau"],
        }
    return options


@pytest.mark.parametrize("case", RECORDED["dpo"]["cases"], ids=lambda case: case["name"])
def test_recorded_losses_gradients_and_metrics(case, x64):
    inputs, tolerance = RECORDED["dpo"]["inputs"], TOLERANCE[case["dtype"]]
    policy, reference = (jnp.array(inputs[k], case["dtype"]) for k in ("policy_logps", "ref_logps"))
    mask = jnp.array(inputs["completion_mask"])[:, 1:]

    def loss(policy):
        output = dpo.token_dpo_loss(policy, reference, mask, **options_of(case["config"]))
        return output.loss, output

    (value, output), gradient = jax.value_and_grad(loss, has_aux=True)(policy)
    assert value.dtype == case["dtype"]
    np.testing.assert_allclose(value, case["loss"], **tolerance)
    np.testing.assert_allclose(gradient, case["grad"], **tolerance)
    chosen, rejected = output.chosen_rewards, output.rejected_rewards
    if case["config"]["ld_alpha"] is None:
        sums = dpo.sequence_log_probs(policy, mask)
    else:
        sums = dpo.desensitised_log_probs(policy, mask, ld_alpha=case["config"]["ld_alpha"])
    metrics = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "logps/chosen": sums[:3].mean(),
        "logps/rejected": sums[3:].mean(),
    }
    for name, found in metrics.items():
        np.testing.assert_allclose(found, case["metrics"][name], err_msg=name, **tolerance)
    # Recorded in float32 whatever the case's type.
    np.testing.assert_allclose((chosen > rejected).mean(), case["metrics"]["rewards/accuracies"], rtol=1e-7)


@pytest.mark.parametrize("case", RECORDED["dpo_from_logits"]["cases"], ids=lambda case: case["name"])
def test_recorded_losses_from_logits(case, x64):
    inputs = RECORDED["dpo_from_logits"]["inputs"]
    ids, mask = (jnp.array(inputs[k])[:, 1:] for k in ("input_ids", "completion_mask"))

    def token_log_probs(logits):
        log_probs = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        return jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0]

    reference = token_log_probs(jnp.array(inputs["ref_logits"]))

    def loss(logits):
        collision = dpo.log_collision(logits[:, :-1]) if case["config"]["use_weighting"] else None
        policy = token_log_probs(logits)
        options = options_of(case["config"])
        return dpo.token_dpo_loss(policy, reference, mask, token_log_collision=collision, **options).loss

    logits = jnp.array(inputs["policy_logits"])
    recorded = RECORDED["dpo_from_logits"]["per_token_policy_logps"]
    np.testing.assert_allclose(token_log_probs(logits), recorded, **TOLERANCE["float64"])
    value, gradient = jax.value_and_grad(loss)(logits)
    np.testing.assert_allclose(value, case["loss"], **TOLERANCE["float64"])
    np.testing.assert_allclose(gradient, case["grad_logits"], **TOLERANCE["float64"])


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def logistic(x):
    return 1.0 / (1.0 + np.exp(-x))


CHOSEN, REJECTED = np.array([0.7, -1.2, 2.5]), np.array([-0.4, 0.9, 1.1])
MARGINS = CHOSEN - REJECTED
LENGTHS = np.array([2.0, 5.0, 3.0]), np.array([4.0, 1.0, 6.0])
NORMALISED = CHOSEN / LENGTHS[0] - REJECTED / LENGTHS[1]
FORMULAS = {
    "sigmoid": -log_sigmoid(0.3 * MARGINS),
    "hinge": np.maximum(0.0, 1 - 0.3 * MARGINS),
    "ipo": (NORMALISED - 1 / 0.6) ** 2,
    "sigmoid_norm": -log_sigmoid(0.3 * NORMALISED),
    "robust": -log_sigmoid(0.3 * MARGINS),
    "exo_pair": logistic(0.3 * MARGINS) * (log_sigmoid(0.3 * MARGINS) - np.log(0.999))
    + logistic(-0.3 * MARGINS) * (log_sigmoid(-0.3 * MARGINS) - np.log(0.001)),
    "nca_pair": -log_sigmoid(0.3 * CHOSEN) - 0.5 * (log_sigmoid(-0.3 * CHOSEN) + log_sigmoid(-0.3 * REJECTED)),
    "bco_pair": -log_sigmoid(0.3 * CHOSEN) - log_sigmoid(-0.3 * REJECTED),
    "sppo_hard": (CHOSEN - 0.5 / 0.3) ** 2 + (REJECTED + 0.5 / 0.3) ** 2,
    "apo_zero": 1 - logistic(0.3 * CHOSEN) + logistic(0.3 * REJECTED),
    "apo_down": logistic(0.3 * CHOSEN) + 1 - logistic(0.3 * MARGINS),
    "discopop": -log_sigmoid(0.3 * MARGINS) * (1 - logistic(6 * MARGINS))
    + np.exp(-0.3 * MARGINS) * logistic(6 * MARGINS),
}


def losses(variant, *, chosen=CHOSEN, rejected=REJECTED, **options):
    """A variant at log-ratios `chosen`, `rejected`."""
    zeros = jnp.zeros(len(chosen))
    return dpo.dpo_loss(
        jnp.array(chosen),
        jnp.array(rejected),
        zeros,
        zeros,
        beta=options.pop("beta", 0.3),
        chosen_lengths=jnp.array(LENGTHS[0]),
        rejected_lengths=jnp.array(LENGTHS[1]),
        variants=((dpo.VARIANTS[variant], 1.0),),
        **options,
    ).losses


@pytest.mark.parametrize("variant", FORMULAS)
def test_published_formulas(variant, x64):
    np.testing.assert_allclose(losses(variant), FORMULAS[variant], rtol=1e-12)


def test_label_smoothing(x64):
    agree, disagree = -log_sigmoid(0.3 * MARGINS), -log_sigmoid(-0.3 * MARGINS)
    np.testing.assert_allclose(losses("sigmoid", label_smoothing=0.2), 0.8 * agree + 0.2 * disagree, rtol=1e-12)
    robust = losses("robust", label_smoothing=0.2)
    np.testing.assert_allclose(robust, (0.8 * agree - 0.2 * disagree) / 0.6, rtol=1e-12)
    # Unbiased: with a fifth of the labels flipped, the expectation is the clean loss.
    flipped = losses("robust", chosen=REJECTED, rejected=CHOSEN, label_smoothing=0.2)
    np.testing.assert_allclose(0.8 * robust + 0.2 * flipped, agree, rtol=1e-12)
    exo = losses("exo_pair", label_smoothing=0.2, beta=1e-9)
    np.testing.assert_allclose(exo, 0.5 * np.log(0.25 / 0.16), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(dpo.DIVERGENCES))
def test_divergences(name, x64):
    u = np.array([0.2, 1.0, 3.0])
    expected = {
        "reverse_kl": np.log(u),
        "forward_kl": -1 / u,
        "js_divergence": np.log(u / (1 + u)),
        "alpha_divergence": u**-0.5 / -0.5,
    }[name]
    np.testing.assert_allclose(dpo.DIVERGENCES[name](jnp.log(u)), expected, rtol=1e-12)


def test_alpha_divergence_at_1_is_the_reverse_kl():
    np.testing.assert_array_equal(dpo.alpha_divergence(jnp.array([1.5]), alpha=1.0), [1.5])


def test_first_step_is_ln_2():
    """The reference is the model itself at the iteration's start."""
    log_probs = jnp.array([-12.5, -300.0, -0.25])
    output = dpo.dpo_loss(log_probs, log_probs - 1, log_probs, log_probs - 1)
    np.testing.assert_array_equal(output.losses, np.full(3, np.log(2), np.float32))
    np.testing.assert_allclose(output.loss, np.log(2), rtol=1e-7)
    np.testing.assert_array_equal(output.chosen_rewards, np.zeros(3))


def test_sums_and_nll_ignore_masked_slots_even_nan():
    """log-probs [0, 0 | 0, NaN] with mask [1, 0]: value 0, finite gradient."""
    tokens = jnp.array([[-1.0, jnp.nan, -2.0], [jnp.nan, jnp.nan, jnp.inf]])
    mask = jnp.array([[1, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(dpo.sequence_log_probs(tokens, mask), [-3.0, 0.0])
    np.testing.assert_array_equal(dpo.nll(tokens, mask), [1.5, 0.0])
    gradient = jax.grad(lambda x: dpo.sequence_log_probs(x, mask).sum() - 2 * dpo.nll(x, mask).sum())(tokens)
    np.testing.assert_array_equal(gradient, [[2.0, 0.0, 2.0], [0.0, 0.0, 0.0]])


def test_reductions_are_float32_under_bfloat16():
    tokens = jnp.full((1, 1000), -1.0078125, jnp.bfloat16)
    total = dpo.sequence_log_probs(tokens, jnp.ones((1, 1000)))
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, [-1007.8125], rtol=1e-6)


NAMES = sorted(dpo.VARIANTS)


@jax.jit
def token_losses(policy, reference, mask, weights):
    """The losses [V] of all variants, and their gradients [V, 2B, T] by `policy` and by `reference`."""

    def all_losses(policy, reference):
        options = [{"variants": ((dpo.VARIANTS[name], 1.0),)} for name in NAMES]
        outputs = [dpo.token_dpo_loss(policy, reference, mask, weights=weights, nll_weight=0.5, **o) for o in options]
        return jnp.stack([output.loss for output in outputs])

    return all_losses(policy, reference), jax.jacrev(all_losses, (0, 1))(policy, reference)


def padded(num_pairs, num_padded):
    key_policy, key_reference, key_mask = jax.random.split(jax.random.key(7), 3)
    policy, reference = (-jax.random.uniform(k, (2, num_pairs, 5)) * 2 for k in (key_policy, key_reference))
    mask = jax.random.bernoulli(key_mask, 0.7, policy.shape).at[:, :, 0].set(True)
    fill = ((0, 0), (1, num_padded - 1), (0, 0))
    weights = jnp.pad(jnp.ones(num_pairs), fill[1])
    plain = [x.reshape(2 * num_pairs, 5) for x in (policy, reference, mask)]
    more = [
        jnp.pad(x, fill, constant_values=value).reshape(-1, 5)
        for x, value in ((policy, jnp.nan), (reference, jnp.inf), (mask, True))
    ]
    return (*plain, jnp.ones(num_pairs)), (*more, weights)


def test_padded_pairs_change_nothing():
    plain, more = padded(3, 2)
    values, (gradients, reference_gradients) = token_losses(*plain)
    padded_values, (padded_gradients, _) = token_losses(*more)
    empty_values, empty_gradients = token_losses(*more[:3], jnp.zeros(5))
    rows = np.array([1, 2, 3, 6, 7, 8])
    for i, name in enumerate(NAMES):
        np.testing.assert_allclose(padded_values[i], values[i], rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(padded_gradients[i, rows], gradients[i], rtol=1e-5, atol=1e-7, err_msg=name)
        outside = np.delete(padded_gradients[i], rows, axis=0)
        np.testing.assert_array_equal(outside, np.zeros((4, 5)), err_msg=name)
        assert np.abs(gradients[i]).sum() > 0, name
    np.testing.assert_array_equal(reference_gradients, np.zeros_like(reference_gradients))
    np.testing.assert_array_equal(empty_values, np.zeros(len(NAMES)))
    for found in empty_gradients:
        np.testing.assert_array_equal(found, np.zeros((len(NAMES), 10, 5)))


def test_a_batch_of_no_rows_is_zero():
    empty = jnp.zeros(0)
    assert float(dpo.dpo_loss(empty, empty, empty, empty).loss) == 0.0


def test_weights_are_a_weighted_mean():
    output = dpo.dpo_loss(
        jnp.array([1.0, 3.0]), jnp.zeros(2), jnp.zeros(2), jnp.zeros(2), weights=jnp.array([3.0, 1.0])
    )
    np.testing.assert_allclose(output.loss, (3 * output.losses[0] + output.losses[1]) / 4, rtol=1e-6)


def test_nll_weight_adds_the_length_normalised_nll():
    zeros, chosen_nll = jnp.zeros(2), jnp.array([0.5, 2.0])
    output = dpo.dpo_loss(zeros, zeros, zeros, zeros, chosen_nll=chosen_nll, nll_weight=2.0)
    np.testing.assert_allclose(output.losses, np.log(2) + 2 * chosen_nll, rtol=1e-6)


def test_extreme_margins_stay_finite():
    tokens = jnp.full((6, 5), -1.0).at[:, 0].set(jnp.array([-4e4, 0.0, -1.0, 0.0, -4e4, -1.0]))
    reference, mask = jnp.full((6, 5), -2e4), jnp.zeros((6, 5), bool).at[:, 0].set(True)
    values, gradients = token_losses(tokens, reference, mask, jnp.ones(3))
    assert np.isfinite(values).all() and all(np.isfinite(g).all() for g in gradients)


@jax.jit
def paper_loss(rows):
    return dpo.dpo_loss(*rows.T)


@settings
@hypothesis.given(batch)
def test_the_paper_loss_is_positive_and_swaps_to_a_logit(rows):
    """loss(w, l) - loss(l, w) = -beta margin."""
    rows = jnp.array(rows)
    output, swapped = paper_loss(rows), paper_loss(rows[:, jnp.array([1, 0, 3, 2])])
    assert (output.losses >= 0).all()
    margins = output.chosen_rewards - output.rejected_rewards
    np.testing.assert_allclose(output.losses - swapped.losses, -margins, rtol=1e-4, atol=1e-4)


def test_vmap_over_seeds_equals_a_loop():
    rows = -100 * jax.random.uniform(jax.random.key(0), (3, B, 4))
    loop = jnp.stack([paper_loss(r).losses for r in rows])
    np.testing.assert_allclose(jax.vmap(paper_loss)(rows).losses, loop, rtol=1e-6)


def test_wpo_factors_of_a_deterministic_policy_are_1():
    tokens = jnp.zeros((2, 3))
    factor = dpo.wpo_factors(tokens, dpo.log_collision(jnp.array([50.0, 0.0, 0.0]) * jnp.ones((2, 3, 3))), tokens + 1)
    np.testing.assert_allclose(factor, [1.0], rtol=1e-6)


def test_errors():
    x = jnp.zeros(2)
    for variant in ("ipo", "sigmoid_norm", "sft"):
        with pytest.raises(ValueError, match="chosen_lengths"):
            dpo.dpo_loss(x, x, x, x, variants=((dpo.VARIANTS[variant], 1.0),))
    with pytest.raises(ValueError, match="chosen_nll"):
        dpo.dpo_loss(x, x, x, x, nll_weight=1.0)
    with pytest.raises(ValueError, match="label_smoothing"):
        dpo.dpo_loss(x, x, x, x, variants=((dpo.exo_pair, 1.0),), label_smoothing=0.0)

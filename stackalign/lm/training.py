"""Training on completion log-probabilities with any loss: all agents of a base at once, or all parameters of one agent.

What is trained is a stack, every array `[agents, …]` in float32 whatever the compute dtype: LoRA adapters beside frozen
parameters, or, without LoRA, the parameters themselves as a stack of one (a full fine-tune is its own base). These
masters take updates that the compute dtype would swallow. The loss is a weighted sum over rows whose weights are
normalised before the step, so gradient accumulation over micro-batches gives the large batch's gradient. Each agent has
its own optimizer state, gradient clipping included, by `vmap` over the stack.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stackalign.lm import lora, score, sharding
from stackalign.lm.config import DecoderConfig


class Batch(NamedTuple):
    """Rows of one micro-batch, `[agents, rows, …]`: every agent of the stack has equally many.

    Attributes:
      prompts, prompt_mask: `[agents, rows, P]`, padded on the left.
      completions, completion_mask: `[agents, rows, C]`, padded on the right, or `[agents, rows, G, C]` for completions
        that share a prompt.
      extra: whatever the loss needs, a pytree of arrays.
    """

    prompts: jax.Array
    prompt_mask: jax.Array
    completions: jax.Array
    completion_mask: jax.Array
    extra: Any = ()


Trained = lora.Adapters | Mapping[str, Any]
"""Stacked adapters, or the masters of all parameters, `decoder`'s with a leading axis of one agent."""

Loss = Callable[[jax.Array, Batch], tuple[jax.Array, Any]]
"""(log_probs shaped like the completions, batch) → (loss summed with normalised weights, metrics to be summed)."""


def adamw(*, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm: float = 1.0) -> optax.GradientTransformation:
    """AdamW without its learning rate, which `apply` takes: the schedule belongs to the caller."""
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay),
    )


def masters(params) -> Trained:
    """The stack of one that a full fine-tune of `params` starts from; float32."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32)[None], params)


def compute_copy(params, trained: Trained):
    """Parameters of masters in the dtype of `params`, which computes, for decoding and scoring."""
    dtype = params["final_norm"].dtype
    return jax.tree.map(lambda leaf: leaf[0].astype(dtype), trained)


def init(optimizer: optax.GradientTransformation, trained: Trained) -> optax.OptState:
    """Optimizer states of all agents, stacked like what is trained."""
    return jax.vmap(optimizer.init)(trained)


def cosine(step: int, total: int, peak: float) -> float:
    """Learning rate of step 0 ≤ `step` < `total`: cosine from `peak` towards 0, without warm-up."""
    return float(optax.cosine_decay_schedule(peak, max(total, 1))(step))


def _differentiable(params, trained: Trained, lora_config: lora.LoraConfig | None, mesh):
    """The `(parameters, adapters)` that a training pass computes with.

    The masters' embedding and projection stay float32 until their rows are looked up and their chunks multiplied
    (`decoder.apply`, `score.token_log_probs`): their gradients are sums over all tokens, to be added in float32.
    """
    if lora_config is not None:
        return params, trained
    wide = {name: trained[name][0] for name in ("embed", "lm_head") if name in trained}
    return sharding.constrain_params(compute_copy(params, trained) | wide, mesh), None


@functools.partial(jax.jit, static_argnames=("config", "lora_config", "loss", "vocab_size", "remat", "mesh"))
def gradient(
    params,
    trained: Trained,
    key: jax.Array,
    batch: Batch,
    *,
    config: DecoderConfig,
    lora_config: lora.LoraConfig | None,
    loss: Loss,
    temperature: float = 1.0,
    vocab_size: int,
    remat: bool = False,
    mesh: jax.sharding.Mesh | None = None,
):
    """Gradient of one micro-batch for every agent of a base; gradients of a step's micro-batches add up.

    Args:
      params: the base, which is frozen; without LoRA only its dtype counts, that of compute.
      trained: the stack.
      key: consumed by dropout.
      batch: see `Batch`.
      lora_config: shape of the adapters; None where all parameters are trained.
      loss: see `Loss`; static, so pass the same object every time.
      temperature: of the log-probabilities.
      mesh: the mesh that the arrays lie on, if any; static.

    Returns:
      `(grads, metrics)`, both sums; grads are float32 like `trained`.
    """

    def objective(trained):
        flat = sharding.constrain_rows([x.reshape(-1, *x.shape[2:]) for x in batch[:4]], mesh)
        rows = None if lora_config is None else lora.grouped(lora_config, key)
        log_probs = score.completion_log_probs(
            *_differentiable(params, trained, lora_config, mesh), config, *flat, rows, temperature=temperature,
            vocab_size=vocab_size, remat=remat, train_head=lora_config is None, mesh=mesh,
        )  # fmt: skip
        return loss(log_probs.reshape(batch.completions.shape), batch)

    return jax.grad(objective, has_aux=True)(trained)


@functools.partial(jax.jit, donate_argnums=(0,))
def add(total, addition):
    """Sum of two pytrees, in the buffers of the first, which is given up."""
    return jax.tree.map(jnp.add, total, addition)


@functools.partial(jax.jit, static_argnames=("optimizer",), donate_argnums=(0, 1))
def apply(trained: Trained, opt_state, grads, learning_rate, *, optimizer: optax.GradientTransformation):
    """One optimizer step of every agent in the buffers of `trained` and `opt_state`, which are given up.

    Returns:
      `(trained, opt_state)`.
    """
    updates, opt_state = jax.vmap(optimizer.update)(grads, opt_state, trained)
    return jax.tree.map(lambda value, update: value - learning_rate * update, trained, updates), opt_state

"""Training of stacked adapters: any loss on completion log-probabilities, all agents of a base at once.

The loss is a weighted sum over rows whose weights are normalised before the step, so gradient accumulation over
micro-batches gives the large batch's gradient. Adapters and moments are float32 whatever the compute dtype, and each
agent has its own optimizer state, gradient clipping included, by `vmap` over the stack.
"""

import functools
from collections.abc import Callable
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


Loss = Callable[[jax.Array, Batch], tuple[jax.Array, Any]]
"""(log_probs shaped like the completions, batch) → (loss summed with normalised weights, metrics to be summed)."""


def adamw(*, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm: float = 1.0) -> optax.GradientTransformation:
    """AdamW without its learning rate, which `apply` takes: the schedule belongs to the caller."""
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay),
    )


def init(optimizer: optax.GradientTransformation, adapters: lora.Adapters) -> optax.OptState:
    """Optimizer states of all agents, stacked like their adapters."""
    return jax.vmap(optimizer.init)(adapters)


def cosine(step: int, total: int, peak: float) -> float:
    """Learning rate of step 0 ≤ `step` < `total`: cosine from `peak` towards 0, without warm-up."""
    return float(optax.cosine_decay_schedule(peak, max(total, 1))(step))


@functools.partial(jax.jit, static_argnames=("config", "lora_config", "loss", "vocab_size", "remat", "mesh"))
def gradient(
    params,
    adapters: lora.Adapters,
    key: jax.Array,
    batch: Batch,
    *,
    config: DecoderConfig,
    lora_config: lora.LoraConfig,
    loss: Loss,
    temperature: float = 1.0,
    vocab_size: int,
    remat: bool = False,
    mesh: jax.sharding.Mesh | None = None,
):
    """Gradient of one micro-batch for every agent of a base; gradients of a step's micro-batches add up.

    Args:
      params: the frozen base.
      adapters: the stack.
      key: consumed by dropout.
      batch: see `Batch`.
      loss: see `Loss`; static, so pass the same object every time.
      temperature: of the log-probabilities.
      mesh: the mesh that the arrays lie on, if any; static.

    Returns:
      `(grads, metrics)`, both sums.
    """

    def objective(adapters):
        flat = sharding.constrain_rows([x.reshape(-1, *x.shape[2:]) for x in batch[:4]], mesh)
        rows = lora.grouped(lora_config, key)
        log_probs = score.completion_log_probs(
            params, adapters, config, *flat, rows, temperature=temperature, vocab_size=vocab_size, remat=remat
        )
        return loss(log_probs.reshape(batch.completions.shape), batch)

    return jax.grad(objective, has_aux=True)(adapters)


@functools.partial(jax.jit, donate_argnums=(0,))
def add(total, addition):
    """Sum of two pytrees, in the buffers of the first."""
    return jax.tree.map(jnp.add, total, addition)


@functools.partial(jax.jit, static_argnames=("optimizer",))
def apply(adapters: lora.Adapters, opt_state, grads, learning_rate, *, optimizer: optax.GradientTransformation):
    """One optimizer step of every agent; returns `(adapters, opt_state)`."""
    updates, opt_state = jax.vmap(optimizer.update)(grads, opt_state, adapters)
    return jax.tree.map(lambda value, update: value - learning_rate * update, adapters, updates), opt_state

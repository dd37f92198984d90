"""Stacked low-rank adapters (LoRA, Hu et al. 2021): one array holds the adapters of all agents of a base.

A batch mixes rows of different agents. Where they come in any order (decoding, judging), all agents' down-projections
run as one `[agents·r, in]` matmul, the parts of the other agents are zeroed, and one `[out, agents·r]` matmul finishes:
dense work on weights that are read once. A training batch is in agent order with equally many rows an agent and needs
only each agent's own product. Rows of one agent never touch another agent's adapter, so the gradient of a batch is each
agent's own.

Adapters::  ({target: {"a": [agents, r, in], "b": [agents, out, r]}, ...}, ...)   one dict a layer
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stackalign.lm.config import DecoderConfig

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
ATTENTION = ("q", "k", "v", "o")

Adapters = tuple[Mapping[str, Mapping[str, jax.Array]], ...]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Shape of the adapters. Defaults are the paper's (Stackelberg Alignment, Appendix C).

    Attributes:
      rank: r, columns of the down-projection.
      alpha: the update is scaled by alpha / rank.
      dropout: probability of zeroing an input of an adapter while training, in [0, 1).
      targets: which projections carry an adapter, of `TARGETS`.
    """

    rank: int = 64
    alpha: float = 16.0
    dropout: float = 0.1
    targets: tuple[str, ...] = ATTENTION

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"lora rank must be at least 1, got {self.rank}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora dropout must lie in [0, 1), got {self.dropout}")
        unknown = sorted(set(self.targets) - set(TARGETS))
        if unknown or not self.targets:
            raise ValueError(f"lora targets must be some of {', '.join(TARGETS)}; got {unknown or 'none'}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Rows(NamedTuple):
    """Which agent's adapter each row of a batch uses.

    Attributes:
      one_hot: `[agents, rows]`, or None for a batch in agent order with equally many rows an agent (`grouped`).
      scale: `LoraConfig.scale`.
      key: typed PRNG key of the dropout masks, or None when not training.
      dropout: see `LoraConfig`.
    """

    one_hot: jax.Array | None
    scale: float
    key: jax.Array | None = None
    dropout: float = 0.0


def rows(config: LoraConfig, num_agents: int, slots: jax.Array) -> Rows:
    """`Rows` for a batch whose row b uses adapter `slots[b]` (int `[rows]`) of a stack of `num_agents`."""
    return Rows((jnp.arange(num_agents)[:, None] == slots[None, :]).astype(jnp.float32), config.scale)


def grouped(config: LoraConfig, key: jax.Array | None = None) -> Rows:
    """`Rows` for a batch in agent order with equally many rows an agent; a key turns dropout on."""
    return Rows(None, config.scale, key if config.dropout > 0 else None, config.dropout)


def target_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """`(out, in)` of every projection that can carry an adapter."""
    d, f, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    return {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q), "gate": (f, d), "up": (f, d), "down": (d, f)}


def init(key: jax.Array, config: DecoderConfig, lora: LoraConfig, num_agents: int) -> Adapters:
    """Adapters that change nothing: `a` uniform in ±sqrt(1/in) (Kaiming with a = √5, as PEFT), `b` zero, float32."""
    shapes = target_shapes(config)
    layers = []
    for layer_key in jax.random.split(key, config.num_layers):
        layer = {}
        for name, target_key in zip(lora.targets, jax.random.split(layer_key, len(lora.targets)), strict=True):
            out, fan_in = shapes[name]
            bound = fan_in**-0.5
            layer[name] = {
                "a": jax.random.uniform(target_key, (num_agents, lora.rank, fan_in), minval=-bound, maxval=bound),
                "b": jnp.zeros((num_agents, out, lora.rank)),
            }
        layers.append(layer)
    return tuple(layers)


def delta(layer: Mapping[str, Mapping[str, jax.Array]] | None, name: str, x: jax.Array, rows: Rows | None):
    """The adapters' addition to projection `name` of `x` `[in, rows, length]`; 0.0 where there is no adapter."""
    if layer is None or rows is None or name not in layer:
        return 0.0
    a, b = layer[name]["a"].astype(x.dtype), layer[name]["b"].astype(x.dtype)
    if rows.key is not None:
        x = drop(jax.random.fold_in(rows.key, TARGETS.index(name)), x, rows.dropout)
    agents, rank, fan_in = a.shape
    if rows.one_hot is None:
        grouped_x = x.reshape(fan_in, agents, -1)
        hidden = jnp.einsum("arf,fan->arn", a, grouped_x) * rows.scale
        return jnp.einsum("aor,arn->oan", b, hidden).reshape(-1, *x.shape[1:])
    hidden = jnp.einsum("pf,fbl->pbl", a.reshape(agents * rank, fan_in), x)
    chosen = (rows.one_hot * rows.scale).astype(x.dtype)
    hidden = hidden.reshape(agents, rank, *hidden.shape[1:]) * chosen[:, None, :, None]
    up = b.transpose(1, 0, 2).reshape(-1, agents * rank)
    return jnp.einsum("op,pbl->obl", up, hidden.reshape(agents * rank, *hidden.shape[2:]))


def drop(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Zeroes entries with probability `rate` (to 1/65536) and rescales the rest, so that the mean is kept."""
    threshold = round(rate * 65536)
    keep = jax.random.bits(key, x.shape, jnp.uint16) >= threshold
    return jnp.where(keep, x * (65536 / (65536 - threshold)), 0).astype(x.dtype)


def take(rows: Rows | None, index: jax.Array) -> Rows | None:
    """`Rows` of some rows of a batch, int `[n]`, with repetitions."""
    return None if rows is None else rows._replace(one_hot=rows.one_hot[:, index])


def per_layer(rows: Rows | None, index: int) -> Rows | None:
    """`rows` with the dropout key of layer `index`."""
    if rows is None or rows.key is None:
        return rows
    return rows._replace(key=jax.random.fold_in(rows.key, index))


def select(adapters: Adapters, agents) -> Adapters:
    """The stacked adapters of some agents (ints `[n]` or a slice), as a stack."""
    return jax.tree.map(lambda leaf: leaf[agents], adapters)

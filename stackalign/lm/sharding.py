"""Placing parameters, adapters and batches on a mesh of devices: one table from parameter to partition.

The mesh has the axes "data" (rows), "fsdp" (rows, and parameters in parts that are gathered where they are used) and
"tensor" (features of a projection). The functions of this package are not written for any mesh: given arrays that lie
on one, `jax.jit` partitions them, and results equal those of one device up to rounding. Nothing changes on several
hosts: `jax.devices()` are those of all hosts.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stackalign.lm.config import DecoderConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")

# Weights are [out, in]. A projection into heads or into the MLP's inner features is cut by "tensor" where it ends, one
# out of them where it begins, so that between the two nothing is exchanged but the sum at the end.
RULES: Mapping[str, PartitionSpec] = {
    "embed": PartitionSpec("tensor", "fsdp"),
    "lm_head": PartitionSpec("tensor", "fsdp"),
    "qkv": PartitionSpec("tensor", "fsdp"),
    "qkv_bias": PartitionSpec("tensor"),
    "o": PartitionSpec("fsdp", "tensor"),
    "gate_up": PartitionSpec("tensor", "fsdp"),
    "down": PartitionSpec("fsdp", "tensor"),
    "attn_norm": PartitionSpec(),
    "mlp_norm": PartitionSpec(),
    "post_attn_norm": PartitionSpec(),
    "post_mlp_norm": PartitionSpec(),
    "q_norm": PartitionSpec(),
    "k_norm": PartitionSpec(),
    "final_norm": PartitionSpec(),
}


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data * fsdp * tensor` devices, neighbours along "tensor" first.

    Args:
      data: copies of the parameters, each with its own rows.
      fsdp: parts that the parameters are cut into, each with its own rows too.
      tensor: parts that the features of a layer are cut into.
      devices: all devices of all hosts by default.

    Raises:
      ValueError: a size below 1, or sizes whose product is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"mesh axis {name}={size} must be at least 1")
    if data * fsdp * tensor != len(devices):
        raise ValueError(
            f"a mesh of data={data} x fsdp={fsdp} x tensor={tensor} needs {data * fsdp * tensor} devices; there are "
            f"{len(devices)}"
        )
    return Mesh(np.asarray(devices).reshape(data, fsdp, tensor), AXES)


def parse_sizes(text: str) -> dict[str, int]:
    """Sizes by axis from text such as "fsdp=8" or "data=2,fsdp=2,tensor=2"; axes that are not named are left out.

    Raises:
      ValueError: another axis, one named twice, or a size that is no number.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES or not size.isdecimal() or name in sizes:
            raise ValueError(f"mesh {text!r}: expected axes out of {', '.join(AXES)}, as in data=2,fsdp=4")
        sizes[name] = int(size)
    return sizes


def parse_mesh(text: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `parse_sizes`; axes that are not named have size 1.

    Raises:
      ValueError: what `parse_sizes` and `make_mesh` refuse.
    """
    return make_mesh(**parse_sizes(text), devices=devices)


def specs(params: Any) -> Any:
    """The partition of every parameter, in the structure of `params` (arrays or shapes).

    Raises:
      KeyError: a parameter that the table does not know.
    """

    def spec(path, _) -> PartitionSpec:
        name = path[-1].key
        if name not in RULES:
            raise KeyError(f"no partition rule for parameter {jax.tree_util.keystr(path)}")
        return RULES[name]

    return jax.tree_util.tree_map_with_path(spec, params)


def fit(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """The partition without the axes that do not divide the array: those dimensions lie whole on every device."""
    kept = []
    for size, axis in zip(shape, (*spec, *[None] * (len(shape) - len(spec))), strict=True):
        axes = () if axis is None else (axis,) if isinstance(axis, str) else axis
        parts = int(np.prod([mesh.shape[name] for name in axes], dtype=int))
        kept.append(axis if size % parts == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*kept))


def shardings(params: Any, mesh: Mesh) -> Any:
    """`specs` on a mesh, fitted to the shapes."""
    return jax.tree.map(lambda leaf, spec: fit(spec, leaf.shape, mesh), params, specs(params))


def parts(config: DecoderConfig, mesh: Mesh | None) -> int:
    """Into how many parts the rows of fused projections are cut, each with its share of every projection in them.

    The size of "tensor" where it divides heads and inner features; otherwise 1, and outputs of fused projections move
    between devices when they are split.
    """
    size = 1 if mesh is None else mesh.shape["tensor"]
    return size if all(n % size == 0 for n in (config.num_kv_heads, config.intermediate_size)) else 1


def interleave(params: Any, config: DecoderConfig, parts: int) -> Any:
    """Parameters with the rows of fused projections in `parts` parts; see `decoder.split_rows`."""
    if parts == 1:
        return params
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"qkv": (q, kv, kv), "qkv_bias": (q, kv, kv), "gate_up": (config.intermediate_size,) * 2}

    def reorder(path, leaf):
        if (name := path[-1].key) not in sizes:
            return leaf
        pieces, start = [], 0
        for size in sizes[name]:
            pieces.append(np.arange(start, start + size).reshape(parts, -1))
            start += size
        return leaf[np.concatenate(pieces, axis=1).reshape(-1)]

    return jax.tree_util.tree_map_with_path(reorder, params)


def place(params: Any, config: DecoderConfig, mesh: Mesh) -> Any:
    """Parameters of a decoder on a mesh; each device receives its part only."""
    params = interleave(params, config, parts(config, mesh))
    return jax.tree.map(put, params, shardings(params, mesh))


def put(leaf: Any, where: NamedSharding) -> jax.Array:
    """An array that every process holds, laid out on the devices of all of them."""
    if where.is_fully_addressable:
        return jax.device_put(leaf, where)
    leaf, key = (jax.random.key_data(leaf), leaf) if _is_key(leaf) else (leaf, None)
    host = np.asarray(leaf)
    out = jax.make_array_from_callback(host.shape, where, lambda index: host[index])
    return out if key is None else jax.random.wrap_key_data(out, impl=jax.random.key_impl(key))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def fetch(tree: Any) -> Any:
    """NumPy arrays of the whole values, in every process."""

    def one(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(one, tree)


def gathers(mesh: Mesh | None, hidden_size: int, tokens: int) -> bool:
    """Whether a pass puts each layer's weights together along "fsdp" where it uses them; a decoding step does not.

    That moves `out * in` numbers a projection and leaves every device its own rows. Otherwise the weights stay where
    they are and activations are summed over "fsdp", `(out + in) * tokens` numbers.

    Args:
      hidden_size: of the decoder.
      tokens: rows times length of the pass, all devices together.
    """
    return mesh is not None and tokens >= hidden_size


def gather(layer: Mapping[str, jax.Array], mesh: Mesh | None, gathered: bool = True) -> Mapping[str, jax.Array]:
    """Inside `jit`: parameters by name, put together along "fsdp" if `gathered`; gradients go back into parts."""
    if mesh is None or not gathered:
        return layer
    return {name: _gather(leaf, name, mesh) for name, leaf in layer.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(leaf, name, mesh):
    spec = PartitionSpec(*(None if axis == "fsdp" else axis for axis in RULES[name]))
    return jax.lax.with_sharding_constraint(leaf, fit(spec, leaf.shape, mesh))


def _gather_forward(leaf, name, mesh):
    return _gather(leaf, name, mesh), None


def _gather_backward(name, mesh, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, fit(RULES[name], gradient.shape, mesh)),)


_gather.defvjp(_gather_forward, _gather_backward)


def constrain_params(params: Any, mesh: Mesh | None) -> Any:
    """Inside `jit`: parameters, and with them their gradients, in the parts that `place` puts them into."""
    return params if mesh is None else jax.lax.with_sharding_constraint(params, shardings(params, mesh))


def constrain(x: jax.Array, mesh: Mesh | None, gathered: bool, features: str | None = None) -> jax.Array:
    """Inside `jit`: activations `[features, rows, ...]` where a pass with or without gathered weights wants them.

    Args:
      x: the hidden state, or heads or inner features of a layer.
      gathered: see `gathers`.
      features: the axis that cuts the features of `x` beside it, "tensor" for heads and inner features.
    """
    if mesh is None:
        return x
    spec = PartitionSpec(features, ROWS) if gathered else PartitionSpec(features or "fsdp", "data")
    return jax.lax.with_sharding_constraint(x, fit(spec, x.shape, mesh))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Arrays whole on every device: adapters and their moments, which are small, and keys."""
    return jax.tree.map(lambda leaf: put(leaf, NamedSharding(mesh, PartitionSpec())), tree)


def row_shards(mesh: Mesh | None, num_rows: int) -> int:
    """Into how many parts a batch of `num_rows` rows is cut."""
    size = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    return size if num_rows % size == 0 else 1


def _rows(leaf: Any, mesh: Mesh, axis: int) -> NamedSharding:
    return fit(PartitionSpec(*[None] * axis, ROWS), leaf.shape, mesh)


def constrain_rows(tree: Any, mesh: Mesh | None, axis: int = 0) -> Any:
    """Inside `jit`: rows at `axis` shared out as by `place_rows`; no mesh, no change."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, _rows(leaf, mesh, axis)), tree)


def place_rows(tree: Any, mesh: Mesh, axis: int = 0) -> Any:
    """Arrays of a batch, their rows at `axis` shared out over "data" and "fsdp" (whole where they do not divide)."""
    return jax.tree.map(lambda leaf: put(leaf, _rows(leaf, mesh, axis)), tree)

"""Placing parameters, adapters and batches on a mesh of devices: one table from parameter to partition.

The mesh has the axes "data" (rows), "fsdp" (rows, and parameters in parts that are gathered where they are used) and
"tensor" (features of a projection). The functions of this package are not written for any mesh: given arrays that lie
on one, `jax.jit` partitions them, and results equal those of one device up to rounding. Nothing changes on several
hosts: `jax.devices()` are those of all hosts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

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


def place(params: Any, mesh: Mesh) -> Any:
    """Parameters of a decoder on a mesh; each device receives its part only."""
    return jax.tree.map(jax.device_put, params, shardings(params, mesh))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Arrays whole on every device: adapters and their moments, which are small, and keys."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def constrain_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Inside `jit`: rows at axis 0 shared out as by `place_rows`, after a reshape that lost it; no mesh, no change."""
    if mesh is None:
        return tree
    spec = PartitionSpec(("data", "fsdp"))
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, fit(spec, leaf.shape, mesh)), tree)


def place_rows(tree: Any, mesh: Mesh, axis: int = 0) -> Any:
    """Arrays of a batch, their rows at `axis` shared out over "data" and "fsdp" (whole where they do not divide)."""
    spec = PartitionSpec(*[None] * axis, ("data", "fsdp"))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, fit(spec, leaf.shape, mesh)), tree)

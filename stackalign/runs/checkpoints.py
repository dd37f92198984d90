"""Checkpoints of a run: any pytree of state, and how far the record files had got when it was taken.

A checkpoint is a folder `checkpoints/<step>` that orbax writes under a temporary name and renames when it is complete:
after a kill at any moment the complete ones are those whose name is a number.
"""

import contextlib
import errno
import logging
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from stackalign.runs import folder, records

_UNREADABLE = ".unreadable"
_DELETED = ".deleted"


class Restored(NamedTuple):
    """A checkpoint that was read: the step, the state, and the byte sizes of the record files at that step."""

    step: int
    state: Any
    positions: dict[str, int]


class _Leaf(NamedTuple):
    """What a checkpoint's own description says of one leaf: enough to compare it and to read it back."""

    path: str
    kind: str  # "none", "array", "key", or the name of a Python scalar type
    shape: tuple[int, ...] = ()
    dtype: str = ""
    value: Any = None  # Python scalars only
    impl: str = ""  # typed keys only
    weak: bool = False  # JAX arrays only: promotion after a resume must be what it was before


def _describe(path: str, leaf: Any) -> _Leaf:
    if leaf is None:
        return _Leaf(path, "none")
    if type(leaf) in (bool, int, float, str):
        return _Leaf(path, type(leaf).__name__, value=leaf)
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        raise TypeError(f"{path} is a {type(leaf).__name__}: a checkpoint holds arrays, keys and Python scalars")
    shape = tuple(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = "" if isinstance(leaf, jax.ShapeDtypeStruct) else str(jax.random.key_impl(leaf))
        return _Leaf(path, "key", shape, str(leaf.dtype), impl=impl)
    if leaf.dtype.kind in "OUSM":
        raise TypeError(f"{path} is an array of {leaf.dtype}: a checkpoint holds numbers")
    return _Leaf(path, "array", shape, leaf.dtype.name, weak=bool(getattr(leaf, "weak_type", False)))


def _flatten(tree: Any) -> tuple[list[_Leaf], list[Any], Any]:
    # None is kept as a leaf, so that a None where an array is expected is seen.
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    leaves = [leaf for _, leaf in pairs]
    return [_describe(jax.tree_util.keystr(path) or "state", leaf) for path, leaf in pairs], leaves, treedef


def _stored(spec: _Leaf) -> bool:
    return spec.kind in ("array", "key") and 0 not in spec.shape  # orbax refuses empty arrays


@contextlib.contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    """An orbax checkpointer that says no more than warnings."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            yield checkpointer
    finally:
        logger.setLevel(level)


def _folder(run: folder.Run, step: int) -> pathlib.Path:
    return run.checkpoints.absolute() / f"{step:08d}"


def steps(run: folder.Run) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    if not run.checkpoints.is_dir():
        return []
    return sorted(int(entry.name) for entry in run.checkpoints.iterdir() if entry.name.isdecimal())


def _sweep(run: folder.Run) -> None:
    """Removes what a killed save or a killed removal left behind."""
    if run.checkpoints.is_dir():
        for entry in run.checkpoints.iterdir():
            if not entry.name.isdecimal() and entry.suffix != _UNREADABLE:
                shutil.rmtree(entry, ignore_errors=True)


def _description(path: pathlib.Path) -> dict[str, Any]:
    with _checkpointer() as checkpointer:
        return checkpointer.restore(path, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about


def save(
    run: folder.Run,
    step: int,
    state: Any,
    positions: Mapping[str, int],
    *,
    keep: int = 2,
    best: bool = False,
) -> None:
    """Saves a checkpoint; a kill at any moment leaves it whole or absent, and the earlier ones untouched.

    Args:
      run: the run.
      step: its number, above that of every checkpoint there is.
      state: pytree of JAX and NumPy arrays, typed keys, Python scalars, strings and None. Bits, dtypes, weak types
        and the implementation of keys are kept.
      positions: byte size of every record file, by file name.
      keep: how many of the newest checkpoints stay (at least 1).
      best: this is the best one so far; the newest so marked stays too.

    Raises:
      ValueError: the step is not above the newest checkpoint's, or `keep` < 1.
      TypeError: a leaf cannot be saved; the message names it.
      OSError: the folder cannot be written or has no room; the message names it.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one checkpoint must stay")
    known = steps(run)
    if step < 0 or (known and step <= known[-1]):
        raise ValueError(f"step {step} is not above the newest checkpoint's ({known[-1] if known else 'none'})")
    specs, leaves, _ = _flatten(state)
    arrays = {
        f"{index:06d}": jax.random.key_data(leaf) if spec.kind == "key" else leaf
        for index, (spec, leaf) in enumerate(zip(specs, leaves, strict=True))
        if _stored(spec)
    }
    about = {
        "step": step,
        "best": best,
        "positions": dict(positions),
        "leaves": [spec._asdict() for spec in specs],
    }
    items = {"about": ocp.args.JsonSave(about)}
    if arrays:
        arrays = {name: np.asarray(leaf) if isinstance(leaf, np.generic) else leaf for name, leaf in arrays.items()}
        items["arrays"] = ocp.args.PyTreeSave(arrays)
    folder.require_free(run.checkpoints, sum(leaf.nbytes for leaf in arrays.values()) + 2**20)
    _sweep(run)
    try:
        run.checkpoints.mkdir(exist_ok=True)
        with _checkpointer() as checkpointer:
            checkpointer.save(_folder(run, step), args=ocp.args.Composite(**items))
    except (OSError, ValueError) as error:  # tensorstore reports a failed write as a ValueError
        full = "RESOURCE_EXHAUSTED" in str(error)
        number = getattr(error, "errno", None) or (errno.ENOSPC if full else errno.EIO)
        raise OSError(number, f"cannot save checkpoint {step} in {run.path}: {str(error)[:200]}") from error
    _prune(run, keep)


def _prune(run: folder.Run, keep: int) -> None:
    known = steps(run)
    old, best = known[:-keep], None
    for step in reversed(known) if old else ():
        with contextlib.suppress(OSError, ValueError, KeyError):
            if _description(_folder(run, step))["best"]:
                best = step
                break
    for step in old:
        if step != best:
            gone = _folder(run, step).with_suffix(_DELETED)
            os.rename(_folder(run, step), gone)  # first the name: a half-removed folder must not look complete
            shutil.rmtree(gone, ignore_errors=True)


def _compare(step: int, saved: list[_Leaf], expected: list[_Leaf]) -> None:
    """Raises ValueError at the first leaf, in the order of the template, that does not fit."""
    known, wanted = {spec.path: spec for spec in saved}, {spec.path for spec in expected}
    for spec in expected:
        if spec.path not in known:
            raise ValueError(f"checkpoint {step} has no leaf {spec.path}")
        old = known[spec.path]
        for what in ("kind", "shape", "dtype"):
            if getattr(old, what) != getattr(spec, what):
                raise ValueError(
                    f"checkpoint {step} does not fit at {spec.path}: its {what} is {getattr(old, what)}, "
                    f"the program has {getattr(spec, what)}"
                )
    for spec in saved:
        if spec.path not in wanted:
            raise ValueError(f"checkpoint {step} has a leaf {spec.path} that the program does not have")


def _sharded(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and len(sharding.device_set) > 1


def _rebuild(spec: _Leaf, stored: Any, template: Any) -> Any:
    if spec.kind == "none":
        return None
    if spec.kind not in ("array", "key"):
        return spec.value
    if stored is None:
        if spec.kind == "key":
            data = jax.random.key_data(jax.random.split(jax.random.key(0, impl=spec.impl), spec.shape))
            return jax.random.wrap_key_data(data, impl=spec.impl)
        stored = np.zeros(spec.shape, spec.dtype)
    if isinstance(template, np.generic):
        return stored[()]
    if isinstance(template, np.ndarray):
        return stored
    if not isinstance(stored, jax.Array):
        # A single-device array stays uncommitted on the default device, as one that a program made itself.
        sharding = getattr(template, "sharding", None)
        moved = sharding is not None and sharding.device_set != jnp.zeros(()).sharding.device_set
        stored = jax.device_put(stored, sharding) if moved else jnp.array(stored)
    if spec.kind == "key":
        return jax.random.wrap_key_data(stored, impl=spec.impl)
    if spec.weak:  # scattering into a weakly typed array is the public way to keep the weak type
        weak = jnp.full(spec.shape, {"b": False, "i": 0, "c": 0j}.get(stored.dtype.kind, 0.0))
        return weak.at[...].set(stored) if weak.dtype == stored.dtype else stored
    return stored


def _read(path: pathlib.Path, saved: list[_Leaf], leaves: list[Any]) -> list[Any]:
    """Leaves of a checkpoint, in the order it was saved in; `leaves` are the template's, in the same order."""
    wanted = {f"{index:06d}": leaves[index] for index, spec in enumerate(saved) if _stored(spec)}
    arrays = {}
    if wanted:
        how = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding)
            if _sharded(leaf) and saved[int(name)].kind == "array"
            else ocp.RestoreArgs(restore_type=np.ndarray)
            for name, leaf in wanted.items()
        }
        args = ocp.args.PyTreeRestore(item={name: 0 for name in wanted}, restore_args=how)
        with _checkpointer() as checkpointer:
            arrays = checkpointer.restore(path, args=ocp.args.Composite(arrays=args)).arrays
    return [_rebuild(spec, arrays.get(f"{index:06d}"), leaves[index]) for index, spec in enumerate(saved)]


def restore(run: folder.Run, template: Any, *, best: bool = False) -> Restored | None:
    """Reads the newest checkpoint; one that cannot be read is passed over with a warning, for the next older one.

    Args:
      run: the run.
      template: a pytree of the state's structure, shapes and dtypes (its values are not used; JAX leaves may be
        `jax.ShapeDtypeStruct`). It decides which leaves become NumPy arrays, and the sharding of the JAX ones.
      best: read the newest one that was marked as the best instead.

    Returns:
      Step, state and positions, or None if there is no (marked) checkpoint.

    Raises:
      ValueError: a checkpoint has another structure, shape or dtype; the message names the first such leaf.
      OSError: there are checkpoints, but none of them can be read.
    """
    expected, leaves, treedef = _flatten(template)
    failure = None
    for step in reversed(steps(run)):
        path = _folder(run, step)
        try:
            about = _description(path)
            saved = [_Leaf(**(spec | {"shape": tuple(spec["shape"])})) for spec in about["leaves"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            failure = error
            logging.getLogger(__name__).warning("checkpoint %s cannot be read: %s", path, error)
            continue
        if best and not about["best"]:
            continue
        _compare(step, saved, expected)
        by_path = {spec.path: leaf for spec, leaf in zip(expected, leaves, strict=True)}
        try:
            found = _read(path, saved, [by_path[spec.path] for spec in saved])
        except (OSError, ValueError, KeyError) as error:
            failure = error
            logging.getLogger(__name__).warning("checkpoint %s cannot be read: %s", path, error)
            continue
        found = {spec.path: leaf for spec, leaf in zip(saved, found, strict=True)}
        state = jax.tree_util.tree_unflatten(treedef, [found[spec.path] for spec in expected])
        return Restored(step, state, about["positions"])
    if failure is not None:
        message = f"no checkpoint in {run.checkpoints} can be read; the last failure: {failure}"
        raise OSError(errno.EIO, message) from failure
    return None


def commit(
    run: folder.Run,
    step: int,
    state: Any,
    duels: Iterable[Mapping[str, Any]],
    metrics: Mapping[str, Any],
    *,
    keep: int = 2,
    best: bool = False,
) -> None:
    """Records one iteration: its duels, its line of metrics, then the checkpoint that makes both count.

    A kill before the checkpoint is complete leaves rows that `resume` cuts off again. Arguments and errors as in
    `save` and `records.append`.
    """
    positions = {
        run.duels.name: records.append(run.duels, duels),
        run.metrics.name: records.append(run.metrics, [metrics]),
    }
    save(run, step, state, positions, keep=keep, best=best)


def resume(run: folder.Run, template: Any) -> Restored | None:
    """Goes back to the newest checkpoint that can be read, and cuts the record files to what they were at it.

    With no checkpoint the record files become empty. Checkpoints that were passed over are set aside under
    another name. Arguments, result and errors as in `restore`; also ValueError if a record file lost rows.
    """
    _sweep(run)
    restored = restore(run, template)
    positions = restored.positions if restored else {}
    for step in steps(run):
        if restored and step > restored.step:
            path = _folder(run, step)
            os.rename(path, path.with_suffix(_UNREADABLE))
    for path in (run.duels, run.metrics):
        records.truncate(path, positions.get(path.name, 0))
    return restored

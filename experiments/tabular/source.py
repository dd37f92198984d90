"""The game of a run: random, or read from a file. Messages of errors name the flag or the file and the key."""

import pathlib
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from stackalign.games import utilities

FLAGS = flags.FLAGS

PLAIN = ("uniform", "normal")
ENSEMBLE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "variance": utilities.variance,
    "jsd": utilities.jensen_shannon,
    "decision_uncertainty": utilities.decision_uncertainty,
    "preference": utilities.preference,
    "targeted": lambda ensemble: utilities.targeted(ensemble, FLAGS.target_member, weight=FLAGS.target_weight),
}

flags.DEFINE_string("game", None, "A game to load, .npz or .npy (see above); by default a random one is made.")
flags.DEFINE_enum(
    "utility", None, [*PLAIN, *ENSEMBLE],
    "Random entries (uniform, the default, or normal), or what an ensemble of preference models is made into.",
)  # fmt: skip
flags.DEFINE_integer("contexts", 64, "Contexts of the random game.", lower_bound=1)
flags.DEFINE_integer("leader_actions", 16, "Actions of the Leader in the random game.", lower_bound=1)
flags.DEFINE_integer("follower_actions", 16, "Actions of the Follower in the random game.", lower_bound=1)
flags.DEFINE_integer("members", 5, "Members of the random ensemble.", lower_bound=1)
flags.DEFINE_enum("references", "random", ["random", "uniform"], "References and prior of the random game.")
flags.DEFINE_integer("seed", 0, "Seed of the random game.", lower_bound=0)
flags.DEFINE_float("scale", None, "Factor on the utility; by default 4 for variance, so that it fills [0, 1], else 1.")
flags.DEFINE_integer("target_member", 0, "With --utility=targeted: the member whose preference counts.", lower_bound=0)
flags.DEFINE_float("target_weight", 1.0, "With --utility=targeted: its weight beside the variance.", lower_bound=0.0)

RANDOM_ONLY = ("contexts", "leader_actions", "follower_actions", "members", "references", "seed")
KEYS = (
    "utility", "ensemble", "prior", "pi_ref", "omega_ref", "log_pi_ref", "log_omega_ref", "tau_leader", "tau_follower"
)  # fmt: skip


class Source(NamedTuple):
    """A game before it is put together.

    what: says where it comes from.
    utility: `[X, L, F]`, an array or what reads like one.
    fields: prior and references, as `games.make_game` takes them.
    taus: tau_leader and tau_follower where the source has them.
    """

    what: str
    utility: Any
    fields: dict[str, np.ndarray]
    taus: dict[str, Any]


class Float64Rows(NamedTuple):
    """A memory-mapped array whose rows are cast as they are read."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.array[rows].astype(np.float64)


def check_flags() -> None:
    """Refuses flags of the game that contradict each other or would have no effect."""
    given = {name for name in FLAGS if FLAGS[name].present}
    if FLAGS.game is not None:
        for name in RANDOM_ONLY:
            if name in given:
                raise ValueError(f"--{name} is for random games; leave it out with --game={FLAGS.game}")
        if pathlib.Path(FLAGS.game).suffix not in (".npz", ".npy"):
            raise ValueError(f"--game={FLAGS.game}: expected the name of an .npz or .npy file")
    elif "members" in given and FLAGS.utility not in ENSEMBLE:
        raise ValueError(f"--members needs a --utility of an ensemble: {', '.join(ENSEMBLE)}")
    elif FLAGS.utility in ENSEMBLE and FLAGS.leader_actions != FLAGS.follower_actions:
        raise ValueError(
            f"--utility={FLAGS.utility} compares two answers: --leader_actions={FLAGS.leader_actions} and "
            f"--follower_actions={FLAGS.follower_actions} must be equal"
        )
    for name in ("target_member", "target_weight"):
        if name in given and FLAGS.utility != "targeted":
            raise ValueError(f"--{name} needs --utility=targeted")
    if FLAGS.scale is not None and not 0.0 < FLAGS.scale < np.inf:
        raise ValueError(f"--scale={FLAGS.scale:g} must be a positive number")
    if not FLAGS.target_weight < np.inf:
        raise ValueError(f"--target_weight={FLAGS.target_weight:g} must be finite")


def load(fits: Callable[..., None]) -> Source:
    """The game of the flags.

    Args:
      fits: `(shape of the utility that is solved at a time, what else is held, in sizes of it)`; raises if too much.
    """
    return random_source(fits) if FLAGS.game is None else load_source(pathlib.Path(FLAGS.game), fits)


def random_source(fits: Callable[..., None]) -> Source:
    """The random game of the flags: the same numbers in both precisions, up to their rounding."""
    rng = np.random.default_rng(FLAGS.seed)
    shape = (FLAGS.contexts, FLAGS.leader_actions, FLAGS.follower_actions)
    name = FLAGS.utility or "uniform"
    fits(shape, 3 * FLAGS.members if name in ENSEMBLE else 1)
    if name in ENSEMBLE:
        # What all members think, and what each adds to it; skew-symmetric scores make the probabilities antisymmetric.
        scores = rng.normal(size=(1, *shape)) + rng.normal(size=(FLAGS.members, *shape))
        scores = (scores - np.swapaxes(scores, 2, 3)) / np.sqrt(2.0)
        utility = ensemble_utility(name, 1.0 / (1.0 + np.exp(-scores)))
        what = f"random {name} of {FLAGS.members} members, seed {FLAGS.seed}"
    else:
        draw = rng.uniform if name == "uniform" else rng.normal
        utility = (FLAGS.scale or 1.0) * draw(size=shape)
        what = f"random {name}, seed {FLAGS.seed}"
    fields = {}
    if FLAGS.references == "random":
        fields = {
            "prior": softmax(rng.normal(size=shape[0])),
            "pi_ref": softmax(rng.normal(size=shape[:2])),
            "omega_ref": softmax(rng.normal(size=shape)),
        }
    return Source(what, utility, fields, {})


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def ensemble_utility(name: str, ensemble: np.ndarray) -> np.ndarray:
    """The utility `[X, Y, Y]` of an ensemble `[I, X, Y, Y]`, scaled."""
    if name == "targeted" and FLAGS.target_member >= len(ensemble):
        raise ValueError(f"--target_member={FLAGS.target_member}: the ensemble has {len(ensemble)} members, from 0 on")
    factor = FLAGS.scale if FLAGS.scale is not None else 4.0 if name == "variance" else 1.0
    return factor * np.asarray(ENSEMBLE[name](jnp.asarray(ensemble, jnp.float64 if FLAGS.x64 else jnp.float32)))


def load_source(path: pathlib.Path, fits: Callable[..., None]) -> Source:
    """The game of a file; messages name the file and the key."""
    if not path.is_file():
        raise ValueError(f"--game={path}: no such file")
    try:
        return (load_npy if path.suffix == ".npy" else load_npz)(path, fits)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"--game={path}: {error}") from error


def load_npy(path: pathlib.Path, fits: Callable[..., None]) -> Source:
    if FLAGS["utility"].present or FLAGS["scale"].present:
        raise ValueError("an .npy file is a utility as it is; leave out --utility and --scale")
    utility = np.lib.format.open_memmap(path, mode="r")
    require_utility(utility)
    size = FLAGS.block_contexts or len(utility)
    fits((min(size, len(utility)), *utility.shape[1:]))
    for start in range(0, len(utility), size):
        finite = np.isfinite(utility[start : start + size])
        if not finite.all():
            first, *rest = (int(index) for index in np.unravel_index(np.argmin(finite), finite.shape))
            where = (start + first, *rest)
            raise ValueError(f"utility{list(where)} = {utility[where]} is not finite; mend the file")
    return Source(path.name, Float64Rows(utility) if FLAGS.x64 else utility, {}, {})


def load_npz(path: pathlib.Path, fits: Callable[..., None]) -> Source:
    if not zipfile.is_zipfile(path):
        raise ValueError("not an .npz archive, which np.savez makes")
    with np.load(path, allow_pickle=False) as file:
        if unknown := sorted(set(file.files) - set(KEYS)):
            raise ValueError(f"unknown {', '.join(map(repr, unknown))}; an .npz holds {', '.join(KEYS)}")
        arrays = {}
        for key in file.files:
            try:
                arrays[key] = file[key]
            except ValueError as error:
                raise ValueError(f"{key!r} can't be read: {error}") from error
    for key, array in arrays.items():
        require_numbers(repr(key), array)
    if ("utility" in arrays) == ("ensemble" in arrays):
        raise ValueError(f"needs one of 'utility' and 'ensemble', found {', '.join(map(repr, arrays)) or 'nothing'}")
    taus = {name: arrays.pop(name) for name in ("tau_leader", "tau_follower") if name in arrays}
    if "utility" in arrays:
        for name in ("utility", "scale"):
            if FLAGS[name].present:
                raise ValueError(f"it holds a utility as it is; leave out --{name}")
        utility, what = arrays.pop("utility"), path.name
        require_utility(utility)
        fits(utility.shape)
    else:
        if FLAGS.utility not in ENSEMBLE:
            raise ValueError(f"what to make of its ensemble? give --utility, one of {', '.join(ENSEMBLE)}")
        ensemble = arrays.pop("ensemble")
        try:
            utilities.validate_ensemble(ensemble)
        except ValueError as error:
            raise ValueError(str(error).replace("preferences", "ensemble")) from error
        fits(ensemble.shape[1:], len(ensemble))
        utility, what = ensemble_utility(FLAGS.utility, ensemble), f"{FLAGS.utility} of {path.name}"
    return Source(what, utility.astype(np.float64) if FLAGS.x64 else utility, arrays, taus)


def require_numbers(name: str, array: np.ndarray) -> None:
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold numbers, found {array.dtype}")


def require_utility(array: np.ndarray) -> None:
    require_numbers("utility", array)
    if array.ndim != 3 or 0 in array.shape:
        shape = list(array.shape)
        raise ValueError(f"utility must have the shape [contexts, Leader actions, Follower actions], found {shape}")

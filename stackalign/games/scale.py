"""Many contexts: shared among devices, or read block by block from where they lie.

Contexts are independent games, so that neither way changes a result.
"""

import concurrent.futures
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stackalign.games import smida
from stackalign.games.game import Game, make_game


def context_mesh(devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh with one axis, "contexts", over the given devices (all by default)."""
    return jax.sharding.Mesh(np.asarray(jax.devices() if devices is None else devices), ("contexts",))


def pad_contexts(game: Game, multiple: int) -> Game:
    """Adds contexts of prior 0 (copies of the last) until their number is a multiple of `multiple` >= 1."""
    num_contexts = game.utility.shape[0]
    extra = -num_contexts % multiple
    if not extra:
        return game

    def repeat(leaf):
        last = jnp.broadcast_to(leaf[-1:], (extra, *leaf.shape[1:]))
        return jnp.concatenate([leaf, last]) if leaf.shape[0] == num_contexts else leaf

    prior = jnp.concatenate([game.prior, jnp.zeros(extra, game.prior.dtype)])
    return game._replace(
        utility=repeat(game.utility),
        prior=prior,
        log_pi_ref=repeat(game.log_pi_ref),
        # Its size 1 in the first axis means "the same in all contexts", also where there is one context.
        log_omega_ref=game.log_omega_ref if game.log_omega_ref.shape[0] == 1 else repeat(game.log_omega_ref),
    )


def solve_sharded(game: Game, mesh: jax.sharding.Mesh, **arguments: Any) -> smida.Solution:
    """`smida.solve` with the contexts in equal parts on the devices of a mesh, which need not talk to each other.

    Args:
      game: the game, on the host or on any devices; see `pad_contexts`.
      mesh: a mesh with the axis "contexts" (`context_mesh`).
      **arguments: of `smida.solve`. What `record` returns must have contexts as its first axis; sums over contexts
        would be sums over a device's contexts.

    Returns:
      the solution, sharded by context.

    Raises:
      ValueError: as `smida.solve`; contexts that do not divide evenly.
    """
    num_contexts, num_devices = game.utility.shape[0], mesh.shape["contexts"]
    if num_contexts % num_devices:
        raise ValueError(
            f"{num_contexts} contexts do not divide among {num_devices} devices: use pad_contexts(game, {num_devices})"
        )
    eta_leader, eta_follower = arguments.pop("eta_leader"), arguments.pop("eta_follower")
    smida.check_step_sizes(game, eta_leader=eta_leader, eta_follower=eta_follower)
    run, specs = _sharded(mesh, game.log_omega_ref.shape[0] == num_contexts > 1, tuple(sorted(arguments.items())))
    game = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec)), game, specs)
    return run(game, eta_leader, eta_follower)


@functools.lru_cache
def _sharded(mesh: jax.sharding.Mesh, split_reference: bool, arguments: tuple) -> tuple[Any, Game]:
    """The program of `solve_sharded` and how it wants a game laid out; cached: a second call compiles nothing."""
    split, whole = jax.sharding.PartitionSpec("contexts"), jax.sharding.PartitionSpec()
    specs = Game(split, split, split, split if split_reference else whole, whole, whole)
    out = smida.Solution(split, split, split, split, split, jax.sharding.PartitionSpec(None, "contexts"))

    def solve(game, eta_leader, eta_follower):
        return smida.solve(game, eta_leader=eta_leader, eta_follower=eta_follower, **dict(arguments))

    in_specs = (specs, whole, whole)
    return jax.jit(jax.shard_map(solve, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False)), specs


def context_blocks(
    utility: Any,
    *,
    size: int,
    tau_leader: float,
    tau_follower: float,
    prior: Any = None,
    pi_ref: Any = None,
    omega_ref: Any = None,
) -> Iterator[Game]:
    """A game that is larger than memory as games of `size` contexts (the last may have fewer).

    Args:
      utility: `[X, L, F]`, anything that slices along its first axis to an array: a memory-mapped file, an HDF5 or Zarr
        array. Only one block is read at a time.
      size: contexts a block, >= 1.
      tau_leader: >= 0.
      tau_follower: >= 0.
      prior: `[X]`; uniform by default. A block keeps its contexts' entries, so that values of blocks add up.
      pi_ref: `[X, L]` probabilities, sliced like the utility, or `[1, L]`; uniform by default.
      omega_ref: `[X, L, F]` likewise, or size 1 in the first axes.

    Raises:
      ValueError: what `make_game` refuses, when its block is reached (the prior: at once); a size below 1.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    num_contexts = utility.shape[0]
    if prior is None:
        prior = np.full(num_contexts, 1.0 / num_contexts)
    prior = np.asarray(prior, np.float64)
    # Validates the prior as a whole: a block of it does not sum to 1.
    make_game(np.zeros((num_contexts, 1, 1)), prior=prior, tau_leader=tau_leader, tau_follower=tau_follower)
    return _context_blocks(utility, size, tau_leader, tau_follower, prior / prior.sum(), pi_ref, omega_ref)


def _context_blocks(utility, size, tau_leader, tau_follower, prior, pi_ref, omega_ref) -> Iterator[Game]:
    def cut(array, rows):
        return array if array is None or array.shape[0] == 1 else array[rows]

    for start in range(0, utility.shape[0], size):
        rows = slice(start, start + size)
        try:
            game = make_game(
                utility[rows],
                tau_leader=tau_leader,
                tau_follower=tau_follower,
                pi_ref=cut(pi_ref, rows),
                omega_ref=cut(omega_ref, rows),
            )
        except ValueError as error:
            raise ValueError(f"contexts from {start} on (indices count from there): {error}") from error
        yield game._replace(prior=jnp.asarray(prior[rows], game.utility.dtype))


def solve_blocks(blocks: Iterable[Game], **arguments: Any) -> Iterator[smida.Solution]:
    """`smida.solve` on games that come one after the other, the next being read while one is solved.

    Blocks with fewer contexts than the first are padded to its size, so that one program serves all.

    Args:
      blocks: games, for example `context_blocks` or a generator of the caller's.
      **arguments: of `smida.solve`; what `record` returns must have contexts as its first axis.

    Yields:
      the solution of each block, as NumPy arrays.
    """
    size = None
    x64 = jax.config.jax_enable_x64  # `jax.enable_x64` holds for one thread

    def read() -> Game | None:
        with jax.enable_x64(x64):
            return next(iterator, None)

    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="blocks") as reader:
        iterator = iter(blocks)
        upcoming = reader.submit(read)
        while (game := upcoming.result()) is not None:
            upcoming = reader.submit(read)
            count = game.utility.shape[0]
            size = size or count
            solution = smida.solve(pad_contexts(game, size), **arguments)
            rows, trajectory = jax.device_get((solution[:-1], solution.trajectory))
            rows = (None if leaf is None else leaf[:count] for leaf in rows)
            yield smida.Solution(*rows, jax.tree.map(lambda leaf, count=count: leaf[:, :count], trajectory))

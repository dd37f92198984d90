"""Suite tabular: SMIDA on one game of growing size, and on many small games."""

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benches import timing
from stackalign import games
from stackalign.games import smida

TAU, RATES = 0.05, {"eta_leader": 0.01 / 0.05, "eta_follower": 0.05 / 0.05}
# Contexts, actions, steps; every step of the references takes about as long as one of the whole fast run.
SIZES = ((64, 64, 100), (16, 256, 100), (64, 256, 100), (256, 256, 40), (64, 512, 40), (64, 1024, 16), (16, 4096, 8),
         (16, 8192, 8))  # fmt: skip
LITERAL_LIMIT = 2**27  # entries of the utility up to which the transcriptions run: they hold several arrays of its size
MANY, SMALL_X, SMALL_Y = 10_000, 4, 8

NAMES = (
    *(f"tabular_{reference}_X{x}_Y{y}" for x, y, _ in SIZES for reference in ("numpy", "jit")),
    "tabular_growth",
    "tabular_memory_X64_Y1024",
    "tabular_games_100_steps",
    "tabular_games_to_1e-6",
)


def versions() -> dict[str, str]:
    return {"numpy": np.__version__}


def numpy_smida(utility: np.ndarray, *, tau: float, eta_leader: float, eta_follower: float, num_steps: int):
    """Algorithm 1 from uniform references as it is printed, vectorised: log pi and log omega after `num_steps`.

    Args:
      utility: `[..., X, L, F]`.
    """

    def normalise(logits):
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    log_pi_ref = np.full(utility.shape[:-1], -math.log(utility.shape[-2]), utility.dtype)
    log_omega_ref = np.full(utility.shape, -math.log(utility.shape[-1]), utility.dtype)
    log_pi, log_omega = log_pi_ref, log_omega_ref
    for _ in range(num_steps):
        omega = np.exp(log_omega)
        cost = (omega * utility).sum(-1) - tau * (omega * (log_omega - log_omega_ref)).sum(-1)
        log_pi = normalise((1 - eta_leader * tau) * log_pi + eta_leader * tau * log_pi_ref - eta_leader * cost)
        log_omega = normalise(
            (1 - eta_follower * tau) * log_omega + eta_follower * tau * log_omega_ref + eta_follower * utility
        )
    return log_pi, log_omega


def make_utility(x: int, y: int) -> np.ndarray:
    return np.random.default_rng(0).random((x, y, y), dtype=np.float32)


def size_rows(wanted: Callable[[str], bool], repeats: int, note) -> Iterator[dict]:
    """One game at each size, against both transcriptions where they fit; then how the time grows."""
    milliseconds = {}
    for x, y, num_steps in SIZES:
        names = {reference: f"tabular_{reference}_X{x}_Y{y}" for reference in ("numpy", "jit")}
        chosen = [reference for reference, name in names.items() if wanted(name)]
        if not chosen and not wanted("tabular_growth"):
            continue
        note(f"{x} contexts, {y} actions: {4 * x * y * y / 2**20:.0f} MiB of utility")
        if 4 * x * y * y * 2.5 > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            note("left out: does not fit in memory")
            continue
        utility, utility_size = make_utility(x, y), x * y * y
        game = games.make_game(utility, tau_leader=TAU, tau_follower=TAU)
        solve = functools.partial(smida.solve, game, num_steps=num_steps, **RATES)
        contestants = {"ours": lambda solve=solve: jax.block_until_ready(solve().log_pi)}
        # The references take a few steps: theirs all cost the same.
        few = max(2, min(num_steps, 2**26 // utility.size))
        if utility.size <= LITERAL_LIMIT:
            if "numpy" in chosen:
                contestants["numpy"] = functools.partial(numpy_smida, utility, tau=TAU, num_steps=few, **RATES)
            if "jit" in chosen:
                contestants["jit"] = lambda solve=solve: jax.block_until_ready(solve(store_follower=True).log_pi)
        else:
            del utility
        seconds = timing.alternate(contestants, repeats)
        counts = {"ours": num_steps, "numpy": few, "jit": num_steps}
        per_step = {name: [value / counts[name] for value in values] for name, values in seconds.items()}
        milliseconds[x, y] = 1e3 * float(np.median(per_step["ours"]))
        reference_is = {
            "numpy": "NumPy transcription of algorithm 1, float32",
            "jit": "the same transcription in JAX, jitted (smida.solve with store_follower=True)",
        }
        if utility_size > LITERAL_LIMIT:
            chosen = chosen[:1]  # one row without a reference says it all
        for reference in chosen:
            both = {"ours": per_step["ours"]}
            if reference in per_step:
                both["reference"] = per_step[reference]
            row = timing.throughput_row(names[reference], 1.0, "step/s", both, reference_is[reference])
            yield row | {"ms_per_step": round(milliseconds[x, y], 4), "utility_mib": round(4 * x * y * y / 2**20, 1)}
    if wanted("tabular_growth"):

        def slope(one, other, axis):
            if one not in milliseconds or other not in milliseconds:
                return None
            grown = math.log(milliseconds[other] / milliseconds[one]) / math.log(other[axis] / one[axis])
            return round(grown, 2)

        exponents = {
            "contexts": slope((16, 256), (256, 256), 0),
            "actions": slope((64, 256), (64, 1024), 1),
            "actions_large": slope((16, 256), (16, 8192), 1),
        }
        yield {
            "name": "tabular_growth",
            "ours": exponents,
            "reference": None,
            "ratio": None,
            "unit": "exponent of the time per step",
            "reference_is": None,
            "utility": {"contexts": 1, "actions": 2, "actions_large": 2},
        }


MEMORY = """
import resource, sys
import jax
from experiments.benches import tabular
from stackalign import games
from stackalign.games import smida

utility = tabular.make_utility(64, 1024)
size = utility.nbytes
game = games.make_game(utility, tau_leader=tabular.TAU, tau_follower=tabular.TAU)
jax.block_until_ready(game)
small = games.make_game(utility[:1, :8, :8], tau_leader=tabular.TAU, tau_follower=tabular.TAU)
del utility
jax.block_until_ready(smida.solve(small, num_steps=16, **tabular.RATES))
compiled = smida._solve.lower(game, 0.2, 1.0, None, num_steps=16, record=None, steps_per_pass=8).compile()
print(tabular.reset_peak(), size)
jax.block_until_ready(smida.solve(game, num_steps=16, **tabular.RATES))
print(tabular.peak())
"""


def reset_peak() -> int:
    """Resident bytes now, from where the peak is counted on (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()


def peak() -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def memory_row() -> dict:
    """Peak of a process that solves, above what it held with the game in memory, in units of the utility."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    before, size, after = map(int, done.stdout.split())
    return {
        "name": "tabular_memory_X64_Y1024",
        "ours": round(1.0 + (after - before) / size, 3),
        "reference": None,
        "ratio": None,
        "unit": "peak memory / size of the utility",
        "reference_is": None,
        "bound": 1.5,
    }


def games_rows(wanted: Callable[[str], bool], repeats: int, note) -> Iterator[dict]:
    """Many small games by vmap, in chunks that stay in the caches, against NumPy on all of them at once."""
    utility = np.random.default_rng(0).random((MANY, SMALL_X, SMALL_Y, SMALL_Y), dtype=np.float32)
    game = games.make_game(utility[0], tau_leader=TAU, tau_follower=TAU)

    def run(**arguments):
        def one(utility):
            found = smida.solve(game._replace(utility=utility), **arguments)
            return found.log_pi, found.gap

        return jax.jit(lambda utility: jax.lax.map(one, utility, batch_size=100))

    device = jnp.asarray(utility)
    if wanted("tabular_games_100_steps"):
        note(f"{MANY} games, 100 steps each")
        solve = run(num_steps=100, **RATES)
        contestants = {
            "ours": lambda: jax.block_until_ready(solve(device)),
            "reference": lambda: numpy_smida(utility, tau=TAU, num_steps=100, **RATES),
        }
        seconds = timing.alternate(contestants, repeats)
        yield timing.throughput_row(
            "tabular_games_100_steps", MANY, "game/s", seconds, "NumPy transcription on all games at once, float32"
        )
    if wanted("tabular_games_to_1e-6"):
        note(f"{MANY} games to a saddle gap of 1e-6")
        solve = run(num_steps=12, eta_leader=0.9 / TAU, eta_follower=1.0 / TAU, tolerance=1e-6, steps_per_pass=2)
        seconds = timing.alternate({"ours": lambda: jax.block_until_ready(solve(device))}, repeats)
        row = timing.throughput_row("tabular_games_to_1e-6", MANY, "game/s", seconds, "")
        yield row | {"largest_gap": float(solve(device)[1].max())}


def rows(repeats: int, wanted: Callable[[str], bool], note) -> Iterator[dict]:
    """All rows; see `experiments.bench`."""
    yield from size_rows(wanted, repeats, note)
    if wanted("tabular_memory_X64_Y1024"):
        note("peak memory, in a process of its own")
        yield memory_row()
    if wanted("tabular_games_100_steps") or wanted("tabular_games_to_1e-6"):
        yield from games_rows(wanted, repeats, note)

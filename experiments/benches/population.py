"""The simulated pool: our jitted, vmapped scan against the same model in plain Python and NumPy.

One iteration of one seed has 64 duels of 8 models over 64 instructions, with an EXP3 leader. The two sides draw from
different generators, so their runs agree in distribution; tests compare them with the same draws.
"""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from experiments.benches import population_reference, timing
from stackalign import leader
from stackalign.arena import population

ITERATIONS, SEEDS, REFERENCE_SEEDS = 8, 256, 4

NAMES = ("population_python",)


def rows(repeats: int, wanted: Callable[[str], bool], note: Callable[[str], None]) -> Iterator[dict]:
    """Yields the rows whose name is wanted, in the order of `NAMES`."""
    for name in filter(wanted, NAMES):
        note(f"{name}: {repeats} runs a side after a warm-up")
        yield population_python(name, repeats)


def population_python(name: str, repeats: int) -> dict:
    """Simulated iterations a second, summed over seeds; the reference runs fewer seeds, one after the other."""
    config = population.PopulationConfig()

    def run(key):
        return population.simulate(
            key,
            config,
            leader.exp3.leader(),
            leader.draw,
            leader.composite,
            schedule=leader.linear,
            num_iterations=ITERATIONS,
        )

    simulate, keys = jax.jit(jax.vmap(run)), jax.random.split(jax.random.key(0), SEEDS)
    settings = population_reference.Settings(num_iterations=ITERATIONS)

    def reference():
        for seed in range(REFERENCE_SEEDS):
            rng = np.random.default_rng(seed)
            start = population_reference.population(settings, rng)
            population_reference.simulate(settings, *start, population_reference.NumpyDraws(settings, rng))

    seconds = timing.alternate({"ours": lambda: jax.block_until_ready(simulate(keys)), "reference": reference}, repeats)
    seconds["reference"] = [run * SEEDS / REFERENCE_SEEDS for run in seconds["reference"]]
    row = timing.throughput_row(name, ITERATIONS * SEEDS, "iterations/s", seconds, "plain Python and NumPy")
    return row | {"seeds": SEEDS, "reference_seeds": REFERENCE_SEEDS, "duels": config.num_duels}


def versions() -> dict[str, str]:
    """Version of the reference's package."""
    return {"numpy": np.__version__}

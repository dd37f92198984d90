"""Compiled programs: their persistent cache, and how many there are."""

import collections
from collections.abc import Mapping

import jax

from stackalign.lm.weights import fetch


def use_cache() -> None:
    """Keeps compiled programs between runs."""
    jax.config.update("jax_compilation_cache_dir", str(fetch.cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def count_programs() -> Mapping[str, int]:
    """From now on, how many programs of each function this process compiles or reads from the cache."""
    counts: collections.Counter[str] = collections.Counter()

    def listen(event: str, duration: float, **context) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[context.get("fun_name", "").removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counts

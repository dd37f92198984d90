"""The persistent cache of compiled programs."""

import jax

from stackalign.lm.weights import fetch


def use_cache() -> None:
    """Keeps compiled programs between runs."""
    jax.config.update("jax_compilation_cache_dir", str(fetch.cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

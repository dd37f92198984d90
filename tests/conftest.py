"""Shared fixtures: the persistent compilation cache, the optional folder of reference files, and the real weights."""

import functools
import gc
import os
import pathlib

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = pathlib.Path(os.environ.get("STACKALIGN_CACHE", pathlib.Path.home() / ".cache" / "stackalign"))

jax.config.update("jax_compilation_cache_dir", str(CACHE / "xla-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="session")
def vectors() -> pathlib.Path:
    """Folder of the numeric vectors that ship with the tests."""
    return ROOT / "tests" / "vectors"


@pytest.fixture(scope="session")
def shared() -> pathlib.Path | None:
    """Optional folder of reference files beside the checkout (`STACKALIGN_SHARED` overrides), or None."""
    for folder in (os.environ.get("STACKALIGN_SHARED"), ROOT.parent / "shared"):
        if folder and pathlib.Path(folder).is_dir():
            return pathlib.Path(folder)
    return None


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Frees a module's compiled programs: each holds memory maps, of which Linux gives a process 65530 by default."""
    yield
    jax.clear_caches()
    gc.collect()


@functools.cache
def _missing_weights() -> str | None:
    """Why the SmolLM2 weights can't be had here, or None."""
    from stackalign.lm.weights import fetch

    try:
        fetch.smollm2()
    except fetch.FetchError as error:
        return str(error)
    return None


def pytest_runtest_setup(item):
    """A `real_weights` test is skipped where they can't be had."""
    if item.get_closest_marker("real_weights") and (reason := _missing_weights()):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """With `STACKALIGN_REQUIRE_REAL_WEIGHTS=1` a `real_weights` test that is skipped, for whatever reason, fails."""
    report = yield
    required = os.environ.get("STACKALIGN_REQUIRE_REAL_WEIGHTS") == "1"
    if required and report.skipped and item.get_closest_marker("real_weights"):
        report.outcome, report.longrepr = "failed", f"must not be skipped here: {report.longrepr[2]}"
    return report

"""Fixtures of this room's tests."""

import jax
import pytest


@pytest.fixture
def x64():
    """Float64 for one test; the default precision stays float32."""
    with jax.enable_x64(True):
        yield

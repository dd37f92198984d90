"""Judges outside the pool: programmatic checks, endpoints, and the random judge that serves as a control."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stackalign.judges import base, scores
from stackalign.judges import endpoint as remote


def verifier(verify: Callable[[Any, str], bool]) -> base.Judge:
    """Scores 10 for an answer that passes the instruction's own check and 1 for one that does not."""

    def measure(key, pool, stacks, items, progress) -> np.ndarray:
        return np.array([10.0 if verify(item.instruction, item.answer.text) else 1.0 for item in items])

    return base.Judge(("verifier",), measure, base.identity)


def random() -> base.Judge:
    """Uniform scores in [1, 10]: a gain under this judge is not alignment with anything."""

    def measure(key, pool, stacks, items, progress) -> np.ndarray:
        return np.asarray(jax.random.uniform(key, (len(items),), minval=1.0, maxval=10.0), float)

    return base.Judge(("random",), measure, base.identity)


def endpoint(
    config: remote.EndpointConfig, cache_dir: str | os.PathLike, *, on_parse_failure: str = "drop"
) -> base.Judge:
    """A chat model behind an OpenAI-compatible endpoint, with the paper's prompt; replies are cached in `cache_dir`."""

    def measure(key, pool, stacks, items, progress) -> np.ndarray:
        texts = [(item.instruction.prompt, item.answer.text) for item in items]
        return remote.score(
            config, cache_dir, texts, progress=lambda done, total: progress("judging", done, total, "answers")
        )

    return base.Judge((config.model,), measure, functools.partial(scores.on_parse_failure, mode=on_parse_failure))

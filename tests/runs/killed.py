"""A small deterministic run for the kill test: `killed.py FOLDER STEPS [CALL]`.

With CALL it kills itself just before its CALLth call of `os.fsync`, `os.rename`, `os.replace` or `os.mkdir` after it
is ready.
"""

import itertools
import os
import pathlib
import signal
import sys

import jax
import numpy as np

from stackalign.runs import checkpoints, folder


def start():
    return {"key": jax.random.key(0), "weights": np.zeros(1000, np.float32)}


def main(path, num_steps, ready=lambda: None):
    path = pathlib.Path(path)
    opened = folder.open_ if (path / folder.CONFIG).exists() else folder.create
    with opened(path, {"seed": 0}) as run:
        restored = checkpoints.resume(run, start())
        step, state = (restored.step, restored.state) if restored else (0, start())
        ready()
        while step < num_steps:
            key, draw = jax.random.split(state["key"])
            noise = np.random.default_rng(np.asarray(jax.random.key_data(draw))).normal(size=1000)
            state = {"key": key, "weights": (state["weights"] + noise).astype(np.float32)}
            step += 1
            duels = [{"iteration": step, "duel": duel, "score": float(state["weights"][duel])} for duel in range(3)]
            checkpoints.commit(run, step, state, duels, {"iteration": step}, best=step % 5 == 0)


def _kill_at_call(number):
    calls = itertools.count(1)

    def wrap(call):
        def counted(*args, **kwargs):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in ("fsync", "rename", "replace", "mkdir"):
        setattr(os, name, wrap(getattr(os, name)))


if __name__ == "__main__":

    def _ready():
        print("ready", flush=True)
        if len(sys.argv) > 3:
            _kill_at_call(int(sys.argv[3]))

    main(sys.argv[1], int(sys.argv[2]), _ready)

"""Progress on a terminal, and time by phase.

An algorithm reports through a plain callable, `progress(phase, done, total, unit)`: 0 done when a phase starts, then
whenever some of it is done, at last `done == total`. `Bars` is such a callable.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar

import tqdm

Item = TypeVar("Item")


def _brief(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


class Bars:
    """Two bars on stderr: the whole run and the phase at work. Off a terminal: one plain line when a phase ends.

    Args:
      overall: the phase that counts the whole run; it is not part of `seconds`.
      stream: where to show it (default stderr).
      interactive: draw bars (default: if the stream is a terminal).
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        overall: str = "iteration",
        stream: TextIO | None = None,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._overall_name = overall
        self._stream = sys.stderr if stream is None else stream
        self._interactive = self._stream.isatty() if interactive is None else interactive
        self._clock = clock
        self._overall = None  # (start of the clock, done at the start)
        self._overall_bar = None
        self._bar = None
        self._phase = None  # [name, start, done at the start, done, total, unit]
        self._seconds: dict[str, float] = {}

    def __call__(self, phase: str, done: int, total: int, unit: str = "") -> None:
        """Reports that `done` of `total` units of a phase are done; a phase starts with its first report."""
        if phase == self._overall_name:
            self._advance_overall(done, total, unit)
            return
        if self._phase is not None and (self._phase[0] != phase or done < self._phase[3]):
            self._end_phase()
        if self._phase is None:
            self._phase = [phase, self._clock(), done, done, total, unit]
            if self._interactive:
                position = 0 if self._overall_bar is None else 1
                self._bar = self._new_bar(phase, done, total, unit, position=position, leave=False)
        self._phase[3:] = [done, total, unit]
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
        if done >= total:
            self._end_phase()

    def _new_bar(self, name: str, done: int, total: int, unit: str, **kwargs) -> tqdm.tqdm:
        return tqdm.tqdm(
            desc=name, initial=done, total=total, unit=f" {unit}" if unit else "it", file=self._stream,
            dynamic_ncols=True, **kwargs,
        )  # fmt: skip

    def _advance_overall(self, done: int, total: int, unit: str) -> None:
        if self._phase is not None:
            self._end_phase()
        if self._overall is None:
            self._overall = (self._clock(), done)
            if self._interactive:
                self._overall_bar = self._new_bar(self._overall_name, done, total, unit, position=0)
        start, first = self._overall
        if self._overall_bar is not None:
            self._overall_bar.total = total
            self._overall_bar.update(done - self._overall_bar.n)
            self._overall_bar.refresh()
        elif done > first:
            elapsed = self._clock() - start
            left = "" if done >= total else f", about {_brief(elapsed / (done - first) * (total - done))} left"
            self._line(f"{self._overall_name} {done}/{total}: {_brief(elapsed)} elapsed{left}")

    def _end_phase(self) -> None:
        name, start, first, done, total, unit = self._phase
        self._phase = None
        elapsed = self._clock() - start
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif total > 0:
            rate = f" ({(done - first) / elapsed:.3g} {unit or 'it'}/s)" if elapsed > 0 and done > first else ""
            self._line(f"  {name}: {done}/{total}{' ' + unit if unit else ''} in {_brief(elapsed)}{rate}")

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextlib.contextmanager
    def phase(self, name: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
        """Shows a phase while the block runs; yields `advance(count)`."""
        done = 0

        def advance(count: int = 1) -> None:
            nonlocal done
            done += count
            self(name, done, total, unit)

        self(name, 0, total, unit)
        try:
            yield advance
        finally:
            if self._phase is not None and self._phase[0] == name:
                self._end_phase()

    def each(self, items: Iterable[Item], name: str, unit: str = "") -> Iterator[Item]:
        """Yields items that have a length, and shows how many were worked through."""
        with self.phase(name, len(items), unit) as advance:
            for item in items:
                yield item
                advance(1)

    def seconds(self, *, reset: bool = False) -> dict[str, float]:
        """Seconds by phase, ended phases only; `reset` starts the count afresh, for a record by iteration."""
        found = dict(self._seconds)
        if reset:
            self._seconds = {}
        return found

    def write(self, text: str) -> None:
        """Prints a line above the bars."""
        if self._interactive:
            tqdm.tqdm.write(text, file=self._stream)
        else:
            self._line(text)

    def close(self) -> None:
        """Ends the phase at work and takes the bars off."""
        if self._phase is not None:
            self._end_phase()
        if self._overall_bar is not None:
            self._overall_bar.close()
            self._overall_bar = None

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

"""Timing of alternating contestants."""

import statistics
import time
from collections.abc import Callable, Mapping


def alternate(contestants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every run of every contestant, which take turns so that a busy machine slows all alike.

    Each runs once beforehand, which is not counted: compilation, first touches of memory.

    Args:
      contestants: calls that return when their work is done.
      repeats: counted runs of each.
    """
    for call in contestants.values():
        call()
    seconds = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def throughput_row(
    name: str, amount: float, unit: str, seconds: Mapping[str, list[float]], reference_is: str
) -> dict:
    """A row of amounts a second from `seconds["ours"]` and, where it ran, `seconds["reference"]`: medians.

    `best` holds both at their fastest run, which a busy machine disturbs least.
    """
    ours, reference = seconds["ours"], seconds.get("reference")

    def rates(of):
        return round(amount / of(ours), 2), round(amount / of(reference), 2) if reference else None

    row = {"name": name}
    row["ours"], row["reference"] = rates(statistics.median)
    row["ratio"] = round(row["ours"] / row["reference"], 3) if reference else None
    row |= {"unit": unit, "reference_is": reference_is if reference else None}
    row["best"] = dict(zip(("ours", "reference"), rates(min), strict=True))
    return row

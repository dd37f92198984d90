"""Benchmark suites, one file each: `rows(repeats, wanted, note)` yields the suite's rows as dicts."""

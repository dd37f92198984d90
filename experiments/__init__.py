"""Binaries: each reads flags, builds a configuration, calls one algorithm and writes a run."""

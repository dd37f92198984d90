"""stackalign: alignment as a leader-follower game, in JAX."""

__version__ = "0.1.0"

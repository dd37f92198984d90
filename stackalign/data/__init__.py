"""Instruction pools, readers of data sets, generated verifiable tasks and their verifiers."""

from stackalign.data import characters, readers, tfds_pool
from stackalign.data.instructions import Instruction, draw, read, split, write_jsonl
from stackalign.data.verifiable import contrast, generate
from stackalign.data.verifiers import verify

__all__ = [
    "Instruction",
    "characters",
    "contrast",
    "draw",
    "generate",
    "read",
    "readers",
    "split",
    "tfds_pool",
    "verify",
    "write_jsonl",
]

"""Instruction pools, generated verifiable tasks and their verifiers."""

from stackalign.data import characters
from stackalign.data.instructions import Instruction, draw, read_jsonl, split, write_jsonl
from stackalign.data.verifiable import contrast, generate
from stackalign.data.verifiers import verify

__all__ = ["Instruction", "characters", "contrast", "draw", "generate", "read_jsonl", "split", "verify", "write_jsonl"]

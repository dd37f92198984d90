"""Algorithms over pools of language models, one file each."""

from stackalign.algorithms import align, toy

__all__ = ["align", "toy"]

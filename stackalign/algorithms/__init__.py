"""Algorithms over pools of language models, one file each."""

from stackalign.algorithms import align, evaluation, preferences, toy

__all__ = ["align", "evaluation", "preferences", "toy"]

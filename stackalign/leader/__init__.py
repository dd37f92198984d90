"""The instruction leader: EXP3 and uniform leaders, their rewards and schedules."""

from stackalign.leader import exp3, rewards, schedules, uniform
from stackalign.leader.base import Leader, draw
from stackalign.leader.exp3 import Exp3State
from stackalign.leader.rewards import composite, difficulty, preference
from stackalign.leader.schedules import cosine, linear, progress

__all__ = [
    "Exp3State",
    "Leader",
    "composite",
    "cosine",
    "difficulty",
    "draw",
    "exp3",
    "linear",
    "preference",
    "progress",
    "rewards",
    "schedules",
    "uniform",
]

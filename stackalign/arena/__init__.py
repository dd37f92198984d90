"""Duels as arrays: matching, judging, reputations, and a simulated pool."""

from stackalign.arena import aggregation, bradley_terry, convergence, duels, matching, population, reputation
from stackalign.arena.aggregation import aggregate
from stackalign.arena.duels import Outcome, play
from stackalign.arena.matching import active_models, opponent_probabilities, relative_gaps, sample_opponents
from stackalign.arena.reputation import ReputationConfig, ReputationState

__all__ = [
    "Outcome",
    "ReputationConfig",
    "ReputationState",
    "active_models",
    "aggregate",
    "aggregation",
    "bradley_terry",
    "convergence",
    "duels",
    "matching",
    "opponent_probabilities",
    "play",
    "population",
    "relative_gaps",
    "reputation",
    "sample_opponents",
]

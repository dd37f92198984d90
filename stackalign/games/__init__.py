"""Finite contextual Stackelberg games: equilibrium in closed form, SMIDA, and its theorems."""

from stackalign.games import bounds, divergence, equilibrium, estimation, rivals, scale, smida, theorems, utilities
from stackalign.games.equilibrium import Equilibrium
from stackalign.games.game import (
    Game,
    conditional_cost,
    context_objective,
    follower_kl,
    leader_kl,
    log_omega_ref,
    make_game,
    objective,
)

__all__ = [
    "Equilibrium",
    "Game",
    "bounds",
    "conditional_cost",
    "context_objective",
    "divergence",
    "equilibrium",
    "estimation",
    "follower_kl",
    "leader_kl",
    "log_omega_ref",
    "make_game",
    "objective",
    "rivals",
    "scale",
    "smida",
    "theorems",
    "utilities",
]

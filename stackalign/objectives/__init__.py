"""Losses on log-probabilities."""

from stackalign.objectives import dpo
from stackalign.objectives.dpo import DpoOutput, dpo_loss, nll, sequence_log_probs, token_dpo_loss

__all__ = ["DpoOutput", "dpo", "dpo_loss", "nll", "sequence_log_probs", "token_dpo_loss"]

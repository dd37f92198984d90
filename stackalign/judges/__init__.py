"""Judges: their prompt, reading their scores, turning likelihoods into scores, an endpoint judge, and judge checks."""

from stackalign.judges import external, peer
from stackalign.judges.base import Item, Judge, Measure
from stackalign.judges.check import JudgeCheck, accuracy
from stackalign.judges.endpoint import EndpointConfig, EndpointError
from stackalign.judges.parsing import ScoreParse, parse_score
from stackalign.judges.prompts import DIGITS_PREFIX, judge_prompt
from stackalign.judges.scores import digits_expectation, on_parse_failure, percentile_scores, raw_likelihood_scores

__all__ = [
    "DIGITS_PREFIX",
    "EndpointConfig",
    "EndpointError",
    "Item",
    "Judge",
    "JudgeCheck",
    "Measure",
    "ScoreParse",
    "accuracy",
    "digits_expectation",
    "external",
    "judge_prompt",
    "on_parse_failure",
    "parse_score",
    "peer",
    "percentile_scores",
    "raw_likelihood_scores",
]

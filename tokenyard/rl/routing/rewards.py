"""Weights of the routing reward by the names that trials give them."""

from __future__ import annotations

from tokenyard.rl.routing.training import SCORE_REWARD
from tokenyard.routing.scenario import RewardWeights, Scenario

PAPER_TERMS = ("processing", "queue", "overload", "balance", "accept")
"""The five terms of the paper's reward (Abbaraju, section IV)."""

_JOULE_S = 0.5
"""Seconds of response time that a joule is worth in `response_energy`."""
_NO_PAPER_TERM = {**dict.fromkeys(PAPER_TERMS, 0.0), "complete": 0.0, "slo_at_completion": 0.0}
_CREDITED_AT_DECISION = {
    "response": RewardWeights(**_NO_PAPER_TERM, response=-1.0),
    "response_slo": RewardWeights(**_NO_PAPER_TERM, response=-1.0, slo=-2.0),
    "response_slo_tail": SCORE_REWARD,
    "response_energy": RewardWeights(**_NO_PAPER_TERM, response=-1.0, energy=-_JOULE_S),
}
_ABLATED_FIELDS = {
    "processing": ("processing",),
    "queue": ("queue",),
    "overload": ("overload",),
    "balance": ("balance",),
    "base": ("accept", "complete"),
    "slo": ("slo_at_completion",),
}

PAPER = "paper"
ABLATIONS = tuple(f"paper_without_{term}" for term in _ABLATED_FIELDS)
"""The paper's reward with one term removed; `base` is what a placed or finished request earns."""


def reward_names() -> tuple[str, ...]:
    """All names that `reward_weights` knows."""
    return (PAPER, *_CREDITED_AT_DECISION, *ABLATIONS)


def reward_weights(name: str, scenario: Scenario) -> RewardWeights:
    """Weights of that name; `paper` and its ablations start from the scenario's own.

    Raises:
        ValueError: Unknown name.
    """
    if name == PAPER:
        return scenario.reward
    if name in _CREDITED_AT_DECISION:
        weights = _CREDITED_AT_DECISION[name]
        if weights.tail and scenario.fleet is not None:
            # The tail of serial servers begins at a time; elsewhere its SLO says what is long.
            tail_after_s = scenario.slo_response_s / 2
            return weights.model_copy(update={"tail_after_s": tail_after_s})
        return weights
    term = name.removeprefix("paper_without_")
    if name not in ABLATIONS:
        raise ValueError(f"unknown reward weights {name!r}; choose one of {list(reward_names())}")
    return scenario.reward.model_copy(update=dict.fromkeys(_ABLATED_FIELDS[term], 0.0))

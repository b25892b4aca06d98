"""What decisions are paid: the first entries of the `rules` of both simulators."""

from __future__ import annotations

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing.scenario import RewardWeights
from tokenyard.types import FloatArray

_TERMS = (
    "accept", "drop", "complete", "slo_at_completion", "response", "slo", "tail", "tail_after_s",
)  # fmt: skip
"""Of `RewardWeights`, in the order of their numbers."""
(
    ACCEPT, DROP, COMPLETE, SLO_AT_COMPLETION, RESPONSE, SLO, TAIL, TAIL_AFTER_S, NUM_REWARDS,
) = range(9)  # fmt: skip


def reward_rules(reward: RewardWeights) -> FloatArray:
    """Lay weights out, shape (NUM_REWARDS,)."""
    return np.array([getattr(reward, term) for term in _TERMS])


@compiled
def response_reward(rules: FloatArray, response: float, slo_s: float) -> float:
    """What a response time is worth. A placement is paid what it adds to the sum over requests."""
    reward: float = rules[RESPONSE] * response
    if response > slo_s:
        reward += rules[SLO]
    reward += rules[TAIL] * max(response - rules[TAIL_AFTER_S], 0.0)
    return reward

"""What decisions are paid: the first entries of the `rules` of both simulators."""

from __future__ import annotations

import numpy as np

from tokenyard.routing.scenario import RewardWeights
from tokenyard.types import FloatArray

(
    ACCEPT, DROP, COMPLETE, SLO_AT_COMPLETION, RESPONSE, SLO, TAIL, TAIL_AFTER_S, NUM_REWARDS,
) = range(9)  # fmt: skip


def reward_rules(reward: RewardWeights) -> FloatArray:
    """Lay weights out, shape (NUM_REWARDS,)."""
    return np.array(
        [
            reward.accept,
            reward.drop,
            reward.complete,
            reward.slo_at_completion,
            reward.response,
            reward.slo,
            reward.tail,
            reward.tail_after_s,
        ]
    )

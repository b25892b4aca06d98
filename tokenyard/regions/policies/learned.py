"""What learning makes of regions: networks.

`tokenyard.regions.artifact` makes them of artifacts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenyard.network import Network
from tokenyard.regions.activation import ActivationRule, targets
from tokenyard.regions.observation import LIMIT, Action, encode, observation_size, shares_of
from tokenyard.regions.policies.rules import COST_KNOBS
from tokenyard.regions.types import Dispatch, RegionDecision, RegionState


@dataclass(frozen=True, eq=False)
class RegionNetwork:
    """A network that was trained for its own regions: the mean of what it would draw."""

    network: Network
    action: Action
    """What its outputs mean."""
    rule: ActivationRule
    dispatch: Dispatch = "live_cost"
    trained_for: tuple[str, ...] = ()
    """Scenarios, for the error."""

    def decide(self, state: RegionState) -> RegionDecision:
        """Run the network, and turn servers on for the shares it means.

        Raises:
            ValueError: Another number of regions than it was trained for.
        """
        seen, trained = observation_size(state.num_regions, self.action), len(self.network.mean)
        if seen != trained:
            raise ValueError(
                f"the network sees {trained} numbers, {state.num_regions} regions "
                f"have {seen}: it was trained for {self.trained_for}"
            )
        outputs = self.network(np.clip(encode(state, self.action), -LIMIT, LIMIT))
        shares = shares_of(np.clip(outputs, -1.0, 1.0), state, self.action)
        active = targets(state, shares, self.rule)
        return RegionDecision(shares, active, self.dispatch, COST_KNOBS.live)

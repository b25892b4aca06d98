"""What a rule may be built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tokenyard.routing.policies.tuned import TunedRules, load_tuned
from tokenyard.types import Slo


@dataclass(frozen=True)
class PolicyContext:
    """What a rule may be built from."""

    scenario_name: str
    """Whose tuned parameters apply."""
    slo: Slo
    rng: np.random.Generator
    """Draws the choices of the randomised rules."""
    num_replicas: int
    tuned: TunedRules | None = None
    """Parameters of the tuned rules; None: those that ship for the scenario, read when needed."""

    def rules(self) -> TunedRules:
        """Return the tuned parameters.

        Raises:
            ValueError: There are none for the scenario.
        """
        return self.tuned or load_tuned(self.scenario_name)

    def tuned_rules(self) -> TunedRules:
        """Return the tuned parameters for those who read such as name replicas by position.

        Raises:
            ValueError: There are none for the scenario, or they are for another number of replicas.
        """
        rules = self.rules()
        if rules.num_replicas != self.num_replicas:
            raise ValueError(
                f"the rules of scenario {rules.scenario!r} are tuned for {rules.num_replicas} "
                f"replicas, not for {self.num_replicas}"
            )
        return rules

    def order_knobs(self, name: str) -> Mapping[str, float]:
        """Return the tuned knob of an order beside a placement; empty where it was not tuned."""
        try:
            return self.rules().orders.get(name, {})
        except ValueError:
            return {}

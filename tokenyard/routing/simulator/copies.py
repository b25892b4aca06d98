"""What the simulators of both server models have in common: copies, orders, observations."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from tokenyard.routing import observation
from tokenyard.routing.equivariant import Layout
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.scores.order import FIRST_COME
from tokenyard.routing.scores.residual import ResidualNetwork, rule_alone
from tokenyard.routing.scores.waiting_key import LAST
from tokenyard.routing.types import OrderKey
from tokenyard.types import FloatArray

Actions = npt.NDArray[np.int64]
Observations = npt.NDArray[np.float32]


class ServerCopies(ABC):
    """Independent copies of the servers of one scenario, each with its own stream of requests.

    Two simulators share nothing, and equal streams and actions give equal bytes.
    """

    def __init__(self, scenario: Scenario, num_copies: int, whole: bool) -> None:
        """Make room; `whole` observations show delays, tokens and memory of every server."""
        self.scenario = scenario
        # Asked at every decision, so taken from the scenario once.
        self.names = scenario.server_names
        self.asked = np.tile(LAST, (num_copies, 1))
        self._order = FIRST_COME.copy()
        self.rewards = np.zeros(num_copies)
        size = observation.observation_size(scenario.num_servers, whole)
        self.observations: Observations = np.zeros((num_copies, size), dtype=np.float32)
        self._shown_for_tokens = 0.0
        self.num_weights = observation.NUM_MARGINAL_WEIGHTS
        """Weights of the linear policy."""
        self.num_saturated = 0
        """Observed numbers that hit the documented bound since the simulator was made."""

    def show_rule(self, mean_total_tokens: float) -> None:
        """Show everything, and last what a rule's costs are made from (`scores.linear`).

        `mean_total_tokens` is the typical size of a request.
        """
        self._shown_for_tokens = float(mean_total_tokens)
        size = Layout(shows_rule=True).size(self.scenario.num_servers)
        self.observations = np.zeros((len(self.rewards), size), dtype=np.float32)

    def order_next(self, copy: int, key: OrderKey) -> None:
        """Let the request that a copy is to place wait by a key among those of its priority.

        Lower keys start first, and of equals the one placed first. Without a call it comes last.
        Keys are moved to between the arrival and `Scenario.max_overtaking_s` from now.
        """
        self.asked[copy] = key

    def order_by(self, order: FloatArray) -> None:
        """Let requests that `step` places wait by the weights of an order from now on.

        Those of `FIRST_COME` order nothing. `order_next` goes before it.
        """
        self._order[:] = order

    def run_linear(
        self, weights: FloatArray, mean_total_tokens: float, order: FloatArray = FIRST_COME
    ) -> None:
        """Run all streams to the end under the linear policy (`scores.linear.marginal_scores`)."""
        self.run_residual(rule_alone(weights), mean_total_tokens, order)

    @abstractmethod
    def run_residual(
        self, correction: ResidualNetwork, mean_total_tokens: float,
        order: FloatArray = FIRST_COME,
    ) -> None:  # fmt: skip
        """Run all streams to the end under a corrected policy (`residual_scores`), in an order."""

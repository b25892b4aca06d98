"""What the simulators of both server models have in common: copies, orders, observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tokenyard.routing import observation
from tokenyard.routing.equivariant import Layout
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.scores.order import FIRST_COME
from tokenyard.routing.scores.residual import ResidualNetwork, make_player, rule_alone
from tokenyard.routing.scores.waiting_key import LAST
from tokenyard.routing.types import OrderKey
from tokenyard.types import FloatArray, IntArray

Actions = npt.NDArray[np.int64]
Observations = npt.NDArray[np.float32]


class ServerCopies(ABC):
    """Independent copies of the servers of one scenario, each with its own stream of requests.

    Two simulators share nothing, and equal streams and actions give equal bytes.
    """

    functions: ClassVar[Any]
    """Compiled functions over `arrays`."""
    skip_at: ClassVar[int]
    placed_at: ClassVar[int]
    """Columns of the clock: whether to ignore the next action, and placements so far."""
    server_word: ClassVar[str]
    arrays: Any
    step_arguments: tuple[Any, ...]
    """The arrays as `step_and_observe` of the compiled functions takes them."""

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

    def run_residual(
        self, correction: ResidualNetwork, mean_total_tokens: float,
        order: FloatArray = FIRST_COME,
    ) -> None:  # fmt: skip
        """Run all streams to the end under a corrected policy (`residual_scores`), in an order."""
        num, slo_s = self.scenario.num_servers, self.scenario.slo_response_s
        player = make_player(correction, num, mean_total_tokens, slo_s)
        self.functions.run_residual(self.arrays, player, order, self.rewards)

    def clear(self, copy: int) -> None:
        """Empty one copy and go back to the start of its stream."""
        self.functions.clear(self.arrays, copy)
        self.functions.fill_table(self.arrays, copy)

    def skip_next(self, copy: int) -> None:
        """Ignore the next action of a copy that has just been loaded; it earns 0."""
        self.arrays.clock[copy, self.skip_at] = 1.0

    def num_placed(self) -> IntArray:
        """Placements so far in every copy, shape (num_copies,)."""
        placed: IntArray = self.arrays.clock[:, self.placed_at].astype(np.int64)
        return placed

    @abstractmethod
    def undecided(self) -> bool:
        """Whether any copy has a request left to be placed."""

    def step(self, actions: Actions) -> FloatArray:
        """Place every copy's waiting request and run to its next decision.

        Args:
            actions: Server of each copy's request, shape (num_copies,).

        Returns:
            Rewards, shape (num_copies,); a view that the next step overwrites.

        Raises:
            ValueError: An action names no server, or a stream of a cluster is over; nothing has
                changed. Of a fleet, the action of a copy that has no request left is ignored.
        """
        wrong = self.functions.step(self.arrays, actions, self.rewards)
        if wrong >= 0:
            raise self._refused(wrong, actions)
        return self.rewards

    def observe(self) -> Observations:
        """Encode what the router sees, shape (num_copies, size); a view, overwritten later."""
        self.num_saturated += self.functions.observe(
            self.arrays, self._shown_for_tokens, self.scenario.slo_response_s, self.observations
        )
        return self.observations

    def step_and_observe(self, actions: Actions) -> tuple[Observations, FloatArray]:
        """`step` and `observe` in one compiled call; returns views of both results."""
        wrong, saturated = self.functions.step_and_observe(
            *self.step_arguments, actions, self.rewards, self._shown_for_tokens,
            self.scenario.slo_response_s, self.observations,
        )  # fmt: skip
        if wrong >= 0:
            raise self._refused(wrong, actions)
        self.num_saturated += saturated
        return self.observations, self.rewards

    def _refused(self, wrong: int, actions: Actions) -> ValueError:
        return ValueError(
            f"action {actions[wrong]} of copy {wrong} names no {self.server_word}; "
            f"choose 0..{self.scenario.num_servers - 1}"
        )

    def drain(self) -> FloatArray:
        """Let every copy finish what it holds, so that all response times are known.

        Returns:
            What completions have earned, shape (num_copies,); a view, overwritten later.
        """
        self.functions.drain(self.arrays, self.rewards)
        return self.rewards

"""What every choice at a close decision costs in the end, for policies whose costs are linear.

A policy plays a stream. Where the costs of two or more servers are close, the state is copied, and
each of these servers is given the request in turn. The same requests arrive afterwards, and the
policy goes on deciding. The difference of what is paid is what the choice is worth (Ho and Cao
1983, "Perturbation analysis and optimization of queueing networks"). Only close decisions are
tried, because no small change of the weights changes the others.

What is paid are the score's terms (`tokenyard.metrics.score`): response times, violations, and the
time beyond the stream's own 99th percentile.

The policy's cost of a server is linear in its weights: base + features @ weights
(`tokenyard.routing.scores.linear.fill_cost_parts`).

Shapes: K decisions, N servers, P weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenyard.metrics import VIOLATION_WEIGHT_S, percentile
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.batching_streams import Stream
from tokenyard.types import BoolArray, FloatArray

LOST_SLOS = 10.0
"""A request that is dropped, or whose client hangs up, counts as so many times the SLO."""

VIOLATION_S, TAIL_WEIGHT, TAIL_AFTER_S, LOST_S, NUM_PRICES = range(5)
"""What is paid: per violation, per second beyond a response time, and for a lost request."""


@dataclass(frozen=True)
class BranchingConfig:
    """How much is tried out."""

    margin_slos: float = 0.15
    """Servers whose cost is above the least by no more than this are tried."""
    every: int = 2
    """Close decisions from one that is tried to the next."""
    horizon: int = 60
    """Arrivals over which a choice is played on, at most."""
    tail_weight: float = 10.0
    """Per second beyond the 99th percentile. Ten times that is a tenth of CVaR99 (Rockafellar and
    Uryasev 2000, equation 4). Few requests are so slow: with less weight there is less noise."""


@dataclass(frozen=True)
class Branches:
    """Close decisions, and what each choice costs beyond the one that was taken."""

    costs_from: npt.NDArray[np.float32]
    """What the policy's costs are made from: the base, then the features, shape (K, N, 1 + P)."""
    tried: BoolArray
    """Shape (K, N)."""
    costs_s: FloatArray
    """Paid beyond what the policy's own choice pays, seconds; 0 where not tried, shape (K, N)."""
    num_placed: int
    """Requests placed to find this out."""

    def __len__(self) -> int:
        """Return the number of decisions."""
        return len(self.tried)


class Branching(ABC):
    """Tries out choices in one scenario; it is of use again and again."""

    num_features: int
    """P."""

    def __init__(self, scenario: Scenario, mean_total_tokens: float) -> None:
        self.scenario = scenario
        self._mean_total_tokens = mean_total_tokens
        num, length = scenario.num_servers, scenario.requests_per_stream
        self._costs_from = np.zeros((length, num, 1 + self.num_features), dtype=np.float32)
        self._tried = np.zeros((length, num), dtype=np.bool_)
        self._costs_s = np.zeros((length, num))
        self._scores = np.zeros((2, num))
        self._counts = np.zeros(1, dtype=np.int64)

    def sample(self, weights: FloatArray, stream: Stream, config: BranchingConfig) -> Branches:
        """Play one stream and try out its close decisions.

        Args:
            weights: Of the linear policy.
            stream: Of the scenario's length.
            config: How much is tried.
        """
        self._load(stream)
        offered_s = self._offered_s(weights)
        prices = np.empty(NUM_PRICES)
        prices[VIOLATION_S] = VIOLATION_WEIGHT_S
        prices[TAIL_WEIGHT] = config.tail_weight
        prices[TAIL_AFTER_S] = percentile(offered_s, 99.0)
        prices[LOST_S] = LOST_SLOS * self.scenario.slo_response_s
        self._counts[:] = 0
        found = self._sample(weights, prices, config)
        return Branches(
            self._costs_from[:found].copy(),
            self._tried[:found].copy(),
            self._costs_s[:found].copy(),
            int(self._counts[0]) + len(offered_s),
        )

    @abstractmethod
    def _load(self, stream: Stream) -> None:
        """Make all copies ready to play a stream."""

    @abstractmethod
    def _offered_s(self, weights: FloatArray) -> FloatArray:
        """Response times under the policy, of every offered request, shape (num_requests,)."""

    @abstractmethod
    def _sample(self, weights: FloatArray, prices: FloatArray, config: BranchingConfig) -> int:
        """Fill in the decisions; return how many they are."""


def concatenate(parts: list[Branches]) -> Branches:
    """Put decisions of several streams behind each other."""
    return Branches(
        np.concatenate([part.costs_from for part in parts]),
        np.concatenate([part.tried for part in parts]),
        np.concatenate([part.costs_s for part in parts]),
        sum(part.num_placed for part in parts),
    )

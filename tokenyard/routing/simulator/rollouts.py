"""What every choice at a decision costs, by playing each of them on: samples to learn from.

The policy plays a stream. Then at some of its decisions the fleet is copied, the request is placed
on each replica in turn, the next arrivals are placed too, and everything runs to its end. What
differs between two of these rollouts is what the two choices are worth, for all requests and not
only for the one that is placed. A policy that prefers the cheaper choice is better than the one
that was played (policy improvement).

The next arrivals are either decided anew, which is what the policy would do, or go where they went
in the stream. A policy that decides anew soon sends all requests elsewhere in every future, and the
differences drown in noise; that they stay where they were takes most of it away, and is wrong to
the second order only where the policy is about as good as it can be.

Sources: Tesauro and Galperin 1996, "On-line policy improvement using Monte-Carlo search";
Lagoudakis and Parr 2003, "Reinforcement learning as classification"; Ho and Cao 1983,
"Perturbation analysis and optimization of queueing networks".

Shapes: K decisions, N replicas, O numbers of an observation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.routing.scenario import RewardWeights, Scenario
from tokenyard.routing.scores.residual import ResidualNetwork
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.fleet import find_decision
from tokenyard.routing.simulator.batching_kernel.iteration import advance
from tokenyard.routing.simulator.batching_kernel.layout import FleetArrays, replica_of
from tokenyard.routing.simulator.batching_kernel.lookahead import copy_row
from tokenyard.routing.simulator.batching_kernel.step import Player, decide, make_player, place
from tokenyard.routing.simulator.batching_streams import BatchingStream
from tokenyard.routing.simulator.branching import LOST_SLOS
from tokenyard.routing.simulator.order import LAST
from tokenyard.types import FloatArray, IntArray

RESPONSE = 0
VIOLATIONS = 1
SLOW = 2
NUM_COSTS = 3

_ANEW = -1
"""In place of where a request went: the policy decides."""

PLAYED, AHEAD = 0, 1
"""Copies of the fleet: that of the stream, and that in which rollouts are played."""


@dataclass(frozen=True)
class Samples:
    """Decisions, and what each choice would have cost from there on."""

    observations: npt.NDArray[np.float32]
    """Shape (K, O)."""
    rule_scores: FloatArray
    """Cost of every replica by the rule alone, in units of the SLO, shape (K, N)."""
    chosen: IntArray
    """What the policy chose, shape (K,)."""
    costs: FloatArray
    """Summed over the requests not done at the decision and over those that came after it:
    response times (s), SLO violations, and responses slower than `slow_after_s`, shape
    (K, N, NUM_COSTS)."""

    def __len__(self) -> int:
        """Return the number of decisions."""
        return len(self.chosen)


def concatenate(parts: list[Samples]) -> Samples:
    """Put samples of several streams behind each other."""
    return Samples(
        np.concatenate([part.observations for part in parts]),
        np.concatenate([part.rule_scores for part in parts]),
        np.concatenate([part.chosen for part in parts]),
        np.concatenate([part.costs for part in parts]),
    )


class RolloutSim:
    """Plays a policy over streams and tries out every choice at some of its decisions."""

    def __init__(self, scenario: Scenario, num_requests: int, mean_total_tokens: float) -> None:
        """Make room for streams of so many requests.

        Raises:
            ValueError: The scenario has no fleet.
        """
        # Nobody reads the rewards.
        self._sim = BatchingSim(scenario, 2, num_requests, RewardWeights(balance=0.0))
        self._scenario = scenario
        self._mean_total_tokens = mean_total_tokens

    def sample(
        self,
        correction: ResidualNetwork,
        stream: BatchingStream,
        every: int,
        horizon: int,
        slow_after_s: float,
        decide_anew: bool = False,
    ) -> Samples:
        """Play one stream from empty to its last arrival.

        Args:
            correction: The policy.
            stream: What arrives.
            every: Try all choices at each decision of this number.
            horizon: Arrivals after the decision that are played on.
            slow_after_s: Response time from which on a request counts as slow.
            decide_anew: Let the policy decide in every future, and not leave those who come later
                where they went in the stream.

        Raises:
            ValueError: The stream is of a closed process.
        """
        if stream.num_clients:
            raise ValueError("a future cannot be repeated where clients wait for answers")
        for copy in (PLAYED, AHEAD):
            self._sim.load(copy, stream)
        num, slo_s = self._scenario.num_servers, self._scenario.slo_response_s
        player = make_player(correction, num, self._mean_total_tokens, slo_s)
        most = len(stream) // every + 1
        samples = Samples(
            np.empty((most, len(player.scratch.observation)), dtype=np.float32),
            np.empty((most, num)),
            np.empty(most, dtype=np.int64),
            np.zeros((most, num, NUM_COSTS)),
        )
        played = np.full(len(stream), _ANEW)
        if not decide_anew:
            self._sim.run_residual(correction, self._mean_total_tokens)
            # A request that was dropped was sent nowhere in the end; there it may go anywhere.
            played = np.maximum(self._sim.arrays.outcomes[PLAYED, :, lay.SERVER], 0).astype(
                np.int64
            )
            for copy in (PLAYED, AHEAD):
                self._sim.clear(copy)
        found = _sample(
            self._sim.arrays, player, slow_after_s, played, every, horizon,
            samples.observations, samples.rule_scores, samples.chosen, samples.costs,
        )  # fmt: skip
        return Samples(
            samples.observations[:found],
            samples.rule_scores[:found],
            samples.chosen[:found],
            samples.costs[:found],
        )


@compiled
def is_over(fleet: FleetArrays, copy: int, index: int) -> bool:
    """Whether nothing more will become of a request."""
    outcome = fleet.outcomes[copy, index]
    dropped = outcome[lay.SERVER] < 0.0 and outcome[lay.ATTEMPTS] > 0.0
    return not math.isnan(outcome[lay.FINISH_S]) or outcome[lay.GAVE_UP] != 0.0 or dropped


@compiled
def branch_off(fleet: FleetArrays, first: int, last: int) -> None:
    """Make the copy for rollouts equal to the one that is played, for requests first..last-1."""
    for server in range(fleet.replica_params.shape[1]):
        copy_row(fleet.state[PLAYED, server], fleet.rules, fleet.state[AHEAD, server])
        _copy(fleet.tables[PLAYED, server], fleet.tables[AHEAD, server])
        for router in range(fleet.routers.shape[1]):
            _copy(fleet.routers[PLAYED, router, server], fleet.routers[AHEAD, router, server])
        for kind in range(fleet.links.shape[2]):
            _copy(fleet.links[PLAYED, server, kind], fleet.links[AHEAD, server, kind])
        for kind in range(fleet.block_s.shape[2]):
            _copy(fleet.block_s[PLAYED, server, kind], fleet.block_s[AHEAD, server, kind])
    for word in range(fleet.cached.shape[1]):
        _copy(fleet.cached[PLAYED, word], fleet.cached[AHEAD, word])
    _copy(fleet.clock[PLAYED], fleet.clock[AHEAD])
    size = fleet.retries.shape[1]
    for ahead in range(int(fleet.clock[PLAYED, lay.RETRY_COUNT])):
        slot = (int(fleet.clock[PLAYED, lay.RETRY_HEAD]) + ahead) % size
        fleet.retries[AHEAD, slot] = fleet.retries[PLAYED, slot]
    for index in range(first, last):
        _copy(fleet.outcomes[PLAYED, index], fleet.outcomes[AHEAD, index])


@compiled
def _copy(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy a row; assigning an array to a slice would allocate."""
    for at in range(source.shape[0]):
        target[at] = source[at]


@compiled
def _play(
    fleet: FleetArrays,
    player: Player,
    slow_after_s: float,
    played: IntArray,
    choice: int,
    first: int,
    last: int,
    costs: FloatArray,
) -> None:
    """Play one future: the current request on `choice`, those up to `last` as `played` says."""
    branch_off(fleet, first, last)
    place(fleet, AHEAD, choice, LAST)
    find_decision(fleet, AHEAD)
    while 0.0 <= fleet.clock[AHEAD, lay.CURRENT] < last:
        server = played[int(fleet.clock[AHEAD, lay.CURRENT])]
        if server == _ANEW:
            server = decide(fleet, AHEAD, player)
        place(fleet, AHEAD, server, LAST)
        find_decision(fleet, AHEAD)
    for server in range(fleet.replica_params.shape[1]):
        advance(replica_of(fleet, AHEAD, server), math.inf)
    for index in range(first, last):
        if is_over(fleet, PLAYED, index):
            continue
        outcome = fleet.outcomes[AHEAD, index]
        response_s = outcome[lay.FINISH_S] - fleet.requests[AHEAD, index, lay.ARRIVAL_S]
        if math.isnan(response_s):
            response_s = LOST_SLOS * player.slo_s
        costs[RESPONSE] += response_s
        costs[VIOLATIONS] += 1.0 - outcome[lay.MET]
        costs[SLOW] += response_s > slow_after_s


@compiled
def _sample(
    fleet: FleetArrays,
    player: Player,
    slow_after_s: float,
    played: IntArray,
    every: int,
    horizon: int,
    observations: npt.NDArray[np.float32],
    rule_scores: FloatArray,
    chosen: IntArray,
    costs: FloatArray,
) -> int:
    """Play a stream and fill in the samples; return how many they are."""
    num = fleet.replica_params.shape[1]
    num_requests = fleet.requests.shape[1]
    first = 0
    decision = 0
    found = 0
    while fleet.clock[PLAYED, lay.CURRENT] >= 0.0 and found < chosen.shape[0]:
        current = int(fleet.clock[PLAYED, lay.CURRENT])
        choice = decide(fleet, PLAYED, player)
        while first < current and is_over(fleet, PLAYED, first):
            first += 1
        # Near the end of the stream there is too little future to tell choices apart.
        if decision % every == 0 and current + horizon < num_requests:
            _copy(player.scratch.observation, observations[found])
            chosen[found] = choice
            table = fleet.tables[PLAYED]
            request = fleet.requests[PLAYED, current]
            ob.marginal_scores(
                player.correction.weights, request[lay.CONTEXT], request[lay.PREDICTED_OUTPUT],
                player.mean_total_tokens, player.slo_s, table, rule_scores[found],
            )  # fmt: skip
            for replica in range(num):
                _play(
                    fleet, player, slow_after_s, played, replica, first, current + 1 + horizon,
                    costs[found, replica],
                )  # fmt: skip
            found += 1
        decision += 1
        place(fleet, PLAYED, choice, LAST)
        find_decision(fleet, PLAYED)
    return found

"""Choices tried out where replicas batch continuously (`branching`).

The policy decides anew in every future: were all later requests to stay where they went, a choice
that was not taken would look worse than it is. Futures do not meet again here, so each is played
over the whole horizon, and then to its end.
"""

from __future__ import annotations

import math

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS, NUM_SLO_PRICES
from tokenyard.routing.scenario import NO_REWARD, Scenario
from tokenyard.routing.scores.linear import fill_cost_parts, marginal_scores
from tokenyard.routing.scores.waiting_key import LAST
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.fleet import find_decision
from tokenyard.routing.simulator.batching_kernel.iteration import advance
from tokenyard.routing.simulator.batching_kernel.layout import replica_of
from tokenyard.routing.simulator.batching_kernel.lookahead import copy_row
from tokenyard.routing.simulator.batching_kernel.step import place
from tokenyard.routing.simulator.batching_kernel.view import fill_table
from tokenyard.routing.simulator.batching_streams import Stream, fleet_stream
from tokenyard.routing.simulator.branching import (
    LOST_S,
    TAIL_AFTER_S,
    TAIL_WEIGHT,
    VIOLATION_S,
    Branching,
    BranchingConfig,
)
from tokenyard.types import FloatArray

# Of numpy's type: for each Python integer, numba would compile all that is called with it anew.
PLAYED, AHEAD = np.int64(0), np.int64(1)
"""Copies of the fleet: that of the stream, and that in which futures are played."""


class BatchingBranching(Branching):
    """Two copies of a fleet: the one that is played, and that of the futures."""

    num_features = NUM_MARGINAL_WEIGHTS + NUM_SLO_PRICES

    def __init__(self, scenario: Scenario, mean_total_tokens: float) -> None:
        super().__init__(scenario, mean_total_tokens)
        self._sim = BatchingSim(scenario, 2, scenario.requests_per_stream, NO_REWARD)

    def _load(self, stream: Stream) -> None:
        stream = fleet_stream(stream)
        if stream.num_clients:
            raise ValueError("a future cannot be repeated where clients wait for answers")
        for copy in (PLAYED, AHEAD):
            self._sim.load(int(copy), stream)

    def _offered_s(self, weights: FloatArray) -> FloatArray:
        self._sim.run_linear(weights, self._mean_total_tokens)
        return self._sim.view(int(PLAYED)).outcomes().offered_response_s

    def _sample(self, weights: FloatArray, prices: FloatArray, config: BranchingConfig) -> int:
        for copy in (PLAYED, AHEAD):
            self._sim.clear(int(copy))
        found: int = _sample(
            self._sim.arrays, weights, self._mean_total_tokens, self.scenario.slo_response_s,
            prices, config.margin_slos, config.every, config.horizon, self._scores,
            self._costs_from, self._tried, self._costs_s, self._counts,
        )  # fmt: skip
        return found


@compiled
def _is_over(fleet, copy, index):
    """Whether nothing more will become of a request."""
    outcome = fleet.outcomes[copy, index]
    dropped = outcome[lay.SERVER] < 0.0 and outcome[lay.ATTEMPTS] > 0.0
    return not math.isnan(outcome[lay.FINISH_S]) or outcome[lay.GAVE_UP] != 0.0 or dropped


@compiled
def _copy(source, target):
    """Copy a row; assigning an array to a slice would allocate."""
    for at in range(source.shape[0]):
        target[at] = source[at]


@compiled
def _branch_off(fleet, first, last):
    """Make the copy for futures equal to the one that is played, for requests first..last-1."""
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
def _decide(fleet, copy, weights, mean_total_tokens, slo_s, scores):
    """Replica that the policy takes for the current request of a copy."""
    fill_table(fleet, copy)
    request = fleet.requests[copy, int(fleet.clock[copy, lay.CURRENT])]
    return marginal_scores(
        weights, request[lay.CONTEXT], request[lay.PREDICTED_OUTPUT], mean_total_tokens, slo_s,
        fleet.tables[copy], scores,
    )  # fmt: skip


@compiled
def _play_on(
    fleet, weights, mean_total_tokens, slo_s, prices, scores, choice, first, last, counts
):  # fmt: skip
    """Play one future to its end; return what requests `first` to `last` - 1 pay there."""
    _branch_off(fleet, first, last)
    place(fleet, AHEAD, choice, LAST)
    find_decision(fleet, AHEAD)
    counts[0] += 1
    while 0.0 <= fleet.clock[AHEAD, lay.CURRENT] < last:
        to = _decide(fleet, AHEAD, weights, mean_total_tokens, slo_s, scores)
        place(fleet, AHEAD, to, LAST)
        find_decision(fleet, AHEAD)
        counts[0] += 1
    for replica in range(fleet.replica_params.shape[1]):
        advance(replica_of(fleet, AHEAD, replica), math.inf)
    paid = 0.0
    for index in range(first, last):
        if _is_over(fleet, PLAYED, index):
            continue
        outcome = fleet.outcomes[AHEAD, index]
        response_s = outcome[lay.FINISH_S] - fleet.requests[AHEAD, index, lay.ARRIVAL_S]
        if math.isnan(response_s):
            response_s = prices[LOST_S]
        paid += response_s + prices[VIOLATION_S] * (1.0 - outcome[lay.MET])
        paid += prices[TAIL_WEIGHT] * max(response_s - prices[TAIL_AFTER_S], 0.0)
    return paid


@compiled
def _sample(
    fleet, weights, mean_total_tokens, slo_s, prices, margin_slos, every, horizon, scores,
    costs_from, tried, costs_s, counts,
):  # fmt: skip
    """Play a stream and fill in its close decisions; return how many they are."""
    num = fleet.replica_params.shape[1]
    num_requests = fleet.requests.shape[1]
    first = 0
    found = 0
    close = 0
    while fleet.clock[PLAYED, lay.CURRENT] >= 0.0 and found < tried.shape[0]:
        current = int(fleet.clock[PLAYED, lay.CURRENT])
        chosen = _decide(fleet, PLAYED, weights, mean_total_tokens, slo_s, scores[0])
        while first < current and _is_over(fleet, PLAYED, first):
            first += 1
        num_close = 0
        for replica in range(num):
            near = scores[0, replica] - scores[0, chosen] <= margin_slos
            tried[found, replica] = near
            num_close += near
        # Near the end of the stream there is too little future to tell choices apart.
        if num_close > 1 and current + horizon < num_requests:
            if close % every == 0:
                request = fleet.requests[PLAYED, current]
                fill_cost_parts(
                    weights, request[lay.CONTEXT], request[lay.PREDICTED_OUTPUT],
                    mean_total_tokens, slo_s, fleet.tables[PLAYED], costs_from[found],
                )  # fmt: skip
                for replica in range(num):
                    costs_s[found, replica] = 0.0
                    if tried[found, replica]:
                        costs_s[found, replica] = _play_on(
                            fleet, weights, mean_total_tokens, slo_s, prices, scores[1], replica,
                            first, current + 1 + horizon, counts,
                        )  # fmt: skip
                own = costs_s[found, chosen]
                for replica in range(num):
                    if tried[found, replica]:
                        costs_s[found, replica] -= own
                found += 1
            close += 1
        place(fleet, PLAYED, chosen, LAST)
        find_decision(fleet, PLAYED)
        counts[0] += 1
    return found

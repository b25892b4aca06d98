"""The token-level cluster: names and shapes for the arrays that the kernel moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from tokenyard import metrics
from tokenyard.routing import observation
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.scenario import RewardWeights, Scenario
from tokenyard.routing.scores.order import FIRST_COME
from tokenyard.routing.simulator import constant_rate_kernel as kernel
from tokenyard.routing.simulator.batching_streams import Stream, token_rows
from tokenyard.routing.simulator.copies import Actions, ServerCopies
from tokenyard.routing.simulator.rewards import NUM_REWARDS, reward_rules
from tokenyard.routing.simulator.table import TableSnapshots
from tokenyard.routing.types import ReplicaSnapshot, Request, WaitingQueue
from tokenyard.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class Outcomes:
    """What became of the requests of one stream; every array has shape (num_requests,)."""

    arrival_s: FloatArray
    context_tokens: FloatArray
    total_tokens: FloatArray
    server: IntArray
    """Server that took the request; -1 where it was dropped."""
    response_s: FloatArray
    """End-to-end response time, seconds; NaN where the request was dropped or is not done."""
    waiting_seen: FloatArray
    """Requests waiting at all servers when this one was placed."""
    of_whole_stream: ClassVar[frozenset[str]] = frozenset()
    """Arrays that do not count requests one by one."""

    @property
    def offered_response_s(self) -> FloatArray:
        """Response time of every offered request (`metrics.offered_s`), shape (num_requests,)."""
        return metrics.offered_s(self.response_s, self.arrival_s, self.response_s)

    def violations(self, slo_response_s: float) -> BoolArray:
        """Which requests violated the SLO, shape (num_requests,)."""
        return metrics.violations(self.response_s, slo_response_s)

    def further_measures(self, scenario: Scenario) -> dict[str, float]:
        """What is measured beside what all servers have: nothing."""
        return {}

    def after(self, warm_up: int) -> Self:
        """Without the first requests, which only filled the servers."""
        if not warm_up:
            return self
        num = len(self.arrival_s)
        kept = {
            name: values[warm_up:]
            for name, values in vars(self).items()
            if np.shape(values) == (num,) and name not in self.of_whole_stream
        }
        return replace(self, **kept)


def _server_params(scenario: Scenario) -> FloatArray:
    params = np.empty((scenario.num_servers, kernel.NUM_PARAMS))
    for row, server in zip(params, scenario.servers, strict=True):
        parallel = scenario.discipline != "serial"
        split = scenario.discipline == "parallel_split"
        row[kernel.SLOT_TOKENS_PER_S] = server.tokens_per_s / (server.concurrency if split else 1)
        row[kernel.SLOTS] = server.concurrency if parallel else 1
        row[kernel.CONCURRENCY] = server.concurrency
        row[kernel.NOMINAL_TOKENS_PER_S] = server.tokens_per_s
    params[:, kernel.RANK] = observation.speed_ranks(params[:, kernel.SLOT_TOKENS_PER_S])
    return params


def _rules(scenario: Scenario, reward: RewardWeights) -> FloatArray:
    rules = np.empty(kernel.NUM_RULES)
    rules[:NUM_REWARDS] = reward_rules(reward)
    rules[kernel.QUEUE_LIMIT] = scenario.queue_limit
    rules[kernel.DROP_AT_CAPACITY] = scenario.overflow == "drop"
    rules[kernel.SHARING] = scenario.discipline == "processor_sharing"
    rules[kernel.MAX_RUNNING] = _max_running(scenario)
    rules[kernel.SLO_S] = scenario.slo_response_s
    rules[kernel.PROCESSING] = reward.processing
    rules[kernel.QUEUE] = reward.queue
    rules[kernel.OVERLOAD] = reward.overload
    rules[kernel.BALANCE] = reward.balance
    rules[kernel.MAX_OVERTAKING_S] = scenario.max_overtaking_s
    rules[kernel.PAYS_RESPONSES] = reward.credits_response
    return rules


def _max_running(scenario: Scenario) -> int:
    return 1 if scenario.discipline == "serial" else max(s.concurrency for s in scenario.servers)


class ClusterSim(ServerCopies):
    """Independent copies of one cluster, each with its own stream of requests."""

    functions: ClassVar[Any] = kernel
    skip_at, placed_at = kernel.SKIP, kernel.INDEX
    server_word = "server"
    arrays: kernel.ClusterArrays

    def __init__(
        self,
        scenario: Scenario,
        num_copies: int,
        stream_length: int,
        reward: RewardWeights | None = None,
    ) -> None:
        """Make empty servers; `load` a stream into every copy before the first `step`.

        Args:
            scenario: Servers, queue rule, SLO and, unless `reward` is given, reward weights.
            num_copies: Copies stepped by one call.
            stream_length: Requests in every stream.
            reward: Weights that take the place of the scenario's.
        """
        super().__init__(scenario, num_copies, whole=False)
        width = kernel.STATE + 5 * _max_running(scenario) + scenario.queue_limit
        num_servers = scenario.num_servers
        self.arrays = kernel.ClusterArrays(
            params=_server_params(scenario),
            rules=_rules(scenario, reward or scenario.reward),
            state=np.zeros((num_copies, num_servers, width)),
            clock=np.zeros((num_copies, kernel.NUM_CLOCK)),
            requests=np.zeros((num_copies, stream_length, kernel.NUM_REQUEST)),
            outcomes=np.zeros((num_copies, stream_length, kernel.NUM_OUTCOME)),
            tables=np.zeros((num_copies, num_servers, observation.NUM_COLUMNS)),
            asked=self.asked,
            order=self._order,
            ahead_row=np.zeros(width),
            ahead_outcomes=np.zeros((stream_length, kernel.NUM_OUTCOME)),
        )
        self.step_arguments = self.arrays

    def load(self, copy: int, stream: Stream) -> None:
        """Empty one copy and give it a stream, shape (stream_length, NUM_REQUEST).

        The next action of this copy is ignored when `skip_next` is called for it.
        """
        self.arrays.requests[copy] = token_rows(stream)
        self.clear(copy)

    def vary(self, copy: int, randomisation: Randomisation, rng: np.random.Generator) -> None:
        """Refuse: only fleets know other hardware.

        Raises:
            ValueError: Always.
        """
        raise ValueError("speeds and staleness are randomised for fleets, not for servers")

    def _refused(self, wrong: int, actions: Actions) -> ValueError:
        if self.arrays.clock[wrong, kernel.INDEX] >= self.arrays.requests.shape[1]:
            return ValueError(f"the stream of copy {wrong} is over: load another one")
        return super()._refused(wrong, actions)

    def run_delay_rule(
        self, reserve_above_tokens: float, dump_server: int, order: FloatArray = FIRST_COME
    ) -> None:
        """Run all streams to the end under shortest expected delay or one of its variants.

        Args:
            reserve_above_tokens: Larger requests are barred from the slowest server.
            dump_server: Takes all that no server could do within the SLO; -1: none does.
            order: Weights of an order.
        """
        kernel.run_delay_rule(self.arrays, reserve_above_tokens, dump_server, order, self.rewards)

    def sizes_seen(self) -> FloatArray:
        """Size of every request as the router knows it, tokens, shape (copies, stream_length)."""
        return self.arrays.requests[:, :, kernel.PREDICTED_TOTAL]

    def view(self, copy: int = 0) -> ClusterView:
        """One copy, to look at."""
        return ClusterView(self, copy)

    def undecided(self) -> bool:
        """Whether any copy has a request left to be placed."""
        return bool((self.num_placed() < self.arrays.requests.shape[1]).any())


class ClusterView(NamedTuple):
    """One copy of a simulator: what a policy may see of it now, and what became of its requests."""

    sim: ClusterSim
    copy: int

    def current(self) -> int:
        """Index of the request that waits to be placed; -1: none is left."""
        index = int(self.sim.arrays.clock[self.copy, kernel.INDEX])
        return index if index < self.sim.arrays.requests.shape[1] else -1

    def offered(self) -> Sequence[int]:
        """Servers that `snapshots` shows: all."""
        return range(self.sim.scenario.num_servers)

    def now_s(self) -> float:
        """Clock of one copy, seconds."""
        return float(self.sim.arrays.clock[self.copy, kernel.NOW_S])

    def request(self) -> Request:
        """The request that waits to be placed, as a policy may see it."""
        row = self.sim.arrays.requests[self.copy, self.current()].tolist()
        return Request(
            arrival_s=row[kernel.ARRIVAL_S],
            context_tokens=int(row[kernel.CONTEXT]),
            predicted_total_tokens=row[kernel.PREDICTED_TOTAL],
            due_s=self.sim.scenario.slo_response_s,
        )

    def snapshots(self, block_tokens: int = 0) -> Sequence[ReplicaSnapshot]:
        """What a policy may know of one copy's servers now; they have no blocks to count."""
        offered, table = self.offered(), self.sim.arrays.tables[self.copy]
        return TableSnapshots(self.sim.names, table, offered, self.now_s(), False)

    def queue(self, server: int) -> WaitingQueue:
        """What waits at a server of one copy, in the order in which it will start."""
        row = self.sim.arrays.state[self.copy, server]
        ring = row[kernel.STATE + 5 * _max_running(self.sim.scenario) :]
        places = int(row[kernel.HEAD]) + np.arange(int(row[kernel.WAITING]))
        which = ring[places % len(ring)].astype(np.int64)
        return WaitingQueue(
            order_keys_s=self.sim.arrays.outcomes[self.copy, which, kernel.ORDER_KEY_S],
            tokens=self.sim.arrays.requests[self.copy, which, kernel.PREDICTED_TOTAL],
        )

    def num_waiting(self) -> int:
        """Requests that wait at all servers now."""
        return int(self.sim.arrays.state[self.copy, :, kernel.WAITING].sum())

    def response_s(self, requests: IntArray) -> FloatArray:
        """Response times of requests, NaN until one is done, seconds, shape (num,)."""
        return np.asarray(self.sim.arrays.outcomes[self.copy, requests, kernel.RESPONSE_S])

    def outcomes(self) -> Outcomes:
        """What became of one copy's requests."""
        requests, outcome = self.sim.arrays.requests[self.copy], self.sim.arrays.outcomes[self.copy]
        return Outcomes(
            arrival_s=requests[:, kernel.ARRIVAL_S].copy(),
            context_tokens=requests[:, kernel.CONTEXT].copy(),
            total_tokens=requests[:, kernel.TRUE_TOTAL].copy(),
            server=outcome[:, kernel.SERVER].astype(np.int64),
            response_s=outcome[:, kernel.RESPONSE_S].copy(),
            waiting_seen=outcome[:, kernel.WAITING_SEEN].copy(),
        )

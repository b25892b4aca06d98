"""Shortest expected delay, and what hand rules make of it when one replica is given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenyard.routing.observation import WAIT_S, batching_delays, unranked_columns
from tokenyard.routing.policies.cost import LeastCost, cheapest
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import Slo


def finish_s(request: Request, snapshot: ReplicaSnapshot) -> float:
    """Time until `request` would be done at a replica: its wait and its service, seconds."""
    return finish_times_s(request, [snapshot])[0]


def finish_times_s(request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
    """`finish_s` at every replica."""
    total = request.predicted_total_tokens
    if all(snapshot.engine is None for snapshot in snapshots):
        return [snapshot.wait_s + total / snapshot.tokens_per_s for snapshot in snapshots]
    return [delays.first_token_s + delays.decode_s for delays in added_delays(request, snapshots)]


class AddedDelays(NamedTuple):
    """Delays that a request would meet and cause at a replica that batches, seconds."""

    wait_s: float
    """Until the replica could start on its prompt."""
    first_token_s: float
    """Until its first token, the wait included."""
    decode_s: float
    """From its first token to its last."""
    others_s: float
    """Sum of what all other requests are delayed by."""


def added_delays(request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[AddedDelays]:
    """Estimate the delays of a request at every replica (`batching_delays`).

    A replica that does not batch has nobody to delay, and only one time: all before the last token
    is told as the time to the first.
    """
    context = request.context_tokens
    output_tokens = request.predicted_total_tokens - context
    return [
        AddedDelays(row[WAIT_S], *batching_delays(row, context, output_tokens))
        if snapshot.engine is not None
        else AddedDelays(snapshot.wait_s, finish_s(request, snapshot), 0.0, 0.0)
        for snapshot, row in zip(snapshots, unranked_columns(snapshots), strict=True)
    ]


class ShortestExpectedDelay(LeastCost):
    """SED: joins the replica where the request is expected to be done first."""

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
        """Return the expected response time at every replica, seconds."""
        return finish_times_s(request, snapshots)


class MarginalDelay(LeastCost):
    """Joins the replica where the request adds least to the sum of all response times.

    Where replicas batch, a request slows down those that it joins: looking at its own delay
    alone, as SED does, fills up the fast replicas. Without batching it is SED.
    """

    def __init__(self, wait_weight: float = 1.0, others_weight: float = 1.0) -> None:
        """Count all delays alike, or the request's wait and that of others with tuned weights."""
        self._wait_weight = wait_weight
        self._others_weight = others_weight

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
        """Return the request's own time and what it delays others by at every replica, seconds."""
        if all(snapshot.engine is None for snapshot in snapshots):
            return finish_times_s(request, snapshots)
        return [self._cost_s(delays) for delays in added_delays(request, snapshots)]

    def _cost_s(self, delays: AddedDelays) -> float:
        own_s = delays.first_token_s + delays.decode_s
        own_s += (self._wait_weight - 1.0) * delays.wait_s
        return own_s + self._others_weight * delays.others_s


class SedLinear(LeastCost):
    """Least `wait + weight x service`: SED with one parameter, which is tuned.

    A weight above 1 counts the speed of a replica for more than its queue: slow ones are left idle.
    Source: SED with a linear factor; weight 1 is SED.
    """

    def __init__(self, service_weight: float = 1.0) -> None:
        """Count the request's own service `service_weight` times."""
        self._service_weight = service_weight

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
        """Return the wait and the weighted service at every replica, seconds."""
        return [
            delays.wait_s
            + self._service_weight * (delays.first_token_s - delays.wait_s + delays.decode_s)
            for delays in added_delays(request, snapshots)
        ]


class FilterDump:
    """Least marginal delay where the SLO can be kept; else the slowest replica is given up.

    Of the replicas where the request is done within `slo_share` x the SLO, the one of least
    marginal delay. Without one the request violates its SLO anyway: the slowest replica takes it,
    so that the others keep theirs; of equally slow ones that with the longest wait. Ties go to the
    first.

    Source: size- and deadline-aware filters before a score, as in llm-d's headroom tiers; the dump
    is `SedDump` without a fixed position.
    """

    def __init__(self, slo: Slo, slo_share: float = 1.0) -> None:
        """Keep `slo_share` of `slo`."""
        self._limit_s = slo_share * slo.response_s

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the least marginal delay of those in time, or the slowest replica."""
        delays = added_delays(request, snapshots)
        done_s = [one.first_token_s + one.decode_s for one in delays]
        in_time = [i for i, seconds in enumerate(done_s) if seconds <= self._limit_s]
        if in_time:
            return min(in_time, key=lambda i: done_s[i] + delays[i].others_s)
        return min(
            range(len(delays)), key=lambda i: (snapshots[i].full_tokens_per_s, -delays[i].wait_s)
        )


class SedReserve:
    """SED that keeps long requests off the slowest replica, so that short ones find it free."""

    def __init__(self, above_tokens: float) -> None:
        """Bar requests of more than `above_tokens` from the slowest replica."""
        self._above_tokens = above_tokens

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the first to be done of the replicas that are open to the request."""
        costs = finish_times_s(request, snapshots)
        if request.predicted_total_tokens > self._above_tokens and len(costs) > 1:
            costs[cheapest([s.tokens_per_s for s in snapshots])] = float("inf")
        return cheapest(costs)


class SedDump:
    """SED that sends certain SLO violations to one fixed replica, so that the others attain theirs.

    While a replica is down the others stand at other positions, and it is SED.
    """

    def __init__(self, slo: Slo, replica: int, num_replicas: int) -> None:
        """Give up on `replica` of `num_replicas` whenever none of them can meet `slo`."""
        self._slo = slo
        self._replica = replica
        self._num_replicas = num_replicas

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the first to be done; the dump replica where even that violates the SLO."""
        costs = finish_times_s(request, snapshots)
        best = cheapest(costs)
        attained = costs[best] <= self._slo.response_s
        return best if attained or len(costs) != self._num_replicas else self._replica

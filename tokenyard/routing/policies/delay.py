"""Shortest expected delay, and what hand rules make of it when one replica is given up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.routing.policies.cost import LeastCost
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import FloatArray, Slo

ADDED_WAIT_S, ADDED_FIRST_TOKEN_S, ADDED_DECODE_S, ADDED_OTHERS_S, NUM_ADDED = range(5)
"""Columns of `added_delays`: until the replica could start on the prompt; until the first token,
the wait included; from there to the last token; what all other requests together are delayed by."""


def finish_times_s(request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
    """Time until `request` would be done at every replica: its wait and its service, seconds.

    Shape (num_replicas,).
    """
    delays = added_delays(request, snapshots)
    return delays[:, ADDED_FIRST_TOKEN_S] + delays[:, ADDED_DECODE_S]


def added_delays(request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
    """Estimate the delays of a request at every replica, seconds, shape (num_replicas, NUM_ADDED).

    As `observation.request_delays` has them.
    """
    return _delays(request, ob.unranked_columns(snapshots))


def _delays(request: Request, columns: FloatArray) -> FloatArray:
    delays = np.empty((len(columns), NUM_ADDED))
    # Always floats: the compiled function would be compiled anew for other types.
    total = float(request.predicted_total_tokens)
    _fill_delays(columns, float(request.context_tokens), total, delays)
    return delays


@compiled
def _fill_delays(
    columns: FloatArray, context_tokens: float, total_tokens: float, out: FloatArray
) -> None:
    for i in range(columns.shape[0]):
        row, delays = columns[i], out[i]
        delays[ADDED_WAIT_S] = row[ob.WAIT_S]
        first_s, decode_s, others_s = ob.request_delays(
            row, context_tokens, total_tokens - context_tokens
        )
        delays[ADDED_FIRST_TOKEN_S] = first_s
        delays[ADDED_DECODE_S] = decode_s
        delays[ADDED_OTHERS_S] = others_s


def mark_safe(
    request: Request, snapshots: Sequence[ReplicaSnapshot], slo_s: float
) -> tuple[int, npt.NDArray[np.bool_]]:
    """Find replicas below capacity where the request is done within an SLO, seconds.

    Returns:
        How many there are, and which, shape (num_replicas,).
    """
    columns = ob.unranked_columns(snapshots)
    safe = np.empty(len(columns), dtype=np.bool_)
    context, total = float(request.context_tokens), float(request.predicted_total_tokens)
    return _fill_safe(columns, context, total, float(slo_s), safe), safe


@compiled
def _fill_safe(
    columns: FloatArray,
    context_tokens: float,
    total_tokens: float,
    slo_s: float,
    out: npt.NDArray[np.bool_],
) -> int:
    num = 0
    for i in range(columns.shape[0]):
        row = columns[i]
        first_s, decode_s, _ = ob.request_delays(row, context_tokens, total_tokens - context_tokens)
        out[i] = (
            first_s + decode_s <= slo_s
            and row[ob.NUM_WAITING] + row[ob.NUM_RUNNING] < row[ob.MAX_CONCURRENCY]
        )
        num += out[i]
    return num


class ShortestExpectedDelay(LeastCost):
    """SED: joins the replica where the request is expected to be done first."""

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the expected response time at every replica, seconds."""
        return finish_times_s(request, snapshots)


class MarginalDelay(LeastCost):
    """Joins the replica where the request adds least to the sum of all response times.

    Where replicas batch, a request slows down those that it joins: looking at its own delay
    alone, as SED does, fills up the fast replicas. Without batching it is SED.
    """

    def __init__(self, wait_weight: float = 1.0, others_weight: float = 1.0) -> None:
        """Count all delays alike, or the request's wait and that of others with tuned weights."""
        self._wait_weight = float(wait_weight)
        self._others_weight = float(others_weight)

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the request's own time and what it delays others by at every replica, seconds."""
        columns = ob.unranked_columns(snapshots)
        delays, costs = _delays(request, columns), np.empty(len(columns))
        _fill_marginal(columns, delays, self._wait_weight, self._others_weight, costs)
        return costs


@compiled
def _fill_marginal(
    columns: FloatArray,
    delays: FloatArray,
    wait_weight: float,
    others_weight: float,
    out: FloatArray,
) -> None:
    batches = False
    for i in range(columns.shape[0]):
        batches = batches or columns[i, ob.ITERATION_S] != 0.0
    for i in range(columns.shape[0]):
        cost = delays[i, ADDED_FIRST_TOKEN_S] + delays[i, ADDED_DECODE_S]
        if batches:
            cost += (wait_weight - 1.0) * delays[i, ADDED_WAIT_S]
            cost += others_weight * delays[i, ADDED_OTHERS_S]
        out[i] = cost


class SedLinear(LeastCost):
    """Least `wait + weight x service`: SED with one parameter, which is tuned.

    A weight above 1 counts the speed of a replica for more than its queue: slow ones are left idle.
    Source: SED with a linear factor; weight 1 is SED.
    """

    def __init__(self, service_weight: float = 1.0) -> None:
        self._service_weight = service_weight

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the wait and the weighted service at every replica, seconds."""
        delays = added_delays(request, snapshots)
        wait_s = delays[:, ADDED_WAIT_S]
        service_s = delays[:, ADDED_FIRST_TOKEN_S] - wait_s + delays[:, ADDED_DECODE_S]
        return wait_s + self._service_weight * service_s


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
        columns = ob.unranked_columns(snapshots)
        delays = _delays(request, columns)
        done_s = delays[:, ADDED_FIRST_TOKEN_S] + delays[:, ADDED_DECODE_S]
        in_time = done_s <= self._limit_s
        if in_time.any():
            return int(np.where(in_time, done_s + delays[:, ADDED_OTHERS_S], np.inf).argmin())
        speed = columns[:, ob.TOKENS_PER_S] * columns[:, ob.NUM_SLOTS]
        slowest = speed == speed.min()
        return int(np.where(slowest, -delays[:, ADDED_WAIT_S], np.inf).argmin())


class SedReserve:
    """SED that keeps long requests off the slowest replica, so that short ones find it free."""

    def __init__(self, above_tokens: float) -> None:
        self._above_tokens = above_tokens

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the first to be done of the replicas that are open to the request."""
        costs = finish_times_s(request, snapshots)
        if request.predicted_total_tokens > self._above_tokens and len(costs) > 1:
            costs[ob.unranked_columns(snapshots)[:, ob.TOKENS_PER_S].argmin()] = np.inf
        return int(costs.argmin())


class SedDump:
    """SED that sends certain SLO violations to one fixed replica, so that the others attain theirs.

    While a replica is down the others stand at other positions, and it is SED.
    """

    def __init__(self, slo: Slo, replica: int, num_replicas: int) -> None:
        self._slo = slo
        self._replica = replica
        self._num_replicas = num_replicas

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the first to be done; the dump replica where even that violates the SLO."""
        costs = finish_times_s(request, snapshots)
        best = int(costs.argmin())
        attained = costs[best] <= self._slo.response_s
        return best if attained or len(costs) != self._num_replicas else self._replica

"""The placement that knows the order: `marginal_in_order`, which exists only with an order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.routing.policies import delay
from tokenyard.routing.policies.cost import cheapest
from tokenyard.routing.policies.order import Order
from tokenyard.routing.policies.order_spec import OrderSpec
from tokenyard.routing.policies.places import QueuePlaces
from tokenyard.routing.types import Decision, ReplicaSnapshot, Request
from tokenyard.types import FloatArray


class MarginalInOrder:
    """Least marginal delay that knows where in each queue the request would stand.

    It waits for those whose key is not above its own, and delays only those behind it: the cost is
    the wait for the former, its own service, and that service for each of the latter. Where
    replicas batch, the share of prompts that would be behind is taken off the wait, and the share
    of requests that would be before it off what the others are delayed by (`policies.places`).
    """

    sees_queues = True

    def __init__(self, order: Order, wait_weight: float = 1.0, others_weight: float = 1.0) -> None:
        """Let requests wait as `order` says; weights as those of `MarginalDelay`."""
        self._order = order
        self._wait_weight = float(wait_weight)
        self._others_weight = float(others_weight)
        self._places = QueuePlaces()

    @property
    def order_spec(self) -> OrderSpec:
        """By which rule requests wait."""
        return self._order.spec

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the choice."""
        return self.place(request, snapshots).replica

    def place(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the replica of least cost, with the order key there."""
        columns, delays = ob.unranked_columns(snapshots), delay.added_delays(request, snapshots)
        delays_s = self._order.delays_s(request, snapshots)
        keys_s = request.arrival_s + delays_s
        self._places.fill(snapshots, keys_s, columns)
        costs = np.empty(len(columns))
        _fill_costs(columns, delays, self._wait_weight, self._others_weight, costs)
        chosen = cheapest(costs)
        self._places.note(request, snapshots, chosen, keys_s[chosen])
        key = self._order.key_at(request, snapshots, chosen, float(delays_s[chosen]))
        return Decision(chosen, costs, key)


@compiled
def _fill_costs(
    columns: FloatArray,
    delays: FloatArray,
    wait_weight: float,
    others_weight: float,
    out: FloatArray,
) -> None:
    for i in range(columns.shape[0]):
        row = columns[i]
        wait_s, others_s = delays[i, delay.ADDED_WAIT_S], delays[i, delay.ADDED_OTHERS_S]
        service_s = delays[i, delay.ADDED_FIRST_TOKEN_S] + delays[i, delay.ADDED_DECODE_S] - wait_s
        if row[ob.ITERATION_S] > 0.0:
            known = row[ob.NUM_BEFORE] + row[ob.NUM_BEHIND]
            outstanding = row[ob.NUM_WAITING] + row[ob.NUM_RUNNING]
            others_s *= 1.0 - row[ob.NUM_BEFORE] / max(outstanding, known, 1.0)
        else:
            others_s = service_s * row[ob.NUM_BEHIND] / row[ob.NUM_SLOTS]
        wait_s -= row[ob.OVERTAKEN_S]
        out[i] = wait_weight * wait_s + service_s + others_weight * others_s

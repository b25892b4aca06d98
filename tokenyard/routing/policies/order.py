"""In which order requests wait at their replica: rules, and what adds one to a placement.

An order says how much later than its arrival a request takes its place in the queue. A second of
that is a second by which later requests may overtake it: whatever waits long enough comes first, so
every rule ages. The simulator bounds what a rule adds (`Scenario.max_overtaking_s`). Classes with a
`priority` wait apart from each other, and an order is one within a class.

Every order may set those back who are late: who cannot be within the SLO any more goes behind those
who still can, by a multiple of the wait (`Order.set_back_waits`).

A rule knows the request, what is predicted of it, and the replica that was chosen; never the true
output. Its knob is tuned per scenario with the placement that it stands beside
(`pipelines/tune_baselines.py`). `PLACEMENT+ORDER` names the two together: `sed+sjf`.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tokenyard.config import did_you_mean
from tokenyard.routing.observation import WAIT_S, unranked_columns
from tokenyard.routing.policies.context import PolicyContext
from tokenyard.routing.policies.delay import (
    ADDED_DECODE_S,
    ADDED_FIRST_TOKEN_S,
    ADDED_WAIT_S,
    added_delays,
)
from tokenyard.routing.policies.order_spec import BY_SIZE, OrderSpec
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.policies.signals import (
    miss_tokens,
    prefill_token_s,
)
from tokenyard.routing.scores.order import (
    BOOST_S,
    FIRST_COME,
    PREFILL_WEIGHT,
    SERVICE_WEIGHT,
    SET_BACK_WAITS,
    fill_order_delays,
    order_delay_s,
    prefill_time_s,
)
from tokenyard.routing.types import (
    Decision,
    OrderKey,
    ReplicaSnapshot,
    Request,
    RoutingPolicy,
    ScoringPolicy,
    SnapshotColumns,
)
from tokenyard.types import FloatArray

IN_ORDER = "marginal_in_order"
"""Name of the placement that knows the order, and is none without."""


def service_s(request: Request, snapshot: ReplicaSnapshot) -> float:
    """Time from a request's start at a replica to its end, as the router knows it, seconds."""
    delays = added_delays(request, [snapshot])[0]
    return float(delays[ADDED_FIRST_TOKEN_S] - delays[ADDED_WAIT_S] + delays[ADDED_DECODE_S])


def prefill_s(request: Request, snapshot: ReplicaSnapshot) -> float:
    """Time that the uncached prompt takes; of a server without `engine` the whole service."""
    if snapshot.engine is None:
        return service_s(request, snapshot)
    return miss_tokens(request, snapshot) * prefill_token_s(snapshot)


class Order(ABC):
    """Says where a request takes its place among those that wait."""

    set_back_waits: float = 0.0
    """How far it goes back when it cannot be within its SLO any more, as a multiple of the wait
    that was to be expected when it was placed: at its replica, and before that at the gateway where
    it is held; 0: not at all."""

    @property
    @abstractmethod
    def spec(self) -> OrderSpec:
        """What its keys depend on beside the request and the replica."""

    @abstractmethod
    def delay_s(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        """Return how much later than at its arrival the request takes its place, seconds."""

    def delays_s(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """`delay_s` at every replica, shape (num_replicas,)."""
        return np.array([self.delay_s(request, snapshot) for snapshot in snapshots])

    def delay_at(self, request: Request, snapshots: Sequence[ReplicaSnapshot], index: int) -> float:
        """`delay_s` at one of several replicas, of which the others are not looked at, seconds."""
        return self.delay_s(request, snapshots[index])

    def key_at(
        self,
        request: Request,
        snapshots: Sequence[ReplicaSnapshot],
        index: int,
        delay_s: float | None = None,
    ) -> OrderKey:
        """Return a request's key in the queue of one replica.

        Args:
            request: Request just placed.
            snapshots: Snapshots of all replicas.
            index: Index of the chosen replica.
            delay_s: `delay_at` if known, seconds.
        """
        own_delay_s = self.delay_at(request, snapshots, index) if delay_s is None else delay_s
        key_s = request.arrival_s + own_delay_s
        if not self.set_back_waits:
            return OrderKey(key_s)
        if isinstance(snapshots, SnapshotColumns):
            row = snapshots.columns[index]
            takes_s, wait_s = prefill_time_s(*_lengths(request), row), float(row[WAIT_S])
        else:
            takes_s = prefill_s(request, snapshots[index])
            wait_s = float(added_delays(request, [snapshots[index]])[0, ADDED_WAIT_S])
        late_at_s = request.arrival_s + request.due_s - takes_s
        back_s = self.set_back_waits * (request.held_s + wait_s)
        return OrderKey(key_s, late_at_s, key_s + back_s)


class _BySize(Order):
    """An order by the time that a request takes (`tokenyard.routing.scores.order`)."""

    def __init__(self, which: int, weight: float) -> None:
        self._weights = FIRST_COME.copy()
        self._weights[which] = weight

    @property
    def spec(self) -> OrderSpec:
        """The weights, with the set-back in its place among them."""
        weights = self._weights.copy()
        weights[SET_BACK_WAITS] = self.set_back_waits
        return OrderSpec(BY_SIZE, tuple(weights.tolist()))

    def delay_s(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        """`delays_s` at one replica, seconds."""
        return float(self.delays_s(request, [snapshot])[0])

    def delays_s(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """`delay_s` at every replica, shape (num_replicas,)."""
        delays_s = np.empty(len(snapshots))
        fill_order_delays(self._weights, *_lengths(request), unranked_columns(snapshots), delays_s)
        return delays_s

    def delay_at(self, request: Request, snapshots: Sequence[ReplicaSnapshot], index: int) -> float:
        """`delay_s` at one of several replicas, of which the others are not looked at, seconds."""
        if not isinstance(snapshots, SnapshotColumns):
            return super().delay_at(request, snapshots, index)
        return order_delay_s(self._weights, *_lengths(request), snapshots.columns[index])


def _lengths(request: Request) -> tuple[float, float]:
    """Prompt and predicted output, tokens."""
    # Always floats: the compiled function would be compiled anew for other types.
    context = float(request.context_tokens)
    return context, float(request.predicted_total_tokens) - context


class ShortestJob(_BySize):
    """Shortest predicted service first, and older before newer: key = arrival + a x service.

    A second of waiting makes up for 1/a seconds of service; a = 20 is the priority
    `service - 0.05 x wait`. Shortest-first is optimal for the mean on one server that does not
    preempt (Phipps 1956); by predicted length for LLMs: Fu et al. 2024, arXiv:2408.15792.
    """

    def __init__(self, service_weight: float = 20.0) -> None:
        super().__init__(SERVICE_WEIGHT, service_weight)


class Wspt(_BySize):
    """Fewest prompt tokens to compute first: the queue of NVIDIA Dynamo's router, with ageing.

    Dynamo orders by `(1 + priority_jump) / tokens of the prompt`, the largest first (Smith's rule,
    1956), and never ages. Requests here have no jump. Prompts count as the time that they take at
    the replica without what it has cached.
    """

    def __init__(self, prefill_weight: float = 20.0) -> None:
        """Let a second of prefill count as `prefill_weight` seconds of waiting."""
        super().__init__(PREFILL_WEIGHT, prefill_weight)


class Boost(_BySize):
    """Short requests move up by a boost, key = arrival - b log(1 / (1 - exp(-size / b))).

    The boost tells short requests apart by the ratio of their sizes, and gives none to those that
    take much longer than b: nobody waits for what comes more than b log 1000 = 6.9 b later. On one
    server, with 1/b the decay rate of response times, no order has a lighter tail, and the mean is
    below that of first come, first served (the boost of Yu and Scully 2024, "Strongly tail-optimal
    scheduling in the light-tailed M/G/1", arXiv:2404.08826). The size is the time of the prompt
    without what is cached; of a server without `engine` the whole service. Keys here are later by
    the boost of the smallest size that is told apart, b / 1000, so that none is before the arrival.
    """

    def __init__(self, boost_s: float = 4.0) -> None:
        """Let sizes be short or long beside `boost_s`, b above, seconds."""
        super().__init__(BOOST_S, boost_s)


class LateLast(Order):
    """First come, first served, but those who are late go back by `set_back_waits` waits.

    To let late jobs go last makes the fewest late on one machine (Moore 1968, "An n job, one
    machine sequencing algorithm for minimizing the number of late jobs").
    """

    def __init__(self, set_back_waits: float = 2.0) -> None:
        self.set_back_waits = set_back_waits

    @property
    def spec(self) -> OrderSpec:
        """The set-back alone, among the weights of orders by size."""
        return OrderSpec(BY_SIZE, (*FIRST_COME[:SET_BACK_WAITS].tolist(), self.set_back_waits))

    def delay_s(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        """Return 0."""
        return 0.0


class EarliestDeadline(Order):
    """Earliest deadline first (Jackson 1955): key = arrival + a x SLO.

    The deadline is that of the first token where it has an SLO, else of the response. With one
    class it is first come, first served.
    """

    def __init__(self, due_weight: float = 1.0) -> None:
        self._due_weight = due_weight

    @property
    def spec(self) -> OrderSpec:
        """The weight and the set-back."""
        return OrderSpec("edf", (self._due_weight, self.set_back_waits))

    def delay_s(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        """Return the weighted SLO."""
        return self._due_weight * request.due_s


class LeastSlack(Order):
    """Least slack first: key = arrival + max(0, SLO - a x prefill).

    What must start soonest to be in time goes first; of one class that is the longest prompt.
    Source: least slack time (Dertouzos and Mok 1989).
    """

    def __init__(self, prefill_weight: float = 1.0) -> None:
        self._prefill_weight = prefill_weight

    @property
    def spec(self) -> OrderSpec:
        """The weight and the set-back."""
        return OrderSpec("slack", (self._prefill_weight, self.set_back_waits))

    def delay_s(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        """Return the slack."""
        return max(0.0, request.due_s - self._prefill_weight * prefill_s(request, snapshot))


FORGIVEN_LEAD_S = 30.0
"""Of tenants that are all ahead of the time by more, the rest is forgotten: they have filled what
others left, and what they owe each other is the difference."""


class FairShare(Order):
    """Tenants in proportion to their shares: virtual clocks (Zhang 1990).

    Each tenant has a clock that is never behind the time, and that each request moves on by its
    service over the tenant's share of all replicas. A request takes its place where its tenant's
    clock stands: who asks for no more than the share comes first come, first served; who asks for
    more waits behind. Kin: start-time fair queueing (Goyal et al. 1996); VTC for LLMs (Sheng et al.
    2024, arXiv:2401.00588).
    """

    def __init__(self, num_replicas: int, service_weight: float = 2.0) -> None:
        """Let clocks of tenants of `num_replicas` move on by the weighted service.

        With a weight of 1 they fall behind the time, and shares with them, where a replica is
        slower than it is said to be.
        """
        self._num_replicas = num_replicas
        self._service_weight = service_weight
        self._clocks_s: dict[str, float] = {}

    @property
    def spec(self) -> OrderSpec:
        """The weight, the number of replicas and the set-back."""
        knobs = (self._service_weight, float(self._num_replicas), self.set_back_waits)
        return OrderSpec("fair", knobs, counts_requests=True)

    def delay_s(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        """Return how far the tenant's clock is ahead, then move it on."""
        self._forgive(request.arrival_s)
        clock_s = max(self._clocks_s.get(request.tenant, -math.inf), request.arrival_s)
        taken_s = service_s(request, snapshot) / (snapshot.num_slots * self._num_replicas)
        self._clocks_s[request.tenant] = (
            clock_s + self._service_weight * taken_s / request.tenant_share
        )
        return clock_s - request.arrival_s

    def _forgive(self, now_s: float) -> None:
        """Let no clock run away for good where there is more to do than replicas can."""
        ahead = [clock_s for clock_s in self._clocks_s.values() if clock_s > now_s]
        excess_s = min(ahead, default=now_s) - now_s - FORGIVEN_LEAD_S
        if excess_s > 0.0:
            for tenant, clock_s in self._clocks_s.items():
                if clock_s > now_s:
                    self._clocks_s[tenant] = clock_s - excess_s


class Ordered:
    """A placement and an order: both decide about a request as it comes."""

    sees_queues = False

    def __init__(self, placement: RoutingPolicy, order: Order) -> None:
        self.placement = placement
        """Asked alone of a request that has its order key already."""
        self._order = order
        # Asked once: looking a protocol's methods up takes as long as a small decision.
        self._scoring = placement if isinstance(placement, ScoringPolicy) else None

    @property
    def order_spec(self) -> OrderSpec:
        """By which rule requests wait."""
        return self._order.spec

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the choice."""
        return self.place(request, snapshots).replica

    def place(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the choice with its order key."""
        scores = None
        if self._scoring is not None:
            decision = self._scoring.decide(request, snapshots)
            replica, scores = decision.replica, decision.scores
        else:
            replica = self.placement.route(request, snapshots)
        return Decision(replica, scores, self._order.key_at(request, snapshots, replica))


@dataclass(frozen=True)
class OrderRule:
    """One order: its class, the knob that is tuned, and whether it needs the number of replicas."""

    rule: type[Order]
    knob: str
    grid: tuple[float, ...]
    """Values tried of it; none is below 0."""
    few: tuple[float, ...] = ()
    """Those that are tried where every rule is played (`tokenyard.routing.rule_replay`)."""
    few_set_backs: tuple[float, ...] = ()
    """And what is tried there of `Order.set_back_waits` beside each of them."""
    counts_replicas: bool = False

    @property
    def default(self) -> float:
        """Return the knob's value where it was not tuned."""
        return float(inspect.signature(self.rule).parameters[self.knob].default)

    def make(self, num_replicas: int, knobs: Mapping[str, float]) -> Order:
        """Make it afresh; what is no knob of it is left out, and without its own it has defaults.

        Args:
            num_replicas: How many there are.
            knobs: `knob`, and `SET_BACK` of every order, by name.
        """
        own = {name: value for name, value in knobs.items() if name == self.knob}
        order = self.rule(*((num_replicas,) if self.counts_replicas else ()), **own)
        order.set_back_waits = knobs.get(SET_BACK, order.set_back_waits)
        return order


LATE_LAST = "late_last"
"""Name of the order whose only knob is the set-back."""
SET_BACK = "set_back_waits"
"""Name of the knob that every order has beside its own."""
SET_BACKS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Values tried of it."""
_WEIGHTS = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 35.0, 60.0, 100.0, 200.0)
_FEW_WEIGHTS = (1.0, 5.0, 20.0, 60.0, 200.0)
_BOOSTS_S = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 60.0)
ORDERS: dict[str, OrderRule] = {
    "sjf": OrderRule(ShortestJob, "service_weight", _WEIGHTS, _FEW_WEIGHTS),
    "wspt": OrderRule(Wspt, "prefill_weight", _WEIGHTS, _FEW_WEIGHTS),
    LATE_LAST: OrderRule(LateLast, SET_BACK, SET_BACKS, (0.5, 1.0, 2.0, 4.0)),
    "boost": OrderRule(Boost, "boost_s", _BOOSTS_S, (1.0, 4.0, 8.0, 16.0, 60.0), (1.0, 4.0)),
    "edf": OrderRule(EarliestDeadline, "due_weight", (0.25, 0.5, 1.0, 2.0, 4.0)),
    "slack": OrderRule(LeastSlack, "prefill_weight", (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)),
    "fair": OrderRule(
        FairShare, "service_weight", (0.25, 0.5, 1.0, 2.0, 4.0), counts_replicas=True
    ),
}
"""Name to order."""


def is_order(order: Term | None) -> bool:
    """Whether there is an order of that name, with or without knobs of its own."""
    return order is not None and order.base in ORDERS


def order_of(name: RuleName, context: PolicyContext) -> Order:
    """Make the order of a rule afresh, as it was tuned beside its placement.

    With knobs in its name these apply: `sed+sjf@5` has the knob 5, and `sed+sjf@5:2` also sets late
    requests back by twice the wait.

    Raises:
        ValueError: There is no such order, or its knobs are not one or two numbers from 0 on.
    """
    order = name.order or Term("")
    rule = ORDERS.get(order.base)
    if rule is None:
        hint = did_you_mean(order.base, ORDERS)
        raise ValueError(f"unknown order {order.base!r}; choose one of {sorted(ORDERS)}{hint}")
    knobs = context.order_knobs(str(name)) if order.numbers is None else knobs_of(order)
    return rule.make(context.num_replicas, knobs)


def knobs_of(order: Term) -> dict[str, float]:
    """Knobs that an order's name gives it, by name.

    Raises:
        ValueError: They are not one or two numbers from 0 on.
    """
    values = order.values()
    names = dict.fromkeys((ORDERS[order.base].knob, SET_BACK))
    if len(values) > len(names):
        raise ValueError(f"{str(order)!r} has {len(values)} numbers behind @; give {len(names)}")
    return dict(zip(names, values, strict=False))

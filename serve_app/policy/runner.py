"""One policy behind its circuit breaker: asked within a budget, and skipped after failures.

Every policy has a breaker of its own, so that a canary that hangs costs the champion nothing.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy.loading import LoadedPolicy
from serve_app.policy.ties import least_recently_used
from serve_app.policy.timeouts import Timeouts, TooSlow
from tokenyard.routing.policies.delay import mark_safe
from tokenyard.routing.policies.order import Ordered
from tokenyard.routing.policies.order_spec import order_spec
from tokenyard.routing.snapshot_table import SnapshotTable
from tokenyard.routing.types import (
    Decision,
    EngineSnapshot,
    OrderingPolicy,
    OrderKey,
    ReplicaSnapshot,
    Request,
    RoutingPolicy,
    ScoringPolicy,
    SnapshotColumns,
)
from tokenyard.types import FloatArray

logger = logging.getLogger(__name__)

Reason = Literal["error", "too_slow", "breaker_open", "stale", "incompatible", "missing"]
"""Why a policy did not decide: it failed, it hung, it is skipped after that, nothing current is
known of the replicas, it is not for these replicas, or it was not found at the start."""
RAY_DEFAULT = "ray_default"
"""Name of Ray Serve's own router among the policies."""
Arm = Literal["champion", "canary"]
BreakerState = Literal["closed", "open", "half-open"]
_HALF_OPEN_DECISIONS = 100
"""Decisions that a policy which was too slow makes in a thread before its breaker closes."""


class IncompatibleRequest(ValueError):
    """A request that the policy cannot decide; the text says why."""


# Not frozen: that takes four times as long to make, and every request makes one.
@dataclass(slots=True, eq=False)
class ReplicaChoice:
    """What was decided for one request, by whom, and what was known."""

    request: Request
    snapshots: Sequence[ReplicaSnapshot]
    """Candidates."""
    policy: str
    """`name@sha256`."""
    index: int
    """Index of the chosen candidate."""
    scores: FloatArray | None
    """Cost of every candidate, shape (num,); None for policies that do not score."""
    propensity: float | None
    """Probability with which `index` was chosen; None: the policy draws and does not tell."""
    explored: bool
    decision_us: float
    fallback_reason: Reason | None = None
    """Why the baseline decided; None: the policy did, or nobody was to be asked."""
    order_key: OrderKey | None = None
    """Place among the requests that wait, lower first, Unix time, seconds; None: behind them all,
    or it was not asked for."""
    arm: Arm = "champion"
    """The arm whose decision it was while a canary had its share."""
    mlflow_run: str | None = None
    """Run that trained the policy, where it comes from the registry."""


@dataclass
class DecisionCounts:
    """Decisions, and those that were not the policy's own."""

    num_decisions: int = 0
    num_explored: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Counts by reason."""

    def add(self, choice: ReplicaChoice) -> None:
        """Count one."""
        self.num_decisions += 1
        self.num_explored += choice.explored
        if choice.fallback_reason is not None:
            self.fallbacks[choice.fallback_reason] += 1


class CircuitBreaker:
    """Closed: the policy is asked. Open: it is skipped for a while. Half-open: on a hard limit.

    A policy that was too slow is half-open once it is asked again: in a thread that can be given
    up whatever it does. After enough decisions in time the breaker closes.
    """

    def __init__(self, settings: CircuitBreakerSettings, clock_s: Callable[[], float]) -> None:
        self._settings = settings
        self._clock_s = clock_s
        self.num_opened = 0
        self._failures_in_a_row = 0
        self._open_until_s = -math.inf
        self._half_open_left = 0

    @property
    def state(self) -> BreakerState:
        """What it is now."""
        if self._clock_s() < self._open_until_s:
            return "open"
        return "half-open" if self._half_open_left else "closed"

    def saved(self) -> dict[str, float]:
        """All of it; times from now on, seconds."""
        return {
            "num_opened": self.num_opened,
            "failures_in_a_row": self._failures_in_a_row,
            "half_open_left": self._half_open_left,
            "open_for_s": max(self._open_until_s - self._clock_s(), 0.0),
        }

    def restore(self, saved: Mapping[str, float]) -> None:
        """Take up what was saved, as if no time had passed."""
        open_for_s = min(float(saved["open_for_s"]), self._settings.cool_down_s)
        self.num_opened = int(saved["num_opened"])
        self._failures_in_a_row = int(saved["failures_in_a_row"])
        self._half_open_left = min(int(saved["half_open_left"]), _HALF_OPEN_DECISIONS)
        self._open_until_s = self._clock_s() + open_for_s if open_for_s > 0.0 else -math.inf

    def succeed(self) -> None:
        """Note a decision."""
        self._failures_in_a_row = 0
        self._half_open_left = max(self._half_open_left - 1, 0)

    def fail(self, too_slow: bool) -> bool:
        """Note a failure; return whether that opens the breaker."""
        self._failures_in_a_row += 1
        if too_slow:
            self._half_open_left = _HALF_OPEN_DECISIONS
        elif self._failures_in_a_row < self._settings.failures_to_open:
            return False
        self.num_opened += 1
        self._failures_in_a_row = 0
        self._open_until_s = self._clock_s() + self._settings.cool_down_s
        return True


def is_same(label: str, other: str) -> bool:
    """Whether two labels are of one policy, which may be found by several names."""
    return label.rpartition("@")[2] == other.rpartition("@")[2]


class PolicyRunner:
    """A policy that may decide; used from one thread, since policies remember."""

    def __init__(
        self,
        name: str,
        loaded: LoadedPolicy,
        breaker: CircuitBreaker,
        timeouts: Timeouts,
        rng: np.random.Generator,
        explore_fraction: float = 0.0,
        decides: bool = True,
    ) -> None:
        self.name, self.loaded, self.breaker = name, loaded, breaker
        self.rng, self.explore_fraction = rng, explore_fraction
        self.decides = decides
        """False: it is never asked, since Ray decides or nobody was asked for."""
        card, by_ray = loaded.card, name == RAY_DEFAULT
        self.label = RAY_DEFAULT if by_ray else f"{card.name}@{card.sha256}"
        self.mlflow_run = None if by_ray else card.mlflow_run
        self.counts = DecisionCounts()
        self.by_hand = False
        """Whether it was asked for in place of what the cluster file names."""
        self.aliases: Mapping[str, str] | None = None
        """The aliases that the registry should have while it decides; None: as they are."""
        self._timeouts = timeouts
        self._start()

    def decide(
        self,
        request: Request,
        snapshots: Sequence[ReplicaSnapshot],
        stale: bool = False,
        has_key: bool = False,
    ) -> Decision | Reason:
        """Return the policy's decision, or why there is none; whatever the policy does.

        `stale`: no candidate was heard of lately. `has_key`: the request has its order key already,
        and orders that count what they are asked must count it once.
        """
        if self.loaded.card.startup_fallback is not None:
            return "missing"
        if stale:
            return "stale"
        state = self.breaker.state
        if state == "open":
            return "breaker_open"
        try:
            self.check_compatible(snapshots)
            timeout = self._timeouts.inline if state == "closed" else self._timeouts.thread
            decide = self._decide_place if has_key else self._decide
            decision = timeout.call(decide, request, snapshots)
            _check(decision, len(snapshots))
        except IncompatibleRequest:
            return "incompatible"
        except TooSlow as error:
            return self._fail("too_slow", str(error))
        except Exception as error:  # A request must be placed whatever is wrong with the policy.
            return self._fail("error", repr(error))
        self.breaker.succeed()
        return decision

    def check_compatible(self, snapshots: Sequence[ReplicaSnapshot]) -> None:
        """Refuse (IncompatibleRequest) replicas that the policy is not for."""
        card = self.loaded.card
        if card.num_replicas not in (None, len(snapshots)):
            raise IncompatibleRequest(
                f"policy {card.name!r} decides between {card.num_replicas} replicas, "
                f"got {len(snapshots)} snapshots"
            )
        if card.needs_engine is None or (
            isinstance(snapshots, SnapshotColumns) and card.needs_engine == snapshots.batches
        ):
            return
        for snapshot in snapshots:
            if card.needs_engine != (snapshot.engine is not None):
                which, do = "was trained on replicas that do not batch", "leave `engine` out of"
                if card.needs_engine:
                    which, do = "is for replicas that batch continuously", "give `engine` in"
                raise IncompatibleRequest(
                    f"policy {card.name!r} {which}: {do} the snapshot of {snapshot.replica_id!r}"
                )

    def _fail(self, reason: Literal["error", "too_slow"], text: str) -> Reason:
        logger.warning("policy %s: %s: %s", self.name, reason, text)
        if self.breaker.fail(too_slow=reason == "too_slow"):
            logger.warning("policy %s: its circuit breaker opens", self.name)
            self._start()  # What the policy remembers may be broken.
        return reason

    def _start(self) -> None:
        # Asked once: looking a protocol's methods up takes as long as a small decision.
        policy = self.loaded.make(self.rng.spawn(1)[0])
        self.orders = isinstance(policy, OrderingPolicy)
        """Whether it says in which order requests wait."""
        self.sees_queues = isinstance(policy, OrderingPolicy) and policy.sees_queues
        """Whether it looks at what waits, request by request."""
        self.order = order_spec(policy)
        """Order in which its requests wait; None: first come, first served."""
        self._decide, self._decide_place = deciders_of(policy)


Decide = Callable[[Request, Sequence[ReplicaSnapshot]], Decision]


def deciders_of(policy: RoutingPolicy) -> tuple[Decide, Decide]:
    """Return what asks a policy for place and order, and for the place alone."""
    decide = _decide_by(policy)
    return decide, _decide_by(policy.placement) if isinstance(policy, Ordered) else decide


def _decide_by(policy: RoutingPolicy) -> Decide:
    if isinstance(policy, OrderingPolicy):
        return policy.place
    if isinstance(policy, ScoringPolicy):
        return policy.decide
    return lambda request, snapshots: Decision(policy.route(request, snapshots), None)


def warm_up(loaded: LoadedPolicy) -> None:
    """Decide with a policy that is thrown away, so that compiled code is loaded and ready.

    What is left to compile takes longer than a decision may, and is interrupted every time: such a
    policy never decides. So it is asked as `PolicyRunner` asks, and for order keys too.
    """
    engine = EngineSnapshot(0.01, 1e-4, 1e-4, 1e-6, 512, 1e5, 0.0, 0.0, 0.0, 0)
    request = Request(0.0, 1, 2.0)
    kinds = {True: (engine,), False: (None,), None: (engine, None)}
    # A column of a table of one row is contiguous, and of several is not: two types.
    nums = (1, 2) if loaded.card.num_replicas is None else (loaded.card.num_replicas,)
    for kind in kinds[loaded.card.needs_engine]:
        idle = ReplicaSnapshot("emulated", 1000.0, 1, 1, 0, 0, 0.0, engine=kind)
        for decide in deciders_of(loaded.make(np.random.default_rng(0))):
            for num in nums:
                decide(request, [idle] * num)
                if kind is not None:
                    decide(request, SnapshotTable.idle(num))  # As a gateway shows its replicas.
        mark_safe(request, [idle], loaded.card.slo_response_s)  # Exploration asks it.
        least_recently_used([idle], 0, [0.0])


def _check(decision: Decision, num_replicas: int) -> None:
    if not 0 <= decision.replica < num_replicas:
        raise ValueError(f"chose replica {decision.replica} of {num_replicas}")
    if decision.order_key is not None and any(map(math.isnan, decision.order_key)):
        raise ValueError("its order key is no number")
    scores = decision.scores
    # The sum of all is quicker to look at; that of large ones may overflow.
    if scores is None or math.isfinite(np.add.reduce(scores)):
        return
    if not np.isfinite(scores).all():
        raise ValueError(f"costs are not finite: {decision.scores}")

"""One routing decision: the policy's choice, its safety net, and a little exploration."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from serve_app.policy.loading import LoadedPolicy
from tokenyard.policies.delay import ShortestExpectedDelay, finish_times_s
from tokenyard.types import Decision, ReplicaSnapshot, Request, RoutingPolicy, ScoringPolicy

logger = logging.getLogger(__name__)

MAX_EXPLORE_FRACTION = 0.05


class IncompatibleRequest(ValueError):
    """A request that the served policy cannot decide; the text says why."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided for one request."""

    index: int
    scores: tuple[float, ...] | None
    """Cost of every candidate; None for policies that do not score."""
    propensity: float | None
    """Probability with which `index` was chosen; None: the policy draws and does not tell."""
    explored: bool
    fallback: bool
    decision_us: float
    fallback_reason: str | None = None
    """Why the policy did not decide, one of `serve_app.policy.manager.REASONS`; None:
    it did, or a lone `Decider` answered."""


class Decider:
    """Decides request after request; not thread-safe, since policies remember.

    Where the policy fails, shortest expected delay decides. A share `explore_fraction` of the
    decisions is drawn uniformly from the replicas that are below capacity and expected to finish
    within the SLO, so that the log can judge other policies; where there are fewer than two of
    them nothing is risked.
    """

    def __init__(
        self, loaded: LoadedPolicy, rng: np.random.Generator, explore_fraction: float = 0.0
    ) -> None:
        """Make the policy.

        Raises:
            ValueError: `explore_fraction` is out of range, or the policy draws by itself.
        """
        check_exploration(loaded, explore_fraction)
        self.loaded = loaded
        self.explore_fraction = explore_fraction
        self.num_decisions = 0
        self.num_fallbacks = 0
        self.num_explored = 0
        self._rng, policy_rng = rng.spawn(2)
        self._policy = loaded.make(policy_rng)
        # Asked once: looking a protocol's methods up takes as long as a small decision.
        self._decide = _decide_by(self._policy)
        self._sed = ShortestExpectedDelay()

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Choice:
        """Choose the replica for `request`.

        Raises:
            UnfitRequest: The policy decides between another number of replicas, or needs to know
                more of them.
        """
        self._check_count(len(snapshots))
        self._check_engines(snapshots)
        started_ns = time.perf_counter_ns()
        decision, failed = self._ask(request, snapshots)
        index, propensity = decision.replica, None if self.loaded.draws else 1.0
        if self.explore_fraction:
            index, propensity = self._explore(request, snapshots, decision.replica)
        explored = index != decision.replica
        decision_us = (time.perf_counter_ns() - started_ns) / 1e3
        self.num_decisions += 1
        self.num_explored += explored
        fallback = failed or self.loaded.card.startup_fallback is not None
        return Choice(index, decision.scores, propensity, explored, fallback, decision_us)

    def _check_count(self, offered: int) -> None:
        expected = self.loaded.card.num_replicas
        if expected is not None and offered != expected:
            raise IncompatibleRequest(
                f"policy {self.loaded.card.name!r} decides between {expected} replicas, "
                f"got {offered} snapshots"
            )

    def _check_engines(self, snapshots: Sequence[ReplicaSnapshot]) -> None:
        needed = self.loaded.card.needs_engine
        if needed is None:
            return
        for snapshot in snapshots:
            if needed and snapshot.engine is None:
                raise IncompatibleRequest(
                    f"policy {self.loaded.card.name!r} is for replicas that batch continuously: "
                    f"give `engine` in the snapshot of {snapshot.replica_id!r}"
                )
            if not needed and snapshot.engine is not None:
                raise IncompatibleRequest(
                    f"policy {self.loaded.card.name!r} was trained on replicas that do not batch: "
                    f"leave `engine` out of the snapshot of {snapshot.replica_id!r}"
                )

    def _ask(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> tuple[Decision, bool]:
        try:
            return self._checked_decision(request, snapshots), False
        except Exception as error:  # A request must be placed whatever is wrong with the policy.
            self.num_fallbacks += 1
            logger.warning(
                "policy %s failed, SED decides (%d so far): %r",
                self.loaded.card.name,
                self.num_fallbacks,
                error,
            )
            return self._sed.decide(request, snapshots), True

    def _checked_decision(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        decision = self._decide(request, snapshots)
        if not 0 <= decision.replica < len(snapshots):
            raise ValueError(f"chose replica {decision.replica} of {len(snapshots)}")
        if decision.scores is not None and not all(map(math.isfinite, decision.scores)):
            raise ValueError(f"costs are not finite: {decision.scores}")
        return decision

    def _explore(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot], preferred: int
    ) -> tuple[int, float]:
        """Maybe draw another replica, and say how likely the returned one was."""
        safe = [
            i
            for i, finish_s in enumerate(finish_times_s(request, snapshots))
            if finish_s <= self.loaded.card.slo_response_s
            and snapshots[i].num_outstanding < snapshots[i].max_concurrency
        ]
        if len(safe) < 2:
            return preferred, 1.0
        chosen = preferred
        if self._rng.random() < self.explore_fraction:
            chosen = safe[int(self._rng.integers(len(safe)))]
        propensity = self.explore_fraction / len(safe) if chosen in safe else 0.0
        if chosen == preferred:
            propensity += 1.0 - self.explore_fraction
        return chosen, propensity


def check_exploration(loaded: LoadedPolicy, explore_fraction: float) -> None:
    """Refuse a share that is out of range, or that has no meaning for the policy.

    Raises:
        ValueError: It is not in [0, MAX_EXPLORE_FRACTION], or the policy draws by itself.
    """
    if not 0.0 <= explore_fraction <= MAX_EXPLORE_FRACTION:
        raise ValueError(
            f"explore fraction {explore_fraction} must lie between 0 and {MAX_EXPLORE_FRACTION}"
        )
    if explore_fraction and loaded.draws:
        raise ValueError(
            f"policy {loaded.card.name!r} draws its choices already: explore with one that does not"
        )


def _decide_by(
    policy: RoutingPolicy,
) -> Callable[[Request, Sequence[ReplicaSnapshot]], Decision]:
    if isinstance(policy, ScoringPolicy):
        return policy.decide
    return lambda request, snapshots: Decision(policy.route(request, snapshots), None)

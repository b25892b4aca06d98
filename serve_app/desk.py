"""Who decides now: the policy, kept on a short leash, and the rule that stands in for it."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from serve_app.bounded import BoundedCaller, TooSlow, WatchedCaller
from serve_app.decider import Choice, Decider, UnfitRequest, check_exploration
from serve_app.pools import Trust
from serve_app.served import ServedPolicy, rehearse, resolve_policy
from tokenyard.artifact import ArtifactError
from tokenyard.types import ReplicaSnapshot, Request

logger = logging.getLogger(__name__)

RAY_DEFAULT = "ray_default"
"""Name of Ray Serve's own router among the policies."""
REASONS = ("error", "too_slow", "resting", "stale", "unfit", "missing")
"""Why the baseline decided: the policy failed, hung, is left alone after that, knows nothing
current, is not for these replicas, or was not found at the start."""
_REHEARSAL_S = 30.0
_NUM_TIMES = 1000
_PATIENCE = 5.0
"""Budgets that may pass on a machine that is busy with other things."""
_PROBATION = 100
"""Decisions that a policy which was too slow makes in a thread before it is trusted again."""


class PolicyDesk:
    """Picks replicas by a policy that can be changed; where it fails, by a baseline, at once.

    Not thread-safe: one event loop uses it.
    """

    def __init__(
        self,
        scenario: str,
        baseline: str,
        trust: Trust,
        rng: np.random.Generator,
        registry: str | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the baseline; it decides until `switch` is called.

        Args:
            scenario: Whose champion, tuned rules and predictor are used.
            baseline: Name of the rule that stands in.
            trust: When the policy is left alone.
            rng: Source of exploration and of policies that draw.
            registry: MLflow URI where champions are looked up.
            clock_s: Any clock that does not go back, seconds.

        Raises:
            ValueError: The baseline is not known.
        """
        self._scenario = scenario
        self._trust = trust
        self._rng = rng
        self._registry = registry
        self._clock_s = clock_s
        self._trusted = WatchedCaller(trust.budget_s, _PATIENCE)
        self._suspected = BoundedCaller(trust.budget_s * _PATIENCE)
        self._probation = 0
        served = resolve_policy(baseline, scenario)
        rehearse(served)
        self._baseline = Decider(served, rng.spawn(1)[0])
        self.baseline = baseline
        self.served = served
        self.name = baseline
        self.explore_fraction = 0.0
        self.missing: str | None = None
        """Why the policy that was asked for is not there."""
        self.num_decisions = 0
        self.num_explored = 0
        self.fallbacks: Counter[str] = Counter()
        self.decision_us: deque[float] = deque(maxlen=_NUM_TIMES)
        """Times of the last decisions, the baseline's in their place included, microseconds."""
        self._decider: Decider | None = None
        self._failures_in_a_row = 0
        self._rests_until_s = -np.inf

    @property
    def rests(self) -> bool:
        """Whether the policy is left alone for now."""
        return self._clock_s() < self._rests_until_s

    def predicted_total_tokens(self, context_tokens: int) -> float:
        """Predicted size of a request of that context, tokens."""
        return self.served.predicted_total_tokens(context_tokens)

    def switch(
        self, policy: str, explore_fraction: float = 0.0, may_be_missing: bool = False
    ) -> None:
        """Let another policy decide from now on; counters go on.

        Args:
            policy: `champion`, `generic`, a policy file (.npz), a rule's name, or `ray_default`.
            explore_fraction: Share of its decisions drawn at random; none where it draws itself.
            may_be_missing: Let the baseline stand in for a trained policy that is not there.

        Raises:
            ValueError: It is not known, cannot be used, or does not get through a rehearsal; what
                decided before goes on.
        """
        missing = None
        if policy == RAY_DEFAULT:
            served, decider, explore_fraction = self._baseline.served, None, 0.0
        else:
            try:
                served = resolve_policy(policy, self._scenario, self._registry)
            except ArtifactError as error:
                if not may_be_missing:
                    raise
                missing, served = str(error), self._baseline.served
                logger.warning("%s decides: %s", self.baseline, missing)
            explore_fraction = 0.0 if served.draws else explore_fraction
            check_exploration(served, explore_fraction)
            _rehearse(served)
            decider = Decider(served, self._rng.spawn(1)[0], explore_fraction)
        self.name, self.served, self.missing = policy, served, missing
        self.explore_fraction, self._decider = explore_fraction, decider
        self._failures_in_a_row, self._rests_until_s, self._probation = 0, -np.inf, 0

    def pick(self, request: Request, snapshots: Sequence[ReplicaSnapshot], stale: bool) -> Choice:
        """Choose the replica for a request, whatever is wrong with the policy.

        Args:
            request: To be placed.
            snapshots: Candidates, at least one.
            stale: Whether none of them was heard of lately.
        """
        started_ns = time.perf_counter_ns()
        choice, reason = self._ask(request, snapshots, stale)
        if choice is None:
            choice = self._baseline.decide(request, snapshots)
        decision_us = (time.perf_counter_ns() - started_ns) / 1e3
        choice = replace(
            choice, decision_us=decision_us, fallback=reason is not None, fallback_reason=reason
        )
        self.num_decisions += 1
        self.num_explored += choice.explored
        self.decision_us.append(decision_us)
        if reason is not None:
            self.fallbacks[reason] += 1
        return choice

    def stop(self) -> None:
        """End the policy's thread."""
        self._trusted.stop()
        self._suspected.stop()

    def _ask(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot], stale: bool
    ) -> tuple[Choice | None, str | None]:
        """Return the policy's choice, or None and why there is none."""
        if self.missing is not None:
            return None, "missing"
        if self._decider is None:
            return None, None  # Ray decides, or nobody was asked for: the baseline is no fallback.
        if stale:
            return None, "stale"
        if self.rests:
            return None, "resting"
        caller = self._suspected if self._probation else self._trusted
        try:
            choice = caller.call(partial(self._decider.decide, request, snapshots))
        except UnfitRequest as error:
            logger.debug("%s", error)
            return None, "unfit"
        except TooSlow as error:
            self._probation = _PROBATION
            self._rest(str(error))
            return None, "too_slow"
        if choice.fallback:
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= self._trust.failures_to_open:
                self._rest("it failed again and again")
            return None, "error"
        self._failures_in_a_row = 0
        self._probation = max(self._probation - 1, 0)
        return choice, None

    def _rest(self, reason: str) -> None:
        """Leave the policy alone for a while; what it remembers may be broken by then."""
        logger.warning("policy %s rests for %g s: %s", self.name, self._trust.cool_down_s, reason)
        self._rests_until_s = self._clock_s() + self._trust.cool_down_s
        self._failures_in_a_row = 0
        self._decider = Decider(self.served, self._rng.spawn(1)[0], self.explore_fraction)


def _rehearse(served: ServedPolicy) -> None:
    """Let a policy decide once before it may, within a time.

    Raises:
        ValueError: It does not.
    """
    caller = BoundedCaller(_REHEARSAL_S)
    try:
        caller.call(partial(rehearse, served))
    except Exception as error:
        raise ValueError(f"policy {served.card.name!r} fails its rehearsal: {error}") from None
    finally:
        caller.stop()

"""A policy on a short leash: asked within a budget, and left alone after it has failed.

Every policy has a breaker of its own, so that a canary that hangs costs the champion nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy.decider import Choice, Decider, IncompatibleRequest, check_exploration
from serve_app.policy.loading import LoadedPolicy
from serve_app.policy.timeouts import InlineTimeout, ThreadTimeout, TooSlow
from tokenyard.types import ReplicaSnapshot, Request

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Budgets that may pass on a machine that is busy with other things."""
_PROBATION = 100
"""Decisions that a policy which was too slow makes in a thread before it is trusted again."""


class Timeouts:
    """Who makes the calls, one after another, for all policies of a desk."""

    def __init__(self, circuit_breaker: CircuitBreakerSettings) -> None:
        """Start the watch."""
        self.trusted = InlineTimeout(circuit_breaker.budget_s, _PATIENCE)
        self.suspected = ThreadTimeout(circuit_breaker.budget_s * _PATIENCE)

    def stop(self) -> None:
        """End the threads."""
        self.trusted.stop()
        self.suspected.stop()


@dataclass
class PolicyRunner:
    """A policy that may decide, and what came of it; used from one thread."""

    name: str
    """As it was asked for."""
    loaded: LoadedPolicy
    circuit_breaker: CircuitBreakerSettings
    rng: np.random.Generator
    timeouts: Timeouts
    clock_s: Callable[[], float]
    """Any clock that does not go back, seconds."""
    explore_fraction: float = 0.0
    missing: str | None = None
    """Why the policy that was asked for is not there; the baseline decides."""

    def __post_init__(self) -> None:
        """Make the policy.

        Raises:
            ValueError: The exploration is not one that it can have.
        """
        check_exploration(self.loaded, self.explore_fraction)
        self.num_decisions = 0
        self.num_opened = 0
        """Times that the breaker opened."""
        self.fallbacks: Counter[str] = Counter()
        self._failures_in_a_row = 0
        self._rests_until_s = -np.inf
        self._probation = 0
        self._decider = self._make()

    @property
    def rests(self) -> bool:
        """Whether the breaker is open: the policy is left alone for now."""
        return bool(self.clock_s() < self._rests_until_s)

    @property
    def on_probation(self) -> bool:
        """Whether it was too slow lately, and is asked in a thread."""
        return self._probation > 0

    @property
    def label(self) -> str:
        """`name@version`."""
        return f"{self.loaded.card.name}@{self.loaded.card.version}"

    def ask(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot], stale: bool
    ) -> tuple[Choice | None, str | None]:
        """Return the policy's choice, or None and why there is none, and count it."""
        choice, reason = self._ask(request, snapshots, stale)
        self.num_decisions += 1
        if reason is not None:
            self.fallbacks[reason] += 1
        return choice, reason

    def _ask(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot], stale: bool
    ) -> tuple[Choice | None, str | None]:
        if self.missing is not None:
            return None, "missing"
        if stale:
            return None, "stale"
        if self.rests:
            return None, "breaker_open"
        caller = self.timeouts.suspected if self._probation else self.timeouts.trusted
        try:
            choice = caller.call(partial(self._decider.decide, request, snapshots))
        except IncompatibleRequest as error:
            logger.debug("%s", error)
            return None, "incompatible"
        except TooSlow as error:
            self._probation = _PROBATION
            self._rest(str(error))
            return None, "too_slow"
        if choice.fallback:
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= self.circuit_breaker.failures_to_open:
                self._rest("it failed again and again")
            return None, "error"
        self._failures_in_a_row = 0
        self._probation = max(self._probation - 1, 0)
        return choice, None

    def _rest(self, reason: str) -> None:
        """Open the breaker for a while; what the policy remembers may be broken by then."""
        logger.warning(
            "policy %s rests for %g s: %s", self.name, self.circuit_breaker.cool_down_s, reason
        )
        self.num_opened += 1
        self._rests_until_s = self.clock_s() + self.circuit_breaker.cool_down_s
        self._failures_in_a_row = 0
        self._decider = self._make()

    def _make(self) -> Decider:
        return Decider(self.loaded, self.rng.spawn(1)[0], self.explore_fraction)

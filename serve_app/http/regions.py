"""Decisions about regions: by the shipped rule, then prox_ot; then everything stays local."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict

from fastapi import APIRouter, Depends
from prometheus_client import CollectorRegistry, Counter, Histogram

from serve_app.http.auth import Access
from serve_app.http.decide_schema import Problem
from serve_app.http.errors import PROBLEMS
from serve_app.http.regions_schema import RegionsAnswer, RegionsCard, RegionsMessage
from tokenyard.problem import RULE
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.policies import BEST_RULE, REGION_BASELINES
from tokenyard.regions.types import RegionDecision, RegionPolicy, RegionState, check_decision

logger = logging.getLogger(__name__)

FALLBACKS = ("prox_ot", "local_first")
MAX_FORECAST_AGE_SLOTS = 4.0
_TIMES_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)


class RegionDecider:
    """Decides about regions even where the policy fails; counts who decided.

    Fallbacks go by the last arrivals, so no forecast can mislead them.
    """

    def __init__(
        self,
        policy: RegionPolicy,
        name: str = BEST_RULE,
        source: str = "",
        version: str = "",
        rule: ActivationRule | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        rule = rule or ActivationRule()
        self._policy = policy
        self._name, self._source, self._version = name, source, version
        self._fallbacks = [
            (fallback, REGION_BASELINES[fallback].tuned(rule)) for fallback in FALLBACKS
        ]
        self._num_decisions = 0
        self._counted: dict[str, int] = {}
        self.registry = registry or CollectorRegistry()
        self._decisions = Counter(
            "tokenyard_region_decisions", "Decisions about regions, by the policy that decided.",
            ["policy"], registry=self.registry,
        )  # fmt: skip
        self._failures = Counter(
            "tokenyard_region_fallbacks",
            "Decisions about regions that a fallback made in the policy's place.",
            ["reason", "policy"], registry=self.registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "tokenyard_region_decision_seconds", "Time to decide about regions.",
            buckets=_TIMES_S, registry=self.registry,
        )  # fmt: skip

    @classmethod
    def shipped(cls, registry: CollectorRegistry | None = None) -> RegionDecider:
        """Make the decider of the shipped rule."""
        rule = ActivationRule()
        policy = REGION_BASELINES[BEST_RULE].tuned(rule)
        return cls(policy, BEST_RULE, RULE, rule=rule, registry=registry)

    def decide(self, message: RegionsMessage) -> RegionsAnswer:
        """Decide by the first policy with a usable answer, and count it."""
        started = time.perf_counter()
        decision, name, reason = self._decide(message)
        elapsed = time.perf_counter() - started
        self._num_decisions += 1
        self._decisions.labels(name).inc()
        self._seconds.observe(elapsed)
        if reason is not None:
            self._failures.labels(reason, name).inc()
            key = f"{reason}:{name}"
            self._counted[key] = self._counted.get(key, 0) + 1
        return RegionsAnswer(
            decision_id=uuid.uuid4().hex,
            region_ids=[region.region_id for region in message.regions],
            shares=decision.shares.tolist(),
            active=decision.active.tolist(),
            dispatch=decision.dispatch,
            live=asdict(decision.live),
            policy=name,
            fallback_reason=reason,
            decision_us=1e6 * elapsed,
        )

    def describe(self) -> RegionsCard:
        """Return the policy, and the counts since the start."""
        return RegionsCard(
            policy=self._name, source=self._source, version=self._version,
            num_decisions=self._num_decisions, fallbacks=dict(self._counted),
        )  # fmt: skip

    def _decide(self, message: RegionsMessage) -> tuple[RegionDecision, str, str | None]:
        reason: str | None = None
        if not message.has_forecast:
            reason = "no_forecast"
        elif message.forecast_age_slots > MAX_FORECAST_AGE_SLOTS:
            reason = "stale_forecast"
        else:
            try:
                return _checked(self._policy, message.to_state(True)), self._name, None
            except Unusable as error:
                reason = "unusable"
                logger.warning("policy %s: %s", self._name, error)
            except Exception:
                reason = "error"
                logger.exception("policy %s failed", self._name)
        return *_first_usable(self._fallbacks, message.to_state(False)), reason


class Unusable(ValueError):
    """An answer has NaN, or rows that are no shares."""


def _checked(policy: RegionPolicy, state: RegionState) -> RegionDecision:
    decision = policy.decide(state)
    try:
        check_decision(decision, state.num_regions)
    except ValueError as error:
        raise Unusable(str(error)) from None
    return decision


def _first_usable(
    policies: Sequence[tuple[str, RegionPolicy]], state: RegionState
) -> tuple[RegionDecision, str]:
    for name, policy in policies[:-1]:
        try:
            return _checked(policy, state), name
        except Exception:
            logger.exception("fallback %s failed", name)
    name, policy = policies[-1]
    return policy.decide(state), name


def make_router(decider: RegionDecider, access: Access) -> APIRouter:
    """Make `/v1/regions` for a decider."""
    router, is_authorized = APIRouter(), [Depends(access.is_authorized)]
    turn = asyncio.Lock()

    @router.post("/v1/regions", dependencies=is_authorized, responses=PROBLEMS)
    async def regions(message: RegionsMessage) -> RegionsAnswer:
        """Decide shares and servers for the slot that begins."""
        # Off the event loop, as many regions take long; in turn, as policies remember.
        async with turn:
            return await asyncio.to_thread(decider.decide, message)

    @router.get("/v1/regions", dependencies=is_authorized, responses={401: {"model": Problem}})
    async def describe() -> RegionsCard:
        """Describe the policy that decides about regions, and count its decisions."""
        return decider.describe()

    return router

"""Requests that wait at the gateway while every replica for them is full.

They wait in one line by their order keys. As soon as a replica has room, the policy that decides
then chooses for the first of them, from what is known then (late binding). An engine's own queue
so stays as short as its pool's `max_ongoing`, and its order is the gateway's. Where sessions are
looked at, a replica has room only if its KV memory has, too (`serve_app.gateway.sessions`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from serve_app.cluster import QueueSettings
from serve_app.engines.waiting import WaitingLine
from serve_app.gateway.answer import Answer
from serve_app.gateway.decision_record import Pick
from serve_app.gateway.generation import ReplicaFull
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.order import order_fields
from serve_app.gateway.placement import Placement
from serve_app.gateway.sessions import SessionGate

_LOOK_EVERY_S = 0.05
"""Period of looking for room that nobody reports: a replica that is new, or takes requests
again."""
_MOST_SHOWN = 100


class QueueFull(ReplicaFull):
    """The line is as long as it may be."""


class WaitedTooLong(ReplicaFull):
    """No replica had room for a request in time."""


@dataclass(eq=False, slots=True)
class _Held:
    answer: Answer
    since_s: float
    placed: asyncio.Future[Pick]


class Holding:
    """Requests that wait for a replica; one event loop uses it."""

    def __init__(
        self,
        settings: QueueSettings,
        placement: Placement,
        metrics: Metrics,
        clock_s: Callable[[], float],
        sessions: SessionGate | None = None,
    ) -> None:
        """Hold requests, those of sessions too where `sessions` are looked at."""
        self._settings, self._placement, self._sessions = settings, placement, sessions
        self._metrics, self._clock_s = metrics, clock_s
        self._line: WaitingLine[_Held] = WaitingLine()
        self._looking: asyncio.TimerHandle | None = None

    async def place(self, answer: Answer, max_wait_s: float | None = None) -> Pick:
        """Wait until a replica has room; return it, with a place reserved.

        Being cancelled gives the place up. `max_wait_s` replaces the queue's. QueueFull: as many
        wait as may. WaitedTooLong: there was no room in time.
        """
        if len(self._line) >= self._settings.max_requests:
            raise QueueFull(f"{len(self._line)} requests wait at the gateway already")
        most = max(self._settings.max_requests * answer.tenant_share, 1.0)
        if self._sessions is not None and self._held_of(answer) >= most:
            raise QueueFull("as many requests of this tenant wait as may")
        key = self._placement.line_key(answer, self._expected_wait_s)
        placed: asyncio.Future[Pick] = asyncio.get_running_loop().create_future()
        held = _Held(answer, self._clock_s(), placed)
        self._line.add(held, key)
        self._look_later()
        try:
            if self._sessions is not None and answer.turn is not None:
                return await self._wait(held, self._sessions.rule.hold_s)
            return await self._wait(held, max_wait_s or self._settings.max_wait_s)
        finally:
            self._line.remove(held)
            self._metrics.requests_held.set(len(self._line))
            self._metrics.held_seconds.observe(self._clock_s() - held.since_s)

    def _held_of(self, answer: Answer) -> int:
        """Requests of the same tenant that wait."""
        tenant, line = answer.request.tenant, self._line.in_order(self._clock_s())
        return sum(held.answer.request.tenant == tenant for held in line)

    def _expected_wait_s(self) -> float:
        """Twice the mean age: in a line that moves steadily ages are uniform up to the wait."""
        now_s = self._clock_s()
        ages_s = [now_s - held.since_s for held in self._line.in_order(now_s)]
        return 2.0 * fmean(ages_s) if ages_s else 0.0

    async def _wait(self, held: _Held, most_s: float) -> Pick:
        placed, answer = held.placed, held.answer
        limit = asyncio.timeout(most_s)
        try:
            async with limit:
                return await placed
        except TimeoutError:
            if not limit.expired():
                raise
            if placed.done() and not placed.cancelled():
                return placed.result()  # Just in time.
            if answer.turn is not None and answer.turn.session.num_turns:
                # A session that has begun is never refused for its memory.
                answer.turn.is_admitted = True
                with suppress(ReplicaFull):
                    if (pick := self._placement.pick(answer)) is not None:
                        return pick
            after_s = None if answer.turn is None else self._expected_wait_s()
            why = f"no replica had room within {most_s:g} s"
            raise WaitedTooLong(why, retry_after_s=after_s) from None
        except asyncio.CancelledError:
            if placed.done() and not placed.cancelled():
                # Whoever asked left just then: the place is another's.
                self._placement.finish(placed.result(), answer, self._clock_s(), None)
                self.release()
            raise

    def release(self) -> None:
        """Place waiting requests for which there is room, in the order of their keys."""
        blocked: set[tuple[object, ...]] = set()
        gate = self._sessions
        most_blocked = math.inf if gate is None else max(gate.rule.backfill, 1.0)
        for held in self._line.in_order(self._clock_s()):
            if not self._placement.has_room():
                return
            answer = held.answer
            # What some that want the same could not have, others cannot either.
            sender, sticks_to = answer.request.sender, answer.request.sticks_to
            wants = (
                self._placement.availability.fitting_pools(answer), frozenset(answer.tried),
                answer.turn, sticks_to, sender and sender.allowed,
            )  # fmt: skip
            if wants in blocked or held.placed.done():
                continue
            pick = None
            with suppress(ReplicaFull):
                pick = self._placement.pick(answer)
            if pick is None:
                blocked.add(wants)
                if len(blocked) >= most_blocked:
                    return
                continue
            self._line.remove(held)
            held.placed.set_result(pick)

    def _look_later(self) -> None:
        self._metrics.requests_held.set(len(self._line))
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._looking = None
        if len(self._line):
            self.release()
            self._look_later()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._line)

    def describe(self) -> dict[str, Any]:
        """Return the line, first to last, and why it waits: how full the pools are."""
        now_s, settings = self._clock_s(), self._settings
        availability = self._placement.availability
        waiting = [
            {
                "request_id": held.answer.request.request_id, "waited_s": now_s - held.since_s,
                "tenant": held.answer.request.tenant,
                "prompt_tokens": held.answer.prompt.num_tokens,
                "replicas_that_failed": len(held.answer.tried),
                "session": held.answer.turn and held.answer.turn.session.name,
                "pools": availability.fitting_pools(held.answer),
                **order_fields(held.answer.order_key),
            }
            for held in islice(self._line.in_order(now_s), _MOST_SHOWN)
        ]  # fmt: skip
        return {
            "max_requests": settings.max_requests, "max_wait_s": settings.max_wait_s,
            "held": len(self._line), "requests": waiting, "full": availability.windows(),
        }  # fmt: skip

"""A second policy beside the one that decides: in the shadow, or with a share of the requests.

In the shadow it is asked about every decision and changes none: a thread of its own does that, and
where it does not keep up, decisions are left out. As a canary it decides for the requests whose
hash falls to it, until `tokenyard.statistics.sequential.SequentialTest` finds it worse or its
breaker opens.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy.runner import Arm, CircuitBreaker, PolicyRunner, ReplicaChoice
from serve_app.policy.ties import equally_idle
from serve_app.policy.timeouts import Timeouts
from tokenyard.routing.observation import unranked_columns
from tokenyard.routing.policies.order_spec import UNKNOWN, in_words
from tokenyard.statistics.sequential import DEFAULT_ALPHA, SequentialTest

logger = logging.getLogger(__name__)

Mode = Literal["shadow", "canary"]
MAX_SHARE = 0.5
ABANDON_AFTER = 2.0
"""SLO targets until a request counts as bad though it may still be answered."""
_MAX_QUEUED = 1_000
_SHADOW_COUNTS = ("num_asked", "num_agreed", "num_failed", "num_left_out")


class Conflict(ValueError):
    """A change that cannot be made as things are; the text says why."""


def _order_difference(champion: PolicyRunner, other: PolicyRunner) -> str | None:
    """Say how the orders of two policies differ; None: they give equal keys.

    Equal knobs are not enough: an order goes by lengths that each policy predicts by itself.
    """
    order, other_order = champion.order, other.order
    if order != other_order or UNKNOWN in (order, other_order):
        return (
            f"requests of {champion.label} wait by {in_words(order)}, and those of {other.label} "
            f"by {in_words(other_order)}"
        )
    if order is not None and champion.loaded.predictor != other.loaded.predictor:
        return (
            f"requests of {champion.label} and {other.label} wait by {order}, and the two predict "
            "other lengths of the answers that it goes by"
        )
    return None


def check_canary(champion: PolicyRunner, canary: PolicyRunner) -> None:
    """Refuse a canary whose requests would wait by other keys than the champion's.

    Raises:
        Conflict: They would; the text says what to do instead.
    """
    difference, order = _order_difference(champion, canary), champion.order
    if difference is None and order is not None and order.counts_requests:
        difference = (
            f"{order} counts the requests that it orders, and each policy would count its own"
        )
    if difference is not None:
        raise Conflict(
            f"no canary: {difference}. Both would wait in the same queues, where whoever has the "
            "earlier key goes first, so the test would tell the keys apart and not the policies. "
            "Compare them in the simulator (pipelines/evaluate.py), try the policy as a shadow, "
            "which shows that it works, and promote it from there; a rollback takes it back at once"
        )


class Verdict(NamedTuple):
    """What is known of a request whose outcome is settled."""

    canary: bool
    good: bool
    prompt_tokens: int
    output_tokens: int | None
    """None: it was not answered."""


class Verdicts:
    """Which requests have attained their SLO, known when they end or are given up.

    One that violated its SLO is waited for, as the length of its answer says how much its lateness
    means.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[bool, int]] = {}
        self._abandoned_at: list[tuple[float, str]] = []

    def open(self, request_id: str, canary: bool, prompt_tokens: int, abandon_s: float) -> None:
        """Note a request, and when it is bad whatever becomes of it, Unix time, seconds."""
        self._open[request_id] = (canary, prompt_tokens)
        heapq.heappush(self._abandoned_at, (abandon_s, request_id))

    def close(
        self, request_id: str, good: bool | None, output_tokens: int | None, now_s: float
    ) -> list[Verdict]:
        """Take the end of a request at a Unix time, seconds; return what is settled now.

        One whose `good` is None does not count, such as one whose client left in time. Those that
        are settled already are ignored.
        """
        settled = self.overdue(now_s)
        opened = self._open.pop(request_id, None)
        if opened is not None and good is not None:
            settled.append(Verdict(opened[0], good, opened[1], output_tokens))
        return settled

    def overdue(self, now_s: float) -> list[Verdict]:
        """Give up what has taken too long."""
        settled = []
        while self._abandoned_at and self._abandoned_at[0][0] < now_s:
            _, request_id = heapq.heappop(self._abandoned_at)
            opened = self._open.pop(request_id, None)
            if opened is not None:
                settled.append(Verdict(opened[0], False, opened[1], None))
        return settled


class Shadow:
    """Asks a policy what it would have done.

    Two decisions are the same where they name the same replica: order keys are not compared.
    """

    def __init__(self, policy: PolicyRunner, settings: CircuitBreakerSettings) -> None:
        # One failure is enough: nobody depends on it.
        strict = settings.model_copy(update={"failures_to_open": 1})
        self._timeouts = Timeouts.in_thread(settings.budget_s)
        breaker = CircuitBreaker(strict, time.monotonic)
        rng = policy.rng.spawn(1)[0]
        self._runner = PolicyRunner(policy.name, policy.loaded, breaker, self._timeouts, rng)
        self.num_asked = 0
        self.num_agreed = 0
        self.num_failed = 0
        self.num_left_out = 0
        """Decisions that it was not asked about, because it did not keep up or was skipped."""
        self._ends = threading.Event()
        self._queue: queue.Queue[ReplicaChoice | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread.start()

    def offer(self, choice: ReplicaChoice) -> None:
        """Hand over a decision; returns at once."""
        try:
            self._queue.put_nowait(choice)
        except queue.Full:
            self.num_left_out += 1

    def stop(self) -> None:
        """End the thread."""
        self._ends.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _run(self) -> None:
        # `None` ends it at once; where the queue is too full for one, the event does.
        while not self._ends.is_set() and (choice := self._queue.get()) is not None:
            try:
                self._ask(choice)
            except Exception:  # Nothing that a shadow does may end its thread.
                logger.exception("shadow %s", self._runner.name)
                self.num_failed += 1
        self._timeouts.stop()

    def _ask(self, choice: ReplicaChoice) -> None:
        request, snapshots, chosen = choice.request, choice.snapshots, choice.index
        answer = self._runner.decide(request, snapshots)
        if isinstance(answer, str):
            skipped = answer == "breaker_open"
            self.num_left_out += skipped
            self.num_failed += not skipped
            return
        index = answer.replica
        same = chosen == index
        if not same and choice.scores is not None:
            # Where costs decide, which of two that are equally idle is taken is nobody's decision.
            columns = unranked_columns(snapshots)
            same = equally_idle(columns[chosen], columns[index])
        self.num_asked += 1
        self.num_agreed += same


class Experiment:
    """A policy under experiment beside the champion, and what is known of it so far."""

    def __init__(
        self,
        champion: PolicyRunner,
        policy: PolicyRunner,
        mode: Mode,
        share: float,
        settings: CircuitBreakerSettings,
        started_s: float,
        alpha: float = DEFAULT_ALPHA,
        on_end: Callable[[str, str, str, float], None] = lambda *_: None,
    ) -> None:
        """Begin.

        A `shadow` is asked and changes nothing; a `canary` decides for its share of requests.
        `alpha` is the chance, at most, to stop a canary that changes nothing. `on_end` is told what
        ended, of which policy, why, and when, Unix time, seconds.

        Raises:
            ValueError: The share is not in (0, MAX_SHARE].
        """
        if mode == "canary" and not 0.0 < share <= MAX_SHARE:
            raise ValueError(f"share {share} must be above 0 and at most {MAX_SHARE}")
        self.champion, self.policy, self._on_end = champion.label, policy, on_end
        self.mode: Mode = mode
        self.alpha, self.started_s = alpha, started_s
        self.share = share if mode == "canary" else 0.0
        self.ended_s: float | None = None
        self.why: str | None = None
        """Why it was ended; None: it goes on."""
        self.verdicts = Verdicts()
        self.test = SequentialTest(share, alpha) if mode == "canary" else None
        self.shadow = Shadow(policy, settings) if mode == "shadow" else None

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return self.why is None

    def arm_of(self, request_id: str) -> Arm:
        """Whose a request is, by its hash: the same for every attempt to place it."""
        if not self.running or self.test is None:
            return "champion"
        salted = f"{self.policy.label}/{self.started_s}/{request_id}".encode()
        drawn = int.from_bytes(hashlib.blake2b(salted, digest_size=8).digest()) / 2**64
        return "canary" if drawn < self.share else "champion"

    def open(
        self, request_id: str, arm: Arm, prompt_tokens: int, arrival_s: float, slo_s: float
    ) -> None:
        """Note a request that was let in, and in how many seconds its answer is due."""
        if self.running and self.test is not None:
            abandon_s = arrival_s + ABANDON_AFTER * slo_s
            self.verdicts.open(request_id, arm == "canary", prompt_tokens, abandon_s)

    def close(
        self,
        request_id: str,
        good: bool | None,
        response_s: float,
        output_tokens: int,
        now_s: float,
    ) -> None:
        """Note what became of a request at a Unix time, seconds.

        It is `good` where it attained its SLO; None: it does not count. `response_s` is NaN where
        it was not answered.
        """
        if not self.running or self.test is None:
            return
        answered = output_tokens if math.isfinite(response_s) else None
        for verdict in self.verdicts.close(request_id, good, answered, now_s):
            if self.test.record(*verdict):
                self.end("it is worse than the champion: " + self.tally(), now_s)
                return

    @property
    def evidence(self) -> dict[str, Any]:
        """What is known so far, as JSON has it."""
        test, shadow = self.test, self.shadow
        counts = None if shadow is None else [getattr(shadow, name) for name in _SHADOW_COUNTS]
        return {"test": None if test is None else test.saved(), "shadow": counts}

    def restore(self, evidence: Mapping[str, Any]) -> None:
        """Take up the evidence of an experiment of the same mode and share."""
        if self.test is not None:
            self.test.restore(evidence["test"])
        if self.shadow is not None:
            for name, count in zip(_SHADOW_COUNTS, evidence["shadow"], strict=True):
                setattr(self.shadow, name, int(count))

    def tally(self) -> str:
        """Say how both fare, in words."""
        assert self.test is not None
        test = self.test
        return (
            f"{test.canary_good} of {test.num_canary} requests attained their SLO, "
            f"the champion's {test.champion_good} of {test.num_champion}"
        )

    def end(self, why: str, now_s: float) -> None:
        """End it, once."""
        if self.running:
            logger.warning("%s of %s ends: %s", self.mode, self.policy.name, why)
            self.why, self.ended_s = why, now_s
            if self.shadow is not None:
                self.shadow.stop()
            self._on_end(f"{self.mode} ended", self.policy.label, why, now_s)

"""Who decides now: the policy, kept on a short leash, and the rule that stands in for it.

Beside them, at most one policy on trial, and the policy that decided before, kept warm so that
going back to it takes no time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy.decider import Choice, Decider
from serve_app.policy.experiment import Arm, Experiment, Mode
from serve_app.policy.loading import LoadedPolicy, resolve_policy, warm_up
from serve_app.policy.runner import PolicyRunner, Timeouts
from serve_app.policy.timeouts import ThreadTimeout
from tokenyard.artifact import ArtifactError
from tokenyard.offpolicy.sequential import DEFAULT_ALPHA
from tokenyard.types import ReplicaSnapshot, Request

logger = logging.getLogger(__name__)

RAY_DEFAULT = "ray_default"
"""Name of Ray Serve's own router among the policies."""
REASONS = ("error", "too_slow", "breaker_open", "stale", "incompatible", "missing")
"""Why the baseline decided: the policy failed, hung, is left alone after that, knows nothing
current, is not for these replicas, or was not found at the start."""
_WARM_UP_S = 30.0
_NUM_TIMES = 1000
_NUM_EVENTS = 200
_TOO_MANY_ERRORS = 10
"""Decisions in which a canary may fail before its trial ends, in a row or not."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of who decides."""

    time_s: float
    """Unix time, seconds."""
    what: str
    policy: str
    """`name@version`."""
    why: str


class PolicyManager:
    """Picks replicas by a policy that can be changed; where it fails, by a baseline, at once.

    Not thread-safe: one event loop uses it.
    """

    def __init__(
        self,
        scenario: str,
        baseline: str,
        circuit_breaker: CircuitBreakerSettings,
        rng: np.random.Generator,
        registry: str | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the baseline; it decides until `switch` is called.

        Args:
            scenario: Whose champion, tuned rules and predictor are used.
            baseline: Name of the rule that stands in.
            circuit_breaker: When the policy is left alone.
            rng: Source of exploration and of policies that draw.
            registry: MLflow URI where champions are looked up.
            clock_s: Any clock that does not go back, seconds.

        Raises:
            ValueError: The baseline is not known.
        """
        self.scenario = scenario
        self.registry = registry
        self._trust = circuit_breaker
        self._rng = rng
        self._clock_s = clock_s
        self._callers = Timeouts(circuit_breaker)
        loaded = resolve_policy(baseline, scenario)
        warm_up(loaded)
        self._baseline = Decider(loaded, rng.spawn(1)[0])
        self.baseline = baseline
        self.num_decisions = 0
        self.num_explored = 0
        self.fallbacks: Counter[str] = Counter()
        self.decision_us: deque[float] = deque(maxlen=_NUM_TIMES)
        """Times of the last decisions, the baseline's in their place included, microseconds."""
        self.decision_cpu_us: deque[float] = deque(maxlen=_NUM_TIMES)
        """What they computed, microseconds: on a busy machine a decision also waits its turn."""
        self.policy = self._guarded(baseline, loaded, 0.0)
        self._asks = False
        """Whether the policy is asked: Ray decides otherwise, or nobody was asked for."""
        self.previous: tuple[PolicyRunner, bool] | None = None
        """What decided before, to go back to, and whether it was asked."""
        self.experiment: Experiment | None = None
        """The last one; it may have ended."""
        self.events: deque[Event] = deque(maxlen=_NUM_EVENTS)

    @property
    def name(self) -> str:
        """The policy's, as it was asked for."""
        return self.policy.name

    @property
    def loaded(self) -> LoadedPolicy:
        """What decides."""
        return self.policy.loaded

    @property
    def missing(self) -> str | None:
        """Why the policy that was asked for is not there."""
        return self.policy.missing

    @property
    def explore_fraction(self) -> float:
        """Share of decisions drawn at random."""
        return self.policy.explore_fraction

    @property
    def rests(self) -> bool:
        """Whether the policy is left alone for now."""
        return self.policy.rests

    def predicted_total_tokens(self, context_tokens: int, arm: Arm = "champion") -> float:
        """Predicted size of a request of that context, as who decides for an arm takes it."""
        return self._decides(arm).loaded.predicted_total_tokens(context_tokens)

    def prepare(self, policy: str) -> LoadedPolicy:
        """Find a policy and let it decide once; takes a while, and may be called in any thread.

        Raises:
            ValueError: It is not known, cannot be used, or fails its warm-up.
        """
        loaded = resolve_policy(policy, self.scenario, self.registry)
        _warm_up(loaded)
        return loaded

    def switch(
        self,
        policy: str,
        explore_fraction: float = 0.0,
        may_be_missing: bool = False,
        prepared: LoadedPolicy | None = None,
    ) -> None:
        """Let another policy decide from now on; counters go on.

        Args:
            policy: `champion`, `generic`, a policy file (.npz), a rule's name, or `ray_default`.
            explore_fraction: Share of its decisions drawn at random; none where it draws itself.
            may_be_missing: Let the baseline stand in for a trained policy that is not there.
            prepared: What `prepare` found for it; None: found now.

        Raises:
            ValueError: It is not known, cannot be used, or fails its warm-up; what
                decided before goes on.
        """
        found = self._find(policy, explore_fraction, may_be_missing, prepared)
        self._install(*found, "switched to", "asked")

    def start_experiment(
        self,
        policy: str,
        mode: Mode,
        share: float,
        alpha: float = DEFAULT_ALPHA,
        prepared: LoadedPolicy | None = None,
    ) -> Experiment:
        """Put a policy on trial in place of the one that is.

        Args:
            policy: As for `switch`, without `ray_default`.
            mode: `shadow` or `canary`.
            share: Of the requests, for a canary.
            alpha: Chance, at most, to stop a canary that is as good.
            prepared: What `prepare` found for it; None: found now.

        Raises:
            ValueError: It cannot be put on trial, or nobody decides whom it could be compared to.
        """
        if RAY_DEFAULT in (policy, self.name):
            raise ValueError(f"{RAY_DEFAULT} scores nothing that a trial could be compared on")
        guarded, _ = self._find(policy, 0.0, False, prepared)
        if mode == "canary":
            # A canary explores as the champion does, or its log could judge nobody.
            explore = 0.0 if guarded.loaded.draws else self.explore_fraction
            guarded = self._guarded(policy, guarded.loaded, explore)
        experiment = Experiment(guarded, mode, share, time.time(), alpha)
        self.end_experiment("another one began")
        self.experiment = experiment
        self._note(f"{mode} began", guarded, f"share {experiment.share:g}")
        return experiment

    def end_experiment(self, why: str) -> None:
        """End the trial that runs, if any does."""
        if self.experiment is not None and self.experiment.running:
            self.experiment.end(why, time.time())
        self._note_end()

    def promote(self) -> PolicyRunner:
        """Let the policy on trial decide from now on.

        Raises:
            ValueError: None is on trial.
        """
        if self.experiment is None or not self.experiment.running:
            raise ValueError("no policy is on trial")
        policy = self.experiment.policy
        policy = self._guarded(
            policy.name, policy.loaded, 0.0 if policy.loaded.draws else self.explore_fraction
        )
        self.experiment.end("it was promoted", time.time())
        self._note_end()
        self._install(policy, True, "promoted", "after its trial")
        return policy

    def roll_back(self, why: str = "asked") -> None:
        """Let what decided before decide again; at once, since it was kept.

        Raises:
            ValueError: Nothing decided before.
        """
        if self.previous is None:
            raise ValueError("no other policy has decided before")
        self._install(*self.previous, "rolled back to", why)

    def arm_of(self, request_id: str) -> Arm:
        """Whose decision a request is."""
        return "champion" if self.experiment is None else self.experiment.arm_of(request_id)

    def pick(
        self,
        request: Request,
        snapshots: Sequence[ReplicaSnapshot],
        stale: bool,
        arm: Arm = "champion",
    ) -> Choice:
        """Choose the replica for a request, whatever is wrong with the policy.

        Args:
            request: To be placed.
            snapshots: Candidates, at least one.
            stale: Whether none of them was heard of lately.
            arm: Whose decision it is.
        """
        started_ns, started_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        choice, reason = self._ask(request, snapshots, stale, arm)
        if choice is None:
            choice = self._baseline.decide(request, snapshots)
        decision_us = (time.perf_counter_ns() - started_ns) / 1e3
        self.decision_cpu_us.append((time.thread_time_ns() - started_cpu_ns) / 1e3)
        choice = replace(
            choice, decision_us=decision_us, fallback=reason is not None, fallback_reason=reason
        )
        self.num_decisions += 1
        self.num_explored += choice.explored
        self.decision_us.append(decision_us)
        if reason is not None:
            self.fallbacks[reason] += 1
        return choice

    def observe(
        self,
        request_id: str,
        request: Request,
        snapshots: Sequence[ReplicaSnapshot],
        choice: Choice,
    ) -> None:
        """Show a decision to the shadow, where there is one."""
        experiment = self.experiment
        if experiment is not None and experiment.running and experiment.shadow is not None:
            experiment.shadow.offer(request_id, request, snapshots, choice)

    def label_of(self, arm: Arm) -> str:
        """`name@version` of who decides for an arm."""
        policy = self._decides(arm)
        return RAY_DEFAULT if policy.name == RAY_DEFAULT else policy.label

    def settle(
        self,
        request_id: str,
        good: bool | None,
        response_s: float,
        output_tokens: int,
        now_s: float,
    ) -> None:
        """Tell the trial what became of a request; see `Trial.close`."""
        if self.experiment is not None and self.experiment.running:
            self.experiment.close(request_id, good, response_s, output_tokens, now_s)
            self._note_end()

    def stop(self) -> None:
        """End the threads."""
        self.end_experiment("the gateway ends")
        self._callers.stop()

    def _ask(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot], stale: bool, arm: Arm
    ) -> tuple[Choice | None, str | None]:
        """Return the choice of who is to decide, or None and why there is none."""
        experiment = self.experiment
        if arm == "canary" and experiment is not None and experiment.running:
            asked = experiment.policy.ask(request, snapshots, stale)
            failed = experiment.policy.fallbacks
            if experiment.policy.num_opened or failed["error"] >= _TOO_MANY_ERRORS:
                experiment.end(f"it failed: {dict(failed)}", time.time())
                self._note_end()
            return asked
        if not self._asks:
            return None, None  # Ray decides, or nobody was asked for: the baseline is no fallback.
        return self.policy.ask(request, snapshots, stale)

    def _decides(self, arm: Arm) -> PolicyRunner:
        canary = arm == "canary" and self.experiment is not None and self.experiment.running
        return self.experiment.policy if canary and self.experiment is not None else self.policy

    def _find(
        self,
        policy: str,
        explore_fraction: float,
        may_be_missing: bool,
        prepared: LoadedPolicy | None,
    ) -> tuple[PolicyRunner, bool]:
        """Find and warm up a policy; the flag says whether it is asked."""
        if policy == RAY_DEFAULT:
            return self._guarded(policy, self._baseline.loaded, 0.0), False
        missing = None
        try:
            loaded = prepared or self.prepare(policy)
        except ArtifactError as error:
            if not may_be_missing:
                raise
            missing, loaded = str(error), self._baseline.loaded
            logger.warning("%s decides: %s", self.baseline, missing)
        explore_fraction = 0.0 if loaded.draws else explore_fraction
        return self._guarded(policy, loaded, explore_fraction, missing), True

    def _guarded(
        self, name: str, loaded: LoadedPolicy, explore_fraction: float, missing: str | None = None
    ) -> PolicyRunner:
        return PolicyRunner(
            name, loaded, self._trust, self._rng.spawn(1)[0], self._callers, self._clock_s,
            explore_fraction, missing,
        )  # fmt: skip

    def _install(self, policy: PolicyRunner, asks: bool, what: str, why: str) -> None:
        # A trial is against one champion: with another it would begin anew.
        self.end_experiment("another policy decides")
        self.previous = (self.policy, self._asks)
        self.policy, self._asks = policy, asks
        self._note(what, policy, why)

    def _note_end(self) -> None:
        """Write down that the trial has ended, once."""
        experiment = self.experiment
        if experiment is None or experiment.why is None:
            return
        what = f"{experiment.mode} ended"
        if any(e.what == what and e.time_s == experiment.ended_s for e in self.events):
            return
        assert experiment.ended_s is not None
        self.events.append(Event(experiment.ended_s, what, experiment.policy.label, experiment.why))

    def _note(self, what: str, policy: PolicyRunner, why: str) -> None:
        label = RAY_DEFAULT if policy.name == RAY_DEFAULT else policy.label
        self.events.append(Event(time.time(), what, label, why))


def _warm_up(loaded: LoadedPolicy) -> None:
    """Let a policy decide once before it may, within a time.

    Raises:
        ValueError: It does not.
    """
    caller = ThreadTimeout(_WARM_UP_S)
    try:
        caller.call(partial(warm_up, loaded))
    except Exception as error:
        raise ValueError(f"policy {loaded.card.name!r} fails its warm-up: {error}") from None
    finally:
        caller.stop()

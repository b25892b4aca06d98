"""Which replica a request goes to: by the policy that decides, or by the baseline in its place."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy.experiment import Experiment
from serve_app.policy.loading import LoadedPolicy, check_exploration
from serve_app.policy.runner import (
    RAY_DEFAULT,
    Arm,
    CircuitBreaker,
    DecisionCounts,
    PolicyRunner,
    ReplicaChoice,
    deciders_of,
)
from serve_app.policy.ties import least_recently_used
from serve_app.policy.timeouts import Timeouts
from tokenyard.routing.policies.delay import mark_safe
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import FloatArray

_NUM_TIMES = 1000
_TOO_MANY_FAILURES = 10
"""Decisions in which a canary may fail, or not be for the replicas that are there, before its
experiment ends, in a row or not: what comes of them is the baseline's."""


class ReplicaPicker:
    """Picks replicas by the champion or the canary; where they fail, by the baseline, at once.

    A share `explore_fraction` of a policy's decisions is drawn uniformly from the replicas that
    are below capacity and expected to finish within the SLO, so that the log can judge other
    policies; where there are fewer than two of them nothing is risked.

    The baseline decides until `policy` is another. Not thread-safe: one event loop uses it.
    """

    def __init__(
        self,
        name: str,
        baseline: LoadedPolicy,
        settings: CircuitBreakerSettings,
        rng: np.random.Generator,
        clock_s: Callable[[], float],
    ) -> None:
        self.settings, self._rng, self._clock_s = settings, rng, clock_s
        self._timeouts = Timeouts.of(settings.budget_s)
        self._baseline = baseline
        self._baseline_deciders = deciders_of(baseline.make(rng.spawn(1)[0]))
        self._second_baseline = baseline.make(np.random.default_rng(0))
        """Another copy, which is asked what it would have done."""
        self.counts = DecisionCounts()
        self.decision_us: deque[float] = deque(maxlen=_NUM_TIMES)
        """Times of the last decisions, including the baseline's stand-ins, microseconds."""
        self.decision_cpu_us: deque[float] = deque(maxlen=_NUM_TIMES)
        """Their CPU times, microseconds: on a busy machine a decision also waits its turn."""
        self.policy = self.runner(name, baseline, decides=False)
        """The champion."""
        self.experiment: Experiment | None = None
        """The last one; it may have ended."""

    def runner(
        self, name: str, loaded: LoadedPolicy, explore_fraction: float = 0.0, decides: bool = True
    ) -> PolicyRunner:
        """Put a policy behind a breaker of its own; one that draws does not explore on top."""
        explore_fraction = 0.0 if loaded.draws else explore_fraction
        check_exploration(loaded, explore_fraction)
        breaker = CircuitBreaker(self.settings, self._clock_s)
        rng = self._rng.spawn(1)[0]
        return PolicyRunner(name, loaded, breaker, self._timeouts, rng, explore_fraction, decides)

    def ray_default(self) -> PolicyRunner:
        """Return a runner that is not asked, as Ray's own router decides."""
        return self.runner(RAY_DEFAULT, self._baseline, decides=False)

    def arm_of(self, request_id: str) -> Arm:
        """Return whose decision a request is."""
        return "champion" if self.experiment is None else self.experiment.arm_of(request_id)

    def deciding(self, arm: Arm = "champion") -> PolicyRunner:
        """Return who decides for an arm."""
        experiment = self.experiment
        if arm == "canary" and experiment is not None and experiment.running:
            return experiment.policy
        return self.policy

    @property
    def sees_queues(self) -> bool:
        """Whether anybody who decides looks at what waits, request by request."""
        return self.policy.sees_queues or self.deciding("canary").sees_queues

    def pick(
        self,
        request: Request,
        snapshots: Sequence[ReplicaSnapshot],
        stale: bool = False,
        arm: Arm = "champion",
        copy: PolicyRunner | None = None,
        last_sent_s: Sequence[float] | FloatArray | None = None,
        has_key: bool = False,
    ) -> ReplicaChoice:
        """Choose the replica for a request, whatever is wrong with the policy, and count it.

        Args:
            request: To be placed.
            snapshots: Candidates, at least one.
            stale: Whether none of them was heard of lately.
            arm: Whose decision it is.
            copy: Asked in place of the policy that decides; that is not counted.
            last_sent_s: When each candidate was last sent a request, which breaks ties of policies
                that score; None: they stand as the policy breaks them.
            has_key: Whether the request has its order key already: it is not asked for again.
        """
        started_ns, started_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        runner = copy or self.deciding(arm)
        answer = runner.decide(request, snapshots, stale, has_key) if runner.decides else None
        reason = answer if isinstance(answer, str) else None
        decision, loaded = answer, runner.loaded
        if decision is None or isinstance(decision, str):
            decide, loaded = self._baseline_deciders[has_key], self._baseline
            decision = decide(request, snapshots)
        preferred, propensity = decision.replica, None if loaded.draws else 1.0
        if last_sent_s is not None and decision.scores is not None:
            preferred = least_recently_used(snapshots, preferred, last_sent_s)
        index = preferred
        # What stands in for a policy that was never there is the policy: its log must judge others.
        if runner.explore_fraction and reason in (None, "missing"):
            index, propensity = self._explore(request, snapshots, index, runner)
        scores = None if decision.scores is None else np.asarray(decision.scores)
        choice = ReplicaChoice(
            request, snapshots, runner.label, index, scores, propensity, index != preferred,
            (time.perf_counter_ns() - started_ns) / 1e3, reason, decision.order_key, arm,
            runner.mlflow_run,
        )  # fmt: skip
        if copy is None:
            self.decision_cpu_us.append((time.thread_time_ns() - started_cpu_ns) / 1e3)
            self._count(choice, runner)
        return choice

    def pick_by_ray(
        self,
        request: Request,
        snapshots: Sequence[ReplicaSnapshot],
        index: int,
        started_ns: int,
        arm: Arm,
    ) -> ReplicaChoice:
        """Count what Ray has chosen; it was asked at `started_ns` of `time.perf_counter_ns`."""
        decision_us, runner = (time.perf_counter_ns() - started_ns) / 1e3, self.deciding(arm)
        choice = ReplicaChoice(
            request, snapshots, runner.label, index, None, None, False, decision_us, arm=arm,
            mlflow_run=runner.mlflow_run,
        )  # fmt: skip
        self._count(choice, self.policy)
        return choice

    def by_baseline(self, choice: ReplicaChoice) -> int | None:
        """Index of the candidate that the baseline would have chosen, by what was known then.

        None: its choice depends on more than that.
        """
        if getattr(self._second_baseline, "sees_queues", False):
            return None
        decision = deciders_of(self._second_baseline)[1](choice.request, choice.snapshots)
        if decision.scores is None:
            return None
        # What is as good by the baseline is no other choice.
        is_tie = decision.scores[choice.index] <= decision.scores[decision.replica]
        return choice.index if is_tie else decision.replica

    def observe(self, request_id: str, choice: ReplicaChoice) -> None:
        """Show a decision to the shadow, where there is one."""
        experiment = self.experiment
        if experiment is not None and experiment.running and experiment.shadow is not None:
            experiment.shadow.offer(choice)

    def stop(self) -> None:
        """End the threads."""
        self._timeouts.stop()

    def _explore(
        self,
        request: Request,
        snapshots: Sequence[ReplicaSnapshot],
        preferred: int,
        runner: PolicyRunner,
    ) -> tuple[int, float]:
        """Maybe draw another replica, and say how likely the returned one was."""
        fraction, slo_s = runner.explore_fraction, runner.loaded.card.slo_response_s
        num_safe, safe = mark_safe(request, snapshots, slo_s)
        if num_safe < 2:
            return preferred, 1.0
        chosen = preferred
        if self._rng.random() < fraction:
            chosen = int(np.flatnonzero(safe)[self._rng.integers(num_safe)])
        propensity = fraction / num_safe if safe[chosen] else 0.0
        if chosen == preferred:
            propensity += 1.0 - fraction
        return chosen, propensity

    def _count(self, choice: ReplicaChoice, runner: PolicyRunner) -> None:
        self.counts.add(choice)
        self.decision_us.append(choice.decision_us)
        if not runner.decides:
            return
        runner.counts.add(choice)
        experiment, failed = self.experiment, runner.counts.fallbacks
        if experiment is not None and runner is experiment.policy:
            num_failed = failed["error"] + failed["incompatible"]
            if runner.breaker.num_opened or num_failed >= _TOO_MANY_FAILURES:
                experiment.end(f"it failed: {dict(failed)}", time.time())

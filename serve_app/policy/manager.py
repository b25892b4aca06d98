"""Who decides now: the policy behind its circuit breaker, and the rule that stands in for it.

Beside them, at most one policy under experiment, and the policy that decided before, kept warm so
that going back to it takes no time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy.audit_log import ACTOR, Event
from serve_app.policy.experiment import Arm, Experiment, Mode
from serve_app.policy.loading import LoadedPolicy, check_exploration, resolve_policy
from serve_app.policy.runner import (
    RAY_DEFAULT,
    Choice,
    CircuitBreaker,
    DecisionCounts,
    Failure,
    PolicyRunner,
    deciders_of,
    warm_up,
)
from serve_app.policy.same_order import check_canary, order_difference
from serve_app.policy.ties import least_recently_used
from serve_app.policy.timeouts import ThreadTimeout, Timeouts
from tokenyard.routing.policies.delay import mark_safe
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.statistics.sequential import DEFAULT_ALPHA
from tokenyard.types import FloatArray

_WARM_UP_S = 30.0
_NUM_TIMES = 1000
_NUM_EVENTS = 200
_TOO_MANY_FAILURES = 10
"""Decisions in which a canary may fail, or not be for the replicas that are there, before its
experiment ends, in a row or not: what comes of them is the baseline's."""


class PolicyManager:
    """Picks replicas by a policy that can be changed; where it fails, by a baseline, at once.

    A share `explore_fraction` of the policy's decisions is drawn uniformly from the replicas that
    are below capacity and expected to finish within the SLO, so that the log can judge other
    policies; where there are fewer than two of them nothing is risked.

    Not thread-safe: one event loop uses it.
    """

    def __init__(
        self,
        scenario: str,
        baseline: str,
        settings: CircuitBreakerSettings,
        rng: np.random.Generator,
        registry: str | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the baseline; it decides until `switch` is called.

        Args:
            scenario: Whose champion, tuned rules and predictor are used.
            baseline: Name of the rule that stands in.
            settings: When a policy is not asked.
            rng: Source of exploration and of policies that draw.
            registry: MLflow URI where champions are looked up.
            clock_s: Any clock that does not go back, seconds.

        Raises:
            ValueError: The baseline is not known, or is not for any number of replicas.
        """
        self.scenario, self.baseline, self.registry = scenario, baseline, registry
        self._settings, self._rng, self._clock_s = settings, rng, clock_s
        self._timeouts = Timeouts.of(settings.budget_s)
        self._stand_in = _load_baseline(baseline, scenario)
        self._stand_in_deciders = deciders_of(self._stand_in.make(rng.spawn(1)[0]))
        self.counts = DecisionCounts()
        self.decision_us: deque[float] = deque(maxlen=_NUM_TIMES)
        """Times of the last decisions, the baseline's in their place included, microseconds."""
        self.decision_cpu_us: deque[float] = deque(maxlen=_NUM_TIMES)
        """What they computed, microseconds: on a busy machine a decision also waits its turn."""
        self.policy = self.runner(baseline, self._stand_in, decides=False)
        self.previous: PolicyRunner | None = None
        """What decided before, to go back to."""
        self.experiment: Experiment | None = None
        """The last one; it may have ended."""
        self.events: deque[Event] = deque(maxlen=_NUM_EVENTS)
        self.num_events = 0
        """Ever noted here."""
        self.on_event: Callable[[Event], None] | None = None
        """Is told of each."""

    def prepare(self, policy: str, stand_in: str | None = None) -> LoadedPolicy:
        """Find a policy and let it decide once; takes a while, and may be called in any thread.

        Args:
            policy: As for `switch`, without `ray_default`.
            stand_in: Rule that is served where a trained policy is missing or broken.

        Raises:
            ValueError: It is not known, cannot be used, or fails its warm-up.
        """
        return self.warmed_up(resolve_policy(policy, self.scenario, self.registry, stand_in))

    def warmed_up(self, loaded: LoadedPolicy) -> LoadedPolicy:
        """Let a policy that was found decide once.

        Raises:
            ValueError: It fails, or takes too long.
        """
        timeout = ThreadTimeout(_WARM_UP_S)
        try:
            timeout.call(warm_up, loaded)
        except Exception as error:
            text = f"policy {loaded.card.name!r} fails its warm-up: {error}"
            raise ValueError(text) from None
        finally:
            timeout.stop()
        return loaded

    def runner(
        self,
        name: str,
        loaded: LoadedPolicy,
        explore_fraction: float = 0.0,
        decides: bool = True,
    ) -> PolicyRunner:
        """Put a policy behind a breaker of its own; one that draws does not explore on top.

        Raises:
            ValueError: The share to explore is out of range.
        """
        explore_fraction = 0.0 if loaded.draws else explore_fraction
        check_exploration(loaded, explore_fraction)
        breaker = CircuitBreaker(self._settings, self._clock_s)
        rng = self._rng.spawn(1)[0]
        return PolicyRunner(name, loaded, breaker, self._timeouts, rng, explore_fraction, decides)

    def ray_default(self) -> PolicyRunner:
        """Who is not asked, as Ray's own router decides."""
        return self.runner(RAY_DEFAULT, self._stand_in, decides=False)

    def switch(
        self,
        policy: str,
        explore_fraction: float = 0.0,
        may_be_missing: bool = False,
        prepared: LoadedPolicy | None = None,
    ) -> None:
        """Let another policy decide from now on; counters go on.

        Args:
            policy: `champion`, a policy file (.npz), a rule's name, or `ray_default`.
            explore_fraction: Share of its decisions drawn at random; none where it draws itself.
            may_be_missing: Let the baseline stand in for a trained policy that is not there.
            prepared: What `prepare` found for it; None: found now.

        Raises:
            ValueError: It is not known, cannot be used, or fails its warm-up; what decided before
                goes on.
        """
        if policy == RAY_DEFAULT:
            runner = self.ray_default()
        else:
            stand_in = self.baseline if may_be_missing else None
            prepared = prepared or self.prepare(policy, stand_in)
            runner = self.runner(policy, prepared, explore_fraction)
        self._install(runner, "switched to", "asked")

    def start_experiment(
        self,
        policy: str,
        mode: Mode,
        share: float,
        alpha: float = DEFAULT_ALPHA,
        prepared: LoadedPolicy | None = None,
    ) -> Experiment:
        """Begin an experiment with a policy, and end the one that runs.

        Args:
            policy: As for `switch`, without `ray_default`.
            mode: `shadow` or `canary`.
            share: Of the requests, for a canary.
            alpha: Chance, at most, to stop a canary that is as good.
            prepared: What `prepare` found for it; None: found now.

        Raises:
            OrdersDiffer: It is a canary, and its requests would wait by other keys.
            ValueError: It cannot be used, or nobody decides whom it could be compared to.
        """
        if RAY_DEFAULT in (policy, self.policy.name):
            raise ValueError(f"{RAY_DEFAULT} scores nothing that an experiment could compare")
        # A canary explores as the champion does, or its log could judge nobody.
        explore = self.policy.explore_fraction if mode == "canary" else 0.0
        runner = self.runner(policy, prepared or self.prepare(policy), explore)
        if mode == "canary":
            check_canary(self.policy, runner)
        experiment = self.make_experiment(self.policy, runner, mode, share, alpha, time.time())
        self.end_experiment("another one began")
        self.experiment = experiment
        self._note(f"{mode} began", runner, f"share {experiment.share:g}")
        return experiment

    def make_experiment(
        self,
        champion: PolicyRunner,
        runner: PolicyRunner,
        mode: Mode,
        share: float,
        alpha: float,
        started_s: float,
    ) -> Experiment:
        """Make an experiment beside `champion`; see `Experiment` for the others and for errors."""
        difference = order_difference(champion, runner)
        return Experiment(runner, mode, share, started_s, alpha, self._settings, difference)

    def end_experiment(self, why: str) -> None:
        """End the experiment that runs, if any does."""
        if self.experiment is not None and self.experiment.running:
            self.experiment.end(why, time.time())
        self._note_end()

    def promote(self) -> None:
        """Let the policy under experiment decide from now on.

        Raises:
            ValueError: There is none.
        """
        if self.experiment is None or not self.experiment.running:
            raise ValueError("no experiment runs")
        tried = self.experiment.policy
        runner = self.runner(tried.name, tried.loaded, self.policy.explore_fraction)
        self.end_experiment("it was promoted")
        self._install(runner, "promoted", "after its experiment")

    def roll_back(self) -> None:
        """Let what decided before decide again; at once, since it was kept.

        Raises:
            ValueError: Nothing decided before.
        """
        if self.previous is None:
            raise ValueError("no other policy has decided before")
        self._install(self.previous, "rolled back to", "asked")

    def resume(
        self,
        policy: PolicyRunner | None,
        previous: PolicyRunner | None,
        experiment: Experiment | None,
        events: Iterable[Event],
    ) -> None:
        """Go on where an earlier gateway was.

        Args:
            policy: Decides from now on; None: who decides.
            previous: To go back to; None: who is that now.
            experiment: Goes on, or has been ended; None: there is none.
            events: What happened before.
        """
        self.policy, self.previous = policy or self.policy, previous or self.previous
        self.experiment = experiment
        self.events.extendleft(reversed(list(events)[-_NUM_EVENTS + len(self.events) :]))
        if policy is not None:
            self._note("goes on with", policy, "the gateway began anew")
        self._note_end()

    def arm_of(self, request_id: str) -> Arm:
        """Whose decision a request is."""
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
        runner: PolicyRunner | None = None,
        last_sent_s: Sequence[float] | FloatArray | None = None,
        has_key: bool = False,
    ) -> Choice:
        """Choose the replica for a request, whatever is wrong with the policy, and count it.

        Args:
            request: To be placed.
            snapshots: Candidates, at least one.
            stale: Whether none of them was heard of lately.
            arm: Whose decision it is.
            runner: Asked in place of who decides; that is not counted.
            last_sent_s: When each candidate was last sent a request, which breaks ties of policies
                that score; None: they stand as the policy breaks them.
            has_key: Whether the request has its order key already: it is not asked for again.
        """
        started_ns, started_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        asked = runner or self.deciding(arm)
        answer = asked.decide(request, snapshots, stale, has_key) if asked.decides else None
        reason = answer.reason if isinstance(answer, Failure) else None
        decision, loaded = answer, asked.loaded
        if decision is None or isinstance(decision, Failure):
            decide, loaded = self._stand_in_deciders[has_key], self._stand_in
            decision = decide(request, snapshots)
        preferred, propensity = decision.replica, None if loaded.draws else 1.0
        if last_sent_s is not None and decision.scores is not None:
            preferred = least_recently_used(snapshots, preferred, last_sent_s)
        index = preferred
        # What stands in for a policy that was never there is the policy: its log must judge others.
        if asked.explore_fraction and reason in (None, "missing"):
            index, propensity = self._explore(request, snapshots, index, asked)
        scores = None if decision.scores is None else np.asarray(decision.scores)
        choice = Choice(
            index, scores, propensity, index != preferred,
            (time.perf_counter_ns() - started_ns) / 1e3, reason, decision.order_key,
        )  # fmt: skip
        if runner is None:
            self.decision_cpu_us.append((time.thread_time_ns() - started_cpu_ns) / 1e3)
            self._count(choice, asked)
        return choice

    def pick_by_ray(self, index: int, started_ns: int) -> Choice:
        """Count what Ray has chosen.

        Args:
            index: Of the candidate.
            started_ns: When it was asked, by `time.perf_counter_ns`.
        """
        decision_us = (time.perf_counter_ns() - started_ns) / 1e3
        choice = Choice(index, None, None, False, decision_us)
        self._count(choice, self.policy)
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

    def settle(
        self,
        request_id: str,
        good: bool | None,
        response_s: float,
        output_tokens: int,
        now_s: float,
    ) -> None:
        """Tell the experiment what became of a request; see `Experiment.close`."""
        if self.experiment is not None and self.experiment.running:
            self.experiment.close(request_id, good, response_s, output_tokens, now_s)
            self._note_end()

    def stop(self) -> None:
        """End the threads."""
        self.end_experiment("the gateway ends")
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

    def _count(self, choice: Choice, runner: PolicyRunner) -> None:
        self.counts.add(choice)
        self.decision_us.append(choice.decision_us)
        if not runner.decides:
            return
        runner.counts.add(choice)
        experiment, failed = self.experiment, runner.counts.fallbacks
        if experiment is not None and runner is experiment.policy:
            num_failed = failed["error"] + failed["incompatible"]
            if runner.breaker.num_opened or num_failed >= _TOO_MANY_FAILURES:
                self.end_experiment(f"it failed: {dict(failed)}")

    def _install(self, runner: PolicyRunner, what: str, why: str) -> None:
        # An experiment is against one champion: with another it would begin anew.
        self.end_experiment("another policy decides")
        self.previous, self.policy = self.policy, runner
        self._note(what, runner, why)

    def _note_end(self) -> None:
        """Write down that the experiment has ended, once."""
        experiment = self.experiment
        if experiment is None or experiment.why is None:
            return
        what = f"{experiment.mode} ended"
        if any(e.what == what and e.time_s == experiment.ended_s for e in self.events):
            return
        assert experiment.ended_s is not None
        label, by = experiment.policy.label, ACTOR.get()
        self._add(Event(experiment.ended_s, what, label, experiment.why, by))

    def _note(self, what: str, runner: PolicyRunner, why: str) -> None:
        self.note(what, runner.label, why)

    def note(self, what: str, of: str, why: str) -> None:
        """Write a change down among those of policies, with who asked for it."""
        self._add(Event(time.time(), what, of, why, ACTOR.get()))

    def _add(self, event: Event) -> None:
        self.events.append(event)
        self.num_events += 1
        if self.on_event is not None:
            self.on_event(event)


def _load_baseline(name: str, scenario: str) -> LoadedPolicy:
    loaded = resolve_policy(name, scenario)
    if loaded.card.num_replicas is not None:
        raise ValueError(
            f"baseline {name!r} is tuned for {loaded.card.num_replicas} replicas, and replicas "
            "come and go; choose one for any number"
        )
    warm_up(loaded)
    return loaded

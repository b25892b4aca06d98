"""Who decides, and how that changes: switch, experiment, promotion, rollback.

Every change is a step on the event loop, in which nothing else happens. The registry's aliases
follow it (`champion_alias`), and the state file has it before it is answered (`state`). Changes
wait for each other; a rollback waits for nothing. The policy that decided before is kept warm, so
that going back to it takes no time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy.audit_log import ACTOR, Event
from serve_app.policy.champion_alias import (
    Aliases,
    ChampionAlias,
    InThread,
    PromotionDropped,
    text_of,
)
from serve_app.policy.experiment import Conflict, Experiment, Mode, check_canary
from serve_app.policy.loading import LoadedPolicy, resolve_policy
from serve_app.policy.picker import ReplicaPicker
from serve_app.policy.runner import RAY_DEFAULT, PolicyRunner, is_same, warm_up
from serve_app.policy.state import (
    Configured,
    GatewayState,
    PolicyState,
    Remembers,
    StateFile,
    StateStore,
)
from serve_app.policy.timeouts import ThreadTimeout
from tokenyard.artifact import model_name
from tokenyard.registry import CHAMPION
from tokenyard.routing.scenario import load_scenario
from tokenyard.statistics.sequential import DEFAULT_ALPHA

Action = Literal["shadow", "canary", "stop", "promote", "rollback"]
LINEAGE = ("trace_sha256", "calibration_sha256", "sweep_run")
"""Keys of an artifact's lineage that a promotion copies beside the artifact's own hash."""
_WARM_UP_S = 30.0
_NUM_EVENTS = 200


class Loan(NamedTuple):
    """That a policy decides for a while; what decided before comes back by itself."""

    champion: PolicyRunner
    """What decided before."""
    previous: PolicyRunner | None
    """What that can go back to."""
    ends: asyncio.TimerHandle
    until_s: float
    """Unix time, seconds."""


class PolicyManager:
    """Changes who decides, and remembers it."""

    def __init__(
        self,
        scenario: str,
        baseline: str,
        settings: CircuitBreakerSettings,
        rng: np.random.Generator,
        registry: str | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        """Take the baseline; it decides until `switch` or `resume` is called.

        `clock_s` is any clock that does not go back, seconds; `in_thread` calls what blocks: the
        registry and the disk.

        Raises:
            ValueError: The baseline is not known, or is not for any number of replicas.
        """
        self.scenario, self.baseline, self.registry = scenario, baseline, registry
        loaded = resolve_policy(baseline, scenario)
        if loaded.card.num_replicas is not None:
            raise ValueError(
                f"baseline {baseline!r} is tuned for {loaded.card.num_replicas} replicas, and "
                "replicas come and go; choose one for any number"
            )
        warm_up(loaded)
        self.picker = ReplicaPicker(baseline, loaded, settings, rng, clock_s)
        self.previous: PolicyRunner | None = None
        """The policy that decided before, to go back to."""
        self.loan: Loan | None = None
        self.events: deque[Event] = deque(maxlen=_NUM_EVENTS)
        self.on_event: Callable[[Event], None] | None = None
        """Is told of each."""
        self._in_thread = in_thread
        self.store = StateStore(None, {}, self._snapshot, in_thread)
        self._configured = Configured(policy=baseline, scenario=scenario)
        self._explore_fraction = 0.0
        """The cluster file's."""
        self._alias: ChampionAlias | None = None
        self._registry_note: str | None = None
        self._changing = asyncio.Lock()

    @property
    def policy(self) -> PolicyRunner:
        """The champion."""
        return self.picker.policy

    @property
    def experiment(self) -> Experiment | None:
        """The last one; it may have ended."""
        return self.picker.experiment

    @property
    def registry_note(self) -> str | None:
        """What the last promotion or rollback wrote to the registry, or why it could not."""
        return self._registry_note or (None if self._alias is None else self._alias.note)

    def note(self, what: str, of: str, why: str, time_s: float | None = None) -> None:
        """Write down what has happened to a policy, or something else, and who asked for it.

        That was at `time_s`, Unix time, seconds; None: now.
        """
        time_s = time.time() if time_s is None else time_s
        self.events.append(event := Event(time_s, what, of, why, ACTOR.get()))
        self.store.is_due = True
        if self.on_event is not None:
            self.on_event(event)

    def switch(
        self,
        policy: str,
        explore_fraction: float = 0.0,
        may_be_missing: bool = False,
        prepared: LoadedPolicy | None = None,
    ) -> None:
        """Let another policy decide from now on; counters go on.

        `may_be_missing`: the baseline stands in for a trained policy that is not there. `prepared`
        is what `prepare` found for it; None: found now.

        Raises:
            ValueError: It is not known, cannot be used, or fails its warm-up; what decided before
                goes on.
        """
        if policy == RAY_DEFAULT:
            runner = self.picker.ray_default()
        else:
            stand_in = self.baseline if may_be_missing else None
            prepared = prepared or prepare(policy, self.scenario, self.registry, stand_in)
            runner = self.picker.runner(policy, prepared, explore_fraction)
        self._install(runner, "switched to", "asked")

    async def switch_by_hand(
        self, policy: str, explore_fraction: float, for_s: float | None = None
    ) -> None:
        """Let another policy decide, after whatever else is being changed, and remember it.

        `for_s`: what decides now decides again after so many seconds, or once the gateway has begun
        anew; None: the other decides for good.
        """
        async with self.store.changing(), self._changing:
            prepared = None
            if policy != RAY_DEFAULT:
                # Off the event loop: it may take seconds to find, load and compile.
                prepared = await asyncio.to_thread(prepare, policy, self.scenario, self.registry)
            self.store.check_goes_on()
            before, configured = self.policy, self._configured.policy
            lender = (before, self.previous) if self.loan is None else self.loan[:2]
            self.switch(policy, explore_fraction, prepared=prepared)
            self.policy.aliases = before.aliases
            if for_s is not None:
                ends = asyncio.get_running_loop().call_later(
                    for_s, self._install, lender[0], "decides again", "the other's time is over"
                )
                self.loan = Loan(*lender, ends, time.time() + for_s)
                return
            self.policy.by_hand = (policy, explore_fraction) != (configured, self._explore_fraction)
            if policy == configured and not is_same(self.policy.label, before.label):
                # The name means another now: to go back to this one is a choice.
                before.by_hand = True

    def start_experiment(
        self,
        policy: str,
        mode: Mode,
        share: float,
        alpha: float = DEFAULT_ALPHA,
        prepared: LoadedPolicy | None = None,
    ) -> None:
        """Begin an experiment with a policy, and end the one that runs.

        Raises:
            Conflict: It is a canary, and its requests would wait by other keys.
            ValueError: It cannot be used, or nobody decides whom it could be compared to.
        """
        champion, picker = self.policy, self.picker
        # A canary explores as the champion does, or its log could judge nobody.
        explore_fraction = champion.explore_fraction if mode == "canary" else 0.0
        prepared = prepared or prepare(policy, self.scenario, self.registry)
        runner = picker.runner(policy, prepared, explore_fraction)
        if mode == "canary":
            check_canary(champion, runner)
        experiment = Experiment(
            champion, runner, mode, share, picker.settings, time.time(), alpha, self.note
        )
        self.end_experiment("another one began")
        picker.experiment = experiment
        self.note(f"{mode} began", runner.label, f"share {experiment.share:g}")

    def end_experiment(self, why: str) -> None:
        """End the experiment that runs, if any does."""
        if self.experiment is not None:
            self.experiment.end(why, time.time())

    async def change(
        self, action: Action, policy: str | None = None, share: float = 0.2,
        alpha: float = DEFAULT_ALPHA,
    ) -> None:  # fmt: skip
        """Start or end an experiment, promote the policy that is tried, or roll back.

        Raises:
            ValueError: The policy cannot be used.
            Conflict: There is nothing to promote, stop or go back to, no registry to write to, a
                canary whose requests would wait by other keys than the champion's, or the gateway
                ends.
        """
        self.store.check_goes_on()
        if action != "rollback":
            async with self._changing:
                await self._carry_out(action, policy, share, alpha)
        elif self.previous is None:
            raise Conflict("no other policy has decided before")
        else:
            before, alias = self.policy.aliases, self._alias
            self._install(self.previous, "rolled back to", "asked")
            self._registry_note = None
            if alias is not None and not (alias.is_settled and self.policy.aliases == before):
                alias.follow()
        await self.store.save_in_time()

    def resume(
        self,
        policy: str,
        explore_fraction: float = 0.0,
        may_be_missing: bool = False,
        file: StateFile | None = None,
        parts: Mapping[str, Remembers] | None = None,
    ) -> None:
        """Let the policy decide that the cluster file names, or go on where the state file is.

        `file` has what an earlier gateway wrote, and gets what must survive a crash from now on,
        with other parts of the gateway by name.

        Raises:
            ValueError: The policy cannot be used.
        """
        self._configured = Configured(policy=policy, scenario=self.scenario)
        self._explore_fraction = explore_fraction
        self.store = StateStore(file, parts or {}, self._snapshot, self._in_thread)
        state = self.store.read()
        if state is not None and state.alias is not None and state.alias.uri == self.registry:
            # First: what `champion` means depends on it.
            alias = self._alias_in(state.alias.uri)
            if alias.model == state.alias.model:
                alias.resume(state.alias.known, state.alias.is_settled, state.policy.aliases)
        self.switch(policy, explore_fraction, may_be_missing)
        if self.previous is not None:
            # The baseline: whoever goes back to it has chosen it.
            self.previous.by_hand = True
        if state is not None:
            try:
                self._take_up(state)
            except (ValueError, KeyError, TypeError) as error:
                self.store.refuse(f"the state cannot be taken up: {text_of(error)}")

    def start(self) -> None:
        """Begin to write evidence down, and to finish what the registry still has to be told."""
        self.store.start()
        if self._alias is not None and not self._alias.is_settled:
            self._alias.follow()

    async def hand_over(self) -> None:
        """Write the state a last time: from now on the file is another gateway's."""
        await self.store.stop()
        if self._alias is not None:
            self._alias.stop()

    def stop(self) -> None:
        """End the threads, and a loan's timer."""
        self.end_experiment("the gateway ends")
        if self.loan is not None:
            self.loan.ends.cancel()
        self.picker.stop()

    def _install(self, runner: PolicyRunner, what: str, why: str) -> None:
        # An experiment is against one champion: with another it would begin anew.
        self.end_experiment("another policy decides")
        previous: PolicyRunner | None = self.policy
        loan, self.loan = self.loan, None
        if loan is not None:
            loan.ends.cancel()
            if runner is loan.champion:
                previous = loan.previous  # As if there had been no loan.
        self.previous, self.picker.policy = previous, runner
        self.note(what, runner.label, why)

    async def _carry_out(
        self, action: Action, policy: str | None, share: float, alpha: float
    ) -> None:
        experiment = self.experiment
        if action == "shadow" or action == "canary":
            if policy is None:
                raise ValueError(f"policy is missing: name the one for the {action}")
            if RAY_DEFAULT in (policy, self.policy.name):
                raise ValueError(f"{RAY_DEFAULT} scores nothing that an experiment could compare")
            prepared = await asyncio.to_thread(prepare, policy, self.scenario, self.registry)
            self.store.check_goes_on()
            self.start_experiment(policy, action, share, alpha, prepared)
        elif experiment is None or not experiment.running:
            raise Conflict("no experiment runs")
        elif action == "stop":
            self.end_experiment("asked")
        else:
            await self._promote(experiment)

    async def _promote(self, experiment: Experiment) -> None:
        """Promote, or be sure that it does not come about later either."""
        loaded, champion = experiment.policy.loaded, self.policy

        def begin(before: Aliases) -> bool:
            if experiment.running:
                # What decides now is what the registry has now, whoever else has written there.
                self.policy.aliases = before
                if self.previous is not None and self.previous.aliases is None:
                    self.previous.aliases = before
            return experiment.running

        def finish(after: Aliases | None, by_hand: bool, note: str | None) -> bool:
            if not experiment.running:
                return False
            name, explore_fraction = experiment.policy.name, self.policy.explore_fraction
            runner = self.picker.runner(name, loaded, explore_fraction)
            runner.aliases, runner.by_hand, self._registry_note = after, by_hand, note
            self.end_experiment("it was promoted")
            self._install(runner, "promoted", "after its experiment")
            return True

        artifact = loaded.artifact
        if artifact is not None and artifact.sha256 != loaded.card.sha256:
            artifact = None  # The order behind its name is in no file.
        if self.registry is None or artifact is None:
            what = "no policy file says all of it" if artifact is None else "there is no registry"
            lasts = "until the gateway restarts"
            if self.store.file is not None:
                lasts = "for this cluster file"
            finish(champion.aliases, True, f"promoted {lasts}: {what}")
            return
        tags = promotion_tags(experiment, champion)
        # The alias says it already, unless the cluster file names another policy.
        by_hand = self._configured.policy != CHAMPION
        try:
            await self._alias_in(self.registry).promote(
                artifact, tags, begin, lambda after: finish(after, by_hand, None)
            )
        except PromotionDropped:
            raise Conflict(f"the experiment ended meanwhile: {experiment.why}") from None
        except Exception as error:  # Stores fail in ways of their own.
            self._registry_note = f"not promoted: {text_of(error)}"
            raise Conflict(self._registry_note) from None

    def _alias_in(self, uri: str) -> ChampionAlias:
        if self._alias is None or self._alias.uri != uri:
            # Looked up by the name that stands in it; the cluster file may give its path.
            model = model_name("routing", load_scenario(self.scenario).name)
            wanted = lambda: self.policy.aliases  # noqa: E731
            self._alias = ChampionAlias(uri, model, wanted, self.store.save, self._in_thread)
        return self._alias

    def _snapshot(self) -> GatewayState:
        experiment = self.experiment
        if experiment is not None and not experiment.running:
            experiment = None
        policy, previous = (self.policy, self.previous) if self.loan is None else self.loan[:2]
        return GatewayState.model_validate({
            "configured": self._configured, "policy": policy, "previous": previous,
            "experiment": experiment, "events": self.events, "alias": self._alias,
            "parts": self.store.parts,
        })  # fmt: skip

    def _take_up(self, state: GatewayState) -> None:
        """Go on where an earlier gateway was, if it was to serve the same."""
        picker, store, champion, trial = self.picker, self.store, self.policy, state.experiment
        events = list(state.events)[len(self.events) - _NUM_EVENTS :]
        store.restore_parts(state, always=True)
        if state.configured != self._configured:
            store.read_note = (
                f"the state is that of policy {state.configured.policy!r} and scenario "
                f"{state.configured.scenario!r}, which the cluster file no longer names"
            )
            self.events.extendleft(reversed(events))
            return
        is_settled = self._alias is None or self._alias.is_settled
        goes_on = _decides_again(state.policy, champion, is_settled)
        if goes_on:
            champion = _restored(state.policy, picker, self.scenario)
        elif is_same(champion.label, state.policy.label):
            champion.aliases = state.policy.aliases
            champion.breaker.restore(state.policy.breaker)
        try:
            previous = _restored_previous(state, champion, picker, self.scenario)
        except ValueError as error:
            previous = None
            store.lack(f"there is nothing to go back to: {error}")
        experiment = None
        if trial is not None and is_same(trial.champion, champion.label):
            runner = _restored(trial.policy, picker, self.scenario)
            experiment = Experiment(
                champion, runner, trial.mode, trial.share, picker.settings, trial.started_s,
                trial.alpha, self.note,
            )  # fmt: skip
            experiment.restore(trial.evidence)
        store.restore_parts(state, always=False)
        self.events.extendleft(reversed(events))
        self.previous = previous or self.previous
        picker.policy, picker.experiment = champion, experiment
        if goes_on:
            self.note("goes on with", champion.label, "the gateway began anew")
        if trial is not None and experiment is None:
            self.note(f"{trial.mode} ended", trial.policy.label, "another policy decides")
        elif experiment is not None and experiment.mode == "canary":
            try:
                check_canary(champion, experiment.policy)
            except Conflict as error:  # An earlier release began it.
                experiment.end(str(error), time.time())


def prepare(
    policy: str, scenario: str, registry: str | None = None, stand_in: str | None = None
) -> LoadedPolicy:
    """Find a policy as `resolve_policy` does, and let it decide once; may be called in any thread.

    Raises:
        ValueError: It is not known, cannot be used, or fails its warm-up.
    """
    return _warmed_up(resolve_policy(policy, scenario, registry, stand_in))


def promotion_tags(experiment: Experiment, champion: PolicyRunner) -> dict[str, str]:
    """Say on the version that becomes champion where it comes from, and why."""
    loaded = experiment.policy.loaded
    tags = {f"lineage.{key}": loaded.card.lineage.get(key, "unknown") for key in LINEAGE}
    tags |= {
        "lineage.artifact_sha256": loaded.card.sha256,
        "promotion.time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "promotion.trial": experiment.mode,
        "promotion.in_place_of": champion.label,
    }
    if experiment.test is not None:
        tags["promotion.verdict"] = experiment.tally()
    return tags


def _warmed_up(loaded: LoadedPolicy) -> LoadedPolicy:
    timeout = ThreadTimeout(_WARM_UP_S)
    try:
        timeout.call(warm_up, loaded)
    except Exception as error:
        raise ValueError(f"policy {loaded.card.name!r} fails its warm-up: {error}") from None
    finally:
        timeout.stop()
    return loaded


def _restored(state: PolicyState, picker: ReplicaPicker, scenario: str) -> PolicyRunner:
    """Make a policy again."""
    if state.name == RAY_DEFAULT:
        runner = picker.ray_default()
    else:
        loaded = _warmed_up(state.loaded.load(scenario))
        runner = picker.runner(state.name, loaded, state.explore_fraction)
    runner.by_hand, runner.aliases = state.by_hand, state.aliases
    runner.breaker.restore(state.breaker)
    return runner


def _decides_again(state: PolicyState, champion: PolicyRunner, is_settled: bool) -> bool:
    """Whether the earlier champion decides, and not what the cluster file's name means now."""
    is_sure = is_settled and champion.loaded.card.registry_error is None
    is_other = state.loaded.artifact is not None and not is_same(state.label, champion.label)
    return state.by_hand or (is_other and not is_sure)


def _restored_previous(
    state: GatewayState, champion: PolicyRunner, picker: ReplicaPicker, scenario: str
) -> PolicyRunner | None:
    """Make again what decided before the champion; None: nothing."""
    if not is_same(state.policy.label, champion.label):
        last = _restored(state.policy, picker, scenario)
        # A rule is the same one, whatever release of it the label names.
        if not is_same(last.label, champion.label):
            last.by_hand = True  # The name means another now: to go back to this one is a choice.
            return last
    return None if state.previous is None else _restored(state.previous, picker, scenario)

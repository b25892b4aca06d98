"""The one place where it changes who decides: switch, experiment, promotion, rollback.

Every change is a step on the event loop, in which nothing else happens. The registry's aliases
follow it (`champion_alias`), and the state file has it before it is answered (`state`). Changes
wait for each other; a rollback waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from serve_app.policy.audit_log import Event
from serve_app.policy.champion_alias import (
    Aliases,
    ChampionAlias,
    InThread,
    PromotionDropped,
    text_of,
)
from serve_app.policy.experiment import Experiment
from serve_app.policy.manager import PolicyManager
from serve_app.policy.runner import RAY_DEFAULT, PolicyRunner, is_same
from serve_app.policy.same_order import OrdersDiffer, check_canary
from serve_app.policy.state import (
    Configured,
    Remembers,
    StateError,
    StateFile,
    StoredAlias,
    StoredEvent,
    StoredExperiment,
    StoredPolicy,
    StoredState,
)
from tokenyard import registry
from tokenyard.artifact import RegistryError, model_name
from tokenyard.registry import CHAMPION
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.scenario import load_scenario
from tokenyard.statistics.sequential import DEFAULT_ALPHA

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Action = Literal["shadow", "canary", "stop", "promote", "rollback"]
LINEAGE = ("trace_sha256", "calibration_sha256", "sweep_run")
"""Keys of an artifact's lineage that a promotion copies beside the artifact's own hash."""
_REGISTRY_S = 30.0
_SAVE_S = 5.0
"""Longest time for which an answer waits for the disk."""
_WATCH_EVERY_S = 1.0
_ALWAYS = ("limits", "outliers")
"""Parts that hold whichever policy the cluster file names: what keys have used, and who fails."""
_EVIDENCE_EVERY_S = 5.0


class Conflict(ValueError):
    """A change that cannot be made as things are; the text says why."""


class _Promotion:
    """A promotion under way."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.is_given_up = False
        self.is_done = False


class Lifecycle:
    """Carries out what `POST /v1/policy` and `POST /v1/policies` ask for, and remembers it."""

    def __init__(
        self,
        manager: PolicyManager,
        file: StateFile | None = None,
        parts: Mapping[str, Remembers] | None = None,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        """Change what a manager asks.

        Args:
            manager: Knows who decides.
            file: Gets what must survive a crash; None: nothing does.
            parts: What else is written there, by name.
            in_thread: Calls what blocks: the registry and the disk.
        """
        self.manager, self._file, self._parts = manager, file, dict(parts or {})
        self._in_thread = in_thread
        self._configured = Configured(policy=manager.policy.name, scenario=manager.scenario)
        self._explore_fraction = manager.policy.explore_fraction
        self._busy, self._saving = asyncio.Lock(), asyncio.Lock()
        self._alias: ChampionAlias | None = None
        self._registry_note: str | None = None
        self._state_note: str | None = None
        """Why what an earlier gateway wrote was not taken up."""
        self._save_note: str | None = None
        """Why the last state is not written."""
        self._saved_events, self._saved_s = 0, 0.0
        self._background: set[asyncio.Task[Any]] = set()
        self._has_ended = False

    def resume(
        self, policy: str, explore_fraction: float = 0.0, may_be_missing: bool = False
    ) -> None:
        """Let the policy decide that the cluster file names, or go on where the state file is.

        Args:
            policy: As for `PolicyManager.switch`, like the others.
            explore_fraction: Share of its decisions drawn at random.
            may_be_missing: Let the baseline stand in for a trained policy that is not there.

        Raises:
            ValueError: The policy cannot be used.
        """
        manager, stored = self.manager, self._read()
        self._configured = Configured(policy=policy, scenario=manager.scenario)
        self._explore_fraction = explore_fraction
        if stored is not None:
            # First: what `champion` means depends on it.
            self._finish_writes(stored)
        manager.switch(policy, explore_fraction, may_be_missing)
        if manager.previous is not None:
            # The baseline: whoever goes back to it has chosen it.
            manager.previous.by_hand = True
        if stored is None:
            return
        try:
            self._take_up(stored)
        except (ValueError, KeyError, TypeError) as error:
            self._refuse_state(f"the state cannot be taken up: {text_of(error)}")

    def start(self) -> None:
        """Begin to write evidence down, and to finish what the registry still has to be told."""
        self._keep(self._watch())
        if self._alias is not None and not self._alias.is_settled:
            self._alias.follow()

    async def stop(self) -> None:
        """Write the state a last time: from now on the file is another gateway's."""
        self._has_ended = True
        await self._written()
        if self._file is not None:
            self._file.is_closed = True
        for one in self._background:
            one.cancel()
        if self._alias is not None:
            self._alias.stop()

    async def switch(self, policy: str, explore_fraction: float) -> None:
        """Let another policy decide, after whatever else is being changed.

        Raises:
            ValueError: It cannot be used.
            Conflict: The gateway ends.
        """
        manager = self.manager
        async with self._busy:
            prepared = None
            if policy != RAY_DEFAULT:
                # Off the event loop: it may take seconds to find, load and compile.
                prepared = await asyncio.to_thread(manager.prepare, policy)
            self._check_goes_on()
            before = manager.policy
            manager.switch(policy, explore_fraction, prepared=prepared)
            manager.policy.aliases = before.aliases
            wanted = (self._configured.policy, self._explore_fraction)
            manager.policy.by_hand = (policy, explore_fraction) != wanted
            is_new = not is_same(manager.policy.label, before.label)
            if policy == self._configured.policy and is_new:
                # The name means another now: to go back to this one is a choice.
                before.by_hand = True
        await self._written()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Have something else changed that is remembered: at the end of the context it is written.

        Raises:
            Conflict: The gateway ends.
        """
        self._check_goes_on()
        yield
        await self._written()

    async def change(
        self, action: Action, policy: str | None = None, share: float = 0.2,
        alpha: float = DEFAULT_ALPHA,
    ) -> None:  # fmt: skip
        """Start or end an experiment, promote the policy that is tried, or roll back.

        Args:
            action: Which of these.
            policy: Name of the policy to try.
            share: Fraction of requests that a canary decides for.
            alpha: Chance, at most, to stop a canary that is as good as the champion.

        Raises:
            ValueError: The policy cannot be used.
            Conflict: There is nothing to promote, stop or go back to, no registry to write to, a
                canary whose requests would wait by other keys than the champion's, or the gateway
                ends.
        """
        self._check_goes_on()
        if action == "rollback":
            self._roll_back()
        else:
            async with self._busy:
                await self._carry_out(action, policy, share, alpha)
        await self._written()

    @property
    def registry_note(self) -> str | None:
        """What the last promotion or rollback wrote to the registry, or why it could not."""
        alias_note = None if self._alias is None else self._alias.note
        return self._registry_note or alias_note

    @property
    def state_note(self) -> str | None:
        """Why the state could not be read or written; None: it could, or there is no file."""
        return self._save_note or self._state_note

    async def save(self) -> None:
        """Write the state down, after whoever does so already."""
        if self._file is None:
            return
        async with self._saving:
            num_events, state = self.manager.num_events, self._snapshot()
            try:
                await self._in_thread(self._file.write, state)
            except OSError as error:
                note = f"the state cannot be written: {error}"
                if note != self._save_note:
                    logger.error("%s", note)
                self._save_note = note
            else:
                self._saved_events, self._saved_s = num_events, time.monotonic()
                self._save_note = None

    def _check_goes_on(self) -> None:
        """Refuse a change that the next gateway would not hear of.

        Raises:
            Conflict: The gateway ends.
        """
        if self._has_ended:
            raise Conflict("the gateway is about to end; ask again, and the next one answers")

    async def _carry_out(
        self, action: Action, policy: str | None, share: float, alpha: float
    ) -> None:
        manager = self.manager
        if action == "shadow" or action == "canary":
            if policy is None:
                raise ValueError(f"policy is missing: name the one for the {action}")
            if policy == RAY_DEFAULT:
                raise ValueError(f"{RAY_DEFAULT} scores nothing that it could be compared on")
            prepared = await asyncio.to_thread(manager.prepare, policy)
            self._check_goes_on()
            try:
                manager.start_experiment(policy, action, share, alpha, prepared)
            except OrdersDiffer as error:
                raise Conflict(str(error)) from None
        elif action == "stop":
            if manager.experiment is None or not manager.experiment.running:
                raise Conflict("no experiment runs")
            manager.end_experiment("asked")
        else:
            await self._promote()

    def _roll_back(self) -> None:
        """Let the previous policy decide at once; the registry follows when it can."""
        before = self.manager.policy.aliases
        try:
            self.manager.roll_back()
        except ValueError as error:
            raise Conflict(str(error)) from None
        self._registry_note = None
        alias = self._alias
        if alias is not None and not (alias.is_settled and self.manager.policy.aliases == before):
            alias.follow()

    async def _promote(self) -> None:
        manager = self.manager
        experiment = manager.experiment
        if experiment is None or not experiment.running:
            raise Conflict("no experiment runs")
        loaded, aliases = experiment.policy.loaded, manager.policy.aliases
        artifact = loaded.artifact
        if artifact is not None and artifact.sha256 != loaded.card.sha256:
            artifact = None  # The order behind its name is in no file.
        if manager.registry is not None and artifact is not None:
            await self._promote_registered(_Promotion(experiment), manager.registry, artifact)
            return
        manager.promote()
        manager.policy.aliases, manager.policy.by_hand = aliases, True
        what = "there is no registry" if artifact is not None else "no policy file says all of it"
        lasts = "for this cluster file" if self._file is not None else "until the gateway restarts"
        self._registry_note = f"promoted {lasts}: {what}"

    async def _promote_registered(
        self, promotion: _Promotion, uri: str, artifact: PolicyArtifact
    ) -> None:
        """Promote, or be sure that it does not come about later either.

        Raises:
            Conflict: The registry was not written in time, or the experiment has ended meanwhile.
        """
        writing = self._keep(self._write_champion(promotion, uri, artifact))
        try:
            await asyncio.wait([writing], timeout=_REGISTRY_S)
        finally:
            # Also where the caller has left. What a thread still writes is undone once it has.
            promotion.is_given_up = not promotion.is_done
        if promotion.is_done:
            return
        if not writing.done():
            self._registry_note = "not promoted: the registry does not answer in time"
            raise Conflict(self._registry_note)
        error = writing.exception()
        if isinstance(error, PromotionDropped):
            raise Conflict(f"the experiment ended meanwhile: {promotion.experiment.why}")
        assert error is not None
        self._registry_note = f"not promoted: {text_of(error)}"
        raise Conflict(self._registry_note)

    async def _write_champion(
        self, promotion: _Promotion, uri: str, artifact: PolicyArtifact
    ) -> None:
        manager, experiment = self.manager, promotion.experiment
        tags = promotion_tags(experiment, artifact.metadata.lineage, manager.policy)

        def is_wanted() -> bool:
            runs = manager.experiment is experiment and experiment.running
            return runs and not promotion.is_given_up

        def begin(before: Aliases) -> bool:
            if not is_wanted():
                return False
            # What decides now is what the registry has now, whoever else has written there.
            manager.policy.aliases = before
            if manager.previous is not None and manager.previous.aliases is None:
                manager.previous.aliases = before
            return True

        def finish(after: Aliases) -> bool:
            if not is_wanted():
                return False
            manager.promote()
            manager.policy.aliases = after
            # The alias says it already, unless the cluster file names another policy.
            manager.policy.by_hand = self._configured.policy != CHAMPION
            promotion.is_done, self._registry_note = True, None
            return True

        await self._alias_in(uri).promote(artifact, tags, begin, finish)

    def _alias_in(self, uri: str) -> ChampionAlias:
        if self._alias is None or self._alias.uri != uri:
            # Looked up by the name that stands in it; the cluster file may give its path.
            model = model_name("routing", load_scenario(self.manager.scenario).name)
            wanted = lambda: self.manager.policy.aliases  # noqa: E731
            self._alias = ChampionAlias(uri, model, wanted, self.save, self._in_thread)
        return self._alias

    def _read(self) -> StoredState | None:
        try:
            return None if self._file is None else self._file.read()
        except StateError as error:
            self._refuse_state(str(error))
            return None

    def _refuse_state(self, reason: str) -> None:
        """Serve what the cluster file names: a gateway that does not start is worse."""
        assert self._file is not None
        try:
            self._file.set_aside()
            kept = f"it is kept as {self._file.path}.refused"
        except OSError as error:
            kept = f"it cannot be set aside: {error.strerror}"
        self._state_note = reason
        logger.error("%s; %s", reason, kept)

    def _finish_writes(self, stored: StoredState) -> None:
        """Take up what the registry was being told, and tell it."""
        alias, uri = stored.alias, self.manager.registry
        if alias is None or uri is None or uri != alias.uri:
            return
        mine = self._alias_in(uri)
        if mine.model != alias.model:
            return
        mine.known, mine.is_settled = set(alias.known), alias.is_settled
        wanted = stored.policy.aliases
        if mine.is_settled or wanted is None:
            return
        try:
            registry.settle(uri, mine.model, wanted, mine.known)
            mine.is_settled = True
        except RegistryError as error:
            mine.note = f"the registry is not as it should be: {error}"
            logger.error("%s", mine.note)

    def _take_up(self, stored: StoredState) -> None:
        """Go on where an earlier gateway was, if it was to serve the same."""
        manager = self.manager
        events = [Event(**one.model_dump()) for one in stored.events]
        self._restore(stored, _ALWAYS)
        if stored.configured != self._configured:
            self._state_note = (
                f"the state is that of policy {stored.configured.policy!r} and scenario "
                f"{stored.configured.scenario!r}, which the cluster file no longer names"
            )
            manager.resume(None, None, None, events)
            return
        policy = self._decided(stored.policy)
        deciding = policy or manager.policy
        if policy is None and is_same(manager.policy.label, stored.policy.label):
            manager.policy.aliases = stored.policy.aliases
            manager.policy.breaker.restore(stored.policy.breaker)
        previous = self._before(stored, deciding)
        experiment = None
        if stored.experiment is not None and is_same(stored.experiment.champion, deciding.label):
            experiment = self._experiment(stored.experiment, deciding)
        self._restore(stored, [one for one in self._parts if one not in _ALWAYS])
        manager.resume(policy, previous, experiment, events)
        if stored.experiment is not None and experiment is None:
            ended, label = stored.experiment.mode, stored.experiment.policy.label
            manager.note(f"{ended} ended", label, "another policy decides")

    def _restore(self, stored: StoredState, names: Iterable[str]) -> None:
        """Let parts of the gateway take up what they have written there."""
        for name in names:
            if name not in self._parts or name not in stored.parts:
                continue
            try:
                self._parts[name].restore(stored.parts[name])
            except (ValueError, KeyError, TypeError) as error:
                self._state_note = f"{name} is not as it was: {text_of(error)}"
                logger.error("%s", self._state_note)

    def _decided(self, stored: StoredPolicy) -> PolicyRunner | None:
        """Who decides in place of what was found for the cluster file's name; None: nobody."""
        found, alias = self.manager.policy, self._alias
        if stored.by_hand:
            return stored.runner(self.manager)
        unsure = found.loaded.card.registry_error is not None
        unsure = unsure or (alias is not None and not alias.is_settled)
        if not unsure or stored.artifact is None or is_same(stored.label, found.label):
            return None
        return stored.runner(self.manager)

    def _before(self, stored: StoredState, deciding: PolicyRunner) -> PolicyRunner | None:
        """Who decided before, to go back to; None: nobody who can be made again."""
        try:
            if not is_same(stored.policy.label, deciding.label):
                last = stored.policy.runner(self.manager)
                # A rule is the same one, whatever release of it the label names.
                if not is_same(last.label, deciding.label):
                    last.by_hand = True  # As in `switch`: the name means another now.
                    return last
            return None if stored.previous is None else stored.previous.runner(self.manager)
        except ValueError as error:
            self._state_note = f"there is nothing to go back to: {error}"
            logger.error("%s", self._state_note)
            return None

    def _experiment(self, stored: StoredExperiment, champion: PolicyRunner) -> Experiment:
        """Make an experiment again, with its evidence; a canary that none may be now has ended."""
        runner = stored.policy.runner(self.manager)
        made = self.manager.make_experiment(
            champion, runner, stored.mode, stored.share, stored.alpha, stored.started_s
        )
        made.restore(stored.evidence)
        if made.mode == "canary":
            try:
                check_canary(champion, runner)
            except OrdersDiffer as error:  # An earlier release began it.
                made.end(str(error), time.time())
        return made

    def _snapshot(self) -> StoredState:
        manager, alias = self.manager, self._alias
        experiment = manager.experiment
        running = experiment is not None and experiment.running
        return StoredState(
            configured=self._configured,
            policy=StoredPolicy.of(manager.policy),
            previous=None if manager.previous is None else StoredPolicy.of(manager.previous),
            experiment=StoredExperiment.of(experiment, manager.policy)
            if experiment is not None and running
            else None,
            events=tuple(StoredEvent.of(one) for one in manager.events),
            alias=None
            if alias is None
            else StoredAlias(
                uri=alias.uri, model=alias.model, known=tuple(sorted(alias.known)),
                is_settled=alias.is_settled,
            ),
            parts={name: part.saved() for name, part in self._parts.items()},
        )  # fmt: skip

    async def _written(self) -> None:
        """Wait until the disk has the state, though not for ever."""
        if self._file is None:
            return
        done, _ = await asyncio.wait([self._keep(self.save())], timeout=_SAVE_S)
        if not done:
            self._save_note = f"the state was not written within {_SAVE_S:g} s"

    async def _watch(self) -> None:
        """Write down what happens by itself: a canary that ends, and evidence."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            is_due = time.monotonic() - self._saved_s > _EVIDENCE_EVERY_S
            if is_due or self.manager.num_events != self._saved_events:
                await self.save()

    def _keep(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run in the background; nothing else would hold the task."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever still waits is told; else nobody need be.


def promotion_tags(
    experiment: Experiment, lineage: Mapping[str, str], champion: PolicyRunner
) -> dict[str, str]:
    """What is written onto the version that becomes champion: where it comes from, and why."""
    tags = {f"lineage.{key}": lineage.get(key, "unknown") for key in LINEAGE}
    tags |= {
        "lineage.artifact_sha256": experiment.policy.loaded.card.sha256,
        "promotion.time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "promotion.trial": experiment.mode,
        "promotion.in_place_of": champion.label,
    }
    if experiment.test is not None:
        tags["promotion.verdict"] = experiment.tally()
    return tags

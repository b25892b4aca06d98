"""Experiments, promotion and rollback over HTTP: `/v1/policies`."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from serve_app.http.decide_schema import PolicyReference
from serve_app.policy.experiment import MAX_SHARE, Experiment, Mode
from serve_app.policy.manager import PolicyManager
from serve_app.policy.runner import RAY_DEFAULT, PolicyRunner
from tokenyard import registry
from tokenyard.artifact import model_name
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.statistics.sequential import DEFAULT_ALPHA

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
LINEAGE = ("trace_sha256", "calibration_sha256", "sweep_run")
"""Keys of an artifact's lineage that a promotion copies beside the artifact's own hash."""
_REGISTRY_S = 30.0


class Conflict(ValueError):
    """A change that cannot be made as things are; the text says why."""


class PoliciesChange(BaseModel):
    """Body of `POST /v1/policies`."""

    model_config = {"extra": "forbid", "strict": True}

    action: Literal["shadow", "canary", "stop", "promote", "rollback"]
    """Try a policy in an experiment, end that, let the policy decide that was tried, or go back."""
    policy: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """For `shadow` and `canary`: as in `POST /v1/policy`."""
    share: Annotated[float, Field(gt=0, le=MAX_SHARE, allow_inf_nan=False)] = 0.2
    """Of the requests that a canary decides for."""
    alpha: Annotated[float, Field(ge=1e-4, le=0.2, allow_inf_nan=False)] = DEFAULT_ALPHA
    """Chance, at most, to stop a canary that is as good as the champion."""


class BreakerAnswer(PolicyReference):
    """A policy and its breaker."""

    num_decisions: int
    fallbacks_by_reason: dict[str, int]
    breaker_open: bool
    times_opened: int


class EstimateAnswer(BaseModel):
    """A gain over what was done, with its 95 % interval; null: too little is known."""

    estimate: float | None
    low: float | None
    high: float | None


class ExperimentAnswer(BaseModel):
    """An experiment so far."""

    mode: Mode
    policy: BreakerAnswer
    share: float
    started_s: float
    ended_s: float | None
    why_ended: str | None
    canary_requests: int | None = None
    canary_attained_fraction: float | None = None
    champion_requests: int | None = None
    champion_attained_fraction: float | None = None
    log_capital: float | None = None
    """Of the bet that the canary is worse; it is stopped at minus the logarithm of alpha."""
    stops_at_log_capital: float | None = None
    decisions_compared: int | None = None
    agreement_fraction: float | None = None
    decisions_failed: int | None = None
    decisions_left_out: int | None = None
    estimated_gains: dict[str, EstimateAnswer] = {}


class PoliciesAnswer(BaseModel):
    """Answer of `GET /v1/policies`."""

    champion: BreakerAnswer
    previous: PolicyReference | None
    """What `rollback` goes back to."""
    experiment: ExperimentAnswer | None
    """The last one; it may have ended."""
    events: list[dict[str, Any]]
    """Changes of who decides, newest first."""
    registry: str | None
    """What the last promotion or rollback wrote to the registry, or why it could not."""


class Lifecycle:
    """Carries out what `POST /v1/policies` asks for."""

    def __init__(self, manager: PolicyManager) -> None:
        """Change what a manager asks."""
        self._manager = manager
        self._busy = asyncio.Lock()
        self._registry_note: str | None = None
        self._writing = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()

    async def switch(self, policy: str, explore_fraction: float) -> None:
        """Let another policy decide, after whatever else is being changed.

        Raises:
            ValueError: It cannot be used.
        """
        async with self._busy:
            prepared = None
            if policy != RAY_DEFAULT:
                # Off the event loop: it may take seconds to find, load and compile.
                prepared = await asyncio.to_thread(self._manager.prepare, policy)
            self._manager.switch(policy, explore_fraction, prepared=prepared)

    async def change(self, body: PoliciesChange) -> PoliciesAnswer:
        """Do it.

        Raises:
            ValueError: The policy cannot be used.
            Conflict: There is nothing to promote, stop or go back to, or no registry to write to.
        """
        manager = self._manager
        if body.action == "rollback":
            self._roll_back()
            return self.describe()
        async with self._busy:
            if body.action in ("shadow", "canary"):
                if body.policy is None:
                    raise ValueError(f"policy is missing: name the one for the {body.action}")
                if body.policy == RAY_DEFAULT:
                    raise ValueError(f"{RAY_DEFAULT} scores nothing that it could be compared on")
                prepared = await asyncio.to_thread(manager.prepare, body.policy)
                manager.start_experiment(body.policy, body.action, body.share, body.alpha, prepared)
            elif body.action == "stop":
                if manager.experiment is None or not manager.experiment.running:
                    raise Conflict("no experiment runs")
                manager.end_experiment("asked")
            else:
                await self._promote()
        return self.describe()

    def describe(self) -> PoliciesAnswer:
        """Say who decides, who did before, and how the experiment goes."""
        manager = self._manager
        previous = None if manager.previous is None else _reference(manager.previous)
        return PoliciesAnswer(
            champion=_breaker(manager.policy),
            previous=previous,
            experiment=None
            if manager.experiment is None
            else _describe_experiment(manager.experiment),
            events=[asdict(one) for one in reversed(manager.events)],
            registry=self._registry_note,
        )

    def _roll_back(self) -> None:
        """Let the previous policy decide at once; the registry follows when it can."""
        manager = self._manager
        promoted = manager.policy.loaded.artifact is not None and any(
            one.what == "promoted" and one.policy == manager.policy.label for one in manager.events
        )
        try:
            manager.roll_back()
        except ValueError as error:
            raise Conflict(str(error)) from None
        if promoted and manager.registry is not None:
            self._keep(self._restore(manager.registry))

    async def _restore(self, uri: str) -> None:
        try:
            version = await self._in_registry(registry.restore, uri, self._model)
            self._registry_note = f"{self._model} version {version} is champion again"
        except Exception as error:  # Stores fail in ways of their own.
            self._registry_note = f"not rolled back in the registry: {_text_of(error)}"
            logger.error("%s", self._registry_note)

    async def _promote(self) -> None:
        manager = self._manager
        experiment = manager.experiment
        if experiment is None or not experiment.running:
            raise Conflict("no experiment runs")
        artifact = experiment.policy.loaded.artifact
        if manager.registry is not None and artifact is not None:
            await self._write_champion(manager.registry, experiment, artifact)
        else:
            what = "there is no registry" if artifact is not None else "a rule is no artifact"
            self._registry_note = f"promoted until the gateway restarts: {what}"
        manager.promote()

    async def _write_champion(
        self, uri: str, experiment: Experiment, artifact: PolicyArtifact
    ) -> None:
        """Move the alias, and move it back where the promotion does not come about.

        Raises:
            Conflict: The registry was not written in time, or the experiment has ended meanwhile.
        """
        tags = promotion_tags(experiment, artifact.metadata.lineage, self._manager.policy)
        writing = self._keep(self._in_registry(_promote_in, uri, self._model, artifact, tags))
        try:
            done, _ = await asyncio.wait([writing], timeout=_REGISTRY_S)
        except asyncio.CancelledError:
            self._keep(self._undo(uri, writing))
            raise
        if not done:
            # A thread cannot be called back: what it still writes is undone once it has.
            self._keep(self._undo(uri, writing))
            self._registry_note = "not promoted: the registry does not answer in time"
            raise Conflict(self._registry_note)
        if (error := writing.exception()) is not None:
            self._registry_note = f"not promoted: {_text_of(error)}"
            raise Conflict(self._registry_note) from None
        if self._manager.experiment is not experiment or not experiment.running:
            await asyncio.shield(self._keep(self._undo(uri, writing)))
            raise Conflict(f"the experiment ended meanwhile: {experiment.why}")
        self._registry_note = f"{self._model} version {writing.result()[0]} is champion"

    async def _undo(self, uri: str, writing: asyncio.Task[tuple[str, dict[str, str]]]) -> None:
        """Put the aliases back as they were before a promotion that did not come about."""
        try:
            version, before = await writing
            await self._in_registry(registry.put_back, uri, self._model, version, before)
            self._registry_note = f"not promoted: {self._model} is as it was"
        except Exception as error:  # Stores fail in ways of their own.
            self._registry_note = f"not promoted: {_text_of(error)}"
            logger.error("%s", self._registry_note)

    async def _in_registry(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a function of the registry in a thread, after those that were called before."""
        async with self._writing:
            return await asyncio.to_thread(function, *args)

    def _keep(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run in the background; nothing else would hold the task."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    @property
    def _model(self) -> str:
        return model_name("routing", self._manager.scenario)


def _promote_in(
    uri: str, model: str, artifact: PolicyArtifact, tags: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Promote; return the version, and the aliases before."""
    before = registry.aliases_of(uri, model)
    return registry.promote(uri, model, artifact, tags), before


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


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _reference(policy: PolicyRunner) -> PolicyReference:
    reference = policy.loaded.card.reference
    if policy.name == RAY_DEFAULT:
        return reference.model_copy(update={"name": RAY_DEFAULT})
    return reference


def _breaker(policy: PolicyRunner) -> BreakerAnswer:
    return BreakerAnswer(
        **_reference(policy).model_dump(),
        num_decisions=policy.counts.num_decisions,
        fallbacks_by_reason=dict(policy.counts.fallbacks),
        breaker_open=policy.breaker.state == "open",
        times_opened=policy.breaker.num_opened,
    )


def _describe_experiment(experiment: Experiment) -> ExperimentAnswer:
    answer = ExperimentAnswer(
        mode=experiment.mode, policy=_breaker(experiment.policy), share=experiment.share,
        started_s=experiment.started_s, ended_s=experiment.ended_s, why_ended=experiment.why,
    )  # fmt: skip
    more: dict[str, Any] = {}
    if experiment.test is not None:
        test = experiment.test
        more = {
            "canary_requests": test.num_canary,
            "canary_attained_fraction": _share(test.canary_good, test.num_canary),
            "champion_requests": test.num_champion,
            "champion_attained_fraction": _share(test.champion_good, test.num_champion),
            "log_capital": test.log_capital,
            "stops_at_log_capital": test.stops_at,
        }
    if experiment.shadow is not None:
        shadow = experiment.shadow
        more = {
            "decisions_compared": shadow.num_asked,
            "agreement_fraction": _share(shadow.num_agreed, shadow.num_asked),
            "decisions_failed": shadow.num_failed,
            "decisions_left_out": shadow.num_left_out,
            "estimated_gains": {
                key: EstimateAnswer(**{k: _or_none(v) for k, v in one._asdict().items()})
                for key, one in shadow.gains.items()
            },
        }
    return answer.model_copy(update=more)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None

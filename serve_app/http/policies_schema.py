"""Messages of `/v1/policies`: the present and the previous policy, and the experiment."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, Field

from serve_app.http.body import StrictBody
from serve_app.policy.card import PolicyReference
from serve_app.policy.experiment import MAX_SHARE, Experiment, Mode
from serve_app.policy.manager import Action, PolicyManager
from serve_app.policy.runner import RAY_DEFAULT, PolicyRunner
from tokenyard.statistics.sequential import DEFAULT_ALPHA


class PoliciesChange(StrictBody):
    """Body of `POST /v1/policies`."""

    action: Action
    """Try a policy in an experiment, end that, let the policy decide that was tried, or go back."""
    policy: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """The policy to try (`shadow`, `canary`), named as in `POST /v1/policy`."""
    share: Annotated[float, Field(gt=0, le=MAX_SHARE, allow_inf_nan=False)] = 0.2
    """Share of the requests that a canary decides for."""
    alpha: Annotated[float, Field(ge=1e-4, le=0.2, allow_inf_nan=False)] = DEFAULT_ALPHA
    """Chance, at most, to stop a canary that is as good as the champion."""


class BreakerAnswer(PolicyReference):
    """A policy and its breaker."""

    num_decisions: int
    fallbacks_by_reason: dict[str, int]
    breaker_open: bool
    times_opened: int


class ExperimentAnswer(BaseModel):
    """The results of an experiment so far."""

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
    """Log capital of the bet that the canary is worse; it is stopped at minus the logarithm of
    alpha."""
    stops_at_log_capital: float | None = None
    decisions_compared: int | None = None
    agreement_fraction: float | None = None
    """Share of these in which a shadow names the same replica; the order in which requests wait is
    not compared."""
    decisions_failed: int | None = None
    decisions_left_out: int | None = None


class PoliciesAnswer(BaseModel):
    """Answer of `GET /v1/policies`."""

    champion: BreakerAnswer
    previous: PolicyReference | None
    """The policy that `rollback` goes back to."""
    experiment: ExperimentAnswer | None
    """The last one; it may have ended."""
    events: list[dict[str, Any]]
    """Changes of who decides, of plans by hand and of keys, newest first. `by` is who asked; only
    those who may change anything see it."""
    registry: str | None
    """What the last promotion or rollback wrote to the registry, or why it could not."""
    state: str | None
    """Why what must survive a crash could not be read or written; null: it could, or there is no
    file for it."""


def describe_policies(manager: PolicyManager, with_actors: bool = True) -> PoliciesAnswer:
    """Return the present and the previous policy, and the experiment."""
    events = [asdict(event) for event in reversed(manager.events)]
    if not with_actors:
        events = [{key: event[key] for key in event if key != "by"} for event in events]
    previous, experiment = manager.previous, manager.experiment
    return PoliciesAnswer(
        champion=_breaker(manager.policy),
        previous=None if previous is None else _reference(previous),
        experiment=None if experiment is None else _describe_experiment(experiment),
        events=events,
        registry=manager.registry_note,
        state=manager.store.note,
    )


def _reference(policy: PolicyRunner) -> PolicyReference:
    reference = policy.loaded.card.reference
    is_ray = policy.name == RAY_DEFAULT
    return reference.model_copy(update={"name": RAY_DEFAULT}) if is_ray else reference


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
        }
    return answer.model_copy(update=more)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None

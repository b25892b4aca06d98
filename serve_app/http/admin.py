"""Routes for operators: policies, experiments, queue, sessions, metrics."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest
from pydantic import Field

from serve_app.cluster import SessionSettings
from serve_app.gateway.gateway import Gateway
from serve_app.http.auth import Access
from serve_app.http.body import StrictBody
from serve_app.http.decide_schema import AnswerLengthsAnswer, GatewayPolicyAnswer, Problem
from serve_app.http.errors import DENIED, PROBLEMS, refusals
from serve_app.http.policies_schema import PoliciesAnswer, PoliciesChange, describe_policies
from serve_app.http.reasons import BadRequest
from serve_app.policy.autopilot import AutopilotAnswer, AutopilotReport
from tokenyard.routing.sessions.rules import make_rule
from tokenyard.workload.answer_lengths import AnswerLengths


class PolicyChange(StrictBody):
    """Body of `POST /v1/policy`."""

    policy: Annotated[str, Field(min_length=1, max_length=1024)]
    """`champion`, the registry's `candidate`, a policy file (.npz), a rule's name, or
    `ray_default`."""
    explore_fraction: Annotated[float, Field(ge=0, le=0.05, allow_inf_nan=False)] | None = None
    """Absent: the cluster file's."""
    for_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    """Seconds after which what decides now decides again; absent: never."""


class AutopilotVeto(StrictBody):
    """Body of `POST /v1/autopilot`."""

    veto: bool
    """Whether the autopilot may change nothing from now on. What it tries ends at once."""


def policy_router(gateway: Gateway, access: Access) -> APIRouter:
    """Routes about who decides."""
    router, manager = APIRouter(), gateway.manager
    is_authorized, autopilot = [Depends(access.is_authorized)], gateway.autopilot

    async def check_change(request: Request) -> None:
        """Check that the caller may change who decides, and is not vetoed."""
        await access.may_change_policies(request)
        if autopilot.vetoed and access.autopilot_key(request) is not None:
            raise BadRequest("a person has vetoed the autopilot: POST /v1/autopilot", 409)

    may_change = [Depends(check_change)]

    @router.get("/v1/policy", dependencies=is_authorized, responses={401: {"model": Problem}})
    async def policy() -> GatewayPolicyAnswer:
        """Describe the policy that decides, and count its decisions."""
        return describe(gateway)

    @router.post("/v1/policy", dependencies=may_change, responses=PROBLEMS)
    @router.put("/v1/policy", dependencies=may_change, responses=PROBLEMS)
    async def change(body: PolicyChange) -> GatewayPolicyAnswer:
        """Let another policy decide from now on."""
        explore = body.explore_fraction
        if explore is None:
            explore = gateway.cluster.explore_fraction
        with refusals():
            await manager.switch_by_hand(body.policy, explore, body.for_s)
        return describe(gateway)

    @router.get("/v1/policies", dependencies=is_authorized, responses={401: {"model": Problem}})
    async def policies(request: Request) -> PoliciesAnswer:
        """Return the present and the previous policy, and the experiment."""
        return describe_policies(manager, access.is_admin(request))

    @router.post(
        "/v1/policies", dependencies=may_change, responses={**PROBLEMS, 409: {"model": Problem}}
    )
    async def change_policies(body: PoliciesChange) -> PoliciesAnswer:
        """Try a policy in an experiment, end that, promote what was tried, or roll back."""
        with refusals():
            await manager.change(body.action, body.policy, body.share, body.alpha)
        return describe_policies(manager)

    @router.get("/v1/autopilot", dependencies=is_authorized, responses={401: {"model": Problem}})
    async def autopilot_state() -> AutopilotAnswer:
        """Say where the autopilot stands, and what its policy has gained."""
        return autopilot.describe()

    @router.put("/v1/autopilot", dependencies=may_change, responses=PROBLEMS)
    async def report(body: AutopilotReport) -> AutopilotAnswer:
        """Take the report of the autopilot."""
        autopilot.report(body)
        return autopilot.describe()

    @router.post("/v1/autopilot", dependencies=[Depends(access.may_change)], responses=PROBLEMS)
    async def veto(body: AutopilotVeto) -> AutopilotAnswer:
        """Stop the autopilot, and end what it tries; or let it go on."""
        autopilot.vetoed = body.veto
        if body.veto:
            if manager.loan is not None:
                await manager.change("rollback")
            manager.end_experiment("the autopilot was vetoed")
        manager.note("vetoed" if body.veto else "veto taken back", "autopilot", "asked")
        return autopilot.describe()

    return router


def state_router(gateway: Gateway, access: Access) -> APIRouter:
    """Routes about the state of the gateway, for programs."""
    router, may_see_all = APIRouter(), [Depends(access.may_see_all)]

    @router.get("/v1/queue", dependencies=may_see_all, responses=DENIED)
    async def queue() -> dict[str, Any]:
        """Return the requests that wait, first to last, and how full replicas are."""
        holding = gateway.holding
        return {"held": 0, "requests": []} if holding is None else holding.describe()

    @router.get("/v1/sessions", dependencies=may_see_all, responses=DENIED)
    async def sessions() -> dict[str, Any]:
        """Return active sessions, how much KV memory they take, and how many turns are held."""
        now_s, holding, gate = gateway.refresh(), gateway.holding, gateway.sessions
        if gate is None or holding is None:
            return {"running": 0, "idle": 0, "held": 0, "replicas": [], "sessions": []}
        return {"held": len(holding), **gate.describe(now_s)}

    @router.post("/v1/sessions", dependencies=[Depends(access.may_change)], responses=PROBLEMS)
    async def change_sessions(body: SessionSettings) -> dict[str, str]:
        """Have another rule hold sessions; those that were let in stay."""
        if gateway.sessions is None:
            raise BadRequest("the cluster file has no `sessions`", 409)
        gateway.sessions.rule = make_rule(body.rule)
        gateway.manager.note(f"sessions held by {body.rule}", "sessions", "asked")
        return {"rule": body.rule}

    @router.get("/healthz")
    async def healthz() -> JSONResponse:
        """Say whether requests can be answered, and how many replicas are known; 503: they cannot.

        The status is `ok`, `draining`, or `unavailable` where no replica could answer.
        """
        status = _status(gateway)
        return JSONResponse(
            {"status": status, "replicas": len(gateway.table.replicas)},
            status_code=200 if status == "ok" else 503,
        )

    @router.get("/health", include_in_schema=False)
    async def health() -> Response:
        """As vLLM's: an empty answer, with 200 where requests can be answered."""
        return Response(status_code=200 if _status(gateway) == "ok" else 503)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Everything that is counted, for Prometheus."""
        gateway.observe()
        text = generate_latest(gateway.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    return router


def _status(gateway: Gateway) -> str:
    if gateway.draining:
        return "draining"
    is_well = gateway.cluster.decide_only or "ready" in gateway.states().values()
    return "ok" if is_well else "unavailable"


def describe(gateway: Gateway) -> GatewayPolicyAnswer:
    """Return the policy that decides, and the counts since the start."""
    manager, log = gateway.manager, gateway.log
    picker = manager.picker
    times = np.array(picker.decision_us)
    p50, p99 = np.percentile(times, [50, 99]).tolist() if len(times) else (None, None)
    policy, counts = picker.policy, picker.counts
    return GatewayPolicyAnswer(
        **policy.loaded.card.model_dump(),
        explore_fraction=policy.explore_fraction,
        num_decisions=counts.num_decisions,
        num_fallbacks=counts.fallbacks.total(),
        num_explored=counts.num_explored,
        num_log_lines_lost=0 if log is None else log.num_lost,
        active=policy.name,
        until_s=None if manager.loan is None else manager.loan.until_s,
        baseline=manager.baseline,
        missing=policy.loaded.card.startup_fallback,
        breaker_open=policy.breaker.state == "open",
        fallbacks_by_reason=dict(counts.fallbacks),
        decision_p50_us=p50,
        decision_p99_us=p99,
        last_decisions_us=times.tolist(),
        last_decisions_cpu_us=list(picker.decision_cpu_us),
        answer_lengths=_describe_lengths(gateway.answer_lengths),
    )


def _describe_lengths(lengths: AnswerLengths) -> AnswerLengthsAnswer | None:
    if not lengths.num_answers:
        return None
    p50, p90 = lengths.quantiles_tokens((0.5, 0.9)).tolist()
    return AnswerLengthsAnswer(
        num_answers=lengths.num_answers, decides=lengths.is_better, p50_tokens=p50, p90_tokens=p90
    )

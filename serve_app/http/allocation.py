"""`/v1/allocation`: the plan in force, the proposed one with its reason, and changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from serve_app.allocation.allocator import Allocator, By, Change, Outcome
from serve_app.allocation.plans import PlanOrigin, find_plan, format_plan
from serve_app.allocation.transition import gpus_held
from serve_app.cluster import PlanMessage
from serve_app.http.auth import Access
from serve_app.http.body import StrictBody
from serve_app.http.decide_schema import Problem
from serve_app.http.errors import PROBLEMS, refusals
from tokenyard.allocation.types import AllocationPolicy, Plan

_SHOWN_SLOTS = 600
Note = Callable[[str, str, str], None]
"""Writes down what was changed, to what, and why."""
Changing = Callable[[], AbstractAsyncContextManager[None]]
LoadPolicy = Callable[[str], tuple[AllocationPolicy, PlanOrigin]]
"""Makes an allocation policy by name, and says where it comes from; ValueError where there is
none of that name."""


class PlanCard(BaseModel):
    """A plan, and its predicted cost at the last slot's demand."""

    parallelism: str
    num_gpus: int
    num_replicas: int
    tensor_parallel: int
    pipeline_parallel: int
    memory_fraction: float
    max_batch: int
    goodput_capacity_per_s: float
    """Most requests per second of which 99 % attain the SLO, in the scenario's time."""
    usd_per_slot: float
    violations_per_slot: float | None
    """Requests that violate their SLO at that demand; None: no slot is over yet."""


class ShapeCard(BaseModel):
    """Replicas of one shape."""

    shape: str
    tensor_parallel: int
    pipeline_parallel: int
    wanted: int
    ready: int
    starting: int
    stopping: int


class ChangeCard(BaseModel):
    """A change of plan, or one that was not made."""

    time_s: float
    by: By
    old: str
    new: str
    outcome: Outcome
    reason: str
    phases_s: dict[str, float]
    """Seconds from the decision until the first new replica served, all did, the old were gone."""


class AllocationAnswer(BaseModel):
    """The state of the allocator."""

    scenario: str
    policy: str
    source: str
    """Where the policy was found."""
    sha256: str | None
    """First 12 hex digits of a hash over everything that the policy is; null: it is a rule."""
    mlflow_run: str | None
    """Run that trained what the registry names; null: it ships, is a file, or is a rule."""
    registry_error: str | None
    """Why the registry could not be asked, so that what ships decides."""
    by_hand: bool
    """Whether the plan was set by hand, and is kept until a policy is set."""
    dry_run: bool
    plan: PlanCard
    proposed: PlanCard
    reason: str
    changing: bool
    may_switch: bool
    switches_left: int | None
    gpu_budget: int
    gpus_held: int
    slot_s: float
    """Time between two decisions, seconds of real time."""
    demand_per_s: list[float]
    """Demand of the latest slots, at most 600, oldest first, in the scenario's time."""
    fallbacks: dict[str, int]
    """Decisions that the stand-in made, by why the policy did not."""
    shapes: list[ShapeCard]
    changes: list[ChangeCard]
    """Newest first."""


class AllocationChange(StrictBody):
    """Body of `POST /v1/allocation`: any of these."""

    plan: PlanMessage | None = None
    """Change to it, and keep it until a policy is set."""
    policy: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Let this policy decide from the next slot on."""
    dry_run: bool | None = None
    """Only say what would be done, or do it again."""


def make_router(
    allocator: Allocator,
    access: Access,
    load_policy: LoadPolicy,
    note: Note = lambda *_: None,
    changing: Changing = nullcontext,
) -> APIRouter:
    """Make `/v1/allocation` for an allocator; `note` records changes, `changing` surrounds them."""
    router = APIRouter()
    is_authorized, may_change = [Depends(access.is_authorized)], [Depends(access.may_change)]

    @router.get("/v1/allocation", dependencies=is_authorized, responses={401: {"model": Problem}})
    async def allocation() -> AllocationAnswer:
        """Return the plan in force, the proposed one with its reason, and past changes."""
        return describe(allocator)

    @router.post("/v1/allocation", dependencies=may_change, responses=PROBLEMS)
    async def change(body: AllocationChange) -> AllocationAnswer:
        """Set the plan by hand, the policy, or whether anything is changed at all."""
        with refusals():
            # Made before anything is changed: a body is followed as a whole or not at all.
            # In a thread: a registry may take its time to answer, or not to.
            name = body.policy
            loaded = None if name is None else await asyncio.to_thread(load_policy, name)
            async with changing():
                if body.plan is not None:
                    plan = find_plan(allocator.table, **body.plan.model_dump())
                    allocator.set_plan(plan)
                    note("plan set", format_plan(plan), "asked")
                if loaded is not None and name is not None:
                    allocator.set_policy(name, *loaded)
                    note("allocation policy set", name, "asked")
                if body.dry_run is not None:
                    allocator.dry_run = body.dry_run
                    note("allocation", "dry run" if body.dry_run else "no dry run", "asked")
        return describe(allocator)

    return router


def describe(allocator: Allocator) -> AllocationAnswer:
    """Return the state of the allocator."""
    return AllocationAnswer(
        scenario=allocator.scenario.name,
        policy=allocator.policy_name,
        **asdict(allocator.origin),
        by_hand=allocator.by_hand,
        dry_run=allocator.dry_run,
        plan=_card(allocator, allocator.plan),
        proposed=_card(allocator, allocator.proposed),
        reason=allocator.reason,
        changing=allocator.is_changing,
        may_switch=allocator.may_switch,
        switches_left=allocator.limits.switches_left,
        gpu_budget=allocator.budget,
        gpus_held=gpus_held(allocator.held),
        slot_s=allocator.slot_s,
        demand_per_s=list(allocator.demand_per_s)[-_SHOWN_SLOTS:],
        fallbacks=dict(allocator.fallbacks),
        shapes=[
            ShapeCard(shape=shape.name, **asdict(shape), **asdict(held))
            for shape, held in sorted(allocator.held.items())
        ],
        changes=[_change(change) for change in reversed(allocator.changes)],
    )


def _card(allocator: Allocator, plan: Plan) -> PlanCard:
    demand = allocator.demand_per_s[-1] if allocator.demand_per_s else None
    usd, violations = allocator.predicted(plan, demand or 0.0)
    table = allocator.table
    return PlanCard(
        **asdict(plan),
        num_replicas=plan.num_replicas,
        tensor_parallel=plan.tensor_parallel,
        pipeline_parallel=plan.pipeline_parallel,
        goodput_capacity_per_s=float(table.goodput_capacity_per_s[table.find(plan)]),
        usd_per_slot=usd,
        violations_per_slot=None if demand is None else violations,
    )


def _change(change: Change) -> ChangeCard:
    plans = {"old": format_plan(change.old), "new": format_plan(change.new)}
    return ChangeCard(**asdict(change) | plans)

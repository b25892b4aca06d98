"""Plans and plan policies by name, and what a cluster file says of an allocated pool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serve_app.allocation.transition import Held, Shape, shape_of
from serve_app.cluster import AllocatedPool
from serve_app.policy.loading import ask_registry
from tokenyard.allocation.artifact import AllocationArtifact, learned_for
from tokenyard.allocation.dynamics import NUM_OUT, Model, measurements, run_slot
from tokenyard.allocation.plans import PlanTable, load_allocation, plan_table
from tokenyard.allocation.policies import best_rule, make_allocation_policy
from tokenyard.allocation.policies.rules import AllocationContext
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.types import AllocationPolicy, Plan, SlotMeasurements
from tokenyard.artifact import NoChampionError, RegisteredPolicy
from tokenyard.registry import CANDIDATE, CHAMPION


@dataclass(frozen=True)
class PlanOrigin:
    """Where an allocation policy comes from."""

    source: str = "built in"
    """The place, in words; a rule is built in."""
    sha256: str | None = None
    """First 12 hex digits of a hash over everything that the policy is; None: it is a rule."""
    mlflow_run: str | None = None
    """Run that trained what the registry names; None: it ships, is a file, or is a rule."""
    registry_error: str | None = None
    """Why the registry could not be asked, so that what ships decides."""


BUILT_IN = PlanOrigin()


def load_plan_policy(
    name: str, scenario: AllocationScenario, registry: str | None = None, may_ship: bool = False
) -> tuple[AllocationPolicy, PlanOrigin]:
    """Make the policy that a cluster file or a person names, and say where it comes from.

    Names are `champion`, the registry's `candidate`, a policy file (.npz), or a baseline's. With
    `may_ship`, what ships decides where the registry cannot be read or, of a candidate, has none;
    where nothing ships, a rule does.

    Raises:
        ValueError: There is none of that name, or it was trained for other plans.
    """
    if name not in (CHAMPION, CANDIDATE) and not name.endswith(".npz"):
        rule = make_allocation_policy(name, AllocationContext(scenario, np.random.default_rng()))
        return rule, BUILT_IN
    path = name if name.endswith(".npz") else None
    registered: RegisteredPolicy | None = None
    error: str | None = None
    if path is None:
        registered, error = ask_registry("allocation", scenario.name, name, registry, may_ship)
    try:
        artifact, source = AllocationArtifact.champion(
            scenario.name, path, lambda model: registered
        )
    except NoChampionError:
        best = best_rule(scenario.name)
        policy, _ = load_plan_policy(best, scenario)
        return policy, PlanOrigin(f"the rule {best}", registry_error=error)
    run_id = None if registered is None else registered.run_id
    origin = PlanOrigin(source, artifact.sha256, run_id, error)
    return learned_for(artifact, scenario, source), origin


def check_allocation(allocation: AllocatedPool, registry: str | None = None) -> AllocationScenario:
    """Read the scenario, and refuse what could not be carried out.

    Raises:
        ValueError: Scenario, policy or plan is unknown, or does not fit the rest.
    """
    scenario = load_allocation(allocation.scenario)
    if len(scenario.pool) > 1:
        raise ValueError(
            f"allocation scenario {scenario.name!r} has {len(scenario.pool)} kinds of GPUs; an "
            "allocated pool is of one kind"
        )
    if odd := [share for share in scenario.memory_fractions if round(share, 2) != share]:
        # A replica's application is named by it, and read back from there.
        raise ValueError(
            f"allocation scenario {scenario.name!r} has memory fraction {odd[0]}; an allocated "
            "pool takes whole percentages"
        )
    emulates = allocation.template.config.emulates
    modelled = scenario.pool[0].gpu, scenario.llm
    if emulates is not None and (emulates.gpu, emulates.llm) != modelled:
        raise ValueError(
            f"the template emulates {emulates.llm} on {emulates.gpu}, allocation scenario "
            f"{scenario.name!r} is {modelled[1]} on {modelled[0]}"
        )
    if emulates is not None and scenario.pipeline_stages:
        raise ValueError(
            f"an emulated replica has no pipeline stages; allocation scenario {scenario.name!r} "
            "must name no pipeline_stages"
        )
    load_plan_policy(allocation.policy, scenario, registry, may_ship=True)
    start_of(allocation, scenario)
    return scenario


def start_of(allocation: AllocatedPool, scenario: AllocationScenario) -> Plan | None:
    """The plan that the file names for the beginning; a ValueError says that it is not feasible."""
    start = allocation.start
    return None if start is None else find_plan(plan_table(scenario), **start.model_dump())


def plan_of(table: PlanTable, held: Mapping[Shape, Held]) -> Plan | None:
    """The feasible plan that is closest to some replicas; None: there are no replicas."""
    serving = {shape: replicas.wanted for shape, replicas in held.items() if replicas.wanted}
    if not serving:
        return None
    shape = max(serving, key=lambda other: (serving[other] * other.num_gpus, other))
    alike = [plan for plan in table.plans if shape_of(plan) == shape]
    if not alike:
        return None
    best = {table.plans[i] for i in table.best_memory}
    # Of the batch limit nothing is known: the best one is set anew.
    return min(alike, key=lambda plan: (abs(plan.num_replicas - serving[shape]), plan not in best))


def find_plan(
    table: PlanTable,
    parallelism: str,
    num_gpus: int,
    memory_fraction: float | None = None,
    max_batch: int | None = None,
) -> Plan:
    """The feasible plan of that shape; memory and batch limit are the best where not given.

    Raises:
        ValueError: There is none.
    """
    same = [
        plan
        for plan in table.plans
        if (plan.parallelism, plan.num_gpus) == (parallelism, num_gpus)
        and (memory_fraction is None or math.isclose(plan.memory_fraction, memory_fraction))
        and max_batch in (None, plan.max_batch)
    ]
    if not same:
        feasible = sorted({f"{plan.parallelism} on {plan.num_gpus}" for plan in table.plans})
        raise ValueError(
            f"{parallelism} on {num_gpus} GPUs with that memory and batch limit is not feasible; "
            f"choose among {', '.join(feasible)}"
        )
    best = [table.plans[i] for i in table.best_memory]
    return next((plan for plan in same if plan in best), same[-1])


def modelled(model: Model, plan: int, demand_per_s: float) -> SlotMeasurements:
    """What the performance model predicts for a slot under a plan with the demand that came."""
    out = np.zeros(NUM_OUT)
    run_slot(model, plan, plan, demand_per_s, 0.0, out)
    return measurements(out)


def format_plan(plan: Plan) -> str:
    """A plan in a few words."""
    return f"{plan.parallelism} on {plan.num_gpus} GPUs"

"""An allocated pool in a gateway: its allocator, made of what the cluster file says."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
from ray.serve.handle import DeploymentHandle

from serve_app.allocation.allocator import Allocator, Limits, find_plan
from serve_app.allocation.replica_sets import ServeReplicaSets
from serve_app.cluster import AllocatedPool, Pool
from serve_app.gateway.backends import Backend, ServeBackend
from serve_app.gateway.gateway import Gateway
from tokenyard.allocation.artifact import learned_for, resolve_allocation_champion
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.policies import make_allocation_policy
from tokenyard.allocation.policies.rules import AllocationContext
from tokenyard.allocation.scenario import AllocationScenario, load_allocation
from tokenyard.allocation.telemetry import TELEMETRY_FILE, SlotRecord, append_record
from tokenyard.artifact import NoChampionError
from tokenyard.registry import mlflow_lookup
from tokenyard.types import AllocationPolicy, Plan


def make_plan_policy(
    name: str, scenario: AllocationScenario, registry: str | None = None
) -> AllocationPolicy:
    """Make the policy that a cluster file or a person names.

    Raises:
        ValueError: There is none of that name, or it was trained for other plans.
    """
    if name != "champion" and not name.endswith(".npz"):
        return make_allocation_policy(name, AllocationContext(scenario, np.random.default_rng()))
    lookup = mlflow_lookup(registry) if registry else None
    path = name if name.endswith(".npz") else None
    try:
        artifact, found = resolve_allocation_champion(scenario.name, path, lookup)
    except NoChampionError as missing:
        if missing.rule is None:
            raise
        return make_plan_policy(missing.rule, scenario)
    return learned_for(artifact, scenario, found)


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
    emulates = allocation.template.config.emulates
    said = scenario.pool[0].gpu, scenario.llm
    if emulates is not None and (emulates.gpu, emulates.llm) != said:
        raise ValueError(
            f"the template rehearses {emulates.llm} on {emulates.gpu}, allocation scenario "
            f"{scenario.name!r} is {said[1]} on {said[0]}"
        )
    make_plan_policy(allocation.policy, scenario, registry)
    start_of(allocation, scenario)
    return scenario


def start_of(allocation: AllocatedPool, scenario: AllocationScenario) -> Plan | None:
    """The plan that the file names for the beginning.

    Raises:
        ValueError: It is not feasible.
    """
    start = allocation.start
    if start is None:
        return None
    table = plan_table(scenario)
    return find_plan(
        table, start.parallelism, start.num_gpus, start.memory_fraction, start.max_batch
    )


def make_allocator(
    prefix: str,
    gateway: Gateway,
    backends: MutableMapping[str, Backend],
    registry: str | None = None,
    log: Path | None = None,
) -> Allocator | None:
    """Make the allocator of a gateway; None: its cluster has no allocated pool.

    Args:
        prefix: Of the names of the applications that it starts.
        gateway: Whose demand counts.
        backends: The gateway's; pools are added and taken away.
        registry: MLflow URI where champions are looked up.
        log: Folder that gets a line per slot (`tokenyard.allocation.telemetry`); None: no log.

    Raises:
        ValueError: As `check_allocation`.
    """
    cluster = gateway.cluster
    allocation = cluster.allocation
    if allocation is None:
        return None
    scenario = check_allocation(allocation, registry)

    def found(pool: Pool, handle: DeploymentHandle[Any]) -> None:
        backends[pool.name] = ServeBackend(pool, handle)

    def lost(name: str) -> None:
        del backends[name]
        gateway.table.keep(name, ())

    def num_waiting() -> int:
        return sum(one.status.num_waiting for one in gateway.table.replicas.values())

    def record(slot: SlotRecord) -> None:
        if log is not None:
            append_record(log / TELEMETRY_FILE, slot)

    period_s = cluster.routing_stats_period_s
    return Allocator(
        scenario,
        allocation.policy,
        make_plan_policy(allocation.policy, scenario, registry),
        ServeReplicaSets(prefix, allocation.template, period_s, found, lost),
        num_offered=lambda: gateway.num_offered,
        num_waiting=num_waiting,
        start=start_of(allocation, scenario),
        limits=Limits(
            allocation.min_replicas,
            allocation.cooldown_slots,
            allocation.shrink_after_s,
            allocation.change_timeout_s,
        ),
        time_scale=allocation.time_scale,
        dry_run=allocation.dry_run,
        record=record,
    )

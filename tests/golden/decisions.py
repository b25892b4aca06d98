"""A thousand decisions of every policy that ships, on drawn states.

Recorded are digests of what was decided (replicas, plans, servers), of a hundred decisions each so
that a difference has a place, and no numbers that a policy decides by but the mean costs of those
that are learned.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.policies import ALLOCATION_BASELINES, BEST_RULE, make_allocation_policy
from tokenyard.allocation.policies.rules import AllocationContext
from tokenyard.allocation.problem import SUITES
from tokenyard.allocation.types import AllocationState, SlotMeasurements
from tokenyard.artifact import NoChampionError
from tokenyard.regions.policies import BEST_RULE as BEST_REGION_RULE
from tokenyard.regions.policies import REGION_BASELINES, make_region_policy
from tokenyard.regions.scenario import load_regions
from tokenyard.regions.types import RegionState
from tokenyard.routing.artifact import PolicyArtifact, default_rule, learned_policy, rule_for
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.problem import PROBLEM as ROUTING
from tokenyard.routing.scenario import Scenario, load_scenario, scenario_names
from tokenyard.routing.types import (
    Decision,
    EngineSnapshot,
    OrderingPolicy,
    ReplicaSnapshot,
    Request,
    RoutingPolicy,
    ScoringPolicy,
    WaitingQueue,
)

SEED = 17
NUM_DECISIONS, BLOCK = 1000, 100
ROUTED_BY_ALL, ALLOCATED_BY_ALL = ("poisson_085", "multi_turn_prefix"), "l4x4_7b"
"""Scenarios on which every rule decides that stands in a table by default."""
Case = tuple[Request, list[ReplicaSnapshot]]


def digests(decided: Sequence[object]) -> dict[str, Any]:
    """A digest of all decisions, and one of each block."""
    lines = list(map(str, decided))
    blocks = [lines[first : first + BLOCK] for first in range(0, len(lines), BLOCK)]
    return {"sha256": digest(lines), "blocks": " ".join(digest(block)[:8] for block in blocks)}


def digest(lines: Sequence[str]) -> str:
    """First 12 hex digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@functools.cache
def entries() -> dict[str, Callable[[], dict[str, Any]]]:
    """What decides, by name: champions of all scenarios, and of some scenarios all rules."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in scenario_names():
        found[f"routing/{name}"] = partial(champion_of, name)
    for name in ROUTED_BY_ALL:
        scenario = load_scenario(name)
        rules = {*ROUTING.policies_for(scenario), default_rule(scenario)} - {ROUTING.learned}
        for rule in sorted(rules):
            found[f"routing/{name}/{rule}"] = partial(rule_of, name, rule)
    for name in tuned_pools():
        found[f"allocation/{name}"] = partial(allocated, name, BEST_RULE)
    for rule in sorted(ALLOCATION_BASELINES.keys() - {BEST_RULE}):
        found[f"allocation/{ALLOCATED_BY_ALL}/{rule}"] = partial(allocated, ALLOCATED_BY_ALL, rule)
    for rule in sorted(REGION_BASELINES):
        found[f"regions/{rule}"] = partial(divided, rule)
    return found


def champion_of(name: str) -> dict[str, Any]:
    """What routes a scenario where nobody says otherwise."""
    try:
        artifact, _ = PolicyArtifact.champion(name)
    except NoChampionError:
        rule = rule_for(load_scenario(name))
        return {"rule": rule, **rule_of(name, rule)}
    return {"artifact": artifact.sha256, **routed(load_scenario(name), learned_policy(artifact))}


def rule_of(name: str, rule: str) -> dict[str, Any]:
    """A rule on the servers of a scenario."""
    scenario, rng = load_scenario(name), np.random.default_rng(SEED)
    context = PolicyContext(name, scenario.slo, rng, scenario.num_servers)
    return routed(scenario, make_policy(rule, context))


def routed(scenario: Scenario, policy: RoutingPolicy) -> dict[str, Any]:
    """Chosen replicas; in which order the requests of a block wait; mean costs, where learned."""
    sees_queues = isinstance(policy, OrderingPolicy) and policy.sees_queues
    cases = drawn_cases(scenario.num_servers, scenario.fleet is not None, sees_queues)
    decisions = [decide(policy, *case) for case in cases]
    found = digests([decision.replica for decision in decisions])
    keys = [decision.order_key for decision in decisions if decision.order_key is not None]
    if keys:
        columns = np.round(np.array(keys), 6).reshape(-1, BLOCK, 3)
        found["order"] = digests([np.lexsort(block.T[::-1]).tolist() for block in columns])[
            "sha256"
        ]
    scores = [decision.scores for decision in decisions if decision.scores is not None]
    if scores and type(policy).__module__.endswith(".learned"):
        found["mean_scores"] = np.mean(scores, axis=0).tolist()
    return found


def decide(policy: RoutingPolicy, request: Request, snapshots: list[ReplicaSnapshot]) -> Decision:
    """What the policy says of a request."""
    if isinstance(policy, OrderingPolicy):
        return policy.place(request, snapshots)
    if isinstance(policy, ScoringPolicy):
        return policy.decide(request, snapshots)
    return Decision(policy.route(request, snapshots), None)


@functools.cache
def drawn_cases(num_replicas: int, batches: bool, with_queues: bool) -> list[Case]:
    """Requests, each with what is known of the replicas."""
    rng, queues = np.random.default_rng(SEED), np.random.default_rng(SEED + 1)
    cases = []
    for number in range(NUM_DECISIONS):
        tokens = int(rng.integers(1, 6000))
        request = Request(
            2.0 * number, tokens, tokens + float(rng.integers(5, 600)),
            due_s=(np.inf, 2.0, 10.0)[number % 3], tenant=f"tenant-{number % 2}",
            tenant_share=0.25 + 0.5 * (number % 2), session_id=f"session-{number % 37}",
            turn=number // 37,
        )  # fmt: skip
        snapshots = [a_snapshot(i, request, rng, batches) for i in range(num_replicas)]
        for snapshot in snapshots if with_queues else ():
            num = snapshot.num_waiting
            keys_s = request.arrival_s + queues.uniform(-20.0, 20.0, num)
            snapshot.queue = WaitingQueue(np.sort(keys_s), queues.uniform(100.0, 6000.0, num))
        cases.append((request, snapshots))
    return cases


def a_snapshot(
    index: int, request: Request, rng: np.random.Generator, batches: bool
) -> ReplicaSnapshot:
    """A replica with a random backlog."""
    waiting, running = int(rng.integers(0, 4)), int(rng.integers(0, 16 if batches else 2))
    tokens = (waiting + running) * float(rng.uniform(500, 2500))
    prefill, output = float(rng.uniform(0, tokens)), 60.0 * (waiting + running)
    speed = float(rng.choice([0.5, 1.0, 2.0]))
    engine = EngineSnapshot(
        0.012 / speed, 1e-4 / speed, 3e-4 / speed, 4e-7 / speed, 512, 60_000.0,
        float(rng.random()), prefill, output, int(rng.integers(0, request.context_tokens)),
    )  # fmt: skip
    return ReplicaSnapshot(
        f"replica-{index}", 5000 * speed, 16 if batches else 1, 256 if batches else 5, waiting,
        running, tokens, mean_response_s=float(rng.uniform(0.1, 4)),
        observed_at_s=request.arrival_s, engine=engine if batches else None,
    )  # fmt: skip


def tuned_pools() -> list[str]:
    """Allocation scenarios of recorded demand whose rules were tuned."""
    folder = resources.files("tokenyard") / "scenarios" / "tuned" / "allocation"
    tuned = {Path(str(one)).stem for one in folder.iterdir()}
    return sorted(tuned - set(SUITES["allocation_recurring"]))


def allocated(name: str, rule: str) -> dict[str, Any]:
    """Plans, each from the one before under a noisy day of demand; how often each was chosen."""
    rng = np.random.default_rng(SEED)
    scenario = load_allocation(name)
    demand = scenario.demand.model_copy(update={"source": "generator"})
    context = AllocationContext(scenario.model_copy(update={"demand": demand}), rng)
    policy, table = make_allocation_policy(rule, context), context.table
    slots = np.arange(600 + NUM_DECISIONS)
    per_s = table.pool_goodput_capacity_per_s * (0.4 - 0.35 * np.cos(2 * np.pi * slots / 144))
    per_s = (per_s * np.exp(rng.normal(0, 0.1, len(slots)))).tolist()
    plan, plans = table.plans[0], []
    for slot in range(600, 600 + NUM_DECISIONS):
        measured = SlotMeasurements(*rng.uniform(0, [1.0, 1.0, 20.0, 0.3, 90.0, 0.3]).tolist())
        state = AllocationState(
            slot * scenario.slot_s, plan, tuple(per_s[slot - 600 : slot]),
            float(rng.choice([0, 50])), int(rng.integers(1, 20)), measured=measured,
        )  # fmt: skip
        plan = policy.allocate(state)
        plans.append(
            f"{plan.parallelism} {plan.num_gpus} {plan.memory_fraction:g} {plan.max_batch}"
        )
    return {**digests(plans), "plans": dict(sorted(Counter(plans).items()))}


def divided(rule: str) -> dict[str, Any]:
    """Servers that are on, and thousandths of each region's demand that go to each."""
    policy = make_region_policy(rule, load_regions("continents"))
    count = NUM_DECISIONS if rule == BEST_REGION_RULE else BLOCK
    decisions = [policy.decide(state) for state in drawn_states(count)]
    return digests(
        [
            f"{one.dispatch} {np.asarray(one.active).tolist()} "
            f"{np.rint(1000 * np.asarray(one.shares)).astype(int).tolist()}"
            for one in decisions
        ]
    )


def drawn_states(count: int, num_regions: int = 4) -> Iterator[RegionState]:
    """States of regions whose demand is up to what they can serve, and a little more."""
    rng, shape = np.random.default_rng(SEED), (num_regions, 10)
    latency_s = rng.uniform(0.005, 0.2, (num_regions, num_regions))
    latency_s = (latency_s + latency_s.T) * (1 - np.eye(num_regions)) / 2
    for _ in range(count):
        tasks = rng.uniform(0.5, 4.0, shape) * (rng.random(shape) < 0.8)
        demand = rng.dirichlet(np.ones(num_regions)) * tasks.sum() * rng.uniform(0.1, 1.1)
        yield RegionState(
            slot_s=45.0,
            latency_s=latency_s,
            arrivals=demand * np.exp(rng.normal(0, 0.2, (8, num_regions))),
            forecast=demand * np.exp(rng.normal(0, 0.2, (5, num_regions))),
            waiting=rng.poisson(3, num_regions).astype(float),
            used=rng.random(num_regions),
            num_active=rng.integers(1, 10, num_regions),
            usd_per_kwh=rng.uniform(0.05, 0.3, num_regions),
            previous=rng.dirichlet(np.ones(num_regions), num_regions),
            server_tasks=tasks,
            forecast_age_slots=float(rng.integers(0, 3)),
        )

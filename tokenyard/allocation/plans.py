"""The plans of a pool, and what the performance model says of each at every load.

A plan spreads requests over its replicas in proportion to their speed, so all of them run at the
same utilisation, and its steady state is a curve over that one number. Batching is continuous: with
B sequences running, an iteration takes T(B) and requests leave at B / (output x T(B)); the B that
keeps up with the arrivals is the fixed point.

Source of the formulas: `tokenyard.perf`; waiting: Sakasegawa 1977, as in Hopp and Spearman,
"Factory Physics", section 8.6, with exponential services; the probability of having to wait and the
exponential wait beyond it are what its mean factors into.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tokenyard.allocation.scenario import FOLDER, AllocationScenario
from tokenyard.allocation.types import Parallelism, Plan
from tokenyard.config import fitted, read_fields
from tokenyard.perf.hardware import load_gpu
from tokenyard.perf.iteration import iteration_parts
from tokenyard.perf.models import load_llm
from tokenyard.perf.power import flop_utilisation, power_w
from tokenyard.perf.replica import Replica, make_replica
from tokenyard.perf.serving import prefill_s
from tokenyard.types import BoolArray, FloatArray, IntArray

MOST_HYBRID_TP = 4
"""Most GPUs of one of several tensor-parallel replicas."""
UTILISATION: FloatArray = 1.0 - (1.0 - np.linspace(0.0, 1.0, 65)) ** 1.5
"""Points of the curves: share of the highest rate of requests, denser where queues form."""
ATTAINMENT_TARGET = 0.99
"""Share of requests that must attain the SLO."""
TPOT_VARIATION = 0.1
"""Standard deviation of a request's time per token over the mean of its batch; assumed."""
ATTAINED, LATENCY_S, TTFT_S, TPOT_S, POWER_W, BATCH_SHARE, NETWORK_SHARE = range(7)
NUM_CURVES = 7
"""Columns of `PlanTable.curves`."""


@dataclass(frozen=True)
class _Curves:
    """One replica's steady state over `UTILISATION`; arrays of shape (points,)."""

    capacity_per_s: float
    wait_probability: FloatArray
    mean_wait_s: FloatArray
    """Of those that wait."""
    ttft_s: FloatArray
    """Without the wait."""
    tpot_s: FloatArray
    power_w: FloatArray
    batch_share: FloatArray
    network_share: FloatArray


def load_allocation(name: str) -> AllocationScenario:
    """Read a shipped allocation scenario by name, or a YAML file by path.

    Raises:
        ValueError: Unknown name (with the closest one), a file that does not fit the model, or a
            model that fits on no plan.
    """
    fields = read_fields(name, "allocation scenario", "tokenyard", FOLDER)
    scenario = fitted(AllocationScenario, fields, f"allocation scenario {name}")
    if not feasible_plans(scenario):
        pool = " + ".join(f"{group.count} x {group.gpu}" for group in scenario.pool)
        raise ValueError(
            f"allocation scenario {name}: llm {scenario.llm!r} fits on no plan of pool {pool}: "
            "take more GPUs, a smaller model, a higher memory fraction or looser SLOs"
        )
    return scenario


def parallelism_kinds(scenario: AllocationScenario) -> tuple[Parallelism, ...]:
    """Every kind of parallelism that model and scenario allow, in the order of the action.

    Heads and key-value heads are divided, so their common divisors are the degrees of tensor
    parallelism: 1, 2, 4, 8 for Llama-3, 1 and 3 for SmolLM2.
    """
    llm = load_llm(scenario.llm)
    heads = math.gcd(llm.num_heads, llm.num_kv_heads)
    hybrid = (t for t in range(2, MOST_HYBRID_TP + 1) if heads % t == 0)
    pipelines = (f"pipeline_{stages}" for stages in scenario.pipeline_stages)
    return "data", "model", *(f"hybrid_tp{t}" for t in hybrid), *pipelines


def replicas_of(scenario: AllocationScenario, plan: Plan) -> list[Replica] | None:
    """Return the replicas of a plan; None where the pool cannot have it or memory is too small."""
    size, n = plan.replica_gpus, plan.num_gpus
    is_several = n > size or not plan.parallelism.startswith("hybrid")
    if n % size or not is_several or (plan.parallelism == "model" and n == 1):
        return None
    replicas: list[Replica] = []
    for group in scenario.pool:
        for _ in range(min(group.count // size, n // size - len(replicas))):
            try:
                replica = _replica(
                    group.gpu, scenario.llm, plan.tensor_parallel, plan.pipeline_parallel,
                    scenario.precision, memory_fraction=plan.memory_fraction,
                )  # fmt: skip
            except ValueError:
                return None  # Heads not divisible, or a collective that was never measured.
            replicas.append(replica)
    longest = scenario.context_tokens + scenario.generated_tokens
    fit = all(replica.kv_capacity_tokens >= longest for replica in replicas)
    return replicas if fit and len(replicas) == n // size else None


_replica = functools.cache(make_replica)


def shapes(scenario: AllocationScenario) -> list[tuple[Parallelism, int]]:
    """Every kind of parallelism with every number of GPUs, feasible or not."""
    return list(itertools.product(parallelism_kinds(scenario), range(1, scenario.num_gpus + 1)))


def feasible_plans(scenario: AllocationScenario) -> list[Plan]:
    """Every plan that the pool can have, by shape, memory and batch limit."""
    return [plan for plan, _ in _feasible(scenario)]


def _feasible(scenario: AllocationScenario) -> Iterator[tuple[Plan, list[Replica]]]:
    for (parallelism, num_gpus), memory, batch in itertools.product(
        shapes(scenario), scenario.memory_fractions, scenario.max_batches
    ):
        plan = Plan(parallelism, num_gpus, memory, batch)
        replicas = replicas_of(scenario, plan)
        if replicas is not None:
            yield plan, replicas


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Everything that dynamics and policies need to know of the plans of a scenario.

    P plans, U points of utilisation. Nothing here knows what demand will come.
    """

    plans: tuple[Plan, ...]
    capacity_per_s: FloatArray
    """Most requests per second that each plan can serve at all, shape (P,)."""
    goodput_capacity_per_s: FloatArray
    """Most requests per second of which 99 % attain the SLO, shape (P,)."""
    usd_per_hour: FloatArray
    """Price of the GPUs, shape (P,)."""
    memory_share: FloatArray
    """Share of the pool's memory that may be filled, shape (P,)."""
    idle_w: FloatArray
    """Power of the GPUs without work, watts, shape (P,)."""
    curves: FloatArray
    """Steady state, shape (P, U, NUM_CURVES)."""
    parallelism: tuple[Parallelism, ...]
    """Kinds of parallelism, in the order of the action's first part, shape (K,)."""
    during: IntArray
    """What serves while the plan of the row becomes that of the column, shape (P, P): a plan, or
    -1 for none. A change of the number of equal replicas leaves those that stay at work, and so
    does one of the batch limit, which needs no restart; any other change stops all."""
    index: IntArray
    """Plan by kind of parallelism, GPUs - 1, memory step and batch limit; memory too small for the
    plan counts as the smallest that is enough; -1: infeasible."""
    pool_w: float
    """Thermal design power of the whole pool."""

    @property
    def num_plans(self) -> int:
        """Plans of the table, P."""
        return len(self.plans)

    @property
    def pool_goodput_capacity_per_s(self) -> float:
        """The most that any plan can serve within the SLO, requests per second."""
        return float(self.goodput_capacity_per_s.max())

    @property
    def shape_mask(self) -> BoolArray:
        """Whether a kind of parallelism is feasible on so many GPUs, shape (K, GPUs)."""
        return np.asarray((self.index >= 0).any(axis=(2, 3)))

    @functools.cached_property
    def best_memory(self) -> tuple[int, ...]:
        """One plan per shape: the least memory and batch limit of its best in-time capacity.

        Chosen once for all plans with replicas of one size, so that they can grow into each other.
        """
        chosen: dict[tuple[int, int], tuple[float, int]] = {}
        most: dict[tuple[int, int], tuple[int, float]] = {}
        for plan, attained in zip(self.plans, self.goodput_capacity_per_s.tolist(), strict=True):
            size = plan.tensor_parallel, plan.pipeline_parallel
            gpus, best = most.get(size, (0, 0.0))
            if plan.num_gpus > gpus or (plan.num_gpus == gpus and attained > 1.005 * best):
                most[size] = plan.num_gpus, attained
                chosen[size] = plan.memory_fraction, plan.max_batch
        return tuple(
            i
            for i, plan in enumerate(self.plans)
            if (plan.memory_fraction, plan.max_batch)
            == chosen[plan.tensor_parallel, plan.pipeline_parallel]
        )

    def cheapest_for(self, demand_per_s: float, among: Sequence[int] | None = None) -> int:
        """The cheapest plan with goodput capacity for a demand; the strongest, where none has it.

        Only plans `among` these count; None: the best memory of every shape.
        """
        plans = self.best_memory if among is None else among
        enough = [i for i in plans if self.goodput_capacity_per_s[i] >= demand_per_s]
        if not enough:
            return max(plans, key=lambda i: float(self.goodput_capacity_per_s[i]))
        return min(enough, key=lambda i: float(self.usd_per_hour[i]))

    def find(self, plan: Plan) -> int:
        """Index of an equal plan.

        Raises:
            ValueError: It is not feasible, or not one of the steps of memory and batch limit.
        """
        if plan not in self._numbers:
            raise ValueError(f"{plan} is not a feasible plan of this pool")
        return self._numbers[plan]

    @functools.cached_property
    def _numbers(self) -> dict[Plan, int]:
        return {plan: i for i, plan in enumerate(self.plans)}


@functools.cache
def plan_table(scenario: AllocationScenario) -> PlanTable:
    """Work out all plans of a scenario; equal scenarios share one table.

    Raises:
        ValueError: No plan attains the SLO even without load.
    """
    plans, rows = [], []
    for plan, replicas in _feasible(scenario):
        plans.append(plan)
        rows.append(_plan_row(scenario, plan, replicas))
    curves = np.stack([row.curves for row in rows])
    table = PlanTable(
        plans=tuple(plans),
        capacity_per_s=np.array([row.capacity_per_s for row in rows]),
        goodput_capacity_per_s=np.array([_goodput_capacity_per_s(row) for row in rows]),
        usd_per_hour=np.array([row.usd_per_hour for row in rows]),
        memory_share=np.array([row.memory_share for row in rows]),
        idle_w=np.array([row.idle_w for row in rows]),
        curves=curves,
        parallelism=parallelism_kinds(scenario),
        during=_during(plans),
        index=_index(scenario, plans),
        pool_w=sum(group.count * load_gpu(group.gpu).tdp_w for group in scenario.pool),
    )
    if table.pool_goodput_capacity_per_s <= 0:
        raise ValueError(
            f"no plan of scenario {scenario.name!r} attains SLO {scenario.slo} even without "
            "load; loosen ttft_s or tpot_s"
        )
    return table


@dataclass(frozen=True)
class _Row:
    capacity_per_s: float
    usd_per_hour: float
    memory_share: float
    idle_w: float
    curves: FloatArray


def _plan_row(scenario: AllocationScenario, plan: Plan, replicas: list[Replica]) -> _Row:
    kinds: dict[str, list[Replica]] = {}
    for replica in replicas:
        kinds.setdefault(replica.gpu.name, []).append(replica)
    parts = [(len(same), _replica_curves(scenario, plan, same[0])) for same in kinds.values()]
    capacity = sum(count * part.capacity_per_s for count, part in parts)
    curves = np.zeros((len(UTILISATION), NUM_CURVES))
    for count, part in parts:
        share = count * part.capacity_per_s / capacity
        curves[:, ATTAINED] += share * _attained(scenario, part)
        ttft_s = part.ttft_s + part.wait_probability * part.mean_wait_s
        curves[:, TTFT_S] += share * ttft_s
        curves[:, TPOT_S] += share * part.tpot_s
        curves[:, LATENCY_S] += share * (ttft_s + (scenario.generated_tokens - 1) * part.tpot_s)
        curves[:, POWER_W] += count * part.power_w
        curves[:, BATCH_SHARE] += share * part.batch_share
        curves[:, NETWORK_SHARE] += share * part.network_share
    filled = sum(
        replica.num_gpus * replica.gpu.memory_gb * plan.memory_fraction for replica in replicas
    )
    held = sum(group.count * load_gpu(group.gpu).memory_gb for group in scenario.pool)
    return _Row(
        capacity_per_s=capacity,
        usd_per_hour=sum(replica.usd_per_hour for replica in replicas),
        memory_share=filled / held,
        idle_w=sum(replica.num_gpus * replica.gpu.idle_w for replica in replicas),
        curves=curves,
    )


def _replica_curves(scenario: AllocationScenario, plan: Plan, replica: Replica) -> _Curves:
    context, generated = scenario.context_tokens, scenario.generated_tokens
    most = max(1, replica.max_sequences(context, generated, plan.max_batch))
    # Below one sequence an iteration is that of one, and the replica idles in between.
    grid = np.unique(np.concatenate([np.linspace(0, 1, 5), np.linspace(1, most, 4 * most)]))
    running = np.maximum(grid, 1.0)
    batch = running / generated * context, running, running * (context + generated / 2)
    parts = iteration_parts(replica, *batch, context / 2)
    iteration_s = parts.total_s
    rate = np.maximum.accumulate(grid / (generated * iteration_s))
    capacity = float(rate[-1])

    def at(values: FloatArray) -> FloatArray:
        return np.interp(UTILISATION * capacity, rate, values)

    busy = np.minimum(grid, 1.0)
    tpot_s = at(iteration_s)
    # The limit is never reached: a queue at full load has no steady state.
    idle_share = np.maximum(1.0 - UTILISATION, 1e-3)
    return _Curves(
        capacity_per_s=capacity,
        wait_probability=UTILISATION ** (np.sqrt(2.0 * (most + 1)) - 1),
        mean_wait_s=generated * tpot_s / (most * idle_share),
        ttft_s=float(prefill_s(replica, context)) + tpot_s / 2,
        tpot_s=tpot_s,
        power_w=at(power_w(replica, flop_utilisation(replica, *batch), busy)),
        batch_share=at(grid / most),
        network_share=at(busy * parts.all_reduce_s / iteration_s),
    )


_normal_cdf = np.vectorize(NormalDist().cdf, otypes=[np.float64])


def _attained(scenario: AllocationScenario, part: _Curves) -> FloatArray:
    """Share of requests that attain both the TTFT and the TPOT SLO, in steady state."""
    slack_s = scenario.slo.ttft_s - part.ttft_s
    violated = part.wait_probability * np.exp(-np.maximum(slack_s, 0.0) / part.mean_wait_s)
    first = np.where(slack_s > 0, 1.0 - violated, 0.0)
    first[-1] = 0.0  # At full load the queue grows without end.
    tokens = _normal_cdf((scenario.slo.tpot_s / part.tpot_s - 1.0) / TPOT_VARIATION)
    return np.asarray(first * tokens)


def _goodput_capacity_per_s(row: _Row) -> float:
    """Most requests per second at which the target is met, and below which it always is."""
    short = row.curves[:, ATTAINED] < ATTAINMENT_TARGET
    first = int(short.argmax())
    if not short.any() or first == 0:
        return 0.0 if first == 0 and short.any() else row.capacity_per_s
    high, low = row.curves[first - 1, ATTAINED], row.curves[first, ATTAINED]
    part = (high - ATTAINMENT_TARGET) / max(high - low, 1e-12)
    step = UTILISATION[first] - UTILISATION[first - 1]
    return float((UTILISATION[first - 1] + part * step) * row.capacity_per_s)


def _during(plans: list[Plan]) -> IntArray:
    during = np.full((len(plans), len(plans)), -1, np.int64)
    for i, old in enumerate(plans):
        for j, new in enumerate(plans):
            replicas = [
                (p.tensor_parallel, p.pipeline_parallel, p.memory_fraction) for p in (old, new)
            ]
            if replicas[0] == replicas[1]:
                during[i, j] = i if old.num_gpus <= new.num_gpus else j
    return during


def _index(scenario: AllocationScenario, plans: list[Plan]) -> IntArray:
    memories, batches = scenario.memory_fractions, scenario.max_batches
    kinds = parallelism_kinds(scenario)
    shape = (len(kinds), scenario.num_gpus, len(memories), len(batches))
    index = np.full(shape, -1, np.int64)
    for i, plan in enumerate(plans):
        kind = kinds.index(plan.parallelism)
        memory, batch = memories.index(plan.memory_fraction), batches.index(plan.max_batch)
        index[kind, plan.num_gpus - 1, memory, batch] = i
    for memory in range(len(memories) - 2, -1, -1):
        missing = index[:, :, memory] < 0
        index[:, :, memory][missing] = index[:, :, memory + 1][missing]
    return index

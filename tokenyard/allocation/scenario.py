"""What is fixed in an allocation experiment, as data: pool, model, SLOs, demand, restarts.

Scenarios are YAML files in `tokenyard/scenarios/allocation`, read only through these models.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from tokenyard.allocation.recurring import RecurringKind
from tokenyard.config import FrozenModel, shipped_names
from tokenyard.perf.hardware import load_gpu
from tokenyard.perf.models import Precision, load_llm

FOLDER = "scenarios/allocation"


class GpuGroup(FrozenModel):
    """GPUs of one kind in one node."""

    gpu: str
    """Kind, a name of `tokenyard/perf/tables/gpus.yaml`."""
    count: Annotated[int, Field(ge=1, le=64)]

    @field_validator("gpu")
    @classmethod
    def _is_known(cls, name: str) -> str:
        load_gpu(name)
        return name


class LatencySlo(FrozenModel):
    """The SLO of every request: targets of its latencies."""

    ttft_s: Annotated[float, Field(gt=0)] = 2.0
    """Longest acceptable time to first token, seconds."""
    tpot_s: Annotated[float, Field(gt=0)] = 0.1
    """Longest acceptable time per output token, seconds."""


class Demand(FrozenModel):
    """Requests per second over the slots, scaled to the pool."""

    source: Literal["vm_cpu", "generator", "azure_code", "azure_conv"] | RecurringKind = "vm_cpu"
    """`vm_cpu`: the 30-day trace of CPU use, where its file is found, else as `generator`, which
    is fitted to its first 20 days; or a recorded hour of LLM requests, counted per slot; or days
    of demand that recurs and jumps."""
    low: Annotated[float, Field(ge=0, lt=2)] = 0.04
    """Demand at the trace's lowest value, as a share of the pool's goodput capacity."""
    high: Annotated[float, Field(gt=0, lt=2)] = 0.75
    """Demand at the trace's highest value of all days, as such a share."""
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Standard deviation of the logarithm of a factor that is drawn anew for every slot."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self


class SwitchBudget(FrozenModel):
    """A hard limit on changes of plan."""

    switches: Annotated[int, Field(ge=0)]
    """Changes allowed in every period."""
    period_slots: Annotated[int, Field(ge=1)] = 288
    """Slots of a period; a new one starts with a full budget."""


class Objective(FrozenModel):
    """Weights of the reward of one slot: a sum of weight x term, higher is better.

    Terms of cost count in their own unit, the others are shares in [0, 1].
    """

    usd: Annotated[float, Field(ge=0)] = 0.0
    """Per dollar paid for GPUs, negative in the reward."""
    violations: Annotated[float, Field(ge=0)] = 0.0
    """Per request that is dropped or violates the SLO, negative in the reward."""
    energy: Annotated[float, Field(ge=0)] = 0.0
    """Per megajoule, negative in the reward."""
    goodput: Annotated[float, Field(ge=0)] = 0.0
    """Share of the slot's requests that attain the SLO."""
    power: Annotated[float, Field(ge=0)] = 0.0
    """1 - power over the pool's thermal design power."""
    latency: Annotated[float, Field(ge=0)] = 0.0
    """1 - mean end-to-end latency over what the SLO allows, at most 1."""
    memory: Annotated[float, Field(ge=0)] = 0.0
    """1 - share of the pool's memory that the plan fills."""
    load: Annotated[float, Field(ge=0)] = 0.0
    """1 - utilisation of the plan."""

    @model_validator(mode="after")
    def _weighs_something(self) -> Self:
        if not any(self.model_dump().values()):
            raise ValueError("weights are all zero; give at least one a positive weight")
        return self

    @property
    def values(self) -> tuple[float, ...]:
        """Weights in the order of `tokenyard.allocation.dynamics`."""
        return tuple(float(getattr(self, name)) for name in type(self).model_fields)


PAPER_WEIGHTS = Objective(
    goodput=0.5 / 1.5, power=0.4 / 1.5, latency=0.3 / 1.5, memory=0.2 / 1.5, load=0.1 / 1.5
)
"""The paper's weighted sum (section 3) over 1.5, goodput in the place of network traffic, whose
use is no merit: Dadizadeh Dargiry 2026, "Adaptive Optimization of Resource Allocation in Parallel
Processing of LLMs Using RL"."""


class AllocationScenario(FrozenModel):
    """One allocation experiment."""

    problem: Literal["allocation"] = "allocation"
    name: str
    description: str
    pool: Annotated[tuple[GpuGroup, ...], Field(min_length=1)]
    """Plans take GPUs from the first group first; no replica spans two."""
    llm: str
    """Model, a name of `tokenyard/perf/tables/models.yaml`."""
    precision: Precision = "fp16"
    context_tokens: Annotated[float, Field(gt=0)] = 1155.0
    """Mean prompt; the defaults are the Azure conversations of 2023."""
    generated_tokens: Annotated[float, Field(gt=1)] = 211.0
    slo: LatencySlo = LatencySlo()
    demand: Demand = Demand()
    slot_s: Annotated[float, Field(gt=0)] = 300.0
    """Time between two decisions, seconds; a day is a whole number of them."""
    restart_s: Annotated[float, Field(ge=0)] = 90.0
    """Time from the start of a replica until it serves, seconds."""
    patience_s: Annotated[float, Field(gt=0)] = 30.0
    """Requests that wait longer are dropped, seconds."""
    memory_fractions: Annotated[tuple[float, ...], Field(min_length=1)] = (0.5, 0.6, 0.7, 0.8, 0.9)
    """Shares of a GPU's memory that a plan may fill, rising; a share in between counts as the next
    lower one."""
    max_batches: Annotated[tuple[int, ...], Field(min_length=1)] = (256,)
    """Limits on the sequences that a replica decodes at once; more than one makes the limit a
    part of the action."""
    violation_usd: Annotated[float, Field(ge=0)] = 0.002
    """What a dropped request or an SLO violation costs, dollars. Shipped scenarios take 3.5 times
    the price of a request with the whole pool at work: a violation must cost more than serving
    does."""
    # Left out where there are none: hashes of older policies hold a scenario without the field.
    pipeline_stages: Annotated[
        tuple[Annotated[int, Field(ge=2)], ...], Field(exclude_if=lambda stages: not stages)
    ] = ()
    """Numbers of pipeline stages that a replica may have, besides none; each makes a kind of
    parallelism. The tensor-parallel kinds follow from the model's heads."""
    objective: Objective | None = None
    """What is rewarded; None: minus dollars, SLO violations at `violation_usd`."""
    switch_budget: SwitchBudget | None = None
    hysteresis_slots: Annotated[int, Field(ge=0)] = 0
    """Slots that a plan is kept for at least."""

    @field_validator("llm")
    @classmethod
    def _is_known(cls, name: str) -> str:
        load_llm(name)
        return name

    @field_validator("slot_s")
    @classmethod
    def _divides_a_day(cls, slot_s: float) -> float:
        # The time of day is known by the number of slots, and would drift.
        per_day = 86_400 / slot_s
        if not math.isclose(per_day, max(round(per_day), 1)):
            raise ValueError(f"slot_s {slot_s:g} does not divide a day of 86400 s")
        return slot_s

    @field_validator("memory_fractions")
    @classmethod
    def _are_shares(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        wrong = [value for value in values if not 0 < value <= 1]
        if wrong:
            raise ValueError(f"memory fraction {wrong[0]} is not in (0, 1]")
        if list(values) != sorted(set(values)):
            raise ValueError(f"memory fractions {values} must rise")
        return values

    @field_validator("max_batches")
    @classmethod
    def _are_counts(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if min(values) < 1 or list(values) != sorted(set(values)):
            raise ValueError(f"max_batches {values} must rise and be at least 1")
        return values

    @model_validator(mode="after")
    def _restarts_within_a_slot(self) -> Self:
        if self.restart_s > self.slot_s:
            raise ValueError(
                f"restart_s {self.restart_s} is longer than slot_s {self.slot_s}: "
                "a plan would never serve before the next decision"
            )
        return self

    @property
    def num_gpus(self) -> int:
        """GPUs of the pool."""
        return sum(group.count for group in self.pool)

    @property
    def reward(self) -> Objective:
        """The objective in force."""
        return self.objective or Objective(usd=1.0, violations=self.violation_usd)

    @property
    def slots_per_day(self) -> int:
        """Decisions of a day."""
        return round(86_400 / self.slot_s)


def allocation_names() -> list[str]:
    """Names of the allocation scenarios that ship with the package, sorted."""
    return shipped_names("tokenyard", FOLDER)

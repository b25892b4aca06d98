"""A fleet of replicas that batch continuously, as data: the second server model of routing.

docs/engine.md says what such a replica does with these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from tokenyard.config import FrozenModel
from tokenyard.perf.coefficients import batch_grid, fit_linear, linear_coefficients
from tokenyard.perf.iteration import iteration_s
from tokenyard.perf.models import Precision
from tokenyard.perf.power import flop_utilisation, power_w
from tokenyard.perf.replica import Replica, make_replica
from tokenyard.types import FloatArray


class _Replica(FrozenModel):
    """Any replica: a name, and its engine's limits."""

    name: str
    max_batch: Annotated[int, Field(ge=1)] = 64
    """Most sequences that run at once (vLLM: max_num_seqs)."""
    token_budget: Annotated[int, Field(ge=2)] = 512
    """Most tokens computed in one iteration (vLLM: max_num_batched_tokens)."""

    @model_validator(mode="after")
    def _budget_leaves_room_for_prompts(self) -> Self:
        if self.token_budget <= self.max_batch:
            raise ValueError(
                f"token_budget {self.token_budget} must be above max_batch {self.max_batch}, "
                "or a full batch would leave nothing for prompts"
            )
        return self


class ReplicaConfig(_Replica):
    """One replica of which the performance model knows all: a model on one or more GPUs."""

    gpu: str
    """Name in the table of GPUs (`tokenyard.perf.hardware`)."""
    model: str
    """Name in the table of models (`tokenyard.perf.models`)."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """GPUs that share every layer."""
    precision: Precision = "fp16"

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.kv_capacity_tokens < 1:
            raise ValueError(f"{self.model} in {self.precision} does not fit on {self.gpu}")
        return self

    @cached_property
    def replica(self) -> Replica:
        """What the performance model knows of it."""
        return make_replica(self.gpu, self.model, self.tensor_parallel, precision=self.precision)

    @property
    def kv_capacity_tokens(self) -> float:
        """Tokens whose keys and values fit."""
        return self.replica.kv_capacity_tokens

    @cached_property
    def iteration(self) -> FloatArray:
        """Seconds per iteration, prefill token, decoding sequence and KV token, shape (4,)."""
        return linear_coefficients(self.replica, self.max_batch).values

    @cached_property
    def energy(self) -> FloatArray:
        """Joules above idling per iteration, prefill token, decoding sequence, KV token, (4,)."""
        batches = batch_grid(self.replica, self.max_batch)
        watts = power_w(self.replica, flop_utilisation(self.replica, *batches)) - self.idle_w
        return fit_linear(batches, watts * iteration_s(self.replica, *batches)).values

    @property
    def idle_w(self) -> float:
        """Power without work, watts."""
        return float(power_w(self.replica, 0.0, 0.0))


class IterationSpeed(FrozenModel):
    """How long a measured engine's iterations take.

    An iteration takes `iteration_s + prefill_token_s x prompt tokens computed + sequence_s x
    sequences decoding + kv_token_s x tokens of KV read`.
    """

    iteration_s: Annotated[float, Field(gt=0, le=1e3)]
    """Of every iteration, whatever is in it."""
    prefill_token_s: Annotated[float, Field(ge=0, le=1e3)]
    """Of every prompt token computed."""
    sequence_s: Annotated[float, Field(ge=0, le=1e3)]
    """Of every sequence that decodes."""
    kv_token_s: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Of every token of KV read."""

    @property
    def iteration(self) -> FloatArray:
        """The four times in their order, seconds, shape (4,)."""
        return np.array([self.iteration_s, self.prefill_token_s, self.sequence_s, self.kv_token_s])


class EngineSpeed(IterationSpeed):
    """How long a measured engine's iterations take, and how much it holds."""

    kv_capacity_tokens: Annotated[float, Field(ge=1)]
    """Tokens whose keys and values fit."""


class MeasuredReplica(_Replica, EngineSpeed):
    """One replica whose engine was measured (`pipelines/calibrate.py`)."""

    busy_w: Annotated[float, Field(ge=0)] = 0.0
    """Power above idling while it computes, watts, of all its devices; 0: nothing is known."""

    @property
    def energy(self) -> FloatArray:
        """Joules above idling: the power for as long as an iteration takes, shape (4,)."""
        return self.busy_w * self.iteration

    @property
    def idle_w(self) -> float:
        """Nothing is known of it: zero."""
        return 0.0


def _kind(replica: Any) -> str:
    """Return which kind of replica a file has, so that errors concern that kind alone."""
    if isinstance(replica, dict):
        return "measured" if "iteration_s" in replica else "known"
    return "measured" if isinstance(replica, MeasuredReplica) else "known"


AnyReplica = Annotated[
    Annotated[ReplicaConfig, Tag("known")] | Annotated[MeasuredReplica, Tag("measured")],
    Discriminator(_kind),
]


def requests_per_s(
    iteration: Sequence[float] | FloatArray,
    max_batch: int,
    token_budget: int,
    kv_capacity_tokens: float,
    context_tokens: float,
    generated_tokens: float,
    computed_tokens: float | None = None,
) -> float:
    """Requests of these mean lengths that a replica completes in a second when it is never idle.

    The batch is as large as `max_batch` and KV memory allow. A request then costs its
    prompt, and its share of as many iterations as it has output tokens.

    Args:
        iteration: Seconds per iteration, prefill token, decoding sequence and KV token, shape (4,).
        max_batch: Most sequences that run at once.
        token_budget: Most tokens computed in one iteration.
        kv_capacity_tokens: Tokens whose keys and values fit.
        context_tokens: Mean prompt length, tokens.
        generated_tokens: Mean output length, tokens.
        computed_tokens: Mean tokens of the prompt that are not cached; None: all of it.
    """
    computed = context_tokens if computed_tokens is None else computed_tokens
    base, prefill, sequence, kv = iteration
    held = context_tokens + generated_tokens / 2.0
    batch = max(1.0, min(max_batch, kv_capacity_tokens / held))
    # With little to generate it is not the batch that limits but the token budget.
    iterations = max(generated_tokens / batch, computed / token_budget)
    tokens = generated_tokens * (sequence + kv * held)
    return float(1.0 / (iterations * base + prefill * computed + tokens))


class TrafficClass(FrozenModel):
    """Requests with the same SLO."""

    name: str
    share: Annotated[float, Field(gt=0)] = 1.0
    """Of all requests, relative to the other classes."""
    priority: Annotated[int, Field(ge=0)] = 0
    """0 is scheduled first."""
    response_s: Annotated[float, Field(gt=0)] | None = None
    """Longest acceptable end-to-end time; None: the scenario's SLO."""
    ttft_s: Annotated[float, Field(gt=0)] | None = None
    """Longest acceptable time to the first token; None: no SLO on it."""
    tpot_s: Annotated[float, Field(gt=0)] | None = None
    """Longest acceptable mean time per output token after the first; None: no SLO on it."""
    patience_s: Annotated[float, Field(gt=0)] | None = None
    """Mean time after which a client hangs up, exponentially distributed; None: never."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time after which every client hangs up; None: never."""
    max_wait_s: Annotated[float, Field(gt=0)] | None = None
    """Time after which a request is given up that no replica has begun; None: it waits on. With the
    SLO of the first token this is deadline-or-drop."""


class Tenant(FrozenModel):
    """Whose requests they are."""

    name: str
    share: Annotated[float, Field(gt=0)] = 1.0
    """Of all requests, relative to the other tenants."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the service that it is entitled to, relative to the other tenants."""


class Churn(FrozenModel):
    """Replicas that fail and come back, and that are drained for maintenance."""

    mean_up_s: Annotated[float, Field(gt=0)]
    """Mean time of a replica between coming up and its end, exponentially distributed."""
    mean_down_s: Annotated[float, Field(gt=0)]
    """Mean time until it is back, exponentially distributed."""
    drained_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of ends that are announced: the replica drains before it goes."""
    drain_s: Annotated[float, Field(gt=0)] = 30.0
    """Time between a drain's beginning and the replica's end."""
    warm_up_s: Annotated[float, Field(ge=0)] = 30.0
    """Time for which a replica that came up is slow."""
    warm_up_factor: Annotated[float, Field(ge=1)] = 1.5
    """How many times as long its iterations take meanwhile."""


class Randomisation(FrozenModel):
    """What differs from one training stream to the next, so that a policy suits more fleets.

    Domain randomisation, Tobin et al. 2017, arXiv:1703.06907.
    """

    load_factor: tuple[float, float] = (1.0, 1.0)
    """Range of factors on the arrival rate."""
    speed_factor: tuple[float, float] = (1.0, 1.0)
    """Range of factors on every replica's speed, each drawn for itself, evenly in its logarithm."""
    scrape_interval_s: tuple[float, float] | None = None
    """Range of the time between two publications of a replica's state; None: the fleet's."""

    @field_validator("load_factor", "speed_factor", "scrape_interval_s")
    @classmethod
    def _is_a_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not 0 <= value[0] <= value[1]:
            raise ValueError(f"{value} is no range: give the smaller number first")
        return value

    @property
    def varies_fleet(self) -> bool:
        """Whether anything but the load differs."""
        return self.speed_factor != (1.0, 1.0) or self.scrape_interval_s is not None


class Fleet(FrozenModel):
    """Replicas that batch continuously, and what the router knows of them."""

    replicas: Annotated[tuple[AnyReplica, ...], Field(min_length=1)]
    page_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens of one page of KV memory."""
    prefix_block_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of one block of the prefix cache; 0: there is no cache."""
    queue_limit: Annotated[int, Field(ge=1)] = 1000
    """Requests that may wait at one replica; more are refused."""
    iteration_jitter: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Coefficient of variation of the time that an iteration takes (gamma, its mean unchanged)."""
    scrape_interval_s: Annotated[float, Field(ge=0)] = 0.0
    """Time between two publications of a replica's state; 0: always current."""
    num_routers: Annotated[int, Field(ge=1)] = 1
    """Routers that share the traffic at random and do not talk to each other."""
    retry_delay_s: Annotated[float, Field(ge=0)] = 0.1
    """Time until a request that was refused or lost is placed again."""
    max_retries: Annotated[int, Field(ge=0)] = 3
    """Times that a request is placed again before it is dropped."""
    classes: Annotated[tuple[TrafficClass, ...], Field(min_length=1)] = (
        TrafficClass(name="default"),
    )
    tenants: Annotated[tuple[Tenant, ...], Field(min_length=1)] = (Tenant(name="default"),)
    churn: Churn | None = None

    @property
    def gives_up(self) -> bool:
        """Whether nobody waits for ever, so that no queue only grows."""
        ends = [
            service_class.max_wait_s or service_class.timeout_s or service_class.patience_s
            for service_class in self.classes
        ]
        return None not in ends

    @model_validator(mode="after")
    def _blocks_are_whole_pages(self) -> Self:
        if self.prefix_block_tokens % self.page_tokens:
            raise ValueError(
                f"prefix_block_tokens {self.prefix_block_tokens} must be a multiple of "
                f"page_tokens {self.page_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _replicas_hold_a_page(self) -> Self:
        for index, replica in enumerate(self.replicas):
            if replica.kv_capacity_tokens < self.page_tokens:
                raise ValueError(
                    f"replica {index} has room for the keys and values of "
                    f"{replica.kv_capacity_tokens:g} tokens, less than a page of {self.page_tokens}"
                )
        return self

"""The JSON bodies of the routing API, and their limits."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from serve_app.http.body import StrictBody
from serve_app.policy.card import PolicyCard, PolicyReference
from tokenyard.config import check_distinct
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request

MAX_BODY_BYTES = 1 << 20
MAX_REPLICAS = 1024

# The limits are far beyond any cluster; within them no cost can overflow to infinity.
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_ClockSeconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]
_IterationShare = Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]
_Tokens = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class RequestMessage(StrictBody):
    """The request to place."""

    context_tokens: Annotated[int, Field(ge=0, le=100_000_000)]
    """Prompt length, tokens."""
    predicted_total_tokens: _Tokens | None = None
    """Prompt plus expected output, tokens; absent: the policy's own predictor fills it in."""
    arrival_s: _ClockSeconds | None = None
    """Unix time of arrival, seconds; absent: now."""

    @model_validator(mode="after")
    def _total_holds_the_context(self) -> Self:
        total = self.predicted_total_tokens
        if total is not None and total < self.context_tokens:
            raise ValueError(
                f"predicted_total_tokens {total:g} is less than context_tokens "
                f"{self.context_tokens}, which it includes"
            )
        return self

    def to_request(self, now_s: float, predicted_total_tokens: float, due_s: float) -> Request:
        """Make the request for a policy; its time and size stand in for missing fields."""
        total = self.predicted_total_tokens
        return Request(
            arrival_s=now_s if self.arrival_s is None else self.arrival_s,
            context_tokens=self.context_tokens,
            predicted_total_tokens=predicted_total_tokens if total is None else total,
            due_s=due_s,
        )


class EngineMessage(StrictBody):
    """A replica with continuous batching; the fields are those of `EngineSnapshot`."""

    iteration_s: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)]
    prefill_token_s: _IterationShare
    sequence_s: _IterationShare
    kv_token_s: _IterationShare
    token_budget: Annotated[int, Field(ge=1, le=1_000_000)]
    kv_capacity_tokens: Annotated[float, Field(ge=1, le=1e12, allow_inf_nan=False)]
    kv_used_fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    prefill_in_flight_tokens: _Tokens
    output_in_flight_tokens: _Tokens
    match_tokens: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Leading tokens of the request that are believed to be in the replica's prefix cache."""


class SnapshotMessage(StrictBody):
    """One candidate replica; the fields are those of `tokenyard.routing.types.ReplicaSnapshot`."""

    replica_id: Annotated[str, Field(min_length=1, max_length=256)]
    tokens_per_s: Annotated[float, Field(ge=1e-3, le=1e9, allow_inf_nan=False)]
    num_slots: Annotated[int, Field(ge=1, le=1_000_000)]
    max_concurrency: Annotated[int, Field(ge=1, le=1_000_000)]
    num_waiting: _Count
    num_running: _Count
    tokens_in_flight: _Tokens
    predicted_wait_s: _Seconds | None = None
    """Absent: derived from the tokens in flight, or from `engine`."""
    mean_response_s: _Seconds | None = None
    """Absent: nothing has completed yet."""
    observed_at_s: _ClockSeconds | None = None
    """Unix time of the observation, seconds; absent: as of the request's arrival."""
    engine: EngineMessage | None = None
    """Given for replicas that batch continuously."""

    def to_snapshot(self, arrival_s: float) -> ReplicaSnapshot:
        """Make the snapshot for a policy; missing data becomes NaN."""
        fields = dict(self) | {
            "predicted_wait_s": _or_nan(self.predicted_wait_s),
            "mean_response_s": _or_nan(self.mean_response_s),
            "observed_at_s": arrival_s if self.observed_at_s is None else self.observed_at_s,
            "engine": None if self.engine is None else EngineSnapshot(**dict(self.engine)),
        }
        return ReplicaSnapshot(**fields)


class RouteMessage(StrictBody):
    """Body of `POST /v1/route`: a request, and the replicas that may serve it."""

    request: RequestMessage
    snapshots: Annotated[
        list[SnapshotMessage], Field(min_length=1, max_length=MAX_REPLICAS, fail_fast=True)
    ]
    """Candidates; for a policy trained on a fixed cluster, in the order of its scenario."""

    @model_validator(mode="after")
    def _ids_are_distinct(self) -> Self:
        check_distinct("replica_id", [snapshot.replica_id for snapshot in self.snapshots])
        return self

    @model_validator(mode="after")
    def _no_match_is_longer_than_the_prompt(self) -> Self:
        prompt = self.request.context_tokens
        for snapshot in self.snapshots:
            engine = snapshot.engine
            if engine is not None and engine.match_tokens > prompt:
                raise ValueError(
                    f"match_tokens {engine.match_tokens} of {snapshot.replica_id!r} is more than "
                    f"the prompt's {prompt} tokens"
                )
        return self


class RouteAnswer(BaseModel):
    """Answer of `POST /v1/route`."""

    decision_id: str
    """Joins the answer with its line in the decision log."""
    replica_id: str
    index: int
    """Position of the chosen replica in the snapshots."""
    scores: list[float] | None
    """Cost of each candidate, lower is better; null for a policy that does not score."""
    predicted_total_tokens: float
    """Size of the request that the decision was based on, tokens."""
    policy: PolicyReference
    decision_us: float
    """Time that the decision took, microseconds, without HTTP and JSON."""
    fallback: bool
    """Whether shortest expected delay answered in place of the policy."""
    explored: bool
    """Whether the replica was drawn at random instead of being the policy's choice."""
    order_key_s: float | None
    """Place among the requests that wait there, lower first, Unix time, seconds; null: behind them
    all."""
    late_at_s: float | None
    """When it has not begun by then, it waits by `late_key_s`; Unix time, seconds; null: its place
    is for good."""
    late_key_s: float | None
    """Its place from then on, Unix time, seconds; null: as `late_at_s`."""


class AnswerLengthsAnswer(BaseModel):
    """What was learned of the lengths of answers."""

    num_answers: int
    """Answers that it was learned from."""
    decides: bool
    """Whether it has predicted better than `output_length` in about the last hour, and so takes its
    place."""
    p50_tokens: float
    p90_tokens: float
    """Quantiles over all answers, recent ones counting most."""


class GatewayPolicyAnswer(PolicyCard):
    """The policy, its stand-in, and the counts since the start."""

    explore_fraction: float
    num_decisions: int
    num_fallbacks: int
    """Decisions that the baseline made in the policy's place."""
    num_explored: int
    num_log_lines_lost: int
    """Decisions that are missing in the decision log."""
    active: str
    """The name that was asked for."""
    until_s: float | None
    """Unix time at which what decided before decides again, seconds; null: it stays."""
    baseline: str
    """Decides where the policy cannot."""
    missing: str | None
    """Why the policy that was asked for is not there; the baseline decides."""
    breaker_open: bool
    """Whether the policy's circuit breaker is open."""
    fallbacks_by_reason: dict[str, int]
    decision_p50_us: float | None
    """Median of the last thousand decisions."""
    decision_p99_us: float | None
    last_decisions_us: list[float]
    """Times of the last thousand decisions at most, oldest first, microseconds."""
    last_decisions_cpu_us: list[float]
    """Their CPU times, microseconds; those of Ray's own router are left out."""
    answer_lengths: AnswerLengthsAnswer | None
    """Null before the first answer."""


class Problem(BaseModel):
    """Body of every 4xx answer."""

    detail: str
    """The reason, in one sentence."""


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value

"""The JSON bodies of `/v1/regions`."""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from serve_app.http.body import StrictBody
from tokenyard.config import check_distinct
from tokenyard.regions.types import Dispatch, RegionState

MAX_REGIONS = 128
MAX_SLOTS = 64
MAX_SERVERS = 4096

_Count = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Latencies = Annotated[list[_Seconds], Field(max_length=MAX_REGIONS, fail_fast=True)]
_Shares = Annotated[list[_Share], Field(max_length=MAX_REGIONS, fail_fast=True)]


class ServerMessage(StrictBody):
    """A server of a region that is up."""

    tasks_per_slot: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    """Tasks of the usual mix that it serves in a slot."""


class RegionMessage(StrictBody):
    """The telemetry of one region."""

    region_id: Annotated[str, Field(min_length=1, max_length=256)]
    arrivals: Annotated[list[_Count], Field(min_length=1, max_length=MAX_SLOTS, fail_fast=True)]
    """Tasks that arrived here in past slots, the latest last."""
    forecast: (
        Annotated[list[_Count], Field(min_length=1, max_length=MAX_SLOTS, fail_fast=True)] | None
    ) = None
    """Tasks expected in the slot that begins and in those after it; absent: not known."""
    waiting: _Count = 0.0
    used: _Share = 0.0
    """Share of the last slot in which servers that were on were at work."""
    num_active: Annotated[int, Field(ge=0, le=MAX_SERVERS)]
    """Servers that are on or warming up."""
    usd_per_kwh: Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]
    servers: Annotated[list[ServerMessage], Field(max_length=MAX_SERVERS, fail_fast=True)]
    """Servers in the order in which they are turned on; none where the region is down."""


class RegionsMessage(StrictBody):
    """Body of `POST /v1/regions`: the telemetry of all regions at the start of a slot."""

    slot_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 45.0
    regions: Annotated[
        list[RegionMessage], Field(min_length=1, max_length=MAX_REGIONS, fail_fast=True)
    ]
    latency_s: Annotated[list[_Latencies], Field(max_length=MAX_REGIONS, fail_fast=True)]
    """One way, row by origin."""
    previous: Annotated[list[_Shares], Field(max_length=MAX_REGIONS, fail_fast=True)] | None = None
    """Shares in force in the last slot; absent: everything stayed local."""
    forecast_age_slots: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """Slots since the forecasts were made."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        num = len(self.regions)
        for name in ("latency_s", "previous"):
            rows = getattr(self, name)
            if rows is not None and [len(row) for row in rows] != [num] * num:
                text = f"{num} rows of {num} numbers, as many as regions"
                raise ValueError(f"{name} must have {text}")
        for name in ("arrivals", "forecast"):
            lengths = {len(getattr(region, name) or ()) for region in self.regions}
            if len(lengths) > 1:
                raise ValueError(f"{name} must have equal lengths in all regions")
        check_distinct("region_id", [region.region_id for region in self.regions])
        if self.previous is not None and any(abs(sum(row) - 1) > 1e-6 for row in self.previous):
            raise ValueError("every row of previous must sum to 1")
        return self

    @property
    def has_forecast(self) -> bool:
        """Whether demand was forecast."""
        return self.regions[0].forecast is not None

    def to_state(self, with_forecast: bool) -> RegionState:
        """Make the state for a policy; the last arrivals stand in for a missing forecast."""
        regions, num = self.regions, len(self.regions)
        arrivals = np.array([region.arrivals for region in regions], dtype=np.float64).T
        forecast = arrivals[-1:]
        if with_forecast and self.has_forecast:
            forecast = np.array([region.forecast for region in regions], dtype=np.float64).T
        most = max(1, *(len(region.servers) for region in regions))
        tasks = np.zeros((num, most))
        for i, region in enumerate(regions):
            tasks[i, : len(region.servers)] = [server.tasks_per_slot for server in region.servers]
        columns = {
            name: np.array([getattr(region, name) for region in regions], dtype=np.float64)
            for name in ("waiting", "used", "usd_per_kwh")
        }
        return RegionState(
            slot_s=self.slot_s,
            latency_s=np.array(self.latency_s, dtype=np.float64),
            arrivals=arrivals,
            forecast=forecast,
            **columns,
            num_active=np.array([region.num_active for region in regions], dtype=np.int64),
            previous=np.eye(num) if self.previous is None else np.array(self.previous),
            server_tasks=tasks,
            forecast_age_slots=self.forecast_age_slots,
        )


class RegionsAnswer(BaseModel):
    """Answer of `POST /v1/regions`: the decision for the slot that begins."""

    decision_id: str
    region_ids: list[str]
    shares: list[list[float]]
    """Share of the tasks of each region that goes to each, rows by origin; rows sum to 1."""
    active: list[int]
    """Servers that should be on, by region."""
    dispatch: Dispatch
    """How to send single tasks within the slot."""
    live: dict[str, float]
    """Weights of `tokenyard.regions.types.LiveCost`, for dispatch `live_cost`."""
    policy: str
    """The policy that decided."""
    fallback_reason: str | None
    """Why the policy that is served did not; null where it did."""
    decision_us: float
    """Time that the decision took, microseconds, without HTTP and JSON."""


class RegionsCard(BaseModel):
    """Answer of `GET /v1/regions`."""

    policy: str
    source: str
    version: str
    num_decisions: int
    fallbacks: dict[str, int]
    """Decisions that another policy made, by `reason:policy`."""

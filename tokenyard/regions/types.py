"""What a regional policy sees at the start of a slot, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from tokenyard.types import FloatArray, IntArray

Dispatch = Literal["shares", "live_shares", "live_cost", "spill", "least_loaded", "balance"]
"""How the tasks of a slot are sent: by the decided shares; by these and by where a server with the
task's model is free; by these and by `LiveCost`; local first and to the nearest region with a free
server; to the least work per server; to the least spread of work and idle time. All but the first
go by the last reports of the regions (`tokenyard.regions.telemetry`)."""


@dataclass(frozen=True)
class LiveCost:
    """What sending one task to a region is expected to cost, in seconds, by its last report.

    The time until a server should be free (none where one is), a change of model and the weighted
    terms below, the least over the kinds of servers that are on; plus the way there and back.
    """

    debt_s: float = 2.0
    """Per task that the shares owe to the region, taken off."""
    service: float = 0.0
    """Per second that a server of the kind is expected to need for the task."""
    use: float = 0.0
    """Of a region whose servers are all at work, in proportion to how many are: levels use."""
    usd_s: float = 0.0
    """Per dollar of energy that the task should take there beyond an idle server's."""
    late: float = 0.0
    """Per second after the task's deadline."""

    @property
    def weights(self) -> tuple[float, ...]:
        """The fields in their order."""
        return (self.debt_s, self.service, self.use, self.usd_s, self.late)


@dataclass(frozen=True, eq=False)
class RegionState:
    """What is known when a slot begins. R regions; the slot's own arrivals are not known."""

    slot_s: float
    latency_s: FloatArray
    """One way, shape (R, R)."""
    arrivals: FloatArray
    """Tasks that arrived in past slots, the latest last, shape (slots, R)."""
    forecast: FloatArray
    """Tasks expected in this slot and those after it, shape (slots ahead, R)."""
    waiting: FloatArray
    """Tasks that wait in buffers, shape (R,)."""
    used: FloatArray
    """Mean share of the last slot in which servers that were on were at work, shape (R,)."""
    num_active: IntArray
    """Servers that are on or warming up, shape (R,)."""
    usd_per_kwh: FloatArray
    """Price of electricity in this slot, shape (R,)."""
    previous: FloatArray
    """Shares in force in the last slot, shape (R, R)."""
    server_tasks: FloatArray
    """What every server can serve in a slot, tasks, shape (R, most servers of a region), in the
    order in which servers are turned on; 0 where there is none, or it is down."""
    forecast_age_slots: float = 0.0
    """Slots since the forecast was made."""

    @property
    def num_regions(self) -> int:
        """How many regions there are, R."""
        return len(self.waiting)

    @property
    def capacity(self) -> FloatArray:
        """Tasks that all servers of a region can serve in a slot, shape (R,)."""
        return np.asarray(self.server_tasks.sum(axis=1))


@dataclass(frozen=True, eq=False)
class RegionDecision:
    """What holds for one slot."""

    shares: FloatArray
    """Share of the tasks of region i that goes to region j, shape (R, R); rows sum to 1."""
    active: IntArray
    """Servers that should be on, shape (R,)."""
    dispatch: Dispatch = "shares"
    live: LiveCost = LiveCost()
    """Read where dispatch is `live_cost`."""


class RegionPolicy(Protocol):
    """Decides at the start of every slot; the same object does in simulation and in production."""

    def decide(self, state: RegionState) -> RegionDecision:
        """Return shares and servers for the slot that begins."""


def check_decision(decision: RegionDecision, num_regions: int) -> None:
    """Refuse a decision that is none.

    Raises:
        ValueError: Wrong shapes, numbers that are not finite, or rows that do not sum to 1.
    """
    shares = np.asarray(decision.shares)
    if shares.shape != (num_regions, num_regions):
        raise ValueError(f"shares have shape {shares.shape}, not {(num_regions, num_regions)}")
    if np.shape(decision.active) != (num_regions,):
        raise ValueError(f"active has shape {np.shape(decision.active)}, not ({num_regions},)")
    if not np.isfinite(shares).all():
        raise ValueError("shares are not finite")
    if shares.min() < -1e-9 or np.abs(shares.sum(axis=1) - 1).max() > 1e-6:
        raise ValueError("shares must be at least 0, and every row must sum to 1")

"""The learned regional policy: a mix of four plans per row, with learned costs.

Row i of the shares is a convex combination of rows i of: transport of the forecast, the last
shares, transport of the last slot's arrivals, and staying local. The weights are a softmax of a
linear function of a few features of region i, the same function for every region, so that one
policy serves any number of regions; and every answer lies in the convex hull of plans that are
safe. Three more groups of parameters are learned: what transport costs and how far it fills a
region, by the load and by the region's size; and what a single task costs where at the moment
(`LiveCost`), by the load. With all parameters zero the policy is its start, chosen by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from tokenyard.regions import transport
from tokenyard.regions.state import LiveCost, RegionState
from tokenyard.types import BoolArray, FloatArray

PLANS = ("forecast", "previous", "now", "local")
FEATURES = ("one", "growth", "local_load", "waiting", "total_load")
COSTS = (
    "usd_per_s", "energy_weight", "switching_usd", "cap", "waiting_weight", "cap_by_load",
    "reserve",
)  # fmt: skip
LIVE_FEATURES = ("one", "total_load")
LIVE = tuple(one.name for one in fields(LiveCost))
_SIZES = (len(COSTS), len(PLANS) * len(FEATURES), len(LIVE) * len(LIVE_FEATURES))
NUM_PARAMETERS = sum(_SIZES)
_START = np.log(np.array([1.0, 0.15, 0.05, 0.05]))
_USD_PER_S, _SWITCHING_USD, _WAITING = 2e-5, 1e-4, 0.2
PLAIN_CAP = 0.65
"""Of plans without learned dispatch."""
START_CAP = 1.0
"""Where what a plan overfills goes to another region at once."""
START_LIVE = LiveCost(debt_s=0.4, service=0.3, use=0.6, usd_s=2e4, late=2.0)
_MOST_LIVE = 20.0
"""Learned weights stay within their start times and over this."""


@dataclass(frozen=True)
class TransportCost:
    """What a task costs where, in dollars: energy, time at a price per second, a server's start."""

    usd_per_s: float = _USD_PER_S
    """Of response time."""
    energy_weight: float = 1.0
    """Of the price of electricity."""
    switching_usd: float = _SWITCHING_USD
    """Of a task for which a server must be turned on first."""
    cap: float = PLAIN_CAP
    """Share of capacity that may be filled."""
    waiting_weight: float = 0.0
    """Share of the tasks that wait in a region by which its capacity is smaller."""
    reserve: float = 0.0
    """Standard deviations of a Poisson count of its capacity by which it is smaller."""

    def shares(self, state: RegionState, demand: FloatArray) -> FloatArray:
        """Transport to the servers of each kind in each region, those that are on first.

        Args:
            state: What is known.
            demand: Tasks by region of origin, shape (R,).

        Returns:
            Shape (R, R).
        """
        there = state.server_tasks > 0
        speeds = np.unique(state.server_tasks[there])
        is_on = there & (np.cumsum(there, axis=1) <= state.num_active[:, None])
        regions, capacities, prices = [], [], []
        for tasks in speeds:
            alike = state.server_tasks == tasks
            kwh = float(state.server_kwh[alike].mean())
            usd = self.energy_weight * kwh * state.usd_per_kwh + self.usd_per_s * (
                state.slot_s / tasks
            )
            for which, extra in ((alike & is_on, 0.0), (alike & ~is_on, self.switching_usd)):
                count = which.sum(axis=1)
                found = np.flatnonzero(count)
                regions.append(found)
                capacities.append(self.cap * tasks * count[found])
                prices.append(usd[found] + extra)
        if not regions:
            return np.eye(state.num_regions)
        region = np.concatenate(regions)
        capacity = np.concatenate(capacities)
        whole = np.maximum(state.capacity, 1e-9)
        less = self.waiting_weight * state.waiting / whole + self.reserve / np.sqrt(whole)
        left = np.maximum(1.0 - less, 0.05)
        travel = 2 * self.usd_per_s * state.latency_s[:, region]  # there and back
        plan = transport.within(demand, capacity * left[region], travel + np.concatenate(prices))
        into = np.zeros((len(region), state.num_regions))
        into[np.arange(len(region)), region] = 1.0
        return transport.as_shares(plan @ into)


def cost_of(theta: FloatArray, total_load: float = 0.0) -> TransportCost:
    """Costs that parameters stand for; all zero give the start's.

    Args:
        theta: Shape (NUM_PARAMETERS,).
        total_load: The feature of this name.
    """
    return TransportCost(
        usd_per_s=_USD_PER_S * math.exp(theta[0]),
        energy_weight=math.exp(theta[1]),
        switching_usd=_SWITCHING_USD * math.exp(theta[2]),
        cap=float(np.clip(START_CAP + 0.1 * theta[3] + theta[5] * total_load, 0.4, 1.5)),
        waiting_weight=float(np.clip(_WAITING + theta[4], 0.0, 2.0)),
        reserve=float(np.clip(theta[6], 0.0, 2.0)),
    )


def live_of(theta: FloatArray, total_load: float = 0.0) -> LiveCost:
    """What parameters have a single task cost; all zero give `START_LIVE`."""
    weights = theta[-_SIZES[2] :].reshape(len(LIVE_FEATURES), len(LIVE))
    bound = math.log(_MOST_LIVE)
    factor = np.exp(np.clip(weights[0] + weights[1] * total_load, -bound, bound))
    return LiveCost(*(float(w) for w in np.array(START_LIVE.weights) * factor))


def features(state: RegionState) -> FloatArray:
    """What the weights of row i go by, shape (R, 5); all within [-3, 3]."""
    ahead, now = state.forecast[0], state.arrivals[-1]
    capacity = np.maximum(state.capacity, 1e-9)
    growth = np.log((ahead + 1) / (now + 1))
    load = np.minimum(ahead / capacity, 3.0) - 0.6
    waiting = np.minimum(state.waiting / capacity, 3.0)
    total = np.full(len(ahead), total_load(state))
    rows = np.column_stack([np.ones(len(ahead)), growth, load, waiting, total])
    return np.asarray(np.clip(rows, -3.0, 3.0))


def total_load(state: RegionState) -> float:
    """Forecast over capacity, all regions together, less 0.6; at most 2.4."""
    return min(float(state.forecast[0].sum() / max(state.capacity.sum(), 1e-9)), 3.0) - 0.6


def mix(state: RegionState, theta: FloatArray) -> FloatArray:
    """Return the learned shares, shape (R, R).

    Args:
        state: What is known.
        theta: Shape (NUM_PARAMETERS,).
    """
    cost = cost_of(theta, total_load(state))
    weights = theta[_SIZES[0] : -_SIZES[2]].reshape(len(FEATURES), len(PLANS))
    logits = features(state) @ weights + _START
    return combine(state, cost, logits)


def combine(state: RegionState, cost: TransportCost, logits: FloatArray) -> FloatArray:
    """Mix the four plans with softmax weights, logits of shape (R, 4)."""
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights = raised / raised.sum(axis=1, keepdims=True)
    there = state.capacity > 0
    local = np.eye(state.num_regions)
    ahead = cost.shares(state, state.forecast[0])
    now = cost.shares(state, state.arrivals[-1])
    shares = (
        weights[:, :1] * ahead
        + weights[:, 1:2] * state.previous
        + weights[:, 2:3] * now
        + weights[:, 3:] * local
    )
    return without(shares, there, ahead)


def without(shares: FloatArray, there: BoolArray, instead: FloatArray) -> FloatArray:
    """Send nothing to regions that are down: what is left is scaled up, else `instead` holds."""
    if there.all():
        return shares
    kept = shares * there
    mass = kept.sum(axis=1, keepdims=True)
    return np.where(mass > 1e-9, kept / np.maximum(mass, 1e-9), instead)

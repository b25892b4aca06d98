"""The learned regional policy: a mix of four plans per row, with learned costs of transport.

Row i of the shares is a convex combination of rows i of: transport of the forecast, the last
shares, transport of the last slot's arrivals, and staying local. The weights are a softmax of a
linear function of a few features of region i, the same function for every region, so that one
policy serves any number of regions; and every answer lies in the convex hull of plans that are
safe.
With all parameters zero the mix is `prox` on forecasts, with lambda 0.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tokenyard.regions import transport
from tokenyard.regions.state import RegionState
from tokenyard.types import BoolArray, FloatArray

PLANS = ("forecast", "previous", "now", "local")
FEATURES = ("one", "growth", "local_load", "waiting", "total_load")
COSTS = ("usd_per_s", "energy_weight", "switching_usd", "cap", "waiting_weight")
NUM_PARAMETERS = len(COSTS) + len(PLANS) * len(FEATURES)
_START = np.log(np.array([1.0, 0.4, 0.05, 0.05]))
_USD_PER_S, _SWITCHING_USD, _CAP, _WAITING = 2e-5, 1e-4, 0.65, 0.2


@dataclass(frozen=True)
class TransportCost:
    """What a task costs where, in dollars: energy, time at a price per second, a server's start."""

    usd_per_s: float = _USD_PER_S
    """Of response time."""
    energy_weight: float = 1.0
    """Of the price of electricity."""
    switching_usd: float = _SWITCHING_USD
    """Of a task for which a server must be turned on first."""
    cap: float = _CAP
    """Share of capacity that may be filled."""
    waiting_weight: float = 0.0
    """Share of the tasks that wait in a region by which its capacity is smaller."""

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
        left = np.maximum(1.0 - self.waiting_weight * state.waiting / whole, 0.05)
        travel = 2 * self.usd_per_s * state.latency_s[:, region]  # there and back
        plan = transport.within(demand, capacity * left[region], travel + np.concatenate(prices))
        into = np.zeros((len(region), state.num_regions))
        into[np.arange(len(region)), region] = 1.0
        return transport.as_shares(plan @ into)


def cost_of(theta: FloatArray) -> TransportCost:
    """Costs that parameters stand for; all zero give the plain ones."""
    return TransportCost(
        usd_per_s=_USD_PER_S * math.exp(theta[0]),
        energy_weight=math.exp(theta[1]),
        switching_usd=_SWITCHING_USD * math.exp(theta[2]),
        cap=float(np.clip(_CAP + 0.1 * theta[3], 0.4, 1.0)),
        waiting_weight=float(np.clip(_WAITING + theta[4], 0.0, 2.0)),
    )


def features(state: RegionState) -> FloatArray:
    """What the weights of row i go by, shape (R, 5); all within [-3, 3]."""
    ahead, now = state.forecast[0], state.arrivals[-1]
    capacity = np.maximum(state.capacity, 1e-9)
    growth = np.log((ahead + 1) / (now + 1))
    load = np.minimum(ahead / capacity, 3.0) - 0.6
    waiting = np.minimum(state.waiting / capacity, 3.0)
    total = np.full(len(ahead), min(float(ahead.sum() / capacity.sum()), 3.0) - 0.6)
    rows = np.column_stack([np.ones(len(ahead)), growth, load, waiting, total])
    return np.asarray(np.clip(rows, -3.0, 3.0))


def mix(state: RegionState, theta: FloatArray) -> FloatArray:
    """Return the learned shares, shape (R, R).

    Args:
        state: What is known.
        theta: Shape (NUM_PARAMETERS,).
    """
    cost = cost_of(theta)
    weights = theta[len(COSTS) :].reshape(len(FEATURES), len(PLANS))
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

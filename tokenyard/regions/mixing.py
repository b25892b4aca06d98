"""The learned regional policy: a mix of four plans per row, with learned costs.

Row i of the shares is a convex combination of rows i of: transport of the forecast, the last
shares, transport of the last slot's arrivals, and staying local. The weights are a softmax of a
linear function of a few features of region i, the same function for every region, so that one
policy serves any number of regions; and every answer lies in the convex hull of plans that are
safe. Also learned: what transport costs; how far it fills regions, as a linear function of the
state of all together, which makes it spread or consolidate; and what a single task costs where at
the moment (`LiveCost`), by the load. With all parameters zero the policy is its start, chosen by
hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from tokenyard.regions import transport
from tokenyard.regions.types import LiveCost, RegionState
from tokenyard.types import BoolArray, FloatArray

PLANS = ("forecast", "previous", "now", "local")
FEATURES = ("one", "growth", "local_load", "waiting", "total_load")
COSTS = ("latency", "start", "efficiency", "reserve")
FILL = ("one", "total_load", "total_growth", "total_waiting", "total_used")
_NUM_BRAKES = 2
"""The last of `FILL` may only lower the fill."""
LIVE_FEATURES = ("one", "total_load")
LIVE = tuple(one.name for one in fields(LiveCost))
_SIZES = (
    len(COSTS), len(FILL), len(PLANS) * len(FEATURES), len(LIVE_FEATURES) * len(LIVE),
)  # fmt: skip
_AT_FILL, _AT_MIX, _AT_LIVE = np.cumsum(_SIZES[:-1]).tolist()
NUM_PARAMETERS = sum(_SIZES)
START_CAP, START_SMOOTHING = 0.38, 0.11
START_LIVE = LiveCost(debt_s=1.8, service=0.33, use=1.8, usd_s=1e4, late=2.4)
_START = np.log(np.array([1.0, START_SMOOTHING, 0.01, 0.01]))
_LATENCY, _START_COST = 0.1, 0.02
_MOST_LIVE = 20.0
"""Learned weights stay within their start times and over this."""


@dataclass(frozen=True)
class PlanCost:
    """What transport goes by. Costs are in units of the costliest energy of a task."""

    latency: float = _LATENCY
    """Of the greatest latency."""
    start: float = 0.0
    """Of a task for which a server must be turned on first."""
    efficiency: float = 0.0
    """Exponent of a region's energy per task in the cost of its energy: 0 counts prices alone, as
    the paper does, 1 dollars."""
    cap: float = START_CAP
    """Share of capacity that may be filled."""
    reserve: float = 0.0
    """Standard deviations of a Poisson count of its capacity that a region keeps free."""

    def shares(self, state: RegionState, demand: FloatArray) -> FloatArray:
        """Transport to the servers that are on and to those that are off, region by region.

        Args:
            state: What is known.
            demand: Tasks by region of origin, shape (R,).

        Returns:
            Shape (R, R).
        """
        whole = np.maximum(state.capacity, 1e-9)
        kwh = (state.server_tasks * state.server_kwh).sum(axis=1) / whole
        usd = state.usd_per_kwh * np.maximum(kwh, 1e-9) ** self.efficiency
        cost = usd / max(float(usd.max()), 1e-12)
        cost = cost + self.latency * state.latency_s / max(float(state.latency_s.max()), 1e-12)
        fill = self.cap * np.maximum(1.0 - self.reserve / np.sqrt(whole), 0.05)
        on = state.active_capacity
        room = np.concatenate([fill * on, fill * (state.capacity - on)])
        if room.sum() <= 0:
            return np.eye(state.num_regions)
        plan = transport.within(demand, room, np.hstack([cost, cost + self.start]))
        return transport.as_shares(plan[:, : len(on)] + plan[:, len(on) :])


def cost_of(theta: FloatArray, state: RegionState) -> PlanCost:
    """Costs that parameters stand for in a state; all zero give the start's."""
    weights = theta[_AT_FILL:_AT_MIX].copy()
    # A search over short episodes likes to pack the more, the more is at work: it runs away later.
    weights[-_NUM_BRAKES:] = np.minimum(weights[-_NUM_BRAKES:], 0.0)
    fill = float(weights @ fill_features(state))
    return PlanCost(
        latency=_LATENCY * math.exp(np.clip(theta[0], -3.0, 3.0)),
        start=_START_COST * math.exp(np.clip(theta[1], -3.0, 3.0)),
        efficiency=float(np.clip(theta[2], 0.0, 1.0)),
        cap=float(np.clip(START_CAP + 0.1 * fill, 0.2, 1.2)),
        reserve=float(np.clip(theta[3], 0.0, 2.0)),
    )


def fill_features(state: RegionState) -> FloatArray:
    """What the fill of all regions goes by, shape (5,); all within [-3, 3]."""
    capacity = max(float(state.capacity.sum()), 1e-9)
    coming = state.forecast.sum(axis=1)
    on = state.active_capacity
    used = float((on * state.used).sum() / max(float(on.sum()), 1e-9))
    values = [
        1.0,
        5.0 * total_load(state),
        5.0 * math.log((float(coming.max()) + 1.0) / (float(coming[0]) + 1.0)),
        5.0 * float(state.waiting.sum()) / capacity,
        5.0 * (used - 0.7),
    ]
    return np.clip(values, -3.0, 3.0)


def live_of(theta: FloatArray, total_load: float = 0.0) -> LiveCost:
    """What parameters have a single task cost; all zero give `START_LIVE`."""
    weights = theta[_AT_LIVE:].reshape(len(LIVE_FEATURES), len(LIVE))
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
    cost = cost_of(theta, state)
    weights = theta[_AT_MIX:_AT_LIVE].reshape(len(FEATURES), len(PLANS))
    logits = features(state) @ weights + _START
    return combine(state, cost, logits)


def combine(state: RegionState, cost: PlanCost, logits: FloatArray) -> FloatArray:
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

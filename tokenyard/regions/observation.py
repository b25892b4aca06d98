"""What a regional network sees of a state, and what its outputs mean: one code for all sides."""

from __future__ import annotations

from typing import Literal

import numpy as np

from tokenyard.regions.policies.rules import COST_KNOBS, ot_slack, without
from tokenyard.regions.types import RegionState
from tokenyard.types import FloatArray

Action = Literal["mix", "shares"]
"""`mix`: weights of four plans by row; `shares`: all shares freely, as the TORTA paper has it."""
PLANS = ("forecast", "previous", "now", "local")
LIMIT = 10.0
"""Observations lie within plus and minus this."""
LOGIT_SCALE = 5.0
"""Logits are actions times this."""
PER_REGION = 8


def observation_size(num_regions: int, action: Action) -> int:
    """Numbers of an observation."""
    return PER_REGION * num_regions + (2 * num_regions**2 if action == "shares" else 0)


def action_size(num_regions: int, action: Action) -> int:
    """Numbers of an action."""
    return num_regions * (num_regions if action == "shares" else len(PLANS))


def encode(state: RegionState, action: Action) -> FloatArray:
    """Return features by region; where shares are free, the last shares and those of transport too.

    Not limited yet; `RegionEnv` describes the columns.
    """
    capacity = np.maximum(state.capacity, 1e-9)
    servers = np.maximum((state.server_tasks > 0).sum(axis=1), 1)
    columns = [
        state.arrivals[-1] / capacity,
        state.forecast[0] / capacity,
        state.forecast[-1] / capacity,
        np.log1p(state.waiting / capacity),
        state.used,
        state.num_active / servers,
        state.usd_per_kwh / max(float(state.usd_per_kwh.mean()), 1e-9) - 1.0,
        capacity / capacity.sum() * len(capacity) - 1.0,
    ]
    flat = np.column_stack(columns).ravel()
    if action == "mix":
        return np.asarray(flat)
    plan = wanted_shares(state)
    return np.concatenate([flat, state.previous.ravel(), plan.ravel()])


def wanted_shares(state: RegionState) -> FloatArray:
    """Transport of the forecast, towards which the paper's reward draws the shares."""
    return ot_slack(state, state.forecast[0], COST_KNOBS.cap)


def shares_of(outputs: FloatArray, state: RegionState, action: Action) -> FloatArray:
    """Return the shares that an action means, shape (R, R); `outputs` has shape (action_size,).

    Raises:
        ValueError: Outputs that are not finite.
    """
    logits = LOGIT_SCALE * np.asarray(outputs, dtype=np.float64).reshape(state.num_regions, -1)
    if not np.isfinite(logits).all():
        raise ValueError("the action is not finite")
    if action == "mix":
        return combine(state, logits)
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def combine(state: RegionState, logits: FloatArray) -> FloatArray:
    """Mix four plans by row with softmax weights, logits of shape (R, 4).

    They are transport of the forecast, the last shares, transport of the last slot's arrivals, and
    staying local. Every answer lies in the convex hull of plans that are safe.
    """
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights = raised / raised.sum(axis=1, keepdims=True)
    ahead = wanted_shares(state)
    now = ot_slack(state, state.arrivals[-1], COST_KNOBS.cap)
    shares = (
        weights[:, :1] * ahead
        + weights[:, 1:2] * state.previous
        + weights[:, 2:3] * now
        + weights[:, 3:] * np.eye(state.num_regions)
    )
    return without(shares, state.capacity > 0, ahead)

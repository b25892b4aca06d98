"""What a stream of routed requests is measured by; docs/metrics.md says how to read each.

Response times are end to end, in seconds, shape (num_requests,), NaN where the request was
dropped. Times are averaged over the requests that completed; violations and goodput count all
that were offered, so that dropping a request never looks like serving it.
"""

from __future__ import annotations

import math

import numpy as np

from tokenyard.types import BoolArray, FloatArray, IntArray

TAIL = 0.01
CVAR_WEIGHT = 0.1
VIOLATION_WEIGHT_S = 2.0


def mean_response_s(response_s: FloatArray) -> float:
    """Mean response time of completed requests, seconds; NaN when none completed."""
    done = _completed(response_s)
    return float(done.mean()) if len(done) else math.nan


def percentile_response_s(response_s: FloatArray, percent: float) -> float:
    """Percentile of the response times of completed requests, seconds; NaN when none completed."""
    done = _completed(response_s)
    return float(np.percentile(done, percent)) if len(done) else math.nan


def cvar99_response_s(response_s: FloatArray) -> float:
    """Mean response time of the slowest hundredth of completed requests (at least one), seconds.

    Conditional value at risk at 99 % (Rockafellar and Uryasev 2000); NaN when none completed.
    """
    done = _completed(response_s)
    if not len(done):
        return math.nan
    num_slowest = math.ceil(TAIL * len(done))
    return float(np.partition(done, len(done) - num_slowest)[-num_slowest:].mean())


def missed(response_s: FloatArray, slo_s: float) -> BoolArray:
    """Which offered requests were not answered within the SLO, shape (num_requests,)."""
    # NaN compares false: a dropped request is a violation.
    return ~(response_s <= slo_s)


def slo_violation_fraction(missed: BoolArray) -> float:
    """Share of offered requests that missed what they were promised; NaN when none offered."""
    return float(missed.mean()) if len(missed) else math.nan


def dropped_fraction(response_s: FloatArray) -> float:
    """Share of offered requests that were dropped; NaN when none offered."""
    return float(np.isnan(response_s).mean()) if len(response_s) else math.nan


def goodput_per_s(arrival_s: FloatArray, missed: BoolArray) -> float:
    """Requests answered as promised per second of arrivals.

    The time is that between the first and the last arrival, which no policy can change; NaN
    when there is none.
    """
    duration_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    return np.count_nonzero(~missed) / duration_s if duration_s > 0 else math.nan


def server_shares(server: IntArray, num_servers: int) -> FloatArray:
    """Share of offered requests that each server took, shape (num_servers,).

    Args:
        server: Server of each request, -1 where it was dropped, shape (num_requests,).
        num_servers: How many servers there are.
    """
    taken = np.bincount(server[server >= 0], minlength=num_servers)
    return taken / len(server) if len(server) else np.full(num_servers, np.nan)


def load_balance(total_tokens: FloatArray, server: IntArray, capacity: FloatArray) -> float:
    """Evenness of the work done: 1 - std(work / capacity) / mean(work / capacity).

    1 when every server worked in proportion to its capacity; 0 and below when some idled while
    others worked. The paper's balance metric (Abbaraju, section IV), over a whole stream.

    Args:
        total_tokens: Size of each request, tokens, shape (num_requests,).
        server: Server of each request, -1 where it was dropped, shape (num_requests,).
        capacity: Full speed of each server, tokens per second, shape (num_servers,).
    """
    taken = server >= 0
    work = np.bincount(server[taken], total_tokens[taken], minlength=len(capacity)) / capacity
    return float(1.0 - work.std() / work.mean()) if work.any() else math.nan


def score(response_s: FloatArray, missed: BoolArray) -> float:
    """What sweeps rank on: -(mean + 0.1 CVaR99 + 2 s x SLO-violation fraction); higher is better.

    A dropped request counts as late and as slow as the slowest that completed; minus infinity
    when none completed.
    """
    done = _completed(response_s)
    if not len(done):
        return -math.inf
    charged = np.where(np.isnan(response_s), done.max(), response_s)
    return -(
        mean_response_s(charged)
        + CVAR_WEIGHT * cvar99_response_s(charged)
        + VIOLATION_WEIGHT_S * slo_violation_fraction(missed)
    )


def _completed(response_s: FloatArray) -> FloatArray:
    missing = np.isnan(response_s)
    return response_s[~missing] if missing.any() else response_s

"""What a stream of routed requests is measured by; docs/metrics.md says how to read each.

Response times are end to end, in seconds, shape (num_requests,), NaN where the request was
dropped. All measures count every request that was offered, so that dropping one never looks like
serving it: in means and percentiles it has waited until the run ended (`offered_s`).
"""

from __future__ import annotations

import math

import numpy as np

from tokenyard.types import BoolArray, FloatArray, IntArray

TAIL = 0.01
CVAR_WEIGHT = 0.1
VIOLATION_WEIGHT_S = 2.0
SERVICE_WINDOW_S = 60.0


def mean(values: FloatArray) -> float:
    """Mean of the values that are not NaN; NaN when there is none."""
    valid = _known(values)
    return float(valid.mean()) if len(valid) else math.nan


def percentile(values: FloatArray, percent: float) -> float:
    """Percentile, linear between ranks, of the values that are not NaN; NaN when there is none."""
    valid = _known(values)
    return float(np.percentile(valid, percent)) if len(valid) else math.nan


def fraction(part: float, whole: float) -> float:
    """Share of a whole; NaN where the whole is nothing."""
    return float(part) / float(whole) if whole else math.nan


def offered_s(times_s: FloatArray, arrival_s: FloatArray, response_s: FloatArray) -> FloatArray:
    """Times of every offered request, in which those that have none waited as long as they could.

    That is from their arrival to the end of the run (its last completion or arrival), and at least
    as long as anybody else.

    Args:
        times_s: Times from arrival, NaN where there is none, seconds, shape (num_requests,).
        arrival_s: Clock times of arrival, seconds, shape (num_requests,).
        response_s: End-to-end response times, NaN where dropped, seconds, shape (num_requests,).
    """
    missing = np.isnan(times_s)
    if not missing.any():
        return times_s
    end_s = np.fmax(arrival_s + response_s, arrival_s).max()
    longest_s = np.max(times_s, where=~missing, initial=0.0)
    return np.where(missing, np.maximum(end_s - arrival_s, longest_s), times_s)


def cvar99_s(times_s: FloatArray) -> float:
    """Mean of the slowest hundredth of times (at least one), seconds; NaN when there is none.

    Conditional value at risk at 99 % (Rockafellar and Uryasev 2000).
    """
    if not len(times_s):
        return math.nan
    num_slowest = math.ceil(TAIL * len(times_s))
    return float(np.partition(times_s, len(times_s) - num_slowest)[-num_slowest:].mean())


def violations(response_s: FloatArray, slo_s: float) -> BoolArray:
    """Which offered requests were not answered within the SLO, shape (num_requests,)."""
    # NaN compares false: a dropped request is a violation.
    return ~(response_s <= slo_s)


def slo_violation_fraction(violations: BoolArray) -> float:
    """Share of offered requests that violated the SLO; NaN when none offered."""
    return float(violations.mean()) if len(violations) else math.nan


def dropped_fraction(response_s: FloatArray) -> float:
    """Share of offered requests that were dropped; NaN when none offered."""
    return float(np.isnan(response_s).mean()) if len(response_s) else math.nan


def goodput_per_s(arrival_s: FloatArray, violations: BoolArray) -> float:
    """Requests that attain their SLO, per second of arrivals.

    The time is that between the first and the last arrival, which no policy can change; NaN
    when there is none.
    """
    duration_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    return np.count_nonzero(~violations) / duration_s if duration_s > 0 else math.nan


def server_shares(server: IntArray, num_servers: int) -> FloatArray:
    """Share of offered requests that each server took, shape (num_servers,); -1: dropped."""
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


def score(offered_response_s: FloatArray, violations: BoolArray) -> float:
    """What sweeps rank on, higher is better: -(mean + 0.1 CVaR99 + 2 s x SLO-violation share)."""
    return -(
        mean(offered_response_s)
        + CVAR_WEIGHT * cvar99_s(offered_response_s)
        + VIOLATION_WEIGHT_S * slo_violation_fraction(violations)
    )


def tpot_s(
    response_s: FloatArray, ttft_s: FloatArray, output_tokens: FloatArray | IntArray
) -> FloatArray:
    """Mean time per output token after the first, of each request.

    Args:
        response_s: End-to-end response time, seconds, shape (num_requests,).
        ttft_s: Time to the first token, seconds, shape (num_requests,).
        output_tokens: Tokens generated, at least 1, shape (num_requests,).

    Returns:
        Seconds per token, shape (num_requests,); NaN for a request that did not complete, or of
        one output token, which has no token after the first.
    """
    after_first = np.where(output_tokens > 1, output_tokens - 1.0, math.nan)
    return np.asarray((response_s - ttft_s) / after_first)


def binned_percentile_s(
    counts: FloatArray, percent: float, start_s: float, bins_per_e: float
) -> float:
    """Percentile of times that were counted in bins of equal width in their logarithm.

    Inside a bin times are taken to be spread evenly in their logarithm, so the answer is off by
    less than the bin is wide. NaN when nothing was counted.

    Args:
        counts: Bin k counts times in start_s x [e^(k / bins_per_e), e^((k + 1) / bins_per_e)).
        percent: Which percentile.
        start_s: Where the first bin begins, seconds.
        bins_per_e: Bins in which times grow e-fold.
    """
    up_to = np.cumsum(counts)
    if not len(counts) or up_to[-1] <= 0:
        return math.nan
    rank = up_to[-1] * percent / 100
    # Empty bins before the first count hold no time, though 0 of 0 is in them.
    bin_ = int(np.argmax((up_to >= rank) & (up_to > 0)))
    inside = 1.0 - (up_to[bin_] - rank) / counts[bin_]
    return float(start_s * math.exp((bin_ + inside) / bins_per_e))


def attained_fraction(violations: BoolArray, group: IntArray, which: int) -> float:
    """Share of the offered requests of a class or tenant that attained their SLOs; NaN for none."""
    mine = violations[group == which]
    return float((~mine).mean()) if len(mine) else math.nan


def service_gaps_tokens_per_s(
    arrival_s: FloatArray,
    ttft_s: FloatArray,
    response_s: FloatArray,
    tokens: FloatArray,
    tenant: IntArray,
    weights: FloatArray,
) -> FloatArray:
    """Return how much less the worst-off tenant was served than the best-off, by window.

    A tenant's service in a window is the prompts that end there (with the first token) and the
    output tokens, spread evenly from first token to completion, divided by the tenant's weight
    relative to the mean weight. Its gap to the best-served tenant is capped at its own demand
    that was not served: a tenant that wants less than its share is not treated unfairly.
    The measure follows the service difference of Sheng et al. 2024 (Fairness in Serving Large
    Language Models, arXiv:2401.00588), with equal prices of prompt and output tokens and our own
    windows. Requests that did not complete count as neither demand nor service.

    Args:
        arrival_s: Clock time of arrival, seconds, shape (num_requests,).
        ttft_s: Time to the first token, seconds, shape (num_requests,).
        response_s: End-to-end response time, seconds, shape (num_requests,).
        tokens: Prompt and output tokens, shape (num_requests, 2).
        tenant: Tenant of each request, shape (num_requests,).
        weights: Share of the service that each tenant is entitled to, shape (num_tenants,).

    Returns:
        The largest gap in each window of SERVICE_WINDOW_S from the first to the last arrival,
        weighted tokens per second, shape (num_windows,); empty for less than a window.
    """
    done = ~np.isnan(response_s)
    num_windows = int((arrival_s[-1] - arrival_s[0]) // SERVICE_WINDOW_S)
    edges = arrival_s[0] + SERVICE_WINDOW_S * np.arange(num_windows + 1)
    wanted = np.empty((len(weights), num_windows + 1))
    served = np.empty_like(wanted)
    for which, weight in enumerate(weights / weights.mean()):
        mine = done & (tenant == which)
        prompt, output = tokens[mine].T
        start, first, end = (arrival_s[mine] + s[mine] for s in (0 * ttft_s, ttft_s, response_s))
        wanted[which] = _until(edges, start, start, prompt + output) / weight
        served[which] = (
            _until(edges, first, first, prompt) + _until(edges, first, end, output)
        ) / weight
    got = np.diff(served, axis=1)
    lacking = wanted[:, 1:] - served[:, :-1] - got
    gaps: FloatArray = np.minimum(got.max(axis=0) - got, lacking).max(axis=0, initial=0.0)
    return gaps / SERVICE_WINDOW_S


def _until(
    edges: FloatArray, from_s: FloatArray, to_s: FloatArray, amount: FloatArray
) -> FloatArray:
    """What has come by each edge of amounts that flow evenly from one time to another."""
    length_s = np.maximum(to_s - from_s, 1e-12)
    shares = np.clip((edges[:, None] - from_s) / length_s, 0.0, 1.0)
    return np.asarray(shares @ amount)


def _known(values: FloatArray) -> FloatArray:
    missing = np.isnan(values)
    return values[~missing] if missing.any() else values

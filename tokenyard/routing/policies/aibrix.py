"""Three strategies of AIBrix's gateway: prefix-cache, prefix-cache-preble, load-balance."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from tokenyard.routing.policies.cost import LeastCost, cheapest, cheapest_of, drawn_of
from tokenyard.routing.policies.recent import RecentCost
from tokenyard.routing.policies.signals import longest_match, match_fraction, miss_tokens
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import FloatArray

WINDOW_S = 60.0
"""Over which `load-balance` counts completions."""


class AibrixPrefixCache:
    """Longest prefix among replicas that are not more than a standard deviation above the mean.

    Imbalanced, `max > 2 x (mean + 1)` and `max - min >= 8` requests in flight: only the prefixes of
    the least loaded count. By match, whole per cent, from high to low, then by requests from few to
    many, the first replica with at most `mean + 1 x sigma` requests is taken; without one, that
    with the fewest requests. Ties are drawn. Matches are our snapshot's, where AIBrix hashes blocks
    of 128 characters.

    Source: vllm-project/aibrix, pkg/plugins/gateway/algorithms/prefix_cache.go (01de8a5). Its
    README says 16 and 2 where the code says 8 and 1.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        standard_deviation_factor: float = 1.0,
        imbalance_min_gap: float = 8.0,
        imbalance_factor: float = 2.0,
    ) -> None:
        self._rng = rng
        self._num_sigma = standard_deviation_factor
        self._min_gap = imbalance_min_gap
        self._factor = imbalance_factor

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the longest match that is not too loaded, else the fewest requests."""
        counts = [s.num_outstanding for s in snapshots]
        per_cent = [int(100 * match_fraction(request, s)) for s in snapshots]
        most = fmean(counts) + self._num_sigma * _sigma(counts)
        matched = [
            i for i in self._open_to_matching(counts) if per_cent[i] > 0 and counts[i] <= most
        ]
        if not matched:
            return drawn_of(cheapest_of(range(len(counts)), counts), self._rng)
        order = [(-per_cent[i], counts[i]) for i in range(len(counts))]
        first = min(order[i] for i in matched)
        return drawn_of([i for i in matched if order[i] == first], self._rng)

    def _open_to_matching(self, counts: Sequence[int]) -> list[int]:
        everyone = list(range(len(counts)))
        above = max(counts) > self._factor * (fmean(counts) + 1)
        if above and max(counts) - min(counts) >= self._min_gap:
            return [i for i in everyone if counts[i] == min(counts)]
        return everyone


def _sigma(counts: Sequence[int]) -> float:
    """Standard deviation of whole numbers."""
    # `statistics.pstdev` reckons in fractions, which takes longer than the rest of a decision.
    num, total = len(counts), sum(counts)
    return math.sqrt(num * sum(n * n for n in counts) - total * total) / num


class AibrixPreble:
    """Above half a prompt cached the longest prefix, else the least cost of the last 3 minutes.

    Of the replicas with the longest match, the one sent the fewest requests in the window is taken.
    Cost of a replica: over the requests sent there, share missed x prefill seconds of what was
    missed (curves of a 7B model on a V100) + 45 tokens x 0.15 s. Ties go to the first. Each request
    is a node of its own here, where AIBrix shares the nodes of its radix tree among requests.

    Source: vllm-project/aibrix, pkg/plugins/gateway/algorithms/prefix_cache_preble.go (0338af7).
    """

    def __init__(self, prefix_threshold: float = 0.5, window_s: float = 180.0) -> None:
        """Follow matches above `prefix_threshold` of the prompt."""
        self._threshold = prefix_threshold
        self._recent = RecentCost(window_s)

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the choice, and add its cost to the window."""
        self._recent.forget_until(request.arrival_s)
        longest = longest_match(request, snapshots)
        names = [s.replica_id for s in snapshots]
        if match_fraction(request, snapshots[longest[0]]) > self._threshold:
            chosen = min(longest, key=lambda i: self._recent.count(names[i]))
        else:
            chosen = cheapest([self._recent.total(name) for name in names])
        missed = miss_tokens(request, snapshots[chosen])
        cost_s = missed / max(1, request.context_tokens) * v100_prefill_s(
            missed, request.context_tokens
        ) + 45 * 0.15  # fmt: skip
        self._recent.add(request.arrival_s, names[chosen], cost_s)
        return chosen


def v100_prefill_s(num_tokens: int, context_tokens: int) -> float:
    """Seconds of prefill for so many tokens of a context: the source's curves of a V100."""
    if num_tokens >= 384:
        linear_ms = 0.27106428 * num_tokens + 10.52444263
    elif num_tokens >= 192:
        linear_ms = -295 + 3.125 * num_tokens - 6.4e-3 * num_tokens**2
    else:
        linear_ms = 55.0
    attention_ms = 0.8 if context_tokens <= 1024 else 4.65e-4 * context_tokens + 0.398
    if 1024 < context_tokens and num_tokens <= 1024:
        attention_ms /= 2
    quadratic_ms = 0.0
    if num_tokens >= 4096:
        quadratic_ms = -18.425 + 9.65e-3 * num_tokens + 5.4e-6 * num_tokens**2
    return (linear_ms + attention_ms + quadratic_ms) / 1000 / 0.9


class AibrixLoadBalance(LeastCost):
    """Least `requests in flight / completions per second of the last minute`; ties are drawn.

    A replica without completions counts 1 per second, as in the source. Completions are what this
    rule sent to a replica less what is still there, where AIBrix's gateway counts responses.

    Source: vllm-project/aibrix, pkg/plugins/gateway/algorithms/load_balance.go (01de8a5), PR 2365.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._num_sent: defaultdict[str, int] = defaultdict(int)
        self._done: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the pending time of every replica, seconds."""
        return np.array(
            [s.num_outstanding / self._drain_per_s(request.arrival_s, s) for s in snapshots]
        )

    def pick(
        self, costs: FloatArray, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> int:
        """Return one of the cheapest, drawn, and count it as sent."""
        chosen = drawn_of(cheapest_of(range(len(costs)), costs), self._rng)
        self._num_sent[snapshots[chosen].replica_id] += 1
        return chosen

    def _drain_per_s(self, now_s: float, snapshot: ReplicaSnapshot) -> float:
        seen = self._done[snapshot.replica_id]
        done = max(0, self._num_sent[snapshot.replica_id] - snapshot.num_outstanding)
        seen.append((now_s, done))
        while seen[0][0] < now_s - WINDOW_S:
            seen.popleft()
        recent = done - seen[0][1]
        return recent / WINDOW_S if recent > 0 else 1.0

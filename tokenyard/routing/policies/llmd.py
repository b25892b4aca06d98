"""The three schedulers of llm-d: sticky until saturated, the weighted blend, predicted latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tokenyard.routing.policies import signals
from tokenyard.routing.policies.cost import RoundRobinTies, cheapest_of, drawn_by
from tokenyard.routing.policies.delay import (
    ADDED_DECODE_S,
    ADDED_FIRST_TOKEN_S,
    added_delays,
)
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import Slo

PEAK_PREFILL_TOKENS_PER_S = 15_928.0
"""`peakPrefillThroughput`, the makers' default: a 32B model on two H100."""
MOST_TOKENS = 4_194_304.0
"""Load from which on `token-load-scorer` gives 0."""
NO_RANGE = 1e-9
"""Spread of headrooms under which `latency-scorer` takes them for equal."""


def prefix_cache_affinity(
    fractions: Sequence[float],
    candidates: Sequence[int],
    threshold: float,
    first_token_s: Callable[[int], float],
    max_penalty_s: float,
) -> list[int]:
    """Keep those of the candidates that have the prompt cached, unless they are much slower.

    Args:
        fractions: Share of the prompt that every replica has cached.
        candidates: Replicas to choose from.
        threshold: Share from which on a replica is stuck to.
        first_token_s: Estimated time to the first token at a replica.
        max_penalty_s: Gap between the best that is stuck to and the best other from which on all
            are kept; 0: none.
    """
    sticky = [i for i in candidates if fractions[i] >= threshold]
    others = [i for i in candidates if fractions[i] < threshold]
    if sticky and others and max_penalty_s > 0:
        gap = min(map(first_token_s, sticky)) - min(map(first_token_s, others))
        if gap > max_penalty_s:
            return list(candidates)
    return sticky or list(candidates)


class LlmdSticky:
    """Sticks to replicas with at least 80 % of the prompt until a gap in prefill opens.

    `prefix-cache-affinity-filter`: keep the replicas with a match of at least 0.8, unless the least
    prefill in flight among them is more than 18 s x 15,928 tokens/s above the least of the others.
    `token-load-scorer`: of those kept, the least tokens to prefill with the request's own, up to
    4,194,304. `max-score-picker`: ties in turn.

    In-flight tokens are prompt tokens until the first output, as in the source's default.

    Source: llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling/filter/prefixcacheaffinity
    (066c20e) and scorer/tokenload (1b30d10); the guides' default since 2026-08-17.
    """

    def __init__(
        self,
        affinity_threshold: float = 0.8,
        max_ttft_penalty_s: float = 18.0,
        by_speed: float = 0.0,
    ) -> None:
        """Stick from `affinity_threshold` on; count load `by_speed` where GPUs differ (ours)."""
        self._threshold = affinity_threshold
        self._max_penalty_s = max_ttft_penalty_s
        self._by_speed = by_speed
        self._turns = RoundRobinTies()

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the least loaded of the replicas that are kept."""
        kept = prefix_cache_affinity(
            [signals.match_fraction(request, s) for s in snapshots],
            range(len(snapshots)),
            self._threshold,
            lambda i: signals.prefill_in_flight_tokens(snapshots[i]) / PEAK_PREFILL_TOKENS_PER_S,
            self._max_penalty_s,
        )
        loads = [
            min(signals.prefill_in_flight_tokens(s) + signals.miss_tokens(request, s), MOST_TOKENS)
            * signals.unit_of_load(s, self._by_speed)
            for s in snapshots
        ]
        return self._turns.one_of(cheapest_of(kept, loads))


class LlmdBlend:
    """Most `2 x short queue + 2 x free KV memory + 3 x cached prefix`; ties in turn.

    queue = (max - waiting) / (max - min), 1 where all are equal; KV = 1 - share used; prefix =
    share of the prompt that is cached. By speed (ours) the queue is the requests in flight with the
    new one, over the replica's speed.

    Source: llm-d/llm-d-router, pkg/epp/config/loader/defaults.go, the binary's built-in default.
    """

    def __init__(
        self,
        queue_weight: float = 2.0,
        kv_weight: float = 2.0,
        prefix_weight: float = 3.0,
        by_speed: float = 0.0,
    ) -> None:
        """Weigh the scores; only their proportions matter."""
        self._queue_weight = queue_weight
        self._kv_weight = kv_weight
        self._prefix_weight = prefix_weight
        self._by_speed = by_speed
        self._turns = RoundRobinTies()

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the replica with the highest weighted sum of scores."""
        costs = [-score for score in self.scores(request, snapshots)]
        return self._turns.one_of(cheapest_of(range(len(costs)), costs))

    def scores(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
        """Return the weighted sum of every replica, higher is better."""
        return [
            self._queue_weight * queue
            + self._kv_weight * (1.0 - signals.kv_used_fraction(s))
            + self._prefix_weight * signals.match_fraction(request, s)
            for queue, s in zip(_shortness(self._queues(snapshots)), snapshots, strict=True)
        ]

    def _queues(self, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
        if self._by_speed:
            return [(s.num_outstanding + 1) / s.full_tokens_per_s for s in snapshots]
        return [float(s.num_waiting) for s in snapshots]


def _shortness(queues: Sequence[float]) -> list[float]:
    """1 for the shortest queue down to 0 for the longest; 1 for all where they are equal."""
    shortest, longest = min(queues), max(queues)
    if shortest == longest:
        return [1.0] * len(queues)
    return [(longest - queue) / (longest - shortest) for queue in queues]


class LlmdPredictedLatency:
    """Sticks by prefix, keeps SLOs where it can, and draws by predicted headroom.

    Filters: match of at least 0.99; replicas whose headrooms (SLO - prediction) are not negative,
    but those that are with probability 0.01; match of at least 0.8. Both filters of prefixes let
    go at a gap of 5 s in the time to the first token. `latency-scorer`: headrooms of first token
    (0.8) and of each further one (0.2), scaled to their range; the least headroom scores best
    (best fit). Where all are negative, the idle count first, then those that violate only the
    second, then only the first. A replica is drawn in proportion to its score.

    Predictions are our estimates of delays, where llm-d trains a model. A request without SLOs for
    first and further tokens has headrooms of minus the predictions in llm-d; ours has an SLO of the
    response alone, which stands for that of the first token and, over its output, of the others.

    Source: llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling/{filter/sloheadroomtier,
    scorer/latency} (45c3854, 2b0e757), weights of its chart.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        slo: Slo,
        ttft_weight: float = 0.8,
        most_headroom: float = 0.0,
        max_ttft_penalty_s: float = 5.0,
        epsilon: float = 0.01,
    ) -> None:
        """Draw from `rng`; `most_headroom` 1 is the strategy `most` in place of `least`."""
        self._rng = rng
        self._slo_s = slo.response_s
        self._ttft_weight = ttft_weight
        self._most_headroom = most_headroom
        self._max_penalty_s = max_ttft_penalty_s
        self._epsilon = epsilon

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return a replica drawn by its score."""
        delays = added_delays(request, snapshots)
        outputs = max(1.0, request.predicted_total_tokens - request.context_tokens)
        first_s, decode_s = delays[:, ADDED_FIRST_TOKEN_S], delays[:, ADDED_DECODE_S]
        per_token_s = (self._slo_s - decode_s) / outputs
        headrooms = list(zip((self._slo_s - first_s).tolist(), per_token_s.tolist(), strict=True))
        first_token_s = first_s.tolist().__getitem__
        fractions = [signals.match_fraction(request, s) for s in snapshots]
        kept = list(range(len(snapshots)))
        kept = prefix_cache_affinity(fractions, kept, 0.99, first_token_s, self._max_penalty_s)
        kept = self._tier(kept, headrooms)
        kept = prefix_cache_affinity(fractions, kept, 0.8, first_token_s, self._max_penalty_s)
        kept = _scored(kept, headrooms, snapshots)
        return drawn_by(kept, self.scores([headrooms[i] for i in kept]), self._rng)

    def scores(self, headrooms: Sequence[tuple[float, float]]) -> list[float]:
        """Return the score of every replica of one tier, 0.01 to 1.01."""
        # For a handful of replicas, arrays would take three times as long as plain numbers.
        first, later = ([abs(headroom[at]) for headroom in headrooms] for at in (0, 1))
        weight = self._ttft_weight
        weights = [weight, 1.0 - weight]
        differ = [max(spans) - min(spans) > NO_RANGE for spans in (first, later)]
        if differ[0] != differ[1]:
            weights = [float(has_range) for has_range in differ]
        scaled = [_scaled(spans) for spans in (first, later)]
        meets = min(map(min, headrooms)) >= 0
        scores = []
        for pair in zip(*scaled, strict=True):
            combined = pair[0] * weights[0] + pair[1] * weights[1]
            best = combined if self._most_headroom and meets else 1.0 - combined
            scores.append((math.floor(best * 100) + 1) / 100)
        return scores

    def _tier(self, candidates: list[int], headrooms: Sequence[tuple[float, float]]) -> list[int]:
        meet = [i for i in candidates if min(headrooms[i]) >= 0]
        violate = [i for i in candidates if min(headrooms[i]) < 0]
        if meet and violate and self._rng.random() < self._epsilon:
            return violate
        return meet or violate


def _scaled(spans: Sequence[float]) -> list[float]:
    """How far each is above the least, as a share of their range; half where there is none."""
    least, range_ = min(spans), max(spans) - min(spans)
    return [(span - least) / range_ if range_ > NO_RANGE else 0.5 for span in spans]


def _scored(
    candidates: list[int],
    headrooms: Sequence[tuple[float, float]],
    snapshots: Sequence[ReplicaSnapshot],
) -> list[int]:
    """The candidates that get a score: those that meet the SLOs, or the least bad of the others."""
    first_late = [i for i in candidates if headrooms[i][0] < 0 <= headrooms[i][1]]
    later_late = [i for i in candidates if headrooms[i][1] < 0 <= headrooms[i][0]]
    meet = [i for i in candidates if min(headrooms[i]) >= 0]
    idle = [i for i in candidates if snapshots[i].num_outstanding == 0]
    return meet or idle or later_late or first_late or candidates

"""The two costs of NVIDIA Dynamo's KV router."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tokenyard.routing.policies import signals
from tokenyard.routing.policies.cost import LeastCost, cheapest_of, drawn_of
from tokenyard.routing.types import ReplicaSnapshot, Request, SnapshotColumns
from tokenyard.types import FloatArray

BLOCK_TOKENS = 16
"""Tokens of a KV block (vLLM)."""


class DynamoCost(LeastCost):
    """Least `scale x prefill blocks + decode blocks + weight x requests in flight`.

    prefill blocks = max(0, (prefill tokens in flight + prompt) / 16 - credit x cached blocks), with
    credit / (1 + decay x (prefill above the least loaded, in prompts)). decode blocks = the
    different blocks of the prompts in flight with this one, from the decision to the last token.
    Defaults: scale 1, decay 0, weight 0; the credit is 1, and the temperature 0 (ties are drawn).
    Cached blocks are our snapshot's, where Dynamo follows KV events, and there are no host or disk
    tiers. Where prompts are not counted (a list of snapshots, as of `/v1/route` and of a decision
    log), decode blocks are those in KV memory with the prompt's: they have outputs in them and lack
    what waits. How often Dynamo's router decides the same is in docs/results/fidelity.md.

    Source: ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector.rs (01690d4), and
    `KvRouterConfig` of ai-dynamo-runtime 1.6.1.
    """

    prompt_block_tokens = BLOCK_TOKENS

    def __init__(
        self,
        rng: np.random.Generator,
        prefill_load_scale: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        decode_active_request_weight: float = 0.0,
        by_speed: float = 0.0,
    ) -> None:
        """Draw ties from `rng`; count load `by_speed` where GPUs differ (ours)."""
        self._rng = rng
        self._scale = prefill_load_scale
        self._decay = overlap_score_credit_decay
        self._request_weight = decode_active_request_weight
        self._by_speed = by_speed

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the cost of every replica, blocks."""
        least = min(signals.prefill_in_flight_tokens(s) for s in snapshots)
        decode = _decode_blocks(request, snapshots)
        return np.array(
            [
                self.combined(self._prefill_blocks(request, s, least), blocks, s)
                * signals.unit_of_load(s, self._by_speed)
                for s, blocks in zip(snapshots, decode, strict=True)
            ]
        )

    def combined(self, prefill: float, decode: float, snapshot: ReplicaSnapshot) -> float:
        """Return the cost of so many blocks to prefill and to decode."""
        active = self._request_weight * snapshot.num_outstanding
        return self._scale * prefill + decode + active

    def pick(
        self, costs: FloatArray, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> int:
        """Return one of the cheapest, drawn."""
        return drawn_of(cheapest_of(range(len(costs)), costs), self._rng)

    def _prefill_blocks(self, request: Request, snapshot: ReplicaSnapshot, least: float) -> float:
        in_flight = signals.prefill_in_flight_tokens(snapshot)
        blocks = (in_flight + request.context_tokens) / BLOCK_TOKENS
        own = math.ceil(request.context_tokens / BLOCK_TOKENS) or 1
        decay = 1.0 + self._decay * (in_flight - least) / BLOCK_TOKENS / own
        credit = 1.0 / decay * (signals.match_tokens(request, snapshot) // BLOCK_TOKENS)
        return max(0.0, blocks - credit)


def _decode_blocks(request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
    if isinstance(snapshots, SnapshotColumns):
        counted: list[float] = snapshots.prompt_blocks(BLOCK_TOKENS).tolist()
        if not math.isnan(counted[0]):
            return counted
    return [
        math.ceil((signals.kv_tokens(s) + request.context_tokens) / BLOCK_TOKENS) for s in snapshots
    ]


class DynamoLMetric(DynamoCost):
    """Least `prefill blocks x (decode blocks + 1)`, both as in `DynamoCost`; ties are drawn.

    Source: ai-dynamo/dynamo, docs: router-concepts.md, option `lmetric`.
    """

    def __init__(self, rng: np.random.Generator, by_speed: float = 0.0) -> None:
        """Draw ties from `rng`; count load `by_speed` where GPUs differ (ours)."""
        super().__init__(rng, by_speed=by_speed)

    def combined(self, prefill: float, decode: float, snapshot: ReplicaSnapshot) -> float:
        """Return the product for so many blocks to prefill and to decode."""
        return prefill * (decode + 1.0)

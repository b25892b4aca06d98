"""Least marginal delay, by hand."""

from __future__ import annotations

import pytest

from tokenyard.routing.policies.delay import MarginalDelay
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request

PROMPT = Request(arrival_s=0.0, context_tokens=2000, predicted_total_tokens=2100.0)


def replica(
    match_tokens: int = 0,
    prefill_tokens: float = 0.0,
    output_tokens: float = 0.0,
    kv_used_fraction: float = 0.0,
    num_running: int = 0,
    tokens_per_s: float = 100.0,
    wait_s: float = 0.0,
) -> ReplicaSnapshot:
    """A replica that computes 10,000 prompt tokens or 100 iterations a second."""
    return ReplicaSnapshot(
        replica_id="replica",
        tokens_per_s=tokens_per_s,
        num_slots=10,
        max_concurrency=10,
        num_waiting=0,
        num_running=num_running,
        tokens_in_flight=prefill_tokens + output_tokens,
        predicted_wait_s=wait_s,
        engine=EngineSnapshot(
            iteration_s=0.01,
            prefill_token_s=1e-4,
            sequence_s=0.0,
            kv_token_s=0.0,
            token_budget=10_000,
            kv_capacity_tokens=10_000.0,
            kv_used_fraction=kv_used_fraction,
            prefill_in_flight_tokens=prefill_tokens,
            output_in_flight_tokens=output_tokens,
            match_tokens=match_tokens,
        ),
    )


@pytest.mark.parametrize(
    ("weights", "cost_s"), [((1.0, 1.0), 2.05), ((3.0, 2.0), 2.95), ((1.0, 0.0), 1.25)]
)
def test_marginal_delay_weighs_the_wait_and_the_others(weights, cost_s):
    # It waits 0.05 s; its prompt takes 0.2 s and one iteration, its other 99 tokens one each.
    # Four others stand still for the 0.2 s.
    cluster = [replica(num_running=4, output_tokens=400.0, wait_s=0.05)]
    assert MarginalDelay(*weights).costs(PROMPT, cluster) == pytest.approx([cost_s])

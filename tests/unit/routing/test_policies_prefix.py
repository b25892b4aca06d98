"""One example by hand for each rule that looks at prefixes, memory or added delay."""

from __future__ import annotations

import pytest

from tokenyard.routing.policies.delay import MarginalDelay
from tokenyard.routing.policies.prefix import (
    KvCost,
    PrefixAffinity,
    StickyUntilSaturated,
    WeightedScorers,
)
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


@pytest.mark.parametrize(("ratio", "chosen"), [(1.2, 0), (1.3, 1)])
def test_prefix_affinity_weighs_tokens_that_are_not_cached(ratio, chosen):
    # The prefix leaves 500 prompt tokens and 100 to generate, behind 2000: 2600 against 2100.
    cluster = [replica(), replica(match_tokens=1500, output_tokens=2000.0)]
    assert PrefixAffinity(ratio).route(PROMPT, cluster) == chosen


def test_of_equally_long_prefixes_affinity_takes_the_less_loaded_for_its_speed():
    # (900 + 600) / 1000 = 1.5 against (2000 + 600) / 2000 = 1.3.
    slow = replica(match_tokens=1500, output_tokens=900.0)
    fast = replica(match_tokens=1500, output_tokens=2000.0, tokens_per_s=200.0)
    assert PrefixAffinity(1.5).route(PROMPT, [slow, fast]) == 1


@pytest.mark.parametrize(("saturated_s", "chosen"), [(0.55, 1), (0.53, 0)])
def test_sticky_stays_until_there_is_too_much_prefill(saturated_s, chosen):
    # 400 of the prompt's tokens are missing behind 5000: 0.54 s of prefill.
    cluster = [replica(), replica(match_tokens=1600, prefill_tokens=5000.0)]
    assert StickyUntilSaturated(saturated_s).route(PROMPT, cluster) == chosen


def test_sticky_does_not_stay_with_less_than_four_fifths_of_the_prompt():
    cluster = [replica(), replica(match_tokens=1599, prefill_tokens=5000.0)]
    assert StickyUntilSaturated(18.0).route(PROMPT, cluster) == 0


@pytest.mark.parametrize(
    ("overlap_weight", "costs"), [(1.0, [10.0, 9.5]), (3.0, [16.0, 16.5]), (0.0, [7.0, 6.0])]
)
def test_kv_cost_adds_weighted_prefill_and_memory(overlap_weight, costs):
    # Over 1000 tokens/s: w (1000 + 2000) + 5000 + 2000, and w (3000 + 500) + 4000 + 2000.
    cluster = [
        replica(prefill_tokens=1000.0, kv_used_fraction=0.5),
        replica(prefill_tokens=3000.0, kv_used_fraction=0.4, match_tokens=1500),
    ]
    assert KvCost(overlap_weight).costs(PROMPT, cluster) == pytest.approx(costs)


def test_scores_are_weighted_and_summed():
    # Queues of 1, 3 and 5 score 1, 1/2 and 0; free memory 0.2, 0.5 and 1; prefixes 0, 3/4 and 0.
    cluster = [
        replica(kv_used_fraction=0.8),
        replica(num_running=2, kv_used_fraction=0.5, match_tokens=1500),
        replica(num_running=4),
    ]
    scores = [2 + 0.4, 1 + 1 + 2.25, 2]
    assert WeightedScorers(2.0, 2.0, 3.0).costs(PROMPT, cluster) == pytest.approx(
        [-score for score in scores]
    )


@pytest.mark.parametrize(
    ("weights", "cost_s"), [((1.0, 1.0), 2.05), ((3.0, 2.0), 2.95), ((1.0, 0.0), 1.25)]
)
def test_marginal_delay_weighs_the_wait_and_the_others(weights, cost_s):
    # It waits 0.05 s; its prompt takes 0.2 s and one iteration, its other 99 tokens one each.
    # Four others stand still for the 0.2 s.
    cluster = [replica(num_running=4, output_tokens=400.0, wait_s=0.05)]
    assert MarginalDelay(*weights).costs(PROMPT, cluster) == pytest.approx([cost_s])

"""Every public rule against its slow twin, over sequences of requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.slow_rules import ORACLES, Sent
from sizes import scaled

from tokenyard.routing.policies.public import PUBLIC_RULES, PolicyContext
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request
from tokenyard.types import Slo

TWICE_TOLD = {"sed_linear", "filter_dump", "llmd_predicted_latency"}
"""Rules on delays, whose tests stand with the properties."""


def engines(max_in_flight: int) -> st.SearchStrategy[EngineSnapshot]:
    return st.builds(
        EngineSnapshot,
        iteration_s=st.just(0.01),
        prefill_token_s=st.sampled_from((5e-5, 1e-4, 4e-4)),
        sequence_s=st.just(1e-4),
        kv_token_s=st.just(1e-7),
        token_budget=st.just(2048),
        kv_capacity_tokens=st.sampled_from((2e4, 1e5)),
        kv_used_fraction=st.sampled_from((0.0, 0.25, 0.5, 0.9, 1.0)),
        prefill_in_flight_tokens=st.integers(0, max_in_flight).map(float),
        output_in_flight_tokens=st.integers(0, 4000).map(float),
        match_tokens=st.integers(0, 6000),
    )


def fleets(size: int) -> st.SearchStrategy[list[ReplicaSnapshot]]:
    one = st.builds(
        ReplicaSnapshot,
        replica_id=st.just(""),
        tokens_per_s=st.sampled_from((500.0, 1000.0, 4000.0)),
        num_slots=st.sampled_from((1, 8)),
        max_concurrency=st.sampled_from((4, 64)),
        num_waiting=st.sampled_from((0, 1, 3, 40, 120)),
        num_running=st.integers(0, 8),
        tokens_in_flight=st.integers(0, 100_000).map(float),
        predicted_wait_s=st.integers(0, 40).map(float),
        # 300,000 tokens of prefill are above llm-d's gap.
        engine=engines(5_000) | engines(600_000),
    )
    named = st.tuples(
        *[one.map(lambda s, i=i: replace(s, replica_id=f"r{i}")) for i in range(size)]
    )
    return named.map(list)


@st.composite
def sequences(draw) -> list[tuple[Request, list[ReplicaSnapshot]]]:
    size, now_s, found = draw(st.integers(1, 5)), 0.0, []
    for _ in range(draw(st.integers(1, 8))):
        now_s += draw(st.sampled_from((0.0, 0.5, 20.0, 70.0, 200.0)))
        context = draw(st.sampled_from((1, 40, 700, 3000, 6000)))
        total = context + draw(st.integers(0, 500))
        found.append((Request(now_s, context, float(total)), draw(fleets(size))))
    return found


@pytest.mark.parametrize("name", sorted(ORACLES))
@settings(max_examples=scaled(60))
@given(sequence=sequences(), seed=st.integers(0, 99))
def test_every_choice_is_one_that_the_source_may_make(name, sequence, seed):
    context = PolicyContext("test", Slo(2.0), np.random.default_rng(seed), len(sequence[0][1]))
    policy = PUBLIC_RULES[name].make(context, {})
    history: list[Sent] = []
    for request, fleet in sequence:
        chosen = policy.route(request, fleet)
        assert chosen in ORACLES[name](history, request, fleet)
        history.append(Sent(request, fleet, chosen))


def test_no_public_rule_is_left_without_a_twin():
    assert ORACLES.keys() | TWICE_TOLD == PUBLIC_RULES.keys()

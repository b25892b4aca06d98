"""One decision: the safety net, and exploration whose propensities are the true ones."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.serve_builders import a_baseline, a_faulty_policy, a_trained_policy, network_artifact

from serve_app.policy.decider import MAX_EXPLORE_FRACTION, Decider, IncompatibleRequest
from tokenyard.policies.delay import finish_s
from tokenyard.types import Decision, ReplicaSnapshot, Request

SED = a_baseline("sed")
A_REQUEST = Request(0.0, 1000, 1000.0)


def a_replica(replica_id="a", tokens_in_flight=0.0, num_running=0, max_concurrency=5):
    return ReplicaSnapshot(replica_id, 5000.0, 1, max_concurrency, 0, num_running, tokens_in_flight)


def a_decider(loaded, explore_fraction=0.0, seed=0):
    return Decider(loaded, np.random.default_rng(seed), explore_fraction)


replicas = st.builds(
    ReplicaSnapshot,
    replica_id=st.text(min_size=1),
    tokens_per_s=st.floats(100, 1e5),
    num_slots=st.integers(1, 8),
    max_concurrency=st.integers(1, 8),
    num_waiting=st.integers(0, 8),
    num_running=st.integers(0, 8),
    tokens_in_flight=st.floats(0, 1e5),
)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_choice_outside_the_candidates_is_a_failure(wrong):
    decider = a_decider(a_faulty_policy(lambda: wrong))
    choice = decider.decide(A_REQUEST, [a_replica("a", 5000.0, 1), a_replica("b")])
    assert choice.index == 1
    assert choice.fallback
    assert decider.num_fallbacks == 1


def test_costs_that_are_not_finite_are_a_failure(monkeypatch):
    loaded = a_trained_policy()
    policy = loaded.make(np.random.default_rng(0))
    monkeypatch.setattr(type(policy), "decide", lambda *_: Decision(0, (math.nan, 1.0)))
    choice = a_decider(loaded).decide(A_REQUEST, [a_replica("a", 5000.0, 1), a_replica("b")])
    assert choice.fallback
    assert choice.index == 1


def test_the_wrong_number_of_candidates_is_the_callers_mistake_and_not_a_failure():
    decider = a_decider(a_trained_policy(network_artifact()))
    with pytest.raises(IncompatibleRequest, match="3 replicas, got 2"):
        decider.decide(A_REQUEST, [a_replica("a"), a_replica("b")])
    assert (decider.num_decisions, decider.num_fallbacks) == (0, 0)


def test_without_exploration_the_choice_is_the_policys_with_propensity_one():
    decider = a_decider(a_baseline("sed"))
    choice = decider.decide(A_REQUEST, [a_replica("a", 5000.0, 1), a_replica("b")])
    assert (choice.index, choice.propensity, choice.explored) == (1, 1.0, False)


def test_the_propensity_of_a_policy_that_draws_is_not_known():
    choice = a_decider(a_baseline("random")).decide(A_REQUEST, [a_replica("a"), a_replica("b")])
    assert choice.propensity is None


def test_how_often_a_replica_is_chosen_is_what_its_propensity_says():
    decider = a_decider(a_baseline("sed"), MAX_EXPLORE_FRACTION)
    candidates = [a_replica("a"), a_replica("b", 1000.0, 1), a_replica("late", 50_000.0, 5)]
    choices = [decider.decide(A_REQUEST, candidates) for _ in range(20_000)]
    chosen = Counter(choice.index for choice in choices)
    told = {choice.index: choice.propensity for choice in choices}
    assert set(chosen) == {0, 1}
    assert sum(told.values()) == pytest.approx(1.0)
    for index, count in chosen.items():
        assert count / len(choices) == pytest.approx(told[index], abs=0.005)
    assert decider.num_explored == chosen[1]


@given(st.lists(replicas, min_size=1, max_size=6), st.integers(0, 1000))
def test_exploration_never_passes_the_guard(candidates, seed):
    decider = a_decider(SED, MAX_EXPLORE_FRACTION, seed)
    for _ in range(20):
        choice = decider.decide(A_REQUEST, candidates)
        chosen = candidates[choice.index]
        assert 0 < choice.propensity <= 1
        if choice.explored:
            assert finish_s(A_REQUEST, chosen) <= decider.loaded.card.slo_response_s
            assert chosen.num_outstanding < chosen.max_concurrency


@pytest.mark.parametrize("fraction", [-0.01, MAX_EXPLORE_FRACTION + 0.001, 1.0, math.nan])
def test_exploration_is_capped(fraction):
    with pytest.raises(ValueError, match="must lie between"):
        a_decider(a_baseline("sed"), fraction)


def test_a_policy_that_draws_does_not_explore_on_top():
    with pytest.raises(ValueError, match="draws its choices already"):
        a_decider(a_baseline("power_of_two"), 0.01)

"""One decision: the safety net, and exploration whose propensities are the true ones."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.serve_builders import (
    a_baseline,
    a_faulty_policy,
    a_manager,
    a_trained_policy,
    network_artifact,
)

from serve_app.policy.loading import MAX_EXPLORE_FRACTION, check_exploration
from serve_app.policy.runner import IncompatibleRequest
from tokenyard.routing.policies.delay import finish_times_s
from tokenyard.routing.types import Decision, ReplicaSnapshot, Request

SED = a_baseline("sed")
A_REQUEST = Request(0.0, 1000, 1000.0)


def a_replica(replica_id="a", tokens_in_flight=0.0, num_running=0, max_concurrency=5):
    return ReplicaSnapshot(replica_id, 5000.0, 1, max_concurrency, 0, num_running, tokens_in_flight)


TWO = [a_replica("a", 5000.0, 1), a_replica("b")]


@pytest.fixture
def make():
    """Makes managers, and ends their threads."""
    made = []

    def one(*args, **options):
        made.append(a_manager(*args, **options))
        return made[-1]

    yield one
    for manager in made:
        manager.stop()


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
def test_a_choice_outside_the_candidates_is_a_failure(make, wrong):
    manager = make(a_faulty_policy(lambda: wrong))
    assert manager.policy.decide(A_REQUEST, TWO) == "error"
    choice = manager.picker.pick(A_REQUEST, TWO)
    assert (choice.index, choice.fallback_reason) == (1, "error")
    assert manager.picker.counts.fallbacks == manager.policy.counts.fallbacks == {"error": 1}


def test_costs_that_are_not_finite_are_a_failure(make, monkeypatch):
    loaded = a_trained_policy()
    policy = loaded.make(np.random.default_rng(0))
    monkeypatch.setattr(type(policy), "decide", lambda *_: Decision(0, (math.nan, 1.0)))
    choice = make(loaded).picker.pick(A_REQUEST, TWO)
    assert choice.fallback_reason is not None
    assert choice.index == 1


def test_the_wrong_number_of_candidates_is_the_callers_mistake_and_not_a_failure(make):
    manager = make(a_trained_policy(network_artifact()))
    with pytest.raises(IncompatibleRequest, match="3 replicas, got 2"):
        manager.policy.check_compatible([a_replica("a"), a_replica("b")])
    assert manager.policy.decide(A_REQUEST, TWO) == "incompatible"
    assert manager.policy.breaker.num_opened == manager.picker.counts.num_decisions == 0


def test_a_question_that_is_not_counted_changes_no_counter(make):
    manager = make()
    copy = manager.picker.runner("copy", a_baseline("sed"))
    assert manager.picker.pick(A_REQUEST, TWO, copy=copy).index == 1
    assert (manager.picker.counts.num_decisions, copy.counts.num_decisions) == (0, 0)
    assert manager.picker.pick(A_REQUEST, TWO).index == 1
    assert (manager.picker.counts.num_decisions, manager.policy.counts.num_decisions) == (1, 1)


def test_without_exploration_the_choice_is_the_policys_with_propensity_one(make):
    choice = make(a_baseline("sed")).picker.pick(A_REQUEST, TWO)
    assert (choice.index, choice.propensity, choice.explored) == (1, 1.0, False)


def test_the_propensity_of_a_policy_that_draws_is_not_known(make):
    assert make(a_baseline("random")).picker.pick(A_REQUEST, TWO).propensity is None


def test_how_often_a_replica_is_chosen_is_what_its_propensity_says(make):
    manager = make(a_baseline("sed"), MAX_EXPLORE_FRACTION)
    candidates = [a_replica("a"), a_replica("b", 1000.0, 1), a_replica("late", 50_000.0, 5)]
    choices = [manager.picker.pick(A_REQUEST, candidates) for _ in range(20_000)]
    chosen = Counter(choice.index for choice in choices)
    told = {choice.index: choice.propensity for choice in choices}
    assert set(chosen) == {0, 1}
    assert sum(told.values()) == pytest.approx(1.0)
    for index, count in chosen.items():
        assert count / len(choices) == pytest.approx(told[index], abs=0.005)
    assert manager.picker.counts.num_explored == chosen[1]


@given(st.lists(replicas, min_size=1, max_size=6), st.integers(0, 1000))
def test_exploration_never_passes_the_guard(candidates, seed):
    manager = a_manager(SED, MAX_EXPLORE_FRACTION, seed)
    for _ in range(20):
        choice = manager.picker.pick(A_REQUEST, candidates)
        chosen = candidates[choice.index]
        assert 0 < choice.propensity <= 1
        if choice.explored:
            assert finish_times_s(A_REQUEST, [chosen])[0] <= SED.card.slo_response_s
            assert chosen.num_outstanding < chosen.max_concurrency
    manager.stop()


@pytest.mark.parametrize("fraction", [-0.01, MAX_EXPLORE_FRACTION + 0.001, 1.0, math.nan])
def test_exploration_is_capped(fraction):
    with pytest.raises(ValueError, match="must lie between"):
        check_exploration(a_baseline("sed"), fraction)


def test_a_policy_that_draws_does_not_explore_on_top(make):
    with pytest.raises(ValueError, match="draws its choices already"):
        check_exploration(a_baseline("power_of_two"), 0.01)
    assert make(a_baseline("power_of_two"), 0.01).policy.explore_fraction == 0.0

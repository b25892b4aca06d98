"""Choices tried out at close decisions: their costs are those of playing each one slowly."""

import numpy as np
import pytest

from tokenyard.metrics import percentile
from tokenyard.routing.scenario import NO_REWARD, load_scenario
from tokenyard.routing.scores.linear import marginal_scores
from tokenyard.routing.search import SearchConfig, started_at_best_rule
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.branching import LOST_SLOS, BranchingConfig
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSource, stream_rng

NUM_REQUESTS = 80
ALL = BranchingConfig(margin_slos=0.3, every=1, horizon=25, tail_weight=3.0)
SCENARIOS = (
    "poisson_085", "three_speeds", "local_cpu", "azure_code_slo", "multi_turn_prefix", "churn",
    "two_classes_slo",
)  # fmt: skip


def set_up(name):
    """A scenario of short streams, its source, the weights of a policy, and a stream."""
    scenario = load_scenario(name).model_copy(update={"requests_per_stream": NUM_REQUESTS})
    if scenario.fleet and scenario.fleet.churn:  # often enough for so short a stream
        churn = scenario.fleet.churn.model_copy(update={"mean_up_s": 10.0, "mean_down_s": 5.0})
        fleet = scenario.fleet.model_copy(update={"churn": churn})
        scenario = scenario.model_copy(update={"fleet": fleet})
    source = StreamSource(scenario)
    start = np.array(started_at_best_rule(scenario, SearchConfig(), orders=False).start)
    weights = start + np.random.default_rng(2).normal(0.0, 0.1, len(start))
    return scenario, source, weights, source.sample(NUM_REQUESTS, stream_rng(3, "validation"))


def scores_of(sim, source, weights):
    """What the policy says that each server costs now."""
    request, scores = sim.view().request(), np.empty(source.scenario.num_servers)
    mean, slo_s = source.mean_total_tokens, source.scenario.slo_response_s
    table = sim.tables[0] if source.scenario.fleet is None else sim.arrays.tables[0]
    context, total = float(request.context_tokens), request.predicted_total_tokens
    marginal_scores(weights, context, total - context, mean, slo_s, table, scores)
    return scores


def played(source, weights, stream, last=NUM_REQUESTS, forced=None):
    """Play until a request from `last` on is to be placed, some decisions as they are `forced`.

    Returns:
        The simulator when all is done, and the request and the scores at each decision.
    """
    sim = make_simulator(source.scenario, 1, NUM_REQUESTS, NO_REWARD)
    sim.load(0, stream)
    seen = []
    while 0 <= (current := sim.view().current()) < last:
        scores = scores_of(sim, source, weights)
        server = (forced or {}).get(len(seen), int(scores.argmin()))
        seen.append((current, scores))
        sim.step(np.array([server]))
    sim.drain()
    return sim, seen


def paid_s(sim, scenario, tail_after_s, last):
    """What the first requests of a stream cost."""
    outcomes = sim.view().outcomes()
    response_s = np.nan_to_num(outcomes.response_s[:last], nan=LOST_SLOS * scenario.slo_response_s)
    beyond_s = np.maximum(response_s - tail_after_s, 0.0)
    violations = outcomes.violations(scenario.slo_response_s)[:last]
    return float((response_s + ALL.tail_weight * beyond_s + 2.0 * violations).sum())


def is_tried(scenario, current, scores):
    """Whether a decision is close, and has a future on a fleet."""
    too_late = scenario.fleet is not None and current + 1 + ALL.horizon > NUM_REQUESTS
    return not too_late and (scores - scores.min() <= ALL.margin_slos).sum() > 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_costs_of_choices_are_those_of_playing_each_from_the_start(name):
    scenario, source, weights, stream = set_up(name)
    branching = server_model(scenario).branching(scenario, source.mean_total_tokens)
    found = branching.sample(weights, stream, ALL)
    whole, seen = played(source, weights, stream)
    tail_after_s = percentile(whole.view().outcomes().offered_response_s, 99.0)
    at = newest = 0
    for decision, (current, scores) in enumerate(seen):
        tried = scores - scores.min() <= ALL.margin_slos
        newest = max(newest, current)
        if not is_tried(scenario, current, scores):
            continue
        last = min(current + 1 + ALL.horizon, NUM_REQUESTS)
        np.testing.assert_array_equal(found.tried[at], tried)
        if current < newest:
            at += 1
            continue  # It comes again: to stop before `last` would be to stop before the decision.
        base = None
        for server in (int(scores.argmin()), *np.flatnonzero(tried).tolist()):
            sim, _ = played(source, weights, stream, last, {decision: server})
            cost_s = paid_s(sim, scenario, tail_after_s, last)
            base = cost_s if base is None else base
            assert found.costs_s[at, server] == pytest.approx(cost_s - base, rel=1e-6, abs=1e-6)
        assert not found.costs_s[at][~tried].any()
        at += 1
    assert at == len(found) > 5


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_costs_are_made_from_gives_the_costs_of_the_policy(name):
    scenario, source, weights, stream = set_up(name)
    branching = server_model(scenario).branching(scenario, source.mean_total_tokens)
    found = branching.sample(weights, stream, ALL)
    _, seen = played(source, weights, stream)
    close = [scores for current, scores in seen if is_tried(scenario, current, scores)]
    assert len(close) == len(found)
    costs = found.costs_from[..., 0] + found.costs_from[..., 1:] @ weights[: branching.num_features]
    up = np.isfinite(close)  # what is down is never tried
    np.testing.assert_allclose(costs[up], np.array(close)[up], rtol=1e-3, atol=1e-3)


def test_fewer_decisions_are_tried_where_fewer_are_asked_for():
    scenario, source, weights, stream = set_up("poisson_085")
    branching = server_model(scenario).branching(scenario, source.mean_total_tokens)
    every, second = (
        branching.sample(weights, stream, BranchingConfig(every=number)) for number in (1, 2)
    )
    assert len(second) == -(-len(every) // 2)
    np.testing.assert_array_equal(second.costs_s, every.costs_s[::2])
    assert NUM_REQUESTS < second.num_placed < every.num_placed


def test_servers_that_share_capacity_are_refused():
    scenario = load_scenario("poisson_085").model_copy(update={"discipline": "processor_sharing"})
    with pytest.raises(ValueError, match="poisson_085 shares capacity"):
        server_model(scenario).branching(scenario, 1.0)

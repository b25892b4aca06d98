from dataclasses import replace

import numpy as np
import pytest

from tokenyard.routing.artifact import best_tuned_rule, learned_policy
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.policies.tuned import FleetRules, load_tuned
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Arrivals, Server, load_scenario
from tokenyard.routing.scores.order import NUM_ORDER_WEIGHTS
from tokenyard.routing.search import (
    PolicySearch,
    SearchConfig,
    SearchObjective,
    StreamCosts,
    best_start,
    linear_weights,
    started_at,
    started_at_best_rule,
)
from tokenyard.routing.simulator.run import run_compiled
from tokenyard.routing.simulator.server_models import order_weights_of
from tokenyard.routing.simulator.streams import StreamSource, synthetic_streams

SMALL = SearchConfig(
    population=8, num_elites=3, streams_per_generation=2, requests_per_stream=500,
    num_generations=5,
)  # fmt: skip


def test_the_search_improves_on_shortest_expected_delay():
    search = PolicySearch(
        load_scenario("poisson_085"),
        SearchConfig(
            SearchObjective(cvar99=0.0, violation=0.0), population=24, num_elites=6,
            streams_per_generation=3, requests_per_stream=3000, num_generations=15,
        ),
        seed=0,
    )  # fmt: skip
    costs = [search.step()["cost_over_baseline"] for _ in range(15)]
    assert costs[0] == pytest.approx(1.0)  # the search starts at shortest expected delay
    assert np.mean(costs[-3:]) < 0.95


def test_every_generation_has_a_stream_in_each_part_of_the_range_of_loads(monkeypatch):
    drawn = []
    sample = StreamSource.sample

    def noted(source, length, rng, load_factor):
        drawn.append(load_factor)
        return sample(source, length, rng, load_factor)

    monkeypatch.setattr(StreamSource, "sample", noted)
    config = replace(
        SMALL, streams_per_generation=5, randomisation=Randomisation(load_factor=(0.5, 1.0))
    )
    search = PolicySearch(load_scenario("poisson_085"), config, seed=3)
    for _ in range(4):
        search.step()
    parts = np.floor((np.reshape(drawn, (4, 5)) - 0.5) / 0.1)
    np.testing.assert_array_equal(parts, np.tile(np.arange(5), (4, 1)))
    assert len(set(drawn)) == 20


def test_a_restored_search_goes_on_as_if_nothing_had_happened():
    scenario = load_scenario("poisson_085")
    straight, stopped = (PolicySearch(scenario, SMALL, seed=4) for _ in range(2))
    straight.step(), straight.step()
    stopped.step()
    resumed = PolicySearch(scenario, SMALL, seed=99)
    resumed.restore(stopped.state())
    resumed.step()
    np.testing.assert_array_equal(resumed.mean, straight.mean)
    assert resumed.env_steps == straight.env_steps == 2 * 9 * 2 * 500


def test_equal_seeds_find_equal_policies_and_others_do_not():
    scenario = load_scenario("poisson_085")
    found = []
    for seed in (1, 1, 2):
        search = PolicySearch(scenario, SMALL, seed)
        search.step()
        found.append(search.artifact().sha256)
    assert found[0] == found[1] != found[2]


def test_the_tail_guard_only_counts_what_is_beyond_the_baseline():
    guard = SearchObjective(tail_guard=2.0)
    base = StreamCosts(np.ones(2), np.full(2, 4.0))
    assert guard.relative_cost(StreamCosts(np.ones(2), np.full(2, 3.0)), base) == 1.0
    assert guard.relative_cost(StreamCosts(np.ones(2), np.full(2, 5.0)), base) == 1.5


def test_the_exported_policy_carries_the_length_predictor_of_its_training_traffic():
    artifact = PolicySearch(load_scenario("conversation"), SMALL).artifact()
    predictor = artifact.metadata.predictor
    assert predictor.generated_tokens(50) != predictor.generated_tokens(5000)
    assert artifact.metadata.num_replicas == 3
    learned_policy(artifact)


def test_the_search_learns_to_keep_requests_off_a_server_that_is_useless():
    scenario = load_scenario("poisson_085").model_copy(
        update={
            "servers": (
                Server(name="fast", tokens_per_s=9000, concurrency=5),
                Server(name="snail", tokens_per_s=50, concurrency=5),
            ),
            "arrivals": Arrivals(load=0.5),
        }
    )
    search = PolicySearch(scenario, SMALL, seed=0)
    for _ in range(5):
        search.step()
    search._costs(search.mean)
    assert (search._sim.view().outcomes().server == 1).mean() < 0.01


def test_a_search_may_start_at_tuned_weights_and_is_compared_with_them():
    scenario = load_scenario("poisson_085")
    start = tuple(float(i) / 50 for i in range(NUM_MARGINAL_WEIGHTS))
    search = PolicySearch(scenario, replace(SMALL, start=start, order=(5.0, 0.0, 0.0, 0.0)), seed=0)
    assert search.weights.tolist() == list(start)
    np.testing.assert_allclose(search.order, [5.0, 0.0, 0.0, 0.0])
    # The first candidate is the centre, which here is what costs are relative to.
    assert search.step()["cost_over_baseline"] == 1.0


def test_the_order_is_searched_with_the_weights_and_never_below_first_come():
    scenario = load_scenario("poisson_085")
    search = PolicySearch(scenario, replace(SMALL, order=(3.0, 0.0, 0.0, 0.0)), seed=0)
    search.step()
    assert search.order[0] not in (0.0, 3.0)
    assert search.artifact().arrays["order"].tolist() == search.order.tolist()
    search.mean[-3:] = -2.0
    assert not search.order.any()
    assert not search.artifact().orders, "first come, first served needs no order"


def test_an_order_that_is_not_searched_stays():
    config = replace(SMALL, order=(3.0, 0.0, 0.0, 0.0), order_std=0.0)
    search = PolicySearch(load_scenario("poisson_085"), config, seed=0)
    search.step()
    np.testing.assert_allclose(search.order, [3.0, 0.0, 0.0, 0.0])


def test_a_search_of_a_fleet_has_all_orders_by_size():
    order = (1.0, 2.0, 0.0, 4.0)
    search = PolicySearch(load_scenario("azure_code_slo"), replace(SMALL, order=order))
    np.testing.assert_allclose(search.order, order)
    assert len(search.mean) == len(search.weights) + NUM_ORDER_WEIGHTS


@pytest.mark.parametrize("name", ["poisson_085", "azure_code_slo", "conversation"])
def test_a_search_begins_at_the_rule_that_ships(name):
    scenario = load_scenario(name)
    config = started_at_best_rule(scenario, SMALL)
    placement, order = RuleName.parse(best_tuned_rule(name))
    assert best_start(scenario) == best_tuned_rule(name)
    knobs = load_tuned(name).orders.get(best_tuned_rule(name))
    weights = linear_weights(scenario, placement, knobs)
    assert config.start[: len(weights)] == weights
    assert config.order == tuple(order_weights_of(order, knobs))


def test_where_it_cannot_be_the_rule_that_ships_it_is_the_next():
    scenario = load_scenario("two_classes_slo")
    assert best_tuned_rule("two_classes_slo") == "tuned_marginal_delay+fair"
    assert best_start(scenario) == "tuned_marginal_delay+boost"
    # First come, first served it is the best by its training score.
    assert best_start(scenario, orders=False) == "tuned_marginal_delay"


def test_a_search_begins_at_the_rule_that_is_named():
    own = load_scenario("azure_code_slo").model_copy(update={"name": "mine"})
    config = started_at(own, "marginal_delay@0:3+wspt@60", SMALL)
    weights = FleetRules(wait_weight=0.0, others_weight=3.0).marginal_weights
    assert config.start[: len(weights)] == weights
    np.testing.assert_allclose(config.order, order_weights_of(Term.of("wspt", 60)))
    assert not any(started_at(own, "marginal_delay", SMALL).order)
    for rule, reason in (
        ("tuned_lmetric+sjf", "a search cannot begin at 'tuned_lmetric'"),
        ("marginal_delay+edf", "compiled orders are"),
    ):
        with pytest.raises(ValueError, match=reason):
            started_at(own, rule, SMALL)


@pytest.mark.parametrize("name", ["azure_code_slo", "bursty_serial"])
@pytest.mark.parametrize(
    "rule", ["marginal_delay@0:3+wspt@60", "marginal_in_order@0.5:2+boost@4:1"]
)
def test_a_search_begins_like_the_rule_that_is_named(name, rule):
    """Its first candidate decides as the rule does, request by request."""
    scenario = load_scenario(name)
    if scenario.fleet is None and "delay" in rule:
        rule = "sed+boost@4:1"
    source = StreamSource(scenario)
    streams = synthetic_streams(source, 1, seed=3)
    search = PolicySearch(scenario, started_at(scenario, rule, SMALL))
    (ours,) = run_compiled(scenario, streams, search.artifact().decide)
    (theirs,) = PROBLEM.candidate(scenario, rule).run(scenario, streams, 0)
    np.testing.assert_array_equal(ours.outcomes.response_s, theirs.outcomes.response_s)


def test_where_nothing_was_tuned_a_search_begins_at_least_marginal_delay():
    own = load_scenario("azure_code_slo").model_copy(update={"name": "mine"})
    config = started_at_best_rule(own, SMALL)
    assert not any(config.start)
    assert not any(config.order)

"""The law: what is drawn, how the rival is found, and what counts as worse."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.routing.artifact import DEFAULT_RULE, DEFAULT_SERVER_RULE
from tokenyard.routing.drawn_clusters import draw_wide
from tokenyard.routing.never_worse import compared, play, verdict
from tokenyard.routing.policies import PolicyContext, is_rule, make_policy
from tokenyard.routing.scenario import NO_REWARD, load_scenario
from tokenyard.routing.search import PolicySearch
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.run import run_policy
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSet

SHIPPED = Path(str(resources.files("tokenyard"))) / "artifacts" / "routing"


@settings(max_examples=scaled(20))
@given(seed=st.integers(0, 10_000))
def test_draws_lie_in_the_documented_ranges(seed):
    cluster = draw_wide(np.random.default_rng(seed))
    scenario = cluster.scenario
    arrivals = scenario.arrivals
    assert 1 <= scenario.num_servers <= 64
    assert 0.05 <= (arrivals.load or arrivals.warm_load) <= 1.2
    assert len(cluster.time_factors) in (0, scenario.num_servers)
    if scenario.fleet:
        assert all(4 <= one.max_batch <= 512 for one in scenario.fleet.replicas)
        assert 0 <= scenario.fleet.scrape_interval_s <= 2
        assert 1 <= scenario.fleet.num_routers <= 4


def test_draws_differ_in_kind():
    drawn = [draw_wide(np.random.default_rng(seed)) for seed in range(120)]
    fleets = [one.scenario.fleet for one in drawn if one.scenario.fleet]
    assert 60 < len(fleets) < 100
    assert {one.churn is None for one in fleets} == {True, False}
    assert {len(one.classes) for one in fleets} == {1, 2}
    assert {one.prefix_block_tokens > 0 for one in fleets} == {True, False}
    assert {one.scenario.arrivals.process for one in drawn} == {"poisson", "mmpp", "closed"}
    assert {one.scenario.output_length for one in drawn} == {"by_context", "none", "oracle"}
    assert {len(one.time_factors) > 0 for one in drawn} == {True, False}


def test_replicas_that_are_slower_than_they_declare_take_longer():
    seeds = range(60)
    drawn = [(seed, draw_wide(np.random.default_rng(seed))) for seed in seeds]
    seed, wrong = next(one for one in drawn if len(one[1].time_factors))
    (stream,) = wrong.streams(1, np.random.default_rng(seed))
    means = stream.factors.mean(axis=1) / wrong.time_factors
    assert means == pytest.approx(np.ones(len(means)), rel=0.1)


@pytest.mark.parametrize("seed", [0, 5, 7])
def test_every_placement_stands_beside_every_order(seed):
    scenario = draw_wide(np.random.default_rng(seed)).scenario
    servers = server_model(scenario)
    cluster = draw_wide(np.random.default_rng(seed))
    sim = make_simulator(scenario, 1, cluster.num_requests)
    sim.load(0, *cluster.streams(1, np.random.default_rng(1)))
    names = list(servers.rule_variants(sim))
    assert len(set(names)) == len(names)
    for placement in servers.placements(sim):
        assert {name for name in names if name.startswith(f"{placement}+")}
    assert any(name.startswith("marginal_in_order") for name in names)


@pytest.mark.parametrize("seed", [0, 2, 19, 24])
def test_what_is_played_is_what_the_name_means(seed):
    """The rules that are found by playing them can be given to a gateway by their names."""
    cluster = replace(draw_wide(np.random.default_rng(seed)), num_requests=150)
    scenario, requests = cluster.scenario, cluster.num_requests
    streams = cluster.streams(1, np.random.default_rng(1))
    sim = make_simulator(scenario, 1, requests, NO_REWARD)
    sim.load(0, *streams)
    rules = server_model(scenario).rule_variants(sim)
    context = PolicyContext(
        scenario.name, scenario.slo, np.random.default_rng(0), scenario.num_servers
    )
    assert all(is_rule(name) for name in rules)
    for name in list(rules)[:: max(len(rules) // 8, 1)]:
        sim.load(0, *streams)
        rules[name](sim)
        played = np.array(sim.view().outcomes().response_s)
        (named,) = run_policy(
            scenario, StreamSet(streams, ""), lambda _, name=name: make_policy(name, context), 0
        )
        assert np.nanmean(named.outcomes.response_s) == pytest.approx(np.nanmean(played), rel=1e-6)


def test_one_stream_of_its_own_chooses_the_rule_and_the_default_is_named():
    names = ["tuned", "tuned:2", "default", "marginal_delay"]
    rows = play(7, names)
    assert rows == play(7, names)
    assert [row["policy"] for row in rows] == names
    assert all(is_rule(row["rule"]) for row in rows)
    assert rows[2]["rule"] in (DEFAULT_RULE, DEFAULT_SERVER_RULE)
    assert rows[0]["rival"] == play(7, ["marginal_delay"])[0]["rival"]


def halves(factor):
    theirs = np.tile([-2.0, 1.0, 4.0, 0.1], (5, 1)) * (1 + 0.01 * np.arange(5))[:, None]
    return theirs * np.array(factor), theirs


@pytest.mark.parametrize(
    ("factor", "worse", "far"),
    [
        ([1, 1, 1, 1], 0, 0),
        ([1, 1.019, 1, 1], 0, 0),
        ([1, 1.05, 1, 1], 1, 0),
        ([1, 0.5, 1.2, 1], 1, 1),
        ([1, 0.5, 0.5, 1.1], 0, 0),
        ([1, 0.5, 0.5, 1.5], 1, 0),
    ],
)
def test_worse_is_an_interval_that_lies_wholly_beyond_two_per_cent(factor, worse, far):
    row = compared(*halves(factor))
    assert (row["worse"], row["far_worse"]) == (worse, far)


def test_an_interval_that_reaches_back_is_not_worse():
    ours, theirs = halves([1, 1, 1, 1])
    ours[0, 1] *= 2.0
    row = compared(ours, theirs)
    assert row["delta_mean_fraction"] > 0.1
    assert not row["worse"]


def test_the_law_holds_up_to_one_draw_in_twenty_and_never_beyond_ten_per_cent():
    level, worse, far = (
        compared(*halves([1, 1 + more, 1, 1])) | {"policy": "one"} for more in (0, 0.05, 0.2)
    )
    assert verdict([level] * 19 + [worse])["holds"]
    assert not verdict([level] * 18 + [worse] * 2)["holds"]
    assert not verdict([level] * 39 + [far])["holds"]
    assert verdict([level] * 19 + [worse])["worse_mean"] == 1


def test_equal_seeds_play_alike_and_a_rule_is_level_with_itself():
    policies = ["marginal_delay+boost@8:1", "marginal_delay"]
    rows = play(7, policies)
    assert rows == play(7, policies)
    assert [row["policy"] for row in rows] == policies
    # One server: there is nothing to place, and the rival has this order.
    assert rows[0]["rival"] == "sed+boost@8:1"
    assert (rows[0]["delta_mean_fraction"], rows[0]["worse"]) == (0.0, 0)


def test_too_few_streams_for_an_interval_are_refused():
    with pytest.raises(ValueError, match="at least 5"):
        play(7, ["marginal_delay"], streams=4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("generic", "no compiled code decides as 'generic'"),
        ("marginal_delay+edf", "no compiled code"),
        ("marginal_delay+sjff@3", "no compiled code"),
    ],
)
def test_what_the_law_cannot_judge_is_refused(name, reason):
    with pytest.raises(ValueError, match=reason):
        play(7, [name])


def test_a_policy_of_so_many_servers_is_refused_on_others(tmp_path):
    PolicySearch(load_scenario("bursty_serial")).artifact().save(tmp_path / "linear.npz")
    with pytest.raises(ValueError, match="decides between 3 replicas"):
        play(7, [str(tmp_path / "linear.npz")])


def test_a_policy_file_is_judged_on_servers_of_its_own_kind():
    policies = ["marginal_delay", str(SHIPPED / "azure_code_slo.npz")]
    servers, fleet = (play(draw, policies) for draw in (7, 4))
    assert [row["policy"] for row in servers] == policies[:1]
    assert [row["policy"] for row in fleet] == policies
    assert fleet[0]["mean_response_s"] != fleet[1]["mean_response_s"]

"""The best rule for some traffic, and champions beside it over a range of loads."""

import json

import numpy as np
import pytest
from scripts import call, load_script

from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.rule_replay import Replay
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSource, stream_rng
from tokenyard.routing.validation import NAMES

FLEET = "azure_code_slo"


@pytest.fixture(scope="module")
def replay():
    source = StreamSource(load_scenario(FLEET))
    streams = [source.sample(300, stream_rng(3, "training", index)) for index in range(2)]
    return Replay(source.scenario, streams, tuned=True)


def test_tuned_rules_play_with_their_own_knob_and_with_every_other(replay):
    names = set(replay.rules)
    assert set(load_tuned(FLEET).orders) < names
    assert {"tuned_marginal_delay", "tuned_marginal_delay+wspt@200"} < names
    same = replay.rows(replay.rules["marginal_delay@0:3+wspt@20"])
    tuned = replay.rows(replay.rules["tuned_marginal_delay+wspt@20"])
    assert tuned == pytest.approx(same)  # Its weights are 0 and 3 here.


def test_where_nothing_was_tuned_nothing_is_added():
    scenario = load_scenario(FLEET).model_copy(update={"name": "nobody_tuned_this"})
    assert server_model(scenario).tuned_variants() == {}


@pytest.mark.parametrize("by", NAMES)
def test_rules_are_ranked_by_what_is_asked_for(replay, by):
    found = replay.best_rules(by)
    values = [replay.rows(replay.rules[name])[:, NAMES.index(by)].mean() for name in found]
    order = np.argsort(values)[::-1] if by == "score" else np.argsort(values)
    assert [values[index] for index in order] == pytest.approx(values)


def test_the_champion_is_shown_at_every_load_beside_the_best_rules_there(tmp_path):
    path = tmp_path / "rows.json"
    loads = ("--loads", "0.5", "0.9", "--streams", "2", "--choosing", "1")
    call(load_script("benchmarks/fresh_seeds.py"), "--scenario", FLEET, *loads, "--json", path)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {row["offered_load"] for row in rows} == {0.5, 0.9}
    chosen = [by for row in rows for by in row["chosen_by"].split(" and ")]
    assert sorted(chosen) == ["mean", "mean", "score", "score"]
    assert all(row["baseline_mean_response_s"] > 0 for row in rows)

"""The best rule for some traffic, and champions beside it over a range of loads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.routing.policies.rule_name import RuleName
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.rule_replay import Replay, beyond, least_beyond
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
    values = [replay.rows(replay.decide(name))[:, NAMES.index(by)].mean() for name in found]
    order = np.argsort(values)[::-1] if by == "score" else np.argsort(values)
    assert [values[index] for index in order] == pytest.approx(values)


def test_from_the_best_rule_of_the_grid_the_search_goes_on_to_one_that_no_neighbour_beats(replay):
    best, next_best, *_ = replay.best_rules()
    score = {name: replay.rows(replay.decide(name))[:, 0].mean() for name in (best, next_best)}
    assert score[best] >= score[next_best]
    for coordinate in replay._neighbours(RuleName.parse(best)):
        for rule in coordinate:
            if str(rule) != best:
                assert replay.rows(replay.decide(str(rule)))[:, 0].mean() <= score[best]


def test_what_no_compiled_code_decides_is_refused(replay):
    with pytest.raises(ValueError, match="no compiled code"):
        replay.decide("round_robin")


def test_where_no_score_is_near_the_choice_has_the_best_score(replay):
    assert replay.choice(near=1e-9) in replay.best_rules()[:2]  # The first was refined.
    assert replay.choice() in replay.rules


def test_of_two_equal_scores_a_third_between_them_is_chosen():
    by_mean, by_p99 = [-1.99, 1.0, 10.0, 0.1], [-2.0, 1.3, 7.0, 0.1]
    means = np.array([by_mean, by_p99, [-2.01, 1.1, 8.0, 0.1]])
    assert least_beyond(means, 1e-9) == 0
    assert least_beyond(means, 0.02) == 2


measured = st.tuples(st.floats(-9, -1), st.floats(1, 9), st.floats(1, 9), st.floats(0, 1))


@settings(max_examples=scaled(200))
@given(rules=st.lists(measured, min_size=1, max_size=8), near=st.floats(0.01, 1.0))
def test_no_rule_is_chosen_that_another_one_beats(rules, near):
    means = np.array(rules)
    chosen = means[least_beyond(means, near)]
    beaten = (means[:, 1:] <= chosen[1:]).all(axis=1) & (means[:, 1:] < chosen[1:] - 1e-6).any(1)
    # Others that are far below the best score have no weight.
    assert not (beaten & (means[:, 0] >= chosen[0])).any()


@pytest.mark.parametrize(
    ("ours", "far"),
    [
        ([-9, 1.0, 4.0, 0.1], 0.0),
        ([-9, 1.1, 3.0, 0.1], 0.1),
        ([-9, 1.1, 5.0, 0.1], 0.25),
        ([-9, 0.5, 4.0, 0.4], 0.3),
    ],
)
def test_how_far_beyond_another_rule_is_told_by_the_worst_measure(ours, far):
    assert beyond(np.array(ours), np.array([-9, 1.0, 4.0, 0.1])) == pytest.approx(far)

"""The allocation paper as printed: what its reward, its updates and its measures are."""

import itertools

import numpy as np
import pytest

from tokenyard.allocation.paper.decision_quality import decision_quality, one_vs_rest_roc
from tokenyard.allocation.paper.simulator import (
    NUM_ACTIONS,
    NUM_STATES,
    LearningConfig,
    LiteralTable,
    LiteralWeights,
    decode_action,
    encode_action,
    exact_values,
    fixed_policy,
    learn,
    literal_table,
    mean_reward,
)


@pytest.mark.parametrize(
    ("reading", "bins", "of_maxima"),
    list(
        itertools.product(
            ("independent", "random", "correlated"), ("uniform", "quantile"), (False, True)
        )
    ),
)
def test_one_constant_action_is_optimal_within_a_thousandth(reading, bins, of_maxima):
    table = literal_table(reading, LiteralWeights(of_maxima=of_maxima), bins)
    optimal = mean_reward(table, exact_values(table).argmax(axis=1))
    constants = [mean_reward(table, np.full(NUM_STATES, a)) for a in range(NUM_ACTIONS)]
    assert optimal - max(constants) < 0.001


def test_no_action_matters_where_features_are_independent_of_it():
    assert np.ptp(literal_table("independent").rewards, axis=1).max() == 0


def test_the_fixed_policy_is_the_papers_rule_above_seven_tenths():
    policy = [decode_action(int(action)) for action in fixed_policy()]
    assert policy[7:] == [("hybrid", 4)] * 3
    assert policy[0] == ("data", 1)
    assert [encode_action(*decode_action(a)) for a in range(NUM_ACTIONS)] == list(range(12))


@pytest.mark.parametrize(
    ("update", "entry"), [("q_learning", (0, 3)), ("sarsa", (0, 3)), ("printed", (1, 3))]
)
def test_one_step_writes_the_entry_and_the_value_of_its_update(update, entry):
    """Two slots: state 0 earns 1 whatever is done, and state 1 follows."""
    table = LiteralTable(
        np.zeros((2, NUM_ACTIONS, 5)), np.array([0, 1]), np.ones((2, NUM_ACTIONS)), np.zeros((2, 3))
    )
    q, curve = learn(table, update, LearningConfig(alpha=0.5, epsilon=(1.0, 1.0), passes=1), 0)
    assert curve == pytest.approx([1.0])
    assert np.count_nonzero(q) == 1
    assert np.argwhere(q)[0][0] == entry[0]
    assert q.max() == pytest.approx(0.5)


def test_measures_of_a_decision_are_those_counted_by_hand():
    """State 0 is seen three times and decided right, state 1 once and wrong by 2."""
    values = np.array([[1.0, 0.0], [0.0, 2.0]])
    quality = decision_quality(np.array([0, 0]), values, np.array([0, 0, 0, 1]))
    assert quality.accuracy == 0.75
    assert quality.state_accuracy == 0.5
    assert quality.regret == pytest.approx(0.5)
    assert quality.confusion.tolist() == [[3, 0], [1, 0]]
    assert quality.precision == pytest.approx((0.75 + 0) / 2)
    assert quality.recall == pytest.approx((1 + 0) / 2)


def test_scores_that_order_actions_rightly_have_all_of_the_area():
    values = np.array([[1.0, 0.0, 0.2], [0.1, 2.0, 0.0]])
    labels, states = values.argmax(axis=1), np.array([0, 1, 1])
    assert one_vs_rest_roc(np.eye(3)[labels], labels, states)[2] == pytest.approx(1.0)
    assert one_vs_rest_roc(-np.eye(3)[labels], labels, states)[2] == pytest.approx(0.0)

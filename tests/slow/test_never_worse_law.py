"""Twenty fixed draws of the law: nothing loses there more often than is written down.

docs/results/own-traffic.md has more draws. The law allows one worse draw of twenty, and none by
more than 10 %. The rule that five streams of one's own choose keeps it.
"""

from dataclasses import replace

import pytest

from tokenyard.routing import rule_replay
from tokenyard.routing.artifact import DEFAULT_RULE
from tokenyard.routing.never_worse import TUNED, play, verdict
from tokenyard.routing.policies.order import ORDERS

pytestmark = pytest.mark.slow

DRAWS = 20
WORSE = {"marginal_delay": (6, 3), DEFAULT_RULE: (3, 3), TUNED: (2, 1), f"{TUNED}:5": (0, 0)}
"""Of these draws: worse, and worse by more than 10 %."""
WORSE_BESIDE_STRONGER = WORSE | {DEFAULT_RULE: (4, 3)}
"""The same where the rival's search goes on from the best rule of the grid."""
WORSE_WITHOUT_SET_BACK = {"marginal_delay": (6, 3), DEFAULT_RULE: (3, 2)}
"""The same of rules that set nobody back, where the rival does not either."""


@pytest.fixture
def rivals_of_the_grid(monkeypatch):
    """Rivals are the best of the grid, from which the search does not go on."""
    monkeypatch.setattr(rule_replay, "_MOST_SWEEPS", 0)


@pytest.mark.usefixtures("rivals_of_the_grid")
def test_no_policy_loses_more_often_than_is_written_down():
    check(WORSE)


def test_beside_rivals_that_go_on_from_the_grid_none_loses_more_often_either():
    check(WORSE_BESIDE_STRONGER)


@pytest.mark.usefixtures("rivals_of_the_grid")
def test_the_default_is_held_to_what_it_was_held_to_before_rivals_set_late_requests_back(
    monkeypatch,
):
    for name in ("boost", "late_last"):
        few = ORDERS[name].few if name == "boost" else ()
        monkeypatch.setitem(ORDERS, name, replace(ORDERS[name], few=few, few_set_backs=()))
    check(WORSE_WITHOUT_SET_BACK)


def check(worst):
    rows = [row for draw in range(DRAWS) for row in play(draw, list(worst))]
    for policy, (worse, far_worse) in worst.items():
        found = verdict([row for row in rows if row["policy"] == policy])
        assert found["worse"] <= worse, found
        assert found["far_worse"] <= far_worse, found

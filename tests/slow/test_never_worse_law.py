"""Twenty fixed draws of the law: nothing loses there more often than is written down.

docs/results/own-traffic.md has more draws. The law allows one worse draw of twenty, and none by
more than 10 %. The rule that five streams of one's own choose keeps it.
"""

import pytest

from tokenyard.routing import rule_replay
from tokenyard.routing.artifact import DEFAULT
from tokenyard.routing.never_worse import TUNED, play, verdict

pytestmark = pytest.mark.slow

DRAWS = 20
WORSE = {"marginal_delay": (6, 3), DEFAULT: (3, 2), TUNED: (2, 1), f"{TUNED}:5": (0, 0)}
"""Of these draws: worse, and worse by more than 10 %."""


@pytest.mark.parametrize("sweeps", [0, rule_replay._MOST_SWEEPS])
def test_no_policy_loses_more_often_than_is_written_down(sweeps, monkeypatch):
    monkeypatch.setattr(rule_replay, "_MOST_SWEEPS", sweeps)
    rows = [row for draw in range(DRAWS) for row in play(draw, list(WORSE))]
    for policy, (worse, far_worse) in WORSE.items():
        judged = verdict([row for row in rows if row["policy"] == policy])
        assert judged["worse"] <= worse, judged
        assert judged["far_worse"] <= far_worse, judged

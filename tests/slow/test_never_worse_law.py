"""Twenty fixed draws of the law: what ships breaks it no more often than is written down.

docs/results/any-cluster.md has the whole law, which does not hold yet.
"""

import pytest

from tokenyard.routing.never_worse import play, verdict

pytestmark = pytest.mark.slow

DRAWS = 20
MOST_WORSE_DRAWS = 8
"""Of these twenty; the law allows one."""


def test_the_policy_for_any_cluster_loses_no_more_often_than_is_written_down():
    rows = [row for draw in range(DRAWS) for row in play(draw, ["generic"])]
    found = verdict(rows)
    assert found.worse <= MOST_WORSE_DRAWS, found.row

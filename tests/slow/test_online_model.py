"""A few fixed fleets of unknown speeds: what is learned of them is worth what the truth is.

docs/results/own-traffic.md has more fleets, and larger ones.
"""

import numpy as np
import pytest
from slow.cold_start import compare

pytestmark = pytest.mark.slow

DRAWS = 6


def rows_of(event, minutes):
    return [row for draw in range(DRAWS) for row in compare(draw, 4, minutes, event)]


def ratio(rows, other, first, last):
    """Mean over draws of the learned rule's mean response over another's."""
    ratios = []
    for draw in range(DRAWS):
        some = [row for row in rows if row["draw"] == draw and first <= row["minute"] < last]
        sums = [sum(row[key] * row["requests"] for row in some)
                for key in ("learned_mean_s", f"{other}_mean_s")]  # fmt: skip
        ratios.append(sums[0] / sums[1])
    return np.mean(ratios)


def test_a_cold_start_is_as_good_as_being_told_and_never_worse_than_least_load():
    rows = rows_of("none", 12)
    assert ratio(rows, "told", 5, 12) < 1.05
    for minute in range(12):
        assert ratio(rows, "least_loaded", minute, minute + 1) < 1.10


@pytest.mark.parametrize("event", ["slow", "swap"])
def test_replicas_that_change_their_speeds_are_known_again_after_five_minutes(event):
    assert ratio(rows_of(event, 20), "told", 15, 20) < 1.05

"""What the page is told of the last minutes."""

import math

import numpy as np

from serve_app.gateway.history import BIN_S, History
from serve_app.policy.runner import ReplicaChoice
from tokenyard.routing.snapshot_table import SnapshotTable
from tokenyard.routing.types import Request


def test_the_last_quarter_of_an_hour_is_kept_however_seldom_something_happens():
    history = History()
    for minute in range(180):
        history.finish(60.0 * minute, 0.1, 1.0, kept=True)
    times_s = [row["time_s"] for row in history.look(60.0 * 179)]
    assert times_s == [60.0 * minute for minute in range(165, 180)]
    for second in range(2000):
        history.finish(10_740.0 + second, 0.1, 1.0, kept=True)
    assert len(history.look(12_739.0)) == 900 / BIN_S
    assert [row["time_s"] for row in history.look(12_739.0, 12_730.0)] == [12_730.0, 12_735.0]


def test_a_bin_counts_what_ended_what_failed_what_was_refused_and_what_waits():
    queued = [7]
    history = History(lambda: queued[0])
    history.finish(1.0, 0.1, 1.0, kept=True, num_tokens=10)
    queued[0] = 9
    history.finish(2.0, math.nan, math.nan, kept=False)
    history.refuse(3.0)
    (row,) = history.look(4.0)
    assert row["queued"] == 7
    counts = {key: row[key] for key in ("finished", "kept", "failed", "refused", "output_tokens")}
    assert counts == {"finished": 2, "kept": 1, "failed": 1, "refused": 1, "output_tokens": 10}


def test_a_decision_tells_its_best_candidates_and_what_the_rule_would_have_chosen():
    history, num = History(), 400
    costs = np.arange(num, dtype=float)[::-1].copy()
    snapshots = SnapshotTable.idle(num)
    for index in (num - 1, num - 3):
        choice = ReplicaChoice(
            Request(0.0, 1, 2.0), snapshots, "p@1", index, costs, 1.0, False, 12.3
        )  # fmt: skip
        history.decide(1.0, snapshots, choice)
    newest, oldest = history.decisions(30, lambda choice: num - 1)
    assert [one["replica_id"] for one in newest["candidates"]] == [
        f"idle-{i}" for i in (397, 399, 398, 396, 395)
    ]
    assert (newest["num_candidates"], newest["num_better"], newest["num_equal"]) == (num, 2, 0)
    assert (newest["by_rule"], oldest["by_rule"]) == ("idle-399", "idle-399")

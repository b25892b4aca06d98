"""The arena's cells of sessions: they ship, and a small one is played and shown."""

import json
import math

import pytest

from tokenyard.routing import arena
from tokenyard.routing.arena_page import write_page
from tokenyard.routing.sessions.arena import (
    CELLS,
    ENTRIES,
    MEAN,
    QUICK_CELLS,
    rows_of_sessions,
)
from tokenyard.routing.sessions.problem import PROBLEM
from tokenyard.routing.sessions.rules import RULES, make_rule


def test_cells_and_entries_of_sessions_ship():
    assert len(set(CELLS)) == len(CELLS) == 9
    assert set(QUICK_CELLS) < set(CELLS) < set(PROBLEM.scenario_names())
    assert {entry.name for entry in ENTRIES} == {*RULES, "held"}
    for entry in ENTRIES:
        make_rule(entry.policy)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(
        "name: small\ndescription: few\nproblem: sessions\ntraffic: agentic_trace_replay@mixed\n"
        "sessions_per_a100_hour: 60\nsessions_per_a100: 6\n"
    )
    return str(path)


def test_rules_of_sessions_are_ranked_by_completion_on_a_board_of_their_own(small, tmp_path):
    rows = rows_of_sessions(small, 2, 7, map)
    assert [row["rank"] for row in rows] == list(range(1, len(ENTRIES) + 1))
    assert [row[MEAN] for row in rows] == sorted(row[MEAN] for row in rows)
    for row in rows:
        assert {row[key] for key in ("kind", "cell", "stream_count", "sessions_per_a100_hour")} == {
            "session_rule", "small", 2, 60.0,
        }  # fmt: skip
        assert math.isnan(row["mean_response_s"])
        assert math.isnan(row["offered_load"])
        assert 0 <= row["sessions_in_slo_fraction"] <= 1
    # What it is compared with was chosen on the other stream.
    assert {row["best_rule"] for row in rows} != {""}
    first = arena.board(rows)[0]
    assert (first["kind"], first["cells"]) == ("session_rule", 1)
    page = tmp_path / "page.html"
    write_page(page, [], rows, [], ["told"])
    text = page.read_text()
    assert "Sessions: the board" in text
    assert "mean completion, s" in text
    assert "Requests: the board" not in text
    assert json.loads(json.dumps(rows))[0]["entry"] == first["entry"]

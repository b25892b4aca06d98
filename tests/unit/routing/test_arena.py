"""The arena: cells, hindsight, boards, and entries that misbehave."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tokenyard.routing import arena
from tokenyard.routing import observation as ob
from tokenyard.routing.arena import (
    Cell,
    Entry,
    Match,
    Size,
    board,
    entries_of,
    find_cells,
    hindsight_s,
    play,
    play_all,
    rows_of_cell,
)
from tokenyard.routing.arena_page import write_page
from tokenyard.routing.artifact import DEFAULT, default_rule
from tokenyard.routing.evaluation import per_stream
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator import make_simulator

TINY = Size(4, 60)


@pytest.fixture
def cell():
    return Cell("poisson_085 at 0.50", load_scenario("poisson_085"), 0.5)


def test_there_are_six_quick_cells_and_thirty_two_in_all():
    quick = find_cells(True, 1)
    usual = [one for one in find_cells(False, 1) if not one.is_recorded]
    assert (len(quick), len(usual)) == (6, 32)
    assert len({one.name for one in usual}) == 32
    assert sum("clients" in one.name for one in quick) == 1
    assert [one.is_sealed for one in usual].count(True) == 4


def test_sealed_cells_are_drawn_from_their_seed_alone():
    sealed = [
        [one.scenario.model_dump_json() for one in find_cells(False, seed) if one.is_sealed]
        for seed in (1, 1, 2)
    ]
    assert sealed[0] == sealed[1]
    assert sealed[0] != sealed[2]


def test_every_entry_of_a_cell_can_play(tmp_path):
    cell = Cell("azure_code_slo at 0.50", load_scenario("azure_code_slo"), 0.5)
    mine = tmp_path / "mine.py"
    mine.write_text("class Mine:\n    def route(self, request, snapshots):\n        return 0\n")
    entries = entries_of(cell, [str(mine)])
    assert {one.kind for one in entries} == {"rule", "learned", "file"}
    assert len({one.name for one in entries}) == len(entries)
    assert "tuned_filter_dump" in {one.name for one in entries}


def test_entries_of_one_name_are_told_apart(cell):
    files = ["a/mine.py", "b/mine.npz", "c/other.py", "sed.py", "champion.npz", "default.npz"]
    own = [*files, "http://one/v1/route"]
    entries = entries_of(cell, own)
    assert len({one.name for one in entries}) == len(entries)
    told = {one.policy: one.name for one in entries if one.policy in own}
    assert told == {**{one: one for one in own}, "c/other.py": "other"}


def test_no_tuned_rule_plays_in_a_sealed_cell():
    for sealed in (one for one in find_cells(False, 3) if one.is_sealed):
        names = {one.name for one in entries_of(sealed, [])}
        assert DEFAULT in names
        assert not {"champion", "sed_dump", "sita"} & names
        assert not any(name.startswith("tuned_") for name in names)


def test_equal_matches_are_equal(cell):
    match = Match(Entry("random", "rule", "random"), cell, TINY, 5)
    one, other = play(match), play(match)
    for key, values in one.items():
        np.testing.assert_array_equal(values, other[key])
        assert values.shape == (TINY.streams,)


@given(arrays(float, st.tuples(st.integers(1, 6), st.integers(2, 9)), elements=st.floats(0.1, 9.0)))
def test_a_rule_is_compared_where_it_was_not_chosen(times_s):
    rules = {f"rule{i}": row for i, row in enumerate(times_s)}
    best_s, names = hindsight_s(rules)
    for half, name in enumerate(names):
        other = times_s[:, 1 - half :: 2].mean(axis=1)
        assert rules[name][1 - half :: 2].mean() == other.min()
        np.testing.assert_array_equal(best_s[half::2], rules[name][half::2])


def test_regret_is_paired_and_over_the_best_rule(cell):
    fast = np.array([1.0, 2.0, 3.0, 2.0, 2.0, 2.0])
    slow = np.array([1.19, 2.21, 3.2, 2.2, 2.2, 2.2])
    found = {
        Entry(name, kind, name): {key: times for key in arena.SHOWN}
        for name, kind, times in (("a", "rule", slow), ("b", "rule", fast), ("c", "file", slow))
    }
    rows = rows_of_cell(cell.name, cell.load, found, 1)
    assert [row["entry"] for row in rows] == ["b", "a", "c"]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    assert rows[0]["regret_mean_fraction"] == 0.0
    assert rows[1]["regret_mean_fraction"] == pytest.approx(0.1)
    # Nearly the same on every stream, so there is no doubt.
    assert 0.09 < rows[1]["regret_mean_ci_low"] < 0.1 < rows[1]["regret_mean_ci_high"] < 0.11
    assert {row["best_rule"] for row in rows} == {"b"}
    assert rows[0]["regret_mean_p_holm"] == 1.0
    assert rows[1]["regret_mean_p_holm"] < 1e-3


def test_the_board_has_those_first_who_play_everywhere():
    def a_row(entry, cell, regret, rank):
        return {
            "entry": entry, "kind": "rule", "cell": cell, "regret_mean_fraction": regret,
            "regret_mean_p_holm": 0.01 if regret else 1.0, "rank": rank,
        }  # fmt: skip

    rows = [
        a_row("once", "x", -0.5, 1), a_row("both", "x", 0.0, 2), a_row("both", "y", 0.3, 1),
    ]  # fmt: skip
    first, second = board(rows)
    assert (first["entry"], first["cells"], first["mean_rank"]) == ("both", 2, 1.5)
    assert first["worst_regret_mean_fraction"] == 0.3
    assert first["worst_cell"] == "y"
    assert (first["cells_better"], first["cells_worse"]) == (0, 1)
    assert (second["cells_better"], second["cell"]) == (1, "all")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param("while True: pass", "took more than", marks=pytest.mark.slow),
        ("raise KeyError('x')", "KeyError"),
        ("return len(snapshots)", "route returned"),
        ("import os; os._exit(3)", "ended its process"),
    ],
)
def test_an_entry_that_misbehaves_loses_nothing_of_the_others(
    cell, tmp_path, monkeypatch, body, reason
):
    monkeypatch.setattr(arena, "MOST_ENTRY_S", 30.0 if "while" not in body else 5.0)
    path = tmp_path / "bad.py"
    path.write_text(f"class Bad:\n    def route(self, request, snapshots):\n        {body}\n")
    bad, good = Entry("bad", "file", str(path)), Entry("sed", "rule", "sed")
    matches = [Match(one, cell, TINY, 1) for one in (bad, good)]
    failed, played = play_all(matches, map)
    assert reason in failed
    assert played["mean_response_s"].shape == (TINY.streams,)


def test_the_page_needs_nothing_else_and_escapes_what_it_is_told(cell, tmp_path):
    entries = [Entry(name, "rule", name) for name in ("sed", "random")]
    found = {one: play(Match(one, cell, TINY, 1)) for one in entries}
    rows = rows_of_cell(cell.name, cell.load, found, 1)
    path = tmp_path / "folder" / "page.html"
    write_page(path, rows, [], ["<b>bad</b> failed"], ["told"])
    page = path.read_text()
    assert "&lt;b&gt;bad&lt;/b&gt; failed" in page
    assert "src=" not in page
    assert "http" not in page
    assert cell.name in page
    assert "Sessions: the board" not in page
    assert json.loads(json.dumps(rows))[0]["entry"] == "sed"
    assert math.isnan(rows[0]["mean_ttft_s"])


@pytest.mark.parametrize(
    "name", ["churn", "two_classes_slo", "code_generation@mixed", "poisson_085"]
)
def test_what_nobody_pays_for_is_played_alike(name):
    scenario = load_scenario(name)
    match = Match(Entry("any", "rule", "sed"), Cell(name, scenario, 0.8), TINY, 2)
    unpaid, streams = arena.streams_of(match)
    assert scenario.pays
    assert not unpaid.pays
    paid = unpaid.model_copy(update={"reward": scenario.reward})
    ordered = [one for one in PROBLEM.policies_for(scenario) if "+" in one]
    given = (default_rule(scenario), "marginal_in_order+wspt@20")
    for rule in ("sed", "marginal_delay", "tuned_marginal_delay", *ordered, *given):
        if rule.startswith("tuned_m") and scenario.fleet is None:
            continue
        run = PROBLEM.candidate(scenario, rule).run
        with_pay = per_stream(paid, run(paid, streams, 0))
        without = per_stream(unpaid, run(unpaid, streams, 0))
        assert with_pay.keys() - without.keys() == {"reward"}
        for key, values in without.items():
            np.testing.assert_array_equal(values, with_pay[key], err_msg=f"{rule}: {key}")


@pytest.mark.parametrize("name", ["churn", "stale_signals", "multi_turn_prefix"])
def test_what_is_shown_as_columns_is_what_snapshots_of_each_replica_say(name):
    cell = Cell(name, load_scenario(name), 0.8)
    scenario, streams = arena.streams_of(Match(Entry("any", "rule", "sed"), cell, TINY, 2))
    for stream in streams.requests:
        sim = make_simulator(scenario, 1, len(stream))
        sim.load(0, stream)
        step = 0
        while sim.undecided():
            shown, made = sim.view().snapshots(), list(sim.view().snapshots())
            assert [one.replica_id for one in made] == [
                scenario.server_names[i] for i in sim.view().offered()
            ]
            columns, theirs = ob.snapshot_columns(shown), ob.snapshot_columns(made)
            np.testing.assert_array_equal(columns, theirs)
            np.testing.assert_array_equal(shown.observed_at_s, [one.observed_at_s for one in made])
            step += 1
            sim.step(np.array([sim.view().offered()[step % len(shown)]]))

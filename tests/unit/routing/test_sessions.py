"""Session rules and scenarios by name, and the rows that a command prints."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from pipelines import evaluate
from tokenyard.problem import find_problem
from tokenyard.routing.sessions import rules as ru
from tokenyard.routing.sessions.evaluation import MEASURES
from tokenyard.routing.sessions.problem import PROBLEM
from tokenyard.routing.sessions.scenario import idle_s, load_session_scenario
from tokenyard.routing.simulator.sessions import SessionReplicas, SessionStream, run_sessions
from tokenyard.routing.simulator.sessions_kernel import layout as lay

FROZEN = (
    "sessions_offered", "sessions_in_slo_fraction", "mean_completion_s", "p99_completion_s",
    "mean_ttft_s", "p99_ttft_s", "longest_hold_s", "sessions_per_gpu_hour",
)  # fmt: skip


def test_a_rule_is_a_name_and_numbers():
    rule = ru.make_rule("index:hold_s=120:full_at=0.8")
    assert (rule.hold_s, rule.full_at, rule.lease_s) == (120.0, 0.8, 20.0)
    assert len(rule.vector) == ru.NUM_RULE == len(fields(ru.SessionRule))
    places = [
        getattr(ru, one.name.upper()) for one in fields(ru.SessionRule) if one.name != "order"
    ]
    assert places == list(range(1, ru.NUM_RULE))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("indx", "unknown session rule 'indx'"),
        ("index:hold=3", "unknown number 'hold'"),
        ("index:hold_s=long", "no number"),
        ("index:hold_s=nan", "no number"),
        ("index:hold_s", "no number"),
        ("index:hold_s=-1", "must not be negative"),
    ],
)
def test_a_wrong_rule_is_refused_in_a_sentence(name, words):
    with pytest.raises(ValueError, match=words):
        PROBLEM.candidate(load_session_scenario("agentic_sessions_mixed"), name)


def test_a_scenario_takes_another_rate():
    assert load_session_scenario("agentic_sessions_mixed@30").sessions_per_a100_hour == 30.0
    assert find_problem("agentic_sessions_mixed@30", None) is PROBLEM
    assert find_problem("agentic_trace_replay@mixed", None) is not PROBLEM
    for wrong in ("agentic_sessions_mixed@fast", "agentic_sessions_mixed@-1", "agentic_sesions"):
        with pytest.raises(ValueError, match="session scenario"):
            load_session_scenario(wrong)


def test_all_scenarios_of_the_suite_ship():
    assert set(PROBLEM.suites["sessions"]) == set(PROBLEM.scenario_names())
    for name in PROBLEM.scenario_names():
        assert load_session_scenario(name).name == name


def tiny(**changes):
    values = {
        "iteration": np.array([[5e-3, 1e-4, 1e-4, 1e-7]]), "kv_tokens": np.array([10_000.0]),
        "max_batch": np.array([8.0]), "token_budget": np.array([512.0]),
        "host_tokens": np.zeros(1), "host_token_s": np.zeros(1),
    }  # fmt: skip
    return SessionReplicas(**(values | changes))


def stream_of(context, answer, kept=None):
    num = len(context)
    said = np.append(0.0, np.add(context, answer)[:-1])
    return SessionStream(
        np.array([1.0]), np.array([0]), np.array(context), np.array(answer), np.full(num, 2.0),
        np.ones(num), said if kept is None else np.array(kept),
    )  # fmt: skip


def test_one_session_alone_takes_its_idle_time():
    stream = stream_of([1000.0, 1600.0, 3000.0], [100.0, 50.0, 200.0])
    run = run_sessions(tiny(), stream, ru.make_rule("index"))
    np.testing.assert_allclose(run.completion_s, idle_s(tiny(), stream), rtol=0.02)
    assert run.hold_s.max() == 0.0


def test_what_cannot_be_played_is_refused():
    with pytest.raises(ValueError, match="must fit"):
        run_sessions(tiny(), stream_of([9900.0], [100.0]), ru.make_rule("index"))
    with pytest.raises(ValueError, match="longer than what it keeps"):
        run_sessions(tiny(), stream_of([500.0, 550.0], [100.0, 10.0]), ru.make_rule("index"))
    too_much = stream_of([500.0, 700.0], [100.0, 10.0], [0.0, 601.0])
    with pytest.raises(ValueError, match="more than was said"):
        run_sessions(tiny(), too_much, ru.make_rule("index"))


def test_only_what_a_prompt_keeps_is_not_computed_again():
    stream = stream_of([1000.0, 1100.0, 600.0], [100.0, 50.0, 10.0], [0.0, 768.0, 300.0])
    run = run_sessions(tiny(), stream, ru.make_rule("index"))
    np.testing.assert_array_equal(run.outcomes[:, lay.OUT_HIT], [0.0, 768.0, 256.0])
    np.testing.assert_array_equal(run.outcomes[:, lay.OUT_PREFILLED], [1000.0, 332.0, 344.0])


def test_streams_differ_by_purpose_and_not_by_call():
    scenario = load_session_scenario("chat_sessions_equal").model_copy(
        update={"sessions_per_a100": 5}
    )
    one = PROBLEM.streams(scenario, "evaluation", 1, 3).streams[0]
    again = PROBLEM.streams(scenario, "evaluation", 1, 3).streams[0]
    other = PROBLEM.streams(scenario, "validation", 1, 3).streams[0]
    np.testing.assert_array_equal(one.context, again.context)
    assert not np.array_equal(one.arrival_s, other.arrival_s)


def test_evaluate_writes_the_frozen_keys(tmp_path):
    found = tmp_path / "small.yaml"
    found.write_text(
        "name: small\ndescription: few\nproblem: sessions\ntraffic: agentic_trace_replay@mixed\n"
        "sessions_per_a100_hour: 60\nsessions_per_a100: 8\n"
    )
    out = tmp_path / "rows.json"
    args = evaluate.Args(
        scenario=str(found), streams=2, policies="index,thunderagent", baseline="fill_las", json=out
    )
    evaluate.main(args)
    rows = json.loads(out.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["index", "thunderagent", "fill_las"]
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text(encoding="utf-8")
    assert all(f"`{measure.key}`" in page for measure in MEASURES)
    assert all(f"`{measure.delta}`" in page for measure in MEASURES if measure.delta)
    for row in rows:
        assert set(FROZEN) <= set(row)
        assert {"delta_in_slo_fraction", "delta_in_slo_ci_low", "delta_ttft_fraction"} <= set(row)

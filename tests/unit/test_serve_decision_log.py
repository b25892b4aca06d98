"""The decision log: what a line holds, and that logging never stops the routing."""

import json
import math
import threading

import numpy as np
import pytest
from unit.serve_builders import a_body, a_trained_policy, call

from serve_app.http import jsonl_log as decision_log
from serve_app.http.decide import RoutingService, create_api
from serve_app.http.jsonl_log import DecisionLog, DecisionRecord
from serve_app.policy.decider import Decider
from tokenyard.types import ReplicaSnapshot, Request


def a_record(decision_id="1"):
    snapshot = ReplicaSnapshot("a", 5000.0, 1, 5, 0, 0, 0.0, math.nan, 1.5, 7.0)
    return DecisionRecord(
        decision_id=decision_id,
        time_s=7.0,
        policy="sed@1",
        request=Request(7.0, 10, 20.0),
        snapshots=[snapshot],
        scores=(0.5,),
        index=0,
        propensity=0.99,
        explored=False,
        fallback=False,
        decision_us=40.0,
    )


def test_a_line_holds_the_request_the_candidates_the_choice_and_its_propensity():
    line = a_record().to_line()
    assert line.endswith("\n")
    fields = json.loads(line)
    assert fields["request"] == {
        "arrival_s": 7.0,
        "context_tokens": 10,
        "predicted_total_tokens": 20.0,
    }
    assert fields["snapshots"][0]["predicted_wait_s"] is None
    assert fields["snapshots"][0]["mean_response_s"] == 1.5
    assert (fields["replica_id"], fields["scores"], fields["propensity"]) == ("a", [0.5], 0.99)


def test_every_answer_has_its_line_once_the_server_has_stopped(tmp_path):
    log = DecisionLog(tmp_path / "decisions.jsonl")
    service = RoutingService(Decider(a_trained_policy(), np.random.default_rng(0)), log)
    api = create_api(service)
    answers = [call(api, "POST", "/v1/route", a_body())[1] for _ in range(20)]
    service.close()
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert [line["decision_id"] for line in lines] == [a["decision_id"] for a in answers]
    assert [line["scores"] for line in lines] == [a["scores"] for a in answers]
    assert {line["policy"] for line in lines} == {f"test@{answers[0]['policy']['version']}"}


def test_the_log_is_appended_to(tmp_path):
    for decision_id in ("1", "2"):
        log = DecisionLog(tmp_path / "log")
        log.write(a_record(decision_id))
        log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert [json.loads(line)["decision_id"] for line in lines] == ["1", "2"]


def test_a_log_that_cannot_be_opened_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match=r"cannot write the decision log .*No such file"):
        DecisionLog(tmp_path / "missing" / "log")


def test_lines_that_cannot_be_written_are_counted_and_do_not_stop_the_log(caplog):
    log = DecisionLog(decision_log.Path("/dev/full"))
    for _ in range(3):
        log.write(a_record())
    log.close()
    assert log.num_lost == 3
    assert "loses lines" in caplog.text


def test_a_writer_that_falls_behind_loses_lines_instead_of_waiting(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(decision_log, "_MAX_QUEUED", 5)
    monkeypatch.setattr(DecisionRecord, "to_line", lambda _: gate.wait(10) and "line\n")
    log = DecisionLog(tmp_path / "log")
    for _ in range(20):
        log.write(a_record())
    assert log.num_lost >= 14
    gate.set()
    log.close()
    assert len((tmp_path / "log").read_text().splitlines()) == 20 - log.num_lost

"""The decision log: what is in a row, and that logging never stops the routing."""

import math
import threading

import pyarrow.parquet as pq
import pytest

from serve_app.gateway import decision_log
from serve_app.gateway.decision_log import DecisionLog, DecisionRecord
from tokenyard.routing.types import ReplicaSnapshot, Request


def a_record(decision_id="1"):
    snapshot = ReplicaSnapshot("a", 5000.0, 1, 5, 0, 0, 0.0, math.nan, 1.5, 7.0)
    return DecisionRecord(
        decision_id=decision_id, request_id="r", attempt=0, time_s=7.0, policy="sed@1",
        service_class="default", request=Request(7.0, 10, 20.0), snapshots=(snapshot,),
        pools=("p",), scores=(0.5,), index=0, propensity=0.99, explored=False,
        fallback_reason=None, decision_us=40.0, outcome="stop", output_tokens=9, ttft_s=0.1,
        response_s=0.5,
    )  # fmt: skip


def rows_in(folder):
    return [
        row for one in sorted(folder.glob("*.parquet")) for row in pq.read_table(one).to_pylist()
    ]


def test_a_row_holds_the_request_the_candidates_the_choice_and_its_propensity(tmp_path):
    log = DecisionLog(tmp_path)
    log.write(a_record())
    log.close()
    (row,) = rows_in(tmp_path)
    assert (row["arrival_s"], row["context_tokens"], row["predicted_total_tokens"]) == (7, 10, 20)
    (candidate,) = row["candidates"]
    assert candidate["predicted_wait_s"] is None
    assert (candidate["mean_response_s"], candidate["score"], candidate["pool"]) == (1.5, 0.5, "p")
    assert (row["replica_id"], row["propensity"], row["outcome"]) == ("a", 0.99, "stop")


def test_rows_that_cannot_be_written_are_counted_and_do_not_stop_the_log(tmp_path, caplog):
    log = DecisionLog(tmp_path / "log")
    (tmp_path / "log").rmdir()
    for _ in range(3):
        log.write(a_record())
    log.close()
    assert log.num_lost == 3
    assert "loses rows" in caplog.text


def test_a_writer_that_falls_behind_loses_rows_instead_of_waiting(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(decision_log, "_MAX_QUEUED", 5)
    monkeypatch.setattr(DecisionRecord, "to_row", lambda _: gate.wait(10) and {"a": 1})
    log = DecisionLog(tmp_path)
    for _ in range(20):
        log.write(a_record())
    assert log.num_lost >= 14
    gate.set()
    log.close()
    assert len(rows_in(tmp_path)) == 20 - log.num_lost


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write the decision log"):
        DecisionLog(tmp_path / "file" / "log")

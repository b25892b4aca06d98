"""The decision log: what is in a row, and that logging never stops the routing."""

import math
import threading
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from serve_app.gateway import decision_log, decision_rows
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.decision_record import DecisionRecord
from serve_app.policy.runner import ReplicaChoice
from tokenyard.routing.snapshot_table import (
    LIVE_MATCH_TOKENS,
    LIVE_NUM_RUNNING,
    LIVE_NUM_WAITING,
    LIVE_OBSERVED_AT_S,
    LIVE_OUTPUT_TOKENS,
    LIVE_PREFILL_TOKENS,
    LIVE_RESPONSE_S,
    NUM_LIVE,
    Candidates,
    SnapshotTable,
)
from tokenyard.routing.types import OrderKey, ReplicaSnapshot, Request


def a_record(decision_id="1", **of_choice):
    snapshot = ReplicaSnapshot("a", 5000.0, 1, 5, 0, 0, 0.0, math.nan, 1.5, 7.0)
    choice = ReplicaChoice(
        request=Request(7.0, 10, 20.0), snapshots=(snapshot,), policy="sed@1", index=0,
        scores=np.array([0.5]), propensity=0.99, explored=False, decision_us=40.0,
    )  # fmt: skip
    return DecisionRecord(
        decision_id=decision_id, request_id="r", attempt=0, time_s=7.0, service_class="default",
        choice=replace(choice, **of_choice), pools=("p",), outcome="stop", output_tokens=9,
        ttft_s=0.1, response_s=0.5,
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


def test_a_row_holds_the_key_that_a_request_waits_by_and_null_for_what_is_infinite(tmp_path):
    keys = [None, OrderKey(7.5), OrderKey(7.5, 9.0), OrderKey(7.5, 9.0, 20.0)]
    log = DecisionLog(tmp_path)
    for number, key in enumerate(keys):
        log.write(replace(a_record(str(number)), order_key=key))
    log.close()
    names = ("order_key_s", "late_at_s", "late_key_s")
    assert [tuple(row[name] for name in names) for row in rows_in(tmp_path)] == [
        (None, None, None), (7.5, None, None), (7.5, 9.0, None), (7.5, 9.0, 20.0),
    ]  # fmt: skip


def test_rows_that_cannot_be_written_are_counted_and_do_not_stop_the_log(tmp_path, caplog):
    log = DecisionLog(tmp_path / "log")
    (tmp_path / "log").rmdir()
    for _ in range(3):
        log.write(a_record())
    log.close()
    assert log.num_lost == 3
    assert "loses rows" in caplog.text


def test_a_row_that_cannot_be_laid_out_is_left_out_alone(tmp_path, caplog):
    log = DecisionLog(tmp_path)
    for number, index in enumerate((0, 7, 0)):
        log.write(a_record(str(number), index=index))  # There is no eighth candidate.
    log.write(a_record("3"))
    log.close()
    assert [row["decision_id"] for row in rows_in(tmp_path)] == ["0", "2", "3"]
    assert log.num_lost == 1
    assert "IndexError" in caplog.text


def test_closing_does_not_wait_for_ever(tmp_path, monkeypatch, caplog):
    gate = threading.Event()
    monkeypatch.setattr(decision_log, "_CLOSE_S", 0.05)
    empty = decision_rows.SCHEMA.empty_table()
    monkeypatch.setattr(decision_rows, "lay_out", lambda _: gate.wait(10) and empty)
    log = DecisionLog(tmp_path, flush_s=0.01)
    log.write(a_record())
    log.close()
    gate.set()
    assert "not written" in caplog.text


def a_table(num):
    fixed = np.tile([5000.0, 4.0, 0.01, 1e-4, 1e-4, 1e-7, 512.0, 1e5], (num, 1))
    live = np.zeros((num, NUM_LIVE))
    live[:, [LIVE_PREFILL_TOKENS, LIVE_OUTPUT_TOKENS, LIVE_OBSERVED_AT_S]] = 100.0, 50.0, 7.0
    live[:, [LIVE_NUM_WAITING, LIVE_NUM_RUNNING, LIVE_MATCH_TOKENS]] = np.arange(num)[:, None] + [
        1,
        4,
        16,
    ]
    live[:, LIVE_RESPONSE_S] = np.where(np.arange(num) % 2, np.nan, 1.5)
    names = tuple(f"r{number}" for number in range(num))
    return SnapshotTable(Candidates(names, ("p",) * num, fixed), live)


def test_columns_make_the_same_rows_as_objects(tmp_path):
    told = [a_table(3), a_table(1), a_table(5)]
    for folder, make in (("columns", lambda table: table), ("objects", tuple)):
        log = DecisionLog(tmp_path / folder)
        for table in told:
            num = len(table)
            scores = None if num == 1 else np.arange(num) / 7.0
            record = a_record(str(num), snapshots=make(table), index=num - 1, scores=scores)
            log.write(replace(record, pools=("p",) * num))
        log.close()
    rows = rows_in(tmp_path / "columns")
    assert rows == rows_in(tmp_path / "objects")
    assert [len(row["candidates"]) for row in rows] == [3, 1, 5]
    assert [row["replica_id"] for row in rows] == ["r2", "r0", "r4"]
    candidate = rows[0]["candidates"][1]
    assert candidate["tokens_in_flight"] == 150.0
    assert (candidate["num_waiting"], candidate["mean_response_s"]) == (2, None)
    assert candidate["predicted_wait_s"] is None
    assert rows[1]["candidates"][0]["score"] is None
    assert {row["format_version"] for row in rows} == {6}


def test_many_rows_make_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(decision_log, "_ROWS_PER_FILE", 4)
    log = DecisionLog(tmp_path, flush_s=60.0)
    for number in range(10):
        log.write(a_record(str(number)))
    log.close()
    assert [row["decision_id"] for row in rows_in(tmp_path)] == [str(one) for one in range(10)]
    assert len(list(tmp_path.glob("*.parquet"))) >= 3


def test_a_writer_that_falls_behind_loses_rows_instead_of_waiting(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(decision_log, "_MAX_QUEUED", 5)
    lay_out = decision_rows.lay_out
    monkeypatch.setattr(decision_rows, "lay_out", lambda _: gate.wait(10) and lay_out(_))
    log = DecisionLog(tmp_path, flush_s=0.01)
    for _ in range(20):
        log.write(a_record())
    assert log.num_lost >= 10
    gate.set()
    log.close()
    assert len(rows_in(tmp_path)) == 20 - log.num_lost


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write the decision log"):
        DecisionLog(tmp_path / "file" / "log")


def test_a_file_that_fails_in_its_own_way_does_not_end_the_thread(tmp_path, monkeypatch):
    log, write = DecisionLog(tmp_path, flush_s=0.01), DecisionLog._write_file
    failed = threading.Event()

    def fail_once(self, records):
        monkeypatch.setattr(DecisionLog, "_write_file", write)
        failed.set()
        raise MemoryError

    monkeypatch.setattr(DecisionLog, "_write_file", fail_once)
    log.write(a_record("lost"))
    assert failed.wait(30)
    log.write(a_record("kept"))
    log.close()
    assert [row["decision_id"] for row in rows_in(tmp_path)] == ["kept"]
    assert log.num_lost == 1


def test_logs_that_begin_in_one_second_do_not_write_over_each_other(tmp_path):
    for name in ("a", "b", "c"):
        log = DecisionLog(tmp_path)
        log.write(a_record(name))
        log.close()
    assert {row["decision_id"] for row in rows_in(tmp_path)} == {"a", "b", "c"}

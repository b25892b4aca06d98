from __future__ import annotations

import numpy as np
import pytest

from tokenyard.allocation.telemetry import (
    TELEMETRY_FILE,
    SlotRecord,
    append_record,
    read_telemetry,
)


def write(folder, demand):
    for slot, value in demand.items():
        append_record(folder / TELEMETRY_FILE, a_record(slot, value))


def a_record(slot, demand_per_s):
    return SlotRecord(
        slot=slot, time_s=300.0 * slot, demand_per_s=demand_per_s, waiting=0, gpus_held=1,
        plan="data on 1 GPUs", proposed="data on 2 GPUs",
    )  # fmt: skip


def test_what_was_written_is_read_with_its_time_of_day(tmp_path):
    write(tmp_path, {700: 1.0, 701: 2.0, 702: 4.0})
    stream, digest = read_telemetry(tmp_path, 288)
    assert stream.per_s.tolist() == [1.0, 2.0, 4.0]
    assert (stream.start_slot, stream.first) == (700 % 288, 0)
    assert read_telemetry(tmp_path / TELEMETRY_FILE, 288)[1] == digest


def test_a_gap_is_filled_and_after_a_long_one_the_log_begins_anew(tmp_path):
    write(tmp_path, {1: 9.0, 500: 1.0, 503: 2.0, 502: 5.0})
    assert read_telemetry(tmp_path, 288)[0].per_s.tolist() == [1.0, 1.0, 5.0, 2.0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [("{", "line 2"), ('{"slot": -1}', "line 2: .*slot"), ("[]", "line 2")],
)
def test_a_broken_line_is_named(tmp_path, line, reason):
    write(tmp_path, {1: 1.0})
    with (tmp_path / TELEMETRY_FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=reason):
        read_telemetry(tmp_path, 288)


def test_no_file_and_an_empty_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_telemetry(tmp_path, 288)
    (tmp_path / TELEMETRY_FILE).touch()
    with pytest.raises(ValueError, match="holds no slot"):
        read_telemetry(tmp_path, 288)


def test_infinite_demand_is_refused():
    with pytest.raises(ValueError, match="finite"):
        a_record(1, np.inf)

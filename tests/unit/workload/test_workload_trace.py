"""A trace is a value that can be cut and stretched."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from tokenyard.workload.trace import Trace

STARTED_AT = datetime(2023, 11, 16, 18, 17, tzinfo=UTC)


def a_trace(*arrival_s, **changes):
    n = len(arrival_s)
    fields = {
        "arrival_s": np.array(arrival_s, float),
        "context_tokens": np.arange(10, 10 + n),
        "generated_tokens": np.arange(n),
    }
    return Trace(**(fields | changes))


def test_a_window_starts_its_clock_at_the_window_and_not_at_the_first_request():
    trace = a_trace(0, 1, 2.5, 4, 9, started_at=STARTED_AT)

    window = trace.window(2, 9)

    assert window.arrival_s.tolist() == [0.5, 2]
    assert window.context_tokens.tolist() == [12, 13]
    assert window.started_at == STARTED_AT + timedelta(seconds=2)


def test_the_split_by_index_shares_no_request_and_starts_the_second_part_at_zero():
    train, test = a_trace(0, 1, 4, 6, started_at=STARTED_AT).split(2)

    assert train.context_tokens.tolist() == [10, 11]
    assert test.context_tokens.tolist() == [12, 13]
    assert test.arrival_s.tolist() == [0, 2]
    assert test.started_at == STARTED_AT + timedelta(seconds=4)


def test_prefix_hashes_follow_their_requests():
    trace = a_trace(0, 1, 2, prefix_hashes=((1,), (1, 2), (3,)), prefix_block_tokens=512)

    assert trace.tail_from(1).prefix_hashes == ((1, 2), (3,))
    assert trace.window(0.5, 1.5).prefix_hashes == ((1, 2),)


def test_a_trace_without_duration_has_no_rate():
    assert np.isnan(a_trace().mean_rate_per_s)
    assert np.isnan(a_trace().duration_s)
    assert np.isnan(a_trace(0).mean_rate_per_s)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arrival_s": np.array([0.0, 2.0, 1.0])}, "request 2 arrives before request 1"),
        ({"arrival_s": np.array([-1.0, 0.0, 1.0])}, "before second 0"),
        ({"arrival_s": np.array([0.0, 1.0, np.nan])}, "finite"),
        ({"context_tokens": np.array([1, 2])}, "equally long"),
        ({"context_tokens": np.array([1.0, 2.0, 3.0])}, "int64"),
        ({"generated_tokens": np.array([1, -2, 3])}, "negative"),
        ({"started_at": datetime(2023, 11, 16)}, "time zone"),
        ({"prefix_hashes": ((1,),), "prefix_block_tokens": 512}, "one per request"),
    ],
)
def test_what_cannot_be_a_trace_is_refused_with_the_reason(changes, reason):
    with pytest.raises(ValueError, match=reason):
        a_trace(0, 1, 2, **changes)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda trace: trace.window(3, 3),
        lambda trace: trace.head(4),
        lambda trace: trace.tail_from(-1),
        lambda trace: trace.windows(4),
        lambda trace: trace.windows(0),
        lambda trace: trace.rescaled(0),
        lambda trace: trace.with_rate(-1),
    ],
)
def test_cuts_and_rescalings_that_make_no_sense_are_refused(misuse):
    with pytest.raises(ValueError, match=r"\d"):
        misuse(a_trace(0, 1, 2))

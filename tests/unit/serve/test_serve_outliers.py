"""Replicas that fail: how long they are left out, and how they come back."""

import math

from serve_app.cluster import OutlierEjection
from serve_app.gateway.outliers import OutlierDetector
from serve_app.policy.ties import least_recently_used
from tokenyard.routing.types import ReplicaSnapshot


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def a_detector(**fields):
    clock = Clock()
    return OutlierDetector(OutlierEjection(**{"consecutive_failures": 1, **fields}), clock), clock


def test_every_failure_doubles_the_time_for_which_a_replica_is_left_out():
    detector, clock = a_detector(base_s=1.0, max_s=60.0)
    times_s = []
    for _ in range(8):
        assert detector.fail("a", clock())
        times_s.append(detector.ejected_s("a"))
        assert not detector.admits("a", 0)
        clock.now_s += times_s[-1]
    assert times_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert detector.admits("b", 1000)


def test_requests_that_were_under_way_when_it_was_ejected_say_nothing_new():
    detector, clock = a_detector()
    sent_s = clock()
    clock.now_s += 2.0
    assert detector.fail("a", sent_s)
    clock.now_s += 1.5
    assert not detector.fail("a", sent_s + 1.0)
    detector.begin("a", sent_s + 1.0)
    assert detector.admits("a", 0)
    assert not detector.admits("a", 1)


def test_a_replica_is_readmitted_with_twice_as_many_requests_for_every_answer_that_begins():
    detector, clock = a_detector(readmit_after=3)
    detector.fail("a", clock())
    clock.now_s += 1.0
    most = []
    for _ in range(3):
        most.append(max(n for n in range(64) if detector.admits("a", n)) + 1)
        detector.begin("a", clock())
    assert most == [1, 2, 4]
    assert detector.admits("a", 1000)


def test_time_without_a_failure_forgives_one_ejection_after_another():
    detector, clock = a_detector(base_s=1.0, max_s=10.0, readmit_after=1)
    for _ in range(3):
        detector.fail("a", clock())
        clock.now_s += detector.ejected_s("a")
    detector.begin("a", clock())
    clock.now_s += 20.0
    detector.fail("a", clock())
    assert detector.ejected_s("a") == 2.0
    clock.now_s += 100.0
    detector.begin("a", clock())
    detector.fail("a", clock())
    assert detector.ejected_s("a") == 1.0


def test_replicas_that_are_gone_are_forgotten_once_they_would_be_readmitted():
    detector, clock = a_detector()
    detector.fail("a", clock())
    detector.keep(["b"])
    assert not detector.admits("a", 0)
    clock.now_s += detector.ejected_s("a")
    assert not detector.admits("a", 1)
    detector.keep(["b"])
    assert detector.admits("a", 1)
    assert not detector.records


def idle(name, **fields):
    return ReplicaSnapshot(
        **{
            "replica_id": name, "tokens_per_s": 10.0, "num_slots": 4, "max_concurrency": 4,
            "num_waiting": 0, "num_running": 0, "tokens_in_flight": 0.0, **fields,
        }
    )  # fmt: skip


def test_only_replicas_that_are_as_idle_as_fast_and_as_quick_lately_take_turns():
    last_s = [9.0, 8.0, 7.0, 6.0, 5.0, -math.inf]
    snapshots = [
        idle("chosen", mean_response_s=1.0),
        idle("equal", mean_response_s=1.5),
        idle("busy", num_running=1, tokens_in_flight=5.0),
        idle("faster", tokens_per_s=20.0),
        idle("slow lately", mean_response_s=9.0),
        idle("larger", num_slots=8),
    ]
    assert least_recently_used(snapshots, 0, last_s) == 1
    assert least_recently_used(snapshots, 2, last_s) == 2
    never = [idle(name) for name in "abc"]
    assert least_recently_used(never, 2, [-math.inf] * 3) == 2

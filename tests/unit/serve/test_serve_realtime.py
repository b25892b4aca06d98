import os
import threading

import pytest

from serve_app.gateway.realtime import RealtimePriority

if not hasattr(os, "sched_getscheduler"):
    pytest.skip("another system's schedulers", allow_module_level=True)


def scheduler():
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def test_a_block_goes_before_others_and_its_threads_do_not():
    realtime, seen = RealtimePriority(), []
    if not realtime.allowed:
        pytest.skip("no CAP_SYS_NICE")
    with realtime.section():
        seen.append(scheduler())
        thread = threading.Thread(target=lambda: seen.append(scheduler()))
        thread.start()
        thread.join()
    assert [*seen, scheduler()] == [os.SCHED_RR, os.SCHED_OTHER, os.SCHED_OTHER]


def fail(realtime):
    with realtime.section():
        raise KeyError


def test_a_block_that_fails_ends_as_well():
    realtime = RealtimePriority()
    with pytest.raises(KeyError):
        fail(realtime)
    assert scheduler() == os.SCHED_OTHER


def test_without_the_right_to_it_a_block_runs_as_usual(monkeypatch):
    def refuse(*args):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    realtime = RealtimePriority()
    assert not realtime.allowed
    with realtime.section():
        assert scheduler() == os.SCHED_OTHER


def test_a_block_within_another_asks_the_system_for_nothing(monkeypatch):
    realtime, asked = RealtimePriority(), []
    if not realtime.allowed:
        pytest.skip("no CAP_SYS_NICE")
    change = os.sched_setscheduler
    monkeypatch.setattr(
        os, "sched_setscheduler", lambda *args: (asked.append(args[1]), change(*args))
    )
    with realtime.section():
        with realtime.section():
            pass
        assert scheduler() == os.SCHED_RR
    assert (scheduler(), len(asked)) == (os.SCHED_OTHER, 2)

"""Whatever is wrong with a policy, the request is placed by the baseline in the same pick."""

import gc
import math
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from unit.serve_builders import a_faulty_policy, linear_artifact, marginal_artifact

from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy import manager as manager_module
from serve_app.policy.manager import PolicyManager
from serve_app.policy.timeouts import InlineTimeout, ThreadTimeout, TooSlow
from tokenyard.routing.types import Decision, EngineSnapshot, ReplicaSnapshot, Request

ENGINE = EngineSnapshot(0.01, 1e-4, 1e-4, 1e-6, 512, 1e5, 0.0, 0.0, 0.0, 0)
BUSY = EngineSnapshot(0.01, 1e-4, 1e-4, 1e-6, 512, 1e5, 0.5, 9000.0, 900.0, 0)
SNAPSHOTS = [
    ReplicaSnapshot("busy", 100.0, 8, 8, 3, 8, 9900.0, engine=BUSY),
    ReplicaSnapshot("idle", 100.0, 8, 8, 0, 0, 0.0, engine=ENGINE),
]
REQUEST = Request(0.0, 100, 150.0)
BUSY_INDEX, IDLE_INDEX = 0, 1
SETTINGS = CircuitBreakerSettings(budget_s=0.04, failures_to_open=2, cool_down_s=10.0)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def manager(clock):
    made = PolicyManager(
        "conversation_mixed_gpus", "marginal_delay", SETTINGS, np.random.default_rng(0),
        clock_s=clock,
    )  # fmt: skip
    yield made
    made.stop()


def serve(manager, monkeypatch, act):
    """Let a policy decide that does `act`, which is let through the warm-up."""
    monkeypatch.setattr(manager_module, "resolve_policy", lambda *_: a_faulty_policy(act))
    monkeypatch.setattr(manager_module, "warm_up", lambda _: None)
    manager.switch("faulty")


def pick(manager, snapshots=SNAPSHOTS, stale=False):
    return manager.picker.pick(REQUEST, snapshots, stale)


def crash():
    raise RuntimeError("broken")


class NotFinite:
    def route(self, request, snapshots):
        return self.decide(request, snapshots).replica

    def decide(self, request, snapshots):
        return Decision(BUSY_INDEX, (math.nan, 1.0))


def test_a_policy_that_works_decides(manager, monkeypatch):
    serve(manager, monkeypatch, lambda: BUSY_INDEX)
    choice = pick(manager)
    assert (choice.index, choice.fallback_reason) == (BUSY_INDEX, None)


@pytest.mark.parametrize(
    "act", [crash, lambda: 7, lambda: -1, lambda: "idle"], ids=["crash", "7", "-1", "text"]
)
def test_a_policy_that_crashes_or_chooses_nothing_is_replaced_in_the_same_pick(
    manager, monkeypatch, act
):
    serve(manager, monkeypatch, act)
    choice = pick(manager)
    assert (choice.index, choice.fallback_reason) == (IDLE_INDEX, "error")
    assert manager.picker.counts.fallbacks == {"error": 1}


def test_costs_that_are_not_finite_are_a_failure(manager, monkeypatch):
    loaded = replace(a_faulty_policy(crash), make=lambda rng: NotFinite())
    monkeypatch.setattr(manager_module, "resolve_policy", lambda *_: loaded)
    monkeypatch.setattr(manager_module, "warm_up", lambda _: None)
    manager.switch("faulty")
    assert pick(manager).fallback_reason == "error"


def test_a_policy_that_fails_again_and_again_opens_its_breaker_and_is_then_asked_again(
    manager, monkeypatch, clock
):
    asked = []
    serve(manager, monkeypatch, lambda: asked.append(1) or crash())
    reasons = [pick(manager).fallback_reason for _ in range(4)]
    assert reasons == ["error", "error", "breaker_open", "breaker_open"]
    assert (len(asked), manager.policy.breaker.state) == (2, "open")
    clock.now_s = 11.0
    assert pick(manager).fallback_reason == "error"
    assert len(asked) == 3


HANG_S = 30.0


def a_hang(ended, sleep=None):
    try:
        if sleep is not None:
            sleep()
        until_s = time.monotonic() + HANG_S
        while time.monotonic() < until_s:
            pass
    finally:
        ended.set()
    return BUSY_INDEX


def test_a_policy_that_computes_for_ever_is_cut_off_and_opens_its_breaker(manager, monkeypatch):
    serve(manager, monkeypatch, partial(a_hang, threading.Event()))
    started_s = time.monotonic()
    choice = pick(manager)
    assert (choice.index, choice.fallback_reason) == (IDLE_INDEX, "too_slow")
    assert time.monotonic() - started_s < HANG_S / 2
    assert pick(manager).fallback_reason == "breaker_open"


def test_a_policy_that_was_too_slow_is_half_open_in_a_thread_and_cut_off_even_asleep(
    manager, monkeypatch, clock
):
    woken, ended = threading.Event(), threading.Event()
    naps = [partial(time.sleep, 0.5), partial(woken.wait, HANG_S)]
    serve(manager, monkeypatch, lambda: a_hang(ended, naps.pop(0)))
    assert pick(manager).fallback_reason == "too_slow"  # In place a nap is found out afterwards.
    ended.clear()
    clock.now_s = 11.0
    assert pick(manager).fallback_reason == "too_slow"
    assert not ended.is_set()  # It sleeps on, and nobody waits for it.
    woken.set()
    assert ended.wait(HANG_S / 2)  # Its thread has been told to end, and did.


def test_a_policy_that_was_too_slow_is_open_then_half_open(manager, monkeypatch, clock):
    serve(manager, monkeypatch, partial(time.sleep, 0.5))
    assert manager.policy.breaker.state == "closed"
    pick(manager)
    assert manager.policy.breaker.state == "open"
    clock.now_s = 11.0
    assert manager.policy.breaker.state == "half-open"


def test_a_baseline_that_is_tuned_for_a_number_of_replicas_is_refused():
    with pytest.raises(ValueError, match="baseline 'sita' is tuned for 3 replicas"):
        PolicyManager("poisson_085", "sita", SETTINGS, np.random.default_rng(0))


def test_a_policy_that_behaves_again_closes_its_breaker(manager, monkeypatch, clock):
    naps_s = [0.5]
    serve(manager, monkeypatch, lambda: time.sleep(naps_s.pop() if naps_s else 0.0) or BUSY_INDEX)
    assert pick(manager).fallback_reason == "too_slow"
    clock.now_s = 11.0
    assert {pick(manager).fallback_reason for _ in range(120)} == {None}
    assert manager.policy.breaker.state == "closed"


def test_stale_signals_are_no_ground_for_a_policy(manager, monkeypatch):
    serve(manager, monkeypatch, lambda: BUSY_INDEX)
    assert pick(manager, stale=True).fallback_reason == "stale"


def test_a_policy_for_other_replicas_is_not_asked(manager, tmp_path):
    linear_artifact(num_replicas=3).save(tmp_path / "three.npz")
    manager.switch(str(tmp_path / "three.npz"))
    choice = pick(manager)
    assert (choice.index, choice.fallback_reason) == (IDLE_INDEX, "incompatible")
    assert pick(manager, [SNAPSHOTS[0]] * 3).fallback_reason is None


def test_a_policy_that_is_missing_at_the_start_is_replaced_and_later_refused(manager, tmp_path):
    gone = str(tmp_path / "gone.npz")
    manager.switch(gone, may_be_missing=True)
    assert "does not exist" in manager.policy.loaded.card.startup_fallback
    assert pick(manager).fallback_reason == "missing"
    manager.switch("sed")
    with pytest.raises(ValueError, match="does not exist"):
        manager.switch(gone)
    assert (manager.policy.name, manager.policy.loaded.card.startup_fallback) == ("sed", None)


def test_a_file_that_is_no_policy_is_refused_and_the_old_one_goes_on(manager, tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no")
    manager.switch("sed")
    with pytest.raises(ValueError, match="no npz file"):
        manager.switch(str(tmp_path / "bad.npz"))
    with pytest.raises(ValueError, match="unknown policy"):
        manager.switch("seed")
    assert manager.policy.name == "sed"


def test_exploration_keeps_to_replicas_within_the_slo_and_tells_its_propensity(manager, tmp_path):
    marginal_artifact(slo_response_s=2.0).save(tmp_path / "p.npz")
    manager.switch(str(tmp_path / "p.npz"), explore_fraction=0.05)
    idle = [SNAPSHOTS[0], SNAPSHOTS[1], SNAPSHOTS[1]]
    found = [pick(manager, idle) for _ in range(400)]
    assert {one.index for one in found} == {1, 2}  # Never the one that is at capacity.
    assert 2 <= manager.picker.counts.num_explored <= 30
    assert {round(one.propensity, 4) for one in found} == {0.975, 0.025}


def test_policies_that_draw_are_not_explored_on_top(manager):
    manager.switch("power_of_two", explore_fraction=0.01)
    assert (manager.policy.explore_fraction, pick(manager).propensity) == (0.0, None)


def test_inline_calls_return_raise_and_are_interrupted_where_they_run_python():
    caller = InlineTimeout(0.05, 5.0)
    assert caller.call(lambda: 3) == 3
    with pytest.raises(KeyError):
        caller.call(partial({}.__getitem__, "x"))
    for _ in range(5):
        with pytest.raises(TooSlow, match="within 50 ms"):
            caller.call(partial(a_hang, threading.Event()))
        assert sum(caller.call(lambda: 1) for _ in range(1000)) == 1000
    caller.stop()


def test_no_interruption_is_left_over_where_a_call_ends_just_in_time():
    caller = InlineTimeout(0.01, 5.0)

    def for_about_a_budget(seconds):
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            pass
        return 1

    for number in range(60):
        try:
            assert caller.call(partial(for_about_a_budget, 0.008 + number * 2e-4)) == 1
        except TooSlow:
            pass
        sum(range(1000))  # Would be where one that is left over arrives.
    caller.stop()


def test_the_time_of_a_collection_of_garbage_is_not_the_policys():
    caller = InlineTimeout(0.05, 2.0)

    def take_long(phase, info):
        until_s = time.monotonic() + (0.3 if phase == "start" else 0.0)
        while time.monotonic() < until_s:
            pass

    gc.callbacks.append(take_long)
    try:
        assert caller.call(gc.collect) >= 0
    finally:
        gc.callbacks.remove(take_long)
    with pytest.raises(TooSlow):
        caller.call(partial(a_hang, threading.Event()))
    caller.stop()


def test_calls_in_a_thread_return_raise_and_end_with_their_budget():
    caller = ThreadTimeout(0.05)
    assert caller.call(lambda: 3) == 3
    with pytest.raises(KeyError):
        caller.call(partial({}.__getitem__, "x"))
    with pytest.raises(TooSlow, match="within 50 ms"):
        caller.call(partial(time.sleep, 0.5))
    assert caller.call(lambda: 4) == 4
    caller.stop()

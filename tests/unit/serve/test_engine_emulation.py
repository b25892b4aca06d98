import time

import numpy as np
import pytest
from pydantic import ValidationError

from serve_app.engine_config import Emulation
from serve_app.engines import emulation
from serve_app.engines.emulation import Pace
from tokenyard.routing.fleet import ReplicaConfig


class Clock:
    """Time that passes only when somebody sleeps or works."""

    def __init__(self, monkeypatch):
        self.now_s = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self.work)

    def work(self, seconds):
        self.now_s += seconds


def test_an_emulation_takes_the_time_that_the_performance_model_states():
    stated = ReplicaConfig(name="real", gpu="l4", model="llama3_8b").iteration
    slow = Emulation(gpu="l4", llm="llama3_8b", time_scale=10)
    np.testing.assert_allclose(slow.iteration, 10 * stated)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gpu": "l5", "llm": "llama3_8b"}, "unknown gpu 'l5'"),
        ({"gpu": "l4", "llm": "llama9"}, "llama9"),
        ({"gpu": "l4", "llm": "llama2_70b"}, "does not fit on l4"),
        ({"gpu": "l4", "llm": "llama3_8b", "time_scale": 0.5}, "greater than or equal to 1"),
    ],
)
def test_hardware_that_cannot_be_is_refused_with_the_reason(fields, reason):
    with pytest.raises(ValidationError, match=reason):
        Emulation(**fields)


def test_an_iteration_lasts_as_long_as_its_batch_says(monkeypatch):
    clock = Clock(monkeypatch)
    pace = Pace(np.array([0.1, 0.01, 0.02, 0.001]))
    begun_s = pace.begin()
    clock.work(0.03)
    pace.hold(begun_s, prefill_tokens=5, sequences=2, kv_tokens=50)
    assert clock.now_s - begun_s == pytest.approx(0.1 + 0.05 + 0.04 + 0.05)


def test_what_happens_between_iterations_is_made_up_for(monkeypatch):
    clock = Clock(monkeypatch)
    pace = Pace(np.array([0.1, 0.0, 0.0, 0.0]))
    started_s = clock.now_s
    for _ in range(10):
        begun_s = pace.begin()
        pace.hold(begun_s, 0, 1, 10)
        clock.work(0.005)
    assert clock.now_s - started_s == pytest.approx(10 * 0.1 + 0.005)


def test_an_idle_engine_owes_nothing(monkeypatch):
    clock = Clock(monkeypatch)
    pace = Pace(np.array([0.1, 0.0, 0.0, 0.0]))
    pace.hold(pace.begin(), 0, 1, 10)
    clock.work(2 * emulation._CATCH_UP_S)
    assert pace.begin() == clock.now_s


def test_a_machine_that_is_too_slow_is_late_and_does_not_run_ahead(monkeypatch):
    clock = Clock(monkeypatch)
    pace = Pace(np.array([0.1, 0.0, 0.0, 0.0]))
    begun_s = pace.begin()
    clock.work(0.5)
    pace.hold(begun_s, 0, 1, 10)
    assert clock.now_s == pytest.approx(begun_s + 0.5)
    assert pace.begin() == clock.now_s

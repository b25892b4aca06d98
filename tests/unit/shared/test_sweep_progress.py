"""What a sweep shows of its trials while it runs."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from tune_configs import progress
from tune_configs.progress import Progress


class Trial(SimpleNamespace):
    """What is read of a Tune trial."""

    def __str__(self):
        return self.label

    def is_finished(self):
        return self.status in ("TERMINATED", "ERROR")


def trial(label, status="PENDING", **result):
    return Trial(
        trial_id=label, label=label, status=status, last_result=result, config={"env_steps": 2_000}
    )


def result(steps, score):
    return {"timesteps_total": steps, "eval/score": score, "time_total_s": steps / 100}


@pytest.fixture
def terminal(monkeypatch):
    """Make the console one that writes here; a terminal, or not."""

    def make(is_terminal):
        out = io.StringIO()
        console = Console(file=out, width=120, force_terminal=is_terminal, color_system=None)
        monkeypatch.setattr(progress, "Console", lambda stderr: console)
        return out

    return make


def test_without_a_terminal_each_trial_that_ends_has_one_line(terminal):
    out, shown = terminal(False), Progress("routing on local_cpu", 3)
    ppo, dqn = trial("ppo response seed 0", "RUNNING", **result(1_000, -5.5)), trial("dqn seed 0")
    shown.report([ppo, dqn], done=False)
    assert out.getvalue() == ""
    ppo.status, ppo.last_result = "TERMINATED", result(2_000, -5.25)
    dqn.status = "ERROR"
    for _ in range(2):
        shown.report([ppo, dqn], done=True)
    assert out.getvalue().splitlines() == [
        "1 of 3 done: ppo response seed 0: env steps 2,000 of 2,000, score now -5.25, "
        "score at the start -5.5, elapsed 20 s",
        "2 of 3 failed: dqn seed 0: env steps 0 of 2,000, score now -, score at the start -, "
        "elapsed 0 s",
    ]


def test_on_a_terminal_there_is_one_table_of_all_trials(terminal):
    out, shown = terminal(True), Progress("routing on local_cpu", 3)
    trials = [trial("waits"), trial("learns", "RUNNING", **result(1_000, -5.5))]
    shown.report(trials, done=True)
    text = out.getvalue()
    assert "routing on local_cpu: 0 of 3 trials have ended" in text
    assert text.index("learns") < text.index("waits")
    for cell in ("running", "waiting", "1,000 of 2,000", "-5.5", "10 s"):
        assert cell in text

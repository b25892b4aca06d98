"""Rules of files: good ones play, others are refused or stopped with a sentence."""

import numpy as np
import pytest

from tokenyard.routing.policy_file import PolicyFileError, PolicyOfFile, load_rule
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.streams import StreamSource, synthetic_streams

GOOD = """
from dataclasses import dataclass

@dataclass
class Helper:
    x: int = 0

class Mine:
    def __init__(self):
        self.turn = -1

    def route(self, request, snapshots):
        self.turn += 1
        return self.turn % len(snapshots)
"""


@pytest.fixture
def a_file(tmp_path):
    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def streams():
    scenario = load_scenario("poisson_085").model_copy(update={"requests_per_stream": 200})
    return scenario, synthetic_streams(StreamSource(scenario), 2, 1)


def test_a_rule_of_a_file_decides_as_the_same_rule_of_ours(a_file, streams):
    scenario, drawn = streams
    mine = PROBLEM.candidate(scenario, str(a_file(GOOD)))
    ours = PROBLEM.candidate(scenario, "round_robin")
    assert mine.name == "mine"
    for one, other in zip(mine.run(scenario, drawn, 0), ours.run(scenario, drawn, 0), strict=True):
        np.testing.assert_array_equal(one.outcomes.server, other.outcomes.server)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nothing_of_that_name", "cannot be loaded: ModuleNotFoundError"),
        ("class (", "cannot be loaded: SyntaxError"),
        ("x = 1", "has 0 classes with `route`"),
        (GOOD + GOOD.replace("Mine", "Other"), "has 2 classes with `route`"),
        (GOOD.replace("def __init__(self)", "def __init__(self, x)"), "TypeError"),
    ],
)
def test_a_file_without_a_rule_is_refused_before_anything_runs(a_file, text, reason):
    with pytest.raises(PolicyFileError, match=reason):
        PROBLEM.candidate(load_scenario("poisson_085"), str(a_file(text)))


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(PolicyFileError, match="was not found"):
        load_rule(tmp_path / "none.py")


def test_a_rule_of_a_file_may_order_what_waits(a_file, streams):
    scenario, drawn = streams
    text = GOOD + "    def order_key(self, request, now_s):\n        return {}\n"
    ran = {}
    for key in ("request.arrival_s", "request.arrival_s + 0.01 * request.context_tokens"):
        candidate = PROBLEM.candidate(scenario, str(a_file(text.format(key))))
        ran[key] = candidate.run(scenario, drawn, 0)
    plain = PROBLEM.candidate(scenario, "round_robin").run(scenario, drawn, 0)
    by_arrival, by_size = ran.values()
    for one, other, same in zip(by_arrival, by_size, plain, strict=True):
        np.testing.assert_array_equal(one.outcomes.response_s, same.outcomes.response_s)
        assert (one.outcomes.response_s != other.outcomes.response_s).any()


@pytest.mark.parametrize("key", ["None", "float('nan')", "1 / 0"])
def test_keys_that_are_no_time_are_refused(a_file, streams, key):
    scenario, drawn = streams
    text = GOOD + f"    def order_key(self, request, now_s):\n        return {key}\n"
    candidate = PROBLEM.candidate(scenario, str(a_file(text)))
    with pytest.raises(PolicyFileError, match=r"mine.py: (order_key returned|ZeroDivisionError)"):
        candidate.run(scenario, drawn, 0)


@pytest.mark.parametrize("answer", ["99", "-1", "None", "'0'", "0.5", "1 / 0"])
def test_answers_that_are_no_replica_are_refused(a_file, streams, answer):
    scenario, drawn = streams
    text = f"class Bad:\n    def route(self, request, snapshots):\n        return {answer}\n"
    with pytest.raises(PolicyFileError, match=r"mine\.py: (route returned|ZeroDivisionError)"):
        PROBLEM.candidate(scenario, str(a_file(text))).run(scenario, drawn, 0)


def test_a_numpy_integer_is_an_answer(a_file):
    text = "import numpy\nclass Good:\n    def route(self, r, s):\n        return numpy.int64(0)\n"
    assert PolicyOfFile(a_file(text)).route(None, [None]) == 0

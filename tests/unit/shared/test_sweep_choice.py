"""Which trial of a sweep is its best: the best score of those that lose nowhere at the gate."""

from dataclasses import replace

import pytest
from toy_problem import SCENARIOS, ToyArtifact, ToyProblem, short

from tune_configs.sweep import FinishedTrial, Sweep, against_rivals, judge

MEAN = SCENARIOS["toy_low"].mean


class Guarded(ToyProblem):
    """Its gate refuses policies that keep more than a level in stock."""

    def __init__(self, most):
        self.most = most

    def gate(self, scenario, num_streams):
        return lambda artifact: [
            {"baseline": "one", "part": "half", "loses": int(artifact.level > self.most)}
        ]


def judged(most):
    """A sweep of three trials, and its report; the best score is that of the highest level."""
    experiment = replace(short(), problem=Guarded(most), evaluation_streams=5)
    sweep = Sweep(experiment, "", 0, "", "", client=None, run_id="")
    levels = {"poor": MEAN - 1.5, "good": MEAN - 0.5, "best": MEAN}
    trials = [
        FinishedTrial(label, label, {}, 0, 0.0, None, ToyArtifact.keeping(level, trainer="x"))
        for label, level in levels.items()
    ]
    return sweep, judge(sweep, trials)


@pytest.mark.parametrize(
    ("most", "best", "passed_over"),
    [(9.0, "best", []), (MEAN - 0.1, "good", ["best"]), (MEAN - 1.0, "poor", ["best", "good"]),
     (0.0, "best", [])],
    ids=["none loses", "one loses", "two lose", "all lose"],
)  # fmt: skip
def test_the_best_is_the_first_that_loses_nowhere(most, best, passed_over):
    _, report = judged(most)
    ranked = [row["policy"] for row in report.ranking.rows if row["policy"] != "one"]
    assert ranked == ["best", "good", "poor"]
    assert report.best.label == best
    assert report.passed_over == passed_over
    assert {row["policy"] for row in report.evaluation.rows} == {best, "one"}


def test_where_all_lose_the_verdict_says_so(monkeypatch):
    monkeypatch.setattr("tune_configs.sweep.registry.mlflow_lookup", lambda uri: None)
    sweep, report = judged(most=0.0)
    sweep = replace(sweep, client=type("Client", (), {"tracking_uri": ""}))
    verdict = against_rivals(sweep, report)
    assert not verdict.accepted
    assert verdict.reason == "it loses to one (half) at the gate"

"""Who becomes champion, on a problem small enough to know the answer."""

import numpy as np
import pytest
from toy_problem import SCENARIOS, TOY, ToyArtifact, ToyProblem

from tokenyard.artifact import RegisteredPolicy
from tokenyard.problem import PROBLEMS
from tokenyard.promotion import judge_candidate, rivals
from tokenyard.routing.artifact import DEFAULT_SERVER_RULE

LOW = SCENARIOS["toy_low"]
STREAMS = TOY.streams(LOW, "validation", 6, 1)


class Guarded(ToyProblem):
    """Refuses to keep more than a level in stock."""

    def gate(self, scenario, num_streams):
        return lambda artifact: [
            {"baseline": "one", "part": "half", "delta_cost_fraction": 0.5,
             "loses": int(artifact.level > 3.0)}
        ]  # fmt: skip


def judged(level, problem=TOY, registry=None):
    against = rivals(problem, LOW, "one", registry)
    artifact = ToyArtifact.keeping(level, trainer="x")
    gate = problem.gate(LOW, len(STREAMS))(artifact)
    return judge_candidate(problem, LOW, artifact, against, gate, STREAMS, 0)


def registered(tmp_path, level):
    ToyArtifact.keeping(level, trainer="x").save(tmp_path / "artifact.npz")
    return lambda model: RegisteredPolicy(tmp_path / "artifact.npz", "1", "champion", "run")


def test_without_a_champion_the_rule_is_to_be_beaten():
    verdict = judged(2.5)
    assert [one.rival for one in verdict.gains] == ["one"]
    assert verdict.accepted
    assert verdict.reason == "it beats one"
    assert not judged(1.0).accepted, "nothing beats itself"
    assert judged(0.5).reason == "it does not beat one"


def test_a_registered_champion_is_to_be_beaten_too(tmp_path):
    verdict = judged(2.5, registry=registered(tmp_path, 2.9))
    champion, rule = verdict.gains
    assert (champion.won, rule.won, verdict.accepted) == (False, True, False)
    assert champion.source.startswith("registry tokenyard-toy-toy_low@champion")
    assert verdict.reason == "it does not beat champion"
    assert judged(3.0, registry=registered(tmp_path, 2.5)).accepted


def test_what_loses_at_the_gate_is_not_accepted_however_good_its_score():
    assert judged(3.0, Guarded()).accepted
    verdict = judged(3.1, Guarded())
    assert all(one.won for one in verdict.gains)
    assert verdict.reason == "it loses to one (half) at the gate"
    assert [row.get("loses") for row in verdict.rows] == [None, 1]


@pytest.mark.parametrize(
    "name", ["routing:poisson_050", "allocation:a100x8_13b", "regions:abilene"]
)
def test_a_rule_that_ships_is_to_be_beaten_once(name):
    problem = PROBLEMS[name.partition(":")[0]]()
    scenario = problem.load_scenario(name.partition(":")[2])
    best = problem.best_tuned_rule(scenario)
    assert problem.candidate(scenario, "champion").rule == best
    assert [one.name for one in rivals(problem, scenario, problem.default_baseline)] == [best]


def test_where_nothing_was_tuned_two_rules_are_to_be_beaten():
    routing = PROBLEMS["routing"]()
    own = routing.load_scenario("poisson_050").model_copy(update={"name": "mine"})
    names = [rival.rule or rival.name for rival in rivals(routing, own, "sed")]
    assert names == [DEFAULT_SERVER_RULE, "sed"]


@pytest.mark.parametrize("level", [2.5, 3.0])
def test_a_gain_is_the_difference_of_the_means_and_positive_where_less_cost_is_better(level):
    (gain,) = judged(level).gains
    days = STREAMS.streams
    expected = np.abs(days - 1.0).mean() - np.abs(days - level).mean()
    assert gain.interval.estimate == pytest.approx(expected)
    assert gain.interval.low < expected < gain.interval.high

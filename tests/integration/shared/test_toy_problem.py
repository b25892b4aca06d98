"""A problem that nothing else knows goes through sweep, registry, evaluation and promotion."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from toy_problem import DAYS, SCENARIOS, TOY, ToyArtifact

from pipelines import evaluate, sweep
from tokenyard import registry
from tokenyard.problem import PROBLEMS

pytestmark = pytest.mark.integration

MODEL = "tokenyard-toy-toy_low"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def uri(runs):
    return f"sqlite:///{runs}/mlflow.db"


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(PROBLEMS, "toy", lambda: TOY)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Where Ray's workers look for the problem.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")


def swept(name, runs, resume=False):
    out = runs / f"{name}.json"
    args = sweep.Args(f"toy_problem:{name}", name, storage=str(runs), concurrent=2, json=out)
    with pytest.raises(SystemExit) as end:
        sweep.main(replace(args, resume=resume))
    assert end.value.code == 0
    return json.loads(out.read_text())


@pytest.fixture
def swept_long(runs, own_ray):
    out = runs / "long.json"
    return json.loads(out.read_text()) if out.exists() else swept("long", runs)


def test_a_sweep_trains_ranks_and_registers_it(swept_long):
    for row in swept_long["rows"]:
        assert row["problem"] == "toy"
        assert row["env_steps"] == 40 * DAYS
        assert row["delta_cost_ci_high"] < 0
        assert row["score"] == -row["cost"]
    assert swept_long["registrations"][0]["model"] == MODEL
    assert swept_long["registrations"][0]["alias"] == "champion"
    # Nothing is registered or ships, so the rule is all that there is to beat.
    (rule,) = swept_long["verdict"]
    assert (rule["rival"], rule["won"]) == ("one", 1)
    assert rule["gain_ci_low"] > 0
    assert {row["registered"] for row in swept_long["rows"]} == {"champion", "none"}
    champion = next(row for row in swept_long["rows"] if row["registered"] == "champion")
    assert champion["sha256"] == swept_long["registrations"][0]["sha256"]
    assert [row["policy"] for row in swept_long["evaluation"]][-1] == "one"


def test_what_is_worse_than_the_champion_is_a_candidate(swept_long, runs, uri):
    result = swept("short", runs)
    worse = result["registrations"][0]
    champion, one = result["verdict"]
    assert (champion["rival"], champion["won"]) == ("champion", 0)
    assert champion["gain_ci_high"] < 0
    assert (one["rival"], one["source"]) == ("one", "baseline")
    client = MlflowClient(uri)
    champion = registry.version_of(client, MODEL)
    assert worse["alias"] == "candidate"
    assert str(champion.version) == swept_long["registrations"][0]["version"]
    level = TOY.load_artifact(registry.mlflow_lookup(uri)(MODEL).path).level
    assert level == pytest.approx(SCENARIOS["toy_low"].mean, abs=1.0)


def test_the_registered_champion_is_evaluated_like_any_other(swept_long, runs, uri, capsys):
    out = runs / "rows.json"
    evaluate.main(evaluate.Args(scenario="toy_low", registry=uri, json=out, figures=runs / "drawn"))
    printed = capsys.readouterr().out
    assert f"champion: registry {MODEL}@champion" in printed
    assert "paired differences" in printed
    one, champion = json.loads(out.read_text())["rows"]
    assert champion["delta_cost_ci_high"] < one["delta_cost_ci_low"] == 0
    assert (runs / "drawn/toy_low/differences.png").exists()


def test_a_champion_is_promoted_and_taken_back(swept_long, uri):
    client, better = MlflowClient(uri), ToyArtifact.keeping(3.0, trainer="by hand")
    now, before = registry.enter(uri, MODEL, better, {"why": "a test"})
    assert registry.aliases_of(client, MODEL) == before
    after = registry.promoted(before, now)
    known = {now, before["champion"]}
    assert registry.settle(uri, MODEL, after, known)
    found = registry.mlflow_lookup(uri)(MODEL)
    assert TOY.load_artifact(found.path).level == 3.0
    assert registry.aliases_of(client, MODEL)["previous"] == before["champion"] != now
    assert not registry.settle(uri, MODEL, {"champion": "1"}, known={"99"})  # Somebody else's.
    assert registry.settle(uri, MODEL, before, known)
    assert registry.aliases_of(client, MODEL) == before


@pytest.fixture
def swept_chain(runs, own_ray):
    out = runs / "chain.json"
    return json.loads(out.read_text()) if out.exists() else swept("chain", runs)


def test_a_chain_has_one_parent_with_a_run_per_problem_and_their_trials(swept_chain, uri):
    assert [row["problem"] for row in swept_chain["rows"]] == ["routing"] * 4 + ["toy"] * 2
    made = {one["problem"]: one for one in swept_chain["registrations"]}
    assert set(made) == {"routing", "toy"}
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tokenyard-routing-toy")
    runs = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    above = {key: run.data.tags.get("mlflow.parentRunId") for key, run in runs.items()}
    (parent,) = [key for key, parent in above.items() if parent is None]
    problems = {runs[key].info.run_name: key for key in above if above[key] == parent}
    assert set(problems) == {"routing", "toy"}
    for name, count in (("routing", 4), ("toy", 2)):
        trials = [key for key in above if above[key] == problems[name]]
        assert len(trials) == count
        if name == "routing":  # The toy's policy is known from the sweeps before.
            assert made[name]["run_id"] in trials
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert runs[parent].data.tags["toy.registered_sha256"] == made["toy"]["sha256"]
    note = runs[parent].data.tags["mlflow.note.content"]
    for name in ("routing", "toy"):
        assert f"/runs/{problems[name]}?" in note
        assert f"{name}/best_score" in runs[parent].data.metrics


def test_a_chain_that_was_ended_between_two_problems_goes_on_with_the_second(swept_chain, runs):
    shutil.rmtree(runs / "chain" / "toy")
    resumed = swept("chain", runs, resume=True)
    assert [row["trial"] for row in resumed["rows"]] == [
        row["trial"] for row in swept_chain["rows"]
    ]
    assert resumed["rows"][:4] == swept_chain["rows"][:4]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"suite": "toy"}, "choose one of"),
        (
            {"scenario": "toy_low", "policies": "one", "source": "held-out"},
            "are for routing; the demand of toy",
        ),
        ({"scenario": "toy_low", "suite": "toys"}, "exactly one of"),
    ],
)
def test_what_it_does_not_have_is_refused(arguments, reason, capsys):
    with pytest.raises(SystemExit):
        evaluate.main(evaluate.Args(**arguments))
    assert reason in capsys.readouterr().err

"""Direct policy search from the command line."""

import json
from dataclasses import replace

import pytest

from pipelines.train import Args, Study, main
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.choice import LOSSES, WINS
from tokenyard.routing.observation import NUM_MARGINAL_SLO_WEIGHTS
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search_study import OBJECTIVES, FinishedSearch, best_of, run_study, search

SCENARIO = "azure_code_mixed_gpus_085"
SMALL = Study(seeds=1, objectives=(5,), generations=1, streams=2, jobs=1)


@pytest.mark.slow
def test_a_search_weighs_the_terms_of_slos_too():
    found, env_steps = search(load_scenario(SCENARIO), SMALL, OBJECTIVES[5], seed=0)
    assert len(found.arrays["weights"]) == NUM_MARGINAL_SLO_WEIGHTS
    assert found.orders
    assert env_steps > 0


@pytest.mark.integration
def test_every_search_is_judged_beside_the_best_rule():
    (found,) = run_study(load_scenario("poisson_050"), SMALL)
    assert found.row["baseline"] == found.policy.metadata.lineage["beats"]
    assert {LOSSES, WINS, "delta_p99_ci_high"} <= found.row.keys()
    assert found.policy.metadata.metrics["delta_mean_fraction"] == found.row["delta_mean_fraction"]


@pytest.mark.parametrize(
    ("study", "reason"),
    [
        (dict(objectives=(0, 9)), "--objectives are 0 to 6: no 9 in them"),
        (dict(objectives=(-1,)), "--objectives are 0 to 6: no -1 in them"),
        (dict(objectives=()), "--objectives are 0 to 6: give one"),
        (dict(seeds=0), "--seeds 0 must be at least 1"),
        (dict(streams=0), "--streams 0 must be at least 1"),
        (dict(generations=-1), "--generations -1 must be at least 0"),
    ],
)
def test_mistakes_in_the_arguments_end_with_one_sentence(study, reason):
    with pytest.raises(SystemExit, match=f"train: {reason}"):
        main(Args(scenario=SCENARIO, study=replace(SMALL, **study)))


def test_the_one_kept_loses_nowhere_and_wins():
    def found(change, losses=0.0, won=1.0):
        row = {"delta_mean_over_parts": change, LOSSES: losses, WINS: won}
        return FinishedSearch(row, None)

    level, better, loser, draw = found(-0.01), found(-0.02), found(-0.1, 1.0), found(-0.1, 0.0, 0.0)
    assert best_of([level, better, loser, draw]) is better
    assert best_of([loser, draw]) is None


@pytest.mark.integration
@pytest.mark.parametrize("kept", [True, False])
def test_the_best_is_written_and_nothing_where_no_rule_is_beaten(
    kept, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("tokenyard.routing.search_study.choose", lambda rows: 0 if kept else None)
    path = tmp_path / "poisson_050.npz"
    study = replace(SMALL, searches=tmp_path / "all")
    args = Args(scenario="poisson_050", out=path, study=study, json=tmp_path / "rows.json")
    main(args)
    assert (
        PolicyArtifact.load(tmp_path / "all" / "poisson_050-o5-s0.npz").metadata.kind == "marginal"
    )
    assert path.exists() == kept
    if kept:
        assert PolicyArtifact.load(path).metadata.kind == "marginal"
    else:
        assert "no candidate beats the rule" in capsys.readouterr().out
    (row,) = json.loads(args.json.read_text())["rows"]
    assert row["accepted"] == kept
    assert row["sha256"] == PolicyArtifact.load(tmp_path / "all" / "poisson_050-o5-s0.npz").sha256

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipelines import evaluate, paper, tune_baselines
from tokenyard.problem import PROBLEMS, find_problem
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario, scenario_names
from tokenyard.routing.suites import SUITES

ROOT = Path(__file__).parents[3]
FROZEN_KEYS = {
    "policy", "scenario", "stream_count", "mean_response_s", "p50_response_s",
    "p95_response_s", "p99_response_s", "mean_queue_length", "slo_violation_fraction",
    "goodput_per_s", "dropped_fraction", "offered_load", "delta_mean_fraction", "delta_mean_ci_low",
    "delta_mean_ci_high", "delta_p99_fraction", "delta_p99_ci_low", "delta_p99_ci_high",
    "delta_slo_violation", "delta_slo_ci_low", "delta_slo_ci_high",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_registry(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def own_trace(folder: Path, num_requests: int, last_row: str = "") -> Path:
    rows = [f"{0.2 * i},{100 + 37 * i % 3000},{10 + i % 50}" for i in range(num_requests)]
    path = folder / "own.csv"
    path.write_text("\n".join(["arrival_s,context_tokens,generated_tokens", *rows, last_row]))
    return path


def test_the_command_prints_tables_and_writes_rows_with_the_frozen_keys(tmp_path, capsys):
    out = tmp_path / "rows.json"
    evaluate.main(
        evaluate.Args(scenario="poisson_085", policies="round_robin,sed_dump", streams=2, json=out)
    )
    printed = capsys.readouterr().out
    assert "synthetic" in printed
    assert "output length known to the router: by_context" in printed
    result = json.loads(out.read_text())
    assert {"command", "versions", "seed", "git_sha", "rows"} <= set(result)
    assert [row["policy"] for row in result["rows"]] == ["round_robin", "sed_dump", "sed"]
    for row in result["rows"]:
        assert set(row) >= FROZEN_KEYS
        assert row["stream_count"] == 2
        assert row["offered_load"] == pytest.approx(0.85)


@pytest.mark.parametrize("scenario", ["poisson_085", "two_classes_slo"])
def test_the_reward_is_measured_where_it_is_asked_for_and_changes_no_other_column(
    tmp_path, capsys, scenario
):
    short = load_scenario(scenario).model_copy(update={"requests_per_stream": 200})
    path, out = tmp_path / "short.yaml", tmp_path / "rows.json"
    path.write_text(yaml.safe_dump(short.model_dump(mode="json", exclude_unset=True)))
    names = "sed,tuned_marginal_delay,marginal_in_order+boost,champion"
    found = []
    for reward in (False, True):
        args = evaluate.Args(scenario=str(path), policies=names, streams=2, json=out)
        evaluate.main(replace(args, reward=reward))
        assert ("reward" in capsys.readouterr().out) == (reward and scenario == "poisson_085")
        found.append(json.loads(out.read_text())["rows"])
    added = {"reward", "reward_ci_low", "reward_ci_high"}
    for without, paid in zip(*found, strict=True):
        assert paid.keys() - without.keys() == added
        assert {key: value for key, value in paid.items() if key not in added} == without


def test_a_fleet_is_printed_with_what_matters_of_it_in_the_width_of_a_page(tmp_path, capsys):
    short = load_scenario("two_classes_slo").model_copy(update={"requests_per_stream": 200})
    path, out = tmp_path / "short.yaml", tmp_path / "rows.json"
    path.write_text(yaml.safe_dump(short.model_dump(mode="json", exclude_unset=True)))
    evaluate.main(
        evaluate.Args(scenario=str(path), policies="round_robin,sed", streams=2, json=out)
    )
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 170
    for title in (
        "p99 ttft",
        "goodput/s",
        "violation %",
        "hit %",
        "J/token",
        "interactive %",
        "small %",
    ):
        assert title in printed
    token_level = tmp_path / "token.json"
    evaluate.main(
        evaluate.Args(scenario="poisson_085", policies="sed", streams=1, json=token_level)
    )
    rows = json.loads(out.read_text())["rows"]
    of_servers = set(json.loads(token_level.read_text())["rows"][0])
    # Rows of token-level servers have nothing that only fleets have, and fleets all that they have.
    assert of_servers - set(rows[0]) == set()
    assert not any("ttft" in key or "attained" in key for key in of_servers)
    assert {"mean_ttft_s", "attained_batch_fraction", "service_gap_tokens_per_s"} < set(rows[0])
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    named = {
        key for key in set(rows[0]) - of_servers if not key.startswith(("attained_", "share_"))
    }
    assert all(f"`{key}`" in page for key in named)


def test_the_fleet_suite_names_every_fleet_that_ships():
    fleets = {name for name in scenario_names() if load_scenario(name).fleet is not None}
    # Fleets of cluster files are no regimes of their own: they are compared with what is measured
    # live.
    assert set(SUITES["fleet"]) == fleets - {"emulated", "local_cpu"}


def test_every_regime_ships_with_the_rules_tuned_for_it():
    regimes = SUITES["regimes"]
    assert len(set(regimes)) >= 12
    for name in regimes:
        assert load_tuned(name).scenario == load_scenario(name).name == name


def test_best_is_the_named_rule_with_the_best_score(tmp_path):
    out = tmp_path / "rows.json"
    args = dict(scenario="poisson_085", streams=2, baseline="best", source="synthetic")
    evaluate.main(evaluate.Args(**args, policies="round_robin,sed,champion", json=out))
    rows = json.loads(out.read_text())["rows"]
    assert {row["baseline"] for row in rows} == {"sed"}
    assert [row["policy"] for row in rows] == ["round_robin", "sed", "champion"]


def policy_files(folder: Path) -> list[Path]:
    """Two policies in files of one name, as checkpoints of trials are, and a third."""
    shipped = ROOT / "tokenyard/artifacts/routing/two_speeds.npz"
    known = PolicyArtifact.load(shipped)
    other = replace(known, arrays={**known.arrays, "weights": 0.0 * known.arrays["weights"]})
    files = [folder / "a/artifact.npz", folder / "b/artifact.npz", folder / "sed.npz"]
    for policy, file in zip((known, other, known), files, strict=True):
        file.parent.mkdir(exist_ok=True)
        policy.save(file)
    return files


def test_files_of_one_name_are_told_apart(tmp_path):
    files, out = policy_files(tmp_path), tmp_path / "rows.json"
    args = dict(scenario="two_speeds", streams=2, json=out)
    evaluate.main(evaluate.Args(**args, policies=",".join(["sed", *map(str, files)])))
    rows = json.loads(out.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["sed", *map(str, files)]
    assert len({row["mean_response_s"] for row in rows}) == 3
    assert rows[1]["mean_response_s"] == rows[3]["mean_response_s"]


def test_a_file_may_be_the_baseline(tmp_path):
    file, _, of_rule = policy_files(tmp_path)
    out = tmp_path / "rows.json"
    args = dict(scenario="two_speeds", streams=2, policies="sed", json=out)
    for baseline, name in ((file, "artifact"), (of_rule, str(of_rule))):
        evaluate.main(evaluate.Args(**args, baseline=str(baseline)))
        rows = json.loads(out.read_text())["rows"]
        assert {row["baseline"] for row in rows} == {name}
        assert [row["policy"] for row in rows] == ["sed", name]


def test_best_of_no_rules_is_refused(capsys):
    with pytest.raises(SystemExit):
        evaluate.main(evaluate.Args(scenario="poisson_085", policies="champion", baseline="best"))
    assert "needs a rule among --policies" in capsys.readouterr().err


def test_an_own_trace_is_cut_into_windows_and_scaled_to_the_load(tmp_path, capsys):
    path = own_trace(tmp_path, 600)
    args = dict(scenario="poisson_085", policies="sed", streams=3, trace=path)
    evaluate.main(evaluate.Args(**args))
    scaled = capsys.readouterr().out
    evaluate.main(evaluate.Args(**args, native_time=True))
    native = capsys.readouterr().out
    assert "3 x 200 requests, recorded trace, 3 windows" in scaled
    assert scaled != native


def heavy_trace(folder: Path) -> Path:
    """600 requests of 60,000 tokens a second, for servers of 15,000."""
    path = folder / "heavy.csv"
    rows = [f"{0.05 * i},2900,{97 + i % 7}" for i in range(600)]
    path.write_text("\n".join(["arrival_s,context_tokens,generated_tokens", *rows]))
    return path


def test_a_trace_many_times_over_capacity_gives_a_sentence_and_no_percentages(tmp_path, capsys):
    args = dict(scenario="poisson_085", policies="sed,least_loaded", streams=2)
    trace = heavy_trace(tmp_path)
    out = tmp_path / "rows.json"
    evaluate.main(evaluate.Args(**args, trace=trace, native_time=True, json=out))
    printed = capsys.readouterr().out
    for row in json.loads(out.read_text())["rows"]:
        assert row["mean_response_s"] > 0
        assert all(row[key] is None for key in FROZEN_KEYS if key.startswith("delta_"))
    assert "offered load 4.0: the queue only grows; use --load 0.8" in printed
    assert "difference to" not in printed


@pytest.mark.parametrize("scenario", ["poisson_085", "conversation_mixed_gpus"])
@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "has a header and no request"),
        (["0,0,0", "1,0,0"], "no request of the trace has a token"),
        (["0,100,10"], "1 requests at one instant have no rate"),
        (["0,100,10", "5,100,10"], "2 requests cannot be cut into 3 streams"),
    ],
)
def test_a_trace_that_says_nothing_is_refused_in_a_sentence(
    scenario, rows, reason, tmp_path, capsys
):
    path = tmp_path / "odd.csv"
    path.write_text("\n".join(["arrival_s,context_tokens,generated_tokens", *rows]) + "\n")
    streams = 3 if len(rows) == 2 and "100" in rows[0] else 1
    with pytest.raises(SystemExit):
        evaluate.main(evaluate.Args(scenario=scenario, policies="sed", streams=streams, trace=path))
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "source",
    ["own", "synthetic", pytest.param("held-out", marks=pytest.mark.recorded("azure_code"))],
)
def test_load_scales_any_traffic(source, tmp_path, capsys):
    scenario = "poisson_085" if source == "own" else "bursty_serial"
    where = {"trace": heavy_trace(tmp_path)} if source == "own" else {"source": source}
    args = dict(scenario=scenario, policies="sed,least_loaded", streams=1, **where)
    evaluate.main(evaluate.Args(**args, load=0.5))
    printed = capsys.readouterr().out
    assert "offered load: 0.50\n" in printed
    assert "difference to sed" in printed


def test_what_may_be_cached_is_no_overload(capsys):
    scenario = load_scenario("multi_turn_prefix")
    streams = PROBLEM.streams(
        scenario.model_copy(update={"requests_per_stream": 10}), "evaluation", 1, 0
    )
    assert streams.offered_load > 1
    assert PROBLEM.overload(scenario, streams) is None


def test_where_all_who_wait_long_are_given_up_more_than_capacity_is_compared(tmp_path, capsys):
    shipped = ROOT / "tokenyard/scenarios/routing/azure_code_slo.yaml"
    known = yaml.safe_load(shipped.read_text())
    known["requests_per_stream"] = 400
    known["fleet"]["classes"][0]["max_wait_s"] = 1.0
    file = tmp_path / "hasty.yaml"
    file.write_text(yaml.safe_dump(known))
    args = dict(policies="sed,least_loaded", streams=2, load=1.3, source="synthetic")
    evaluate.main(evaluate.Args(scenario=str(file), **args))
    assert "difference to sed" in capsys.readouterr().out
    known["fleet"]["classes"][0].pop("max_wait_s")
    file.write_text(yaml.safe_dump(known))
    evaluate.main(evaluate.Args(scenario=str(file), **args))
    assert "the queue only grows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"scenario": "nominal", "load": -0.5}, "--load -0.5 must lie between 0 and 2"),
        ({"scenario": "nominal", "load": 0.5, "native_time": True}, "give one of them"),
        ({"scenario": "nominal", "native_time": True}, "give one with --trace"),
        (
            {"scenario": "nominal", "trace": Path("mine.csv"), "source": "synthetic"},
            "--trace and --source name two kinds of traffic",
        ),
        ({"suite": "regions", "load": 0.5}, "--load are for routing"),
        ({}, "exactly one of --scenario and --suite"),
        ({"scenario": "nominal", "suite": "paper"}, "exactly one of --scenario and --suite"),
        ({"scenario": "nominl"}, "did you mean 'nominal'"),
        ({"scenario": "nominal", "policies": "sed,lru"}, "unknown policy 'lru'"),
        ({"scenario": "nominal", "streams": 0}, "--streams 0 must be at least 1"),
        ({"scenario": "nominal", "jobs": 0}, "--jobs 0 must be at least 1"),
        ({"scenario": "poisson_085", "source": "held-out"}, "no recorded test part"),
        (
            {"scenario": "churn", "policies": "clairvoyant"},
            "has a fleet: clairvoyant is for serial",
        ),
    ],
)
def test_mistakes_in_the_arguments_end_with_one_sentence_and_code_2(arguments, reason, capsys):
    with pytest.raises(SystemExit) as end:
        evaluate.main(evaluate.Args(**arguments))
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert reason in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('problem:  "regions"\n', "regions"),
        ("{problem: allocation}\n", "allocation"),
        ("description: 'problem: regions'\n", "routing"),
        ("problem: [regions]\n", "routing"),
    ],
)
def test_a_file_is_of_the_problem_that_it_names(tmp_path, text, problem):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert find_problem(str(path), None).name == problem


def test_no_table_of_differences_is_printed_where_there_is_nothing_to_compare(capsys):
    evaluate.main(evaluate.Args(scenario="nominal", policies="sed", streams=1))
    printed = capsys.readouterr().out
    assert "sed" in printed
    assert "difference" not in printed


def test_a_rule_of_a_file_that_fails_ends_with_one_sentence_and_code_2(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def route(self, request, snapshots):\n        return 99\n")
    with pytest.raises(SystemExit) as end:
        evaluate.main(evaluate.Args(scenario="nominal", policies=str(file), streams=1))
    assert end.value.code == 2
    assert capsys.readouterr().err == "evaluate: mine.py: route returned 99 for 3 replicas\n"


@pytest.mark.parametrize("problem", ["routing", "allocation", "regions"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory"),
        ("servers: [1,\n", "is no YAML"),
        ("servers: !!int ''", "is no YAML"),
        ("- one\n", "has no fields"),
        ("", "has no fields"),
    ],
)
def test_a_file_that_is_no_scenario_is_refused_in_a_sentence(problem, text, reason, tmp_path):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=reason) as refused:
        PROBLEMS[problem]().load_scenario(str(path))
    assert "mine.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_not_there_end_with_one_sentence(tmp_path, capsys):
    missing = tmp_path / "missing"
    for arguments in (
        {"scenario": f"{missing}.yaml"},
        {"scenario": "poisson_085", "policies": "sed", "trace": Path(f"{missing}.csv")},
        {"scenario": "poisson_085", "policies": "sed", "trace": tmp_path},
    ):
        with pytest.raises(SystemExit) as end:
            evaluate.main(evaluate.Args(**arguments))
        assert end.value.code == 2
        message = capsys.readouterr().err
        assert message.startswith("evaluate: ")
        assert message.count("\n") == 1
    for scenario in (f"{missing}.yaml", tmp_path / "missing.yml"):
        with pytest.raises(SystemExit, match="No such file"):
            tune_baselines.main(tune_baselines.Args(scenario=str(scenario), out=tmp_path))


def test_studies_of_nothing_are_refused_in_a_sentence(tmp_path):
    for args in (paper.Torta("loads", streams=0), paper.Layouts(layouts=0)):
        with pytest.raises(SystemExit, match=r"^paper: .*0 .*must be at least 1$"):
            paper.main(args)
    with pytest.raises(SystemExit, match="--weightings 0 must be at least 1"):
        paper.main(paper.Fronts(weightings=0))
    with pytest.raises(SystemExit, match="--streams 0 must be at least 1"):
        tune_baselines.main(tune_baselines.Args(scenario="nominal", streams=0, out=tmp_path))


def test_a_malformed_row_is_named_or_skipped_and_counted(tmp_path, capsys):
    path = own_trace(tmp_path, 100, "25.0,-3,10")
    args = dict(scenario="poisson_085", policies="sed", streams=1, trace=path)
    with pytest.raises(SystemExit) as end:
        evaluate.main(evaluate.Args(**args))
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "own.csv" in message
    assert "102" in message
    evaluate.main(evaluate.Args(**args, on_bad_row="skip"))
    assert "1 malformed rows skipped" in capsys.readouterr().out


def test_too_few_requests_for_the_windows_are_an_error(tmp_path, capsys):
    path = own_trace(tmp_path, 10)
    with pytest.raises(SystemExit):
        evaluate.main(evaluate.Args(scenario="poisson_085", policies="sed", trace=path))
    assert "10 requests cannot be cut into 30 streams" in capsys.readouterr().err


@pytest.mark.recorded("azure_code")
def test_the_recorded_test_part_is_used_where_its_file_is_found(tmp_path, capsys):
    out = tmp_path / "rows.json"
    evaluate.main(evaluate.Args(scenario="bursty_serial", policies="least_loaded", json=out))
    assert "1 x 3819 requests, AzureLLMInferenceTrace_code.csv" in capsys.readouterr().out
    loaded, sed = json.loads(out.read_text())["rows"]
    assert sed["stream_count"] == 1
    # Its requests hang together over hundreds: too few blocks for an interval.
    assert loaded["delta_mean_ci_low"] is None
    assert loaded["delta_mean_fraction"] > 0


def test_without_the_file_synthetic_streams_stand_in_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TOKENYARD_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    evaluate.main(evaluate.Args(scenario="bursty_serial", policies="sed", streams=1))
    assert "synthetic: no recorded test part" in capsys.readouterr().out


@pytest.mark.integration
def test_policies_come_out_the_same_from_several_processes(tmp_path):
    args = dict(scenario="poisson_085", policies="random,sed", streams=1)
    evaluate.main(evaluate.Args(**args, json=tmp_path / "one.json"))
    evaluate.main(evaluate.Args(**args, jobs=2, json=tmp_path / "two.json"))
    one, two = (json.loads((tmp_path / f"{n}.json").read_text())["rows"] for n in ("one", "two"))
    assert one == two


@pytest.mark.integration
def test_rows_and_figures_reach_mlflow(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    evaluate.main(
        evaluate.Args(scenario="poisson_085", policies="sed,least_loaded", streams=1, mlflow=True)
    )
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("tokenyard-evaluation")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert "evaluation.json" in {a.path for a in client.list_artifacts(run.info.run_id)}
    images = client.list_artifacts(run.info.run_id, "figures/poisson_085")
    assert len(images) == 7


def test_tuning_writes_rules_that_fit_the_scenario(tmp_path, capsys):
    scenario = tmp_path / "two.yaml"
    scenario.write_text(
        "name: two\ndescription: two servers\nrequests_per_stream: 300\n"
        "servers:\n- {name: a, tokens_per_s: 3000, concurrency: 3}\n"
        "- {name: b, tokens_per_s: 7000, concurrency: 7}\narrivals: {load: 0.8}\n"
    )
    tune_baselines.main(tune_baselines.Args(scenario=str(scenario), streams=2, out=tmp_path))
    rules = json.loads((tmp_path / "two.json").read_text())
    assert sorted(rules["sita_replicas"]) == [0, 1]
    assert rules["scores"]["sed_reserve"] >= rules["scores"]["sed"]
    assert "sed_dump" in capsys.readouterr().out


def test_docs_define_every_key_of_a_row(tmp_path):
    out = tmp_path / "rows.json"
    evaluate.main(evaluate.Args(scenario="poisson_085", policies="sed", streams=1, json=out))
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    keys = {key for key in json.loads(out.read_text())["rows"][0] if not key.startswith("share_")}
    intervals = {key for key in keys if key.endswith(("_ci_low", "_ci_high"))}
    assert all(f"`{key}`" in page for key in keys - intervals)
    for key in intervals:
        stem = key.removesuffix("_ci_low").removesuffix("_ci_high")
        assert f"`{stem}_ci_low/high`" in page or f"`{stem}`" in page

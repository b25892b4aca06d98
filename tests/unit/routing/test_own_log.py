"""Training on a decision log: a world that is not as declared, and a poor policy that served it."""

import functools
import itertools
import uuid
from dataclasses import replace

import numpy as np
import pytest
import tyro
from mlflow import MlflowClient
from rich.console import Console
from unit.serve_builders import marginal_artifact, network_artifact

from pipelines import train
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.decision_record import DecisionRecord
from serve_app.gateway.decision_rows import FORMAT_VERSION
from serve_app.gateway.order import bounded_key
from serve_app.policy.loading import resolve_policy
from serve_app.policy.runner import ReplicaChoice
from tokenyard.routing import log_replay as replay
from tokenyard.routing import own_traffic
from tokenyard.routing.artifact import DEFAULT_RULE, PolicyArtifact, learned_policy
from tokenyard.routing.decision_log import FORMAT_VERSIONS, fleet_of, read_log, windows_of
from tokenyard.routing.log_replay import Twin
from tokenyard.routing.observation import MARGINAL_OTHERS, NUM_MARGINAL_WEIGHTS
from tokenyard.routing.own_traffic import Choice, OwnTraffic, Traffic, logged_traffic
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.run import repeating, run_each
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.routing.types import Decision
from tokenyard.workload.model import load_model

SCENARIO = "conversation_mixed_gpus"
FACTORS = np.array([1.0, 1.3, 0.8, 1.1])
NUM_REQUESTS = 6000
_DECODING = 3
"""Weight on the time of decoding."""


def a_poor_policy():
    """One that minds nobody, and hardly minds how slow a replica decodes."""
    weights = np.zeros(NUM_MARGINAL_WEIGHTS)
    weights[MARGINAL_OTHERS], weights[_DECODING] = -1.0, -0.8
    return marginal_artifact(weights, scenario=SCENARIO, slo_response_s=15.0)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """What a gateway would have logged in a simulated world; declared speeds are wrong in it."""
    policy, rng = learned_policy(a_poor_policy()), np.random.default_rng(0)

    def decide(request, snapshots):
        decision, propensity = policy.decide(request, snapshots), 0.9625
        index = decision.replica
        if rng.random() < 0.05:
            index = int(rng.integers(4))
        if index != decision.replica:
            propensity = 0.0125
        return Decision(index, decision.scores), propensity

    return written(tmp_path_factory.mktemp("log"), decide, "poor@1", FACTORS, NUM_REQUESTS)


def written(folder, decide, label, factors, num_requests, load_factor=1.0):
    """The log of a world whose iterations take `factors` times as long as is declared."""
    world = replay.scaled(load_scenario(SCENARIO), factors)
    placed = []

    def choose(sim, copy):
        request, snapshots = sim.view(copy).request(), sim.view(copy).snapshots()
        decision, propensity = decide(request, snapshots)
        if decision.order_key is not None:
            sim.order_next(copy, decision.order_key)
        placed.append((request, snapshots, decision, propensity))
        return sim.view(copy).offered()[decision.replica]

    rng = stream_rng(5, "evaluation")
    stream = StreamSource(world).sample(num_requests, rng, load_factor)
    (run,) = run_each(world, StreamSet([stream], "log"), [choose])
    writer, out = DecisionLog(folder), run.outcomes
    for number, (request, snapshots, decision, propensity) in enumerate(placed):
        # What is declared is what snapshots tell, whatever the truth is.
        told = tuple(
            replace(
                one, engine=replace(
                    one.engine, iteration_s=one.engine.iteration_s / factor,
                    prefill_token_s=one.engine.prefill_token_s / factor,
                    sequence_s=one.engine.sequence_s / factor,
                    kv_token_s=one.engine.kv_token_s / factor,
                ),
            )
            for one, factor in zip(snapshots, factors, strict=True)
        )  # fmt: skip
        key = bounded_key(
            decision.order_key, request.arrival_s, request.arrival_s, world.max_overtaking_s
        )
        writer.write(
            DecisionRecord(
                decision_id=uuid.uuid4().hex, request_id=str(number), attempt=0,
                time_s=request.arrival_s, service_class="default",
                choice=ReplicaChoice(
                    request, told, label, decision.replica, decision.scores, propensity,
                    explored=propensity < 0.5, decision_us=1.0,
                ),
                pools=("p",) * 4, outcome="stop",
                output_tokens=int(out.output_tokens[number]),
                ttft_s=float(out.first_token_s[number]), response_s=float(out.response_s[number]),
                order_key=key,
            )
        )  # fmt: skip
    writer.close()
    return folder


def test_a_log_read_back_says_what_arrived_where_it_went_and_how_fast(log):
    decisions, digest = read_log(log)
    assert len(decisions) == NUM_REQUESTS
    assert len(digest) == 12
    declared = fleet_of(decisions, load_scenario(SCENARIO), SCENARIO)
    assert declared.num_servers == 4
    twin = replay.fit_speeds(declared, windows_of(decisions, 2))
    by_name = dict(zip(sorted(load_scenario(SCENARIO).server_names), [0, 1, 2, 3], strict=True))
    order = [by_name[name] for name in load_scenario(SCENARIO).server_names]
    # Windows begin with empty replicas, which the world did not.
    assert twin.speed_factors[order] == pytest.approx(FACTORS, rel=0.08)
    assert twin.error_fraction < 0.1


def test_replicas_that_got_no_request_keep_their_declared_speed(tmp_path):
    """As one that came up late, or that was down while the first part was logged."""
    first, second = np.argsort(load_scenario(SCENARIO).server_names)[:2]
    factors = np.ones(4)
    factors[first] = 1.5
    for number, used in enumerate([[first], [first, second]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        turns = itertools.cycle(used)
        decide = lambda *_, turns=turns: (Decision(int(next(turns)), None), 1.0)  # noqa: E731
        decisions, _ = read_log(written(folder, decide, "some@1", factors, 400, 0.2))
        declared = fleet_of(decisions, load_scenario(SCENARIO), SCENARIO)
        twin = replay.fit_speeds(declared, windows_of(decisions, 2))
        # Replicas are in the order of their names.
        assert twin.speed_factors[0] == pytest.approx(1.5, rel=0.1)
        assert (twin.speed_factors[len(used) :] == 1.0).all()


@pytest.mark.parametrize("rule", ["marginal_delay+sjf@60", "marginal_delay+boost@4:2"])
def test_the_log_of_an_ordered_gateway_is_replayed_in_the_order_in_which_it_was_served(
    tmp_path, rule
):
    scenario = load_scenario(SCENARIO)
    rng = np.random.default_rng(0)
    policy = make_policy(rule, PolicyContext(SCENARIO, scenario.slo, rng, 4))
    served = written(
        tmp_path, lambda *asked: (policy.place(*asked), 1.0), "rule@1", np.ones(4), 2000, 1.1
    )
    decisions, _ = read_log(served)
    assert all(one.order_key is not None for one in decisions)
    goes_back = [one.order_key.late_key_s < np.inf for one in decisions]
    assert any(goes_back) == (":" in rule)
    declared = fleet_of(decisions, scenario, SCENARIO)
    (window,) = windows_of(decisions, 1)
    streams = replay.streams_of(declared, [window])

    def replayed(keys):
        (run,) = run_each(declared, streams, [repeating(window.server, keys)])
        return run.outcomes.response_s

    assert replayed(window.order_keys) == pytest.approx(window.response_s, rel=1e-6)
    first_come = replayed(None)
    assert np.mean(np.abs(first_come / window.response_s - 1.0) > 0.1) > 0.1
    # So nothing is left for the speeds to explain: they are what was declared.
    twin = replay.fit_speeds(declared, [window])
    assert twin.error_fraction < 1e-4
    assert twin.speed_factors == pytest.approx(np.ones(4), abs=1e-4)


def rewrite(log, folder, version, without=()):
    """The newest file of a log, as another release would have written it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = sorted(log.glob("decisions-*.parquet"))[-1]
    table = pq.read_table(file).drop_columns(list(without))
    at = table.schema.get_field_index("format_version")
    marks = pa.array([version] * len(table), pa.int64())
    pq.write_table(table.set_column(at, "format_version", marks), folder / file.name)


def test_the_log_of_the_last_release_is_read_and_that_of_another_refused(log, tmp_path):
    assert FORMAT_VERSIONS == (FORMAT_VERSION - 1, FORMAT_VERSION)
    for version in FORMAT_VERSIONS:
        rewrite(log, tmp_path, version)
        assert read_log(tmp_path)[0]
    rewrite(log, tmp_path, FORMAT_VERSION - 1, ["num_sends"])
    assert read_log(tmp_path)[0]
    rewrite(log, tmp_path, FORMAT_VERSION + 1)
    with pytest.raises(ValueError, match="has format version 7; this release reads 5 and 6"):
        read_log(tmp_path)


@pytest.fixture
def small(monkeypatch):
    """Streams and searches that end in seconds."""
    for name, value in {
        "_REQUESTS": 200, "_CHOICE_STREAMS": 5, "_GENERATIONS": 1, "_SEARCHED": (0,),
        "FEWEST_JUDGING": 200,
    }.items():  # fmt: skip
        monkeypatch.setattr(own_traffic, name, value)


def trained(log, *options):
    args = tyro.cli(train.Args, args=["--log", str(log), *map(str, options)])
    return train.train(args, Console(quiet=True))


@pytest.mark.usefixtures("small")
def test_what_served_a_log_is_judged_beside_the_rules_on_the_replicas_of_the_log(log):
    rows = trained(log, "--scenario", SCENARIO, "--minutes", 1e-9, "--now", poor_file(log))
    at_load = {row["policy"]: row for row in rows if row["part"] == "as recorded"}
    poor = f"poor@{a_poor_policy().sha256}"
    assert list(at_load)[:2] == [DEFAULT_RULE, poor]
    assert at_load[poor]["sha256"] == a_poor_policy().sha256
    assert at_load[poor]["delta_mean_ci_low"] > 0
    (best,) = {row["policy"] for row in rows if row["accepted"]}
    assert best != poor
    assert at_load[best]["sha256"] == ""
    assert {row["twin_error_fraction"] for row in rows}.pop() < 0.1
    assert {row["scenario"] for row in rows} == {SCENARIO}


def poor_file(folder):
    path = folder / "poor.npz"
    a_poor_policy().save(path)
    return path


def test_a_log_names_what_decided_in_its_last_part(log, tmp_path, monkeypatch):
    decisions, digest = read_log(log)

    def found(label, fleet, early="round_robin@0"):
        served = [replace(one, policy=label) for one in decisions]
        served[:3500] = [replace(one, policy=early) for one in served[:3500]]
        monkeypatch.setattr(own_traffic, "read_log", lambda *_: (served, digest))
        return logged_traffic(log, fleet)

    by_rule = found("marginal_delay+sjf@60@0123", "mixed")
    assert by_rule.now == Choice("marginal_delay+sjf@60")
    assert by_rule.trace.num_requests == NUM_REQUESTS
    assert by_rule.lineage == {"log_sha256": digest, "served": "marginal_delay+sjf@60@0123"}
    unknown = found("other@0123", "mixed")
    assert unknown.now is None
    assert unknown.remarks == (
        "other@0123, which served the log, is not compared: give its file with --now",
    )
    champion = a_poor_policy()
    monkeypatch.setattr(PolicyArtifact, "champion", lambda *_, **__: (champion, "here"))
    monkeypatch.setattr(own_traffic, "fit_speeds", lambda fleet, _: Twin(fleet, np.ones(4), 0.1))
    scenario = load_scenario(SCENARIO)
    assert found(f"champion@{champion.sha256}", scenario).now.artifact is champion
    assert found("champion@0123", scenario).now is None


@pytest.mark.usefixtures("small")
def test_searches_begin_at_what_decides_only_if_that_is_better_than_the_best_rule(tmp_path):
    trace = load_model("azure_code").generate(900, np.random.default_rng(3), 4.0)
    good = marginal_artifact(np.zeros(NUM_MARGINAL_WEIGHTS), scenario=SCENARIO, slo_response_s=15.0)
    traffic = Traffic(trace, "mixed", Choice("good@1", good))
    own = OwnTraffic(traffic, tmp_path / "mine.json", 5, 0.8)
    score = functools.partial(own._replay._score, count=1, by="score")
    assert own._start(min(own._replay.rules, key=score)).start == (0.0,) * NUM_MARGINAL_WEIGHTS
    own._now = Choice("poor@1", a_poor_policy())
    begun = own._start(max(own._replay.rules, key=score)).start
    assert begun[:NUM_MARGINAL_WEIGHTS] != tuple(a_poor_policy().arrays["weights"])
    assert sum("searches begin there" in one for one in own.remarks) == 1


def test_a_log_in_which_nothing_was_placed_is_refused(log, tmp_path):
    import pyarrow.parquet as pq

    file = sorted(log.glob("decisions-*.parquet"))[-1]
    pq.write_table(pq.read_table(file).slice(0, 0), tmp_path / file.name)
    with pytest.raises(ValueError, match="holds no request that was placed"):
        trained(tmp_path, "--scenario", SCENARIO)


@pytest.mark.usefixtures("small")
def test_a_rule_of_prefixes_that_decides_is_refused_before_anything_is_searched(log, tmp_path):
    """Without prompts it would be replayed as a plain rule under its name."""
    rule = "tuned_vllm_cache_aware+sjf@20"
    with pytest.raises(ValueError, match=r"sjf@20 decides today and goes by prefixes"):
        trained(log, "--fleet", "mixed", "--now", rule)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_what_a_search_made_of_a_log_is_written_and_offered(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(OwnTraffic, "_chosen", lambda *args: args[3][own_traffic.CANDIDATE])
    monkeypatch.setattr(OwnTraffic, "_best_of", lambda self, searched, rule: searched[0])
    out, uri = tmp_path / "better.npz", f"sqlite:///{tmp_path}/mlflow.db"
    rows = trained(log, "--scenario", SCENARIO, "--out", out, "--registry", uri)
    candidate = PolicyArtifact.load(out)
    assert {row["sha256"] for row in rows if row["accepted"]} == {candidate.sha256}
    assert candidate.metadata.scenario == SCENARIO
    made_of = {"trace_sha256", "calibration_sha256", "log_sha256", "served"}
    assert made_of <= candidate.metadata.lineage.keys()
    model = f"tokenyard-routing-{SCENARIO}"
    version = MlflowClient(uri, uri).get_model_version_by_alias(model, "candidate")
    assert version.tags["sha256"] == candidate.sha256
    assert resolve_policy("candidate", SCENARIO, uri).card.sha256 == candidate.sha256
    # There is still no champion: a candidate is not one before it has been on trial.
    assert "registry" not in resolve_policy("champion", SCENARIO, uri).card.source


def test_a_policy_for_other_replicas_is_refused(log):
    path = log / "network.npz"
    network_artifact().save(path)
    with pytest.raises(ValueError, match=r"^network@\w+, which .* is for other replicas"):
        trained(log, "--fleet", "mixed", "--now", path)
    with pytest.raises(ValueError, match="marginal_dely is no rule, and no policy file"):
        trained(log, "--fleet", "mixed", "--now", "marginal_dely")

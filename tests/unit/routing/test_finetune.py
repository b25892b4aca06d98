"""From a decision log to a candidate: a poor champion, a world that is not as declared."""

import itertools
import uuid
from dataclasses import replace

import numpy as np
import pytest
from mlflow import MlflowClient
from rich.console import Console
from unit.serve_builders import marginal_artifact, network_artifact

from pipelines import finetune
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.decision_record import DecisionRecord
from serve_app.gateway.decision_rows import FORMAT_VERSION
from serve_app.gateway.order import bounded_key
from serve_app.policy.loading import resolve_policy
from tokenyard.cross_entropy import FinetuneConfig
from tokenyard.routing import finetune as of_routing
from tokenyard.routing import log_replay as replay
from tokenyard.routing.artifact import PolicyArtifact, learned_policy
from tokenyard.routing.decision_log import FORMAT_VERSIONS, fleet_of, read_log, windows_of
from tokenyard.routing.observation import MARGINAL_OTHERS, NUM_MARGINAL_WEIGHTS
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.policies.tuned import FleetRules
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.run import repeating, run_each
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.routing.types import Decision

SCENARIO = "conversation_mixed_gpus"
FACTORS = np.array([1.0, 1.3, 0.8, 1.1])
NUM_REQUESTS = 6000
_DECODING = 3
"""Weight on the time of decoding."""


def a_poor_champion():
    """One that minds nobody, and hardly minds how slow a replica decodes."""
    weights = np.zeros(NUM_MARGINAL_WEIGHTS)
    weights[MARGINAL_OTHERS], weights[_DECODING] = -1.0, -0.8
    return marginal_artifact(weights, scenario=SCENARIO, slo_response_s=15.0)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """What a gateway would have logged in a simulated world; declared speeds are wrong in it."""
    policy, rng = learned_policy(a_poor_champion()), np.random.default_rng(0)

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
        request, snapshots = sim.request(copy), sim.snapshots(copy)
        decision, propensity = decide(request, snapshots)
        if decision.order_key is not None:
            sim.order_next(copy, decision.order_key)
        placed.append((request, snapshots, decision, propensity))
        return sim.offered(copy)[decision.replica]

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
                time_s=request.arrival_s, policy=label, service_class="default",
                request=request, snapshots=told, pools=("p",) * 4, scores=decision.scores,
                index=decision.replica, propensity=propensity, explored=propensity < 0.5,
                fallback_reason=None, decision_us=1.0, outcome="stop",
                output_tokens=int(out.output_tokens[number]),
                ttft_s=float(out.first_token_s[number]), response_s=float(out.response_s[number]),
                order_key=key,
            )
        )  # fmt: skip
    writer.close()
    return folder


def test_a_champion_that_looks_at_queues_would_decide_as_it_did(tmp_path):
    """What waited is not logged, and found again from where requests went."""
    plain = marginal_artifact(FleetRules().in_order_weights, scenario=SCENARIO, slo_response_s=15.0)
    champion = replace(plain, arrays={**plain.arrays, "order": np.array([20.0, 0.0, 0.0, 0.0])})
    policy = learned_policy(champion)
    assert policy.sees_queues
    folder = written(
        tmp_path, lambda *seen: (policy.place(*seen), 1.0), "queues@1", np.ones(4), 2000, 1.15
    )
    decisions, _ = read_log(folder)
    went = [one.index for one in decisions]
    weights = champion.arrays["weights"]
    assert (of_routing.Behaviour(decisions, champion).choices(weights) == went).mean() > 0.99
    assert (of_routing.Behaviour(decisions, plain).choices(weights) == went).mean() < 0.95
    some = of_routing.Behaviour(decisions, champion, every=7)
    np.testing.assert_array_equal(some.choices(weights), went[::7])


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


def test_a_log_in_which_nothing_was_placed_is_refused(log, tmp_path):
    import pyarrow.parquet as pq

    file = sorted(log.glob("decisions-*.parquet"))[-1]
    pq.write_table(pq.read_table(file).slice(0, 0), tmp_path / file.name)
    with pytest.raises(ValueError, match="holds no request that was placed"):
        finetune.finetune(finetune.Args(log=tmp_path, scenario=SCENARIO), Console(quiet=True))


def test_a_log_that_a_rule_of_prefixes_served_is_refused_before_anything_is_searched(
    tmp_path, monkeypatch
):
    """Without prompts it would be replayed as a plain rule under its name."""
    monkeypatch.setattr(of_routing, "search", lambda *_: pytest.fail("it searched"))
    turns = itertools.cycle(range(4))
    decide = lambda *_: (Decision(next(turns), None), 1.0)  # noqa: E731
    rule = "tuned_vllm_cache_aware+sjf@20"
    decisions, _ = read_log(written(tmp_path, decide, f"{rule}@0a1b", np.ones(4), 400, 0.5))
    scenario = load_scenario(SCENARIO)
    with pytest.raises(ValueError, match="sjf@20, which goes by prefixes, served the log"):
        of_routing.finetune(a_poor_champion(), decisions, scenario, FinetuneConfig(), {})


@pytest.mark.slow
def test_a_poor_champion_is_improved_and_the_candidate_offered(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    champion, out = tmp_path / "poor.npz", tmp_path / "better.npz"
    a_poor_champion().save(champion)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    args = finetune.Args(
        log=log, scenario=SCENARIO, champion=champion, out=out, registry=uri, windows=10,
        held_out=0.6, generations=6, population=16, spread=0.4, behaviour=0.01,
    )  # fmt: skip
    row = finetune.finetune(args, Console(quiet=True))
    assert row["offered"] is True, row
    assert row["delta_mean_ci_high"] < 0
    candidate = PolicyArtifact.load(out)
    lineage = candidate.metadata.lineage
    assert lineage["champion_sha256"] == a_poor_champion().sha256
    assert {"trace_sha256", "calibration_sha256", "sweep_run"} <= lineage.keys()
    model = f"tokenyard-routing-{SCENARIO}"
    version = MlflowClient(uri, uri).get_model_version_by_alias(model, "candidate")
    assert version.tags["sha256"] == candidate.sha256
    assert resolve_policy("candidate", SCENARIO, uri).card.sha256 == candidate.sha256
    # There is still no champion: a candidate is not one before it has been on trial.
    assert "registry" not in resolve_policy("champion", SCENARIO, uri).card.source


def test_a_candidate_has_to_beat_the_rule_that_was_served_and_not_only_the_champion(
    log, monkeypatch
):
    champion, scenario = a_poor_champion(), load_scenario(SCENARIO)
    decisions, _ = read_log(log)
    twin = replay.fit_speeds(fleet_of(decisions, scenario, SCENARIO), windows_of(decisions, 10)[:4])
    # Least marginal delay: better than the champion, and than no good rule.
    better = np.zeros(NUM_MARGINAL_WEIGHTS)
    monkeypatch.setattr(of_routing, "search", lambda *_: (better, [0.9]))
    monkeypatch.setattr(of_routing.replay, "fit_speeds", lambda *_: twin)

    def found(label):
        served = [replace(one, policy=label) for one in decisions]
        config = FinetuneConfig(windows=10, held_out=0.6)
        return of_routing.finetune(champion, served, scenario, config, {})

    by_champion = found(f"poor@{champion.sha256}")
    assert by_champion.objection is None
    assert "with the champion, which was served" in by_champion.remark
    row = by_champion.row()
    assert row["delta_served_ci_high"] == row["delta_mean_ci_high"] < 0

    by_rule = found("tuned_marginal_delay+wspt@0123")
    assert by_rule.row()["delta_mean_ci_high"] == row["delta_mean_ci_high"]
    assert by_rule.row()["delta_served_ci_high"] > 0
    assert "the rule tuned_marginal_delay+wspt, which was served" in by_rule.objection

    by_poor_rule = found("round_robin@0123")
    assert by_poor_rule.objection is None
    assert by_poor_rule.row()["delta_served_mean_fraction"] < 0

    # What cannot be run here is not compared with, and that is said.
    unknown = found("other@0123")
    assert unknown.objection is None
    assert "and not with other@0123, which was served" in unknown.remark


def test_what_cannot_be_continued_is_refused_in_one_sentence(log, tmp_path):
    console = Console(quiet=True)
    with pytest.raises(ValueError, match="no decisions"):
        finetune.finetune(finetune.Args(log=tmp_path, scenario=SCENARIO), console)
    for windows in (0, -1):
        with pytest.raises(ValueError, match=f"{windows} windows must be at least 1"):
            finetune.finetune(finetune.Args(log=log, scenario=SCENARIO, windows=windows), console)
    path = tmp_path / "network.npz"
    network_artifact().save(path)
    with pytest.raises(ValueError, match="of kind 'mlp'"):
        finetune.finetune(finetune.Args(log=log, scenario=SCENARIO, champion=path), console)

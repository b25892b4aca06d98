"""A gateway without pools: what is asked, what is answered, what is refused."""

import math
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from unit.serve_builders import (
    a_baseline,
    a_body,
    a_deciding_api,
    a_faulty_policy,
    a_manager,
    a_snapshot,
    a_trained_policy,
    an_engine,
    call,
    linear_artifact,
    marginal_artifact,
    network_artifact,
    three_snapshots,
)

from serve_app.cluster import load_cluster
from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.gateway import Gateway
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.decide_schema import MAX_BODY_BYTES, MAX_REPLICAS
from tokenyard.routing.artifact import learned_policy
from tokenyard.routing.decision_log import read_log
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request

NOW_S = 1.7e9


def an_api(loaded=None, **options):
    return a_deciding_api(loaded, clock_s=lambda: NOW_S, **options)


def route(body, loaded=None):
    return call(an_api(loaded), "POST", "/v1/route", body)


def refusal(body, loaded=None):
    status, answer = route(body, loaded)
    assert 400 <= status < 500
    assert set(answer) == {"detail"}
    assert "\n" not in answer["detail"]
    return answer["detail"]


def test_the_answer_names_the_replica_and_the_cost_of_every_candidate():
    status, answer = route(a_body(predicted_total_tokens=2000.0))
    assert status == 200
    assert (answer["replica_id"], answer["index"]) == ("middling", 1)
    costs_s = [6000 / 3000 + 2000 / 3000, 1000 / 5000 + 2000 / 5000, 9000 / 7000 + 2000 / 7000]
    assert answer["scores"] == pytest.approx([cost_s / 2.0 for cost_s in costs_s])
    assert answer["policy"]["source"] == "a test"
    assert answer["decision_us"] > 0
    assert not answer["fallback"]
    assert not answer["explored"]


def test_a_policy_that_does_not_score_answers_null_for_the_costs():
    assert route(a_body(), a_baseline("round_robin"))[1]["scores"] is None


def test_a_missing_prediction_is_filled_in_by_the_policys_own_predictor():
    assert route(a_body(context_tokens=800))[1]["predicted_total_tokens"] == 810
    assert route(a_body(context_tokens=2000))[1]["predicted_total_tokens"] == 2050
    blind = a_trained_policy(linear_artifact(output_length="none", predictor=None))
    assert route(a_body(context_tokens=2000), blind)[1]["predicted_total_tokens"] == 2000
    by_scenario = route(a_body(context_tokens=2000), a_baseline("sed"))[1]
    assert by_scenario["predicted_total_tokens"] > 2000


def test_the_server_decides_as_the_policy_does_in_evaluation_over_a_whole_stream():
    artifact = network_artifact()
    api = an_api(a_trained_policy(artifact))
    policy = learned_policy(artifact)
    rng = np.random.default_rng(1)
    for arrival_s in range(30):
        total = float(rng.integers(100, 9000))
        loads = rng.integers(0, 20_000, size=3)
        snapshots = [
            {**s, "tokens_in_flight": float(load)}
            for s, load in zip(three_snapshots(), loads, strict=True)
        ]
        asked = a_body(
            snapshots, context_tokens=90, predicted_total_tokens=total, arrival_s=float(arrival_s)
        )
        answer = call(api, "POST", "/v1/route", asked)[1]
        decided = policy.decide(
            Request(float(arrival_s), 90, total), [ReplicaSnapshot(**s) for s in snapshots]
        )
        assert answer["index"] == decided.replica
        assert answer["scores"] == pytest.approx(decided.scores, rel=1e-12)


def test_a_policy_for_engines_is_told_of_them_and_decides_as_in_evaluation():
    rng = np.random.default_rng(3)
    artifact = marginal_artifact(rng.normal(size=NUM_MARGINAL_WEIGHTS))
    engines = [
        an_engine(kv_used_fraction=0.9, output_in_flight_tokens=9000.0),
        an_engine(iteration_s=0.05, match_tokens=640),
        an_engine(prefill_in_flight_tokens=4000.0),
    ]
    some = [{**s, "engine": e} for s, e in zip(three_snapshots(), engines, strict=True)]
    asked = a_body(some, context_tokens=900, predicted_total_tokens=1000.0)
    answer = call(an_api(a_trained_policy(artifact)), "POST", "/v1/route", asked)[1]
    snapshots = [ReplicaSnapshot(**{**s, "engine": EngineSnapshot(**s["engine"])}) for s in some]
    decided = learned_policy(artifact).decide(Request(0.0, 900, 1000.0), snapshots)
    assert answer["index"] == decided.replica
    assert answer["scores"] == pytest.approx(decided.scores, rel=1e-12)
    assert not answer["fallback"]


def test_a_policy_for_engines_refuses_snapshots_that_tell_nothing_of_them():
    status, answer = route(a_body(), a_trained_policy(marginal_artifact()))
    assert status == 422
    assert "give `engine` in the snapshot of 'slow'" in answer["detail"]


def test_a_network_for_servers_refuses_snapshots_that_tell_of_an_engine():
    some = [{**snapshot, "engine": an_engine()} for snapshot in three_snapshots()]
    status, answer = route(a_body(some), a_trained_policy(network_artifact()))
    assert status == 422
    assert "leave `engine` out of the snapshot of 'slow'" in answer["detail"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"match_tokens": 2001}, "more than the prompt's 2000 tokens"),
        ({"iteration_s": 0.0}, "snapshots[0].engine.iteration_s should be greater than 0"),
        ({"kv_used_fraction": 1.5}, "engine.kv_used_fraction should be less than or equal to 1"),
        ({"batch": 3}, "snapshots[0].engine.batch is not a known field"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_with_the_reason(change, reason):
    status, answer = route(a_body([a_snapshot(engine=an_engine(**change))]))
    assert status == 422
    assert reason in answer["detail"]


def test_a_wait_that_is_given_counts_instead_of_the_tokens_in_flight():
    snapshots = [a_snapshot("a", num_running=1, tokens_in_flight=9000.0, predicted_wait_s=0.0)]
    snapshots.append(a_snapshot("b", num_running=1, tokens_in_flight=1.0, predicted_wait_s=5.0))
    policy = a_trained_policy(linear_artifact(num_replicas=2))
    assert route(a_body(snapshots), policy)[1]["replica_id"] == "a"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens_per_s": -5.0}, "snapshots[0].tokens_per_s should be greater than"),
        ({"tokens_per_s": math.nan}, "snapshots[0].tokens_per_s should be a finite number"),
        ({"tokens_per_s": 0.0}, "got 0.0"),
        ({"num_waiting": -1}, "snapshots[0].num_waiting should be greater than or equal to 0"),
        ({"num_running": 1.5}, "snapshots[0].num_running should be a valid integer, got 1.5"),
        ({"num_running": True}, "snapshots[0].num_running should be a valid integer, got True"),
        ({"num_slots": "4"}, "snapshots[0].num_slots should be a valid integer, got '4'"),
        ({"tokens_in_flight": math.inf}, "snapshots[0].tokens_in_flight should be"),
        ({"mean_response_s": -1.0}, "snapshots[0].mean_response_s should be greater"),
        ({"replica_id": ""}, "snapshots[0].replica_id"),
        ({"queue": 3}, "snapshots[0].queue is not a known field"),
    ],
)
def test_a_bad_snapshot_is_refused_by_naming_the_field_and_the_value(change, reason):
    assert reason in refusal(a_body([a_snapshot(**change)]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"context_tokens": -1}, "request.context_tokens should be greater than or equal to 0"),
        ({"predicted_total_tokens": math.nan}, "request.predicted_total_tokens should be a finite"),
        ({"predicted_total_tokens": 100.0}, "100 is less than context_tokens 2000"),
        ({"arrival_s": math.inf}, "request.arrival_s should be"),
        ({"prompt": "hello"}, "request.prompt is not a known field"),
    ],
)
def test_a_bad_request_is_refused_by_naming_the_field_and_the_value(change, reason):
    assert reason in refusal(a_body(**change))


def test_other_bad_bodies_are_refused_with_their_reason():
    body = a_body()
    assert "snapshots should have at least 1 item" in refusal({**body, "snapshots": []})
    too_many = [a_snapshot(str(i)) for i in range(MAX_REPLICAS + 1)]
    assert f"snapshots should have at most {MAX_REPLICAS} items" in refusal(a_body(too_many))
    twice = [a_snapshot("a"), a_snapshot("a")]
    assert refusal(a_body(twice)) == "body: replica_id 'a' appears more than once"
    assert refusal({"snapshots": body["snapshots"]}) == "request is missing"
    assert refusal({**body, "request": 3}) == "request must be a JSON object"
    assert refusal(b"[]").startswith("body must be a JSON object")
    assert refusal(b"") == "body is missing"
    assert "body is not JSON: Expecting value at character 11" in refusal(b'{"request":')


def test_a_second_problem_is_counted_and_the_first_one_told():
    reason = refusal(a_body([a_snapshot(num_waiting=-1, num_running=-1)]))
    assert reason.startswith("snapshots[0].num_waiting")
    assert reason.endswith("(and 1 more problem)")


def test_a_policy_trained_on_three_replicas_refuses_another_number():
    loaded = a_trained_policy(network_artifact())
    reason = refusal(a_body([a_snapshot()]), loaded)
    assert reason == "policy 'test' decides between 3 replicas, got 1 snapshots"


def test_a_body_over_the_limit_is_refused_before_it_is_parsed():
    status, answer = route(b"[" * (MAX_BODY_BYTES + 2))
    assert status == 413
    assert answer == {"detail": f"body is larger than {MAX_BODY_BYTES} bytes"}


def test_a_body_of_another_content_type_is_told_which_one_is_read():
    headers = [(b"content-type", b"application/x-www-form-urlencoded")]
    status, answer = call(an_api(), "POST", "/v1/route", a_body(), headers)
    assert status == 422
    assert answer["detail"].endswith("content-type application/json")


def test_refused_requests_are_not_decisions():
    api = an_api()
    call(api, "POST", "/v1/route", a_body(context_tokens=-1))
    call(api, "POST", "/v1/route", a_body())
    assert call(api, "GET", "/v1/policy")[1]["num_decisions"] == 1


def test_the_policy_page_says_what_is_served_and_where_it_is_from():
    artifact = linear_artifact(metrics={"score": -1.5}, lineage={"git_sha": "abc"})
    answer = call(an_api(a_trained_policy(artifact)), "GET", "/v1/policy")[1]
    assert answer["kind"] == "marginal"
    assert answer["trainer"] == "policy_search"
    assert answer["scenario"] == "poisson_085"
    assert answer["sha256"] == artifact.sha256
    assert answer["metrics"] == {"score": -1.5}
    assert answer["lineage"] == {"git_sha": "abc"}
    assert answer["startup_fallback"] is None


def test_a_policy_that_fails_is_answered_for_by_sed_and_counted():
    api = an_api(a_faulty_policy(lambda: 1 / 0))
    status, answer = call(api, "POST", "/v1/route", a_body())
    assert status == 200
    assert answer["fallback"]
    assert answer["replica_id"] == "middling"
    assert call(api, "GET", "/v1/policy")[1]["num_fallbacks"] == 1


def test_what_has_no_pools_has_no_models_and_decides_about_regions():
    api = an_api()
    assert call(api, "GET", "/healthz") == (200, {"status": "ok", "replicas": 0})
    paths = set(call(api, "GET", "/openapi.json")[1]["paths"])
    assert {"/v1/route", "/v1/policy", "/v1/policies", "/v1/regions", "/metrics"} <= paths
    assert not {"/v1/completions", "/v1/chat/completions", "/v1/models"} & paths
    assert call(api, "GET", "/v1/route")[0] == 405
    assert call(api, "GET", "/v1/regions")[1]["num_decisions"] == 0


def test_every_answer_has_its_row_in_the_log_with_the_propensity(tmp_path):
    log = DecisionLog(tmp_path)
    api = an_api(log=log)
    answers = [call(api, "POST", "/v1/route", a_body())[1] for _ in range(20)]
    log.close()
    (file,) = tmp_path.glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [row["decision_id"] for row in rows] == [one["decision_id"] for one in answers]
    assert [[one["score"] for one in row["candidates"]] for row in rows] == [
        one["scores"] for one in answers
    ]
    assert {(row["outcome"], row["propensity"]) for row in rows} == {("unknown", 1.0)}
    decisions, _ = read_log(tmp_path)
    assert [one.replica_id for one in decisions] == [one["replica_id"] for one in answers]
    assert decisions[0].snapshots[0].engine is None


def an_api_in_an_experiment(mode, policy, prepared=None, **options):
    manager = a_manager()
    manager.start_experiment(policy, mode, 0.5, prepared=prepared)
    gateway = Gateway(load_cluster("none"), manager, {}, **options)
    return create_gateway_api(gateway, EstimatingTokenizer(), Access(None)), manager


def test_a_canary_decides_for_its_share_of_questions_and_their_rows_say_so(tmp_path):
    log = DecisionLog(tmp_path)
    canary = a_faulty_policy(lambda: 2)
    api, manager = an_api_in_an_experiment("canary", "faulty", canary, log=log)
    answers = [call(api, "POST", "/v1/route", a_body())[1] for _ in range(60)]
    manager.stop()
    log.close()
    (file,) = tmp_path.glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert 10 < sum(row["arm"] == "canary" for row in rows) < 50
    for row, answer in zip(rows, answers, strict=True):
        is_canary = row["arm"] == "canary"
        assert (answer["policy"]["name"] == "faulty") == is_canary
        assert row["policy"].startswith("faulty@") == is_canary
        assert row["index"] == (2 if is_canary else 1)


def test_a_shadow_is_asked_about_questions_where_nothing_else_is_served():
    api, manager = an_api_in_an_experiment("shadow", "sed")
    for _ in range(20):
        assert call(api, "POST", "/v1/route", a_body())[1]["replica_id"] == "middling"
    shadow = manager.experiment.shadow
    deadline_s = time.monotonic() + 10.0
    while shadow.num_asked + shadow.num_failed + shadow.num_left_out < 20:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    manager.stop()
    assert shadow.num_agreed == shadow.num_asked > 0

"""The main chain: a sweep of two problems, the registry, Ray Serve, sharded engines, a lineage."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from integration.served_sweeps import FOLDER, NAMES, write_scenarios
from mlflow import MlflowClient
from ray import serve
from unit.engine_builders import a_tiny_llama
from unit.tiny_tokenizer import save_tiny_tokenizer

from pipelines import sweep
from serve_app.app import GatewayOptions, build_gateway, find_cluster, load_policy
from serve_app.http.free_port import free_port
from tokenyard import registry
from tokenyard.problem import PROBLEMS
from tokenyard.routing import artifact

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parents[2]
PROFILE = {
    "iteration_s": 0.01, "prefill_token_s": 1e-5, "sequence_s": 0.0005, "max_batch": 8,
    "token_budget": 256, "kv_capacity_tokens": 4_000,
}  # fmt: skip
BODY = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def uri(folder):
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture(scope="module")
def swept(folder, own_ray):
    """What the sweep has registered, by problem."""
    out = folder / "swept.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv(FOLDER, str(folder))
        patch.setenv("PYTHONPATH", str(TESTS), prepend=":")
        # So few steps of training do not beat a rule that orders.
        patch.setattr(artifact, "DEFAULT_RULE", "sed")
        args = sweep.Args("integration.served_sweeps:chain", "it", storage=str(folder), json=out)
        with pytest.raises(SystemExit) as end:
            sweep.main(args)
        assert end.value.code == 0
    return {one["problem"]: one for one in json.loads(out.read_text())["registrations"]}


def cluster_file(folder):
    """Two sharded engines: two pipeline stages, and an allocated pool of three ranks."""
    model = folder / "model"
    if not model.exists():
        # The heads of the scenario's model: three ranks can share them, and two cannot.
        heads = {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 72,
            "intermediate_size": 192,
        }
        a_tiny_llama(model, **heads, vocab_size=258)
        save_tiny_tokenizer(model)
    config = {
        "model": str(model), "device": "cpu", "rank_cpus": 0.05, "max_batch": 8,
        "kv_bytes": 4 << 20, "max_model_tokens": 256, "start_timeout_s": 300,
    }  # fmt: skip
    paths = write_scenarios(folder)
    pool = {"kind": "own", "replica_cpus": 0.05, "profile": PROFILE}
    template = {key: pool[key] for key in ("replica_cpus", "profile")}
    cluster = {
        "name": "own", "description": "A test.", "served_model": "tiny", "explore_fraction": 0,
        "scenario": str(paths["routing"]), "circuit_breaker": {"budget_s": 0.25},
        "pools": [pool | {"name": "staged", "config": config | {"pipeline_parallel": 2}}],
        "allocation": {
            "scenario": str(paths["allocation"]), "policy": "autoscaler_70",
            "start": {"parallelism": "model", "num_gpus": 3}, "shrink_after_s": 0,
            "template": template | {"name": "sharded", "config": config},
        },
    }  # fmt: skip
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return str(path)


@pytest.fixture(scope="module")
def url(folder, uri, swept, request):
    """A gateway that serves what was swept, whoever is champion."""
    request.getfixturevalue("ray_cluster")
    port = free_port()
    try:
        serve.start(proxy_location="Disabled")
        options = GatewayOptions(
            cluster=cluster_file(folder), policy="candidate", registry=uri, local_admin=True,
            decision_log=folder / "log", port=port,
        )  # fmt: skip
        serve.run(build_gateway(options), name="swept")
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: not get(address, "/v1/allocation")["changing"])
        wait_until(lambda: get(address, "/healthz")["replicas"] == 2)
        yield address
    finally:
        serve.shutdown()


def wait_until(condition, timeout_s=300.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.2)


def get(url, path):
    answer = httpx.get(f"{url}{path}", timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(url, path, **body):
    answer = httpx.post(f"{url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logged(log):
    """First row of the decision log."""
    wait_until(lambda: list(log.glob("decisions-*.parquet")), 30)
    (row, *_) = pq.read_table(sorted(log.glob("decisions-*.parquet"))[0]).to_pylist()
    return row


@contextmanager
def requests_going_on(url):
    """Statuses of what two clients are answered, again and again."""
    statuses, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            statuses.append(httpx.post(f"{url}/v1/completions", json=BODY, timeout=120).status_code)

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield statuses
    finally:
        stop.set()
        for client in clients:
            client.join()


def ranks_reserved():
    """Ranks that Ray holds room for: bundles of a replica but its own process's."""
    groups = ray.util.placement_group_table().values()
    return sum(len(one["bundles"]) - 1 for one in groups if one["state"] == "CREATED")


def ancestors(client, run_id):
    """A run, the run that it is part of, and so on."""
    runs = [client.get_run(run_id)]
    while above := runs[-1].data.tags.get("mlflow.parentRunId"):
        runs.append(client.get_run(above))
    return runs


def test_two_problems_are_swept_served_by_hash_and_known_by_one_lineage(url, uri, folder, swept):
    routing, allocation = swept["routing"], swept["allocation"]
    # What beats its rivals is champion; what does not stays a candidate.
    assert (routing["alias"], allocation["alias"]) == ("champion", "candidate")
    for problem, name in NAMES.items():
        model, alias = swept[problem]["model"], swept[problem]["alias"]
        assert model == f"tokenyard-{problem}-own_{name}"
        found = registry.mlflow_lookup(uri, alias)(model)
        assert PROBLEMS[problem]().load_artifact(found.path).sha256 == swept[problem]["sha256"]

    # The gateway has both, and switches by name.
    for path, made in (("/v1/policy", routing), ("/v1/allocation", allocation)):
        served = get(url, path)
        assert (served["sha256"], served["mlflow_run"]) == (made["sha256"], made["run_id"])
        assert served["source"] == f"registry {made['model']}@candidate"
        assert served["registry_error"] is None
    champion = post(url, "/v1/policy", policy="champion")
    assert champion["source"] == f"registry {routing['model']}@champion"
    assert champion["sha256"] == routing["sha256"]
    rule = post(url, "/v1/allocation", policy="autoscaler_70")
    assert (rule["source"], rule["sha256"], rule["mlflow_run"]) == ("built in", None, None)
    assert post(url, "/v1/allocation", policy="candidate")["sha256"] == allocation["sha256"]

    # The champion places a request on one of two sharded engines.
    post(url, "/v1/completions", **BODY)
    row = logged(folder / "log")
    assert row["policy"] == f"champion@{routing['sha256']}"
    assert row["fallback_reason"] is None
    assert {one["pool"].split("-")[0] for one in row["candidates"]} == {"staged", "sharded"}

    # The plan changes under load: three ranks of one engine become one, and all are answered.
    assert ranks_reserved() == 2 + 3
    with requests_going_on(url) as statuses:
        post(url, "/v1/allocation", plan={"parallelism": "data", "num_gpus": 1})
        wait_until(lambda: not get(url, "/v1/allocation")["changing"])
        asked = len(statuses)
        wait_until(lambda: len(statuses) > asked + 5)
    assert set(statuses) == {200}
    state = get(url, "/v1/allocation")
    assert state["changes"][0]["outcome"] == "done"
    assert (state["plan"]["parallelism"], state["by_hand"]) == ("data", True)
    assert ranks_reserved() == 2 + 1

    # Whatever decided was made by the same sweep.
    client = MlflowClient(uri)
    lines = {
        "routing": ancestors(client, row["mlflow_run"]),
        "allocation": ancestors(client, state["mlflow_run"]),
    }
    for problem, (trial, of_problem, sweep_run) in lines.items():
        assert trial.info.run_id == swept[problem]["run_id"]
        assert of_problem.data.tags["registered_sha256"] == swept[problem]["sha256"]
        assert sweep_run.data.tags[f"{problem}.registered_sha256"] == swept[problem]["sha256"]
        assert trial.info.status == of_problem.info.status == sweep_run.info.status == "FINISHED"
    assert len({line[-1].info.run_id for line in lines.values()}) == 1


def test_without_the_registry_what_ships_is_found_and_nothing_is_made(folder, swept, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/gone.db")
    options = GatewayOptions(cluster=cluster_file(folder))
    card = load_policy(find_cluster(options), options).card
    assert card.source == f"the rule {artifact.DEFAULT_RULE}"
    assert card.registry_error.endswith("there is no such file")
    assert not (folder / "gone.db").exists()

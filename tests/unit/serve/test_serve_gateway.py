"""The gateway and its HTTP over backends that do what they are told."""

import asyncio
import json
import math
from importlib.resources import files

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from unit.engine_answers import relay

from serve_app.cluster import Cluster, EngineProfile
from serve_app.engines.base import EngineStatus
from serve_app.engines.texts import TextChunk
from serve_app.gateway import attempts
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import ReplicaFailed, ReplicaFull, ReplicaTooSmall
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.policy.manager import PolicyManager

PROFILE = EngineProfile(
    iteration_s=0.01, prefill_token_s=1e-4, sequence_s=1e-3, max_batch=4, token_budget=64,
    kv_capacity_tokens=1000.0,
)  # fmt: skip
OWN = {"model": "none"}


def a_cluster(pools=("a", "b"), **fields):
    return cluster_of([{"name": name, "kind": "own", "config": OWN} for name in pools], **fields)


def cluster_of(pools, **fields):
    known = {
        "name": "t",
        "description": "t",
        "served_model": "m",
        "explore_fraction": 0.0,
        "classes": [
            {"name": "default", "response_s": 10.0},
            {"name": "batch", "response_s": 60.0, "admitted_fraction": 0.5},
        ],
        "limits": {"max_in_flight": 4, "max_prompt_tokens": 100, "max_output_tokens": 50},
        "pools": pools,
    }
    return Cluster.model_validate(known | fields)


class Letters:
    """A tokenizer whose tokens are characters."""

    vocab_size = 1000

    def encode(self, text):
        return [ord(one) for one in text]

    def encode_chat(self, messages):
        return self.encode("".join(one["content"] for one in messages))

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


class FakePool:
    """One replica that answers "ok" in two pieces, unless `script` says otherwise."""

    max_model_tokens = 200

    def __init__(self, name):
        self.name = name
        self.replica_id = f"{name}-0"
        self.script = []
        self.requests = []
        self.num_cancelled = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.there = True
        self.num_waiting = 0

    def refresh(self, table, now_s):
        if self.there:
            replica = table.add(self.replica_id, self.name, PROFILE, 0, now_s)
            replica.publish(EngineStatus(self.num_waiting, 0, 0.0, now_s))
        table.keep(self.name, [self.replica_id] if self.there else [])

    def ray_replicas(self):
        return ()

    def by_our_clock(self, replica_id, status, now_s):
        return status

    def host_loads(self):
        return {self.replica_id: {"host_cpu_ratio": 0.5}}

    takes_any = False

    async def answer(self, replica_id, attempt):
        assert replica_id == self.replica_id
        await relay(self.stream, attempt)

    async def stream(self, generation):
        self.requests.append(generation)
        step = self.script.pop(0) if self.script else None
        if step is not None and step[0] == 0:
            raise step[1]
        try:
            yield TextChunk("o", 1)
            await self.may_go_on.wait()
            if step is not None:
                raise step[1]
            yield TextChunk("k", 2, "stop")
        except (GeneratorExit, asyncio.CancelledError):
            self.num_cancelled += 1
            raise


LOCAL = "http://localhost:8000"


def check(test, token=None, log=None, admin_token=None, local_admin=True, **cluster_fields):
    """Run a coroutine that gets a client, the pools and the gateway."""

    async def run():
        cluster = a_cluster(**cluster_fields)
        manager = PolicyManager(
            cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
        )
        manager.switch(cluster.policy)
        pools = {pool.name: FakePool(pool.name) for pool in cluster.pools}
        gateway = Gateway(cluster, manager, pools, log=log)
        api = create_gateway_api(gateway, Letters(), Access(token, admin_token, local_admin))
        transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            try:
                await test(client, pools, gateway)
            finally:
                manager.stop()

    asyncio.run(run())


def a_body(**fields):
    return {"model": "m", "prompt": "hello", "max_tokens": 8, **fields}


def events_of(text):
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found.pop() == "[DONE]"
    return [json.loads(one) for one in found]


def test_a_completion_is_answered_whole_and_streamed_with_its_usage():
    async def test(client, pools, gateway):
        answer = (await client.post("/v1/completions", json=a_body())).json()
        assert answer["choices"][0] == {"index": 0, "text": "ok", "finish_reason": "stop"}
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        options = {"include_usage": True}
        body = a_body(stream=True, stream_options=options)
        streamed = await client.post("/v1/completions", json=body)
        *pieces, last = events_of(streamed.text)
        assert [one["choices"][0]["text"] for one in pieces] == ["o", "k"]
        assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
        assert last["usage"]["completion_tokens"] == 2
        assert gateway.in_flight == 0
        assert gateway.table.replicas["a-0"].in_flight.count == 0

    check(test)


def test_a_chat_takes_parts_and_says_who_speaks():
    async def test(client, pools, gateway):
        parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
        body = {
            "model": "m", "messages": [{"role": "user", "content": parts}], "seed": 3,
            "temperature": 0.5, "top_p": 0.9, "stop": "x", "max_completion_tokens": 7,
        }  # fmt: skip
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "ok"}
        (request,) = pools["a"].requests + pools["b"].requests
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (
            7, 0.5, 0.9, 3,
        )  # fmt: skip
        assert (request.stops, request.token_ids) == (("x",), list(map(ord, "hello")))
        streamed = await client.post("/v1/chat/completions", json=body | {"stream": True})
        assert events_of(streamed.text)[0]["choices"][0]["delta"] == {
            "role": "assistant", "content": "o",
        }  # fmt: skip

    check(test)


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"model": "other"}, 404, "model 'other' is not served here"),
        ({"max_tokens": 51}, 400, "max_tokens 51 is more than 50"),
        ({"prompt": "x" * 101}, 400, "the prompt has 101 tokens; at most 100 are taken"),
        ({"temperature": -1}, 400, "temperature should be greater than or equal to 0, got -1"),
        ({"temperature": 1e400}, 400, "temperature"),
        ({"n": 2}, 400, "n is not supported"),
        ({"bogus": 1}, 400, "bogus is not a known field"),
        ({"max_tokens": "many"}, 400, "max_tokens should be a valid integer"),
        ({"service_tier": "gold"}, 400, "service_tier 'gold' is not known"),
        ({"stop": [""]}, 400, "stop"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [5, 1000]}, 400, "token 1000 is not in the vocabulary of 1000"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_in_openais_envelope(change, status, reason):
    async def test(client, pools, gateway):
        content = json.dumps(a_body(**change)).replace("Infinity", "1e400")
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert reason in error["message"]
        assert error["type"] == "invalid_request_error"
        assert "\n" not in error["message"]

    check(test)


def test_what_asks_for_nothing_special_is_accepted():
    async def test(client, pools, gateway):
        neutral = {"n": 1, "logprobs": None, "presence_penalty": 0, "logit_bias": {}, "user": "u"}
        assert (await client.post("/v1/completions", json=a_body(**neutral))).status_code == 200

    check(test)


def test_a_replica_that_dies_before_the_first_token_is_replaced_unnoticed():
    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.script.append((0, ReplicaFailed("it died")))
        pools["b"].script.clear()
        gateway.manager.switch("round_robin")
        answers = [await client.post("/v1/completions", json=a_body()) for _ in range(2)]
        assert [one.status_code for one in answers] == [200, 200]
        metrics = (await client.get("/metrics")).text
        assert 'tokenyard_retries_total{pool="b"} 1.0' in metrics
        assert 'outcome="failed",pool="a"' in metrics

    check(test)


def test_a_replica_that_dies_later_ends_the_answer_with_a_reason():
    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.script += [(1, ReplicaFailed("it died"))] * 2
        answer = await client.post("/v1/completions", json=a_body())
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "it died, after 1 tokens"
        streamed = await client.post("/v1/completions", json=a_body(stream=True))
        assert streamed.status_code == 200
        last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["message"] == "it died, after 1 tokens"

    check(test)


def test_full_replicas_are_429_and_dead_ones_503():
    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.script.append((0, ReplicaFull("the queue is full")))
        full = await client.post("/v1/completions", json=a_body())
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(full.headers["retry-after"]) >= 1
        for pool in pools.values():
            pool.script.append((0, ReplicaFailed("gone")))
        assert (await client.post("/v1/completions", json=a_body())).status_code == 503

    check(test)


@pytest.mark.parametrize(
    ("of_b", "status"),
    [
        (None, 200),
        (ReplicaTooSmall("too long for this one"), 400),
        (ReplicaFull("the queue is full"), 429),
        (ReplicaFailed("it died"), 503),
    ],
)
def test_what_one_pool_can_never_answer_goes_to_another_and_is_400_where_none_can(
    of_b, status, monkeypatch
):
    monkeypatch.setattr(attempts, "_PATIENCE_S", 1e9)  # Nobody who could answer will come.

    async def test(client, pools, gateway):
        for _ in range(4):
            pools["a"].script = [(0, ReplicaTooSmall("too long for this one"))]
            pools["b"].script = [(0, of_b)] if of_b else []
            answer = await client.post("/v1/completions", json=a_body())
            assert answer.status_code == status

    check(test)


def test_admission_is_bounded_and_keeps_room_for_other_classes():
    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.may_go_on.clear()
        held = [asyncio.create_task(client.post("/v1/completions", json=a_body())) for _ in "12"]
        while gateway.in_flight < 2:
            await asyncio.sleep(0)
        batch = await client.post("/v1/completions", json=a_body(service_tier="batch"))
        assert (batch.status_code, batch.headers["retry-after"]) == (429, "1")
        by_header = {"x-service-tier": "batch"}
        body = a_body()
        refused = await client.post("/v1/completions", json=body, headers=by_header)
        assert refused.status_code == 429
        held += [asyncio.create_task(client.post("/v1/completions", json=a_body())) for _ in "12"]
        while gateway.in_flight < 4:
            await asyncio.sleep(0)
        assert (await client.post("/v1/completions", json=a_body())).status_code == 429
        for pool in pools.values():
            pool.may_go_on.set()
        assert {one.status_code for one in await asyncio.gather(*held)} == {200}

    check(test)


def test_a_gateway_that_drains_finishes_what_it_has_begun_and_lets_nothing_in():
    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.may_go_on.clear()
        body = a_body(stream=True)
        held = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in "12"]
        while sum(len(pool.requests) for pool in pools.values()) < 2:
            await asyncio.sleep(0)
        draining = asyncio.create_task(gateway.drain())
        while not gateway.draining:
            await asyncio.sleep(0)
        refused = await client.post("/v1/completions", json=a_body())
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
        health = await client.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert not draining.done()
        for pool in pools.values():
            pool.may_go_on.set()
        assert [events_of((await one).text)[-1]["choices"][0]["text"] for one in held] == ["k"] * 2
        assert await draining == 0

    check(test)


def test_what_is_not_answered_when_draining_ends_is_told_so():
    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.may_go_on.clear()
        bodies = [a_body(), a_body(stream=True)]
        held = [asyncio.create_task(client.post("/v1/completions", json=one)) for one in bodies]
        while sum(len(pool.requests) for pool in pools.values()) < 2:
            await asyncio.sleep(0)
        assert await gateway.drain() == 2
        assert gateway.in_flight == 0
        whole, stream = await asyncio.gather(*held)
        assert whole.status_code == 503
        last = json.loads(stream.text.strip().split("\n\n")[-1].removeprefix("data: "))
        for answer in (whole.json(), last):
            assert answer["error"]["message"] == "the gateway ended before the answer did"

    check(test, limits={"drain_s": 0.05})


def test_a_client_that_leaves_cancels_its_request_at_the_replica():
    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.may_go_on.clear()
        task = asyncio.create_task(client.post("/v1/completions", json=a_body()))
        while not gateway.in_flight or not any(pool.requests for pool in pools.values()):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sum(pool.num_cancelled for pool in pools.values()) == 1
        assert gateway.in_flight == 0
        assert all(one.in_flight.count == 0 for one in gateway.table.replicas.values())

    check(test)


def test_too_long_for_every_answer_is_a_failure_with_a_reason():
    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.may_go_on.clear()
        answer = await client.post("/v1/completions", json=a_body())
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "no answer within 0.1 s"

    check(test, limits={"timeout_s": 0.1})


def test_a_token_is_asked_for_where_there_is_one():
    async def test(client, pools, gateway):
        for path in ("/v1/models", "/v1/policy", "/v1/pools"):
            assert (await client.get(path)).status_code == 401
        answer = await client.post("/v1/completions", json=a_body())
        assert answer.json()["error"]["type"] == "authentication_error"
        wrong = {"authorization": "Bearer wrong"}
        assert (await client.get("/v1/models", headers=wrong)).status_code == 401
        right = {"authorization": "Bearer secret"}
        models = await client.get("/v1/models", headers=right)
        assert models.json()["data"][0]["id"] == "m"
        assert (await client.get("/healthz")).json() == {"status": "ok", "replicas": 2}

    check(test, token="secret")


def test_this_machine_changes_the_policy_where_that_is_allowed():
    async def test(client, pools, gateway):
        changed = await client.post("/v1/policy", json={"policy": "sed"})
        assert (changed.status_code, changed.json()["active"]) == (200, "sed")
        assert (await client.put("/v1/policy", json={"policy": "champion"})).status_code == 200
        bad = await client.post("/v1/policy", json={"policy": "seed"})
        assert bad.status_code == 422
        assert bad.json()["detail"].startswith("unknown policy 'seed'")
        own_page = {"origin": LOCAL}
        again = await client.post("/v1/policy", json={"policy": "sed"}, headers=own_page)
        assert again.status_code == 200

    check(test)


async def status_of_a_change(client, headers=None, address="127.0.0.1"):
    transport = httpx.ASGITransport(client._transport.app, client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as other:
        body = {"policy": "sed"}
        return (await other.post("/v1/policy", json=body, headers=headers)).status_code


@pytest.mark.parametrize(
    "header",
    [
        {"forwarded": "for=8.8.8.8"},
        {"x-forwarded-for": "127.0.0.1"},
        {"x-forwarded-proto": "https"},
        {"x-real-ip": "127.0.0.1"},
        {"via": "1.1 proxy"},
        {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
        {"host": "gateway.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "[::1"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
    ],
)
def test_what_came_through_a_proxy_or_from_a_foreign_page_changes_nothing(header):
    async def test(client, pools, gateway):
        assert await status_of_a_change(client, header) == 403
        assert gateway.manager.policy.name == "champion"
        assert (await client.get("/v1/policy", headers=header)).status_code == 200

    check(test)


@pytest.mark.parametrize("address", ["10.0.0.7", "127.0.0.6", "::ffff:10.0.0.7", "testclient"])
def test_other_machines_and_sidecars_change_nothing(address):
    async def test(client, pools, gateway):
        assert await status_of_a_change(client, address=address) == 403

    check(test)


def test_a_proxy_that_says_nothing_of_itself_but_its_old_version_changes_nothing():
    async def test(client, pools, gateway):
        app = client._transport.app

        async def by_http_1_0(scope, receive, send):
            await app({**scope, "http_version": "1.0"}, receive, send)

        client._transport.app = by_http_1_0
        assert await status_of_a_change(client) == 403

    check(test)


def test_without_an_admin_token_or_the_flag_nobody_changes_anything():
    async def test(client, pools, gateway):
        assert await status_of_a_change(client) == 403

    check(test, local_admin=False)


def test_the_token_of_all_callers_changes_nothing_and_the_admin_token_does_all():
    async def test(client, pools, gateway):
        user, admin = ({"authorization": f"Bearer {one}"} for one in ("user", "admin"))
        assert await status_of_a_change(client, user) == 403
        assert await status_of_a_change(client) == 401
        # A token is proof wherever it comes from.
        proxied = admin | {"x-forwarded-for": "8.8.8.8", "host": "gateway.example"}
        assert await status_of_a_change(client, proxied, "10.0.0.7") == 200
        assert (await client.get("/v1/pools", headers=admin)).status_code == 200
        assert (await client.get("/v1/pools", headers=user)).status_code == 200
        lower = {"authorization": "bearer user"}
        assert (await client.get("/v1/pools", headers=lower)).status_code == 200
        bare = {"authorization": "user"}
        assert (await client.get("/v1/pools", headers=bare)).status_code == 401

    check(test, token="user", admin_token="admin", local_admin=False)


@pytest.mark.parametrize("tokens", [("", None), (None, "é"), ("same", "same")])
def test_tokens_that_protect_nothing_are_refused(tokens):
    with pytest.raises(ValueError, match="token"):
        Access(*tokens)


def test_the_log_has_every_attempt_with_what_became_of_it(tmp_path):
    log = DecisionLog(tmp_path)

    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.script.append((0, ReplicaFailed("it died")))
        assert (await client.post("/v1/completions", json=a_body())).status_code == 503
        assert (await client.post("/v1/completions", json=a_body())).status_code == 200

    check(test, log=log)
    log.close()
    (file,) = tmp_path.glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [row["outcome"] for row in rows] == ["failed", "failed", "stop"]
    assert [row["attempt"] for row in rows] == [0, 1, 0]
    assert rows[2]["response_s"] > rows[2]["ttft_s"] > 0
    assert rows[0]["response_s"] is None
    assert len(rows[2]["candidates"]) == 2
    assert rows[2]["candidates"][0]["kv_capacity_tokens"] == 1000.0
    assert (rows[2]["context_tokens"], rows[2]["propensity"]) == (5, 1.0)
    assert log.num_lost == 0


def test_a_row_has_the_time_of_its_decision_whenever_it_came_and_ended(tmp_path):
    log = DecisionLog(tmp_path)

    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.script.append((0, ReplicaFailed("it died")))
        assert (await client.post("/v1/completions", json=a_body())).status_code == 503
        assert (await client.post("/v1/completions", json=a_body())).status_code == 200

    check(test, log=log)
    log.close()
    rows = [row for file in tmp_path.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert [row["attempt"] for row in rows] == [0, 1, 0]
    for row in rows:
        # These pools tell their state when they are asked, and that is when it is decided.
        assert {one["observed_at_s"] for one in row["candidates"]} == {row["time_s"]}


def test_everything_that_is_counted_is_shown_by_pool():
    async def test(client, pools, gateway):
        await client.post("/v1/completions", json=a_body())
        text = (await client.get("/metrics")).text
        for name in ("ttft_seconds_bucket", "tpot_seconds_bucket", "response_seconds_bucket",
                     "requests_in_flight", "requests_waiting", "requests_running",
                     "kv_used_ratio", "replicas", "signal_age_seconds"):  # fmt: skip
            assert f"tokenyard_{name}{{" in text, name
        assert "tokenyard_decision_seconds_count 1.0" in text
        assert 'tokenyard_host_cpu_ratio{replica="a-0"} 0.5' in text
        assert 'tokenyard_slo_requests_total{attained="true",service_class="default"} 1.0' in text
        assert 'tokenyard_build_info{version="' in text

    check(test)


def test_the_pools_tell_their_speed_and_the_age_of_what_is_known():
    async def test(client, pools, gateway):
        first, _ = (await client.get("/v1/pools")).json()["replicas"]
        assert first["profile"]["source"] == "declared"
        assert first["age_s"] >= 0
        assert math.isclose(first["profile"]["iteration_s"], 0.01)

    check(test)


def test_the_documentation_needs_nothing_from_elsewhere():
    async def test(client, pools, gateway):
        page = (await client.get("/docs")).text
        assert "POST /v1/chat/completions" in page
        assert "<script" not in page
        assert "http://" not in page.replace(LOCAL, "")

    check(test)


def test_routing_without_sending_follows_the_active_policy():
    async def test(client, pools, gateway):
        snapshot = {
            "replica_id": "a", "tokens_per_s": 100.0, "num_slots": 1, "max_concurrency": 2,
            "num_waiting": 0, "num_running": 0, "tokens_in_flight": 0.0,
        }  # fmt: skip
        body = {"request": {"context_tokens": 5}, "snapshots": [snapshot]}
        for_engines = str(files("tokenyard") / "artifacts" / "routing" / "azure_code_slo.npz")
        await client.post("/v1/policy", json={"policy": for_engines})
        incompatible = await client.post("/v1/route", json=body)
        assert incompatible.status_code == 422
        await client.post("/v1/policy", json={"policy": "sed"})
        answer = (await client.post("/v1/route", json=body)).json()
        assert (answer["policy"]["name"], answer["replica_id"]) == ("sed", "a")

    check(test)


def test_a_request_waits_a_while_for_the_first_replica():
    async def test(client, pools, gateway):
        for pool in pools.values():
            pool.there = False
        gateway.refresh()
        task = asyncio.create_task(client.post("/v1/completions", json=a_body()))
        await asyncio.sleep(0.12)
        assert not task.done()
        pools["a"].there = True
        assert (await task).status_code == 200

    check(test)


def test_a_pool_that_is_gone_leaves_no_replicas_in_the_metrics():
    """As an allocated pool's whose shape has changed."""

    async def test(client, pools, gateway):
        def value(name, pool, **labels):
            at = {"pool": pool, **labels}
            return gateway.metrics.registry.get_sample_value(f"tokenyard_{name}", at)

        gateway.refresh()
        pools["a"].num_waiting = 3
        gateway.observe()
        assert value("replicas", "a", state="ready") == 1
        assert value("replicas", "a", state="ejected") == 0
        assert value("requests_waiting", "a") == 3
        del gateway.backends["a"]
        gateway.table.keep("a", ())
        gateway.observe()
        names = ("requests_waiting", "requests_running", "kv_used_ratio", "signal_age_seconds")
        assert [value(name, "a") for name in names] == [None] * 4
        assert value("replicas", "a", state="ready") is None
        assert value("replicas", "b", state="ready") == 1

    check(test)


def test_replicas_that_are_gone_leave_no_host_series():
    async def test(client, pools, gateway):
        pools["a"].host_loads = lambda: {"a-0": {"host_cpu_ratio": 0.5}}
        assert 'replica="a-0"' in (await client.get("/metrics")).text
        pools["a"].host_loads = dict
        seen = (await client.get("/metrics")).text
        assert 'replica="a-0"' not in seen
        assert 'replica="b-0"' in seen

    check(test)

"""Several models behind one gateway, and adapters: the model says which pools are asked."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from unit.serve.test_serve_external import PROFILE
from unit.serve.test_serve_gateway import OWN, FakePool, Letters, cluster_of
from unit.stub_endpoint import stubs

from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.models import ModelCatalog
from serve_app.policy.manager import PolicyManager

ANSWER = b'{"choices":[{"index":0,"text":"ok","finish_reason":"stop"}]}'


def external(name, url, **fields):
    pool = {
        "name": name, "kind": "external", "model": f"{name}-there", "profile": PROFILE,
        "endpoints": [{"url": url}],
    }  # fmt: skip
    return pool | fields


def own(name, **fields):
    return {"name": name, "kind": "own", "config": OWN, **fields}


class Own(FakePool):
    """A pool of ours that keeps what it is asked."""

    max_model_tokens = 2048

    async def answer(self, replica_id, attempt):
        self.requests.append(attempt.request)
        attempt.take(1, "stop")
        await attempt.downstream.begin(200, [(b"content-type", b"application/json")])
        await attempt.downstream.write(ANSWER)


@asynccontextmanager
async def a_site(cluster, tokenizers=None, tracing=None):
    """Yield a client of a gateway, and its own pools."""
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch("champion")
    metrics = Metrics()
    theirs = [ExternalBackend(one, cluster.served_model, metrics) for one in cluster.external_pools]
    ours = {one.name: Own(one.name) for one in cluster.own_pools}
    backends = {one.name: one for one in theirs} | ours
    gateway = Gateway(cluster, manager, backends, metrics, tracing=tracing)
    api = create_gateway_api(gateway, tokenizers or {}, Access(None))
    transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client, ours
    finally:
        manager.stop()
        for one in theirs:
            await one.stop()


def ask(client, model, **fields):
    body = {"prompt": "hello", "max_tokens": 5, **fields}
    return client.post("/v1/completions", json=body | ({"model": model} if model else {}))


def test_pools_tell_the_model_of_every_replica_and_the_slos_of_classes():
    async def test():
        async with stubs(2) as (one, two):
            pools = [external("first", one.url), external("second", two.url, served_model="other")]
            chat = {"name": "chat", "response_s": 15.0, "ttft_s": 2.0}
            async with a_site(cluster_of(pools, classes=[chat])) as (client, _):
                told = (await client.get("/v1/pools")).json()
        models = {replica["pool"]: replica["model"] for replica in told["replicas"]}
        assert models == {"first": cluster_of(pools).served_model, "second": "other"}
        [shown] = told["classes"]
        assert shown.items() >= chat.items()

    asyncio.run(test())


def test_the_model_says_which_endpoints_are_asked_and_adapters_keep_their_names():
    async def test():
        async with stubs(3) as (one, two, three):
            pools = [
                external("small", one.url), external("large", two.url, served_model="large"),
                external("tuned", three.url, loras=["sql", "poems"]),
            ]  # fmt: skip
            async with a_site(cluster_of(pools, served_model="small")) as (client, _):
                for model in ("large", "large", "sql", "poems"):
                    assert (await ask(client, model)).status_code == 200
                # Two pools serve the cluster's own; who names none gets it.
                for model in ["small", None] * 4:
                    assert (await ask(client, model)).status_code == 200
                refused = await ask(client, "huge")
            assert [json.loads(body)["model"] for body in two.bodies] == ["large-there"] * 2
            adapted = [json.loads(body) for body in three.bodies[:2]]
            assert [body["model"] for body in adapted] == ["sql", "poems"]
            rest = [json.loads(body).get("model") for body in one.bodies + three.bodies[2:]]
            assert set(rest) <= {"small-there", "tuned-there", None}
            assert len(rest) == 8
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (
                404, "model_not_found", "model",
            )  # fmt: skip
            assert error["message"] == (
                "model 'huge' is not served here; 'small', 'large', 'sql', 'poems' are"
            )

    asyncio.run(test())


def test_all_models_are_listed_and_adapters_name_their_parent():
    pools = [
        external("small", "http://a", max_model_tokens=100, loras=["sql"]),
        own("large", served_model="org/large"),
    ]  # fmt: skip

    async def test():
        async with a_site(cluster_of(pools)) as (client, _):
            cards = (await client.get("/v1/models")).json()["data"]
            one = (await client.get("/v1/models/org/large")).json()
            none = await client.get("/v1/models/huge")
        longest = {card["id"]: card["max_model_len"] for card in cards}
        assert longest == {"m": 100, "org/large": 2048, "sql": 100}
        assert [card["parent"] for card in cards] == [None, None, "m"]
        assert one["id"] == "org/large"
        assert (none.status_code, none.json()["error"]["code"]) == (404, "model_not_found")

    asyncio.run(test())


def test_pools_of_ours_get_the_tokens_of_their_model_and_what_they_do_not_serve_is_refused():
    pools = [own("a"), own("b", served_model="other", config={**OWN, "model": "another"})]

    class Doubled(Letters):
        def encode(self, text):
            return [ord(one) for one in text for _ in range(2)]

    async def test():
        async with a_site(cluster_of(pools), {"m": Letters(), "other": Doubled()}) as (
            client,
            ours,
        ):
            for model in ("m", "other"):
                assert (await ask(client, model)).json() == json.loads(ANSWER)
            refused = await client.post("/v1/embeddings", json={"model": "m", "input": "a"})
        assert [len(one.token_ids) for one in ours["a"].requests] == [5]
        assert [len(one.token_ids) for one in ours["b"].requests] == [10]
        assert refused.status_code == 404

    asyncio.run(test())


def test_a_prompt_may_be_as_long_as_its_model_takes_not_as_long_as_another():
    async def test():
        async with stubs(2) as (one, two):
            pools = [
                external("short", one.url, max_model_tokens=64),
                external("long", two.url, served_model="long"),
            ]  # fmt: skip
            async with a_site(cluster_of(pools)) as (client, _):
                # How long it is here is an estimate: the endpoint says what is too long.
                answers = [await ask(client, one, prompt="a" * 4000) for one in ("m", "long")]
            assert [one.status_code for one in answers] == [200, 200]
            assert (one.num_asked, two.num_asked) == (1, 1)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        ([own("a", served_model="x")], "no pool serves served_model 'm'"),
        ([own("a"), own("b", config={**OWN, "model": "another"})], "different models .* as 'm'"),
        ([external("a", "http://a", loras=["m"])], "adapter 'm' has the name of another"),
        (
            [
                external("a", "http://a", loras=["x"]),
                external("b", "http://b", served_model="b", loras=["x"]),
            ],
            "adapter 'x' has the name of another",
        ),
        (
            [external("a", "http://a/v/"), external("b", "http://A/v", served_model="b")],
            "endpoint 'http://a/v' appears more than once",
        ),
    ],
)  # fmt: skip
def test_names_of_models_say_which_one_is_meant(pools, reason):
    with pytest.raises(ValueError, match=reason):
        cluster_of(pools)


def test_pools_of_a_plan_serve_the_model_of_their_template():
    def catalog(**fields):
        template = {"name": "shape", "config": OWN, **fields}
        allocation = {"scenario": "emulated_l4x4", "template": template}
        return ModelCatalog(cluster_of([own("a")], allocation=allocation))

    assert catalog().find("m").is_served_by("shape-tp1-pp1")
    other = catalog(served_model="other")
    assert not other.find("m").is_served_by("shape-tp1-pp1")
    assert other.find("other").is_served_by("shape-tp1-pp1")
    assert not other.find("other").is_served_by("a")

"""Endpoints that come and go under load: by a file, DNS, Kubernetes, and by hand."""

import asyncio
import json
import os
import socket
import ssl
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from unit.serve.test_serve_external import BODY, PROFILE, text_of, until
from unit.serve.test_tls import make
from unit.stub_endpoint import HANG, OK, Stub, an_event, stubs

from serve_app.app import GatewayOptions, find_cluster
from serve_app.cluster import Cluster
from serve_app.endpoints import is_allowed
from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.gateway import discovery
from serve_app.gateway.backends import make_backends
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.policy.manager import PolicyManager


def a_pool(name="theirs", **fields):
    return {"name": name, "kind": "external", "model": "m", "profile": PROFILE, **fields}


def a_cluster(*pools, **fields):
    known = {
        "name": "t", "description": "t", "served_model": "m", "explore_fraction": 0.0,
        "circuit_breaker": {"budget_s": 1.0}, "pools": pools,
    }  # fmt: skip
    return Cluster.model_validate(known | fields)


@asynccontextmanager
async def a_site(*pools, access=None, **fields):
    """Yield a client of a gateway, the gateway, and its pools by name."""
    cluster = a_cluster(*pools, **fields)
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch("champion")
    metrics = Metrics()
    backends = make_backends(cluster, {}, metrics)
    gateway = Gateway(cluster, manager, backends, metrics)
    access = access or Access(None, local_admin=True)
    api = create_gateway_api(gateway, EstimatingTokenizer(), access)
    transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
    for one in backends.values():
        one.start(manager.note)
    try:
        async with (
            asyncio.timeout(60),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            yield client, gateway, backends
    finally:
        manager.stop()
        for one in backends.values():
            await one.stop()


@asynccontextmanager
async def load(client, num=4):
    """Ask all the time; every answer must come whole."""
    going, answers = True, []

    async def ask():
        while going:
            answers.append(text_of(await client.post("/v1/completions", json=BODY)))

    tasks = [asyncio.create_task(ask()) for _ in range(num)]
    try:
        yield
    finally:
        going = False
        await asyncio.gather(*tasks)
    assert set(answers) == {"ok"}


async def comes_and_goes(client, gateway, old, new, add, remove):
    """One endpoint takes another's place under load: in use soon, and nothing lost."""
    for one in (old, new):
        one.delay_s = 0.02
    async with load(client):
        await until(lambda: old.num_asked > 10)
        await add()
        await until(lambda: new.num_asked)
        await remove()
        await until(lambda: not used(gateway, old))
        asked = old.num_asked
        await until(lambda: new.num_asked > asked)
        await until(lambda: old.url not in gateway.table.replicas)
        asked = old.num_asked, new.num_asked
        await until(lambda: new.num_asked > asked[1] + 20)
        assert old.num_asked == asked[0]


def used(gateway, endpoint):
    found = gateway.table.replicas.get(endpoint.url)
    return found is not None and not found.draining


def put(path, text):
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def run(test):
    asyncio.run(test())


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_an_endpoint_is_a_url_with_or_without_v1(ending):
    async def test():
        async with stubs(2) as (one, two):
            pool = a_pool(endpoints=[one.url + ending, {"url": two.url + ending}])
            async with a_site(pool) as (client, gateway, _):
                for _ in range(4):
                    text_of(await client.post("/v1/completions", json=BODY))
                assert sorted(gateway.table.replicas) == sorted((one.url, two.url))
            assert one.num_asked + two.num_asked == 4
            assert (one.heads + two.heads)[0].startswith("POST /v1/completions HTTP")

    run(test)


def test_a_file_is_read_again_and_the_last_good_one_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "LOOK_EVERY_S", 0.05)
    path = tmp_path / "endpoints.yaml"

    async def test():
        async with stubs(2) as (old, new):
            put(path, f"endpoints: [{old.url}]")

            async def add():
                put(path, f"endpoints:\n- {old.url}\n- url: {new.url}/v1\n")

            async def remove():
                put(path, f"endpoints: [{new.url}]")

            pool = a_pool(service_discovery={"file": str(path)})
            async with a_site(pool) as (client, gateway, pools):
                await comes_and_goes(client, gateway, old, new, add, remove)
                for odd, why in (
                    ("endpoints: [", "no YAML"), ("", "valid"), ("endpoints: [nonsense]", "URL"),
                ):  # fmt: skip
                    put(path, odd)
                    await until(lambda why=why: why in problem(pools, "file"))
                path.unlink()
                await until(lambda: "No such file" in problem(pools, "file"))
                (shown,) = (await client.get("/v1/pools")).json()["pools"]
                assert "No such file" in shown["problems"]["file"]
                assert shown["service_discovery"] == {"file": [new.url]}
                text_of(await client.post("/v1/completions", json=BODY))
                put(path, "endpoints: []")
                await until(lambda: not pools["theirs"].describe()["problems"])
                await until(lambda: gateway.refresh() and not gateway.table.replicas)
                notes = [one.what for one in gateway.manager.events]
                assert notes.count("endpoints not read") == 4
                assert notes.count("endpoints read") == 4

    run(test)


def problem(pools, source, name="theirs"):
    return pools[name].describe()["problems"].get(source, "")


@asynccontextmanager
async def on_addresses(*addresses):
    """Serve a stub at one port of each address."""
    servers, made = [], []
    with socket.socket() as free:
        free.bind((addresses[0], 0))
        port = free.getsockname()[1]
    for address in addresses:
        one = Stub()
        servers.append(await asyncio.start_server(one.serve, address, port))
        one.url = f"http://{address}:{port}"
        made.append(one)
    try:
        yield port, made
    finally:
        for server in servers:
            server.close()


def resolving(monkeypatch, answers):
    """Let a name have the addresses of `answers`, or fail."""
    loop = asyncio.get_running_loop()
    known = loop.getaddrinfo

    async def getaddrinfo(host, port, **options):
        if host != "llm.test":
            return await known(host, port, **options)
        if not answers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in answers]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)


def test_every_address_of_a_name_is_an_endpoint_that_is_asked_by_the_name(monkeypatch):
    async def test():
        async with on_addresses("127.0.0.1", "127.0.0.2") as (port, (old, new)):
            answers = ["127.0.0.1", "169.254.169.254", "127.0.0.1"]
            resolving(monkeypatch, answers)

            async def add():
                answers[:] = ["127.0.0.1", "127.0.0.2"]

            async def remove():
                answers[:] = ["127.0.0.2"]

            pool = a_pool(service_discovery={"dns": f"http://llm.test:{port}/v1"})
            async with a_site(pool) as (client, gateway, pools):
                await until(
                    lambda: "does not allow http://169.254.169.254" in problem(pools, "dns")
                )
                await comes_and_goes(client, gateway, old, new, add, remove)
                answers.clear()
                await until(lambda: "Temporary failure" in problem(pools, "dns"))
                text_of(await client.post("/v1/completions", json=BODY))
            assert all(f"host: llm.test:{port}" in one.lower() for one in new.heads)

    run(test)


def test_a_certificate_is_that_of_the_name_not_of_its_address(monkeypatch, tmp_path):
    files = make(tmp_path, 1, host="llm.test")
    monkeypatch.setenv("SSL_CERT_FILE", str(files.certificate))

    async def test():
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(files.certificate, files.key)
        stub = Stub()
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0, ssl=context)
        resolving(monkeypatch, ["127.0.0.1"])
        port = server.sockets[0].getsockname()[1]
        pool = a_pool(service_discovery={"dns": f"https://llm.test:{port}"})
        async with a_site(pool) as (client, gateway, _):
            text_of(await client.post("/v1/completions", json=BODY))
            assert [*gateway.table.replicas] == [f"https://127.0.0.1:{port}"]
        server.close()

    run(test)


async def change(client, method, pool, *urls, **options):
    body = {"pool": pool, "endpoints": urls}
    return await client.request(method, "/v1/pools", json=body, **options)


def test_endpoints_come_and_go_by_hand():
    async def test():
        async with stubs(2) as (old, new):
            pool = a_pool(endpoints=[old.url], allowed=["127.0.0.0/8"])
            async with a_site(pool) as (client, gateway, _):

                async def add():
                    answer = await change(client, "POST", "theirs", f"{new.url}/v1")
                    assert answer.json()["added"] == [new.url]

                async def remove():
                    answer = await change(client, "DELETE", "theirs", old.url)
                    assert answer.json()["removed"] == [old.url]

                await comes_and_goes(client, gateway, old, new, add, remove)
                # What the file names is allowed, whatever is.
                assert (await change(client, "POST", "theirs", old.url)).status_code == 200
                assert used(gateway, old)
                events = [(one.what, one.policy, one.why, one.by) for one in gateway.manager.events]
                assert events[-1] == ("endpoints added", "theirs", old.url, "somebody at 127.0.0.1")
                assert events[-2][:3] == ("endpoints removed", "theirs", old.url)

    run(test)


def test_an_endpoint_that_goes_ends_what_it_has_begun():
    async def test():
        async with stubs(2) as (old, new):
            old.script = (an_event("ok"), HANG)
            pool = a_pool(endpoints=[old.url], allowed=["127.0.0.1"])
            async with a_site(pool) as (client, gateway, _):
                begun = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await until(lambda: old.num_open)
                await change(client, "POST", "theirs", new.url)
                await change(client, "DELETE", "theirs", old.url)
                for _ in range(5):
                    text_of(await client.post("/v1/completions", json=BODY))
                (shown,) = [
                    one for one in (await client.get("/v1/pools")).json()["replicas"]
                    if one["replica_id"] == old.url
                ]  # fmt: skip
                assert (shown["draining"], shown["in_flight"]) == (True, 1)
                assert (old.num_asked, new.num_asked) == (1, 5)
                scraped = old.num_scraped
                begun.cancel()
                await until(lambda: gateway.refresh() and old.url not in gateway.table.replicas)
                assert old.num_scraped <= scraped + 1
                # It may come back before it has gone, too.
                new.script = (an_event("ok"), HANG)
                held = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await until(lambda: new.num_open)
                await change(client, "DELETE", "theirs", new.url)
                await change(client, "POST", "theirs", new.url)
                state = gateway.table.replicas[new.url]
                assert (state.draining, state.in_flight.count) == (False, 1)
                held.cancel()
                await asyncio.gather(begun, held, return_exceptions=True)

    run(test)


@pytest.mark.parametrize(
    ("allowed", "url", "status", "why"),
    [
        ([], "http://10.0.0.7:8000", 422, "pool 'theirs' does not allow any: see its key"),
        (["10.0.0.0/8"], "http://11.0.0.1:8000", 422, "does not allow http://11.0.0.1:8000"),
        (["10.0.0.0/8"], "http://10.0.0.1.evil.test", 422, "does not allow"),
        (["10.0.0.0/8"], "http://localhost:1", 422, "does not allow"),
        (["*.llm.svc"], "http://169.254.169.254", 422, "does not allow"),
        (["*.llm.svc"], "http://llm.svc.evil.test", 422, "does not allow"),
        (["10.0.0.0/8"], "http://me:secret@10.0.0.1", 422, "leave user and password out"),
        (["10.0.0.0/8"], "nonsense", 422, "URL"),
        (["10.0.0.0/8"], "http://10.0.0.9:8000", 422, "is in pool 'other'"),
    ],
)
def test_nothing_is_added_but_what_the_cluster_file_allows(allowed, url, status, why):
    pools = [
        a_pool(endpoints=["http://10.0.0.5:8000"], allowed=allowed),
        a_pool("other", endpoints=["http://10.0.0.9:8000"]),
    ]

    async def test():
        async with a_site(*pools) as (client, gateway, _):
            answer = await change(client, "POST", "theirs", url)
            assert (answer.status_code, why in answer.json()["detail"]) == (status, True)
            assert "secret" not in answer.text
            gateway.refresh()
            assert len(gateway.table.replicas) == 2
            for method, pool, which in (
                ("DELETE", "theirs", "http://10.0.0.6:8000"), ("POST", "none", url),
            ):  # fmt: skip
                unknown = await change(client, method, pool, which)
                assert unknown.status_code == (
                    422 if "secret" in which or which == "nonsense" else 404
                )

    run(test)


def test_only_admins_change_endpoints(tmp_path):
    async def test():
        access = Access("everybodys", "the-admins")
        pool = a_pool(endpoints=["http://10.0.0.5:8000"], allowed=["10.0.0.0/8"])
        async with a_site(pool, access=access) as (client, gateway, pools):
            for method in ("POST", "DELETE"):
                for token, status in ((None, 401), ("wrong", 401), ("everybodys", 403)):
                    headers = {"authorization": f"Bearer {token}"} if token else {}
                    answer = await change(
                        client, method, "theirs", "http://10.0.0.5:8000", headers=headers
                    )
                    assert answer.status_code == status
            assert not pools["theirs"].describe()["removed"]
            headers = {"authorization": "Bearer the-admins"}
            await change(client, "POST", "theirs", "http://10.0.0.6:8000", headers=headers)
            assert gateway.manager.events[-1].by == "admin-token at 127.0.0.1"

    run(test)


@pytest.mark.parametrize(
    ("host", "allowed", "expected"),
    [
        ("10.1.2.3", [], True),
        ("vllm.default.svc", [], True),
        ("169.254.169.254", [], False),
        ("fe80::1", [], False),
        ("::ffff:169.254.169.254", [], False),
        ("0.0.0.0", [], False),
        ("169.254.169.254", ["169.254.169.254"], True),
        ("10.1.2.3", ["10.0.0.0/8", "*.svc"], True),
        ("::ffff:10.1.2.3", ["10.0.0.0/8"], True),
        ("fd00::1", ["fd00::/8"], True),
        ("a.svc", ["10.0.0.0/8", "*.svc"], True),
        ("11.1.2.3", ["10.0.0.0/8", "*.svc"], False),
        ("11.1.2.3", ["*"], False),
    ],
)
def test_addresses_are_allowed_by_networks_and_names_by_patterns(host, allowed, expected):
    assert is_allowed(host, allowed) is expected


def test_what_is_found_is_only_used_where_it_is_allowed(tmp_path):
    path = tmp_path / "endpoints.yaml"

    async def test():
        async with stubs(1) as (one,):
            put(path, f"endpoints: [{one.url}, http://10.0.0.1:8000]")
            pool = a_pool(service_discovery={"file": str(path)}, allowed=["127.0.0.1"])
            async with a_site(pool) as (client, gateway, pools):
                text_of(await client.post("/v1/completions", json=BODY))
                assert [*gateway.table.replicas] == [one.url]
                assert problem(pools, "file") == "pool 'theirs' does not allow http://10.0.0.1:8000"

    run(test)


def test_a_url_is_in_one_pool_at_a_time(tmp_path):
    path = tmp_path / "endpoints.yaml"

    async def test():
        async with stubs(1) as (one,):
            put(path, f"endpoints: [{one.url}]")
            pools = [
                a_pool("first", endpoints=[one.url]),
                a_pool("second", service_discovery={"file": str(path)}),
            ]
            async with a_site(*pools) as (client, gateway, backends):
                await until(lambda: problem(backends, one.url, "second"))
                assert "is in pool 'first'" in problem(backends, one.url, "second")
                text_of(await client.post("/v1/completions", json=BODY))
                await change(client, "DELETE", "first", one.url)
                # Once it has gone there it may come here.
                await until(lambda: gateway.refresh() and pool_of(gateway, one) == "second")
                assert not problem(backends, one.url, "second")

    run(test)


def pool_of(gateway, endpoint):
    found = gateway.table.replicas.get(endpoint.url)
    return found and found.pool


def test_requests_wait_for_the_first_endpoint_of_a_pool():
    async def test():
        async with stubs(1) as (one,):
            async with a_site(a_pool(allowed=["127.0.0.1"])) as (client, gateway, _):
                assert (await client.get("/health")).status_code == 503
                waits = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await until(lambda: gateway.in_flight)
                await change(client, "POST", "theirs", one.url)
                assert text_of(await waits) == "ok"
                # The last one goes: nothing is sent there while it drains.
                one.script = (an_event("ok"), HANG)
                held = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await until(lambda: one.num_asked == 2)
                await change(client, "DELETE", "theirs", one.url)
                waits = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await asyncio.sleep(0.2)
                assert one.num_asked == 2
                one.script = OK
                await change(client, "POST", "theirs", one.url)
                assert text_of(await waits) == "ok"
                held.cancel()
                await asyncio.gather(held, return_exceptions=True)

    run(test)


def test_a_cluster_file_says_it_all_and_a_deployment_is_told_the_same(tmp_path):
    discovery = {
        "file": "/etc/endpoints.yaml", "dns": "https://llm.test/v1",
        "kubernetes": {"service": "vllm", "port": 8000},
    }  # fmt: skip
    profile = {"iteration_s": 0.01, "prefill_token_s": 1e-5, "sequence_s": 5e-4}
    pool = a_pool(
        endpoints=["http://a:1/v1", {"url": "http://b:1"}], service_discovery=discovery,
        allowed=["10.0.0.0/8", "*.llm.svc"], profile=profile, metrics={"port": 8002},
    )  # fmt: skip
    path = tmp_path / "mine.yaml"
    written = a_cluster(pool).model_dump(mode="json", exclude_unset=True)
    path.write_text(json.dumps(written))
    (found,) = find_cluster(GatewayOptions(cluster=str(path))).external_pools
    assert [one.address for one in found.endpoints] == ["http://a:1", "http://b:1"]
    assert found.service_discovery.dns.address == "https://llm.test"
    assert found.profile.max_batch is None
    assert found == a_cluster(pool).external_pools[0]


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        ([a_pool()], "give endpoints, service_discovery, or what is allowed"),
        ([a_pool(endpoints=["http://a", "http://a/v1"])], "appears more than once"),
        ([a_pool(service_discovery={"kubernetes": {}})], "give one of service and inference_pool"),
        (
            [a_pool(service_discovery={"kubernetes": {"inference_pool": "a", "port": 1}})],
            "an InferencePool names its ports",
        ),
        ([a_pool(service_discovery={"file": "here.yaml"})], "must begin with /"),
        ([a_pool(allowed=["no host"])], "match pattern"),
    ],
)
def test_cluster_files_that_cannot_be_meant_are_refused(pools, why):
    with pytest.raises(ValueError, match=why):
        a_cluster(*pools)

"""Endpoints of a service, and of an InferencePool, of Kubernetes."""

import asyncio
import json
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import pytest
from unit.serve.test_serve_external import BODY, text_of, until
from unit.serve.test_service_discovery import a_pool, a_site, comes_and_goes, problem, run
from unit.stub_endpoint import HANG, OK, stubs

from serve_app.gateway import kubernetes


class ApiServer:
    """Speaks list and watch of EndpointSlices, as far as tests need."""

    def __init__(self):
        self.slices = {}
        self.objects = {}
        """What it answers to other paths, by path."""
        self.version = 1
        self.watchers = set()
        self.asked = []
        self.status = 200
        self.forgets = False
        """Whether the next watch is told that its version is gone."""

    def put(self, name, urls, ready=True, kind="IPv4"):
        """Let a slice have the endpoints of some URLs; without URLs it is deleted."""
        parts = [urlsplit(one) for one in urls]
        ends = [{"addresses": [p.hostname], "conditions": {"ready": ready}} for p in parts]
        self.version += 1
        known = self.slices.pop(name, None)
        item = {
            "metadata": {"name": name, "resourceVersion": str(self.version)}, "addressType": kind,
            "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": parts[0].port}]
            if parts else None, "endpoints": ends,
        }  # fmt: skip
        if urls:
            self.slices[name] = item
        what = "DELETED" if not urls else "MODIFIED" if known else "ADDED"
        self.tell({"type": what, "object": item})

    def put_pod(self, name, url, ready=True, ending=False):
        """Let a pod be, where a URL is."""
        self.version += 1
        known = name in self.slices
        self.slices[name] = {
            "metadata": {"name": name, "resourceVersion": str(self.version)}
            | ({"deletionTimestamp": "2026-01-01T00:00:00Z"} if ending else {}),
            "status": {
                "podIP": urlsplit(url).hostname,
                "conditions": [{"type": "Ready", "status": str(ready)}],
            },
        }
        self.tell({"type": "MODIFIED" if known else "ADDED", "object": self.slices[name]})

    def tell(self, event):
        for writer in self.watchers:
            line = json.dumps(event).encode() + b"\n"
            # In pieces: a line may come in several.
            for piece in (line[:7], line[7:]):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def hang_up(self):
        for writer in self.watchers:
            writer.close()
        self.watchers.clear()

    async def serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                url = urlsplit(head.split()[1])
                self.asked.append((url.path, parse_qs(url.query), head))
                if "watch" in parse_qs(url.query) and self.status == 200:
                    await self.watch(writer, parse_qs(url.query))
                else:
                    self.list(writer, url.path)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def list(self, writer, path):
        found = {
            "metadata": {"resourceVersion": str(self.version)}, "items": [*self.slices.values()]
        }  # fmt: skip
        status = self.status
        if "inference" in path:
            found, status = self.objects.get(path, {}), 200 if path in self.objects else 404
        body = json.dumps(found).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)))
        writer.write(body)

    async def watch(self, writer, query):
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self.watchers.add(writer)
        if self.forgets:
            self.forgets = False
            self.tell({"type": "ERROR", "object": {"kind": "Status", "code": 410}})
            writer.write(b"0\r\n\r\n")
            self.watchers.discard(writer)
            return
        self.tell({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1"}}})


@asynccontextmanager
async def an_api_server():
    api = ApiServer()
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
    api.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield api
    finally:
        api.hang_up()
        server.close()


def in_kubernetes(api, **fields):
    settings = {"service": "vllm", "namespace": "llm", "port": "http", "api_server": api.url}
    return a_pool(service_discovery={"kubernetes": settings | fields})


def test_the_ready_endpoints_of_a_service_are_listed_and_watched(monkeypatch, tmp_path):
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    (tmp_path / "token").write_text("first\n")

    async def test():
        async with stubs(2) as (old, new), an_api_server() as api:
            api.put("a", [old.url])
            api.put("b", [new.url], ready=False)
            api.put("c", ["http://[::1]:1"], kind="IPv6")

            async def add():
                api.put("b", [new.url])

            async def remove():
                api.put("a", [])

            async with a_site(in_kubernetes(api)) as (client, gateway, pools):
                await until(lambda: api.watchers)
                await comes_and_goes(client, gateway, old, new, add, remove)
                assert pools["theirs"].describe()["service_discovery"] == {"kubernetes": [new.url]}
            path, query, head = api.asked[0]
            assert path == "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
            assert query["labelSelector"] == ["kubernetes.io/service-name=vllm"]
            assert "authorization: Bearer first\r\n" in head
            assert api.asked[1][1]["resourceVersion"] == ["4"]

    run(test)


def test_a_watch_that_ends_in_any_way_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    monkeypatch.setattr(kubernetes, "_AGAIN_S", 0.05)

    async def test():
        async with stubs(2) as (old, new), an_api_server() as api:
            api.put("a", [old.url])
            async with a_site(in_kubernetes(api)) as (_, gateway, pools):

                async def others_come(*urls):
                    await until(lambda: gateway.refresh() and {*gateway.table.replicas} == {*urls})

                await others_come(old.url)
                # Connections close, and what changed meanwhile is found.
                await until(lambda: api.watchers)
                api.hang_up()
                api.put("b", [new.url])
                await others_come(old.url, new.url)
                # The version is gone.
                await until(lambda: api.watchers)
                api.forgets = True
                api.hang_up()
                api.put("a", [])
                await others_come(new.url)
                assert not api.forgets
                # The server is away, refuses, or talks nonsense: what is known counts.
                api.status = 403
                api.hang_up()
                await until(lambda: "answered 403" in problem(pools, "kubernetes"))
                await others_come(new.url)
                api.status = 200
                await until(lambda: api.watchers)
                api.tell({"odd": 1})
                api.put("a", [old.url])
                await others_come(old.url, new.url)
                assert not problem(pools, "kubernetes")

    run(test)


POOL = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools/engines"


def an_inference_pool(port):
    return {
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": port}]}
    }


def in_inference_pool(api):
    return in_kubernetes(api, service=None, port=None, inference_pool="engines")


def test_the_ready_pods_of_an_inference_pool_are_listed_and_watched(monkeypatch, tmp_path):
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)

    async def test():
        async with stubs(1) as (engine,), an_api_server() as api:
            api.objects[POOL] = an_inference_pool(urlsplit(engine.url).port)
            other = engine.url.replace("127.0.0.1", "127.0.0.2")
            api.put_pod("starts", engine.url, ready=False)
            api.put_pod("ends", other, ending=True)
            async with a_site(in_inference_pool(api)) as (client, gateway, _):
                await until(lambda: api.watchers)
                assert not gateway.table.replicas
                api.put_pod("starts", engine.url)
                await until(lambda: gateway.refresh() and {*gateway.table.replicas} == {engine.url})
                assert text_of(await client.post("/v1/completions", json=BODY)) == "ok"
                api.put_pod("ends", other)
                await until(
                    lambda: gateway.refresh() and {*gateway.table.replicas} == {engine.url, other}
                )
            [asked] = [(path, query) for path, query, _ in api.asked if "watch" in query]
            assert asked[0] == "/api/v1/namespaces/llm/pods"
            assert asked[1]["labelSelector"] == ["app=vllm"]

    run(test)


def test_a_pool_that_is_not_there_and_one_that_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    monkeypatch.setattr(kubernetes, "_AGAIN_S", 0.05)

    async def test():
        async with stubs(2) as (one, two), an_api_server() as api:
            api.put_pod("a", one.url)
            async with a_site(in_inference_pool(api)) as (_, gateway, pools):
                await until(lambda: "answered 404" in problem(pools, "kubernetes"))
                for stub in (one, two):
                    api.objects[POOL] = an_inference_pool(urlsplit(stub.url).port)
                    api.hang_up()
                    await until(
                        lambda url=stub.url: (
                            gateway.refresh() and {*gateway.table.replicas} == {url}
                        )
                    )
                    await until(lambda: api.watchers)

    run(test)


@pytest.mark.parametrize("group", kubernetes._OBJECTIVES)
def test_an_objective_of_a_priority_below_zero_is_shed_first(group, monkeypatch, tmp_path):
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)

    def objective(name, pool, **spec):
        return {"metadata": {"name": name}, "spec": {"poolRef": {"name": pool}, **spec}}

    async def test():
        async with stubs(1) as (engine,), an_api_server() as api:
            api.objects[POOL] = an_inference_pool(urlsplit(engine.url).port)
            api.put_pod("a", engine.url)
            api.objects[group.format("llm")] = {
                "items": [
                    objective("batch", "engines", priority=-1), objective("chat", "engines"),
                    objective("other", "theirs", priority=-1),
                ]
            }  # fmt: skip
            site = a_site(in_inference_pool(api), limits={"max_in_flight": 2})
            async with site as (client, gateway, pools):
                await until(lambda: pools["theirs"].objectives == {"batch": -1, "chat": 0})
                await until(lambda: gateway.refresh() and gateway.table.replicas)
                engine.script = HANG, OK[0]
                held = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await until(lambda: engine.num_open)
                engine.script = OK

                async def status(objective):
                    headers = {"x-gateway-inference-objective": objective}
                    answer = await client.post("/v1/completions", json=BODY, headers=headers)
                    return answer.status_code

                named = ("batch", "chat", "other", "nobody")
                assert [await status(name) for name in named] == [429, 200, 200, 200]
                held.cancel()
                await asyncio.gather(held, return_exceptions=True)

    run(test)


def test_outside_of_a_cluster_the_api_server_has_to_be_named(monkeypatch, tmp_path):
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    pool = a_pool(service_discovery={"kubernetes": {"service": "vllm"}})

    async def test():
        async with a_site(pool) as (_, _, pools):
            await until(lambda: "give api_server" in problem(pools, "kubernetes"))

    run(test)

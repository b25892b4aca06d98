"""The picker behind a real Envoy, which `make plugs` installs, as docs/envoy.md has them."""

import asyncio
import contextlib
import copy
import gzip
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pyarrow.parquet as pq
import pytest
import yaml
from document_blocks import blocks
from integration.serve.test_sessions_live import an_endpoint as a_paced_endpoint
from sizes import is_thorough
from unit.openai_endpoint import an_openai_endpoint

from serve_app.http.free_port import free_port

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
ENVOY = Path(os.environ.get("TOKENYARD_PLUGS", ROOT / ".plugs")) / "envoy" / "bin" / "envoy"
if not ENVOY.exists():
    pytest.skip(f"no {ENVOY}: `make plugs`", allow_module_level=True)

LIMIT_S = 60.0
NUM_STREAMS = 3000 if is_thorough() else 60
FULL_DUPLEX = {
    "request_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND", "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND",
}  # fmt: skip
HEADS = {
    "request_header_mode": "SEND", "request_body_mode": "BUFFERED",
    "response_header_mode": "SEND", "response_body_mode": "NONE", "response_trailer_mode": "SEND",
}  # fmt: skip


def saved(name):
    """What a reader of docs/envoy.md saves under a name."""
    [block] = [one for one in blocks("docs/envoy.md") if one.marks.get("file") == name]
    return yaml.safe_load(block.text)


def envoy_config(ports, engines, mode=None, subset=None):
    """The configuration of docs/envoy.md with other ports, and in another mode."""
    config = saved("envoy.yaml")
    static = config["static_resources"]
    [listener], [engine_cluster, picker_cluster] = static["listeners"], static["clusters"]
    listener["address"]["socket_address"]["port_value"] = ports.envoy
    [places] = engine_cluster["load_assignment"]["endpoints"]
    [place] = places["lb_endpoints"][:1]
    places["lb_endpoints"] = [copy.deepcopy(place) for _ in engines]
    for known, engine in zip(places["lb_endpoints"], engines, strict=True):
        known["endpoint"]["address"]["socket_address"]["port_value"] = engine
    [picker] = picker_cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    picker["endpoint"]["address"]["socket_address"]["port_value"] = ports.grpc
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    if mode is not None:
        filters[0]["typed_config"]["processing_mode"] = mode
        filters[0]["typed_config"]["response_attributes"] = ["upstream.address"]
        del filters[1]
    if subset is not None:
        name = "envoy.filters.http.set_metadata"
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        hint = {"x-gateway-destination-endpoint-subset": subset}
        entry = {"metadata_namespace": "envoy.lb.subset_hint", "value": hint}
        filters.insert(0, {"name": name, "typed_config": {"@type": kind, "metadata": [entry]}})
    return config


def started(*command, **more):
    env = os.environ | more
    return subprocess.Popen([*map(str, command)], env=env, stdout=subprocess.DEVNULL)


class Behind:
    """A picker and an Envoy before some engines."""

    def __init__(self, folder, engines, mode=None, subset=None, **fields):
        self.ports = SimpleNamespace(envoy=free_port(), grpc=free_port(), http=free_port())
        self.url = f"http://127.0.0.1:{self.ports.envoy}"
        self.log = folder / "log"
        fleet = saved("fleet.yaml") | fields
        fleet["pools"][0]["endpoints"] = [f"http://127.0.0.1:{port}" for port in engines]
        (folder / "fleet.yaml").write_text(yaml.safe_dump(fleet))
        config = envoy_config(self.ports, engines, mode, subset)
        (folder / "envoy.yaml").write_text(yaml.safe_dump(config))
        self.folder = folder

    def start_picker(self):
        self.picker = started(
            sys.executable, "-m", "pipelines.epp", "--cluster", self.folder / "fleet.yaml",
            "--policy", "sed", "--port", self.ports.grpc, "--http-port", self.ports.http,
            "--decision-log", self.log, PYTHONPATH=os.pathsep.join(sys.path),
            TOKENYARD_LOCAL_ADMIN="1",
        )  # fmt: skip

    @contextlib.contextmanager
    def running(self):
        self.start_picker()
        envoy = started(
            ENVOY, "--config-path", self.folder / "envoy.yaml", "--log-level", "error",
            "--disable-hot-restart", "--concurrency", "1", PYTHONPATH="",
        )  # fmt: skip
        try:
            self.until(lambda: self.requests() is not None)  # Then the gRPC port is open, too.
            self.until(lambda: self.ask().status_code != 500)
            yield self
        finally:
            for process in (self.picker, envoy):
                process.kill()
                process.wait()

    def until(self, is_so):
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            with contextlib.suppress(httpx.TransportError):
                if is_so():
                    return
            time.sleep(0.1)
        raise AssertionError("it did not become so in time")

    def ask(self, path="/v1/completions", **fields):
        body = {"model": "my-model", "prompt": "hello", "max_tokens": 3} | fields
        return httpx.post(self.url + path, json=body, timeout=LIMIT_S)

    def samples(self, name):
        """Samples of a metric of the picker, by their labels."""
        text = httpx.get(f"http://127.0.0.1:{self.ports.http}/metrics").text
        found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def requests(self):
        """Numbers of requests, by their outcome."""
        samples = self.samples("tokenyard_requests_total")
        return {re.search('outcome="(.*?)"', labels)[1]: num for labels, num in samples.items()}

    def in_flight(self):
        return sum(self.samples("tokenyard_requests_in_flight").values())


@pytest.fixture(scope="module")
def engines():
    with an_openai_endpoint("my-model") as (one, _), an_openai_endpoint("my-model") as (other, _):
        yield one, other


@pytest.fixture(params=[None, FULL_DUPLEX, HEADS], ids=["observed", "full duplex", "heads"])
def behind(request, engines, tmp_path):
    known = Behind(tmp_path, [engine.server_port for engine in engines], request.param)
    known.shows_bodies = request.param is not HEADS
    with known.running():
        yield known


def test_clients_get_what_the_engines_answer_and_all_is_counted(behind, engines):
    before, asked = behind.requests(), sum(len(engine.asked) for engine in engines)
    client = openai.OpenAI(base_url=f"{behind.url}/v1", api_key="none")
    messages = [{"role": "user", "content": "hello " * 5000}]
    for _ in range(3):
        whole = client.chat.completions.create(model="my-model", messages=messages, max_tokens=5)
        assert whole.choices[0].message.content == "word " * 5
        pieces = client.chat.completions.create(
            model="my-model", messages=messages, max_tokens=7, stream=True
        )
        words = "".join(piece.choices[0].delta.content for piece in pieces)
        assert words == "word " * 7
    assert behind.ask(model="another").status_code == 404
    assert httpx.get(f"{behind.url}/v1/models").json()["data"] == [{"id": "my-model"}]
    assert sum(len(engine.asked) for engine in engines) == asked + 6
    behind.until(lambda: behind.in_flight() == 0)
    ends = {name: num - before.get(name, 0) for name, num in behind.requests().items()}
    if not behind.shows_bodies:
        assert ends == {"stop": 7}
        return
    assert ends == {"length": 6, "stop": 1}
    behind.picker.send_signal(signal.SIGTERM)
    assert behind.picker.wait(LIMIT_S) == 0
    rows = [row for file in behind.log.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert sorted(row["output_tokens"] for row in rows)[-6:] == [5, 5, 5, 7, 7, 7]
    streamed = [row for row in rows if row["output_tokens"] == 7]
    assert all(0 < row["ttft_s"] <= row["response_s"] for row in streamed)


def test_an_endpoint_that_is_dead_is_passed_over_and_counted_so(engines, tmp_path):
    ports = [engines[0].server_port, free_port()]
    known = Behind(tmp_path, ports, circuit_breaker={"stale_after_s": 1000.0})
    with known.running():
        asked = [known.ask().status_code for _ in range(20)]
        assert asked == [200] * 20
        known.until(lambda: known.in_flight() == 0)
        ends = known.requests()
        assert ends["length"] >= 20
        assert 1 <= ends["failed"] <= 10  # Then it is ejected.


def test_only_a_subset_is_picked_from_and_none_of_nothing(engines, tmp_path):
    ports = [engine.server_port for engine in engines]
    known = Behind(tmp_path, ports, subset=[f"127.0.0.1:{ports[1]}"])
    before = len(engines[0].asked)
    with known.running():
        assert all(known.ask().status_code == 200 for _ in range(8))
    assert len(engines[0].asked) == before
    nowhere = Behind(tmp_path, ports, subset=["127.0.0.1:1"])
    with nowhere.running():
        answer = nowhere.ask()
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


UNSEEN = HEADS | {"request_body_mode": "NONE"}


@pytest.mark.parametrize("mode", [HEADS, FULL_DUPLEX, UNSEEN], ids=["buffered", "full", "none"])
def test_bodies_fit_their_headers_whatever_is_changed_in_them(engines, tmp_path, mode):
    pool = {"name": "gpus", "kind": "external", "model": "their-model"}
    limits = {"max_body_bytes": 50_000}
    known = Behind(tmp_path, [engines[0].server_port], mode, pools=[pool], limits=limits)
    body = b'{"model": "my-model", "prompt": "hello", "max_tokens": 3}'
    kind = {"content-type": "application/json"}
    coded = kind | {"content-encoding": "gzip"}
    url = f"{known.url}/v1/completions"
    with known.running():
        contents = [(body, kind), (iter([body[:9], body[9:]]), kind)]
        # The endpoint knows no encoding: it gets one where nobody has read the body.
        contents += [(gzip.compress(body), coded)] if mode is not UNSEEN else []
        for content, headers in contents:
            answer = httpx.post(url, content=content, headers=headers, timeout=LIMIT_S)
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
            named = "my-model" if mode is UNSEEN else "their-model"
            assert engines[0].asked[-1]["model"] == named
        if mode is UNSEEN:
            return
        long = httpx.post(url, content=b" " * 400_000, headers=kind, timeout=LIMIT_S)
        assert long.status_code == 413
        pieces = iter([b" " * 40_000] * 10)
        assert httpx.post(url, content=pieces, headers=kind, timeout=LIMIT_S).status_code == 413
        assert known.ask().status_code == 200


async def stream(client, tokens, leave_after):
    """Read a stream to its end, or leave; return whether its end was seen."""
    body = {"model": "my-model", "prompt": [1, 2, 3], "max_tokens": tokens, "stream": True}
    num_lines = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            num_lines += bool(line)
            if num_lines == leave_after:
                return False
    return num_lines > tokens


@pytest.mark.parametrize("mode", [None, FULL_DUPLEX], ids=["observed", "full duplex"])
def test_counts_are_right_where_callers_leave_and_streams_outlive_the_picker(tmp_path, mode):
    port = free_port()
    with a_paced_endpoint(port):
        known = Behind(tmp_path, [port], mode)
        known.ask = lambda: httpx.post(
            f"{known.url}/v1/completions",
            json={"model": "my-model", "prompt": [1], "max_tokens": 1, "stream": True},
        )

        num_streams = NUM_STREAMS if mode is None else 60
        num_leaving, num_staying = num_streams * 2 // 3, num_streams // 3

        async def drill():
            places = asyncio.Semaphore(60)

            async def one(client, leave_after):
                async with places:
                    return await stream(client, 12, leave_after)

            async with httpx.AsyncClient(base_url=known.url, timeout=LIMIT_S) as client:
                leaving = [one(client, 1 + number % 8) for number in range(num_leaving)]
                staying = [one(client, 0) for _ in range(num_staying)]
                seen = await asyncio.gather(*leaving, *staying)
                assert seen == [False] * num_leaving + [True] * num_staying
                await asyncio.to_thread(known.until, lambda: known.in_flight() == 0)
                ends = known.requests()
                # Each counts once. On a busy machine some answers end before their callers leave.
                assert ends["abort"] + ends["length"] == num_streams + 1, ends
                assert 0.9 * num_leaving <= ends["abort"] <= num_leaving, ends
                if mode is not None:
                    return  # An answer that the picker hands back ends with it.
                long = asyncio.create_task(stream(client, 100, 0))
                await asyncio.sleep(0.5)
                known.picker.kill()
                known.picker.wait()
                assert await stream(client, 3, 0)  # Envoy picks by itself.
                assert await long
                known.start_picker()
                await asyncio.to_thread(known.until, lambda: known.in_flight() == 0)
                assert await stream(client, 3, 0)
                await asyncio.to_thread(known.until, lambda: known.requests().get("length"))

        with known.running():
            asyncio.run(drill())

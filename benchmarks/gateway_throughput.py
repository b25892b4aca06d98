"""What the gateway's data path costs per request and per token, before a stub that answers at once.

python benchmarks/gateway_throughput.py

Four servers take turns in short blocks: the stub alone, a thin Ray Serve application that answers
by itself, the gateway before the stub, and the gateway before a pool of its own, whose engine
computes nothing. Gateways have decision log, metrics, exploration and scraping. CPU time is that of
all of a server's processes, Ray's and the engines' included, less what they take while nobody asks;
the client's and the stub's are not counted, and both give way to the servers (`nice`). `--envoy`
adds Envoy alone and Envoy with the picker, as docs/envoy.md has them, and `--rivals` routers and a
proxy of others. Latency is compared with the stub's in the same turn. With `--starts 3` the gateway
before two of the stub's ports is started, asked once and stopped three times, and nothing else is
measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast

import httptools
import numpy as np
import psutil
import tyro
import uvloop
from rich.table import Table
from rival_engines import INFORMATION
from servers import (
    ENVOYS,
    PROFILE,
    Server,
    behind_envoy,
    external_pool,
    gateway,
    ray_application,
    rival,
    started,
)

from serve_app.engine_config import EngineConfig
from serve_app.engines.base import Chunk, Engine, EngineStats, Sampling
from serve_app.http.free_port import free_port
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.types import OrderKey

OWN_REPLICAS = 2
TOKENS_PER_S = 50
TOKENS = 64
_NICE = 10
WHOLE = json.dumps(
    {
        "id": "x", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"},
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 75, "completion_tokens": 1, "total_tokens": 76},
    }
).encode()  # fmt: skip
THIN = """
import asyncio, sys
from ray import serve
from starlette.responses import Response, StreamingResponse
from gateway_throughput import END, TOKENS, TOKENS_PER_S, WHOLE, an_event

@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Thin:
    async def __call__(self, request):
        body = await request.json()
        if not body["stream"]:
            return Response(WHOLE, media_type="application/json")
        return StreamingResponse(self.events(), media_type="text/event-stream")

    async def events(self):
        for _ in range(TOKENS):
            yield an_event()
            await asyncio.sleep(1 / TOKENS_PER_S)
        yield END

application = Thin.bind()
"""
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@dataclass(frozen=True)
class Args:
    """Measure the gateway's data path."""

    repeats: int = 5
    """Turns of every server."""
    block_s: float = 4.0
    """Length of a turn of one load."""
    clients: tuple[int, ...] = (1, 8, 32)
    """Closed loops of whole answers of one token, one load each."""
    streams: int = 64
    """Streams of 50 tokens a second at a time; 0: none."""
    servers: tuple[Literal["thin", "endpoints", "own"], ...] = ("thin", "endpoints", "own")
    """Who takes turns with the stub: a thin Ray Serve application, the gateway before the stub, and
    before a pool of its own. Each has a Ray of its own, which takes caches from the others."""
    rivals: tuple[Literal["litellm", "vllm-router", "smg"], ...] = ()
    """Others (`make rivals`) that take turns: LiteLLM's proxy before the stub's ports, and routers
    before two of them, by the power of two choices."""
    envoy: Path | None = None
    """Environment of Envoy (`make plugs`: .plugs/envoy), which takes turns before two of the stub's
    ports: alone, by its least request, with the picker, whom a second filter shows answers, and
    with one that sees their heads."""
    before: Path | None = None
    """Another checkout, whose gateways take turns with those of this one."""
    starts: int = 0
    """Times that a gateway is started and stopped, in place of all else."""
    json: ResultFile | None = None
    """File for the rows."""


@dataclass(frozen=True)
class Row:
    """One server under one load: medians over turns."""

    gateway: str
    clients: int
    stream: bool
    requests_per_s: float
    added_p50_ms: float
    """To the first byte of the answer, less the stub's."""
    added_p99_ms: float
    cpu_ms_per_request: float
    cpu_ms_per_token: float
    """Of streams; NaN for whole answers."""


def an_event() -> bytes:
    """One token, as vLLM sends it."""
    choice = {"index": 0, "delta": {"content": " a"}, "logprobs": None, "finish_reason": None}
    event = {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [choice],
    }  # fmt: skip
    return f"data: {json.dumps(event)}\n\n".encode()


def a_page() -> bytes:
    """55 kB of vLLM's metrics."""
    lines = [
        f'vllm:{name}{{engine="0",model_name="m"}} 0.0'
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    ]
    number = 0
    while sum(map(len, lines)) < 55_000:
        lines.append(f'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{number}.0"}} 5.0')
        number += 1
    return "\n".join([*lines[3:], *lines[:3], ""]).encode()


class PacedEngine(Engine):
    """An engine of ours that repeats its prompt: one token at once, more at `TOKENS_PER_S`."""

    def __init__(self, config: EngineConfig) -> None:
        self._running: set[str] = set()

    async def start(self) -> None:
        """Load nothing."""

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        order_key: OrderKey | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate all that may be; nothing waits, so there is no order."""
        self._running.add(request_id)
        loop, most = asyncio.get_running_loop(), sampling.max_tokens
        at_s = loop.time()
        try:
            for number in range(1, most + 1):
                yield Chunk(
                    (token_ids[number % len(token_ids)],), "length" if number == most else None
                )
                at_s += 1 / TOKENS_PER_S
                if number < most:
                    await asyncio.sleep(at_s - loop.time())
        finally:
            self._running.discard(request_id)

    async def abort(self, request_id: str) -> None:
        """Nothing goes on without its reader."""

    def stats(self) -> EngineStats:
        """Tell how many are running."""
        return EngineStats(0, len(self._running), 0.0, 150_000.0, 0)

    async def check_health(self) -> None:
        """Be well."""

    async def drain(self) -> None:
        """Wait for nobody."""

    async def stop(self) -> None:
        """Free nothing."""


class StubProtocol(asyncio.Protocol):
    """An endpoint on one connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body, self._url, self._page = b"", b"", a_page()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse a request."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """Note what is asked for."""
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        """Keep the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer."""
        if self._url == b"/metrics":
            self._send_whole(self._page, b"text/plain")
        elif (known := INFORMATION.get(self._url.decode())) is not None:
            self._send_whole(json.dumps(known).encode(), b"application/json")
        elif b'"stream": true' in self._body or b'"stream":true' in self._body:
            head = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(b"HTTP/1.1 200 OK\r\n" + head)
            self._send_token(TOKENS, asyncio.get_running_loop().time())
        else:
            self._send_whole(WHOLE, b"application/json")

    def _send_whole(self, body: bytes, kind: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (kind, len(body)) + body)

    def _send_token(self, left: int, at_s: float) -> None:
        if self._transport.is_closing():
            return
        event = an_event() if left else END
        end = b"" if left else b"0\r\n\r\n"
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, end))
        if left:
            next_s = at_s + 1 / TOKENS_PER_S
            asyncio.get_running_loop().call_at(next_s, self._send_token, left - 1, next_s)


class ClientProtocol(asyncio.Protocol):
    """A closed loop on one connection: the next request follows the answer to the last."""

    def __init__(self, stream: bool) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "word " * 60}]}
        content = json.dumps({**body, "max_tokens": TOKENS if stream else 1, "stream": stream})
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json"
        self._request = f"{head}\r\ncontent-length: {len(content)}\r\n\r\n{content}".encode()
        self.times_s: list[float] = []
        self.num_done = self.num_tokens = 0
        self.refused: int | None = None
        self._ends = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def stop(self) -> None:
        """Ask nothing more; what is on its way does not count."""
        self._ends = True
        self._transport.abort()

    def _ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._sent_s, self._begun = time.perf_counter(), False
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse an answer."""
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        """Note errors: what is raised here, nobody hears."""
        status = self._parser.get_status_code()
        if status != 200:
            self.refused = status

    def on_body(self, body: bytes) -> None:
        """Note the first byte, and tokens."""
        if not self._begun:
            self._begun = True
            self.times_s.append(time.perf_counter() - self._sent_s)
        self.num_tokens += body.count(b'"content":')

    def on_message_complete(self) -> None:
        """Ask again, unless something went wrong."""
        self.num_done += 1
        if not self._ends and self.refused is None:
            self._ask()


@dataclass(frozen=True)
class Turn:
    """What one server did in one turn."""

    requests_per_s: float
    p50_s: float
    p99_s: float
    cpu_s_per_request: float
    cpu_s_per_token: float


async def load(server: Server, clients: int, stream: bool, block_s: float) -> Turn:
    """Ask for a while; compare with as long a pause."""
    pause_s = block_s / 2
    idle_s = server.cpu_s()
    await asyncio.sleep(pause_s)
    idle_per_s = (server.cpu_s() - idle_s) / pause_s
    loop = asyncio.get_running_loop()
    callers: list[ClientProtocol] = []
    for number in range(clients):
        _, made = await loop.create_connection(
            lambda: ClientProtocol(stream), "127.0.0.1", server.port
        )
        callers.append(made)
        if stream:
            # Streams that began together would send their tokens together.
            await asyncio.sleep(1 / TOKENS_PER_S / clients * (1 + number % 3))
    await asyncio.sleep(0.5)
    before = [(one.num_done, one.num_tokens, len(one.times_s)) for one in callers]
    cpu_s, started_s = server.cpu_s(), time.perf_counter()
    await asyncio.sleep(block_s)
    took_s = time.perf_counter() - started_s
    cpu_s = server.cpu_s() - cpu_s - idle_per_s * took_s
    done = sum(one.num_done - had[0] for one, had in zip(callers, before, strict=True))
    tokens = sum(one.num_tokens - had[1] for one, had in zip(callers, before, strict=True))
    times_s = [s for one, had in zip(callers, before, strict=True) for s in one.times_s[had[2] :]]
    for one in callers:
        one.stop()
        assert one.refused is None, f"{server.name} answered {one.refused}"
    await asyncio.sleep(0.2)
    p50_s, p99_s = np.quantile(times_s or [np.nan], (0.5, 0.99))
    per_token_s = cpu_s / max(tokens, 1) if stream else np.nan
    return Turn(done / took_s, p50_s, p99_s, cpu_s / max(done, 1), per_token_s)


def serve_stub(ports: Connection) -> None:
    """Serve endpoints until the parent is gone."""
    os.nice(_NICE)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(StubProtocol, "127.0.0.1", 0) for _ in "1234"]
        ports.send([one.sockets[0].getsockname()[1] for one in servers])
        await asyncio.Event().wait()

    uvloop.run(run())


@contextlib.contextmanager
def stub() -> Iterator[tuple[Server, list[int]]]:
    """Yield the stub and its ports."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_stub, args=(there,), daemon=True)
    process.start()
    ports = here.recv()
    try:
        yield Server("stub", ports[0], psutil.Process(process.pid)), ports
    finally:
        process.terminate()
        process.join()


def own_pool() -> dict[str, Any]:
    """Replicas of ours, with the embedded model's tokenizer."""
    config = {
        "model": "default", "max_batch": 256, "max_waiting": 256, "device": "cpu", "rank_cpus": 0.1,
    }  # fmt: skip
    return {
        "name": "own", "kind": "own", "engine": "gateway_throughput:PacedEngine", "config": config,
        "replicas": OWN_REPLICAS, "replica_cpus": 0.1, "profile": PROFILE,
    }  # fmt: skip


def measure_start(ports: list[int]) -> dict[str, float]:
    """Start a gateway, ask it once, and stop it; all its processes count."""
    begun_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            gateway("tokenyard", external_pool(ports, profile=PROFILE), log=False)
        )
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        url, kind = f"http://127.0.0.1:{server.port}/v1/chat/completions", "application/json"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": kind})
        urllib.request.urlopen(request).close()
        started_s, cpu_s = time.monotonic() - begun_s, server.cpu_s()
        every = [server.process, *server.process.children(recursive=True)]
        memory = [one.memory_full_info() for one in every]
        rss_mb, pss_mb = (sum(getattr(m, k) for m in memory) / 1e6 for k in ("rss", "pss"))
        begun_s = time.monotonic()
    stopped_s = time.monotonic() - begun_s
    return {"cpu_s": cpu_s, "start_s": started_s, "rss_mb": rss_mb, "pss_mb": pss_mb,
            "processes": len(every), "stop_s": stopped_s}  # fmt: skip


def measure(servers: list[Server], args: Args) -> list[Row]:
    """Let the servers take turns."""
    loads = [(one, False) for one in args.clients] + [(args.streams, True)] * bool(args.streams)
    turns: dict[tuple[str, int, bool], list[Turn]] = {}
    for _ in range(args.repeats):
        for clients, stream in loads:
            for server in servers:
                turn = uvloop.run(load(server, clients, stream, args.block_s))
                turns.setdefault((server.name, clients, stream), []).append(turn)
    return [
        row(server.name, clients, stream, turns) for clients, stream in loads for server in servers
    ]


def row(
    name: str, clients: int, stream: bool, turns: dict[tuple[str, int, bool], list[Turn]]
) -> Row:
    """Lay out one server under one load."""
    mine, stubs = turns[name, clients, stream], turns["stub", clients, stream]
    pairs = list(zip(mine, stubs, strict=True))

    def median(values: list[float]) -> float:
        return float(np.median(values))

    return Row(
        name, clients, stream,
        median([one.requests_per_s for one in mine]),
        1e3 * median([one.p50_s - other.p50_s for one, other in pairs]),
        1e3 * median([one.p99_s - other.p99_s for one, other in pairs]),
        1e3 * median([one.cpu_s_per_request for one in mine]),
        1e3 * median([one.cpu_s_per_token for one in mine]),
    )  # fmt: skip


def main(args: Args) -> None:
    """Start the servers, measure, print, and write rows."""
    thin_port = free_port()
    thin = ray_application(THIN, thin_port)
    with contextlib.ExitStack() as stack:
        alone, ports = stack.enter_context(stub())
        if args.starts:
            return show([measure_start(ports[:2]) for _ in range(args.starts)], args)
        others = {
            "thin": lambda: started("thin Ray Serve", thin_port, thin),
            "endpoints": partial(gateway, "tokenyard", external_pool(ports, profile=PROFILE)),
            "own": partial(gateway, "tokenyard, own pool", own_pool()),
        }
        servers = [alone, *(stack.enter_context(others[name]()) for name in args.servers)]
        for name in args.rivals:
            theirs = rival(name, ports if name == "litellm" else ports[:2])
            servers.append(stack.enter_context(theirs))
        for name in ENVOYS if args.envoy is not None else ():
            assert args.envoy is not None
            two = external_pool(ports[:2], profile=PROFILE)
            servers.append(stack.enter_context(behind_envoy(args.envoy, ports[:2], name, two)))
        if args.before is not None:
            pools = {"endpoints": external_pool(ports, profile=PROFILE), "own": own_pool()}
            for name in pools.keys() & args.servers:
                before = gateway(f"before, {name}", pools[name], args.before)
                servers.append(stack.enter_context(before))
        # Whoever asks gives way, so that it is the servers that are measured.
        os.nice(_NICE)
        rows = measure(servers, args)
    show([asdict(one) for one in rows], args)


def show(rows: list[dict[str, Any]], args: Args) -> None:
    """Print rows, and write them where that is wanted."""
    table = Table(*rows[0])
    for one in rows:
        table.add_row(*(_shown(value) for value in one.values()))
    report(table, rows, args.json, None)


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(tyro.cli(Args))

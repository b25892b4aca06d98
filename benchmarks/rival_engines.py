"""Stand-ins for inference engines that finish a request when told, and a caller of what is before.

They answer what vllm-router, smg and sglang-router ask of an engine. A token is a character: a
router that asks for tokens then matches the same prefixes as one that compares text. All ports lie
in the process that calls, so the number of requests in flight at each engine is known exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

MODEL = "m"
ANSWER_TIMEOUT_S = 20.0
POLL_S = 0.1
"""Time that a router has to ask all engines for their load, and again to note it."""


async def read_message(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """First line and body of an HTTP message whose length is said in its head, or in chunks.

    Raises:
        asyncio.IncompleteReadError: The other side has closed.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    fields = dict(line.lower().split(":", 1) for line in lines if line)
    if "chunked" not in fields.get("transfer-encoding", ""):
        return first, await reader.readexactly(int(fields.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:size]
    await reader.readline()
    return first, body


class Engine:
    """One engine: completions wait for `finish`, questions for its load for `answer_polls`."""

    def __init__(
        self, index: int, arrivals: asyncio.Queue[int], load: tuple[int, float] | None
    ) -> None:
        """Report the index of the engine to `arrivals` for each completion that begins.

        `load` is what it tells of itself: queued tokens, and tokens per second; None: nothing.
        """
        self.index, self.url, self.num_polls = index, "", 0
        self.polls: list[asyncio.Event] = []
        """Questions for its load that wait for `Fleet.answer_polls`."""
        self._load = load
        self._arrivals = arrivals
        self._held: list[asyncio.Event] = []

    @property
    def num_held(self) -> int:
        """Requests in flight."""
        return len(self._held)

    def finish(self, place: int) -> None:
        """Answer the request that is at this place of those in flight."""
        self._held.pop(place).set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection until it closes."""
        # A task that ends as cancelled makes asyncio print a traceback when the loop closes.
        gone = asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        with contextlib.suppress(*gone):
            while True:
                first, body = await read_message(reader)
                if not first.endswith("HTTP/1.1"):
                    # A router that tries HTTP/2 falls back to this.
                    break
                path = first.split()[1].split("?")[0]
                said = await self._answer(path, body)
                status, answer = b"404 Not Found", b"{}"
                if said is not None:
                    status, answer = b"200 OK", json.dumps(said).encode()
                head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d"
                writer.write(head % (status, len(answer)) + b"\r\n\r\n" + answer)
        writer.close()

    async def _answer(self, path: str, body: bytes) -> Any:
        if path == "/v1/completions":
            event = asyncio.Event()
            self._held.append(event)
            self._arrivals.put_nowait(self.index)
            await event.wait()
            return completion()
        if path in ("/tokenize", "/v1/completions/render"):
            ids = [ord(one) for one in json.loads(body)["prompt"]]
            return tokenized(ids) if path == "/tokenize" else [rendered(ids)]
        if path == "/v1/loads" and self._load:
            event = asyncio.Event()
            self.polls.append(event)
            await event.wait()
            self.num_polls += 1
            return loads(self.num_held, *self._load)
        return INFORMATION.get(path)


INFORMATION: dict[str, Any] = {
    "/health": {},
    "/v1/models": {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 100_000}],
    },
    "/version": {"version": "0.19.0"},
    "/server_info": {
        "model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL,
        "is_generation": True, "version": "0.5.0", "tp_size": 1, "dp_size": 1,
        "max_total_num_tokens": 100_000, "page_size": 16, "max_running_requests": 1000,
    },
    "/model_info": {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True},
}  # fmt: skip
"""Path to what is answered whoever asks."""


def loads(running: int, waiting_tokens: int, tokens_per_s: float) -> dict[str, Any]:
    """What smg asks for."""
    load = {
        "dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": 0,
        "num_waiting_uncached_tokens": waiting_tokens, "num_total_reqs": running,
        "num_used_tokens": 0,
        "max_total_num_tokens": 100_000, "token_usage": 0.0, "gen_throughput": tokens_per_s,
        "cache_hit_rate": 0.0, "utilization": 0.0, "max_running_requests": 1000,
    }  # fmt: skip
    return {"timestamp": "", "dp_rank_count": 1, "loads": [load]}


def completion() -> dict[str, Any]:
    """A whole answer of one token."""
    return {
        "id": "x", "object": "text_completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }  # fmt: skip


def tokenized(ids: list[int]) -> dict[str, Any]:
    """The answer of `/tokenize`."""
    return {"count": len(ids), "max_model_len": 100_000, "tokens": ids, "token_strs": None}


def rendered(ids: list[int]) -> dict[str, Any]:
    """One prompt of the answer of `/v1/completions/render`."""
    return {
        "request_id": "x", "token_ids": ids, "features": None, "sampling_params": {},
        "model": MODEL, "stream": False,
    }  # fmt: skip


class Fleet:
    """Engines behind a router, and requests on their way through it."""

    def __init__(self, told: Sequence[tuple[int, float] | None]) -> None:
        self.arrivals: asyncio.Queue[int] = asyncio.Queue()
        self.engines = [Engine(index, self.arrivals, load) for index, load in enumerate(told)]
        self.router_port = 0
        self._calls: list[list[asyncio.Task[None]]] = [[] for _ in self.engines]
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Requests in flight at each engine."""
        return tuple(engine.num_held for engine in self.engines)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Fleet]:
        """Serve each engine on a port of its own, to the end of the block."""
        async with contextlib.AsyncExitStack() as stack:
            for engine in self.engines:
                server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=1 << 20)
                stack.callback(server.close)
                engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
            for _, writer in self._idle:
                writer.close()

    async def polled(self, timeout_s: float) -> None:
        """Wait until the router has asked every engine for its load, and been told.

        Raises:
            TimeoutError: It has not in time.
        """
        async with asyncio.timeout(timeout_s):
            while not all(engine.num_polls for engine in self.engines):
                await asyncio.sleep(0.1)
                await self.answer_polls()

    async def answer_polls(self) -> None:
        """Tell the router the load if it has asked, and give it time to note it.

        Done between two requests, as nobody could say whether a router that is told while it
        decides knows it already; and with nothing in flight, as what smg adds for requests that
        were sent before a poll and finish after it stands in no source that can be read.
        """
        if any(engine.polls for engine in self.engines):
            await self.drain()
            # It asks all engines at once.
            await asyncio.sleep(POLL_S)
            for engine in self.engines:
                while engine.polls:
                    engine.polls.pop().set()
            await asyncio.sleep(POLL_S)

    async def send(self, prompt: str) -> int:
        """Send a prompt through the router; return the engine that it reached."""
        call = asyncio.create_task(self._call(prompt))
        arrival = asyncio.create_task(self.arrivals.get())
        await asyncio.wait(
            (call, arrival), timeout=ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not arrival.done():
            arrival.cancel()
            await asyncio.wait_for(call, ANSWER_TIMEOUT_S)
            raise RuntimeError("the router answered without asking an engine")
        self._calls[arrival.result()].append(call)
        return arrival.result()

    async def finish(self, engine: int, place: int) -> None:
        """Let an engine answer one of its requests, and wait for the answer at the caller."""
        self.engines[engine].finish(place)
        await asyncio.wait_for(self._calls[engine].pop(place), ANSWER_TIMEOUT_S)

    async def drain(self) -> None:
        """Finish all that is in flight."""
        for engine in self.engines:
            while engine.num_held:
                await self.finish(engine.index, 0)

    async def _call(self, prompt: str) -> None:
        if not self._idle:
            self._idle.append(await asyncio.open_connection("127.0.0.1", self.router_port))
        reader, writer = self._idle.pop()
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, "stream": False})
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        first, answer = await read_message(reader)
        self._idle.append((reader, writer))
        if " 200 " not in first:
            raise RuntimeError(f"the router answered {first}: {answer.decode()[:200]}")

"""A local endpoint that speaks OpenAI's API and vLLM's metrics over HTTP, as far as tests need."""

import asyncio
import json
from contextlib import asynccontextmanager

PAGE = """\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a } b"} %s
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 77.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a } b"} 0.25
"""


def an_event(text, finish_reason=None):
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    event = json.dumps({"choices": [choice]}, ensure_ascii=False)
    return f"data: {event}\n\n".encode()


DONE = b"data: [DONE]\n\n"
OK = (an_event("ok"), an_event("", "stop"), DONE)
WHOLE = (
    b'{"choices":[{"index":0,"text":"ok","finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}}'
)
HANG = object()
"""In a script: say nothing more until the client goes."""


async def _chunked(reader):
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


class Stub:
    """Answers `script`, pieces of a body, to every POST; keeps what it was asked.

    With the script that it begins with, whoever asks for no events gets `WHOLE`.
    """

    def __init__(self):
        self.script = OK
        self.status = 200
        self.headers = {"content-type": "text/event-stream"}
        self.sends_head = True
        """Whether the head is sent before the script hangs."""
        self.delay_s = 0.0
        """Time until the head."""
        self.waiting = "0.0"
        self.drips = False
        self.pages = None
        """What it answers to GET, by path, or a function that makes that; other paths are 404.
        None: `PAGE` everywhere."""
        self.num_open = 0
        """POSTs that it has not answered."""
        self.num_asked = 0
        self.heads, self.bodies = [], []
        self.num_connections = 0
        self.num_scraped = 0
        self.url = ""

    async def serve(self, reader, writer):
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.lower().split("\r\n")
                length = [one.split(":")[1] for one in lines if one.startswith("content-length:")]
                body = await reader.readexactly(int(length[0]) if length else 0)
                if "transfer-encoding: chunked" in lines:
                    body = await _chunked(reader)
                if head.startswith("GET"):
                    await self._get(writer, head.split()[1])
                else:
                    self.heads.append(head)
                    self.bodies.append(body)
                    self.num_open += 1
                    try:
                        await self._answer(reader, writer)
                    finally:
                        self.num_open -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # The client has gone, or the test is over.
        finally:
            writer.close()

    async def _get(self, writer, path):
        self.num_scraped += 1
        text = PAGE % self.waiting if self.pages is None else self.pages.get(path)
        text = text() if callable(text) else text
        status, page = "200 OK" if text is not None else "404 Not Found", (text or "").encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(page)}\r\n\r\n".encode())
        if self.drips:
            writer.write(page[:1])
            await writer.drain()
            await asyncio.Event().wait()
        writer.write(page)
        await writer.drain()

    async def _answer(self, reader, writer):
        self.num_asked += 1
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        headers = "".join(f"{key}: {value}\r\n" for key, value in self.headers.items())
        script = self.script
        if script is OK and self.status == 200 and b'"stream":true' not in self.bodies[-1]:
            headers, script = "content-type: application/json\r\n", (WHOLE,)
        head = f"HTTP/1.1 {self.status} X\r\n{headers}transfer-encoding: chunked\r\n\r\n".encode()
        if self.sends_head:
            writer.write(head)
        for piece in script:
            if piece is HANG:
                await writer.drain()
                await reader.read(1)
                raise ConnectionError
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def served(endpoints, limit_bytes=1 << 16):
    """Serve each of some endpoints on a port of its own, which becomes its `url`."""
    servers, tasks = [], set()
    for one in endpoints:

        async def serve(reader, writer, one=one):
            tasks.add(asyncio.current_task())
            await one.serve(reader, writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=limit_bytes)
        servers.append(server)
        one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield endpoints
    finally:
        for server in servers:
            server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def stubs(number):
    """Serve so many stubs."""
    return served([Stub() for _ in range(number)])

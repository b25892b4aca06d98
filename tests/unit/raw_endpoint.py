"""An endpoint that keeps the bytes it was sent, and a caller that looks at bytes, too."""

import asyncio
from contextlib import asynccontextmanager

from unit.stub_endpoint import served


async def read_head(reader):
    """First line, and headers in lower case."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    pairs = (line.split(b":", 1) for line in lines if line)
    return first, {name.lower(): value.strip() for name, value in pairs}


async def read_body(reader, headers):
    """A body, without its framing."""
    if b"content-length" in headers:
        return await reader.readexactly(int(headers[b"content-length"]))
    body = b""
    if b"transfer-encoding" not in headers:
        return body
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body


class RawEndpoint:
    """`pieces` go out one after another; `framing` is `length`, `chunked` or `close`."""

    def __init__(self):
        self.status = b"200 OK"
        self.headers = b"content-type: application/json\r\n"
        self.pieces = (b"{}",)
        self.framing = "length"
        self.gap_s = 0.0
        self.hangs = False
        """Whether the answer has no end, once the pieces are out."""
        self.breaks = False
        """Whether the connection breaks, once the pieces are out."""
        self.asked = []
        """First line, headers and body of each request."""
        self.num_connections = self.num_gone = 0
        self.url = ""

    async def serve(self, reader, writer):
        self.num_connections += 1
        try:
            while True:
                first, headers = await read_head(reader)
                self.asked.append((first, headers, await read_body(reader, headers)))
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            self.num_gone += 1
        finally:
            writer.close()

    async def _answer(self, reader, writer):
        framings = {
            "length": b"content-length: %d\r\n" % sum(map(len, self.pieces)),
            "chunked": b"transfer-encoding: chunked\r\n", "close": b"connection: close\r\n",
        }  # fmt: skip
        framing = framings[self.framing]
        writer.write(b"HTTP/1.1 %b\r\n%b%b\r\n" % (self.status, self.headers, framing))
        for piece in self.pieces:
            is_chunked = self.framing == "chunked"
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
            await writer.drain()
            if self.gap_s:
                await asyncio.sleep(self.gap_s)
        if self.breaks:
            raise ConnectionError
        if self.hangs:
            await reader.read(1)
            raise ConnectionError
        if self.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        if self.framing == "close":
            raise ConnectionError


def raw_endpoints(number=1):
    """Serve so many, each on a port of its own."""
    return served([RawEndpoint() for _ in range(number)], limit_bytes=32 << 20)


class RawCaller:
    """A connection to a gateway."""

    @classmethod
    @asynccontextmanager
    async def to(cls, port):
        caller = cls()
        caller.reader, caller.writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield caller
        finally:
            caller.writer.close()

    async def begin(self, path, body, headers=b"", method=b"POST"):
        """Ask; return status and headers of the answer."""
        length = b"content-length: %d\r\n" % len(body) if body or method == b"POST" else b""
        head = b"%b %b HTTP/1.1\r\nhost: localhost\r\n%b%b\r\n" % (method, path, headers, length)
        self.writer.write(head + body)
        first, found = await read_head(self.reader)
        return int(first.split()[1]), found

    async def ask(self, path, body=b"", headers=b"", method=b"POST"):
        """Ask; return status, headers and body of the answer."""
        status, found = await self.begin(path, body, headers, method)
        return status, found, await read_body(self.reader, found)

"""An endpoint's host that is gone without a word: no packet of it says so."""

import asyncio
import shutil
import subprocess
import sys
import time
import uuid

import pytest
from cluster.hosts import why_not

from serve_app.gateway.upstream import Origin, UpstreamClient, UpstreamError, url_of

OURS, THEIRS, PORT = "10.78.0.1", "10.78.0.2", 8000
MOST_S = 25.0
"""Until a request there ends; deadlines of pools may be 600 s."""
ENDPOINT = f"""
import asyncio

async def answer(reader, writer):
    while await reader.readline():
        while await reader.readline() != b"\\r\\n":
            pass
        head = b"HTTP/1.1 200 OK\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
        writer.write(head + b"5\\r\\nfirst\\r\\n")
        if not hasattr(answer, "was_asked"):
            answer.was_asked = True
            writer.write(b"0\\r\\n\\r\\n")

async def main():
    server = await asyncio.start_server(answer, "{THEIRS}", {PORT})
    print("listens", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""

pytestmark = pytest.mark.cluster


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def host():
    """Name of a network namespace with an endpoint in it."""
    if reason := why_not():
        pytest.skip(reason)
    name = f"ty{uuid.uuid4().hex[:8]}"
    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{OURS}/24", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{THEIRS}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        command = [shutil.which("ip"), "netns", "exec", name, sys.executable, "-c", ENDPOINT]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as endpoint:
            try:
                assert endpoint.stdout.readline() == "listens\n"
                yield name
            finally:
                endpoint.kill()
    finally:
        # The namespace lives on as long as the kernel speaks for sockets in it; its card must not.
        subprocess.run(["ip", "link", "delete", name], check=False)
        ip("netns", "delete", name)


def test_requests_at_a_host_that_is_gone_end_whether_they_were_sent_before_or_after(host):
    async def test():
        client, origin = UpstreamClient(2.0), Origin.of(url_of(THEIRS, PORT))
        head = origin.head(b"GET", b"/", b"", 0)
        kept = await client.send(origin, head)
        assert [await kept.read(), await kept.read()] == [b"first", b""]
        streaming = await client.send(origin, head)
        assert await streaming.read() == b"first"
        client.release(kept)
        ip("-n", host, "route", "add", "blackhole", f"{OURS}/32")
        gone_s = time.monotonic()

        async def ends(read):
            with pytest.raises(UpstreamError, match=r"silent|no connection"):
                await read
            return time.monotonic() - gone_s

        # One waits for the next token; the other is sent over a connection that was kept.
        both = ends(streaming.read()), ends(client.send(origin, head))
        return await asyncio.wait_for(asyncio.gather(*both), 2 * MOST_S)

    assert max(asyncio.run(test())) < MOST_S

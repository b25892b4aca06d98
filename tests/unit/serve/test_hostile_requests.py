"""Whatever comes over a connection, the gateway says no in time and stays as it was."""

import asyncio
import gc
import time
from collections import Counter

import psutil
import pytest
from sizes import is_thorough
from unit.hostile_requests import ADMIN, USER, HostileRequests
from unit.raw_endpoint import RawCaller
from unit.serve.test_bytes_through import WHOLE, a_site
from unit.serve.test_serve_gateway import FakePool

NUM = 10_000 if is_thorough() else 400
WARM = NUM // 4
MOST_S = 1.0
"""Of this process's CPU for one request, both its ends: nobody else is served meanwhile."""
HANGS_S = 30.0
GROWTH = 0.02


async def ask(port, pieces):
    """Send, say that no more will come, and read until the gateway closes; return what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await read_answer(reader, writer)
        if answer.startswith(b"HTTP/1.1 100 "):
            answer = await read_answer(reader, writer)
        return answer
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def read_answer(reader, writer):
    """First bytes of the answer: of what is whole at once, else once no more will be asked."""
    try:
        async with asyncio.timeout(0.02):
            return await reader.read(1 << 16)
    except TimeoutError:
        writer.write_eof()
        return await reader.read(1 << 16)


def status_of(answer):
    """0: the connection was closed without a word."""
    if not answer:
        return 0
    first = answer.split(b"\r\n", 1)[0].split(b" ")
    assert first[0] == b"HTTP/1.1", answer[:200]
    return int(first[1])


def test_hostile_requests_are_refused_in_time_and_leave_nothing_behind():
    seen, slowest = Counter(), (0.0, b"")
    own = FakePool("own")

    async def test(port, gateway, endpoints):
        nonlocal slowest
        endpoints[0].pieces = (WHOLE,)
        process, requests = psutil.Process(), HostileRequests(seed=1)
        for number in range(NUM):
            if number == WARM:
                gc.collect()
                before = process.memory_info().rss, process.num_fds(), len(asyncio.all_tasks())
            data = requests.make()
            started_s = time.process_time()
            try:
                async with asyncio.timeout(HANGS_S):
                    status = status_of(await ask(port, requests.split(data)))
            except TimeoutError:
                pytest.fail(f"no end: {data[:300]!r}")
            slowest = max(slowest, (time.process_time() - started_s, data))
            seen[status] += 1
            assert status < 500, (data[:2000], data[-200:])
        await asyncio.sleep(0.5)
        gc.collect()
        after = process.memory_info().rss, process.num_fds(), len(asyncio.all_tasks())
        assert gateway.in_flight == 0
        assert after[1] <= before[1] + 4
        assert after[2] <= before[2] + 4
        if is_thorough():
            assert after[0] <= before[0] * (1 + GROWTH), (before, after)
        async with RawCaller.to(port) as caller:
            token = f"authorization: Bearer {USER}\r\n".encode()
            status, *_ = await caller.ask(b"/v1/completions", b'{"model":"m"}', token)
            assert status == 200

    async def inside():
        async with a_site(own=own, tokens=(USER, ADMIN), limits={"body_timeout_s": 2}) as site:
            await test(*site)

    asyncio.run(inside())
    assert slowest[0] < MOST_S, slowest[1][:2000]
    assert {200, 400, 401, 404} <= set(seen), seen

"""Thousands of streams over HTTP/2, most of which end early, are all counted."""

import asyncio
import contextlib
import gc
from collections import Counter

import grpc
import numpy as np
from sizes import is_thorough
from unit.proxy_site import BODY, EVENTS, STREAM, a_head, a_piece, a_proxy_site, an_answer

from serve_app.ext_proc.exchange import Exchange
from serve_app.ext_proc.http2 import Http2Protocol
from serve_app.ext_proc.protocol import PROCESS, ProcessingRequest, ProcessingResponse

NUM_STREAMS = 10_000 if is_thorough() else 600
NUM_TOGETHER, NUM_PER_CONNECTION = 60, 300
WAYS = ("whole", "cancelled", "half-closed", "late", "connection lost")
SHARES = (0.3, 0.3, 0.2, 0.1, 0.1)
MESSAGES = (a_head(), a_piece(BODY), *an_answer(headers=EVENTS, pieces=STREAM))
PLACED = 2
"""Messages after which a request is placed."""


async def stream(channel, way, num_messages):
    """Say what a proxy says, or begin to; return how it ended, and after how many messages."""
    call = channel.stream_stream(
        PROCESS.decode(), ProcessingRequest.SerializeToString, ProcessingResponse.FromString
    )(timeout=0.005 if way == "late" else None)
    num_sent = 0
    over = grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError
    with contextlib.suppress(*over):
        for message in MESSAGES[: len(MESSAGES) if way == "whole" else num_messages]:
            await call.write(message)
            num_sent += 1
            if num_sent == PLACED:
                assert await call.read() != grpc.aio.EOF
        if way in ("whole", "half-closed"):
            await call.done_writing()
            while await call.read() != grpc.aio.EOF:
                pass
            assert await call.code() == grpc.StatusCode.OK
        elif way == "cancelled":
            call.cancel()
    return way, num_sent


def test_every_stream_is_counted_once_and_nothing_is_left():
    rng = np.random.default_rng(46)
    ways = rng.choice(len(WAYS), NUM_STREAMS, p=SHARES).tolist()
    lengths = rng.integers(0, len(MESSAGES), NUM_STREAMS).tolist()

    async def run():
        async with a_proxy_site(limits={"max_in_flight": 1000}) as site:
            connections = set()
            methods = {PROCESS: lambda stream: Exchange(site.site, stream)}
            server = await asyncio.get_running_loop().create_server(
                lambda: Http2Protocol(methods, 1000, 8 << 20, connections), "127.0.0.1", 0
            )
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ended = []
            for begin in range(0, NUM_STREAMS, NUM_PER_CONNECTION):
                options = (("grpc.use_local_subchannel_pool", 1),)
                channel = grpc.aio.insecure_channel(address, options=options)
                places = asyncio.Semaphore(NUM_TOGETHER)

                async def one(number, channel=channel, places=places):
                    async with places:
                        return await stream(channel, WAYS[ways[number]], lengths[number])

                numbers = range(begin, min(begin + NUM_PER_CONNECTION, NUM_STREAMS))
                ended += await asyncio.gather(*map(one, numbers))
                for connection in (*connections,):
                    connection._transport.abort()  # What is still open is lost.
                await site.until(lambda: not connections)
                await channel.close()
            server.close()
            await site.until(lambda: not (site.gateway.in_flight or site.site.deliveries))
            assert not any(site.loads.values())
            assert site.value("requests_in_flight", pool="theirs") == 0.0
            return ended, Counter(site.outcomes)

    ended, outcomes = asyncio.run(run())
    gc.collect()  # What grpcio leaves.
    assert len(ended) == NUM_STREAMS
    num_of = Counter(way for way, _ in ended)
    placed = sum(sent >= PLACED for way, sent in ended if way not in ("whole", "late"))
    assert set(outcomes) == {"stop", "abort"}
    assert outcomes["stop"] == num_of["whole"]
    # Nobody knows how far one came whose time was over.
    assert placed <= outcomes["abort"] <= placed + num_of["late"]

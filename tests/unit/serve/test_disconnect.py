"""Callers who leave, told by our listener without a task, and by other servers with one."""

import asyncio
import socket

import pytest

from serve_app.cluster import Limits
from serve_app.http.connection import connection_of
from serve_app.http.disconnect import CancelOnDisconnect
from serve_app.http.listener import Listener

ASK = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nab"


class Answering:
    """Answers when it may, and notes what has become of that."""

    def __init__(self, with_connection):
        self.with_connection = with_connection
        self.began, self.may_answer, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.num_tasks = self.presence = None

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        connection = connection_of(scope)
        assert not connection.cycle.more_body
        num_before = len(asyncio.all_tasks())
        try:
            with CancelOnDisconnect(
                receive, connection if self.with_connection else None
            ) as self.presence:
                self.num_tasks = len(asyncio.all_tasks()) - num_before
                self.began.set()
                await self.may_answer.wait()
            headers = [(b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"ok"})
        finally:
            self.ended.set()


def run(with_connection, test):
    async def inside():
        app = Answering(with_connection)
        listener = app.listener = Listener(app, Limits())
        port = await listener.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(30):
                writer.write(ASK)
                await app.began.wait()
                await test(app, reader, writer)
        finally:
            writer.close()
            await listener.stop()

    asyncio.run(inside())


@pytest.mark.parametrize("with_connection", [True, False])
def test_what_is_done_for_a_caller_ends_when_the_caller_leaves(with_connection):
    async def test(app, reader, writer):
        # A reset, which is told even where nobody reads.
        linger = b"\x01\0\0\0\0\0\0\0"
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await app.ended.wait()
        assert app.presence.is_gone
        assert app.num_tasks == (0 if with_connection else 1)

    run(with_connection, test)


def test_who_asks_once_more_before_the_answer_and_leaves_is_gone():
    async def test(app, reader, writer):
        (connection,) = app.listener._config.open
        writer.write(ASK)
        while not connection.pipeline:
            await asyncio.sleep(0.001)
        writer.close()
        await app.ended.wait()
        assert app.presence.is_gone

    run(True, test)


def test_the_second_request_on_a_connection_is_watched_as_the_first_was():
    async def test(app, reader, writer):
        app.may_answer.set()
        assert (await reader.readuntil(b"ok")).endswith(b"ok")
        app.began.clear()
        app.ended.clear()
        app.may_answer.clear()
        writer.write(ASK)
        await app.began.wait()
        writer.close()
        await app.ended.wait()
        assert app.presence.is_gone

    run(True, test)

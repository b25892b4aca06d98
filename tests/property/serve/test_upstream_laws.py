"""Laws of the client for endpoints: what comes in chunks goes on in order, byte for byte."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from serve_app.gateway.upstream import Connection, Origin, UpstreamError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    """A connection to nobody."""

    def __init__(self):
        super().__init__()
        self.closed = False

    def get_extra_info(self, name, default=None):
        return default

    def is_closing(self):
        return self.closed

    def abort(self):
        self.closed = True

    def write(self, data):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


def connected():
    one = Connection(Origin.of("http://127.0.0.1:1"))
    one._transport = Transport()
    one.send(b"", b"")
    return one


def chunked(pieces):
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces)


async def read_all(connection, reads, takes):
    """Feed what a socket would give, and return what went on, as pieces."""
    found = []

    def take(piece, chunk):
        if chunk is not None:
            assert chunk == b"%x\r\n%b\r\n" % (len(piece), piece)
        if not next(takes, True):
            return False
        found.append(piece)
        return True

    async def reader():
        await connection.wait_for_head()
        while piece := await connection.read(take):
            found.append(piece)

    reading = asyncio.create_task(reader())
    for data in reads:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        connection.data_received(data)
    await reading
    return found


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12), st.data())
@settings(max_examples=scaled(300))
def test_a_body_in_chunks_goes_on_in_order_however_it_comes_and_whoever_takes_it(pieces, data):
    wire = HEAD + chunked(pieces) + b"0\r\n\r\n"
    # Cuts at the ends of chunks are as likely as others: those are taken without the parser.
    ends = [len(HEAD + chunked(pieces[:i])) for i in range(len(pieces) + 1)]
    cuts = sorted(data.draw(st.sets(st.sampled_from(ends) | st.integers(1, len(wire) - 1))))
    reads = [wire[i:j] for i, j in zip([0, *cuts], [*cuts, len(wire)], strict=True) if i < j]
    takes = iter(data.draw(st.lists(st.booleans(), max_size=20)))
    found = asyncio.run(asyncio.wait_for(read_with_takes(reads, takes), 10))
    assert b"".join(found) == b"".join(pieces)


async def read_with_takes(reads, takes):
    return await read_all(connected(), reads, takes)


@pytest.mark.parametrize("size", [b"1_0", b"+10", b" 10", b"0x10", b"1g", b"-1"])
def test_a_chunk_whose_length_only_python_can_read_breaks_the_answer(size):
    async def run():
        await read_all(connected(), [HEAD, size + b"\r\n" + b"x" * 16 + b"\r\n"], iter(()))

    with pytest.raises(UpstreamError, match="not HTTP"):
        asyncio.run(asyncio.wait_for(run(), 10))


def test_a_chunk_with_an_extension_goes_on_without_it():
    reads = [HEAD, b"3;a=b\r\nabc\r\n", b"4\r\ndefg\r\n", b"0\r\n\r\n"]
    assert b"".join(asyncio.run(read_with_takes(reads, iter(())))) == b"abcdefg"

"""Whatever comes over the socket between carriers and their decider, neither end fails by it."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.serve.test_serve_carriers import a_gateway
from unit.serve.test_serve_external import a_cluster

from serve_app.gateway import carrier, decider
from serve_app.gateway.carrier_wire import FrameKind, Hello, to_json
from serve_app.gateway.decider import CarriedPool, Decider

HELLO = Hello().write()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
SAID = st.dictionaries(st.sampled_from(sorted(json.loads(HELLO))), JSON)
PAYLOAD = (
    st.binary(max_size=40)
    | (JSON | SAID).map(to_json)
    | st.sampled_from([HELLO, b"a\nb\n", b"a\nb\n1.5\n\nx", b"\x02\x00[]", b"\x02\x00\x00\x00{}"])
)


@st.composite
def frames(draw):
    kind = draw(st.sampled_from([*FrameKind, 0, 99, 255]))
    payload = draw(PAYLOAD)
    size = draw(st.sampled_from([len(payload)] * 9 + [0, 1 << 31]))
    number = draw(st.integers(0, 3))
    return size.to_bytes(4, "little") + bytes([kind]) + number.to_bytes(4, "little") + payload


def a_frame(kind, payload):
    return len(payload).to_bytes(4, "little") + bytes([kind]) + bytes(4) + payload


BYTES = st.lists(frames() | st.binary(max_size=12), max_size=8).map(b"".join)


class Transport:
    """What an end writes to; tells it of its end as asyncio does."""

    def __init__(self, protocol):
        self._protocol = protocol
        self.is_open, self.written = True, b""
        protocol.connection_made(self)

    def write(self, data):
        assert self.is_open
        self.written += data

    def is_closing(self):
        return not self.is_open

    def abort(self):
        if self.is_open:
            self.is_open = False
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    close = abort


async def give(protocol, data, cuts):
    """Have an end read bytes in pieces, until it closes."""
    transport, at = Transport(protocol), 0
    for cut in sorted(cuts):
        if transport.is_open:
            protocol.data_received(data[at:cut])
            await asyncio.sleep(0)
            at = max(at, cut)
    if transport.is_open:
        protocol.data_received(data[at:])
    for _ in range(5):
        await asyncio.sleep(0)
    transport.abort()
    for _ in range(5):
        await asyncio.sleep(0)
    return transport


@pytest.fixture(autouse=True, scope="module")
def silence():
    """Frames that cannot be read are logged with where they failed, thousands of times here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def runner():
    """One event loop for all, and what it was told of that nobody has caught."""
    with asyncio.Runner() as made:
        made.failures = []
        handle = lambda _, context: made.failures.append(context)  # noqa: E731
        made.get_loop().set_exception_handler(handle)
        yield made


@pytest.fixture(scope="module")
def gateway():
    made = a_gateway(a_cluster([SimpleNamespace(url="http://127.0.0.1:9")], {}), CarriedPool)
    yield made
    made.manager.stop()


@settings(max_examples=scaled(500))
@given(st.booleans(), BYTES, st.lists(st.integers(0, 200), max_size=3))
def test_a_decider_reads_any_bytes_and_keeps_nothing_of_them(runner, gateway, is_known, data, cuts):
    async def test():
        one = Decider(gateway, None)
        first = a_frame(FrameKind.HELLO, HELLO) if is_known else b""
        await give(decider._Link(one), first + data, cuts)
        assert not one._links
        assert gateway.in_flight == 0

    runner.run(test())
    assert runner.failures == []


@settings(max_examples=scaled(500))
@given(st.booleans(), BYTES, st.lists(st.integers(0, 200), max_size=3))
def test_a_carrier_reads_any_bytes_and_lets_everybody_know_who_waits(runner, is_known, data, cuts):
    async def test():
        left = []
        link = carrier._Link(lambda: left.append(1))
        number, call = link.open()
        assert number == 1
        asked = asyncio.create_task(link.ask(b"\x02\x00\x00\x00{}"))
        await give(link, (a_frame(FrameKind.HELLO, HELLO) if is_known else b"") + data, cuts)
        assert left
        assert link.decider.done()
        assert await call.replies.get() is None or not call.replies.empty()
        await asyncio.wait([asked])
        assert asked.exception() is None or isinstance(
            asked.exception(), carrier.DeciderUnavailable
        )

    runner.run(test())
    assert runner.failures == []

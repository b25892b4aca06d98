"""Whatever proxies say in whatever order: nothing breaks, and nothing is left of it."""

import asyncio
import contextlib

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.proxy_site import (
    BODY,
    CHAT,
    DECISION,
    EVENTS,
    JSON,
    PLACES,
    STREAM,
    WHOLE,
    ProxyStream,
    a_head,
    a_piece,
    a_proxy_site,
    an_answer,
    pairs_of,
    trailers,
    turns,
)  # fmt: skip

from serve_app.ext_proc import exchange
from serve_app.ext_proc.protocol import ProcessingRequest

NUM_STREAMS = 4
MODES = st.sampled_from([0, 1, 2, 3, 4, 99])
ODD = st.one_of(st.binary(max_size=9), st.sampled_from([b"gzip", b"9", b"a, b", b"\xff", b"\r\n"]))
NAMES = st.sampled_from(
    [b":path", b":method", b":status", b"x-forwarded-for", b"content-length", b"content-encoding",
     b"content-type", b"x-gateway-inference-objective", DECISION.encode(), b"", b"X"]
)  # fmt: skip
HEADERS = st.lists(st.tuples(NAMES, ODD), max_size=3)
PATHS = st.sampled_from([CHAT, "/v1/responses", "/", "", "*", "/x/../v1/models?a=%", "/%ff"])
PLACE = st.sampled_from([*PLACES, "", "127.0.0.1:9", "\u00fc"])
SUBSETS = st.one_of(
    st.none(), st.lists(st.one_of(PLACE, st.floats(allow_nan=False), st.none()), max_size=3),
    st.text(max_size=9), st.booleans(), PLACE,
)  # fmt: skip


@st.composite
def heads(draw):
    head = a_head(
        draw(HEADERS), draw(st.sampled_from(["POST", "GET", "", "DELETE"])), draw(PATHS),
        draw(st.booleans()), draw(MODES), draw(MODES), draw(SUBSETS),
    )  # fmt: skip
    head.observability_mode = draw(st.sampled_from([False, False, True]))
    return head


@st.composite
def answers(draw):
    """A part of an answer."""
    status = draw(st.sampled_from([200, 200, 204, 404, 429, 500, 0, 99]))
    kind = draw(st.sampled_from([JSON, EVENTS, {}]))
    pieces = draw(
        st.sampled_from([STREAM, (WHOLE,), (), (b"", b"\xff"), (b'data: {"error":1}\n\n',)])
    )
    served, by = draw(st.one_of(st.none(), PLACE)), draw(st.sampled_from(["attribute", "metadata"]))
    parts = an_answer(status, kind, pieces, served, by, draw(st.booleans()))
    begin = draw(st.integers(0, len(parts) - 1))
    return parts[begin : draw(st.integers(begin, len(parts)))]


@st.composite
def odd_heads(draw):
    """A head with nothing but odd headers, of a request or of an answer."""
    kind = draw(st.sampled_from(["request_headers", "response_headers"]))
    head = {"headers": pairs_of(draw(HEADERS)), "end_of_stream": draw(st.booleans())}
    return ProcessingRequest(**{kind: head})


PIECES = st.builds(a_piece, st.sampled_from([BODY, b"", b"{", b"x" * 3000]), st.booleans())
OTHERS = st.sampled_from(
    [trailers(), trailers("response_trailers"), ProcessingRequest(), b"\xff", b""]
)
STEPS = st.one_of(
    st.just(()), st.just(()), st.just("close"), st.just("observe"),
    st.lists(st.one_of(heads(), PIECES, odd_heads(), OTHERS), min_size=1, max_size=3),
    st.builds(lambda head: [head, a_piece(BODY)], heads()), answers(), answers(),
    st.binary(max_size=30).map(lambda data: [data]),
    st.just([a_head(), a_piece(BODY)]), st.just([a_head(answer_mode=0), a_piece(BODY)]),
)  # fmt: skip


CLUSTERS = st.sampled_from(
    [
        {}, {"queue": {"max_wait_s": 60.0}, "pool": {"max_ongoing": 1}}, {"sessions": {}},
        {"pool": {"model": "theirs", "order": "priority"}, "outlier_ejection": {"base_s": 60.0}},
    ]
)  # fmt: skip


def say(stream, messages):
    for message in messages:
        # The transport ends a call that it cannot read.
        unreadable = contextlib.suppress(DecodeError) if isinstance(message, bytes) else None
        with unreadable or contextlib.nullcontext():
            stream.say(message)


@settings(max_examples=scaled(250))
@given(st.lists(st.tuples(st.integers(0, NUM_STREAMS - 1), STEPS), max_size=25), CLUSTERS)
def test_nothing_breaks_and_nothing_is_left(steps, fields):
    unhandled = []

    async def run():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        limits = {"max_body_bytes": 2000}
        async with a_proxy_site(limits=limits, **fields) as site:
            streams = [ProxyStream(site.site) for _ in range(NUM_STREAMS)]
            opened = [*streams]
            for number, step in steps:
                if step == "close":
                    streams[number].close()
                    streams[number] = ProxyStream(site.site)
                    opened.append(streams[number])
                elif step == "observe":
                    name = next(iter(site.site.deliveries), b"")
                    head = a_head({DECISION: name}, ends=True)
                    head.observability_mode = True
                    say(streams[number], [head])
                elif step:
                    say(streams[number], step)
                else:
                    await turns()
            for stream in streams:
                stream.close()
            await turns()
            await asyncio.sleep(2 * exchange._OBSERVED_S)
            await site.is_quiet()
            assert {stream.status for stream in opened} == {0}
            assert sum(site.outcomes.values()) >= sum(bool(stream.placed) for stream in opened)
            assert unhandled == []

    known = exchange._OBSERVED_S
    exchange._OBSERVED_S = 0.0
    try:
        asyncio.run(run())
    finally:
        exchange._OBSERVED_S = known

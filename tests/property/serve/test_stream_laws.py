"""Any valid stream of events, cut into any pieces, goes on byte by byte, and is understood."""

import asyncio
import json
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from serve_app.cluster import Deadlines
from serve_app.gateway.exchange import Call, InferenceRequest
from serve_app.gateway.forwarding import ResponseTimer, _hand_on_events
from serve_app.gateway.upstream import UpstreamError

TEXT = st.text(max_size=6).filter(bool)
SIGNS = st.lists(st.sampled_from([": keep-alive", "id: 7", "retry: 100", ":", "id"]), max_size=2)


def chat_events(draw, texts, reason, num_choices):
    """Events, the tokens in them, and whether the answer says how it ends."""
    for index in range(num_choices):
        yield {"choices": [{"index": index, "delta": {"role": "assistant", "content": ""}}]}
    for index in range(num_choices):
        for text in texts:
            choice = {"index": index, "delta": {"content": text}, "finish_reason": None}
            yield {"choices": [choice], "usage": None}
        if reason:
            yield {"choices": [{"index": index, "delta": {}, "finish_reason": reason}]}


def anthropic_events(draw, texts, reason, num_choices):
    yield {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}
    yield {"type": "ping"}
    for text in texts:
        delta = {"type": "text_delta", "text": text}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    if reason:
        stop = {"stop": "end_turn", "length": "max_tokens"}[reason]
        used = {"output_tokens": len(texts)}
        yield {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": used}
        yield {"type": "message_stop"}


def responses_events(draw, texts, reason, num_choices):
    yield {"type": "response.created", "response": {"error": None, "usage": None}}
    for text in texts:
        yield {"type": "response.output_text.delta", "delta": text}
    yield {"type": "response.output_text.done", "text": "".join(texts)}
    if reason:
        kind = {"stop": "response.completed", "length": "response.incomplete"}[reason]
        yield {"type": kind, "response": {"usage": {"output_tokens": len(texts)}}}


@st.composite
def streams(draw):
    """A stream's bytes, its tokens, how it ends (None: it does not say), and its cuts."""
    make = draw(st.sampled_from([chat_events, anthropic_events, responses_events]))
    texts, reason = (
        draw(st.lists(TEXT, min_size=1, max_size=5)),
        draw(st.sampled_from(["stop", "length", None])),
    )
    num_choices = draw(st.integers(1, 3)) if make is chat_events else 1
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    colon = draw(st.sampled_from([": ", ":"]))
    indent = draw(st.sampled_from([None, None, 1]))
    is_ascii, is_named = draw(st.booleans()), make is not chat_events and draw(st.booleans())
    lines = []
    for event in make(draw, texts, reason, num_choices):
        lines += [f"event{colon}{event['type']}"] if is_named else []
        lines += draw(SIGNS)
        text = json.dumps(event, ensure_ascii=is_ascii, indent=indent)
        lines += [f"data{colon}{line}" for line in text.split("\n")]
        lines += ["", *draw(st.sampled_from([[], [""], [": ping", ""]]))]
    if make is chat_events and draw(st.booleans()):
        lines += [f"data{colon}[DONE]", ""]
        is_done = True
    else:
        is_done = False
    data = (draw(st.sampled_from(["", "\ufeff"])) + end.join([*lines, ""])).encode()
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=8))
    if draw(st.booleans()):
        # As they come: whole events.
        cuts = [at + 4 for at in range(len(data)) if data[at : at + 2] == b"\n\n"]
    return data, len(texts) * num_choices, reason, is_done, cuts


class Upstream:
    """An endpoint's connection that gives pieces, and then ends as it should or breaks."""

    def __init__(self, pieces, breaks):
        self.pieces, self.breaks = [one for one in pieces if one], breaks
        self.status, self.headers = 200, []
        self.is_waiting, self.ends_by_close = True, False

    async def read(self, take=None):
        while self.pieces:
            piece = self.pieces.pop(0)
            if take is None or not take(piece, None):
                return piece
        if self.breaks:
            raise UpstreamError("closed its connection")
        return b""


class Caller:
    def __init__(self, takes):
        self.takes, self.begun, self.read = iter(takes), False, b""

    async def begin(self, status, headers):
        self.begun = True

    async def write(self, data):
        self.read += data

    def write_now(self, data, chunk=None):
        is_taken = next(self.takes, True)
        self.read += data if is_taken else b""
        return is_taken


def handed_on(data, cuts, breaks=False, takes=(), at_once=False):
    """What a caller reads, tokens and how the answer ends; the error where it is cut."""
    cuts = sorted(cuts)
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    caller, taken = Caller(takes), []
    request = InferenceRequest("1", [1], 1, Call(b"/v1/chat/completions", b"", b"", stream=True))
    attempt = SimpleNamespace(
        request=request, downstream=caller, take=lambda *told, **_: taken.append(told)
    )

    async def run():
        timer = ResponseTimer(Deadlines(), attempt, 0.0)
        try:
            await _hand_on_events(Upstream(pieces, breaks), attempt, timer, at_once)
        finally:
            timer.stop()

    try:
        asyncio.run(run())
    except UpstreamError as error:
        return caller.read, taken, error
    return caller.read, taken, None


@settings(max_examples=scaled(1500))
@given(streams(), st.lists(st.booleans(), max_size=5), st.booleans())
def test_a_valid_stream_goes_on_byte_by_byte_and_is_understood_however_it_is_cut(
    stream, takes, at_once
):
    data, num_tokens, reason, _, cuts = stream
    read, taken, error = handed_on(data, cuts, takes=takes, at_once=at_once)
    assert (read, error) == (data, None)
    # A stream that ends without a reason, in a message that is whole, may be whole. It tells of no
    # tokens either, where its events are of many kinds.
    assert taken[-1] == (num_tokens if reason else taken[-1][0], reason or "stop")
    assert taken[-1][0] >= num_tokens


@settings(max_examples=scaled(500))
@given(streams())
def test_a_connection_that_breaks_cuts_only_answers_that_have_not_ended(stream):
    data, num_tokens, reason, is_done, cuts = stream
    read, taken, error = handed_on(data, cuts, breaks=True)
    assert data.startswith(read)
    if reason or is_done:
        assert error is None
        assert taken[-1] == (num_tokens, reason or "stop")
    else:
        assert error is not None


@settings(max_examples=scaled(1000))
@given(
    st.lists(st.binary(max_size=30) | st.sampled_from([b"data:", b"\n", b"\r", b"{}", b": a\n"])),
    st.lists(st.integers(0, 100), max_size=5),
)
def test_whatever_else_comes_goes_on_as_it_is(parts, cuts):
    data = b"".join(parts)
    if b"error" in data:
        return
    read, _, error = handed_on(data, [min(cut, len(data)) for cut in cuts])
    # Where nothing was said at all, another endpoint may say more.
    assert read == data or (error is not None and not read)

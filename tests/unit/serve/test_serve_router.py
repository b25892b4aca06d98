"""What the router of any deployment reads of requests, and that it counts each to its end."""

import asyncio
import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from ray.serve.exceptions import RequestCancelledError
from ray.serve.request_router import PendingRequest
from unit.proxy_site import STREAM

from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.router import PolicyRequestRouter, _body_of

IDS = list(range(1000, 1300))


@dataclass
class Body:
    """A request as somebody's own deployment may take it."""

    prompt: object


@pytest.mark.parametrize(
    ("argument", "num_tokens"),
    [
        ({"prompt": "a" * 400}, 100), ({"prompt": ["a" * 400]}, 100), ({"prompt": IDS}, 300),
        ({"token_ids": IDS}, 300), ({"token_ids": None, "prompt": IDS}, 300), (Body(IDS), 300),
        (SimpleNamespace(prompt=IDS, stream=True), 300),
        ({"prompt": ""}, 1), ({"prompt": []}, 1), ({"other": "x"}, 1), ("hello", 1),
    ],
)  # fmt: skip
def test_a_prompt_counts_in_every_shape_that_openais_api_has(argument, num_tokens):
    router = object.__new__(PolicyRequestRouter)  # Serve makes them, within a deployment.
    router._tokenizer = EstimatingTokenizer()
    for pending in (
        SimpleNamespace(args=["another", argument], kwargs={}),
        SimpleNamespace(args=[], kwargs={"request": argument}),
    ):
        assert len(router._token_ids(_body_of(pending))) == num_tokens


class Whole:
    """An answer as engines give it that is not streamed."""

    def model_dump_json(self):
        return '{"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 3}}'


class Wrong(Whole):
    error = SimpleNamespace(code=500)

    def model_dump_json(self):
        return '{"error": {"message": "out of memory", "code": 500}}'


class Result:
    """What Serve has of an answer: pieces, and then an error."""

    def __init__(self, pieces, end):
        self._left, self._done = [*pieces, end], []

    async def __anext__(self):
        await asyncio.sleep(0)
        piece = self._left.pop(0)
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def add_done_callback(self, callback):
        self._done.append(callback)

    def end(self, value):
        for callback in self._done:
            callback(value)


def a_router(folder, replicas="ab"):
    router = object.__new__(PolicyRequestRouter)
    router._deployment_id = SimpleNamespace(name="mine")
    router._replicas_list = [
        SimpleNamespace(
            replica_id=SimpleNamespace(unique_id=name), replica_metadata={}, routing_stats={}
        )
        for name in replicas
    ]  # fmt: skip
    router.initialize_state("sed", decision_log=str(folder))
    return router


async def place(router, **fields):
    body = {"messages": [{"role": "user", "content": "hello " * 40}], "stream": True} | fields
    pending = PendingRequest([body], {}, SimpleNamespace(request_id="r", is_streaming=True))
    ranks = await router.choose_replicas(router._replicas_list, pending)
    assert sorted(one.replica_id.unique_id for [one] in ranks) == ["a", "b"]
    return pending, ranks


def in_flight(router):
    replicas = router._gateway.table.replicas.values()
    return {one.replica_id: one.in_flight.count for one in replicas}


def rows_after(router, folder):
    router._gateway.log.close()
    rows = [row for file in folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    return [
        (row["outcome"], row["output_tokens"]) for row in sorted(rows, key=lambda r: r["time_s"])
    ]


TOKENS = [[piece.decode() for piece in STREAM[:2]], STREAM[2].decode() + STREAM[3].decode()]
OVER = StopAsyncIteration()


@pytest.mark.parametrize(
    ("pieces", "end", "expected"),
    [
        (TOKENS, OVER, ("stop", 2)), ([Whole()], OVER, ("stop", 3)),
        (["one", {"two": 2}, 3], OVER, ("stop", 3)), ([], OVER, ("stop", 0)),
        (TOKENS[:1], asyncio.CancelledError(), ("abort", 2)),
        ([], RequestCancelledError("x"), ("abort", 0)),
        (TOKENS[:1], RuntimeError("died"), ("failed", 2)),
        ([], RuntimeError("died"), ("failed", 0)),
        ([Wrong()], OVER, ("failed", 0)), ([[Wrong()]], OVER, ("failed", 0)),
    ],
)  # fmt: skip
def test_a_request_is_a_row_with_its_outcome(tmp_path, pieces, end, expected):
    async def run():
        router = a_router(tmp_path)
        pending, [[replica], _] = await place(router)
        name = replica.replica_id.unique_id
        assert in_flight(router)[name] == 1
        pending.future.set_result(replica)
        result = Result(pieces, end)
        router.on_request_routed(pending, replica.replica_id, result)
        await read(result, type(end))
        await until(lambda: not router._calls)
        assert not any(in_flight(router).values())
        return router

    assert rows_after(asyncio.run(run()), tmp_path) == [expected]


def test_a_stand_in_counts_in_place_of_the_replica_that_was_picked(tmp_path):
    async def run():
        router = a_router(tmp_path)
        pending, [_, [other]] = await place(router)
        pending.future.set_result(other)
        result = Result(TOKENS, OVER)
        router.on_request_routed(pending, other.replica_id, result)
        await result.__anext__()
        await until(lambda: in_flight(router)[other.replica_id.unique_id] == 1)
        assert sum(in_flight(router).values()) == 1
        await read(result)
        await until(lambda: not router._calls)
        assert not any(in_flight(router).values())
        assert not router._gateway.outliers.records
        return router

    assert rows_after(asyncio.run(run()), tmp_path) == [("failed", 0), ("stop", 2)]


def test_a_request_that_serve_gives_up_or_its_caller_never_reads_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr("serve_app.router._UNSENT_S", 0.01)
    monkeypatch.setattr("serve_app.router._UNREAD_S", 0.01)

    async def run():
        router = a_router(tmp_path)
        waiting, _ = await place(router)
        waiting.future.cancel()
        sent, [[replica], _] = await place(router)
        sent.future.set_result(replica)  # And then it is cancelled on its way.
        refused, [[replica], _] = await place(router)
        refused.future.set_result(replica)
        refused.reset_future()  # It waits anew.
        await until(lambda: len(router._calls) == 1)
        again = await router.choose_replicas(router._replicas_list, refused)
        assert again[0] == [replica]
        refused.future.set_result(replica)
        result = Result(TOKENS, OVER)
        router.on_request_routed(refused, replica.replica_id, result)
        await result.__anext__()
        result.end(None)
        await until(lambda: not router._calls)
        assert not any(in_flight(router).values())
        return router

    rows = rows_after(asyncio.run(run()), tmp_path)
    assert rows == [("abort", 0), ("abort", 0), ("stop", 2)]


async def read(result, end=StopAsyncIteration):
    with contextlib.suppress(end):
        while True:
            await result.__anext__()


async def until(is_so):
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.001)

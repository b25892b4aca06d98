"""Requests that nobody waits for any more: the engine tells rank 0 until it has heard."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import TaskCancelledError

from serve_app.engine_config import EngineConfig
from serve_app.engines.base import EngineError, Sampling
from serve_app.engines.sharded.engine import ShardedEngine
from serve_app.engines.sharded.messages import GroupLimits, Progress, RankReport


class Method:
    """An actor's method: what is sent from a task that is cancelled never arrives."""

    def __init__(self, call):
        self._call = call

    def remote(self, *args):
        sender = asyncio.current_task()

        async def arrive():
            await asyncio.sleep(0)
            if sender.cancelling() or sender.done():
                raise TaskCancelledError
            return await self._call(*args)

        return asyncio.ensure_future(arrive())


class FakeRank:
    """Generates a token for every request that it was given, until it is told to forget it."""

    def __init__(self):
        self.running = {}
        self.num_lost = 0
        """Cancels that fail on their way."""
        self.num_cancels = 0
        self.submit, self.cancel = Method(self._submit), Method(self._cancel)
        self.poll = Method(self._poll)

    async def _submit(self, request_id, token_ids, sampling):
        self.running[request_id] = None

    async def _cancel(self, request_ids):
        self.num_cancels += 1
        if self.num_cancels <= self.num_lost:
            raise TaskCancelledError
        for one in request_ids:
            self.running.pop(one, None)

    async def _poll(self, timeout_s):
        await asyncio.sleep(0.001)
        return RankReport([Progress(one, 5, False, None) for one in self.running], None, [])


async def an_engine(rank):
    config = EngineConfig(model="none", max_batch=4, max_waiting=8)
    engine = ShardedEngine(config, SimpleNamespace(ranks=[rank], disband=lambda: None))
    engine._limits = GroupLimits(1000, frozenset())
    engine._admission.open(2000, 100)
    engine._watchers = [
        asyncio.create_task(engine._read()),
        asyncio.create_task(engine._streams.cancel_orphans(engine._group.ranks[0])),
    ]  # fmt: skip
    return engine


def run(test, **fields):
    async def inside():
        rank = FakeRank()
        for name, value in fields.items():
            setattr(rank, name, value)
        engine = await an_engine(rank)
        try:
            async with asyncio.timeout(30):
                await test(engine, rank)
        finally:
            for task in engine._watchers:
                task.cancel()
            await asyncio.gather(*engine._watchers, return_exceptions=True)

    asyncio.run(inside())


async def generate(engine, name):
    async for _ in engine.generate(name, [1, 2], Sampling(max_tokens=1000)):
        pass


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def leave_all(engine, rank):
    tasks = [asyncio.create_task(generate(engine, str(one))) for one in range(8)]
    await until(lambda: len(rank.running) == 8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not rank.running and not engine._streams.orphans)


def test_a_request_whose_task_is_cancelled_is_cancelled_at_the_rank():
    run(leave_all)


def test_a_cancel_that_is_lost_is_sent_again_until_it_is_acknowledged():
    async def test(engine, rank):
        await leave_all(engine, rank)
        assert rank.num_cancels > rank.num_lost

    run(test, num_lost=3)


def test_a_request_that_the_rank_runs_and_nobody_waits_for_is_cancelled():
    async def test(engine, rank):
        rank.running["nobody's#7"] = None
        await until(lambda: not rank.running)

    run(test)


def test_an_engine_without_ranks_refuses_and_has_nothing_to_cancel():
    async def test(engine, rank):
        engine._group.ranks = []
        for task in engine._watchers:
            task.cancel()
        with pytest.raises(EngineError, match="stopped"):
            await generate(engine, "a")
        assert not engine._streams.orphans

    run(test)

"""Requests held back before an engine, whose limit changes while others run."""

import asyncio

import pytest

from serve_app.engines.admission import BatchLimit
from tokenyard.routing.types import OrderKey


async def enter(limit, number):
    """So many requests that want in, and those that are."""
    tasks = [asyncio.create_task(limit.enter()) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks, sum(task.done() for task in tasks)


def test_the_engines_own_limit_holds_nobody_back():
    async def scenario():
        limit = BatchLimit(2)
        assert (await enter(limit, 5))[1] == 5
        assert limit.num_waiting == 0

    asyncio.run(scenario())


def test_a_lower_limit_lets_others_in_as_those_inside_leave_in_the_order_they_came():
    async def scenario():
        limit = BatchLimit(8)
        limit.resize(2)
        tasks, inside = await enter(limit, 4)
        assert (inside, limit.num_waiting) == (2, 2)
        limit.leave()
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [True, True, True, False]
        limit.resize(8)
        await asyncio.sleep(0)
        assert tasks[3].done()
        assert limit.num_waiting == 0

    asyncio.run(scenario())


def test_who_is_late_by_the_time_there_is_room_lets_others_go_first():
    async def scenario():
        now_s = 0.0
        limit = BatchLimit(8, lambda: now_s)
        limit.resize(1)
        await limit.enter()
        keys = OrderKey(1.0, 5.0, 30.0), OrderKey(2.0), OrderKey(3.0, 9.0, 30.0)
        tasks = [asyncio.create_task(limit.enter(key)) for key in keys]
        await asyncio.sleep(0)
        now_s = 6.0
        for done in ([False, True, False], [False, True, True], [True, True, True]):
            limit.leave()
            await asyncio.sleep(0)
            assert [task.done() for task in tasks] == done

    asyncio.run(scenario())


def test_lowering_it_stops_nobody_who_is_inside():
    async def scenario():
        limit = BatchLimit(8)
        assert (await enter(limit, 4))[1] == 4
        limit.resize(1)
        for _ in range(3):
            limit.leave()
            assert (await enter(limit, 1))[1] == 0
        limit.leave()
        assert limit.num_waiting == 2  # One is inside again.

    asyncio.run(scenario())


def test_one_who_goes_away_while_waiting_takes_no_room():
    async def scenario():
        limit = BatchLimit(8)
        limit.resize(1)
        tasks, _ = await enter(limit, 3)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        limit.leave()
        await asyncio.wait_for(tasks[2], 10)
        emptied = asyncio.create_task(limit.emptied())
        await asyncio.sleep(0)
        assert not emptied.done()
        limit.leave()
        await asyncio.wait_for(emptied, 10)

    asyncio.run(scenario())


def test_who_was_cancelled_as_it_was_let_in_takes_no_place():
    async def scenario():
        limit = BatchLimit(8)
        limit.resize(1)
        await limit.enter()
        [waits, next_one], _ = await enter(limit, 2)
        waits.cancel()
        limit.leave()
        await asyncio.gather(waits, return_exceptions=True)
        assert waits.cancelled()
        await next_one
        limit.leave()
        async with asyncio.timeout(5):
            await limit.emptied()

    asyncio.run(scenario())

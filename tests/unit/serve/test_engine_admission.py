"""What every engine checks before it takes a request."""

import asyncio

import pytest
from unit.engine_site import Repeater
from unit.serve.test_serve_gateway import Letters

from serve_app.engines.admission import Admission
from serve_app.engines.base import EngineError, EngineFull, EngineStats, Sampling
from serve_app.engines.texts import TextEngine

ONE = Sampling(max_tokens=1)


def an_admission(max_batch=2, max_waiting=1):
    admission = Admission(max_batch, max_waiting)
    admission.open(max_request_tokens=10, vocab_size=100)
    return admission


def test_a_full_batch_and_the_queue_behind_it_are_the_most():
    admission = an_admission()
    for name in ("a", "b", "c"):
        admission.check(name, [1], ONE, None)
        admission.enter(name)
    with pytest.raises(EngineFull, match="queue is full: 1 requests wait"):
        admission.check("d", [1], ONE, None)
    admission.leave("a")
    admission.check("d", [1], ONE, None)


def test_where_memory_holds_fewer_than_a_batch_fewer_may_wait():
    admission = an_admission(max_batch=8, max_waiting=1)
    for name in ("a", "b", "c"):
        admission.enter(name)
    admission.check("d", [1], ONE, None)
    with pytest.raises(EngineFull, match="queue is full"):
        admission.check("d", [1], ONE, 2)


class Unheard(Repeater):
    """An engine whose ranks have not told of an iteration: all that they were sent waits."""

    def stats(self):
        return EngineStats(len(self.running), 0, 0.0, 1000.0, 0)


@pytest.mark.parametrize(("max_waiting", "limit"), [(1, 4), (0, 4), (2, 3)])
def test_free_slots_are_filled_at_once_however_few_may_wait(max_waiting, limit):
    async def scenario():
        engine = Unheard()
        engine.stops_at = 0
        texts = TextEngine(engine, Letters(), 4, max_waiting, most=100)
        texts.limit_batch(limit)

        async def ask(name):
            return [one async for one in texts.generate(name, [65], ONE, ())]

        asked = [asyncio.create_task(ask(str(one))) for one in range(limit + max_waiting)]
        await asyncio.sleep(0)
        with pytest.raises(EngineFull):
            await ask("one more")
        engine.may_go_on.set()
        assert all(one[-1].finish_reason == "length" for one in await asyncio.gather(*asked))

    asyncio.run(scenario())


def test_a_name_is_used_once_at_a_time():
    admission = an_admission()
    admission.enter("a")
    with pytest.raises(EngineError, match="'a' is already being answered"):
        admission.check("a", [1], ONE, None)
    assert "a" in admission
    assert len(admission) == 1


def test_nothing_is_taken_before_opening_and_after_closing():
    with pytest.raises(EngineError, match="has not been started"):
        Admission(1, 1).check("a", [1], ONE, None)
    admission = an_admission()
    admission.close("rank 1 died")
    admission.close("stopped")
    with pytest.raises(EngineError, match="rank 1 died"):
        admission.check("a", [1], ONE, None)


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], ONE, "prompt is empty"),
        ([1] * 6, Sampling(5), "6 tokens and 5 to generate are more than the 10"),
        ([100], ONE, "token 100 is not in the vocabulary of 100"),
        ([-1], ONE, "token -1 is not"),
        ([1], Sampling(0), "max_tokens is 0"),
        ([1], Sampling(1, temperature=float("nan")), "temperature is nan"),
        ([1], Sampling(1, top_p=1.5), "top_p is 1.5"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_value(prompt, sampling, reason):
    with pytest.raises(EngineError, match=reason):
        an_admission().check("a", prompt, sampling, None)

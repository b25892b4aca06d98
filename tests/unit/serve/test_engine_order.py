"""In which order the ranks of an engine of ours take up what waits."""

import asyncio
from types import SimpleNamespace

import pytest

from serve_app.engine_config import EngineConfig
from serve_app.engines.base import Sampling
from serve_app.engines.sharded.messages import RequestNames
from tokenyard.routing.types import OrderKey

rank = pytest.importorskip("serve_app.engines.sharded.rank")
transformers = pytest.importorskip("transformers")


def a_scheduler():
    return rank.OrderScheduler(SimpleNamespace(now_s=0.0), None, 0.0, 1)


def a_state(name, has_begun=False):
    return SimpleNamespace(
        request_id=name, _true_initial_tokens=7 * has_begun, is_cpu_offloaded=False
    )


def candidates(scheduler):
    return [one.request_id for one in scheduler._get_waiting_candidates()]


def test_ranks_take_up_the_lowest_key_and_what_was_pushed_out_goes_back_to_its_place():
    scheduler, names = a_scheduler(), RequestNames()
    long, short, equal = (
        names.new(one, OrderKey(key)) for one, key in zip("abc", (9.0, 5.0, 5.0), strict=True)
    )
    for name in (long, short, equal):
        scheduler.add_waiting_request(a_state(name))
    assert list(scheduler.waiting_requests_order) == [short, equal, long]
    scheduler._cleanup_waiting_queue({short})
    scheduler.add_waiting_request(a_state(short, has_begun=True))
    assert list(scheduler.waiting_requests_order) == [equal, short, long]
    assert scheduler.num_preemptions == 1
    assert set(scheduler.waiting_requests) == {long, short, equal}


def test_who_is_late_goes_back_by_the_time_of_rank_0_and_never_who_has_begun():
    scheduler, names = a_scheduler(), RequestNames()
    late, other = names.new("late", OrderKey(1.0, 10.0, 30.0)), names.new("other", OrderKey(5.0))
    begun = names.new("begun", OrderKey(2.0, 10.0, 30.0))
    for name in (late, other, begun):
        scheduler.add_waiting_request(a_state(name))
    scheduler._helper.now_s = 10.0
    assert candidates(scheduler) == [late, begun, other]
    scheduler.waiting_requests.pop(begun)
    scheduler._cleanup_waiting_queue({begun})
    scheduler.add_waiting_request(a_state(begun, has_begun=True))
    scheduler._helper.now_s = 10.1
    assert candidates(scheduler) == [begun, other, late]
    # Who was pushed out after it had gone back has begun: it takes the place that it had at first.
    scheduler.waiting_requests.pop(late)
    scheduler._cleanup_waiting_queue({late})
    scheduler.add_waiting_request(a_state(late, has_begun=True))
    assert candidates(scheduler) == [late, begun, other]


def test_who_was_pushed_out_of_the_cache_goes_on_where_the_others_leave():
    """transformers lets nobody in after that until another one is at its end."""
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=2,
    )  # fmt: skip
    page_bytes = 2 * shape.hidden_size * 4 * rank.PAGE_TOKENS
    config = EngineConfig(model="none", memory_fraction=1.0, kv_bytes=8 * page_bytes)
    left = []

    class Outbox(rank.Outbox):
        def publish(self, stats, blocks):
            if stats.num_preemptions and not left:
                left.extend(manager.batch_processor.scheduler.active_requests)
                manager.cancel_request(left[0])
            super().publish(stats, blocks)

    async def first_to_end():
        async with asyncio.timeout(30):
            while True:
                for progress in (await outbox.take(1.0)).progress:
                    if progress.finished:
                        return progress.request_id

    with asyncio.Runner() as runner:
        outbox = Outbox(runner.get_loop())
        manager = rank.LockstepManager(transformers.LlamaForCausalLM(shape), config, outbox)
        names = ["a#0@0.0", "b#1@1.0"]
        for number, name in enumerate(names):
            manager.submit(name, [5 + number] * 40, Sampling(120, ignore_eos=True))
        manager.start()
        try:
            assert [runner.run(first_to_end()), *left] in (names, names[::-1])
        finally:
            manager.stop(hard_stop=True)


def test_all_ranks_have_the_time_of_rank_0(monkeypatch):
    helpers = [rank.LockstepHelper() for _ in range(2)]
    helpers[1].is_tp_driver = False
    clock_ns = 1_700_000_000_123_456_789
    monkeypatch.setattr(rank.time, "time_ns", lambda: clock_ns)

    def reduce(told, op, group):
        told[:] = told.maximum(told.new_tensor([2, 1, 0, clock_ns]))

    monkeypatch.setattr(rank.dist, "all_reduce", reduce)
    for helper in helpers:
        helper.tp_size = 2
        assert helper.tp_all_reduce_state(0, 0, False) == (2, 1, 0)
        assert helper.now_s == clock_ns / 1e9
    alone = rank.LockstepHelper()
    assert alone.tp_all_reduce_state(3, 0) == (3, 0, 0)
    assert alone.now_s == clock_ns / 1e9

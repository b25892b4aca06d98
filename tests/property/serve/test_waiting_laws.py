"""Who waits for room, in engines and at the gateway: order, bound, and those who give up."""

import asyncio
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cluster import QueueSettings
from serve_app.engines.admission import BatchLimit
from serve_app.engines.sharded.messages import RequestNames, order_key_in
from serve_app.engines.waiting import ArrivalKeys, WaitingLine, read_order_key, write_order_key
from serve_app.gateway.generation import ReplicaFull
from serve_app.gateway.holding import Holding
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.order import bounded_key
from tokenyard.routing.types import OrderKey

times = st.floats(0, 100)
gaps = st.lists(st.tuples(st.floats(0, 3), times, times, times), min_size=1, max_size=30)
whole = st.integers(0, 8).map(float)
"""So few that some are equal."""
order_keys = st.builds(
    lambda key_s, late_at_s, back_s: OrderKey(key_s, late_at_s, key_s + back_s),
    whole, st.one_of(whole, st.just(math.inf)), st.one_of(whole, st.just(math.inf)),
)  # fmt: skip
written = st.builds(
    lambda key_s, late_at_s, back_s: OrderKey(key_s, late_at_s, key_s + back_s),
    st.floats(0, 2e9), st.one_of(st.floats(0, 2e9), st.just(math.inf)),
    st.one_of(times, st.just(math.inf)),
)  # fmt: skip
steps = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.one_of(st.none(), st.floats(0, 50).map(OrderKey))),
        st.tuples(st.just("leave"), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("resize"), st.integers(1, 4)),
    ),
    max_size=40,
)


@given(times=st.lists(st.floats(0, 100), max_size=30))
def test_without_keys_it_is_first_come_first_served_even_if_the_clock_goes_back(times):
    clock = iter(times)
    arrivals, line = ArrivalKeys(lambda: next(clock)), WaitingLine()
    for number in range(len(times)):
        line.add(number, arrivals.key(None))
    assert [line.pop(0.0) for _ in times] == list(range(len(times)))


@given(coming=gaps, bound=st.floats(0, 20), pops=st.lists(times, min_size=30, max_size=30))
def test_nobody_is_overtaken_by_one_who_comes_later_than_the_bound(coming, bound, pops):
    line, now, came = WaitingLine(), 0.0, []
    for gap, work, patience, back in coming:
        now += gap
        came.append(now)
        asked = OrderKey(now + work, now + patience, now + work + back)
        line.add(len(came) - 1, bounded_key(asked, now, now, bound))
    served = [line.pop(at) for at in sorted(pops[: len(came)])]
    for place, one in enumerate(served):
        for overtaken in served[place + 1 :]:
            assert came[one] <= came[overtaken] + bound + 1e-9


def by_now(key, now_s):
    """The key that counts at a time."""
    return key.late_key_s if key.late_at_s < now_s else key.key_s


moves = st.lists(
    st.one_of(order_keys, st.just("pop"), st.just("leave"), st.just("wait"), st.just("look"))
)


@given(moves=moves)
def test_who_has_the_least_key_of_all_by_now_is_the_first_at_every_moment(moves):
    line, waiting, now_s, out = WaitingLine(), {}, 0.0, []
    for number, move in enumerate(moves):
        ranked = sorted(waiting, key=lambda one: (by_now(waiting[one], now_s), one))
        if isinstance(move, OrderKey):
            waiting[number] = move
            line.add(number, move)
        elif move == "wait":
            now_s += 1.0
        elif move == "look":
            assert list(line.in_order(now_s)) == ranked
        elif move == "leave" and waiting:
            line.remove(ranked[-1])
            out.append(ranked[-1])
        elif move == "pop" and waiting:
            out.append(line.pop(now_s))
            assert out[-1] == ranked[0]
        for one in out:
            waiting.pop(one, None)
        assert len(line) == len(waiting)
    assert sorted(line.in_order(now_s)) == sorted(waiting)


@given(keys=st.lists(order_keys, max_size=20), now_s=whole, taken=st.sets(st.integers(0, 19)))
def test_those_who_are_named_may_be_taken_out_meanwhile(keys, now_s, taken):
    line = WaitingLine()
    for number, key in enumerate(keys):
        line.add(number, key)
    ranked, named = sorted(range(len(keys)), key=lambda one: (by_now(keys[one], now_s), one)), []
    for one in line.in_order(now_s):
        named.append(one)
        if one in taken:
            line.remove(one)
    assert named == ranked
    assert list(line.in_order(now_s)) == [one for one in ranked if one not in taken]


@given(keys=st.lists(order_keys, min_size=1, max_size=20), wait_s=st.lists(whole, max_size=20))
def test_ranks_take_those_up_first_who_are_first_by_the_time_of_rank_0(keys, wait_s):
    rank = pytest.importorskip("serve_app.engines.sharded.rank")
    helper, now_s = SimpleNamespace(now_s=0.0), 0.0
    scheduler = rank.OrderScheduler(helper, None, 0.0, 1)
    names = [RequestNames().new(str(number), key) for number, key in enumerate(keys)]
    told = dict(zip(names, keys, strict=True))
    for name in names:
        scheduler.add_waiting_request(
            SimpleNamespace(request_id=name, _true_initial_tokens=0, is_cpu_offloaded=False)
        )
    for gap in wait_s:
        helper.now_s = now_s = now_s + gap
        candidates = [one.request_id for one in scheduler._get_waiting_candidates()]
        due_s = [by_now(told[name], now_s) for name in candidates]
        assert due_s == sorted(due_s)
        assert set(candidates) == set(scheduler.waiting_requests)
        if candidates:
            scheduler.waiting_requests.pop(candidates[0])
            scheduler._cleanup_waiting_queue({candidates[0]})


@given(keys=st.lists(st.floats(0, 10), max_size=20), gone=st.sets(st.integers(0, 19)))
def test_who_gives_up_leaves_no_hole(keys, gone):
    line, items = WaitingLine(), [object() for _ in keys]
    for item, key in zip(items, keys, strict=True):
        line.add(item, OrderKey(key))
    for number in gone & set(range(len(keys))):
        line.remove(items[number])
        line.remove(items[number])
    left = sorted((key, number) for number, key in enumerate(keys) if number not in gone)
    assert list(line.in_order(0.0)) == [items[number] for _, number in left]
    assert len(line) == len(left)


@given(steps=steps)
def test_a_batch_limit_never_idles_while_somebody_waits_and_lets_the_lowest_key_in(steps):
    async def play():
        limit, waiting, inside = BatchLimit(8), {}, 0
        limit.resize(1)
        for number, (what, value) in enumerate(steps):
            if what == "come":
                waiting[number] = (value, asyncio.create_task(limit.enter(value)))
            elif what == "leave" and inside:
                limit.leave()
                inside -= 1
            elif what == "cancel" and value in waiting:
                waiting.pop(value)[1].cancel()
            elif what == "resize":
                limit.resize(value)
            before = {one: key for one, (key, _) in waiting.items()}
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            let_in = [one for one, (_, task) in waiting.items() if task.done()]
            inside += len(let_in)
            for one in let_in:
                del waiting[one]
            # A key of one's own is far below the time, which those without have.
            ranked = sorted(before, key=lambda one: (before[one] is None, before[one] or (), one))
            assert sorted(let_in) == sorted(ranked[: len(let_in)])
            assert limit.num_waiting == len(waiting)
            assert not waiting or inside >= limit.limit
        for _, task in waiting.values():
            task.cancel()

    asyncio.run(play())


class Windows:
    """In place of the gateway's placement: pools of one replica that hold so many."""

    def __init__(self, most):
        self.most, self.inside, self.served = most, {name: [] for name in most}, []
        self.availability = self

    def give_key(self, asked, expected_wait_s):
        pass

    def fitting_pools(self, asked):
        return asked.pools

    def has_room(self):
        return any(len(one) < self.most[name] for name, one in self.inside.items())

    def pick(self, asked):
        for name in asked.pools:
            if len(self.inside[name]) < self.most[name]:
                self.inside[name].append(asked)
                self.served.append(asked)
                return asked
        raise ReplicaFull("all are full")

    def finish(self, pick, request_id, now_s, response_s):
        for one in self.inside.values():
            if pick in one:
                one.remove(pick)


events = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "end", "cancel"]),
        st.integers(0, 30),
        st.sampled_from([("a",), ("b",), ("a", "b")]),
    ),
    max_size=40,
)


@given(events=events, most=st.fixed_dictionaries({"a": st.integers(0, 2), "b": st.integers(0, 2)}))
def test_the_gateway_holds_nobody_for_whom_there_is_room_and_exceeds_no_window(events, most):
    async def play():
        windows, metrics, tasks = Windows(most), Metrics(), []
        settings = QueueSettings(max_requests=1000, max_wait_s=1000.0)
        holding = Holding(settings, windows, metrics, lambda: 5.0)
        for number, (what, value, pools) in enumerate(events):
            before = len(windows.served)
            if what == "come":
                key = OrderKey(float(value), 4.0 if number % 2 else math.inf, value + 9.0)
                asked = SimpleNamespace(
                    arrival_s=float(number), order_key=key,
                    request_id=str(number), pools=pools, tried=set(),
                )  # fmt: skip
                tasks.append((asked, asyncio.create_task(holding.place(asked))))
                await asyncio.sleep(0)
            elif what == "end" and windows.served:
                windows.finish(windows.served[value % len(windows.served)], "", 0.0, None)
            elif what == "cancel" and tasks:
                tasks[value % len(tasks)][1].cancel()
            holding.release()
            new = windows.served[before:]
            for _ in range(3):
                await asyncio.sleep(0)
            waiting = [asked for asked, task in tasks if not task.done()]
            for name, inside in windows.inside.items():
                assert len(inside) <= most[name]
                could = [one for one in waiting if name in one.pools]
                assert not could or len(inside) == most[name]
            for one in new:
                rivals = [other for other in waiting if other.pools == one.pools]
                assert all(
                    by_now(one.order_key, 5.0) <= by_now(other.order_key, 5.0) for other in rivals
                )
            assert metrics.registry.get_sample_value("tokenyard_requests_held") == len(waiting)
        for _, task in tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        assert not len(holding._line)
        if holding._looking is not None:
            holding._looking.cancel()

    asyncio.run(play())


@given(request_id=st.text(), key=written)
def test_a_name_for_ranks_tells_the_key_and_is_used_once(request_id, key):
    names = RequestNames()
    first, second, timed = (names.new(request_id, one) for one in (key, key, None))
    assert first != second
    assert order_key_in(first) == order_key_in(second) == key
    assert order_key_in(timed).key_s > 1.7e9


@given(key=written)
def test_a_key_is_read_as_it_was_written(key):
    text = write_order_key(key)
    assert read_order_key(text) == key
    assert len(text.split()) == 1 + max(
        (place for place, one in enumerate(key) if one < math.inf), default=0
    )


@given(text=st.sampled_from(["", "a", "nan", "inf", "1 nan", "1 2 nan", "2 1 1", "1 2 3 4", "1,2"]))
def test_what_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match=r"order key|could not convert"):
        read_order_key(text)

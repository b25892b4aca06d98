"""Who waits for room, in engines and at the gateway: order, bound, and those who give up."""

import asyncio
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from serve_app.cluster import QueueSettings
from serve_app.engines.admission import BatchLimit
from serve_app.engines.sharded.messages import RequestNames, order_key_in
from serve_app.engines.waiting import Arrivals, WaitingLine
from serve_app.gateway.generation import ReplicaFull
from serve_app.gateway.holding import Holding
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.order import bounded_key_s

gaps = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 100)), min_size=1, max_size=30)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.one_of(st.none(), st.floats(0, 50))),
        st.tuples(st.just("leave"), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("resize"), st.integers(1, 4)),
    ),
    max_size=40,
)


@given(times=st.lists(st.floats(0, 100), max_size=30))
def test_without_keys_it_is_first_come_first_served_even_if_the_clock_goes_back(times):
    clock = iter(times)
    arrivals, line = Arrivals(lambda: next(clock)), WaitingLine()
    for number in range(len(times)):
        line.add(number, arrivals.key_s(None))
    assert [line.pop() for _ in times] == list(range(len(times)))


@given(asked=gaps, bound=st.floats(0, 20))
def test_nobody_is_overtaken_by_one_who_comes_later_than_the_bound(asked, bound):
    line, now, came = WaitingLine(), 0.0, []
    for gap, work in asked:
        now += gap
        came.append(now)
        line.add(len(came) - 1, bounded_key_s(now + work, now, now, bound))
    served = [line.pop() for _ in came]
    for place, one in enumerate(served):
        for overtaken in served[place + 1 :]:
            assert came[one] <= came[overtaken] + bound + 1e-9


@given(keys=st.lists(st.floats(0, 10), max_size=20), gone=st.sets(st.integers(0, 19)))
def test_who_gives_up_leaves_no_hole(keys, gone):
    line, items = WaitingLine(), [object() for _ in keys]
    for item, key in zip(items, keys, strict=True):
        line.add(item, key)
    for number in gone & set(range(len(keys))):
        line.remove(items[number])
        line.remove(items[number])
    left = sorted((key, number) for number, key in enumerate(keys) if number not in gone)
    assert list(line) == [items[number] for _, number in left]
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
            ranked = sorted(before, key=lambda one: (before[one] is None, before[one] or 0.0, one))
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

    def give_key(self, asked):
        pass

    def fitting(self, asked):
        return asked.pools

    def has_room(self):
        return any(len(one) < self.most[name] for name, one in self.inside.items())

    def pick_now(self, asked):
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
        holding = Holding(settings, windows, metrics, lambda: 0.0)
        for number, (what, value, pools) in enumerate(events):
            before = len(windows.served)
            if what == "come":
                asked = SimpleNamespace(
                    arrival_s=float(number), order_key_s=float(value), request_id=str(number),
                    pools=pools, tried=set(),
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
                assert all(one.order_key_s <= other.order_key_s for other in rivals)
            assert metrics.registry.get_sample_value("tokenyard_held") == len(waiting)
        for _, task in tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        assert not len(holding._line)
        if holding._looking is not None:
            holding._looking.cancel()

    asyncio.run(play())


@given(request_id=st.text(), key=st.floats(0, 2e9))
def test_a_name_for_ranks_tells_the_key_and_is_used_once(request_id, key):
    names = RequestNames()
    first, second, timed = (names.new(request_id, one) for one in (key, key, None))
    assert first != second
    assert order_key_in(first) == order_key_in(second) == key
    assert order_key_in(timed) > 1.7e9

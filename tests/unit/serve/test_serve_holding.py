"""Requests that wait at the gateway until a replica has room: order, limits, and who gives up."""

import asyncio
import itertools
import time
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from unit.serve.test_serve_gateway import LOCAL, OWN, FakePool, Letters, a_body, cluster_of

from serve_app.engines.texts import TextChunk
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import ReplicaFailed
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.policy.manager import PolicyManager

QUEUE = {"max_requests": 20, "max_wait_s": 20.0}


@asynccontextmanager
async def a_site(
    policy="sed", pools=("a",), queue=QUEUE, max_ongoing=1, clock_s=time.time, make=FakePool,
    **fields,
):  # fmt: skip
    """Yield a client, the gateway and pools of one replica that holds few requests."""
    own = {"kind": "own", "config": OWN, "max_ongoing": max_ongoing}
    limits = {"max_in_flight": 50, "max_prompt_tokens": 100, "max_output_tokens": 50}
    known = {"queue": queue, "limits": limits | fields.pop("limits", {})}
    cluster = cluster_of([{"name": name} | own for name in pools], **known, **fields)
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch(policy)
    backends = {name: make(name) for name in pools}
    gateway = Gateway(cluster, manager, backends, clock_s=clock_s)
    api = create_gateway_api(gateway, Letters(), Access(None, local_admin=True))
    transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url=LOCAL, timeout=30) as client:
        try:
            yield client, gateway, backends
        finally:
            manager.stop()


def run(test, **options):
    async def inside():
        async with asyncio.timeout(60), a_site(**options) as (client, gateway, pools):
            await test(client, gateway, pools)

    asyncio.run(inside())


def ask(client, prompt="hello", tenant="x"):
    body, headers = a_body(prompt=prompt), {"x-tenant": tenant}
    return asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def num_held(gateway):
    return gateway.metrics.registry.get_sample_value("tokenyard_requests_held")


async def hold(client, gateway, pools, prompts):
    """Fill every pool, and let requests of these prompts wait; return their tasks."""
    for pool in pools.values():
        pool.may_go_on.clear()
    first = [ask(client, "first") for _ in pools]
    await until(lambda: sum(len(one.requests) for one in pools.values()) == len(pools))
    held = []
    for number, prompt in enumerate(prompts):
        held.append(ask(client, prompt))
        await until(lambda number=number: num_held(gateway) == number + 1)
    return first, held


def prompts_of(pool):
    return ["".join(map(chr, one.token_ids)) for one in pool.requests]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("sed", ["first", "looong", "mid", "s"]), ("sed+sjf@1000", ["first", "s", "mid", "looong"])],
)
def test_who_waits_goes_by_the_order_of_the_policy(policy, order):
    async def test(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["looong", "mid", "s"])
        shown = (await client.get("/v1/queue")).json()
        assert (shown["held"], shown["max_requests"]) == (3, 20)
        assert [one["prompt_tokens"] for one in shown["requests"]] == list(map(len, order[1:]))
        assert shown["requests"][0]["pools"] == ["a"]
        assert shown["full"] == [
            {"replica_id": "a-0", "pool": "a", "in_flight": 1, "max_ongoing": 1}
        ]
        pools["a"].may_go_on.set()
        assert {(await one).status_code for one in first + held} == {200}
        assert prompts_of(pools["a"]) == order
        assert (num_held(gateway), gateway.in_flight) == (0, 0)
        waits = gateway.metrics.registry.get_sample_value("tokenyard_held_seconds_count")
        assert waits == 3

    run(test, policy=policy)


def test_who_is_late_goes_behind_those_who_still_can_be_in_time():
    now_s = [1.7e9]

    async def test(client, gateway, pools):
        pools["a"].may_go_on.clear()
        first = ask(client, "first")
        await until(lambda: len(pools["a"].requests) == 1)
        tasks = [first]
        for number, tier in enumerate(["default", "hasty", "default", "hasty"]):
            now_s[0] += 0.5
            body = a_body(prompt=f"{tier} {number}", service_tier=tier)
            tasks.append(asyncio.create_task(client.post("/v1/completions", json=body)))
            await until(lambda number=number: num_held(gateway) == number + 1)
        now_s[0] += 0.5  # The first hasty one is late, the last is not.
        shown = (await client.get("/v1/queue")).json()["requests"]
        late_at_s = [one["late_at_s"] for one in shown]
        assert late_at_s[0] is None  # Nothing was to wait for.
        assert [at_s < now_s[0] for at_s in late_at_s[1:]] == [False, False, True]
        # It came when one had waited half a second: twice the mean age is to be expected.
        assert shown[3]["late_key_s"] == shown[3]["order_key_s"] + 20.0
        pools["a"].may_go_on.set()
        assert {(await one).status_code for one in tasks} == {200}
        assert prompts_of(pools["a"]) == ["first", "default 0", "default 2", "hasty 3", "hasty 1"]

    classes = [{"name": "default", "response_s": 30.0}, {"name": "hasty", "response_s": 1.2}]
    run(test, policy="sed+late_last@20", classes=classes, clock_s=lambda: now_s[0])


def test_without_a_queue_it_is_429_and_with_one_no_window_is_exceeded():
    async def refused(client, gateway, pools):
        pools["a"].may_go_on.clear()
        tasks = [ask(client) for _ in range(4)]
        await until(lambda: len(pools["a"].requests) == 4)
        pools["a"].may_go_on.set()
        assert {(await one).status_code for one in tasks} == {200}

    # Engines of ours say themselves when they are full.
    run(refused, queue=None, max_ongoing=2)

    async def kept(client, gateway, pools):
        for pool in pools.values():
            pool.may_go_on.clear()
        tasks = [ask(client) for _ in range(9)]
        await until(lambda: num_held(gateway) == 5)
        assert [len(one.requests) for one in pools.values()] == [2, 2]
        for pool in pools.values():
            pool.may_go_on.set()
        assert {(await one).status_code for one in tasks} == {200}

    run(kept, pools=("a", "b"), max_ongoing=2)


def test_a_full_queue_and_a_long_wait_are_429_and_say_when_to_come_back():
    async def test(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["one", "two"])
        full = await client.post("/v1/completions", json=a_body())
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert full.json()["error"]["message"] == "2 requests wait at the gateway already"
        late = [await one for one in held]
        assert [one.status_code for one in late] == [429, 429]
        assert late[0].json()["error"]["message"] == "no replica had room within 0.3 s"
        assert all(int(one.headers["retry-after"]) >= 1 for one in [full, *late])
        pools["a"].may_go_on.set()
        assert (await first[0]).status_code == 200
        refused = gateway.metrics.registry.get_sample_value
        for reason, count in (("queue full", 1), ("waited too long", 2)):
            assert refused("tokenyard_refused_total", {"reason": reason}) == count

    run(test, queue={"max_requests": 2, "max_wait_s": 0.3})


def test_a_class_waits_no_longer_than_it_may():
    async def test(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["one"])
        late = await client.post("/v1/completions", json=a_body(service_tier="hasty"))
        assert late.status_code == 429
        assert late.json()["error"]["message"] == "no replica had room within 0.2 s"
        pools["a"].may_go_on.set()
        assert [(await one).status_code for one in [*first, *held]] == [200, 200]

    classes = [
        {"name": "default", "response_s": 9.0},
        {"name": "hasty", "response_s": 5.0, "ttft_s": 0.2, "max_wait_s": 0.2},
    ]
    run(test, classes=classes)


def test_callers_that_leave_while_they_wait_leave_no_hole():
    async def test(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["one", "two", "three"])
        held[0].cancel()
        await until(lambda: num_held(gateway) == 2)
        pools["a"].may_go_on.set()
        assert [(await one).status_code for one in [*first, *held[1:]]] == [200] * 3
        assert prompts_of(pools["a"]) == ["first", "two", "three"]
        assert gateway.in_flight == 0

    run(test)


def test_a_place_given_to_one_who_leaves_just_then_is_the_nexts():
    async def test(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["one", "two"])
        release = gateway.holding.release

        def release_and_leave():
            gateway.holding.release = release
            release()
            held[0].cancel()

        gateway.holding.release = release_and_leave
        pools["a"].may_go_on.set()
        assert [(await one).status_code for one in (first[0], held[1])] == [200, 200]
        assert prompts_of(pools["a"])[-1] == "two"
        await until(lambda: not gateway.in_flight)
        assert gateway.table.replicas["a-0"].in_flight.count == 0

    run(test)


def test_the_policy_that_decides_then_chooses_among_the_replicas_that_are_there_then():
    async def test(client, gateway, pools):
        pools["b"].there = False
        pools["a"].may_go_on.clear()
        first = ask(client, "first")
        await until(lambda: len(pools["a"].requests) == 1)
        held = ask(client, "held")
        await until(lambda: num_held(gateway) == 1)
        gateway.manager.switch("round_robin")
        pools["b"].there = True  # Nobody says so.
        assert (await held).status_code == 200
        assert prompts_of(pools["b"]) == ["held"]
        pools["a"].may_go_on.set()
        assert (await first).status_code == 200
        assert gateway.manager.policy.counts.num_decisions == 1

    run(test, pools=("a", "b"))


def test_who_is_placed_again_waits_by_the_same_key_and_not_where_it_failed():
    async def test(client, gateway, pools):
        pools["b"].may_go_on.clear()
        pools["a"].script.append((0, ReplicaFailed("it died")))
        gateway.manager.switch("round_robin+sjf@20")
        blocker = ask(client, "b")
        await until(lambda: len(pools["a"].requests + pools["b"].requests) >= 2)
        again = ask(client, "again")
        assert (await again).status_code == 200
        assert not blocker.done()
        pools["b"].may_go_on.set()
        assert (await blocker).status_code == 200

    run(test, pools=("a", "b"))


def test_a_gateway_that_drains_serves_who_waits_and_cuts_off_the_rest():
    async def served(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["one"])
        drain = asyncio.create_task(gateway.drain())
        await until(lambda: gateway.draining)
        pools["a"].may_go_on.set()
        assert [(await one).status_code for one in first + held] == [200, 200]
        assert await drain == 0

    async def cut_off(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["one"])
        assert await gateway.drain() == 2
        answers = [await one for one in first + held]
        assert [one.status_code for one in answers] == [503, 503]
        assert num_held(gateway) == 0

    run(served)
    run(cut_off, limits={"drain_s": 0.05})


def test_an_answer_that_is_late_while_it_waits_says_so():
    async def test(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["one"])
        answer = await held[0]
        assert answer.status_code == 503
        assert "no answer within 0.4 s" in answer.json()["error"]["message"]
        assert num_held(gateway) == 0
        await first[0]

    run(test, limits={"timeout_s": 0.4})


def test_rays_router_gives_way_to_the_baseline_for_those_who_waited():
    async def test(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["one"])
        pools["a"].may_go_on.set()
        assert [(await one).status_code for one in first + held] == [200, 200]

    run(test, policy="ray_default")


class Stepwise(FakePool):
    """Answers each request when it is told to, with as many tokens as it may."""

    def __init__(self, name):
        super().__init__(name)
        self.inside = []

    async def stream(self, generation):
        done = asyncio.get_running_loop().create_future()
        self.inside.append((len(generation.token_ids), done))
        await done
        yield TextChunk("o", 1)
        yield TextChunk("k", 8, "stop")


@pytest.mark.parametrize("order", ["fair", "fair@4"])
@pytest.mark.parametrize("weights", [(2.0, 1.0), (1.0, 1.0)])
def test_tenants_get_requests_and_tokens_by_their_weights_where_all_have_more_to_ask(
    order, weights
):
    now_s = [1.7e9]
    served = {"heavy": [0, 0], "light": [0, 0]}

    async def test(client, gateway, pools):
        (pool,), asking = pools.values(), {}
        lengths = {tenant: itertools.cycle([5, 20, 35, 50]) for tenant in served}

        def more(tenant):
            asking[ask(client, "x" * next(lengths[tenant]), tenant)] = tenant

        for tenant in [*served] * 12:
            more(tenant)
        for number in range(360):
            await until(lambda: len(pool.inside) == 4)
            await until(lambda: gateway.in_flight == 24)
            num_tokens, done = pool.inside.pop(0)
            # As long as the profile says that it takes, with a batch of four.
            now_s[0] += (0.01 + 8 * (0.01 + 4e-3) + num_tokens * 1e-4) / 4
            done.set_result(None)
            ended, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for one in ended:
                tenant = asking.pop(one)
                more(tenant)
                if number >= 60:  # The first have come at once.
                    served[tenant][0] += 1
                    served[tenant][1] += num_tokens + 8
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    tenants = {name: {"weight": one} for name, one in zip(served, weights, strict=True)}
    run(
        test, policy=f"round_robin+{order}", tenants=tenants, max_ongoing=4, make=Stepwise,
        clock_s=lambda: now_s[0], queue={"max_requests": 50, "max_wait_s": 50.0},
        circuit_breaker={"budget_s": 1.0},
    )  # fmt: skip
    expected = weights[0] / weights[1]
    for count in (0, 1):
        assert served["heavy"][count] / served["light"][count] == pytest.approx(expected, rel=0.05)


def test_who_names_no_tenant_of_the_file_is_the_default_one():
    async def test(client, gateway, pools):
        first, held = await hold(client, gateway, pools, ["one"])
        for number, tenant in enumerate(["known", "unknown"]):
            held.append(ask(client, tenant=tenant))
            await until(lambda number=number: num_held(gateway) == number + 2)
        shown = (await client.get("/v1/queue")).json()["requests"]
        assert [one["tenant"] for one in shown] == ["default", "known", "default"]
        pools["a"].may_go_on.set()
        assert {(await one).status_code for one in first + held} == {200}

    run(test, tenants={"known": {"weight": 3}})

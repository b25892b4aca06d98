from __future__ import annotations

import asyncio
import gc
import json
import math
import sys
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from serve_app import app
from serve_app.allocation import allocator as allocator_module
from serve_app.allocation.allocator import Allocator, steady
from serve_app.allocation.plans import find_plan, plan_of
from serve_app.allocation.transition import Held, Shape, gpus_held, shape_of
from serve_app.cluster import ReshapingLimits
from serve_app.gateway import clocks
from serve_app.http.allocation import make_router
from serve_app.http.auth import Access
from serve_app.http.reasons import BadRequest
from tokenyard.allocation.plans import load_allocation, plan_table
from tokenyard.allocation.policies import make_allocation_policy
from tokenyard.allocation.policies.rules import AllocationContext, StaticPlan
from tokenyard.allocation.scenario import SwitchBudget

SCENARIO = load_allocation("emulated_l4x4")
TABLE = plan_table(SCENARIO)
ONE, TWO, FOUR = (find_plan(TABLE, "data", n) for n in (1, 2, 4))
PAIRS = find_plan(TABLE, "hybrid_tp2", 4)
BUDGET = SwitchBudget(switches=3, period_slots=100)


class InstantPool:
    """Replicas that are there a tick after they were asked for."""

    def __init__(self):
        self.wanted = {}
        self.most_gpus = 0
        self.records = []
        self.limits = []
        self.num_looks = 0

    async def observe(self):
        self.num_looks += 1
        held = {s: Held(n, n) for s, n in self.wanted.items() if n}
        self.most_gpus = max(self.most_gpus, gpus_held(held))
        return held

    async def want(self, shape, count):
        self.wanted[shape] = count

    async def limit_batch(self, shape, max_batch):
        self.limits.append((shape, max_batch))
        return self.limits.count((shape, max_batch)) > 1

    def num_waiting(self):
        return 0

    def record(self, slot):
        self.records.append(slot)


class World:
    """An allocator, its pool, and a clock that stands still until it is told to go on."""

    def __init__(self, policy, scenario=SCENARIO, **options):
        self.now_s, self.offered = options.pop("now_s", 0.0), 0
        self.pool = options.pop("pool", None) or InstantPool()
        self.pool.num_offered = lambda: self.offered
        self.allocator = Allocator(
            scenario, "tested", policy, self.pool,
            start=options.pop("start", None), time_scale=options.pop("time_scale", 1.0),
            settings=ReshapingLimits(**{"cooldown_slots": 0} | options),
            clock_s=lambda: self.now_s,
        )  # fmt: skip

    def slot(self, requests=0, ticks=12, passed=1.0):
        """Let a slot pass, or a part of one, with looks at the pool all along."""
        self.offered += requests
        self.now_s += passed * self.allocator.slot_s
        for _ in range(ticks):
            asyncio.run(self.allocator.tick())


def policy(name, scenario=SCENARIO):
    return make_allocation_policy(name, AllocationContext(scenario, np.random.default_rng(0)))


def test_it_starts_with_the_plan_of_the_start_and_follows_the_policy():
    world = World(StaticPlan(FOUR), start=ONE)
    asyncio.run(world.allocator.tick())
    assert world.pool.wanted == {shape_of(ONE): 1}
    world.slot()
    assert world.pool.wanted == {shape_of(FOUR): 4}
    change = world.allocator.changes[-1]
    assert (change.old, change.new, change.by, change.outcome) == (ONE, FOUR, "policy", "done")
    assert list(change.phases_s) == ["first_ready", "all_ready", "done"]
    assert "data on 4 GPUs costs" in change.reason


def test_demand_is_counted_in_the_scenarios_own_time():
    world = World(StaticPlan(ONE), start=ONE, time_scale=10.0)
    assert world.allocator.slot_s == 60.0
    world.slot(requests=90)
    assert list(world.allocator.demand_per_s) == [15.0]


def test_slots_go_by_a_clock_that_nobody_sets(monkeypatch):
    """By one that is set back by an hour nothing would be decided for an hour."""
    pool = InstantPool()
    pool.num_offered = lambda: 0
    allocator = Allocator(SCENARIO, "tested", StaticPlan(ONE), pool, ReshapingLimits(), ONE)
    passed_s = time.clock_gettime(clocks._STEADY) + 11 * SCENARIO.slot_s
    monkeypatch.setattr(clocks.time, "clock_gettime", lambda _: passed_s)
    asyncio.run(allocator.tick())
    assert len(allocator.demand_per_s) == 10


def test_a_slot_of_which_only_the_end_was_seen_says_nothing_of_demand():
    """Requests of its last tenth would count as all, and a gateway that starts anew shrink it."""
    now_s = 0.9 * SCENARIO.slot_s
    world = World(policy("autoscaler_70"), start=FOUR, shrink_after_s=0, now_s=now_s)
    per_slot = round(0.9 * TABLE.pool_goodput_capacity_per_s * SCENARIO.slot_s)
    asyncio.run(world.allocator._begin_anew())
    world.slot(requests=round(0.1 * per_slot), passed=0.09)
    world.slot(passed=0.01)
    assert not world.allocator.demand_per_s
    world.slot(requests=per_slot)
    assert list(world.allocator.demand_per_s) == [per_slot / SCENARIO.slot_s]
    assert world.allocator.plan == FOUR


def test_a_slot_that_nobody_looked_at_is_booked_too():
    world = World(StaticPlan(ONE), start=ONE)
    world.now_s += 2 * SCENARIO.slot_s
    world.slot(requests=180)
    assert list(world.allocator.demand_per_s) == [10.0] * 3


@pytest.mark.parametrize("what", ["raises", "infeasible"])
def test_where_the_policy_fails_an_autoscaler_decides(what):
    class Broken:
        def allocate(self, state):
            if what == "raises":
                raise RuntimeError("no")
            return "two of them"

    world = World(Broken(), start=ONE)
    world.slot(requests=round(0.9 * TABLE.pool_goodput_capacity_per_s * SCENARIO.slot_s))
    assert world.allocator.plan.num_gpus == 4
    assert world.allocator.changes[-1].by == "stand_in"
    assert world.allocator.fallbacks == {"error": 1}


def test_a_policy_that_hangs_is_not_asked_again_until_one_is_set(monkeypatch):
    monkeypatch.setattr("serve_app.allocation.allocator._DECIDE_S", 0.05)
    released, asked = threading.Event(), []

    class Hanging:
        def allocate(self, state):
            asked.append(state)
            released.wait(10)
            return state.plan

    world = World(Hanging(), start=ONE)

    async def two_slots():
        for _ in range(2):
            world.now_s += world.allocator.slot_s
            await world.allocator.tick()
        released.set()

    asyncio.run(two_slots())
    assert len(asked) == 1
    assert world.allocator.fallbacks == {"too_slow": 1, "breaker_open": 1}
    world.allocator.set_policy("static", StaticPlan(TWO))
    world.slot()
    world.slot()
    assert world.allocator.plan == TWO


def test_a_dry_run_says_and_does_nothing():
    world = World(StaticPlan(FOUR), start=ONE, dry_run=True)
    world.slot()
    assert world.allocator.plan == ONE
    assert world.allocator.proposed == FOUR
    assert world.allocator.changes[-1].outcome == "dry run"
    assert world.pool.wanted == {shape_of(ONE): 1}


def test_the_switch_budget_and_the_cooldown_hold():
    class Restless:
        def allocate(self, state):
            return TWO if state.plan == ONE else ONE

    budget = SwitchBudget(switches=2, period_slots=10)
    scenario = SCENARIO.model_copy(update={"switch_budget": budget})
    world = World(Restless(), scenario, start=ONE, shrink_after_s=0)
    for _ in range(9):
        world.slot()
    done = [one for one in world.allocator.changes if one.by == "policy" and one.outcome == "done"]
    assert len(done) == 2
    world = World(Restless(), start=ONE, cooldown_slots=3, shrink_after_s=0)
    changed = []
    for slot in range(12):
        before = world.allocator.plan
        world.slot()
        if world.allocator.plan != before:
            changed.append(slot)
    assert min(np.diff(changed)) >= 3


def test_a_plan_that_could_not_be_left_again_is_replaced_by_what_comes_closest():
    model = find_plan(TABLE, "model", 4)
    world = World(StaticPlan(model), start=ONE)
    world.slot()
    world.slot()
    assert world.allocator.proposed == model
    assert world.allocator.plan == FOUR
    assert "model on 4 GPUs, which was asked for, could not be" in world.allocator.reason
    with pytest.raises(ValueError, match="within 4 GPUs while 1 replicas serve"):
        world.allocator.set_plan(model)
    world = World(StaticPlan(model), start=FOUR, min_replicas=0)
    world.slot()
    assert world.pool.wanted[shape_of(model)] == 1


def test_the_start_is_a_plan_that_can_be_left_again():
    l4 = load_allocation("l4x4_7b")
    world = World(StaticPlan(ONE), l4)
    table = plan_table(l4)
    assert table.plans[table.cheapest_for(1.4)].parallelism == "model"
    assert world.allocator.plan.parallelism == "hybrid_tp2"


def test_a_plan_set_by_hand_is_kept_until_a_policy_is_set():
    world = World(StaticPlan(ONE), start=ONE, shrink_after_s=0)
    world.slot()
    world.allocator.set_plan(PAIRS)
    with pytest.raises(ValueError, match="a change is on its way"):
        world.allocator.set_plan(FOUR)
    world.slot()
    world.slot()
    assert world.allocator.plan == PAIRS
    assert world.allocator.changes[-1].by == "hand"
    world.allocator.set_policy("static", StaticPlan(ONE))
    world.slot()
    assert world.allocator.plan == ONE


def test_what_has_just_grown_is_not_taken_back():
    world = World(StaticPlan(FOUR), start=ONE, shrink_after_s=5 * SCENARIO.slot_s)
    world.slot()
    world.allocator.set_policy("static", StaticPlan(TWO))
    plans = []
    for _ in range(7):
        world.slot()
        plans.append(world.allocator.plan)
    assert plans == [FOUR] * 4 + [TWO] * 3
    assert "nothing is taken back so soon" in world.allocator.changes[-2].reason


def test_demand_is_averaged_over_slots_that_are_alike():
    assert steady([0, 30, 32]) == 31
    assert steady([5000, 100, 105, 95]) == 100
    assert steady([900, 1100]) == 1100
    assert steady([10, 10, 90]) == 90


class Stuck(InstantPool):
    """Replicas of one shape never become ready."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    async def observe(self):
        held = await super().observe()
        return {s: Held(one.wanted, 0, one.wanted) if s == self.shape else one
                for s, one in held.items()}  # fmt: skip


def test_a_change_that_takes_too_long_is_given_up(monkeypatch):
    """What never becomes ready holds the last free GPUs: the old plan waits for them."""
    passed_s = 0.0
    monkeypatch.setattr(allocator_module, "time", SimpleNamespace(monotonic=lambda: passed_s))
    world = World(StaticPlan(FOUR), start=FOUR, pool=Stuck(shape_of(PAIRS)))
    world.slot()
    world.allocator.set_plan(PAIRS)
    world.slot()
    assert world.pool.wanted == {shape_of(FOUR): 2, shape_of(PAIRS): 1}
    passed_s = 1000.0
    world.slot()
    assert world.pool.wanted == {shape_of(FOUR): 4, shape_of(PAIRS): 0}
    assert world.allocator.plan == FOUR
    hand, undo = list(world.allocator.changes)[-2:]
    assert (hand.new, hand.outcome) == (PAIRS, "given up")
    assert (undo.new, undo.outcome) == (FOUR, "done")


def test_a_start_that_never_comes_about_does_not_keep_another_plan_out(monkeypatch):
    passed_s = 0.0
    monkeypatch.setattr(allocator_module, "time", SimpleNamespace(monotonic=lambda: passed_s))
    world = World(StaticPlan(PAIRS), start=PAIRS, pool=Stuck(shape_of(PAIRS)))
    asyncio.run(world.allocator._begin_anew())
    world.slot()
    with pytest.raises(ValueError, match="a change is on its way"):
        world.allocator.set_plan(FOUR)
    passed_s = 1000.0
    world.slot()
    world.allocator.set_plan(FOUR)
    world.slot()
    assert world.pool.wanted[shape_of(FOUR)] == 4
    assert [one.outcome for one in world.allocator.changes] == ["given up", "done"]


def test_a_gateway_that_starts_anew_takes_over_what_is_there():
    held = {shape_of(TWO): Held(2, 2), shape_of(PAIRS): Held(0, 0, 0, 1)}
    assert plan_of(TABLE, held) == TWO
    assert plan_of(TABLE, {}) is None
    assert plan_of(TABLE, {Shape(3, 1, 0.9): Held(1, 1)}) is None


def test_a_batch_limit_is_changed_without_a_restart_and_is_done_when_it_is_in_force():
    scenario = SCENARIO.model_copy(update={"max_batches": (4, 8)})
    few, many = (find_plan(plan_table(scenario), "data", 2, 0.9, n) for n in (4, 8))
    world = World(StaticPlan(few), scenario, start=many)
    world.slot(ticks=1)
    assert world.allocator.changes[-1].new == few
    assert world.allocator.is_changing
    world.slot(ticks=1)
    assert world.allocator.changes[-1].outcome == "done"
    assert world.pool.wanted == {shape_of(few): 2} == {shape_of(many): 2}
    assert world.pool.limits[-1] == (shape_of(few), 4)


def test_plans_are_found_by_what_a_person_gives():
    assert find_plan(TABLE, "data", 2) == TWO
    assert find_plan(TABLE, "data", 2, 0.9).memory_fraction == 0.9
    with pytest.raises(ValueError, match=r"hybrid_tp4 on 3 GPUs .* choose among data on 1"):
        find_plan(TABLE, "hybrid_tp4", 3)
    assert TABLE.plans[TABLE.cheapest_for(0.0)].num_gpus == 1
    assert TABLE.plans[TABLE.cheapest_for(math.inf)] == FOUR


@settings(max_examples=scaled(40))
@given(st.lists(st.integers(0, 2000), min_size=3, max_size=12), st.integers(0, 2))
def test_whatever_the_demand_the_gpu_budget_holds(demand, minimum):
    class RandomPlans:
        def __init__(self):
            self.rng = np.random.default_rng(len(demand))

        def allocate(self, state):
            return TABLE.plans[self.rng.integers(len(TABLE.plans))]

    world = World(RandomPlans(), start=TWO, min_replicas=minimum)
    for requests in demand:
        world.slot(requests, ticks=3)
    assert world.pool.most_gpus <= SCENARIO.num_gpus


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.85])
def test_under_constant_load_it_settles_on_a_plan_near_the_best_and_stays(share):
    """Within 5 % of the cheapest of all plans, turning back at most once in ten minutes."""
    rng = np.random.default_rng(round(100 * share))
    demand = share * TABLE.pool_goodput_capacity_per_s
    world = World(policy("myopic_no_switching"), start=FOUR, cooldown_slots=1)
    plans = []
    for _ in range(round(1800 / SCENARIO.slot_s)):
        world.slot(int(rng.poisson(demand * SCENARIO.slot_s)), ticks=8)
        plans.append(world.allocator.plan)

    def cost(plan):
        usd, violations = world.allocator.predicted(plan, demand)
        return usd + SCENARIO.violation_usd * violations

    settled = plans[len(plans) // 2 :]
    window = round(600 / SCENARIO.slot_s)
    mean = np.mean([cost(plan) for plan in settled])
    assert mean <= 1.05 * min(cost(plan) for plan in TABLE.plans)
    assert max(reversals(settled[i : i + window]) for i in range(len(settled) - window)) <= 1


def reversals(plans):
    """Changes back to the plan before the last."""
    steps = [plan for i, plan in enumerate(plans) if i == 0 or plan != plans[i - 1]]
    return sum(steps[i] == steps[i - 2] for i in range(2, len(steps)))


async def ticks_of(world, until):
    running = asyncio.create_task(world.allocator.run())
    while not until() and not running.done():
        await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()


def test_a_controller_that_is_away_at_the_start_is_asked_again(monkeypatch):
    monkeypatch.setattr(allocator_module, "_TICK_S", 0.01)
    world = World(StaticPlan(ONE), start=ONE)
    observe, failures = world.pool.observe, [RuntimeError("away")] * 3

    async def away_at_first():
        if failures:
            raise failures.pop()
        return await observe()

    world.pool.observe = away_at_first
    asyncio.run(ticks_of(world, lambda: world.pool.wanted))
    assert world.pool.wanted == {shape_of(ONE): 1}


def test_a_plan_that_was_set_by_hand_outlives_its_allocator(monkeypatch):
    monkeypatch.setattr(allocator_module, "_TICK_S", 0.01)
    before, after = (World(StaticPlan(ONE), start=ONE) for _ in range(2))
    before.allocator.set_plan(TWO)
    before.allocator.dry_run = True
    after.allocator.restore(json.loads(json.dumps(before.allocator.saved())))
    asyncio.run(ticks_of(after, lambda: after.pool.wanted.get(shape_of(TWO)) == 2))
    assert (after.allocator.by_hand, after.allocator.plan, after.allocator.dry_run) == (
        True, TWO, True,
    )  # fmt: skip
    untouched = World(StaticPlan(ONE), start=ONE)
    untouched.allocator.restore(World(StaticPlan(ONE), start=ONE).allocator.saved())
    assert not untouched.allocator.by_hand


def test_a_restart_refills_no_switch_budget_and_shortens_no_wait():
    options = {"scenario": SCENARIO.model_copy(update={"switch_budget": BUDGET}), "start": ONE}
    before, after = (World(StaticPlan(FOUR), **options) for _ in range(2))
    before.slot()
    assert before.allocator.changes[-1].outcome == "done"
    assert before.allocator.limits.switches_left == BUDGET.switches - 1
    saved = json.loads(json.dumps(before.allocator.saved()))
    after.now_s = before.now_s + SCENARIO.slot_s
    after.allocator.limits.slot = after.allocator._slot_now()
    after.allocator.restore(saved)
    assert after.allocator.limits.switches_left == BUDGET.switches - 1
    assert after.allocator.saved() == saved | {"slot": saved["slot"] + 1, "since_slots": 1}


def test_what_was_saved_of_slots_of_another_length_keeps_no_plan_out():
    """Numbers of shorter slots are higher: the pool would have grown in a future far away."""
    longer = SCENARIO.model_copy(update={"slot_s": 10 * SCENARIO.slot_s})
    options = {"start": ONE, "now_s": 1e6 * longer.slot_s}
    before, after = World(StaticPlan(FOUR), **options), World(StaticPlan(TWO), longer, **options)
    before.slot()
    assert before.allocator.plan == FOUR
    after.allocator.restore(json.loads(json.dumps(before.allocator.saved())))
    after.allocator.plan = FOUR
    for _ in range(12):
        after.slot()
    assert after.allocator.plan == TWO


def test_a_policy_that_takes_long_to_load_does_not_hold_the_event_loop_up():
    loaded_in = []

    def load(name):
        loaded_in.append(threading.current_thread())
        raise ValueError("the registry is away")

    async def ask():
        api = FastAPI()
        router = make_router(World(StaticPlan(ONE)).allocator, Access(None, None, True), load)
        api.include_router(router)
        transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            with pytest.raises(BadRequest, match="the registry is away"):
                await client.post("/v1/allocation", json={"policy": "champion"})

    asyncio.run(ask())
    assert loaded_in != [threading.main_thread()]
    assert len(loaded_in) == 1


@pytest.fixture
def gateway(tmp_path, monkeypatch):
    """A gateway of an allocated pool, without Ray; its state is in a file."""
    monkeypatch.setattr(allocator_module, "_TICK_S", 0.001)
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    options = app.GatewayOptions(state=tmp_path / "state.json", local_admin=True)
    cluster = app.find_cluster(options).model_copy(update={"pools": ()})
    monkeypatch.setattr(app, "hold_port", lambda host, port: None)
    made = app.GatewayReplica(cluster, options, {})
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    made._allocator._pool = pool = InstantPool()
    pool.num_offered = lambda: 0
    yield made
    made._gateway.manager.stop()


async def set_by_hand(gateway):
    allocator = gateway._allocator
    plan = next(one for one in allocator.table.plans if one != allocator.plan)
    shape = {"parallelism": plan.parallelism, "num_gpus": plan.num_gpus}
    transport = httpx.ASGITransport(gateway.api, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        return await client.post("/v1/allocation", json={"plan": shape})


def test_a_plan_set_by_hand_is_on_the_disk_before_it_is_answered(gateway):
    answer = asyncio.run(set_by_hand(gateway))
    assert answer.status_code == 200
    state = json.loads(gateway._gateway.manager.store.file.path.read_text())
    assert state["parts"]["allocation"]["plan"] == asdict(gateway._allocator.plan)


def test_a_gateway_that_ends_takes_no_plan_and_reshapes_no_pool_that_is_anothers(gateway):
    answers, num_looks = [], []

    class Ending:
        async def hand_over(self):
            """From here on another gateway decides."""
            num_looks.append(gateway._allocator._pool.num_looks)
            answers.append(await set_by_hand(gateway))
            await asyncio.sleep(0.05)
            num_looks.append(gateway._allocator._pool.num_looks)

        def refuse(self):
            pass

        async def stop(self):
            pass

    async def run():
        gateway._start()
        while not gateway._allocator.changes:
            await asyncio.sleep(0.001)
        gateway._listener = Ending()
        await gateway.end()

    asyncio.run(run())
    (refused,) = answers
    assert num_looks[0] == num_looks[1] > 0
    assert refused.status_code == 409
    assert "about to end" in refused.json()["detail"]

"""Laws of changing shape under load, with replicas that start and stop when they like."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from serve_app.allocation.transition import (
    Held,
    Shape,
    gpus_held,
    is_done,
    is_reachable,
    next_wanted,
    shape_of,
)
from tokenyard.allocation.types import Plan

SIZES = {"data": 1, "hybrid_tp2": 2, "pipeline_2": 2, "hybrid_tp4": 4}


@st.composite
def plans(draw, budget):
    kind = draw(st.sampled_from(["model", *(k for k, size in SIZES.items() if size <= budget)]))
    if kind == "model":
        gpus = draw(st.sampled_from([n for n in (2, 4, 8) if n <= budget]))
    else:
        gpus = SIZES[kind] * draw(st.integers(1, budget // SIZES[kind]))
    memory = draw(st.sampled_from([0.5, 0.9]))
    return Plan(kind, gpus, memory, 64)


class Pool:
    """Replicas that do what they are asked for after a while, in any order."""

    def __init__(self, plan: Plan) -> None:
        count = plan.num_replicas
        self.held = {shape_of(plan): Held(wanted=count, ready=count)}

    def ask(self, wanted):
        for shape, count in wanted.items():
            self.held[shape] = replace(self.held.get(shape, Held()), wanted=count)

    def live(self, data):
        """One thing happens, or none."""
        for shape in sorted(self.held):
            one = self.held[shape]
            alive = one.ready + one.starting
            events = ["none"]
            if alive < one.wanted:
                events.append("begin")
            if one.starting:
                events += ["ready", "crash"]
            if alive > one.wanted:
                events.append("end")
            if one.stopping:
                events.append("gone")
            event = data.draw(st.sampled_from(events))
            if event == "begin":
                one = replace(one, starting=one.starting + 1)
            elif event == "ready":
                one = replace(one, starting=one.starting - 1, ready=one.ready + 1)
            elif event == "crash":
                one = replace(one, starting=one.starting - 1)
            elif event == "end" and one.starting:
                one = replace(one, starting=one.starting - 1, stopping=one.stopping + 1)
            elif event == "end":
                one = replace(one, ready=one.ready - 1, stopping=one.stopping + 1)
            elif event == "gone":
                one = replace(one, stopping=one.stopping - 1)
            self.held[shape] = one

    def settle(self):
        """Everything that was asked for comes true."""
        self.held = {
            shape: Held(wanted=one.wanted, ready=one.wanted)
            for shape, one in self.held.items()
            if one.wanted
        }


@settings(max_examples=scaled(300))
@given(data=st.data(), budget=st.integers(2, 8), minimum=st.integers(0, 2))
def test_budget_and_minimum_hold_whatever_happens_and_the_target_is_reached(data, budget, minimum):
    now, target = data.draw(plans(budget)), data.draw(plans(budget))
    minimum = min(minimum, now.num_replicas, target.num_replicas)
    pool = Pool(now)
    shape, count = shape_of(target), target.num_replicas
    reachable = is_reachable(now, target, budget, minimum)
    for _ in range(data.draw(st.integers(0, 25))):
        pool.ask(next_wanted(pool.held, shape, count, budget, minimum))
        pool.live(data)
        assert gpus_held(pool.held) <= budget
        assert sum(one.num_serving for one in pool.held.values()) >= minimum
    for _ in range(60):
        pool.ask(next_wanted(pool.held, shape, count, budget, minimum))
        assert gpus_held(pool.held) <= budget
        pool.settle()
    assert is_done(pool.held, shape, count) or not reachable


@settings(max_examples=scaled(100))
@given(data=st.data(), budget=st.integers(2, 8))
def test_with_a_pause_allowed_every_plan_is_reached(data, budget):
    now, target = data.draw(plans(budget)), data.draw(plans(budget))
    assert is_reachable(now, target, budget, minimum=0)


@settings(max_examples=scaled(100))
@given(data=st.data(), budget=st.integers(2, 8))
def test_a_pool_that_is_as_it_should_be_is_left_alone(data, budget):
    plan = data.draw(plans(budget))
    pool = Pool(plan)
    wanted = next_wanted(pool.held, shape_of(plan), plan.num_replicas, budget, 1)
    assert wanted == {shape_of(plan): plan.num_replicas}


def test_a_plan_that_takes_all_gpus_for_one_replica_cannot_be_entered_without_a_pause():
    data, model = Plan("data", 4, 0.9, 64), Plan("model", 4, 0.9, 64)
    assert not is_reachable(data, model, budget=4, minimum=1)
    assert is_reachable(data, model, budget=4, minimum=0)
    assert is_reachable(data, model, budget=5, minimum=1)


def test_room_is_made_by_halves_so_that_the_other_half_serves():
    data, pairs = Shape(1, 1, 0.9), Shape(1, 2, 0.9)
    held = {data: Held(wanted=8, ready=8)}
    assert next_wanted(held, pairs, 4, budget=8, minimum=1) == {data: 4, pairs: 0}
    held = {data: Held(wanted=4, ready=4, stopping=4)}
    assert next_wanted(held, pairs, 4, budget=8, minimum=1) == {data: 4, pairs: 0}
    held = {data: Held(wanted=4, ready=4)}
    assert next_wanted(held, pairs, 4, budget=8, minimum=1) == {data: 4, pairs: 2}

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from ray.serve.config import AutoscalingConfig

from serve_app.allocation.plans import find_plan
from serve_app.autoscaling import PlannedReplicas
from tokenyard.allocation.plans import LATENCY_S, UTILISATION, load_allocation, plan_table

SCENARIO = load_allocation("emulated_l4x4")
TABLE = plan_table(SCENARIO)


def a_context(time_s, in_progress, replicas, target, state):
    return SimpleNamespace(
        current_time=time_s, total_num_requests=in_progress, current_num_replicas=replicas,
        target_num_replicas=target, policy_state=state,
    )  # fmt: skip


def held_at(plan, share):
    """Requests in progress at a share of the plan's full load, and their rate: Little's law."""
    i, at = TABLE.find(plan), int(np.searchsorted(UTILISATION, share))
    rate = float(UTILISATION[at] * TABLE.capacity_per_s[i])
    return rate * float(TABLE.curves[i, at, LATENCY_S]), rate


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_the_rate_is_found_from_what_is_in_progress(share):
    policy = PlannedReplicas("emulated_l4x4")
    plan = find_plan(TABLE, "data", 2)
    in_progress, rate = held_at(plan, share)
    assert policy.arrivals_per_s(plan, in_progress) == pytest.approx(rate, rel=1e-6)


def test_a_queue_counts_as_arrivals_to_be_served_within_a_slot():
    policy = PlannedReplicas("emulated_l4x4")
    plan = find_plan(TABLE, "data", 1)
    full = policy.arrivals_per_s(plan, 1e4)
    assert policy.arrivals_per_s(plan, 1e4 + 6) == pytest.approx(full + 6 / SCENARIO.slot_s)


def test_it_grows_and_shrinks_with_the_load_once_per_slot():
    policy = PlannedReplicas("emulated_l4x4", time_scale=2.0)
    replicas, state, seen = 1, {"other": 1}, []
    for look in range(480):
        time_s = 1000.0 + look / 10 * 2.0
        busy = look < 240
        in_progress, _ = held_at(find_plan(TABLE, "data", replicas), 0.95 if busy else 0.05)
        context = a_context(time_s, in_progress, replicas, replicas, state)
        replicas, state = policy(context)
        seen.append(replicas)
    changes = [i for i in range(1, len(seen)) if seen[i] != seen[i - 1]]
    assert max(seen) == 4
    assert seen[-1] == 1
    # A slot of six seconds, looked at ten times a second.
    assert min(np.diff(changes)) >= 59
    assert state["other"] == 1


def test_a_clock_that_is_set_back_holds_no_decision_up():
    policy, kept, replicas = PlannedReplicas("emulated_l4x4"), {}, 1
    in_progress, _ = held_at(find_plan(TABLE, "data", 1), 0.95)
    for time_s in (7200.0, 3600.0, 3600.0 + SCENARIO.slot_s):
        replicas, kept = policy(a_context(time_s, in_progress, 1, replicas, kept))
    assert replicas > 1


def test_a_policy_is_told_how_busy_the_last_slot_was():
    """A network looks at it: it would take every pool for an idle one."""
    policy, states = PlannedReplicas("emulated_l4x4"), []
    policy._policy = SimpleNamespace(allocate=lambda state: states.append(state) or state.plan)
    in_progress, rate = held_at(find_plan(TABLE, "data", 2), 0.6)
    kept = {}
    for time_s in (0.0, SCENARIO.slot_s):
        _, kept = policy(a_context(time_s, in_progress, 2, 2, kept))
    (state,) = states
    assert state.demand_per_s == pytest.approx((rate,))
    assert state.measured.load == pytest.approx(0.6, abs=0.02)
    assert state.measured.batch_share > 0
    assert state.measured.latency_s == pytest.approx(in_progress / rate, rel=0.01)


def test_a_plan_of_another_size_counts_by_what_it_serves():
    policy = PlannedReplicas("emulated_l4x4")
    assert policy.replicas_for(find_plan(TABLE, "data", 3)) == 3
    assert policy.replicas_for(find_plan(TABLE, "model", 2)) == 2
    assert policy.replicas_for(find_plan(TABLE, "model", 4)) == 4


def test_serve_takes_it_by_name():
    config = AutoscalingConfig(
        min_replicas=1, max_replicas=4,
        policy={
            "policy_function": "serve_app.autoscaling:PlannedReplicas",
            "policy_kwargs": {"scenario": "emulated_l4x4"},
        },
    )  # fmt: skip
    assert config.policy.get_policy() is PlannedReplicas

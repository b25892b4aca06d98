"""Laws of sessions under every rule: nobody is lost, memory and holds are bounded."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracle.session_instances import some_replicas, some_sessions

from tokenyard.routing.sessions.rules import RULES
from tokenyard.routing.simulator.sessions import new_world, run_sessions
from tokenyard.routing.simulator.sessions_kernel import layout as lay
from tokenyard.routing.simulator.sessions_kernel.loop import play


def drawn(seed, name, hold_s):
    rng = np.random.default_rng(seed)
    replicas = some_replicas(rng, host=bool(rng.integers(2)))
    rate_per_s, shrinks = float(rng.choice([0.5, 5.0])), bool(rng.integers(2))
    stream = some_sessions(rng, replicas, num=20, rate_per_s=rate_per_s, shrinks=shrinks)
    changes = {"hold_s": hold_s, "growth_tokens": min(RULES[name].growth_tokens, 100.0)}
    if RULES[name].tick_s > 0:
        changes["tick_s"] = 0.5
    return replicas, stream, replace(RULES[name], **changes)


@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(list(RULES)),
    hold_s=st.sampled_from([0.0, 1.0, 5.0, 60.0]),
)
def test_all_rules_keep_the_laws(seed, name, hold_s):
    replicas, stream, rule = drawn(seed, name, hold_s)
    world = new_world(replicas, stream, rule)
    play(world)
    out = world.outcomes
    assert not np.isnan(out).any(), "a session was lost"
    order = (lay.OUT_READY_S, lay.OUT_ADMITTED_S, lay.OUT_FIRST_S, lay.OUT_FINISH_S)
    assert (np.diff(out[:, order], axis=1) >= 0).all()
    held_s = out[:, lay.OUT_ADMITTED_S] - out[:, lay.OUT_READY_S]
    assert held_s.max() <= hold_s + 1e-9
    # Turns follow their answers and tools.
    last = stream.first_turn + stream.num_turns - 1
    inner = np.setdiff1d(np.arange(len(stream.context)), last)
    gap_s = out[inner + 1, lay.OUT_READY_S] - out[inner, lay.OUT_FINISH_S]
    np.testing.assert_allclose(gap_s, stream.tool_s[inner], atol=1e-9)
    np.testing.assert_allclose(out[stream.first_turn, lay.OUT_READY_S], stream.arrival_s)
    # Memory: never beyond capacity, and nothing is left of what has ended.
    assert world.totals[lay.MOST_KV] <= 1.0 + 1e-12
    left = world.replicas[:, [lay.USED, lay.IDLE, lay.HOST_USED, lay.RUNNING, lay.WAITING]]
    np.testing.assert_allclose(left, 0.0, atol=1e-6)
    np.testing.assert_allclose(world.replicas[:, lay.PENDING], 0.0, atol=1e-6)
    assert world.kv[:, :, [lay.CACHED, lay.HOST]].max() == 0.0
    # Each prompt is cached or computed; preempted turns compute more.
    tokens = out[:, lay.OUT_HIT] + out[:, lay.OUT_PREFILLED]
    assert (tokens >= stream.context).all()
    if world.totals[lay.PREEMPTIONS] == 0:
        np.testing.assert_array_equal(tokens, stream.context)


@given(seed=st.integers(0, 10_000), name=st.sampled_from(list(RULES)))
def test_the_same_stream_gives_the_same_run(seed, name):
    replicas, stream, rule = drawn(seed, name, 5.0)
    one, other = (run_sessions(replicas, stream, rule) for _ in range(2))
    np.testing.assert_array_equal(one.outcomes, other.outcomes)
    np.testing.assert_array_equal(one.totals, other.totals)


@given(seed=st.integers(0, 10_000), name=st.sampled_from(["index", "working_set", "static_cap"]))
def test_a_gate_is_silent_where_memory_is_ample(seed, name):
    replicas, stream, rule = drawn(seed, name, 60.0)
    ample = replace(replicas, kv_tokens=100.0 * replicas.kv_tokens)
    rule = replace(rule, most_active=rule.most_active * 100)
    gated = run_sessions(ample, stream, rule)
    ungated = replace(rule, full_at=math.inf, most_active=math.inf)
    np.testing.assert_array_equal(gated.outcomes, run_sessions(ample, stream, ungated).outcomes)
    assert gated.totals[lay.HELD_TURNS] == 0

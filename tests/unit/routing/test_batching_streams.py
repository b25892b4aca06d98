"""How a trace becomes a stream for a fleet: classes, SLOs, blocks, failures."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from tokenyard.routing.fleet import (
    Churn,
    Fleet,
    MeasuredReplica,
    ReplicaConfig,
    Tenant,
    TrafficClass,
    requests_per_s,
)
from tokenyard.routing.scenario import Arrivals, RewardWeights, Scenario
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_streams import encode_for_fleet, token_rows
from tokenyard.workload.readers import read_trace
from tokenyard.workload.trace import Trace

REPLICA = ReplicaConfig(name="r", gpu="a10g", model="llama3_8b")


def a_trace(num=4000, **fields):
    rng = np.random.default_rng(0)
    return Trace(
        np.cumsum(rng.exponential(1.0, num)), rng.integers(0, 900, num), rng.integers(0, 90, num),
        **fields,
    )  # fmt: skip


def encoded(fleet, trace, seed=0):
    num = trace.num_requests
    features = np.zeros((num, lay.NUM_REQUEST - lay.FEATURES))
    rng = np.random.default_rng(seed)
    return encode_for_fleet(fleet, trace, np.full(num, 30.0), features, 7.0, rng)


def test_every_class_gets_its_share_its_priority_and_its_slos():
    fleet = Fleet(
        replicas=(REPLICA,),
        classes=(
            TrafficClass(name="chat", share=3, ttft_s=0.5, tpot_s=0.05),
            TrafficClass(
                name="batch", share=1, priority=2, response_s=60, timeout_s=90, max_wait_s=5
            ),
        ),
        tenants=(Tenant(name="a", share=1), Tenant(name="b", share=4)),
        num_routers=2,
    )
    rows = encoded(fleet, a_trace()).requests
    chat, batch = rows[:, lay.CLASS] == 0, rows[:, lay.CLASS] == 1
    assert chat.mean() == pytest.approx(0.75, abs=0.03)
    assert set(rows[chat, lay.SLO_RESPONSE_S]) == {7.0}
    assert set(rows[chat, lay.SLO_TTFT_S]) == {0.5}
    assert set(rows[chat, lay.ABANDON_S]) == {np.inf}
    assert set(rows[batch, lay.SLO_RESPONSE_S]) == {60.0}
    assert set(rows[batch, lay.SLO_TPOT_S]) == {np.inf}
    assert set(rows[batch, lay.PRIORITY]) == {2.0}
    waits_s = rows[batch, lay.ABANDON_S] - rows[batch, lay.ARRIVAL_S]
    assert waits_s == pytest.approx(np.full(len(waits_s), 90.0))
    assert set(rows[chat, lay.MAX_WAIT_S]) == {np.inf}
    assert set(rows[batch, lay.MAX_WAIT_S]) == {5.0}
    assert rows[:, lay.TENANT].mean() == pytest.approx(0.8, abs=0.03)
    assert rows[:, lay.ROUTER].mean() == pytest.approx(0.5, abs=0.03)


def test_no_prompt_and_no_output_is_empty():
    rows = encoded(Fleet(replicas=(REPLICA,)), a_trace()).requests
    assert rows[:, lay.CONTEXT].min() == rows[:, lay.OUTPUT].min() == 1


def test_chains_keep_which_prefixes_are_equal():
    hashes = ((7, 9), (7, 9, -3), (), (7, 4))
    trace = a_trace(4, prefix_hashes=hashes, prefix_block_tokens=64)
    fleet = Fleet(replicas=(REPLICA,), prefix_block_tokens=64)
    stream = encoded(fleet, trace)
    assert stream.num_blocks == 4
    assert stream.chains.min() == 1
    chains = []
    for row in stream.requests:
        at, length = int(row[lay.CHAIN_AT]), int(row[lay.CHAIN_LENGTH])
        chains.append(stream.chains[at : at + length].tolist())
    back = dict(zip(stream.chains.tolist(), itertools.chain(*hashes), strict=True))
    assert [tuple(back[block] for block in chain) for chain in chains] == list(hashes)
    # Without a cache nothing is kept of them.
    assert encoded(Fleet(replicas=(REPLICA,)), trace).num_blocks == 0


def test_blocks_of_another_size_are_told_anew_in_those_of_the_fleet():
    trace = a_trace(2, prefix_hashes=((5,), (5, 6)), prefix_block_tokens=512)
    trace = replace(trace, context_tokens=np.array([512, 700]))
    stream = encoded(Fleet(replicas=(REPLICA,), prefix_block_tokens=128), trace)
    first, second = np.split(stream.chains, [4])
    assert len(second) == 700 // 128
    assert first.tolist() == second[:4].tolist()
    assert stream.num_blocks == 5


def test_blocks_of_a_trace_may_have_hashes_of_any_size(tmp_path):
    path = tmp_path / "mine.jsonl"
    first, second, third = 2**64 - 1, 2**200, -(2**70)
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [first, second]},
        {"timestamp": 9, "input_length": 1024, "output_length": 1, "hash_ids": [first, third]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace, _ = read_trace(path)
    stream = encoded(Fleet(replicas=(REPLICA,), prefix_block_tokens=512), trace)
    assert stream.num_blocks == 3
    assert stream.chains[0] == stream.chains[2]


def test_every_replica_goes_down_and_up_in_turn_and_some_ends_are_announced():
    churn = Churn(mean_up_s=100, mean_down_s=20, drained_share=0.5, drain_s=10)
    fleet = Fleet(replicas=(REPLICA, REPLICA.model_copy(update={"name": "s"})), churn=churn)
    events = encoded(fleet, a_trace(8000)).events
    assert (np.diff(events[:, lay.EVENT_S]) >= 0).all()
    for replica in range(2):
        mine = events[events[:, lay.EVENT_REPLICA] == replica]
        ends = mine[mine[:, lay.EVENT_STATUS] != lay.DRAINING]
        assert set(ends[::2, lay.EVENT_STATUS]) == {lay.DOWN}
        assert set(ends[1::2, lay.EVENT_STATUS]) == {lay.UP}
        assert np.diff(ends[:, lay.EVENT_S])[::2].mean() == pytest.approx(20, rel=0.4)
        drains = mine[mine[:, lay.EVENT_STATUS] == lay.DRAINING]
        assert len(drains) / (len(ends) / 2) == pytest.approx(0.5, abs=0.2)


def test_the_same_seed_draws_the_same_and_another_does_not():
    fleet = Fleet(replicas=(REPLICA,), num_routers=5)
    one, same, other = (encoded(fleet, a_trace(50), seed).requests for seed in (1, 1, 2))
    assert one.tobytes() == same.tobytes() != other.tobytes()


def test_a_stream_for_a_fleet_is_no_stream_for_servers():
    with pytest.raises(ValueError, match="token-level"):
        token_rows(encoded(Fleet(replicas=(REPLICA,)), a_trace(3)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gpu": "a10g", "model": "llama2_70b"}, "does not fit"),
        ({"gpu": "a10", "model": "llama3_8b"}, "a10g"),
        ({"gpu": "a10g", "model": "llama3_8b", "token_budget": 64}, "above max_batch"),
    ],
)
def test_a_replica_that_cannot_be_is_refused_with_the_reason(wrong, says):
    with pytest.raises(ValueError, match=says):
        ReplicaConfig(name="r", **wrong)


def test_a_measured_replica_with_the_numbers_of_a_modelled_one_serves_as_that_does():
    base, prefill, sequence, kv = REPLICA.iteration
    measured = MeasuredReplica(
        name="m", iteration_s=base, prefill_token_s=prefill, sequence_s=sequence, kv_token_s=kv,
        kv_capacity_tokens=REPLICA.kv_capacity_tokens,
    )  # fmt: skip
    trace = a_trace(200)
    responses = [
        completed(Fleet(replicas=(replica,)), trace).response_s.tolist()
        for replica in (REPLICA, measured)
    ]
    assert responses[0] == responses[1]
    assert measured.energy.tolist() == [0.0] * 4


def test_blocks_are_whole_pages():
    with pytest.raises(ValueError, match="multiple"):
        Fleet(replicas=(REPLICA,), prefix_block_tokens=100)


def test_every_replica_holds_a_page():
    small = MeasuredReplica(
        name="m", iteration_s=0.01, prefill_token_s=0, sequence_s=0, kv_capacity_tokens=15
    )
    with pytest.raises(ValueError, match="less than a page of 16"):
        Fleet(replicas=(REPLICA, small))


def test_the_estimated_capacity_is_what_saturates_a_replica():
    """Offered a little less it keeps up, offered a little more its queue grows without end."""
    config = REPLICA.model_copy(update={"max_batch": 32})
    memory = config.kv_capacity_tokens
    per_s = requests_per_s(config.iteration, 32, config.token_budget, memory, 1000.0, 100.0)
    assert mean_wait_growth(config, 0.85 * per_s) < 0.1 < mean_wait_growth(config, 1.25 * per_s)


def mean_wait_growth(config, rate_per_s):
    """Response of the last tenth over that of the second, in a stream of equal requests."""
    num = 2000
    trace = Trace(np.arange(num) / rate_per_s, np.full(num, 1000), np.full(num, 100))
    response_s = completed(Fleet(replicas=(config,)), trace).response_s
    return response_s[-200:].mean() / response_s[200:400].mean() - 1.0


def completed(fleet, trace):
    """What becomes of the requests of a trace, each placed where it delays least."""
    scenario = Scenario(
        name="one", description="", fleet=fleet, arrivals=Arrivals(rate_per_s=1.0),
        reward=RewardWeights(processing=0, queue=0, overload=0, balance=0),
    )  # fmt: skip
    sim = BatchingSim(scenario, 1, trace.num_requests)
    sim.load(0, encoded(fleet, trace))
    sim.run_linear(np.zeros(sim.num_weights), 1100.0)
    return sim.view().outcomes()

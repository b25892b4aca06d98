"""The prompts in flight, counted in blocks, against a slow count of every token."""

from __future__ import annotations

import numpy as np
import pytest
from oracle.prompt_books import pieces_of, prompt_blocks

from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.policies.dynamo import DynamoCost
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_streams import fleet_stream
from tokenyard.routing.simulator.streams import StreamSource

NUM = 240
SCENARIOS = {
    "multi_turn_prefix": {},
    # Replicas fail, and what they held is sent again; clients hang up.
    "churn": {},
    # A router counts only what it sent itself, of replicas that it sees late.
    "stale_signals": {"num_routers": 2},
}


def a_run(name):
    scenario = load_scenario(name)
    fleet = scenario.required_fleet.model_copy(update=SCENARIOS[name])
    scenario = scenario.model_copy(update={"fleet": fleet})
    sim = BatchingSim(scenario, 1, NUM)
    stream = fleet_stream(StreamSource(scenario).sample(NUM, np.random.default_rng(5)))
    sim.load(0, stream)
    return scenario, sim, stream


def to_be_placed_again(sim):
    """Requests that a replica has given back: outcomes still name it."""
    clock, ring = sim.arrays.clock[0], sim.arrays.retries[0]
    head, count = int(clock[lay.RETRY_HEAD]), int(clock[lay.RETRY_COUNT])
    return [int(ring[(head + place) % len(ring)]) for place in range(count)]


@pytest.mark.parametrize("block_tokens", [16, 7])
@pytest.mark.parametrize("name", SCENARIOS)
def test_blocks_in_flight_are_those_of_a_slow_count(name, block_tokens):
    scenario, sim, stream = a_run(name)
    size = scenario.required_fleet.prefix_block_tokens
    requests, outcomes = sim.arrays.requests[0], sim.arrays.outcomes[0]
    pieces = [
        pieces_of(stream.chains[int(at) : int(at + num)], int(context), size)
        for at, num, context in requests[:, [lay.CHAIN_AT, lay.CHAIN_LENGTH, lay.CONTEXT]].tolist()
    ]
    rng, most, shared = np.random.default_rng(3), 0.0, 0
    while (current := sim.view().current()) >= 0:
        server = outcomes[:, lay.SERVER].copy()
        server[requests[:, lay.ROUTER] != requests[current, lay.ROUTER]] = -1.0
        server[to_be_placed_again(sim)] = -1.0
        server[outcomes[:, lay.GAVE_UP] > 0.0] = -1.0
        expected = prompt_blocks(
            pieces, server, outcomes[:, lay.FINISH_S], current, scenario.num_servers, block_tokens
        )
        found = sim.view().snapshots(block_tokens).prompt_blocks(block_tokens)
        assert found.tolist() == expected[sim.view().offered()].tolist()
        most = max(most, float(found.max()))
        shared += sum(outcomes[:, lay.HIT_TOKENS] > 0)
        sim.step(rng.choice(sim.view().offered(), 1))
    assert most > 4 * requests[:, lay.CONTEXT].mean() / block_tokens
    assert bool(shared) == bool(size)


def test_dynamo_counts_prompts_where_they_are_known_and_memory_in_use_elsewhere():
    scenario, sim, _ = a_run("multi_turn_prefix")
    context = PolicyContext("t", scenario.slo, np.random.default_rng(0), scenario.num_servers)
    product = make_policy("dynamo_lmetric", context)
    cost = DynamoCost(np.random.default_rng(0), prefill_load_scale=0.0)
    for _ in range(NUM // 2):
        sim.step(np.array([cost.route(sim.view().request(), sim.view().snapshots(16))]))
    request, snapshots = sim.view().request(), sim.view().snapshots(16)
    counted = snapshots.prompt_blocks(16)
    assert cost.costs(request, snapshots).tolist() == counted.tolist()
    prefill = DynamoCost(np.random.default_rng(0)).costs(request, snapshots) - counted
    assert product.costs(request, snapshots) == pytest.approx(prefill * (counted + 1.0))
    in_memory = [
        s.engine.kv_used_fraction * s.engine.kv_capacity_tokens + request.context_tokens
        for s in snapshots
    ]
    assert cost.costs(request, list(snapshots)) == pytest.approx(np.ceil(np.array(in_memory) / 16))

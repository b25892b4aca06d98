"""What the gateway knows of replicas: the simulator's numbers, from what a gateway sees."""

import math

import numpy as np
import pytest

from serve_app.cluster import EngineProfile
from serve_app.engines.base import EngineStatus
from serve_app.gateway.host_metrics import HostMetrics
from serve_app.gateway.replicas import InFlight, Prompt, ReplicaTable
from tokenyard.routing import observation as ob
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.routing.snapshot_table import NUM_STATE

PROFILE = EngineProfile(
    iteration_s=0.01, prefill_token_s=1e-4, sequence_s=1e-4, kv_token_s=1e-7, max_batch=4,
    token_budget=64, kv_capacity_tokens=1000.0,
)  # fmt: skip


def an_unequal_fleet(scrape_interval_s):
    """Three replicas that differ in hardware and batch, with memory enough for every batch."""
    scenario = load_scenario("conversation_mixed_gpus")
    replicas = tuple(
        replica.model_copy(update={"max_batch": batch})
        for replica, batch in zip(scenario.fleet.replicas[1:], (8, 48, 24), strict=True)
    )
    fleet = scenario.fleet.model_copy(
        update={"replicas": replicas, "scrape_interval_s": scrape_interval_s}
    )
    return scenario.model_copy(update={"fleet": fleet})


def rows_of(*replicas):
    return np.array([one.row for one in replicas])


def ids_of(table, rows):
    return [table.at(row).replica_id for row in rows]


def in_flight_of_nobody():
    return InFlight([0.0] * NUM_STATE)


def profile_of(config, page_tokens):
    a, b, c, d = config.iteration
    return EngineProfile(
        iteration_s=a, prefill_token_s=b, sequence_s=c, kv_token_s=d, max_batch=config.max_batch,
        token_budget=config.token_budget,
        kv_capacity_tokens=config.replica.kv_capacity_tokens // page_tokens * page_tokens,
    )  # fmt: skip


def generated_by_request(sim):
    """Tokens that the requests being decoded have generated so far, by request."""
    found = {}
    rules, requests = sim.arrays.rules, sim.arrays.requests[0]
    for row in sim.arrays.state[0]:
        for which in range(int(row[lay.DECODING])):
            at = int(rules[lay.DECODE_AT]) + lay.DECODE_FIELDS * which
            index = int(row[at + lay.D_INDEX])
            held = row[at + lay.D_BASE] + row[lay.STEP]
            found[index] = int(held - requests[index, lay.CONTEXT]) + 1
    return found


@pytest.mark.parametrize("scrape_interval_s", [0.0, 0.05, 1.0])
def test_simulator_and_gateway_make_the_same_observation_of_the_same_truth(scrape_interval_s):
    scenario = an_unequal_fleet(scrape_interval_s)
    num = 400
    sim = BatchingSim(scenario, 1, num)
    sim.load(0, StreamSource(scenario).sample(num, np.random.default_rng(7)))
    table = ReplicaTable(scenario.mean_lengths_tokens)
    for config in scenario.fleet.replicas:
        profile = profile_of(config, scenario.fleet.page_tokens)
        table.add(config.name, "pool", profile, 0, -1.0)
    replicas = list(table.replicas.values())
    rng, open_requests, waited = np.random.default_rng(3), {}, 0
    while (index := sim.view().current()) >= 0:
        outcomes, requests = sim.arrays.outcomes[0], sim.arrays.requests[0]
        ended = {i: outcomes[i, lay.FINISH_S] for i in open_requests}
        for done in sorted((i for i in ended if not math.isnan(ended[i])), key=ended.get):
            in_flight = replicas[open_requests.pop(done)].in_flight
            response_s = ended[done] - requests[done, lay.ARRIVAL_S]
            in_flight.receive(str(done), int(requests[done, lay.OUTPUT]))
            in_flight.close(str(done), ended[done], response_s)
        for i, generated in generated_by_request(sim).items():
            replicas[open_requests[i]].in_flight.receive(str(i), generated)
        for one, row in zip(replicas, sim.arrays.state[0], strict=True):
            state = (lay.SCRAPED_WAITING, lay.SCRAPED_RUNNING)
            waiting, running = (int(row[column]) for column in state)
            kv, at_s = row[lay.SCRAPED_KV], row[lay.SCRAPED_S]
            one.publish(EngineStatus(waiting, running, kv, at_s))
        request = sim.view().request()
        prompt = Prompt([0] * request.context_tokens)
        ours = table.snapshots(table.offered(sim.view().now_s(), math.inf), prompt)
        columns, theirs = ob.snapshot_columns(ours), sim.arrays.tables[0].copy()
        theirs[:, ob.AGE_S] = 0.0  # A snapshot carries the time of observation instead.
        assert columns == pytest.approx(theirs, rel=1e-9, abs=1e-9, nan_ok=True)
        assert [one.observed_at_s for one in ours] == pytest.approx(
            [one.observed_at_s for one in sim.view().snapshots()]
        )
        assert (
            ours.prompt_blocks(16).tolist() == sim.view().snapshots(16).prompt_blocks(16).tolist()
        )
        seen = np.empty(ob.observation_size(3, whole=True), dtype=np.float32)
        features = requests[index, lay.FEATURES :]
        sizes = request.context_tokens, request.predicted_total_tokens
        ob.encode(features, *sizes, columns, True, seen)
        assert seen == pytest.approx(sim.observe()[0], rel=1e-6)
        waited += int(columns[:, ob.NUM_WAITING].sum() > 0)
        action = int(rng.integers(3))
        output = request.predicted_total_tokens - request.context_tokens
        replicas[action].send(str(index), prompt, 0, output, sim.view().now_s())
        open_requests[index] = action
        sim.step(np.array([action]))
    assert waited > 50  # Queues were long enough to be worth comparing.


def test_the_tracker_counts_what_is_on_its_way_and_forgets_what_has_ended():
    in_flight = in_flight_of_nobody()
    in_flight.send("a", 100.0, 20.0, 1.0)
    in_flight.send("b", 50.0, 10.0, 2.0)
    assert (in_flight.count, in_flight.prefill_tokens, in_flight.output_tokens) == (2, 150.0, 30.0)
    in_flight.receive("a", 5)
    assert (in_flight.prefill_tokens, in_flight.output_tokens) == (50.0, 25.0)
    in_flight.close("b", 3.0)
    assert math.isnan(in_flight.mean_response_s)
    in_flight.close("a", 4.0, 3.0)
    assert (in_flight.count, in_flight.prefill_tokens, in_flight.output_tokens) == (0, 0.0, 0.0)
    assert in_flight.mean_response_s == 3.0
    assert [in_flight.count_at(time_s) for time_s in (0.5, 1.0, 2.5, 3.0, 9.0)] == [0, 1, 2, 1, 0]


def test_an_answer_longer_than_predicted_still_has_a_token_to_come():
    in_flight = in_flight_of_nobody()
    in_flight.send("a", 10.0, 4.0, 0.0)
    in_flight.receive("a", 9)
    assert in_flight.output_tokens == 1.0


def test_what_was_sent_after_a_state_was_published_is_added_to_it():
    table = ReplicaTable((100.0, 10.0))
    replica = table.add("r", "pool", PROFILE, 0, 0.0)
    replica.send("a", Prompt([1] * 10), 0, 5.0, 1.0)
    replica.publish(EngineStatus(0, 1, 0.1, 2.0))
    replica.send("b", Prompt([1] * 10), 0, 5.0, 3.0)
    (snapshot,) = table.snapshots(rows_of(replica), Prompt([1]))
    assert (snapshot.num_running, snapshot.num_waiting) == (2, 0)
    replica.publish(EngineStatus(3, 3, 0.1, 1.5))  # Older than what is known.
    assert replica.status.num_running == 1


def test_blocks_of_prompts_in_flight_are_counted_once_until_the_last_request_with_them_ends():
    table = ReplicaTable((100.0, 10.0))
    busy = table.add("busy", "pool", PROFILE, 8, 0.0)
    idle = table.add("idle", "pool", PROFILE, 0, 0.0)
    system, rows = list(range(16)), rows_of(busy, idle)
    asked = Prompt([*system, *range(100, 108), 1])
    # Two blocks of 8 in common, one of its own, and a rest of one token.
    assert table.snapshots(rows, asked).prompt_blocks(8).tolist() == [4, 4]
    busy.send("a", Prompt([*system, *range(200, 208)]), 0, 5.0, 1.0)
    busy.send("b", Prompt([*system, 2, 3]), 0, 5.0, 2.0)
    snapshots = table.snapshots(rows, asked)
    assert snapshots.prompt_blocks(8).tolist() == [6, 4]
    assert snapshots.prompt_blocks(4).tolist() == [10, 7]
    busy.in_flight.close("a", 3.0)
    assert table.snapshots(rows, asked).prompt_blocks(8).tolist() == [5, 4]
    snapshots.release()
    assert np.isnan(snapshots.prompt_blocks(8)).all()


def test_a_queue_that_others_filled_is_a_wait_even_where_nothing_was_sent():
    table = ReplicaTable((100.0, 10.0))
    idle = table.add("idle", "pool", PROFILE, 0, 0.0)
    busy = table.add("busy", "pool", PROFILE, 0, 0.0)
    busy.publish(EngineStatus(6, 4, 0.5, 1.0))
    snapshots = table.snapshots(rows_of(idle, busy), Prompt([1]))
    assert snapshots[1].engine.prefill_in_flight_tokens == 600.0
    assert snapshots[1].engine.output_in_flight_tokens == 80.0
    waits_s = ob.snapshot_columns(snapshots)[:, ob.WAIT_S]
    assert waits_s[0] == 0.0 < waits_s[1]


def test_a_prefix_that_was_sent_is_believed_to_be_there_until_newer_ones_push_it_out():
    table = ReplicaTable((100.0, 10.0))
    replica = table.add("r", "pool", PROFILE, 10, 0.0)
    prompt = list(range(35))
    assert replica.match_tokens(Prompt(prompt)) == 0
    replica.send("a", Prompt(prompt), 0, 5.0, 0.0)
    assert replica.match_tokens(Prompt(prompt)) == 30
    assert replica.match_tokens(Prompt(prompt[:30])) == 20  # The last token is always computed.
    assert replica.match_tokens(Prompt([9, *prompt])) == 0
    for number in range(100):
        replica.send(str(number), Prompt([1000 + number] * 10), 0, 5.0, 0.0)
    assert replica.match_tokens(Prompt(prompt)) == 0


def test_a_prompt_is_hashed_once_per_size_of_block():
    prompt = Prompt([1, 2, 3])
    assert prompt.blocks(2) is prompt.blocks(2)
    assert len(prompt.blocks(0)) == 0


def test_replicas_with_blocks_of_different_sizes_are_told_by_their_own():
    table = ReplicaTable((100.0, 10.0))
    replicas = [table.add(f"r{i}", "pool", PROFILE, (4, 8)[i % 2], 0.0) for i in range(50)]
    prompt = Prompt(list(range(32)))
    for number, replica in enumerate(replicas[:-1]):
        replica.send(str(number), prompt, 0, 5.0, 0.0)
    snapshots = table.snapshots(rows_of(*replicas), prompt)
    assert [one.match_tokens(prompt) for one in replicas[:2]] == [28, 24]
    assert [one.engine.match_tokens for one in snapshots] == [*[28, 24] * 24, 28, 0]


def test_replicas_that_drain_or_are_not_heard_of_are_not_offered_unless_all_are():
    table = ReplicaTable((100.0, 10.0))
    for name in ("old", "drains", "fresh"):
        table.add(name, "pool", PROFILE, 0, 0.0)
    table.replicas["drains"].publish(EngineStatus(0, 0, 0.0, 9.0, accepting=False))
    table.replicas["fresh"].publish(EngineStatus(0, 0, 0.0, 9.0))
    assert ids_of(table, table.offered(10.0, 5.0)) == ["fresh"]
    table.keep("pool", ["old", "drains"])
    assert ids_of(table, table.offered(10.0, 5.0)) == ["old"]
    assert ids_of(table, table.offered(100.0, 5.0)) == ["old"]


def test_the_host_metrics_give_shares_and_a_rate():
    host_metrics = HostMetrics()
    host_metrics.read(1.0)
    loads = host_metrics.read(2.0)
    assert all(0 <= value <= 1 for name, value in loads.items() if name.endswith("_ratio"))
    assert loads["host_network_bytes_per_second"] >= 0


def test_an_engine_that_starts_anew_has_nothing_cached():
    table, prompt = ReplicaTable((100.0, 100.0)), Prompt(range(100))
    replica = table.add("a", "p", PROFILE, 16, 0.0)
    replica.send("one", prompt, 0, 10.0, 0.0)
    assert replica.match_tokens(prompt) == 96
    replica.publish(EngineStatus(0, 0, 0.0, 1.0, accepting=False))
    replica.publish(EngineStatus(0, 0, 0.0, 2.0))
    assert replica.match_tokens(prompt) == 0

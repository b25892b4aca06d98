"""What is counted of a fleet's requests, against sums done by hand."""

import dataclasses
import math

import numpy as np
import pytest
from oracle.fleet_instances import SECOND, Ask, a_fleet, a_sim, a_stream, play
from oracle.slow_engine import Change

from tokenyard import metrics
from tokenyard.routing.evaluation import summarise
from tokenyard.routing.fleet import Tenant, TrafficClass
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.run import Run

TWO = [SECOND, SECOND]
RETRY = {"max_retries": 3, "retry_delay_s": 0.5}


def outcomes(asks, routes, changes=(), engines=TWO, watts=0.0, iteration_j=0.0, **options):
    sim = a_sim(a_fleet(engines, **options), engines, len(asks), 1, watts, iteration_j)
    sim.load(0, a_stream(asks, changes))
    play(sim, routes)
    return sim.view().outcomes()


def gaps(found) -> dict[float, float]:
    """Counted inter-token latencies by the middle of their bin, seconds."""
    bins = np.flatnonzero(found.latency_counts)
    middle = lay.LATENCY_BIN_START_S * np.exp((bins + 0.5) / lay.LATENCY_BINS_PER_E)
    return dict(zip(middle.tolist(), found.latency_counts[bins].tolist(), strict=True))


def test_what_a_failing_replica_had_generated_is_wasted_though_the_request_completes_elsewhere():
    # Tokens at 1, 2 and 3 s are lost; the second attempt is placed at 4 s and takes five seconds.
    failing = (Change(3.5, 0, "fail"),)
    found = outcomes([Ask(0.0, 4, 5)], [[0, 1]], failing, **RETRY)
    assert found.response_s.tolist() == [9.0]
    assert found.first_token_s.tolist() == [5.0]
    assert found.wasted_tokens.tolist() == [3.0]
    assert found.attempts.tolist() == [2.0]
    assert found.server.tolist() == [1]


def test_what_was_lost_and_what_nobody_waited_for_is_wasted_together():
    asks = [Ask(0.0, 4, 5, abandon_s=6.5)]
    found = outcomes(asks, [[0, 1]], (Change(3.5, 0, "fail"),), **RETRY)
    # Three tokens on the first replica; those of 5, 6 and 7 s on the second.
    assert found.wasted_tokens.tolist() == [6.0]
    assert found.gave_up.tolist() == [1]
    assert math.isnan(found.response_s[0])
    assert found.first_token_s.tolist() == [5.0]


def test_nothing_is_wasted_of_what_is_preempted_and_completes():
    tight = [dataclasses.replace(SECOND, num_pages=4)]
    found = outcomes([Ask(0.0, 4, 9), Ask(0.0, 4, 5)], [[0], [0]], engines=tight)
    assert found.preemptions.tolist() == [0, 1]
    assert not found.wasted_tokens.any()
    assert found.prefilled_tokens.tolist() == [4, 4 + 8]


def test_gaps_between_tokens_are_counted_with_the_time_that_a_preempted_request_stood_still():
    tight = [dataclasses.replace(SECOND, num_pages=4)]
    found = outcomes([Ask(0.0, 4, 9), Ask(0.0, 4, 5)], [[0], [0]], engines=tight)
    # The second gets tokens at 2, 3, 4, 5 s, is preempted then, and gets its last at 10 s.
    assert found.response_s.tolist() == [9.0, 10.0]
    (short, many), (long, one) = sorted(gaps(found).items())
    assert (many, one) == (8 + 3, 1)
    assert short == pytest.approx(1.0, rel=0.07)
    assert long == pytest.approx(5.0, rel=0.07)


def test_tokens_of_an_iteration_that_a_failure_cuts_short_are_in_no_latency():
    found = outcomes([Ask(0.0, 4, 5)], [[0, 1]], (Change(3.5, 0, "fail"),), **RETRY)
    assert sum(gaps(found).values()) == 2 + 4


def test_energy_is_of_what_is_up_until_the_last_completion_and_of_the_work_that_was_done():
    changes = (Change(3.5, 0, "fail"), Change(20.0, 0, "join"), Change(30.0, 1, "fail"))
    found = outcomes([Ask(0.0, 4, 5)], [[0, 1]], changes, watts=10.0, iteration_j=6.0, **RETRY)
    idling_j = 10.0 * (3.5 + 9.0)
    working_j = 6.0 * (3.5 + 5.0)
    assert found.energy_j == pytest.approx(idling_j + working_j)


def test_a_replica_that_was_down_for_a_while_takes_no_energy_meanwhile():
    changes = (Change(2.0, 1, "drain"), Change(3.0, 1, "fail"), Change(5.0, 1, "join"))
    found = outcomes([Ask(1.0, 4, 9)], [[0]], changes, watts=10.0)
    assert found.response_s.tolist() == [9.0]
    assert found.energy_j == pytest.approx(10.0 * (9.0 + 7.0))


def test_a_replica_that_is_down_refuses_and_the_attempt_counts():
    asks = [Ask(0.0, 4, 1), Ask(2.0, 4, 1)]
    changes = (Change(1.5, 0, "fail"), Change(50.0, 0, "join"))
    found = outcomes(asks, [[0], [0, 0, 1]], changes, **RETRY)
    assert found.attempts.tolist() == [1, 3]
    assert found.response_s.tolist() == [1.0, 0.5 + 0.5 + 1.0]
    assert found.server.tolist() == [0, 1]
    dropped = outcomes(asks, [[0], [0, 0]], changes, max_retries=1)
    assert dropped.server.tolist() == [0, -1]


def test_requests_that_a_failure_sends_back_come_again_in_the_order_in_which_they_were_sent():
    alone = dataclasses.replace(SECOND, max_batch=1)
    asks = [Ask(0.0, 4, 9), *[Ask(0.0, 4, 1)] * 3]
    found = outcomes(asks, [[0, 1]] * 4, (Change(3.5, 0, "fail"),), engines=[alone, alone], **RETRY)
    assert np.argsort(found.response_s).tolist() == [0, 1, 2, 3]


def test_hits_are_of_all_that_admitted_requests_have_to_have_in_memory():
    caching = dataclasses.replace(SECOND, block_tokens=4)
    asks = [Ask(0.0, 9, 1, chain=(1, 2)), Ask(5.0, 9, 1, chain=(1, 2))]
    found = outcomes(asks, [[0], [0]], engines=[caching])
    assert found.hit_tokens.tolist() == [0, 8]
    assert found.prefilled_tokens.tolist() == [9, 1]


def test_memory_that_was_held_is_seen_when_a_request_is_placed():
    asks = [Ask(0.0, 8, 9), Ask(2.5, 8, 1)]
    found = outcomes(asks, [[0], [0]], engines=[dataclasses.replace(SECOND, num_pages=8)] * 2)
    # Eight tokens of prompt, one generated and one in the making: three of eight pages.
    assert found.kv_seen.tolist() == [0.0, 3 / 8 / 2]


def test_a_row_of_a_fleet_has_all_its_numbers_right():
    classes = [
        TrafficClass(name="chat", ttft_s=1.0), TrafficClass(name="batch", tpot_s=0.5),
    ]  # fmt: skip
    scenario = a_fleet(
        TWO, classes=tuple(classes), tenants=(Tenant(name="a"), Tenant(name="b")), **RETRY
    )
    asks = [
        Ask(0.0, 4, 5, slo_s=(99.0, 1.0, 99.0)),
        Ask(2.0, 6, 3, traffic_class=1, tenant=1, slo_s=(99.0, 99.0, 0.5)),
        Ask(10.0, 4, 5, tenant=1, slo_s=(99.0, 1.0, 99.0), abandon_s=11.5),
    ]
    sim = a_sim(scenario, TWO, 3, watts=10.0, iteration_j=6.0)
    sim.load(0, a_stream(asks, (Change(3.5, 0, "fail"),)))
    play(sim, [[0, 1], [1], [1]])
    row = summarise(scenario, Run(sim.view().outcomes(), np.zeros(3)))
    # The first is lost after three tokens, comes again at 4 s, and waits for the iteration that
    # the second has begun; its first token is late. The second has a token a second. The client
    # of the third hangs up, which counts as slow as the slowest.
    assert row["mean_response_s"] == (10.0 + 3.0 + 10.0) / 3
    assert row["mean_ttft_s"] == (6.0 + 1.0 + 1.0) / 3
    assert row["p50_ttft_s"] == 1.0
    assert row["mean_tpot_s"] == 1.0
    assert row["p99_tpot_s"] == 1.0
    assert row["p50_itl_s"] == pytest.approx(1.0, rel=0.07)
    assert row["attained_chat_fraction"] == 0.0
    assert row["attained_batch_fraction"] == 0.0
    assert row["slo_violation_fraction"] == 1.0
    assert row["goodput_per_s"] == 0.0
    # Three lost, two for which nobody waited; eight that arrived.
    assert row["wasted_tokens_fraction"] == 5 / 13
    assert row["retried_fraction"] == row["gave_up_fraction"] == 1 / 3
    assert row["preemptions_per_request"] == row["prefix_hit_fraction"] == 0.0
    work_j = 6.0 * (3.5 + 10)
    assert row["energy_j_per_token"] == pytest.approx((10.0 * (3.5 + 10.0) + work_j) / 8)


def test_a_class_attains_its_slos_by_its_own_measure():
    violations = np.array([False, True, False, True])
    group = np.array([0, 0, 0, 1])
    assert metrics.attained_fraction(violations, group, 0) == pytest.approx(2 / 3)
    assert metrics.attained_fraction(violations, group, 1) == 0.0
    assert math.isnan(metrics.attained_fraction(violations, group, 2))

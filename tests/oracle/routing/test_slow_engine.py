"""The slow engine against sums done by hand, and against laws that hold for every engine."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.engine_instances import engines, jobs
from oracle.slow_engine import Change, Engine, Job, simulate, simulate_cluster
from sizes import scaled

ROOMY = Engine(
    a=1.0,
    b=0.125,
    c=0.5,
    d=1 / 64,
    max_batch=4,
    token_budget=64,
    page_tokens=4,
    num_pages=64,
    block_tokens=0,
    queue_limit=100,
)


def worked(totals):
    """What the iterations computed: prefill tokens, sequences decoding, KV tokens read."""
    return [(it.prefill_tokens, it.decoding, it.kv_tokens) for it in totals.log]


def ends_s(totals):
    return [it.start_s + it.duration_s for it in totals.log]


# By hand.


def test_a_lone_request_is_prefilled_at_once_and_then_decodes_one_token_an_iteration():
    [fate], totals = simulate(ROOMY, [Job(2.0, context=5, output=3)])
    assert worked(totals) == [(5, 0, 0), (0, 1, 5), (0, 1, 6)]
    assert fate.first_token_s == 2.0 + (1 + 5 / 8)
    assert fate.finish_s == fate.first_token_s + (1 + 1 / 2 + 5 / 64) + (1 + 1 / 2 + 6 / 64)
    assert totals.busy_s == fate.finish_s - 2.0
    assert (totals.iterations, fate.preemptions, fate.hit_tokens) == (3, 0, 0)


def test_a_single_token_is_there_when_the_prefill_is():
    [fate], totals = simulate(ROOMY, [Job(0.0, context=8, output=1)])
    assert fate.first_token_s == fate.finish_s == 2.0
    assert totals.iterations == 1


def test_a_prompt_beyond_the_budget_is_prefilled_in_chunks_that_read_what_came_before():
    engine = replace(ROOMY, max_batch=3, token_budget=4)
    [fate], totals = simulate(engine, [Job(0.0, context=10, output=1)])
    assert worked(totals) == [(4, 0, 0), (4, 0, 4), (2, 0, 8)]
    assert fate.first_token_s == 3 + 10 / 8 + 12 / 64


def test_decoding_comes_before_prefill_and_an_older_prefill_before_a_younger_one():
    engine = replace(ROOMY, max_batch=3, token_budget=4)
    late = 0.5
    arrivals = [Job(0.0, 1, 5), Job(late, 4, 1), Job(late, 2, 1)]
    fates, totals = simulate(engine, arrivals)
    # Of the second iteration's four tokens one decodes and three start the second prompt; its
    # last token goes first in the third, and the third prompt has the rest.
    assert worked(totals) == [(1, 0, 0), (3, 1, 1), (3, 1, 2 + 3), (0, 1, 3), (0, 1, 4)]
    assert fates[1].first_token_s == fates[2].first_token_s == ends_s(totals)[2]


def test_what_finds_no_budget_is_not_admitted():
    engine = replace(ROOMY, max_batch=2, token_budget=3)
    first, second = Job(0.0, 6, 1), Job(0.0, 3, 1, priority=1)
    fates, totals = simulate(engine, [first, second, Job(2.0, 3, 1)])
    assert totals.log[1].start_s < 2.0 < totals.log[2].start_s
    assert worked(totals) == [(3, 0, 0), (3, 0, 3), (3, 0, 0), (3, 0, 0)]
    assert fates[2].first_token_s < fates[1].first_token_s


def test_an_idle_engine_starts_before_a_later_submission_of_the_same_instant():
    _, totals = simulate(ROOMY, [Job(0.0, 4, 1), Job(0.0, 4, 1), Job(0.0, 4, 1)])
    assert worked(totals) == [(4, 0, 0), (8, 0, 0)]


def test_an_iteration_starts_before_a_submission_of_the_same_instant():
    end_of_first_s = 1 + 8 / 8
    _, totals = simulate(ROOMY, [Job(0.0, 8, 3), Job(end_of_first_s, 4, 1)])
    assert worked(totals) == [(8, 0, 0), (0, 1, 8), (4, 1, 9)]
    _, totals = simulate(ROOMY, [Job(0.0, 8, 1), Job(end_of_first_s, 4, 1)])
    assert [it.start_s for it in totals.log] == [0.0, end_of_first_s]


def test_lower_priority_numbers_are_admitted_first_and_equal_ones_in_turn():
    engine = replace(ROOMY, max_batch=1)
    priorities = [0, 1, 0, 1, 0]
    fates, _ = simulate(engine, [Job(0.0, 4, 2, priority=p) for p in priorities])
    order = sorted(range(5), key=lambda i: fates[i].finish_s)
    assert order == [0, 2, 4, 1, 3]


def test_requests_that_can_never_fit_are_refused_to_the_token():
    engine = replace(ROOMY, num_pages=3)
    fates, totals = simulate(engine, [Job(0.0, 8, 6), Job(9.0, 8, 5)])
    assert [fate.refused for fate in fates] == [True, False]
    assert math.isnan(fates[0].finish_s)
    assert totals.iterations == 5


def test_a_full_queue_refuses():
    engine = replace(ROOMY, max_batch=1, queue_limit=2)
    fates, _ = simulate(engine, [Job(0.0, 4, 2)] * 4)
    assert [fate.refused for fate in fates] == [False, False, False, True]


TIGHT = replace(ROOMY, num_pages=4)
"""Sixteen tokens of KV."""


def test_the_last_admitted_is_preempted_and_computes_its_tokens_again():
    fates, totals = simulate(TIGHT, [Job(0.0, 4, 9), Job(0.0, 4, 5)])
    assert worked(totals) == [
        (4, 0, 0),
        (4, 1, 4),
        *[(0, 2, 5 + 4), (0, 2, 6 + 5), (0, 2, 7 + 6)],
        # The first needs a third page: the second goes, with four tokens generated, and does not
        # fit until the first is gone.
        *[(0, 1, 8), (0, 1, 9), (0, 1, 10), (0, 1, 11)],
        (4 + 4, 0, 0),
    ]
    assert [fate.preemptions for fate in fates] == [0, 1]
    assert [fate.computed_prefill_tokens for fate in fates] == [4, 12]
    assert fates[1].first_token_s == ends_s(totals)[1]
    assert fates[1].finish_s == ends_s(totals)[-1]


def test_the_larger_priority_number_is_preempted_before_the_last_admitted():
    fates, _ = simulate(TIGHT, [Job(0.0, 4, 9, priority=1), Job(0.0, 4, 9)])
    assert [fate.preemptions for fate in fates] == [1, 0]
    assert fates[1].finish_s < fates[0].finish_s


def test_nothing_is_admitted_in_an_iteration_that_preempts():
    arrivals = [Job(0.0, 4, 9, priority=1), Job(0.0, 4, 5, priority=1), Job(8.0, 1, 1)]
    fates, totals = simulate(TIGHT, arrivals)
    assert totals.log[4].start_s < 8.0 < totals.log[5].start_s
    assert [fate.preemptions for fate in fates] == [0, 1, 0]
    assert worked(totals)[5:7] == [(0, 1, 8), (1, 1, 9)]
    assert fates[2].first_token_s == ends_s(totals)[6]


def test_a_prefill_is_preempted_too_and_loses_what_it_computed():
    engine = replace(TIGHT, max_batch=2, token_budget=3)
    fates, totals = simulate(engine, [Job(0.0, 3, 6), Job(0.0, 12, 1)])
    # Pages for all twelve tokens are taken at admission, so the first finds none for its fifth.
    assert worked(totals)[:4] == [(3, 0, 0), (2, 1, 3), (0, 1, 4), (0, 1, 5)]
    assert [fate.preemptions for fate in fates] == [0, 1]
    assert fates[1].computed_prefill_tokens == 2 + 12


def test_a_preempted_request_goes_back_to_the_front_of_its_queue():
    arrivals = [Job(0.0, 4, 9), Job(0.0, 4, 5), Job(8.0, 1, 1)]
    fates, _ = simulate(TIGHT, arrivals)
    assert fates[1].preemptions == 1
    # One page is free for the third all the while, but the second, which does not fit, is first.
    assert fates[2].first_token_s >= fates[0].finish_s


def test_clients_that_hang_up_leave_the_queue_and_the_batch_when_the_next_iteration_starts():
    engine = replace(ROOMY, max_batch=1)
    running = Job(0.0, 8, 100, abandon_s=2.5)
    waiting = Job(0.0, 8, 1, abandon_s=3.0)
    fates, totals = simulate(engine, [running, waiting, Job(0.0, 8, 1)])
    assert fates[0].first_token_s == 2.0
    assert all(math.isnan(t) for t in [fates[0].finish_s, fates[1].first_token_s])
    # The iteration in which the first hangs up ends first.
    assert worked(totals) == [(8, 0, 0), (0, 1, 8), (8, 0, 0)]
    assert not any(fate.refused for fate in fates)
    _, totals = simulate(engine, [replace(running, abandon_s=2.0), Job(0.0, 8, 1)])
    assert worked(totals) == [(8, 0, 0), (8, 0, 0)]


def test_what_completes_in_the_iteration_in_which_its_client_hangs_up_is_complete():
    [fate], _ = simulate(ROOMY, [Job(0.0, 8, 1, abandon_s=1.0)])
    assert fate.finish_s == 2.0
    [fate], totals = simulate(ROOMY, [Job(0.0, 8, 1, abandon_s=0.0)])
    assert math.isnan(fate.finish_s)
    assert totals.iterations == 0


def test_giving_up_frees_memory_for_the_next():
    engine = replace(TIGHT, num_pages=3)
    fates, _ = simulate(engine, [Job(0.0, 9, 4, abandon_s=2.0), Job(0.5, 9, 1)])
    assert fates[1].first_token_s == (1 + 9 / 8) + (1 + 9 / 8)


def test_iterations_that_start_before_it_is_warm_take_longer():
    engine = replace(ROOMY, warm_until_s=4.0, warm_up_factor=3.0)
    [fate], _ = simulate(engine, [Job(0.0, 4, 3)])
    assert fate.first_token_s == 3 * 1.5
    assert fate.finish_s == 3 * 1.5 + (1.5 + 4 / 64) + (1.5 + 5 / 64)
    engine = replace(engine, warm_until_s=4.5)
    assert simulate(engine, [Job(0.0, 4, 3)])[0] == [fate]


CACHING = replace(ROOMY, page_tokens=2, block_tokens=4)


@pytest.mark.parametrize(
    ("context", "hit_tokens"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)]
)
def test_a_hit_saves_prefill_but_leaves_a_token_to_compute(context, hit_tokens):
    chain = (1, 2, 3)
    second = Job(100.0, context, 1, chain=chain)
    fates, _ = simulate(CACHING, [Job(0.0, 12, 1, chain=chain), second])
    assert fates[1].hit_tokens == hit_tokens
    assert fates[1].computed_prefill_tokens == context - hit_tokens
    took_s = fates[1].first_token_s - 100.0
    assert took_s == 1 + (context - hit_tokens) / 8 + hit_tokens / 64


@pytest.mark.parametrize(("output", "hit_tokens"), [(1, 4), (2, 4), (3, 8), (6, 8), (7, 12)])
def test_blocks_that_the_answer_filled_serve_the_next_turn(output, hit_tokens):
    """Six tokens of prompt; the last token that is generated never enters the KV."""
    chain = (1, 2, 3)
    turns = [Job(0.0, 6, output, chain=chain), Job(100.0, 13, 1, chain=chain)]
    fates, _ = simulate(CACHING, turns)
    assert fates[1].hit_tokens == hit_tokens


def test_blocks_of_the_answer_are_in_no_cache_before_it_is_complete():
    chain = (1, 2, 3)
    turns = [Job(0.0, 6, 40, chain=chain), Job(30.0, 13, 1, chain=chain)]
    fates, totals = simulate(CACHING, turns)
    assert totals.log[-1].start_s > fates[1].finish_s
    assert fates[1].hit_tokens == 4


def test_a_block_is_hit_from_the_end_of_its_prefill_on():
    chain = (1, 2)
    fates, totals = simulate(CACHING, [Job(0.0, 9, 3, chain=chain)] * 3)
    assert [fate.hit_tokens for fate in fates] == [0, 8, 8]
    assert worked(totals)[:2] == [(9, 0, 0), (2, 1, 9 + 8 + 8)]


@pytest.mark.parametrize(("num_pages", "then"), [(6, (0, 2, 18)), (7, (9, 2, 18))])
def test_a_second_copy_of_a_block_makes_room(num_pages, then):
    engine = replace(CACHING, page_tokens=4, num_pages=num_pages)
    twin = Job(0.5, 9, 4, chain=(1, 2))
    _, totals = simulate(engine, [Job(0.0, 1, 1), twin, twin, Job(2.0, 9, 1)])
    # Prefilled together the twins have six pages; two copies of two blocks leave four of them.
    assert worked(totals)[1:3] == [(18, 0, 0), then]


def test_a_chain_is_eaten_from_its_end():
    engine = replace(CACHING, page_tokens=4, num_pages=5)
    chain = (1, 2, 3)
    told = Job(0.0, 13, 1, chain=chain)
    for other, hit_tokens in [(8, 12), (9, 8), (13, 4), (17, 0)]:
        stranger = Job(50.0, other, 1)
        fates, _ = simulate(engine, [told, stranger, replace(told, submit_s=100.0)])
        assert fates[2].hit_tokens == hit_tokens


@pytest.mark.parametrize("used_again", [False, True])
def test_the_chain_released_longest_ago_is_eaten_first(used_again):
    engine = replace(CACHING, page_tokens=4, num_pages=5)
    older, newer = Job(0.0, 9, 1, chain=(1, 2)), Job(10.0, 9, 1, chain=(8, 9))
    again = [replace(older, submit_s=20.0)] if used_again else []
    stranger = Job(30.0, 9, 1)
    for probed, hit_tokens in [(older, 8 if used_again else 0), (newer, 0 if used_again else 8)]:
        probe = replace(probed, submit_s=40.0)
        fates, _ = simulate(engine, [older, newer, *again, stranger, probe])
        assert fates[-1].hit_tokens == hit_tokens


def test_of_two_that_complete_together_the_first_submitted_is_eaten_first():
    engine = replace(CACHING, page_tokens=4, num_pages=5)
    first, low, high = Job(0.0, 1, 1), Job(0.5, 5, 1, 1, chain=(1,)), Job(0.5, 5, 1, chain=(8,))
    stranger = Job(20.0, 13, 1)
    # The second is admitted last, for its priority, but was submitted first.
    for chain, hit_tokens in [((1,), 0), ((8,), 4)]:
        probe = Job(40.0, 5, 1, chain=chain)
        fates, totals = simulate(engine, [first, low, high, stranger, probe])
        assert worked(totals)[1] == (10, 0, 0)
        assert fates[-1].hit_tokens == hit_tokens


def test_a_block_that_is_held_is_not_eaten():
    engine = replace(CACHING, page_tokens=4, num_pages=4)
    holder = Job(0.0, 9, 4, chain=(1, 2))
    stranger, probe = Job(0.5, 9, 1), Job(100.0, 9, 1, chain=(1, 2))
    fates, _ = simulate(engine, [holder, stranger, probe])
    assert fates[1].first_token_s > fates[0].finish_s
    assert fates[2].hit_tokens == 4


def test_a_request_does_not_eat_its_own_hit():
    engine = replace(CACHING, page_tokens=4, num_pages=4)
    first, small = Job(0.0, 9, 1, chain=(1, 2)), Job(10.0, 1, 4)
    large = Job(10.0, 16, 1, chain=(1, 2))
    fates, _ = simulate(engine, [first, small, large])
    # One page is free, two are the hit, and two more are needed.
    assert fates[2].first_token_s > fates[1].finish_s
    assert fates[2].hit_tokens == 8


def test_a_preempted_request_hits_the_blocks_of_its_own_context_and_no_further():
    engine = replace(TIGHT, num_pages=5, block_tokens=4)
    work = [Job(0.0, 9, 8, chain=(1, 2)), Job(0.0, 5, 6, chain=(1, 2))]
    fates, totals = simulate(engine, work)
    assert [fate.preemptions for fate in fates] == [0, 1]
    # It comes back with nine tokens, and the cache has the first eight. Were both blocks a hit it
    # would fit beside the first request.
    assert worked(totals)[5:] == [(0, 1, 13), (0, 1, 14), (0, 1, 15), (5, 0, 4), (0, 1, 9)]
    assert fates[1].hit_tokens == 4 + 4


def test_a_preempted_request_registers_no_more_than_its_context_before_it_is_complete():
    engine = replace(TIGHT, num_pages=5, block_tokens=4)
    work = [Job(0.0, 9, 8, chain=(1, 2)), Job(0.0, 5, 16, chain=(1, 3))]
    fates, totals = simulate(engine, work)
    assert worked(totals)[8:10] == [(5, 0, 4), (0, 1, 9)]
    probe = Job(totals.log[8].start_s + 0.5, 9, 1, chain=(1, 3))
    fates, totals = simulate(engine, [*work, probe])
    assert worked(totals)[8:10] == [(5, 0, 4), (5, 1, 4 + 9)]
    assert fates[2].hit_tokens == 4


# A cluster.


def test_a_refused_request_is_sent_on_after_the_delay_and_no_oftener_than_allowed():
    small, large = replace(ROOMY, num_pages=1), ROOMY
    request = Job(0.0, 8, 1)
    fates, _ = simulate_cluster([small, large], [request] * 2, [(0, 0, 1), (0, 0)], 0.5)
    assert fates[0].finish_s == 1.0 + 2.0
    assert fates[1].refused


def test_a_request_that_was_sent_on_counts_as_submitted_when_it_comes():
    engine = replace(CACHING, page_tokens=4, num_pages=5)
    work = [Job(0.0, 1, 1), Job(0.0, 5, 1, chain=(1,)), Job(0.5, 5, 1, chain=(8,))]
    routes = [(1,), (0, 1), (1,), (1,), (1,)]
    stranger = Job(20.0, 13, 1)
    for chain, hit_tokens in [((8,), 0), ((1,), 4)]:
        arrivals = [*work, stranger, Job(40.0, 5, 1, chain=chain)]
        fates, totals = simulate_cluster(
            [replace(engine, num_pages=1), engine], arrivals, routes, 0.75
        )
        assert worked(totals[1])[1] == (10, 0, 0)
        assert fates[-1].hit_tokens == hit_tokens


def test_a_replica_that_fails_loses_batch_queue_and_cache_and_its_requests_start_anew():
    engine = replace(CACHING, max_batch=1)
    work = [Job(0.0, 8, 50, chain=(1, 2)), Job(0.0, 8, 1), Job(20.0, 9, 1, chain=(1, 2))]
    changes = [Change(4.5, 0, "fail"), Change(6.0, 0, "join", warm_until_s=6.5)]
    fates, totals = simulate_cluster([engine] * 2, work, [(0, 1), (0, 1), (0,)], 1.0, changes)
    assert fates[0].first_token_s == 5.5 + 2.0
    assert fates[1].first_token_s == fates[0].finish_s + 2.0
    assert fates[2].hit_tokens == 0
    assert ends_s(totals[0])[-2:] == [4.5, fates[2].finish_s]


def test_a_replica_that_drains_finishes_what_it_has_and_takes_nothing_until_it_joins_cold():
    engine = replace(ROOMY, warm_up_factor=2.0)
    work = [Job(0.0, 8, 2), Job(0.0, 8, 1), Job(1.5, 8, 1), Job(20.0, 8, 1), Job(30.0, 8, 1)]
    changes = [Change(1.0, 0, "drain"), Change(15.0, 0, "join", warm_until_s=25.0)]
    fates, _ = simulate_cluster([engine], work, [(0,)] * 5, 0.0, changes)
    assert [fate.refused for fate in fates] == [False, False, True, False, False]
    assert fates[0].finish_s == fates[1].finish_s == 2.0 + (1 + 8 / 8 + 1 / 2 + 8 / 64)
    assert [fate.finish_s for fate in fates[3:]] == [20.0 + 2 * 2.0, 32.0]


# Laws.


@settings(max_examples=scaled(300))
@given(engines(), jobs())
def test_every_request_is_refused_or_given_up_or_complete(engine, arrivals):
    fates, totals = simulate(engine, arrivals)
    for job, fate in zip(arrivals, fates, strict=True):
        complete = not math.isnan(fate.finish_s)
        assert not (complete and fate.refused)
        if not complete and not fate.refused:
            assert min(job.abandon_s, job.max_wait_s) < math.inf
        if complete:
            least_s = engine.a + engine.b * (job.context - fate.hit_tokens)
            assert fate.first_token_s >= job.submit_s + least_s
            assert fate.finish_s >= fate.first_token_s + (job.output - 1) * engine.a
            tokens = fate.computed_prefill_tokens + fate.hit_tokens
            assert tokens >= job.context
            assert (tokens == job.context) or fate.preemptions
    computed = sum(fate.computed_prefill_tokens for fate in fates)
    assert sum(it.prefill_tokens for it in totals.log) == computed


@settings(max_examples=scaled(300))
@given(engines(), jobs())
def test_time_goes_forward_and_nothing_waits_at_an_idle_engine(engine, arrivals):
    fates, totals = simulate(engine, arrivals)
    for it in totals.log:
        x, y, z = it.prefill_tokens, it.decoding, it.kv_tokens
        assert 0 < x + y <= engine.token_budget
        factor = engine.warm_up_factor if it.start_s < engine.warm_until_s else 1.0
        duration_s = engine.a + engine.b * x + engine.c * y + engine.d * z
        assert it.duration_s == pytest.approx(factor * duration_s, abs=1e-12)
    done = [
        (job.submit_s, fate.finish_s)
        for job, fate in zip(arrivals, fates, strict=True)
        if not math.isnan(fate.finish_s)
    ]
    idle_s, submits_s = 0.0, {job.submit_s for job in arrivals}
    for it in totals.log:
        assert it.start_s >= idle_s
        if it.start_s > idle_s:
            assert it.start_s in submits_s
            assert not any(submit <= idle_s < finish for submit, finish in done)
        idle_s = it.start_s + it.duration_s


@settings(max_examples=scaled(200))
@given(engines(), jobs(patient=True))
def test_in_ample_memory_nothing_is_preempted_and_first_tokens_come_in_turn(engine, arrivals):
    engine = replace(engine, num_pages=1000, queue_limit=100)
    fates, totals = simulate(engine, arrivals)
    assert not any(fate.preemptions or fate.refused for fate in fates)
    assert sum(it.decoding for it in totals.log) == sum(job.output - 1 for job in arrivals)
    for priority in (0, 1):
        firsts = [
            fate.first_token_s
            for job, fate in zip(arrivals, fates, strict=True)
            if job.priority == priority
        ]
        assert firsts == sorted(firsts)


@settings(max_examples=scaled(200))
@given(engines(), jobs(patient=True))
def test_one_after_the_other_in_ample_memory_hits_all_that_was_ever_registered(engine, arrivals):
    engine = replace(engine, num_pages=1000)
    spread = [replace(job, submit_s=1000.0 * i) for i, job in enumerate(arrivals)]
    fates, _ = simulate(engine, spread)
    seen: set[int] = set()
    for job, fate in zip(spread, fates, strict=True):
        if engine.block_tokens == 0:
            assert fate.hit_tokens == 0
            continue
        hits = [
            k * engine.block_tokens
            for k in range(len(job.chain) + 1)
            if k * engine.block_tokens < job.context and seen >= set(job.chain[:k])
        ]
        assert fate.hit_tokens == max(hits)
        seen |= set(job.chain[: (job.context + job.output - 1) // engine.block_tokens])


@settings(max_examples=scaled(100))
@given(engines(), engines(), jobs(), st.randoms(use_true_random=False))
def test_replicas_do_not_know_each_other(one, other, arrivals, random):
    route = [random.randrange(2) for _ in arrivals]
    fates, totals = simulate_cluster([one, other], arrivals, [(r,) for r in route])
    for which, engine in enumerate([one, other]):
        mine = [i for i, r in enumerate(route) if r == which]
        alone, total = simulate(engine, [arrivals[i] for i in mine])
        assert repr(alone) == repr([fates[i] for i in mine])
        assert total == totals[which]

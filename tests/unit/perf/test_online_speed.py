"""Speeds that are estimated from answers, beside those that made the answers."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle.slow_engine import Engine, Job, simulate

from tokenyard.perf.online import GENERIC_ITERATION, AnswerMeter, BatchLimitEstimator, PoolEstimator


def a_stretch(rng, iteration, noise=0.05):
    """Some iterations: how long they take, and what they compute."""
    count, running, context = rng.integers(5, 60), rng.uniform(1, 64), rng.uniform(200, 3000)
    prefill = rng.poisson(0.3 * count) * rng.uniform(100, 2000)
    batch = np.array([count, prefill, count * running, count * running * context])
    return [iteration @ batch * np.exp(rng.normal(0, noise)), *batch]


def error_of(found, iteration, seed=0):
    """Mean relative error of the times that it predicts."""
    rng = np.random.default_rng([seed, 1])
    times = [(sum(found * batch), time) for time, *batch in
             (a_stretch(rng, iteration, 0.0) for _ in range(50))]  # fmt: skip
    return np.mean([abs(predicted / time - 1) for predicted, time in times])


def drawn(rng, spread=1.0):
    """Coefficients far from those that nothing is known of."""
    return GENERIC_ITERATION * np.exp(rng.normal(0, spread) + rng.normal(0, 0.5, 4))


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_coefficients_come_out_of_the_times_that_they_make(seed):
    rng = np.random.default_rng(seed)
    iteration, one = drawn(rng), PoolEstimator().add("one")
    errors = []
    for _ in range(600):
        one.observe(*a_stretch(rng, iteration))
        errors.append(one.estimate)
    assert error_of(one.iteration, iteration, seed) < 0.05
    # What makes up most of the time is known best, and the uncertainty says so.
    assert one.iteration[:2] == pytest.approx(iteration[:2], rel=0.35)
    assert errors[-1].deviations.max() < errors[0].deviations.max()
    assert errors[-1].residual == pytest.approx(0.05, abs=0.03)
    assert errors[-1].num_changes == 0


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_what_was_saved_is_known_again(seed):
    rng = np.random.default_rng(seed)
    pool, speeds = PoolEstimator(), {name: drawn(rng) for name in ("one", "two")}
    for name, iteration in speeds.items():
        for _ in range(200):
            pool.add(name).observe(*a_stretch(rng, iteration))
    saved = json.loads(json.dumps(pool.saved()))
    later = PoolEstimator()
    later.add("two")
    later.restore(saved)
    for name, iteration in speeds.items():
        again = later.add(name)
        assert again.num_observations == 200
        assert error_of(again.iteration, iteration, seed) < 0.1
        np.testing.assert_allclose(again.evidence[0], pool.add(name).evidence[0] / 2)
    later.drop("one")
    assert later.add("one").num_observations == 0


@pytest.mark.parametrize(
    ("place", "number"), [(3, math.inf), (24, 0.0), (24, math.nan), (None, 0.0)]
)
def test_what_is_no_estimate_is_not_taken_up(place, number):
    pool = PoolEstimator()
    pool.add("one").observe(1.0, 10, 0, 10, 10)
    [numbers] = pool.saved().values()
    if place is None:
        numbers.append(number)
    else:
        numbers[place] = number
    with pytest.raises(ValueError, match="26 numbers"):
        PoolEstimator().restore({"one": numbers})


@example(774329)  # Four outliers close together are no change of speed.
@settings(max_examples=15, deadline=None)
@given(seeds)
def test_outliers_of_ten_times_hardly_count(seed):
    rng = np.random.default_rng(seed)
    iteration, one = drawn(rng), PoolEstimator().add("one")
    for _ in range(1500):
        time_s, *batch = a_stretch(rng, iteration)
        one.observe(time_s * (10 if rng.random() < 0.05 else 1), *batch)
    assert error_of(one.iteration, iteration, seed) < 0.10


@settings(max_examples=15, deadline=None)
@given(seeds, st.sampled_from([0.5, 2.0, 4.0]))
def test_a_change_of_speed_is_found_and_followed(seed, factor):
    rng = np.random.default_rng(seed)
    iteration, one = drawn(rng), PoolEstimator().add("one")
    for _ in range(500):
        one.observe(*a_stretch(rng, iteration))
    before = one.estimate.num_changes
    for _ in range(40):
        one.observe(*a_stretch(rng, factor * iteration))
    assert one.estimate.num_changes > before
    assert error_of(one.iteration, factor * iteration, seed) < 0.12


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_replicas_of_a_pool_learn_from_each_other(seed):
    rng = np.random.default_rng(seed)
    common = drawn(rng)
    pool, own = PoolEstimator(), [common * np.exp(rng.normal(0, 0.1)) for _ in range(8)]
    for number, iteration in enumerate(own[:7]):
        for _ in range(200):
            pool.add(str(number)).observe(*a_stretch(rng, iteration))
    pool.share()
    newcomer = pool.add("7")
    # Nothing was seen of it: it is believed to be like the others, which differ by a tenth.
    assert error_of(newcomer.iteration, own[7], seed) < 0.4
    alone = PoolEstimator().add("7")
    stretches = [a_stretch(rng, own[7]) for _ in range(3)]
    for stretch in stretches:
        newcomer.observe(*stretch)
        alone.observe(*stretch)
    assert error_of(newcomer.iteration, own[7], seed) < 0.12
    shapes = [np.log(one.iteration / own[7]) for one in (newcomer, alone)]
    assert np.abs(shapes[0]).max() < max(np.abs(shapes[1]).max(), 0.3)


def test_equal_replicas_are_believed_to_be_equal_and_others_are_not():
    rng = np.random.default_rng(0)
    pool = PoolEstimator()
    for number, factor in enumerate((1, 1, 1, 3)):
        for _ in range(300):
            pool.add(str(number)).observe(*a_stretch(rng, factor * GENERIC_ITERATION))
    pool.share()
    first, second, third, slow = (pool.add(str(number)).shared_iteration for number in range(4))
    assert first.tolist() == second.tolist() == third.tolist()
    assert slow[0] == pytest.approx(3 * first[0], rel=0.15)


numbers = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e-300, 1e300, math.inf, math.nan]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[numbers] * 5), max_size=30))
def test_whatever_it_is_told_all_is_finite_and_positive(equations):
    pool = PoolEstimator()
    one = pool.add("one")
    for equation in equations:
        one.observe(*equation)
        pool.share()
    for values in (one.iteration, one.shared_iteration, one.estimate.deviations):
        assert np.isfinite(values).all()
        assert (values > 0).all()
    assert 0 < one.estimate.residual <= 1
    assert one.evidence[0].shape == (4, 4)


def test_what_is_declared_counts_until_answers_say_otherwise():
    rng, declared = np.random.default_rng(0), np.array([0.01, 1e-4, 0.0, 0.0])
    one = PoolEstimator(declared).add("one")
    assert one.iteration[:2] == pytest.approx(declared[:2])
    assert one.slower_than(declared) == 1.0
    truth = GENERIC_ITERATION * 10
    for _ in range(5):
        one.observe(*a_stretch(rng, truth))
    vague = one.slower_than(declared)
    for _ in range(300):
        one.observe(*a_stretch(rng, truth))
    assert 1.0 <= vague < one.slower_than(declared)
    assert one.slower_than(declared) > 2.0
    assert one.slower_than(truth) == pytest.approx(1.0, abs=0.01)


def tokens_of(engine, jobs):
    """What a gateway sees of an engine: (time, kind, job), in order."""
    fates, totals = simulate(engine, jobs)
    ends = np.array([one.start_s + one.duration_s for one in totals.log])
    seen = [(job.submit_s, 0, number) for number, job in enumerate(jobs)]
    for number, fate in enumerate(fates):
        first, last = np.searchsorted(ends, [fate.first_token_s - 1e-9, fate.finish_s + 1e-9])
        assert last - first == jobs[number].output
        seen += [(end, 1, number) for end in ends[first:last].tolist()]
        seen.append((fate.finish_s, 2, number))
    return sorted(seen)


def metered(engine, jobs, streams, gateways=1):
    """The estimator of a meter that has seen an engine answer, and the meter.

    Of several gateways that are peers it is the first one's.
    """
    now = [0.0]
    meter = AnswerMeter(PoolEstimator().add("one"), lambda: now[0])
    meter.token_budget = engine.token_budget
    meter.max_batch = engine.max_batch
    received = [0] * len(jobs)
    for now[0], kind, number in tokens_of(engine, jobs):
        name, job = str(number), jobs[number]
        if kind == 0:
            meter.send(name, job.context)
        elif kind == 1 and number % gateways:
            meter.receive_unseen(name, job.context, job.context)
        elif kind == 1 and streams:
            meter.receive(name, 1, received[number], job.context, job.context)
            received[number] += 1
        elif kind == 2:
            if not streams:
                meter.receive_whole(name, job.output, job.context, job.context)
            meter.end(name)
        meter.settle()
    return meter.estimator, meter


def some_jobs(rng, num, rate_per_s):
    times = np.cumsum(rng.exponential(1 / rate_per_s, num)).tolist()
    return [Job(at, int(rng.integers(50, 1500)), int(rng.integers(20, 200))) for at in times]


def test_an_engine_on_a_cpu_gains_nothing_from_batches_and_that_is_found():
    """As measured of llama.cpp: a sequence costs 300 times as much as nothing known would say."""
    engine = Engine(2e-3, 8e-3, 1.5e-2, 0.0, 4, 2048, 4, 3_000, 0, 1000)
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(0.8, 150)).tolist()
    jobs = [Job(at, int(rng.integers(5, 150)), int(rng.integers(2, 30))) for at in times]
    estimator, _ = metered(engine, jobs, streams=True)
    for running in (1, 2, 4):
        batch = np.array([1, 0, running, running * 80])
        assert estimator.iteration @ batch == pytest.approx(engine.a + running * engine.c, rel=0.1)


def test_a_stream_may_begin_when_the_clock_begins():
    now = [0.0]
    meter = AnswerMeter(PoolEstimator().add("one"), lambda: now[0])
    meter.send("a", 10)
    for number in range(20):
        meter.receive("a", 1, number, 10, 10)
        now[0] += 0.1
    meter.settle()
    # Of its prompt, and of a stretch: eight iterations of 0.1 s, or more.
    assert meter.estimator.num_observations >= 2


@pytest.mark.parametrize(
    ("streams", "gateways", "most"), [(True, 1, 0.06), (True, 4, 0.06), (False, 1, 0.15)]
)
def test_a_meter_finds_the_speed_of_the_engine_whose_tokens_it_counts(streams, gateways, most):
    engine = Engine(0.03, 1e-4, 6e-4, 2e-7, 64, 2048, 16, 3_000, 0, 1000)
    rng = np.random.default_rng(1)
    estimator, meter = metered(engine, some_jobs(rng, 300, 2.0), streams, gateways)
    truth = np.array([engine.a, engine.b, engine.c, engine.d])
    # A decode iteration of four, eight and sixteen sequences of 800 tokens.
    for running in (4, 8, 16):
        batch = np.array([1, 0, running, running * 800])
        assert estimator.iteration @ batch == pytest.approx(truth @ batch, rel=most)
    if streams:
        assert estimator.iteration[:2] == pytest.approx(truth[:2], rel=0.15)
    assert estimator.num_observations > 100
    # Whatever went through, nothing is kept of it.
    assert not meter._sent
    assert not meter._unseen


def test_tokens_of_others_count_where_an_endpoint_publishes_that_it_has_more():
    engine = Engine(0.03, 1e-4, 2e-3, 0.0, 64, 2048, 16, 3_000, 0, 1000)
    jobs = some_jobs(np.random.default_rng(2), 300, 2.0)
    seen = tokens_of(engine, jobs)
    now, found = [0.0], []
    for times in (1.0, 2.0):
        meter = AnswerMeter(PoolEstimator().add("one"), lambda: now[0])
        meter.times_own = times
        received = [0] * len(jobs)
        for now[0], kind, number in seen:
            if number % 2:  # Another gateway's.
                continue
            name, context = str(number), jobs[number].context
            if kind == 0:
                meter.send(name, context)
            elif kind == 1:
                meter.receive(name, 1, received[number], context, context)
                received[number] += 1
            else:
                meter.end(name)
            meter.settle()
        batch = np.array([1, 0, 10, 10 * 800])
        found.append(meter.estimator.iteration @ batch / (engine.a + 10 * engine.c))
    assert abs(found[1] - 1) < 0.15 < abs(found[0] - 1)


def test_an_engine_is_full_where_requests_wait_though_no_more_run():
    limit = BatchLimitEstimator()
    for running in (1, 5, 9, 14, 16):
        limit.observe(running, 3)  # Prompts take turns.
    assert limit.estimate is None
    for _ in range(9):
        limit.observe(16, 2)
    assert limit.estimate == 16
    limit.observe(20, 0)
    assert limit.estimate is None
    for running in itertools.chain([15] * 20, [20] * 9):
        limit.observe(running, 1)
    assert limit.estimate == 20

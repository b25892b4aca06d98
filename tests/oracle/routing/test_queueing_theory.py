"""The simulator against closed forms of queueing theory, 400,000 requests each.

Tolerances are about four standard errors of the simulated mean. They are far tighter than what
counting one request too many or too few (in the queue, or in the number of slots) would do.
"""

import math

import numpy as np
import pytest
from oracle.instances import a_poisson_stream, a_scenario, loaded, one
from sizes import is_thorough

from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.scores.order import BOOST_S, FIRST_COME, SERVICE_WEIGHT
from tokenyard.routing.types import OrderKey

# Of a quarter of the requests the mean is half as sure.
NUM_REQUESTS, BAND = (400_000, 1) if is_thorough() else (100_000, 2)
SPEED = 1000.0
MEAN_TOKENS = 500.0
SERVICE_S = MEAN_TOKENS / SPEED


def outcomes_under(
    tokens, load, discipline="serial", concurrency=1, servers=1, seed=0, order=FIRST_COME
):
    """Send Poisson traffic to equal servers, under shortest expected delay."""
    scenario = a_scenario(
        [(SPEED, concurrency)] * servers, discipline, queue_limit=3000, max_overtaking_s=1e6
    )
    slots = concurrency if discipline == "parallel_full" else 1
    rate_per_s = load * slots * servers / SERVICE_S
    rng = np.random.default_rng(seed)
    sim = loaded(scenario, a_poisson_stream(rng, len(tokens), rate_per_s, tokens))
    sim.run_linear(np.zeros(NUM_MARGINAL_WEIGHTS), MEAN_TOKENS, order)
    return sim.view().outcomes(), rate_per_s


def mean_wait_s(outcomes):
    return float(np.mean(outcomes.response_s - outcomes.total_tokens / SPEED))


def exponential_tokens(seed=1):
    return np.random.default_rng(seed).exponential(MEAN_TOKENS, NUM_REQUESTS)


def erlang_c(slots: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c (Erlang 1917)."""
    offered = slots * load
    terms = [offered**k / math.factorial(k) for k in range(slots)]
    last = offered**slots / math.factorial(slots) / (1 - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_wait_of_one_serial_server_is_that_of_m_m_1(load):
    outcomes, _ = outcomes_under(exponential_tokens(), load)
    assert mean_wait_s(outcomes) == pytest.approx(load * SERVICE_S / (1 - load), rel=0.03 * BAND)


@pytest.mark.parametrize(("slots", "load"), [(2, 0.6), (4, 0.7), (8, 0.8)])
def test_mean_wait_of_a_server_with_c_slots_is_that_of_m_m_c(slots, load):
    outcomes, _ = outcomes_under(exponential_tokens(), load, "parallel_full", slots)
    expected = erlang_c(slots, load) * SERVICE_S / (slots * (1 - load))
    assert mean_wait_s(outcomes) == pytest.approx(expected, rel=0.03 * BAND)
    waited = np.mean(outcomes.response_s > outcomes.total_tokens / SPEED + 1e-9)
    assert waited == pytest.approx(erlang_c(slots, load), rel=0.02 * BAND)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_wait_of_equal_requests_is_that_of_m_d_1(load):
    outcomes, _ = outcomes_under(np.full(NUM_REQUESTS, MEAN_TOKENS), load)
    expected = load * SERVICE_S / (2 * (1 - load))
    assert mean_wait_s(outcomes) == pytest.approx(expected, rel=0.02 * BAND)


def test_mean_wait_of_unequal_requests_follows_pollaczek_and_khinchine():
    sizes = np.random.default_rng(2).choice([100.0, 900.0], NUM_REQUESTS)
    outcomes, rate_per_s = outcomes_under(sizes, 0.6)
    second_moment = (0.1**2 + 0.9**2) / 2
    expected = rate_per_s * second_moment / (2 * (1 - 0.6))
    assert mean_wait_s(outcomes) == pytest.approx(expected, rel=0.02 * BAND)


def outcomes_by_key(tokens, load, key_tokens):
    """Send Poisson traffic to one server that takes the least `key_tokens` next."""
    scenario = a_scenario([(SPEED, 1)], queue_limit=5000, max_overtaking_s=1e15)
    rate_per_s = load / (tokens.mean() / SPEED)
    stream = a_poisson_stream(np.random.default_rng(0), len(tokens), rate_per_s, tokens)
    sim = loaded(scenario, stream)
    # So much that no time that passes changes the order.
    for key in (1e9 * key_tokens).tolist():
        sim.order_next(0, OrderKey(key))
        sim.step(one(0))
    sim.drain()
    return sim.view().outcomes(), rate_per_s


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_mean_wait_under_shortest_job_first_is_that_of_phipps(load):
    """Phipps 1956: a size x waits the work in progress over (1 - load of sizes up to x)^2."""
    tokens = exponential_tokens()
    outcomes, rate_per_s = outcomes_by_key(tokens, load, tokens)
    service_s = np.sort(tokens) / SPEED
    in_progress_s = rate_per_s * np.mean(service_s**2) / 2
    load_below = rate_per_s * np.cumsum(service_s) / len(service_s)
    expected = np.mean(in_progress_s / (1 - load_below) ** 2)
    assert mean_wait_s(outcomes) == pytest.approx(expected, rel=0.04 * BAND)


def test_a_boost_has_a_lighter_tail_and_a_lower_mean_than_first_come_in_m_m_1():
    """And shortest first has the lowest mean for a heavier tail (Yu and Scully 2024)."""
    load = 0.8
    decay_per_s = (1 - load) / SERVICE_S  # Of response times of M/M/1, first come, first served.
    found = {}
    for name, place, knob in (
        ("first come", BOOST_S, 0.0), ("boost", BOOST_S, 1 / decay_per_s),
        ("sjf", SERVICE_WEIGHT, 1e3),
    ):  # fmt: skip
        order = FIRST_COME.copy()
        order[place] = knob
        response_s = outcomes_under(exponential_tokens(), load, order=order)[0].response_s
        found[name] = float(response_s.mean()), float(np.quantile(response_s, 0.99))
    (mean, tail), (boost_mean, boost_tail), (sjf_mean, sjf_tail) = found.values()
    assert tail == pytest.approx(math.log(100) / decay_per_s, rel=0.1 * BAND)
    assert sjf_mean < boost_mean < 0.8 * mean
    assert boost_tail < tail < sjf_tail


def test_mean_waits_of_two_classes_are_those_of_cobham():
    """Cobham 1954: class k waits in_progress / ((1 - load up to k-1) (1 - load up to k))."""
    tokens = exponential_tokens()
    which = np.random.default_rng(4).integers(0, 2, len(tokens))
    outcomes, rate_per_s = outcomes_by_key(tokens, 0.8, which)
    service_s = tokens / SPEED
    in_progress_s = rate_per_s * np.mean(service_s**2) / 2
    first_load = rate_per_s * np.mean(service_s * (which == 0))
    wait_s = outcomes.response_s - service_s
    first_s = in_progress_s / (1 - first_load)
    assert wait_s[which == 0].mean() == pytest.approx(first_s, rel=0.03 * BAND)
    second_s = first_s / (1 - rate_per_s * service_s.mean())
    assert wait_s[which == 1].mean() == pytest.approx(second_s, rel=0.06 * BAND)


def test_sharing_slows_every_size_of_request_alike():
    """M/G/1-PS: a request of size x stays x / (1 - load) on average, whatever the sizes are."""
    sizes = np.random.default_rng(3).choice([100.0, 900.0], NUM_REQUESTS)
    outcomes, _ = outcomes_under(sizes, 0.6, "processor_sharing", concurrency=400)
    for tokens in (100.0, 900.0):
        mean_s = outcomes.response_s[outcomes.total_tokens == tokens].mean()
        assert mean_s == pytest.approx(tokens / SPEED / (1 - 0.6), rel=0.02 * BAND)


def test_requests_waiting_at_arrivals_obey_littles_law():
    """Poisson arrivals see time averages, so what waits at an arrival is rate x mean wait."""
    outcomes, rate_per_s = outcomes_under(exponential_tokens(), 0.85, servers=3)
    expected = rate_per_s * mean_wait_s(outcomes)
    assert outcomes.waiting_seen.mean() == pytest.approx(expected, rel=0.01 * BAND)

"""The bounds: exact on tiny instances, never worse than where they start, at known levels."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.instances import a_scenario, a_stream, random_stream, the_oracle
from sizes import scaled

from tokenyard.routing.bounds import BOUNDS, clairvoyant, exact_sed
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.streams import StreamSource, synthetic_streams

few = settings(max_examples=scaled(25))
seeds = st.integers(0, 2**32 - 1)
SERVERS = [(3000.0, 3), (7000.0, 7)]
MISS_COST_S = {"mean": 0.0, "mean_and_slo": 2.0}


def cost_s(responses_s, objective):
    responses_s = np.array(responses_s)
    return float(np.mean(responses_s + MISS_COST_S[objective] * (responses_s > 2.0)))


@few
@given(seed=seeds, objective=st.sampled_from(sorted(MISS_COST_S)))
def test_the_clairvoyant_with_a_wide_beam_finds_the_best_of_all_placements(seed, objective):
    scenario = a_scenario(SERVERS)
    stream = random_stream(scenario, np.random.default_rng(seed), 7, load=1.5)

    def placed(actions):
        return [job.response_s for job in the_oracle(scenario, stream, actions).jobs]

    best = min(cost_s(placed(actions), objective) for actions in product((0, 1), repeat=7))
    found = clairvoyant(scenario, stream, objective=objective, beam_width=256)
    assert cost_s(found.response_s, objective) == pytest.approx(best, abs=1e-9)


@few
@given(seed=seeds, objective=st.sampled_from(sorted(MISS_COST_S)), load=st.floats(0.2, 1.5))
def test_the_clairvoyant_is_never_worse_than_shortest_expected_delay(seed, objective, load):
    scenario = a_scenario(SERVERS)
    stream = random_stream(scenario, np.random.default_rng(seed), 80, load=load)
    found = clairvoyant(scenario, stream, objective=objective, beam_width=2, horizon=3)
    sed = exact_sed(scenario, stream)
    assert cost_s(found.response_s, objective) <= cost_s(sed.response_s, objective) + 1e-12


@pytest.mark.slow
def test_the_clairvoyant_reaches_its_known_level_on_the_poisson_scenario():
    """Mean response against SED over two streams of 5000 requests; docs/results/routing.md."""
    scenario = load_scenario("poisson_085")
    streams = synthetic_streams(StreamSource(scenario), count=2, seed=11).requests
    sed = np.mean([exact_sed(scenario, s).response_s.mean() for s in streams])
    known = np.mean([clairvoyant(scenario, s).response_s.mean() for s in streams])
    assert -0.35 < known / sed - 1 < -0.15


@pytest.mark.parametrize("rest", [{"discipline": "parallel_full"}, {"overflow": "drop"}])
def test_servers_that_are_not_serial_queues_are_refused(rest):
    with pytest.raises(ValueError, match="bounds exist for serial servers that queue"):
        BOUNDS["clairvoyant"](a_scenario(SERVERS, **rest), a_stream([0.0], [1.0]), 0)


def test_requests_that_come_all_at_once_are_placed_too():
    found = clairvoyant(a_scenario(SERVERS), a_stream([0.0] * 4, [7000.0] * 4))
    assert sorted(found.response_s) == pytest.approx([1.0, 2.0, 7 / 3, 3.0])

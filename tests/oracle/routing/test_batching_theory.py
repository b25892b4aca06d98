"""The batching kernel where theory knows the answer."""

import numpy as np
import pytest

from tokenyard.routing.fleet import Fleet, ReplicaConfig
from tokenyard.routing.scenario import Arrivals, RewardWeights, Scenario
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_streams import BatchingStream

NUM_REQUESTS = 40_000
MEAN_TOKENS = 200
TOKEN_S = 0.01


def one_replica(iteration: tuple[float, float, float, float]) -> BatchingSim:
    """A replica without limits of memory or batch."""
    config = ReplicaConfig(
        name="r", gpu="h100_sxm", model="llama3_8b", max_batch=2000, token_budget=4000
    )
    scenario = Scenario(
        name="theory",
        description="",
        fleet=Fleet(replicas=(config,), queue_limit=100_000),
        arrivals=Arrivals(rate_per_s=1.0),
        reward=RewardWeights(processing=0, queue=0, overload=0, balance=0),
    )
    sim = BatchingSim(scenario, 1, NUM_REQUESTS)
    sim._params[0, : lay.KV_TOKEN_S + 1] = iteration
    sim._params[0, lay.NUM_PAGES] = 1e9
    sim.arrays.replica_params[:] = sim._params
    return sim


def mean_response_s(sim: BatchingSim, output: np.ndarray, rate_per_s: float, seed: int) -> float:
    rng = np.random.default_rng(seed)
    rows = np.zeros((NUM_REQUESTS, lay.NUM_REQUEST))
    arrival_s = np.cumsum(rng.exponential(1 / rate_per_s, NUM_REQUESTS))
    rows[:, [lay.DISPATCH_S, lay.ARRIVAL_S]] = arrival_s[:, None]
    rows[:, lay.CONTEXT] = 1
    rows[:, lay.OUTPUT] = output
    rows[:, lay.PREDICTED_OUTPUT] = output.mean()
    rows[:, [lay.ABANDON_S, lay.MAX_WAIT_S, lay.SLO_RESPONSE_S]] = np.inf
    stream = BatchingStream(rows, np.zeros(0, np.int64), np.zeros((0, lay.NUM_EVENT)))
    sim.load(0, stream)
    sim.run_linear(np.zeros(sim.num_weights), 1.0)
    return float(sim.view().outcomes().response_s[2000:].mean())


def exponential(rng: np.random.Generator) -> np.ndarray:
    return 1 + rng.exponential(MEAN_TOKENS - 1, NUM_REQUESTS).astype(int)


def fixed(rng: np.random.Generator) -> np.ndarray:
    return np.full(NUM_REQUESTS, MEAN_TOKENS)


def mostly_short(rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random(NUM_REQUESTS) < 0.1, 1550, 50)


@pytest.mark.parametrize("lengths", [exponential, fixed, mostly_short])
def test_without_any_gain_from_batching_a_replica_shares_its_processor(lengths):
    """An iteration that takes c per sequence gives each of n sequences 1/n of the speed.

    M/G/1-PS: the mean response is E[S] / (1 - rho), whatever the distribution of S
    (Kleinrock, Queueing Systems II, section 4.4).
    """
    rng = np.random.default_rng(7)
    output = lengths(rng)
    load = 0.7
    sim = one_replica((0.0, 0.0, TOKEN_S, 0.0))
    service_s = TOKEN_S * float(output.mean())
    found = mean_response_s(sim, output, load / service_s, seed=8)
    assert found == pytest.approx(service_s / (1 - load), rel=0.06)


def test_where_batching_is_free_nobody_waits_for_anybody():
    """With a fixed time per iteration every request takes as many of them as it has tokens."""
    output = exponential(np.random.default_rng(7))
    sim = one_replica((TOKEN_S, 0.0, 0.0, 0.0))
    found = mean_response_s(sim, output, rate_per_s=20.0, seed=8)
    # On arrival half of the iteration under way is left, on average.
    assert found == pytest.approx(TOKEN_S * (output.mean() + 0.5), rel=0.01)

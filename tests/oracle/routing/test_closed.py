"""Closed clients: the kernel against the slow engine, and against what theory knows."""

import numpy as np
import pytest
from oracle.fleet_instances import SECOND, Ask, a_fleet, a_sim, a_stream, play
from oracle.slow_engine import Change, Engine, Loop, simulate_cluster

ENGINES = [
    Engine(a=0.11, b=0.002, c=0.003, d=1e-4, max_batch=3, token_budget=24, page_tokens=4,
           num_pages=40, block_tokens=8, queue_limit=2),
    Engine(a=0.05, b=0.004, c=0.001, d=2e-4, max_batch=3, token_budget=24, page_tokens=4,
           num_pages=30, block_tokens=8, queue_limit=2),
]  # fmt: skip


def an_instance(seed: int, impatient: bool) -> tuple[list[Ask], Loop, list[list[int]]]:
    """Draw sessions of a few turns, whom they are sent to, and three clients."""
    rng = np.random.default_rng(seed)
    asks, following = [], []
    for session in range(12):
        num_turns = int(rng.integers(1, 5))
        for turn in range(num_turns):
            at_s = float(rng.uniform(0, 3))
            patience_s = float(rng.exponential(4.0)) if impatient else np.inf
            wait_s = float(rng.exponential(2.0)) if impatient else np.inf
            context, output = int(rng.integers(1, 60)), int(rng.integers(1, 25))
            chain = tuple(100 * session + k for k in range((context + output) // 8))
            given_up_s = {"abandon_s": at_s + patience_s, "max_wait_s": wait_s}
            asks.append(Ask(at_s, context, output, chain=chain, **given_up_s))
            following.append(len(asks) if turn < num_turns - 1 else -1)
    think_s = rng.exponential(2.0, len(asks)).tolist()
    routes = rng.integers(2, size=(len(asks), 2)).tolist()
    return asks, Loop(following, think_s, 3), routes


@pytest.mark.parametrize("impatient", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_every_completion_agrees_with_the_slow_engine(seed, impatient):
    asks, loop, routes = an_instance(seed, impatient)
    changes = (Change(6.0, 0, "fail"), Change(9.0, 0, "join", 0.0)) if seed % 2 else ()
    options = {"retry_delay_s": 0.7, "max_retries": 1}
    sim = a_sim(a_fleet(ENGINES, **options), ENGINES, len(asks))
    sim.load(0, a_stream(asks, changes, loop))
    play(sim, routes)
    fates, _ = simulate_cluster(ENGINES, asks, routes, 0.7, changes, loop=loop)
    outcomes = sim.arrays.outcomes[0]
    expected = np.array([[fate.first_token_s, fate.finish_s] for fate in fates])
    done = ~np.isnan(expected[:, 1])
    assert done.sum() > len(asks) // 2
    found = outcomes[:, [1, 2]]
    np.testing.assert_array_equal(np.isnan(found[:, 1]), ~done)
    np.testing.assert_allclose(found[done], expected[done], rtol=1e-9)


def a_closed_stream(num: int, num_clients: int, think_s: np.ndarray, rng: np.random.Generator):
    """Sessions of one turn with exponential outputs."""
    outputs = 1 + rng.exponential(9.0, num).astype(int)
    asks = [Ask(0.01 * i if i < num_clients else 0.0, 1, int(o)) for i, o in enumerate(outputs)]
    return a_stream(asks, loop=Loop([-1] * num, think_s.tolist(), num_clients))


@pytest.mark.parametrize(("num_clients", "mean_think_s"), [(1, 5.0), (8, 5.0), (40, 60.0)])
def test_clients_are_as_many_as_throughput_times_cycle(num_clients, mean_think_s):
    """N = X (R + Z), the interactive response time law (Denning and Buzen 1978)."""
    rng = np.random.default_rng(3)
    num = 4000
    think_s = rng.exponential(mean_think_s, num)
    sim = a_sim(a_fleet([SECOND]), [SECOND], num)
    sim.load(0, a_closed_stream(num, num_clients, think_s, rng))
    play(sim, [[0]] * num)
    outcomes = sim.view().outcomes()
    end_s = outcomes.arrival_s + outcomes.response_s
    throughput = num / (end_s.max() - outcomes.arrival_s[0])
    found = throughput * (outcomes.response_s.mean() + think_s.mean())
    assert found == pytest.approx(num_clients, rel=0.03)


def test_one_client_that_does_not_think_is_served_one_request_after_the_other():
    num = 50
    rng = np.random.default_rng(4)
    sim = a_sim(a_fleet([SECOND, SECOND]), [SECOND, SECOND], num)
    sim.load(0, a_closed_stream(num, 1, np.zeros(num), rng))
    play(sim, rng.integers(2, size=(num, 1)).tolist())
    outcomes = sim.view().outcomes()
    end_s = outcomes.arrival_s + outcomes.response_s
    np.testing.assert_allclose(outcomes.arrival_s[1:], end_s[:-1])
    # A prompt of one token takes the first second, every further token one more.
    np.testing.assert_allclose(outcomes.response_s, outcomes.output_tokens)

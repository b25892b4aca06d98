"""Small clusters and streams to hold the simulator against, many of them full of ties."""

import math

import numpy as np
from hypothesis import strategies as st
from oracle.heapq_cluster import HeapqCluster, Job

from tokenyard.routing.scenario import Arrivals, RewardWeights, Scenario, Server
from tokenyard.routing.simulator import constant_rate_kernel as kernel
from tokenyard.routing.simulator.constant_rate import ClusterSim
from tokenyard.routing.types import OrderKey
from tokenyard.types import FloatArray

DISCIPLINES = ("serial", "parallel_full", "parallel_split", "processor_sharing")
KNOWN_FINISH = ("serial", "parallel_full", "parallel_split")


def a_scenario(servers: list[tuple[float, int]], discipline: str = "serial", **rest) -> Scenario:
    """Make a scenario from (tokens_per_s, concurrency) pairs."""
    return Scenario(
        name="test",
        description="made by a test",
        servers=tuple(
            Server(name=f"server-{i}", tokens_per_s=speed, concurrency=concurrency)
            for i, (speed, concurrency) in enumerate(servers)
        ),
        discipline=discipline,
        arrivals=Arrivals(rate_per_s=1.0),
        **rest,
    )


def a_stream(arrival_s, tokens, predicted_tokens=None, dispatch_s=None) -> FloatArray:
    """Lay a stream out as the kernel wants it; predictions are exact unless given."""
    stream = np.zeros((len(arrival_s), kernel.NUM_REQUEST))
    stream[:, kernel.ARRIVAL_S] = arrival_s
    stream[:, kernel.DISPATCH_S] = arrival_s if dispatch_s is None else dispatch_s
    stream[:, kernel.TRUE_TOTAL] = tokens
    stream[:, kernel.PREDICTED_TOTAL] = tokens if predicted_tokens is None else predicted_tokens
    stream[:, kernel.CONTEXT] = tokens
    return stream


def a_poisson_stream(rng: np.random.Generator, num: int, rate_per_s: float, tokens) -> FloatArray:
    """Lay out Poisson arrivals with the given sizes."""
    return a_stream(np.cumsum(rng.exponential(1 / rate_per_s, num)), tokens)


def loaded(scenario: Scenario, stream: FloatArray, **rest) -> ClusterSim:
    """Make a simulator of one copy at the start of `stream`."""
    sim = ClusterSim(scenario, 1, len(stream), **rest)
    sim.load(0, stream)
    return sim


def one(action: int) -> np.ndarray:
    """Wrap the action of a single copy."""
    return np.array([action])


def random_stream(
    scenario: Scenario, rng: np.random.Generator, num: int, load: float = 0.9
) -> FloatArray:
    """Lay out Poisson arrivals of exponential sizes, with noisy predictions, at a load."""
    tokens = 1.0 + rng.exponential(2000.0, num)
    rate_per_s = load * scenario.capacity_tokens_per_s / 2001.0
    stream = a_poisson_stream(rng, num, rate_per_s, tokens)
    stream[:, kernel.PREDICTED_TOTAL] *= rng.uniform(0.7, 1.3, num)
    return stream


_KEY = ("order_key_s", "late_at_s", "late_key_s")


def the_oracle(scenario: Scenario, stream: FloatArray, actions, keys=None) -> HeapqCluster:
    """Run the oracle over the same stream, actions and order keys (None: no order)."""
    keys = [None] * len(stream) if keys is None else keys
    jobs = [
        Job(
            dispatch_s=row[kernel.DISPATCH_S],
            arrival_s=row[kernel.ARRIVAL_S],
            tokens=row[kernel.TRUE_TOTAL],
            predicted_tokens=row[kernel.PREDICTED_TOTAL],
            action=int(action),
            **({} if key is None else dict(zip(_KEY, key, strict=False))),
        )
        for row, action, key in zip(stream.tolist(), actions, keys, strict=True)
    ]
    return HeapqCluster(scenario, jobs).run()


Instance = tuple[Scenario, FloatArray, list[int]]


def step(sim: ClusterSim, action: int, key: OrderKey | None) -> float:
    """Place the next request of a single copy, by an order key where there is one."""
    if key is not None:
        sim.order_next(0, key)
    return float(sim.step(one(action))[0])


@st.composite
def ordered_instances(
    draw, disciplines=DISCIPLINES, late: bool = False
) -> tuple[Scenario, FloatArray, list, list]:
    """Draw an instance with order keys, on the same grid and within a bound that they may exceed.

    Policies that do not order their first requests, or some in between, are among them.
    """
    scenario, stream, actions = draw(instances(disciplines))
    bound_s = draw(st.sampled_from([0.0, 1000.0] if late else [0.0, 1.0, 1000.0]))
    late_in_s = st.sampled_from([math.inf, 0.0, 0.25, 1.0, 4.0] if late else [math.inf])
    added_s = st.sampled_from([None, -1.0, 0.0, 0.125, 0.5, 2.0, 8.0, 1e9])
    keys = [
        None
        if added is None
        else OrderKey(
            float(arrival_s + added),
            float(arrival_s) + draw(late_in_s),
            float(arrival_s + added) + draw(st.sampled_from([0.125, 1.0, 8.0, 0.3])),
        )
        for arrival_s, added in zip(
            stream[:, kernel.ARRIVAL_S],
            draw(st.lists(added_s, min_size=len(stream), max_size=len(stream))),
            strict=True,
        )
    ]
    return scenario.model_copy(update={"max_overtaking_s": bound_s}), stream, actions, keys


@st.composite
def instances(draw, disciplines=DISCIPLINES) -> Instance:
    """Draw a cluster, a stream and actions on a coarse grid, so that many events coincide.

    Under processor sharing speeds are powers of two and at most two requests share, so that all
    times are exact in binary and the tie of a completion with a decision is a true one.
    """
    discipline = draw(st.sampled_from(disciplines))
    sharing = discipline == "processor_sharing"
    speeds = st.sampled_from([1024.0, 2048.0] if sharing else [1000.0, 3000.0, 5000.0, 7000.0])
    servers = draw(
        st.lists(st.tuples(speeds, st.integers(1, 2 if sharing else 4)), min_size=1, max_size=3)
    )
    credit = st.sampled_from([0.0]) if sharing else st.sampled_from([0.0, -1.0])
    scenario = a_scenario(
        servers,
        discipline,
        queue_limit=draw(st.integers(1, 4)),
        overflow=draw(st.sampled_from(["queue", "drop"])),
        reward=RewardWeights(
            complete=draw(st.sampled_from([0.0, 1.0])),
            slo_at_completion=draw(st.sampled_from([0.0, -5.0])),
            response=draw(credit),
            slo=draw(credit),
            tail=draw(credit),
            tail_after_s=1.0,
        ),
    )
    num = draw(st.integers(1, 30))

    def column(values):
        return np.array(draw(st.lists(st.sampled_from(values), min_size=num, max_size=num)))

    arrival_s = np.cumsum(column([0.0, 0.0, 0.125, 0.25, 1.0]))
    epoch_s = draw(st.sampled_from([None, 0.5]))
    dispatch_s = arrival_s if epoch_s is None else np.ceil(arrival_s / epoch_s) * epoch_s
    unit = 256.0 if sharing else 500.0
    tokens = unit * column([1, 2, 2, 3, 8])
    stream = a_stream(arrival_s, tokens, tokens * column([0.5, 1.0, 1.5]), dispatch_s)
    return scenario, stream, column(list(range(len(servers)))).tolist()

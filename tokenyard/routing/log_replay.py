"""The replicas that a gateway's log tells of, as fast as they were.

A log tells what arrived, how long the answers were, and how fast the replicas worked under the
decisions that were made. `fit_speeds` lets the simulator repeat exactly those decisions, with
requests waiting by the keys that were logged, and corrects the speed of every replica until answers
take as long as they did. What a policy would do to the cluster is then found by running it there:
decisions cannot be judged one by one, since each changes how long others wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenyard import metrics
from tokenyard.routing.fleet import MeasuredReplica
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.batching import BatchingOutcomes
from tokenyard.routing.simulator.run import Run, repeating, run_each
from tokenyard.routing.simulator.streams import StreamSet, StreamSource
from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.trace import Trace

_ROUNDS = 10
_DAMPING = 0.4
"""A slower replica also holds larger batches, so that full corrections would swing."""
_LEAST_FACTOR, _MOST_FACTOR = 0.2, 5.0


@dataclass(frozen=True)
class Window:
    """A stretch of a log, from a quiet moment on."""

    trace: Trace
    """What arrived, with the true output lengths, which are known by then."""
    server: IntArray
    """Where every request went: index into the scenario's replicas, shape (num_requests,)."""
    response_s: FloatArray
    """NaN where it was not completed."""
    first_token_s: FloatArray
    """Arrival to first token; NaN where there was none."""
    order_keys: FloatArray | None = None
    """By what each waited, as `tokenyard.routing.types.OrderKey`, on the clock of `trace`, shape
    (num_requests, 3); NaN: behind all that were there. None: all were served as they came."""

    @property
    def tpot_s(self) -> FloatArray:
        """Mean time per output token after the first, seconds; NaN for fewer than two tokens."""
        return metrics.tpot_s(self.response_s, self.first_token_s, self.trace.generated_tokens)


@dataclass(frozen=True)
class Twin:
    """The simulator of the replicas that were logged."""

    scenario: Scenario
    speed_factors: FloatArray
    """How many times as long as declared every replica's iterations take, shape (replicas,)."""
    error_fraction: float
    """Of the mean response, simulated under the logged decisions, to the one logged."""


def scaled(scenario: Scenario, factors: FloatArray) -> Scenario:
    """The same fleet with iterations that take `factors` times as long.

    Raises:
        ValueError: The scenario has no fleet.
    """
    replicas = []
    for replica, factor in zip(scenario.required_fleet.replicas, factors.tolist(), strict=True):
        base, prefill, sequence, kv = (replica.iteration * factor).tolist()
        replicas.append(
            MeasuredReplica(
                name=replica.name, max_batch=replica.max_batch, token_budget=replica.token_budget,
                iteration_s=base, prefill_token_s=prefill, sequence_s=sequence, kv_token_s=kv,
                kv_capacity_tokens=replica.kv_capacity_tokens,
            )
        )  # fmt: skip
    # The load must stay what it was, not follow the capacity.
    rate = scenario.rate_per_s(sum(scenario.mean_lengths_tokens))
    arrivals = scenario.arrivals.model_copy(update={"load": None, "rate_per_s": rate})
    fleet = scenario.required_fleet.model_copy(update={"replicas": tuple(replicas)})
    return scenario.model_copy(update={"fleet": fleet, "arrivals": arrivals})


def fit_speeds(scenario: Scenario, windows: Sequence[Window]) -> Twin:
    """Correct the declared speeds until the logged decisions take as long as they did.

    Args:
        scenario: Replicas as declared, in the order that `Window.server` counts.
        windows: Of the log.
    """
    factors = np.ones(scenario.num_servers)
    for _ in range(_ROUNDS):
        simulated = _repeat(scaled(scenario, factors), windows)
        factors = np.clip(
            factors * _slowness(windows, simulated, len(factors)) ** _DAMPING,
            _LEAST_FACTOR, _MOST_FACTOR,
        )  # fmt: skip
    twin = scaled(scenario, factors)
    return Twin(twin, factors, repeat_error(twin, windows))


def repeat_error(scenario: Scenario, windows: Sequence[Window]) -> float:
    """How far the mean response is off the logged one if logged decisions are repeated.

    Raises:
        ValueError: Requests went to other replicas than the scenario has.
    """
    logged = 1 + max(int(window.server.max()) for window in windows)
    if logged > scenario.num_servers:
        raise ValueError(f"the log tells of {logged} replicas, the fleet of {scenario.num_servers}")
    simulated_s = np.concatenate([run.outcomes.response_s for run in _repeat(scenario, windows)])
    return mean_error(simulated_s, np.concatenate([window.response_s for window in windows]))


def mean_error(simulated_s: FloatArray, measured_s: FloatArray) -> float:
    """How far a simulated mean is off the measured one, as a fraction, over what has both times."""
    both = np.isfinite(simulated_s) & np.isfinite(measured_s)
    return abs(float(simulated_s[both].mean() / measured_s[both].mean()) - 1.0)


def streams_of(scenario: Scenario, windows: Sequence[Window]) -> StreamSet:
    """The windows' requests, for the scenario's simulator."""
    source = StreamSource(scenario)
    return StreamSet([source.encode(window.trace) for window in windows], "the decision log")


def _repeat(scenario: Scenario, windows: Sequence[Window]) -> list[Run]:
    choosers = [repeating(window.server, window.order_keys) for window in windows]
    return run_each(scenario, streams_of(scenario, windows), choosers)


def _slowness(windows: Sequence[Window], simulated: Sequence[Run], num_replicas: int) -> FloatArray:
    """How many times as long as simulated a token took at every replica, shape (num_replicas,).

    1 where the log tells too little.
    """
    server = np.concatenate([window.server for window in windows])
    logged = np.concatenate([window.tpot_s for window in windows])
    again = np.concatenate([BatchingOutcomes.of(run.outcomes).tpot_s for run in simulated])
    factors = np.ones(num_replicas)
    both = np.isfinite(logged) & np.isfinite(again)
    for replica in range(num_replicas):
        here = both & (server == replica)
        if here.sum() >= 10:
            factors[replica] = logged[here].mean() / again[here].mean()
    return factors

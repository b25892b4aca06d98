"""Streams: the requests of a scenario, as the rows that the simulator steps through.

What the router is told of a request's size is decided here and nowhere else: the true output
length goes into the column that the servers work off, the predicted one into the columns that
the router sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Literal

import numpy as np

from tokenyard.routing.observation import squash
from tokenyard.routing.scenario import HeldOutTrace, Scenario
from tokenyard.routing.simulator.batching_streams import Stream
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.closed import draw_closed
from tokenyard.workload.features import RobustScaler, request_features
from tokenyard.workload.model import WorkloadModel, load_model, poisson_arrivals
from tokenyard.workload.paths import find_trace
from tokenyard.workload.trace import Trace

Purpose = Literal["training", "validation", "evaluation", "scaling"]
_PURPOSES: dict[Purpose, int] = {"training": 0, "validation": 1, "evaluation": 2, "scaling": 3}
_REQUESTS_FOR_SCALING = 5000
WARM_UP = 1000
"""Requests, at most, that fill the servers before a window of a trace begins."""


def stream_rng(seed: int, purpose: Purpose, index: int = 0) -> np.random.Generator:
    """Generator of one stream; no two purposes, seeds or indices share random numbers."""
    return np.random.default_rng([seed, _PURPOSES[purpose], index])


def predicted_total_tokens(
    scenario: Scenario, model: WorkloadModel, context: IntArray, generated: IntArray
) -> FloatArray:
    """What the router is told of each request's size, tokens, shape (num_requests,)."""
    if scenario.output_length == "oracle":
        return (context + generated).astype(np.float64)
    if scenario.output_length == "by_context":
        if scenario.sessions is not None and scenario.sessions.answer_tokens is not None:
            return (context + scenario.mean_lengths_tokens[1]).astype(np.float64)
        return context + model.mean_generated_tokens(context)
    return context.astype(np.float64)


@dataclass(frozen=True)
class StreamSet:
    """The streams that a policy is judged on."""

    requests: Sequence[Stream]
    """One per stream."""
    origin: str
    """Where they come from, in words for a table."""
    bootstrap: bool = False
    """One long recorded stream: intervals by block bootstrap over its requests. Otherwise the
    streams are independent, and intervals are paired over streams."""
    jackknife: bool = False
    """One long recorded stream: intervals by leaving out one block of its requests at a time."""
    warm_up: tuple[int, ...] = ()
    """Requests that every stream begins with to fill the servers, and that do not count; empty:
    none."""
    is_synthetic: bool = False
    """Whether the scenario's workload model drew them."""
    offered_load: float = math.nan
    """Share of what the servers can do that is asked of them, as if nothing were cached."""
    warm_load: float = math.nan
    """The same as if all that sessions repeat were cached; NaN: prompts share nothing."""

    def __len__(self) -> int:
        """How many streams."""
        return len(self.requests)

    @property
    def described(self) -> str:
        """How many requests, and where they come from."""
        counted = len(self.requests[-1]) - (self.warm_up[-1] if self.warm_up else 0)
        return f"{len(self)} x {counted} requests, {self.origin}"


class StreamSource:
    """Draws streams of a scenario's traffic, and encodes recorded ones in the same way."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.model = load_model(scenario.workload)

    @property
    def mean_total_tokens(self) -> float:
        """Mean size of a request in the training traffic, tokens."""
        return sum(self.scenario.mean_lengths_tokens)

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate, requests per second."""
        return self.scenario.rate_per_s(self.mean_total_tokens)

    @property
    def offered_load(self) -> float:
        """Load of the scenario's own traffic, as if nothing were cached."""
        return self.scenario.offered_load(self.rate_per_s, *self.scenario.mean_lengths_tokens)

    def at_rate(self, trace: Trace, load: float | None) -> Trace:
        """Scale a trace's time to an offered load, or to the tokens per second of the scenario."""
        if load is not None:
            return trace.with_rate(load / self.load_of(trace, 1.0))
        return trace.with_rate(self.scenario.rate_per_s(float(trace.total_tokens.mean())))

    def load_of(self, trace: Trace, rate_per_s: float | None = None) -> float:
        """Load that a trace offers, at its own rate or another."""
        rate = trace.mean_rate_per_s if rate_per_s is None else rate_per_s
        lengths = (trace.context_tokens.mean(), trace.generated_tokens.mean())
        return self.scenario.offered_load(rate, *map(float, lengths))

    @cached_property
    def scaler(self) -> RobustScaler:
        """Feature scaling, fitted to one stream of training traffic that nobody is judged on."""
        trace = self._draw(_REQUESTS_FOR_SCALING, stream_rng(0, "scaling"))
        return RobustScaler.fit(self._features(trace))

    def sample(
        self, num_requests: int, rng: np.random.Generator, load_factor: float = 1.0
    ) -> Stream:
        """Draw one synthetic stream at `load_factor` times the scenario's arrival rate."""
        return self.encode(self._draw(num_requests, rng, load_factor), rng)

    def encode(
        self, trace: Trace, rng: np.random.Generator | None = None,
        predicted_total: FloatArray | None = None,
    ) -> Stream:  # fmt: skip
        """Lay a trace out as a stream.

        The time of the trace is taken as it is. Its calendar is kept only where the scenario's
        own traffic has one, since a policy that never saw a calendar cannot read it.

        Args:
            trace: Requests.
            rng: Draws what no trace tells of a fleet: classes, routers, failures. None: the same
                for every trace.
            predicted_total: What the router is told of sizes, tokens, shape (num_requests,); None:
                what the scenario says.
        """
        return server_model(self.scenario).encode(
            trace,
            self._predicted(trace) if predicted_total is None else predicted_total,
            squash(self.scaler.transform(self._features(trace))),
            rng or stream_rng(0, "evaluation"),
        )

    def _draw(self, num_requests: int, rng: np.random.Generator, load_factor: float = 1.0) -> Trace:
        trace = self._draw_steady(num_requests, rng, load_factor)
        drift = np.linspace(1.0, self.scenario.output_drift, num_requests)
        if self.scenario.output_drift == 1.0:
            return trace
        outputs = np.maximum(np.rint(trace.generated_tokens * drift), 1).astype(np.int64)
        return replace(trace, generated_tokens=outputs)

    def _draw_steady(
        self, num_requests: int, rng: np.random.Generator, load_factor: float
    ) -> Trace:
        arrivals = self.scenario.arrivals
        rate_per_s = load_factor * self.rate_per_s
        if arrivals.process == "closed":
            return self._draw_closed(num_requests, rng, rate_per_s)
        if self.scenario.sessions is not None:
            block_tokens = self.scenario.required_fleet.prefix_block_tokens
            return self.scenario.sessions.generate(
                num_requests, rng, rate_per_s, self.model, block_tokens
            )
        if arrivals.process == "mmpp":
            return self.model.generate(num_requests, rng, rate_per_s, arrivals.diurnal)
        arrival_rng, length_rng = rng.spawn(2)
        arrival_s = poisson_arrivals(num_requests, rate_per_s, arrival_rng)
        context, generated = self.model.sample_lengths(num_requests, length_rng)
        diurnal = arrivals.diurnal
        if diurnal is None:
            return Trace(arrival_s, context, generated)
        return Trace(diurnal.warp(arrival_s), context, generated, diurnal.started_at)

    def _draw_closed(self, num_requests: int, rng: np.random.Generator, rate_per_s: float) -> Trace:
        scenario = self.scenario
        assert scenario.sessions is not None
        # Who never asks is no client.
        clients = min(scenario.num_clients(rate_per_s), num_requests)
        block_tokens = scenario.required_fleet.prefix_block_tokens
        return draw_closed(scenario.sessions, num_requests, clients, rng, self.model, block_tokens)

    def _predicted(self, trace: Trace) -> FloatArray:
        return predicted_total_tokens(
            self.scenario, self.model, trace.context_tokens, trace.generated_tokens
        )

    def _features(self, trace: Trace) -> FloatArray:
        started_at: datetime | None = trace.started_at
        if self.scenario.arrivals.diurnal is None:
            started_at = None
        features = request_features(
            trace.arrival_s, trace.context_tokens, self._predicted(trace), started_at
        )
        return features.astype(np.float64)


def synthetic_streams(
    source: StreamSource,
    count: int,
    seed: int,
    purpose: Purpose = "evaluation",
    load_factor: float = 1.0,
) -> StreamSet:
    """Draw `count` independent streams of the scenario's own length, at a factor on its load."""
    num_requests = source.scenario.requests_per_stream
    requests = [
        source.sample(num_requests, stream_rng(seed, purpose, index), load_factor)
        for index in range(count)
    ]
    origin = f"synthetic ({_traffic(source, load_factor)})"
    load = load_factor * source.offered_load
    warm_load = math.nan
    if source.scenario.sessions is not None:
        warm_load = source.scenario.warm_load(load_factor * source.rate_per_s)
    return StreamSet(requests, origin, is_synthetic=True, offered_load=load, warm_load=warm_load)


def _traffic(source: StreamSource, load_factor: float) -> str:
    """Lengths and arrivals, in words."""
    scenario = source.scenario
    arrivals: str = scenario.arrivals.process
    lengths = f"{source.model.name} lengths"
    if scenario.sessions is not None:
        if scenario.sessions.answer_tokens is not None:
            lengths = "the scenario's lengths"
        arrivals = "session"
    if scenario.arrivals.process == "closed":
        return f"{lengths}, {scenario.num_clients(load_factor * source.rate_per_s)} closed clients"
    return f"{lengths}, {arrivals} arrivals"


def held_out_streams(source: StreamSource, load: float | None = None) -> StreamSet | None:
    """The scenario's recorded test part as one stream; None where it has none or no file."""
    held_out = source.scenario.held_out_trace
    if held_out is None:
        return None
    return _recorded_part(source, held_out, held_out.first, None, load)


def recorded_windows(source: StreamSource, count: int) -> StreamSet:
    """The scenario's recorded test part, cut into consecutive streams of equal length.

    Raises:
        ValueError: It has none, its file is not found, or it is too short.
    """
    recorded = source.scenario.held_out_trace
    path = None if recorded is None else find_trace(recorded.name)
    if recorded is None or path is None:
        raise ValueError(f"no recorded test part of {source.scenario.name!r} was found")
    from tokenyard.workload.readers import read_trace

    whole = source.at_rate(read_trace(path)[0], None)
    windows = whole.tail_from(recorded.first).windows(count)
    origin = f"{path.name} from request {recorded.first} on, {count} windows"
    offered = source.load_of(whole)
    return StreamSet([source.encode(window) for window in windows], origin, offered_load=offered)


def recorded_training_streams(source: StreamSource) -> StreamSet | None:
    """What was recorded before the test part, as one stream; None where that is nothing."""
    held_out = source.scenario.held_out_trace
    if held_out is None:
        return None
    return _recorded_part(source, held_out, 0, held_out.first)


def _recorded_part(
    source: StreamSource,
    recorded: HeldOutTrace,
    first: int,
    stop: int | None,
    load: float | None = None,
) -> StreamSet | None:
    path = find_trace(recorded.name)
    if path is None:
        return None
    from tokenyard.workload.readers import read_trace

    whole, _ = read_trace(path)
    # Scale the whole file, so that lulls and bursts of the part keep their size.
    whole = source.at_rate(whole, load)
    part = (whole if stop is None else whole.head(stop)).tail_from(first)
    origin = f"{path.name}, requests {first}..{first + part.num_requests - 1}"
    offered = source.load_of(whole)
    return StreamSet([source.encode(part)], origin, bootstrap=True, offered_load=offered)


def trace_streams(
    source: StreamSource,
    trace: Trace,
    count: int,
    native_time: bool = False,
    load: float | None = None,
    first: int = 0,
    warm_up: int = WARM_UP,
) -> StreamSet:
    """Cut a recorded trace into `count` consecutive streams of equal length.

    Each begins with up to `warm_up` requests that come before it in the trace and do not count, so
    that none but one at the very beginning starts on empty servers.

    Args:
        source: Whose servers, visibility and load the trace is replayed on.
        trace: Recorded requests.
        count: Number of windows; they do not overlap.
        native_time: Keep the recorded time instead of scaling it to the scenario's load.
        load: Offered load to scale to in place of the scenario's.
        first: Request that the first window begins with; it counts, and those after it.
        warm_up: Requests, at most, that fill the servers first.

    Raises:
        ValueError: The trace has fewer requests than windows, or no token.
    """
    part = trace.tail_from(first)
    if part.num_requests < count:
        raise ValueError(f"{part.num_requests} requests cannot be cut into {count} streams")
    if not trace.total_tokens.any():
        raise ValueError("no request of the trace has a token: what would take time?")
    if not native_time:
        scaled = source.at_rate(part, load)
        if first:
            trace = trace.rescaled(scaled.duration_s / part.duration_s)
        else:
            trace = scaled
        part = scaled
    size = part.num_requests // count
    begins = range(first, first + count * size, size)
    before = tuple(min(begin, warm_up) for begin in begins)
    requests = [
        source.encode(trace.head(begin + size).tail_from(begin - skipped))
        for begin, skipped in zip(begins, before, strict=True)
    ]
    return StreamSet(
        requests,
        f"recorded trace, {count} windows",
        jackknife=count == 1,
        offered_load=source.load_of(part),
        warm_up=before,
    )

"""How well a log of one policy predicts others: sign and coverage over pairs of known value.

A world is simulated whose replicas are not as fast as declared. One policy decides there, with a
small share of random picks, and what it did is all that the estimators get. Truth comes from the
same world, on other streams of requests: `python benchmarks/off_policy.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from tokenyard import metrics
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.routing import log_replay as replay
from tokenyard.routing.observation import (
    MARGINAL_OTHERS,
    MARGINAL_WAIT,
    NUM_MARGINAL_FEATURES,
    snapshot_columns,
)
from tokenyard.routing.policies.delay import finish_s
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.scores.linear import marginal_scores
from tokenyard.routing.simulator import Simulator, make_simulator
from tokenyard.routing.simulator.run import Run, run_each
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.statistics import off_policy as estimate
from tokenyard.statistics.intervals import Interval
from tokenyard.types import BoolArray, FloatArray
from tokenyard.workload.trace import Trace

Row = dict[str, str | int | float]
NEAR = 0.05


@dataclass(frozen=True)
class Args:
    """Estimate differences between policies from a log, and compare them with the truth."""

    scenario: str = "conversation_mixed_gpus"
    """A fleet, as declared."""
    worlds: int = 5
    """With a log each: estimates from one log err together."""
    policies: int = 8
    """In a world, from which its pairs are drawn."""
    pairs: int = 50
    """In all; half of them within 5 % of each other."""
    windows: int = 12
    """Of the log."""
    requests: int = 2500
    """In a window."""
    truth_streams: int = 40
    """By which a policy's true value is known."""
    explore: float = 0.01
    """Share of the logged decisions that are drawn."""
    speed_error: float = 0.15
    """Standard deviation of the logarithm of how wrong declared speeds are."""
    misdeclared: bool = False
    """The world has 30 % less KV memory too, and is told of every 0.5 s: nothing corrects that."""
    seed: int = 7
    """Of the world, the log and the policies; choices were made on others."""
    json: ResultFile | None = None
    """File for the rows."""


@dataclass(frozen=True)
class Logged:
    """What one policy did, decision by decision, and what all others would have done."""

    windows: Sequence[replay.Window]
    propensity: FloatArray
    same: BoolArray
    """Whether each policy would have chosen the same, shape (num_policies, num_decisions)."""
    expected_logged: FloatArray
    expected: FloatArray
    """Expected own response at each policy's choice, shape (num_policies, num_decisions)."""

    @property
    def response_s(self) -> FloatArray:
        """Of every decision."""
        return np.concatenate([one.response_s for one in self.windows])


def make_policies(num: int, num_weights: int, rng: np.random.Generator) -> list[FloatArray]:
    """Rules around least marginal delay, from nearly it to rather selfish or careless."""
    found = []
    for _ in range(num):
        weights = np.zeros(num_weights)
        weights[MARGINAL_OTHERS] = rng.uniform(-1.0, 0.6)
        weights[MARGINAL_WAIT] = rng.uniform(-0.7, 0.7)
        weights[:NUM_MARGINAL_FEATURES] += rng.normal(scale=0.03, size=NUM_MARGINAL_FEATURES)
        found.append(weights)
    return found


def run_linear(
    scenario: Scenario, streams: StreamSet, weights: FloatArray, mean_tokens: float
) -> list[Run]:
    """Run one policy over streams of equal length."""
    sim = make_simulator(scenario, 1, len(streams.requests[0]))
    runs = []
    for stream in streams.requests:
        sim.load(0, stream)
        sim.run_linear(weights, mean_tokens)
        outcomes = sim.outcomes(0)
        runs.append(Run(outcomes, np.zeros(len(outcomes.arrival_s))))
    return runs


class Logger:
    """Decides by one policy with a little exploration, and asks the others what they would."""

    def __init__(self, scenario: Scenario, policies: Sequence[FloatArray], args: Args) -> None:
        self._scenario, self._policies, self._explore = scenario, policies, args.explore
        self._mean = sum(scenario.mean_lengths_tokens)
        self._rng = np.random.default_rng([args.seed, 5])
        self._costs = np.empty(scenario.num_servers)
        self.propensity: list[float] = []
        self.expected: list[list[float]] = []
        self.choices: list[list[int]] = []

    def choose(self, sim: Simulator, copy: int) -> int:
        """Place the waiting request."""
        request, snapshots = sim.request(copy), sim.snapshots(copy)
        columns = snapshot_columns(snapshots)
        slo_s = self._scenario.slo_response_s
        output = request.predicted_total_tokens - request.context_tokens
        ask = [np.zeros_like(self._policies[0]), *self._policies]
        picks = [
            int(marginal_scores(
                weights, request.context_tokens, output, self._mean, slo_s,
                columns, self._costs,
            ))
            for weights in ask
        ]  # fmt: skip
        preferred, *others = picks
        finish = [finish_s(request, one) for one in snapshots]
        safe = [
            i for i, one in enumerate(snapshots)
            if one.num_outstanding < one.max_concurrency and finish[i] <= slo_s
        ]  # fmt: skip
        chosen, propensity = preferred, 1.0
        if len(safe) > 1:
            if self._rng.random() < self._explore:
                chosen = safe[int(self._rng.integers(len(safe)))]
            propensity = self._explore / len(safe) if chosen in safe else 0.0
            propensity += (1.0 - self._explore) * (chosen == preferred)
        self.propensity.append(propensity)
        self.expected.append([finish[chosen], *(finish[i] for i in others)])
        self.choices.append([chosen, *others])
        return sim.offered(copy)[chosen]


def log_world(world: Scenario, policies: Sequence[FloatArray], args: Args) -> Logged:
    """Let the logging policy decide, window by window."""
    source, logger = StreamSource(world), Logger(world, policies, args)
    windows = []
    for index in range(args.windows):
        stream = source.sample(args.requests, stream_rng(args.seed, "training", index))
        (ran,) = run_each(world, StreamSet([stream], "log"), [logger.choose])
        out = ran.outcomes
        trace = Trace(
            out.arrival_s - out.arrival_s[0],
            out.context_tokens.astype(np.int64),
            out.output_tokens.astype(np.int64),
        )
        windows.append(replay.Window(trace, out.server, out.response_s, out.first_token_s))
    choices = np.array(logger.choices).T
    expected = np.array(logger.expected).T
    return Logged(
        windows, np.array(logger.propensity), choices[1:] == choices[0], expected[0], expected[1:]
    )


def true_values(world: Scenario, policies: Sequence[FloatArray], args: Args) -> FloatArray:
    """Mean responses of all policies, seconds, on many streams, shape (policies, streams)."""
    source = StreamSource(world)
    streams = StreamSet(
        [
            source.sample(args.requests, stream_rng(args.seed, "evaluation", index))
            for index in range(args.truth_streams)
        ],
        "truth",
    )
    return np.array(
        [
            [metrics.mean(one.outcomes.offered_response_s) for one in run_linear(
                world, streams, weights, source.mean_total_tokens
            )]
            for weights in policies
        ]
    )  # fmt: skip


def draw_pairs(truth: FloatArray, num: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Half within `NEAR` of each other, half not."""
    mean = truth.mean(axis=1)
    every = [(a, b) for a in range(len(mean)) for b in range(a)]
    near = [p for p in every if abs(mean[p[0]] / mean[p[1]] - 1.0) <= NEAR]
    far = [p for p in every if abs(mean[p[0]] / mean[p[1]] - 1.0) > NEAR]
    half = num // 2
    chosen = []
    for some, count in ((near, half), (far, num - half)):
        picked = rng.choice(len(some), size=min(count, len(some)), replace=False)
        chosen += [some[i] for i in picked]
    return chosen


def estimates(
    logged: Logged,
    twins: dict[str, tuple[replay.Twin, FloatArray]],
    pair: tuple[int, int],
) -> dict[str, Interval]:
    """Relative difference of a pair by every estimator."""
    a, b = pair
    response_s = logged.response_s
    mean_s, blocks = float(response_s.mean()), len(logged.windows)
    ips = [estimate.ips_values(response_s, logged.propensity, logged.same[i]) for i in pair]
    snips = [
        estimate.snips_gain(response_s, logged.propensity, logged.same[i], blocks) for i in pair
    ]
    intercept, slope = estimate.calibrated(logged.expected_logged, response_s)
    robust = [
        estimate.doubly_robust_values(
            response_s, logged.propensity, logged.same[i],
            intercept + slope * logged.expected_logged, intercept + slope * logged.expected[i],
        )
        for i in pair
    ]  # fmt: skip
    half = float(np.hypot(*(one.high - one.estimate for one in snips)))
    between = snips[0].estimate - snips[1].estimate
    found = {
        "ips": estimate.mean_interval(ips[0] - ips[1], blocks).over(mean_s),
        "snips": Interval(between, between - half, between + half).over(mean_s),
        "doubly_robust": estimate.mean_interval(robust[0] - robust[1], blocks).over(mean_s),
    }
    for name, (twin, values) in twins.items():
        found[name] = replay.difference(twin, values[a], values[b])
    return found


def less_than_declared(world: Scenario) -> Scenario:
    """The same world with less memory and older news."""
    declared = world.required_fleet
    replicas = tuple(
        one.model_copy(update={"kv_capacity_tokens": 0.7 * one.kv_capacity_tokens})
        for one in declared.replicas
    )
    fleet = declared.model_copy(update={"replicas": replicas, "scrape_interval_s": 0.5})
    return world.model_copy(update={"fleet": fleet})


@dataclass(frozen=True)
class Judged:
    """What is said of some pairs, and what is true of them."""

    found: list[dict[str, Interval]]
    true: list[float]
    truth_error: list[float]


def judge_world(args: Args, number: int, console: Console) -> Judged:
    """Simulate one world, its log and the truth, and estimate its pairs."""
    args = replace(args, seed=1000 * args.seed + number, pairs=args.pairs // args.worlds)
    declared = load_scenario(args.scenario)
    rng = np.random.default_rng([args.seed, 3])
    factors = np.exp(rng.normal(scale=args.speed_error, size=declared.num_servers))
    world = replay.scaled(declared, factors)
    if args.misdeclared:
        world = less_than_declared(world)
    num_weights = make_simulator(world, 1, 1).num_weights
    policies = make_policies(args.policies, num_weights, rng)
    truth = true_values(world, policies, args)
    logged = log_world(world, policies, args)
    fitted = replay.fit_speeds(declared, logged.windows)
    unfitted = replay.Twin(replay.scaled(declared, np.ones(len(factors))), np.ones(4), 0.0)
    twins = {
        name: (twin, values_in(twin, logged, policies))
        for name, twin in (("replay, as declared", unfitted), ("replay, fitted", fitted))
    }
    console.print(
        f"speed factors: true {factors.round(3)}, fitted {fitted.speed_factors.round(3)};"
        f" error on what was logged {fitted.error_fraction:.2%}"
    )
    pairs, mean = draw_pairs(truth, args.pairs, rng), truth.mean(axis=1)
    return Judged(
        [estimates(logged, twins, pair) for pair in pairs],
        [float(mean[a] / mean[b] - 1.0) for a, b in pairs],
        [
            float((truth[a] - truth[b]).std(ddof=1) / np.sqrt(truth.shape[1]) / mean[b])
            for a, b in pairs
        ],
    )


def values_in(twin: replay.Twin, logged: Logged, policies: Sequence[FloatArray]) -> FloatArray:
    """Mean responses of all policies in a twin, seconds, shape (policies, windows)."""
    tokens = sum(twin.scenario.mean_lengths_tokens)
    return np.array(
        [
            replay.values(
                twin, logged.windows, partial(run_linear, weights=weights, mean_tokens=tokens)
            )
            for weights in policies
        ]
    )


def main(args: Args) -> None:
    console = Console(width=200)
    worlds = [judge_world(args, number, console) for number in range(args.worlds)]
    rows = judge(
        Judged(
            [one for world in worlds for one in world.found],
            [one for world in worlds for one in world.true],
            [one for world in worlds for one in world.truth_error],
        )
    )
    table = Table(*rows[0])
    for row in rows:
        cells = row.values()
        table.add_row(*(f"{one:.3g}" if isinstance(one, float) else str(one) for one in cells))
    console.print(table)
    if args.json is not None:
        write_result(args.json, command_line(), args.seed, rows)


def judge(judged: Judged) -> list[Row]:
    """One row per estimator: signs, coverage, error and width."""
    found, true = judged.found, np.array(judged.true)
    near = np.abs(true) <= NEAR
    rows: list[Row] = []
    for name in found[0]:
        guess = np.array([one[name].estimate for one in found])
        low = np.array([one[name].low for one in found])
        high = np.array([one[name].high for one in found])
        right = np.sign(guess) == np.sign(true)
        rows.append(
            {
                "estimator": name,
                "pairs": len(found),
                "pairs_within_5_percent": int(near.sum()),
                "sign_right_fraction": float(right.mean()),
                "sign_right_near_fraction": float(right[near].mean()),
                "sign_right_far_fraction": float(right[~near].mean()),
                "covered_fraction": float(((low <= true) & (true <= high)).mean()),
                "mean_abs_error_fraction": float(np.abs(guess - true).mean()),
                "mean_half_width_fraction": float((high - low).mean() / 2),
                "truth_standard_error_fraction": float(np.mean(judged.truth_error)),
            }
        )
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

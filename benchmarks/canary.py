"""How soon a worse canary is stopped, and how often one that is just as good.

Two policies decide on the same simulated requests, each in a world of its own; a hash then says
whose outcome of a request is seen, 20 % the canary's. The SLO is set so that the champion
keeps it for 90 % of requests, and the canaries are made by bending the champion's weights until
they are 5 points worse, or just as good and yet different: `python benchmarks/canary.py`. With
`--mixed` both decide in one world, whose replicas they share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tyro
from rich.table import Table

from serve_app.policy.experiment import ABANDON_AFTER
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.artifact import PolicyArtifact, learned_policy
from tokenyard.routing.observation import MARGINAL_OTHERS, MARGINAL_WAIT
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import champion_or_rule
from tokenyard.routing.simulator import Simulator, make_simulator
from tokenyard.routing.simulator.batching_kernel.layout import CONTEXT, OUTPUT
from tokenyard.routing.simulator.batching_streams import BatchingStream, fleet_stream
from tokenyard.routing.simulator.run import run_each
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.statistics.sequential import SequentialTest
from tokenyard.types import BoolArray, FloatArray, IntArray

Row = dict[str, str | int | float]
_DEVELOPMENT_SEED = 41
_NUM_DEVELOPMENT = 40


@dataclass(frozen=True)
class Args:
    """Let canaries of known quality run until they are stopped or have had their time."""

    scenario: str = "conversation_mixed_gpus"
    """A fleet."""
    runs: int = 200
    arrivals: Literal["independent", "poisson", "mmpp"] = "poisson"
    """Of the simulated requests, around the scenario's load; independent: no simulator, every
    request is good by a coin of its own."""
    requests: int = 6000
    """Of every run, champion's and canary's."""
    share: float = 0.2
    """Of the canary."""
    goodput: float = 0.90
    """Share of requests for which the champion attains the SLO."""
    worse: float = 0.05
    """How much less it is for the worse canary."""
    seed: int = 11
    """Of the runs; the policies and the SLO are made on other streams."""
    mixed: int = 0
    """Further runs of the worse canary in one world with the champion."""
    json: ResultFile | None = None
    """File for the rows."""


class World:
    """One fleet, its traffic, and what becomes of every request under a linear policy."""

    def __init__(self, scenario_name: str, process: str, num_requests: int) -> None:
        scenario = load_scenario(scenario_name)
        arrivals = scenario.arrivals.model_copy(update={"process": process})
        self.scenario = scenario.model_copy(update={"arrivals": arrivals})
        self.source = StreamSource(self.scenario)
        self.num_requests = num_requests
        self._sim: Simulator = make_simulator(self.scenario, 1, num_requests)
        self.num_weights = self._sim.num_weights

    def stream(self, seed: int, index: int) -> BatchingStream:
        """One stream of requests."""
        rng = stream_rng(seed, "evaluation", index)
        return fleet_stream(self.source.sample(self.num_requests, rng))

    def response_s(
        self, stream: BatchingStream, weights: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Arrival and response of every request, seconds; infinity where it was dropped."""
        self._sim.load(0, stream)
        self._sim.run_linear(weights, self.source.mean_total_tokens)
        outcomes = self._sim.outcomes(0)
        return outcomes.arrival_s, np.nan_to_num(outcomes.response_s, nan=np.inf)


@dataclass(frozen=True)
class Policies:
    """The three policies, as weights, and the SLO that they are judged by."""

    slo_s: float
    champion: FloatArray
    worse: FloatArray
    equal: FloatArray


def make_policies(world: World, args: Args) -> Policies:
    """Bend the champion on development streams."""
    streams = [world.stream(_DEVELOPMENT_SEED, i) for i in range(_NUM_DEVELOPMENT)]

    def responses(weights: FloatArray) -> FloatArray:
        return np.concatenate([world.response_s(one, weights)[1] for one in streams])

    champion = np.zeros(world.num_weights)
    slo_s = float(np.quantile(responses(champion), args.goodput))

    def goodput(weights: FloatArray) -> float:
        return float((responses(weights) <= slo_s).mean())

    # Less regard for those already there; and, for the equal one, more for one's own wait too.
    selfish, patient = np.zeros(world.num_weights), np.zeros(world.num_weights)
    selfish[MARGINAL_OTHERS] = -1.0
    patient[MARGINAL_WAIT] = 0.6
    worse = _bend(goodput, champion, selfish, args.goodput - args.worse)
    start = champion + 0.3 * selfish + patient
    away, back = goodput(start), goodput(champion)
    # Whichever side of the champion the other rule is on, somewhere between both there is a draw.
    direction = -selfish if away < back else selfish
    equal = _bend(goodput, start, direction, back, rising=away < back)
    return Policies(slo_s, champion, worse, equal)


def _bend(
    goodput: Callable[[FloatArray], float],
    start: FloatArray,
    direction: FloatArray,
    target: float,
    rising: bool = False,
) -> FloatArray:
    """Go from `start` until the goodput is `target`, by bisection."""
    low, high = 0.0, 3.0
    for _ in range(9):
        middle = (low + high) / 2
        if (goodput(start + middle * direction) < target) == rising:
            low = middle
        else:
            high = middle
    return start + (low + high) / 2 * direction


@dataclass(frozen=True)
class Settled:
    """What becomes of requests, a row each, in the order in which the test hears of them.

    That is at their end, or when they are given up, as the gateway does it.
    """

    good: BoolArray
    order: IntArray
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    """NaN: it was given up."""

    @staticmethod
    def of(
        stream: BatchingStream, arrival_s: FloatArray, response_s: FloatArray, slo_s: float
    ) -> Settled:
        """Judge a stream's requests by the response that was seen."""
        abandoned_s = ABANDON_AFTER * slo_s
        return Settled(
            good=response_s <= slo_s,
            order=np.argsort(arrival_s + np.minimum(response_s, abandoned_s), kind="stable"),
            prompt_tokens=stream.requests[:, CONTEXT],
            output_tokens=np.where(response_s <= abandoned_s, stream.requests[:, OUTPUT], np.nan),
        )


def run_test(canary: BoolArray, settled: Settled, share: float) -> int | None:
    """Return after how many canary requests it was stopped, None: never."""
    test = SequentialTest(share)
    for index in settled.order:
        tokens = settled.output_tokens[index]
        output = None if np.isnan(tokens) else int(tokens)
        sizes = int(settled.prompt_tokens[index]), output
        if test.record(bool(canary[index]), bool(settled.good[index]), *sizes):
            return test.num_canary
    return None


def in_worlds_of_their_own(world: World, policies: Policies, args: Args) -> list[Row]:
    """Judge all kinds of canaries against the champion's outcomes of the same requests."""
    kinds: dict[str, FloatArray | None] = {
        "worse": policies.worse, "equal": policies.equal, "fails": None,
    }  # fmt: skip
    stopped: dict[str, list[int | None]] = {kind: [] for kind in kinds}
    goodputs: dict[str, list[float]] = {kind: [] for kind in ("champion", *kinds)}
    for run in range(args.runs):
        stream = world.stream(args.seed, run)
        arrival_s, theirs_s = world.response_s(stream, policies.champion)
        goodputs["champion"].append(float((theirs_s <= policies.slo_s).mean()))
        hashed = np.random.default_rng([args.seed, run]).random(args.requests) < args.share
        for kind, weights in kinds.items():
            if weights is None:
                ours_s = np.full(args.requests, np.inf)
            else:
                _, ours_s = world.response_s(stream, weights)
            goodputs[kind].append(float((ours_s <= policies.slo_s).mean()))
            seen_s = np.where(hashed, ours_s, theirs_s)
            settled = Settled.of(stream, arrival_s, seen_s, policies.slo_s)
            stopped[kind].append(run_test(hashed, settled, args.share))
    return [_row(kind, stopped[kind], goodputs, args) for kind in kinds]


def by_coins(args: Args) -> list[Row]:
    """Judge canaries whose requests are good or not by independent coins."""
    kinds = {"worse": args.goodput - args.worse, "equal": args.goodput, "fails": 0.0}
    goodputs: dict[str, list[float]] = {"champion": [args.goodput]}
    goodputs |= {kind: [goodput] for kind, goodput in kinds.items()}
    rows = []
    unknown = np.full(args.requests, np.nan)
    for kind, goodput in kinds.items():
        stopped = []
        for run in range(args.runs):
            rng = np.random.default_rng([args.seed, run])
            hashed = rng.random(args.requests) < args.share
            good = rng.random(args.requests) < np.where(hashed, goodput, args.goodput)
            settled = Settled(good, np.arange(args.requests), np.zeros(args.requests), unknown)
            stopped.append(run_test(hashed, settled, args.share))
        rows.append(_row(kind, stopped, goodputs, args))
    return rows


def _row(kind: str, stopped: list[int | None], goodputs: dict[str, list[float]], args: Args) -> Row:
    after = np.array([np.inf if one is None else one for one in stopped])
    return {
        "canary": kind,
        "arrivals": args.arrivals,
        "runs": len(stopped),
        "champion_goodput_fraction": float(np.mean(goodputs["champion"])),
        "canary_goodput_fraction": float(np.mean(goodputs[kind])),
        "champion_goodput_std": float(np.std(goodputs["champion"])),
        "stopped_fraction": float(np.isfinite(after).mean()),
        "stopped_within_50_fraction": float((after <= 50).mean()),
        "stopped_within_1000_fraction": float((after <= 1000).mean()),
        "p50_canary_requests": float(np.quantile(after, 0.5, method="higher")),
        "p95_canary_requests": float(np.quantile(after, 0.95, method="higher")),
    }


def in_one_world(world: World, policies: Policies, args: Args) -> Row:
    """Let the worse canary and the champion share their replicas."""
    base, _ = champion_or_rule(world.scenario)
    make = {
        arm: learned_policy(_with_weights(base, weights, world))
        for arm, weights in ((False, policies.champion), (True, policies.worse))
    }
    stopped: list[int | None] = []
    goodputs: dict[str, list[float]] = {"champion": [], "in one world": []}
    for run in range(args.mixed):
        stream = world.stream(args.seed, run)
        hashed = np.random.default_rng([args.seed, run]).random(args.requests) < args.share

        def choose(sim: Simulator, copy: int, hashed: BoolArray = hashed) -> int:
            policy = make[bool(hashed[sim.current(copy)])]
            return sim.offered(copy)[policy.route(sim.request(copy), sim.snapshots(copy))]

        (ran,) = run_each(world.scenario, StreamSet([stream], "mixed"), [choose])
        seen_s = np.nan_to_num(ran.outcomes.response_s, nan=np.inf)
        settled = Settled.of(stream, ran.outcomes.arrival_s, seen_s, policies.slo_s)
        goodputs["champion"].append(float(settled.good[~hashed].mean()))
        goodputs["in one world"].append(float(settled.good[hashed].mean()))
        stopped.append(run_test(hashed, settled, args.share))
    return _row("in one world", stopped, goodputs, args)


def _with_weights(base: PolicyArtifact, weights: FloatArray, world: World) -> PolicyArtifact:
    metadata = base.metadata.model_copy(
        update={"mean_total_tokens": world.source.mean_total_tokens, "kind": "marginal"}
    )
    return PolicyArtifact(metadata, {"weights": weights})


def main(args: Args) -> None:
    if args.arrivals == "independent":
        rows = by_coins(args)
    else:
        world = World(args.scenario, args.arrivals, args.requests)
        policies = make_policies(world, args)
        rows = in_worlds_of_their_own(world, policies, args)
        if args.mixed:
            rows.append(in_one_world(world, policies, args))
    table = Table(*rows[0])
    for row in rows:
        table.add_row(
            *(f"{one:.4g}" if isinstance(one, float) else str(one) for one in row.values())
        )
    report(table, rows, args.json, args.seed, width=250)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

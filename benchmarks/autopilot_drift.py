"""Does the autopilot promote what turns out to be worse, while traffic and replicas drift?

    python benchmarks/autopilot_drift.py --months 20

The rate, the lengths and the speeds of a simulated fleet wander from day to day, and jump now and
then. Every few days the autopilot's cycle is played on them: rules are chosen on what was logged,
by a simulator whose speeds are off, and what is chosen decides in turns with what decided before,
until the autopilot's test tells them apart. What it promotes is then measured on 30,000 requests of
that day. Every turn begins behind two turns of the same policy; searches are left out.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console

from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.routing.artifact import DEFAULT_RULE
from tokenyard.routing.log_replay import scaled
from tokenyard.routing.own_traffic import Choice, OwnTraffic, Traffic
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.simulator.streams import StreamSet, StreamSource
from tokenyard.statistics.intervals import t_interval
from tokenyard.statistics.switchback import SETTLE_SHARE, conclusion
from tokenyard.types import FloatArray
from tokenyard.workload.model import load_model
from tokenyard.workload.trace import Trace

_LOGGED = 5000
_STREAMS, _REQUESTS = 30, 1000
"""By which a promotion is judged."""
_TWIN_ERROR = 0.05
"""Standard deviation of the error of the logarithm of a replica's speed."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Play the autopilot's cycle over months of drift."""

    scenario: str = "emulated"
    """A fleet."""
    months: float = 20.0
    """Of 30 days."""
    every_days: float = 3.0
    """From one cycle to the next."""
    stretch_s: float = 120.0
    """For which one of two policies decides."""
    most_pairs: int = 40
    """After which what is not told apart is given up."""
    alpha: float = 0.05
    """Chance, at most, to promote what makes no difference."""
    seed: int = 2026
    json: ResultFile | None = None
    """Write a row for each cycle to this file."""


class World:
    """A fleet and its traffic on a day."""

    def __init__(self, base: Scenario, seed: int) -> None:
        self._base, self._rng = base, np.random.default_rng(seed)
        self._model = load_model(base.workload)
        self._logs = np.zeros(2 + base.num_servers)
        """Of the load, the lengths, and every replica's time per iteration."""

    def wander(self, days: float) -> None:
        """Let days go by."""
        kept = math.exp(-days / 10.0)
        spread = np.array([0.25, 0.3] + [0.15] * self._base.num_servers)
        drawn = spread * self._rng.standard_normal(len(spread))
        self._logs = kept * self._logs + math.sqrt(1.0 - kept**2) * drawn
        jumps = self._rng.random(len(spread)) < 0.02 * days
        self._logs = np.where(jumps, 2.0 * spread * self._rng.standard_normal(), self._logs)

    @property
    def fleet(self) -> Scenario:
        """The replicas as they are."""
        return scaled(self._base, np.exp(self._logs[2:]))

    def estimated(self) -> Scenario:
        """The replicas as a fitted simulator has them."""
        error = _TWIN_ERROR * self._rng.standard_normal(self._base.num_servers)
        return scaled(self._base, np.exp(self._logs[2:] + error))

    def requests(self, num: int | None = None, duration_s: float = 0.0) -> Trace:
        """Draw so many requests, or those of so long."""
        load = min(0.7 * math.exp(self._logs[0]), 0.95)
        factor = math.exp(self._logs[1])
        lengths = (factor * length for length in self._base.mean_lengths_tokens)
        rate_per_s = load / self.fleet.offered_load(1.0, *lengths)
        count = num or 2 * math.ceil(rate_per_s * duration_s) + 50
        trace = self._model.generate(count, self._rng, rate_per_s).with_lengths_scaled(factor)
        return trace if num else trace.window(0.0, duration_s)


def responses_s(choice: Choice, fleet: Scenario, traces: list[Trace]) -> list[FloatArray]:
    """Response times under a policy, of each trace."""
    source = StreamSource(fleet)
    streams = StreamSet([source.encode(trace) for trace in traces], "drifting traffic")
    return [run.outcomes.offered_response_s for run in choice.runs(fleet, streams)]


def pair(
    world: World, twin: Scenario, new: Choice, old: Choice, stretch_s: float
) -> tuple[float, float]:
    """Gain and difference of attainment of one pair of turns, as the autopilot measures them."""
    relative, attained = [], []
    for choice in (new, old):
        trace = world.requests(duration_s=3.0 * stretch_s)
        counts = trace.arrival_s >= (2.0 + SETTLE_SHARE) * stretch_s
        (measured_s,) = responses_s(choice, world.fleet, [trace])
        (simulated_s,) = responses_s(old, twin, [trace])
        relative.append(float(measured_s[counts].mean() / simulated_s[counts].mean()))
        attained.append(float((measured_s[counts] <= twin.slo_response_s).mean()))
    return math.log(relative[1] / relative[0]), attained[0] - attained[1]


def trial(
    world: World, twin: Scenario, new: Choice, old: Choice, args: Args
) -> tuple[str | None, list[float]]:
    """What the test says of a candidate, and the gains it has seen."""
    gains: list[float] = []
    attained: list[float] = []
    for _ in range(args.most_pairs):
        gain, more = pair(world, twin, new, old, args.stretch_s)
        gains.append(gain)
        attained.append(more)
        said = conclusion(gains, attained, args.alpha)
        if said is not None:
            return said, gains
    return None, gains


def judged(world: World, new: Choice, old: Choice) -> Row:
    """Change of mean and attainment on many requests of the day, as fractions."""
    traces = [world.requests(_REQUESTS) for _ in range(_STREAMS)]
    ours, theirs = (responses_s(choice, world.fleet, traces) for choice in (new, old))
    changes = [a.mean() / b.mean() - 1.0 for a, b in zip(ours, theirs, strict=True)]
    slo_s = world.fleet.slo_response_s
    attained = [
        (a <= slo_s).mean() - (b <= slo_s).mean() for a, b in zip(ours, theirs, strict=True)
    ]
    mean = t_interval(changes)
    return {
        "delta_mean_fraction": mean.estimate, "delta_mean_ci_low": mean.low,
        "delta_mean_ci_high": mean.high, "delta_attainment": float(np.mean(attained)),
    }  # fmt: skip


def cycles(args: Args, console: Console) -> Iterator[Row]:
    """A row for each cycle."""
    world, default = World(load_scenario(args.scenario), args.seed), Choice(DEFAULT_RULE)
    active = default
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "drift.json"
        for cycle in range(round(30.0 * args.months / args.every_days)):
            world.wander(args.every_days)
            twin = world.estimated()
            traffic = Traffic(
                world.requests(_LOGGED), twin, active, twin_error_fraction=_TWIN_ERROR
            )
            try:
                candidate = OwnTraffic(traffic, model, 0.0, seed=cycle).train().choice
            except ValueError as error:
                console.print(f"cycle {cycle}: {error}", markup=False)
                continue
            row: Row = {"cycle": cycle, "active": active.name, "candidate": candidate.name}
            row |= {"conclusion": "none", "pairs": 0}
            if candidate.name != active.name:
                said, gains = trial(world, twin, candidate, active, args)
                row |= {"conclusion": said or "not told apart", "pairs": len(gains)}
                row |= {"gain_fraction": math.expm1(float(np.mean(gains)))}
                row |= judged(world, candidate, active)
                active = candidate if said == "better" else active
            earned = judged(world, active, default)["delta_mean_fraction"]
            row["delta_to_default_fraction"] = 0.0 if active.name == default.name else earned
            console.print({key: value for key, value in row.items() if key != "cycle"})
            yield row


def main(args: Args) -> None:
    console = Console(highlight=False, width=200)
    rows = list(cycles(args, console))
    tried = [row for row in rows if row["pairs"]]
    promoted = [float(row["delta_mean_fraction"]) for row in tried if row["conclusion"] == "better"]
    console.print(
        f"{len(rows)} cycles, {len(tried)} trials, {len(promoted)} promotions; "
        f"{sum(change > 0.02 for change in promoted)} of them with a mean longer by more than 2 %, "
        f"worst {max(promoted, default=math.nan):+.1%}; to {DEFAULT_RULE} over all cycles "
        f"{np.mean([float(row['delta_to_default_fraction']) for row in rows]):+.1%}",
        markup=False,
    )
    if args.json is not None:
        write_result(args.json, command_line(), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""A canary that orders what waits otherwise than the champion: what its test would see.

    python benchmarks/canary_order.py

One placement decides for all requests of a cluster that is simulated; a drawn share of them waits
by the canary's order, the others by the champion's. The SLO is what 90 % attain where all are
served first come, first served. The test is told equal lengths (decision 0013).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import tyro
from rich import box
from rich.table import Table

from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.run import Chooser, choosing, run_each
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.statistics.sequential import SequentialTest
from tokenyard.types import BoolArray, FloatArray

FIRST_COME = ""
PAIRS = (
    (FIRST_COME, "+sjf@60"), ("+sjf@60", FIRST_COME), (FIRST_COME, "+late_last@4"),
    ("+late_last@4", FIRST_COME), ("+sjf@60", "+sjf@60"),
)  # fmt: skip
"""Orders of the champion and of the canary, as they stand behind a placement."""
ATTAINED = 90.0
_EQUAL_TOKENS = (1000, 200)


@dataclass(frozen=True)
class Args:
    """Give a share of a cluster's requests to an order of its own."""

    scenario: str = "conversation_mixed_gpus"
    placement: str = "marginal_delay"
    share: float = 0.2
    load_factor: float = 1.05
    streams: int = 6
    requests: int = 6000
    seed: int = 3
    json: ResultFile | None = None


class Study:
    """Streams, and what orders do on them."""

    def __init__(self, args: Args) -> None:
        self._args, self._scenario = args, load_scenario(args.scenario)
        source, numbers = StreamSource(self._scenario), range(args.streams)
        rngs = [stream_rng(args.seed, "evaluation", i) for i in numbers]
        drawn = [source.sample(args.requests, rng, args.load_factor) for rng in rngs]
        self._streams = StreamSet(drawn, "synthetic")
        self._arms = [np.random.default_rng(i).random(args.requests) < args.share for i in numbers]
        first_come = np.concatenate(self._responses_s(FIRST_COME, FIRST_COME))
        self._slo_s = np.percentile(first_come, ATTAINED)
        self._alone = cache(lambda order: float(np.mean(self._attained(order, order))))

    def row(self, champion: str, canary: str) -> Row:
        """What both arms attain alone and in one cluster, and how often the test stops."""
        args, attained = self._args, self._attained(champion, canary)
        arms = list(zip(self._arms, attained, strict=True))
        return {
            "champion": champion, "canary": canary,
            "champion_alone": self._alone(champion), "canary_alone": self._alone(canary),
            "champion_attained": float(np.mean([good[~arm].mean() for arm, good in arms])),
            "canary_attained": float(np.mean([good[arm].mean() for arm, good in arms])),
            "stopped": sum(_stops(args.share, arm, good) for arm, good in arms),
        }  # fmt: skip

    def _attained(self, champion: str, canary: str) -> list[BoolArray]:
        return [times_s <= self._slo_s for times_s in self._responses_s(champion, canary)]

    def _responses_s(self, champion: str, canary: str) -> list[FloatArray]:
        choosers = [self._chooser(arm, champion, canary) for arm in self._arms]
        runs = run_each(self._scenario, self._streams, choosers)
        return [one.outcomes.offered_response_s for one in runs]

    def _chooser(self, arm: BoolArray, champion: str, canary: str) -> Chooser:
        rng, scenario = np.random.default_rng(0), self._scenario
        context = PolicyContext(scenario.name, scenario.slo, rng, scenario.num_servers)
        orders = (champion, canary)
        ours, theirs = (choosing(make_policy(self._args.placement + o, context)) for o in orders)
        return lambda sim, copy: (theirs if arm[sim.current(copy)] else ours)(sim, copy)


def _stops(share: float, arm: BoolArray, good: BoolArray) -> bool:
    test = SequentialTest(share, 0.025)
    pairs = zip(arm.tolist(), good.tolist(), strict=True)
    return any(test.record(canary, attained, *_EQUAL_TOKENS) for canary, attained in pairs)


def main(args: Args) -> None:
    study = Study(args)
    rows = [study.row(*pair) for pair in PAIRS]
    found = Table(*rows[0], box=box.SIMPLE_HEAD)
    for row in rows:
        shares = [f"{100.0 * v:.1f} %" if isinstance(v, float) else str(v) for v in row.values()]
        found.add_row(*shares)
    report(found, rows, args.json, args.seed, width=150)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""A champion for one's own fleet and trace: it starts from the rule that works anywhere.

The first part of the trace is learned from, in three steps. A traffic model is fitted to it
(`tokenyard.workload.fit`). The weights of the rule for these servers and the knob of an order
are tuned on streams of that model. Searches of placement and order go on from there
(`tokenyard.routing.search`), until the time is up. All candidates are then set beside the
foundation, the rule that decides where nothing was trained (`DEFAULT_RULE`), on streams that no
search has seen: below, at and above the load, and on the recorded first part. What loses to it
anywhere (`tokenyard.routing.gate.loses`) is out.

The last part of the trace judges the one that is left, once. It is accepted if its mean
response time is below the foundation's with an interval below zero, and neither its 99th percentile
nor its SLO violations are higher with an interval above `tokenyard.routing.gate.TOLERANCE`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import yaml

from tokenyard.config import read_named
from tokenyard.evaluation import compare
from tokenyard.problem import Row
from tokenyard.provenance import lineage
from tokenyard.routing.artifact import DEFAULT_RULE, PolicyArtifact, lineage_of
from tokenyard.routing.choice import CHANGE, LOSSES, Judge, choose
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.gate import MOST_LOAD, load_factors, loses, tail_is_longer
from tokenyard.routing.policies.learned import order_weights
from tokenyard.routing.policies.order import BETWEEN, KNOB, ORDERS
from tokenyard.routing.policies.tuned import FLEET_GRIDS, FleetRules
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.scores.order import FIRST_COME
from tokenyard.routing.search import PolicySearch, SearchConfig
from tokenyard.routing.search_study import OBJECTIVES
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.server_models import ORDER_WEIGHTS, order_weights_of, server_model
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    synthetic_streams,
    trace_streams,
)
from tokenyard.routing.tuning import Values, coordinate_descent
from tokenyard.routing.validation import artifact_runs, outcome_row
from tokenyard.types import FloatArray
from tokenyard.workload.fit import fit_own
from tokenyard.workload.trace import Trace

CANDIDATE = "candidate"
LEARNED_SHARE = 0.7
"""Of the trace's requests: the first ones are learned from."""
FEWEST_JUDGING = 500
"""Requests of the last part below which nothing is told apart."""
_SEARCHED = (0, 2, 5)
"""Objectives of `search_study.OBJECTIVES`: the mean, the tail, and SLOs at any price."""
_GENERATIONS = 40
_REQUESTS = 3000
"""Of one stream."""
_TUNING_STREAMS, _CHOICE_STREAMS, _MOST_WINDOWS = 3, 10, 30
_TAIL_GUARD = 2.0
_MODEL_STEP_S = 1.0


def own_scenario(fleet: str, workload: Path, trace: Trace, load: float | None) -> Scenario:
    """Put a trace's traffic on a fleet.

    Args:
        fleet: Name of a fleet that ships, or a YAML file: a fleet as in `scenarios/fleets`, or a
            scenario, whose servers and SLOs are taken (what `calibrate.py --url` writes).
        workload: The traffic model fitted to the trace.
        trace: Whose rate is offered.
        load: Offered load in place of the trace's own.

    Raises:
        ValueError: The file is none of both, or the trace asks for more than the fleet can do.
    """
    given = yaml.safe_load(read_named(fleet, "fleet", "tokenyard", "scenarios/fleets"))
    if not isinstance(given, dict) or not ({"fleet", "servers"} & given.keys()):
        raise ValueError(f"fleet {fleet}: the file has neither `fleet` nor `servers`")
    kept = {k: v for k, v in given.items() if k not in ("sessions", "held_out_trace", "arrivals")}
    kept |= {"name": workload.stem, "description": f"{workload.stem} on {Path(fleet).stem}."}
    kept |= {"workload": str(workload), "requests_per_stream": _REQUESTS}
    if "fleet" in given:
        kept.setdefault("slo_response_s", 15.0)
        kept.setdefault("reward", dict.fromkeys(("processing", "queue", "overload", "balance"), 0))
    rate = {"rate_per_s": trace.mean_rate_per_s} if load is None else {"load": load}
    scenario = Scenario.model_validate(kept | {"arrivals": {"process": "mmpp", **rate}})
    offered = StreamSource(scenario).offered_load
    if offered > MOST_LOAD:
        raise ValueError(
            f"the trace asks for {offered:.2g} times what the fleet can do; --load 0.8 slows it"
        )
    return scenario


@dataclass(frozen=True)
class Found:
    """What training on a trace came to."""

    choice: PolicyArtifact
    accepted: bool
    rows: list[Row]
    """Of the last part, at the trace's load and at half of it: the foundation, then the choice."""
    remarks: list[str]
    """What was found on the way, in sentences."""


class OwnTraffic:
    """Trains on the first part of a trace, and judges on the last."""

    def __init__(
        self, fleet: str, trace: Trace, workload: Path, minutes: float, load: float | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """Fit the traffic model and write it.

        Args:
            fleet: As of `own_scenario`.
            trace: Requests in their own time.
            workload: File (.json) for the traffic model.
            minutes: After which no search begins or goes on.
            load: Offered load in place of the trace's own.
            seed: Of streams and searches.

        Raises:
            ValueError: The trace is too short, or does not suit the fleet.
        """
        self._begun_s, self._minutes, self._seed = time.monotonic(), minutes, seed
        self._learned, self._judging = trace.split(int(LEARNED_SHARE * trace.num_requests))
        if self._judging.num_requests < FEWEST_JUDGING:
            raise ValueError(
                f"a trace of {trace.num_requests} requests leaves {self._judging.num_requests} to "
                f"judge by; at least {FEWEST_JUDGING} are needed"
            )
        provenance = f"first {self._learned.num_requests} of {trace.num_requests} requests"
        model = fit_own(self._learned, workload.stem, provenance, _MODEL_STEP_S)
        workload.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")
        self.scenario = own_scenario(fleet, workload.absolute(), trace, load)
        self._source = StreamSource(self.scenario)
        self._load = load
        self.remarks = [
            f"offered load {self._source.offered_load:.2f}, "
            f"{self.scenario.rate_per_s(self._source.mean_total_tokens):.3g} requests a second"
        ]

    def train(self) -> Found:
        """Tune, search, choose and judge."""
        choices = [self.foundation, *self._tuned()]
        choices += self._searches(min(choices, key=self._cost))
        chosen = self._best_of(choices)
        best = choices[chosen]
        self.remarks.append(f"chosen: {_told(best) if chosen else DEFAULT_RULE}")
        rows, accepted = self._judge(best)
        return Found(best, accepted, rows, self.remarks)

    @cached_property
    def _factors(self) -> list[float]:
        """Factors on the load at which candidates are tuned and chosen."""
        return list(load_factors(self._source).values())

    def _left(self) -> bool:
        """Whether there is time left for searches."""
        return time.monotonic() - self._begun_s < 60.0 * self._minutes

    def _runs(self, choice: PolicyArtifact, streams: Sequence[StreamSet]) -> list[list[Run]]:
        return [artifact_runs(self.scenario, some, choice) for some in streams]

    @cached_property
    def _tuning_streams(self) -> list[StreamSet]:
        return [
            synthetic_streams(self._source, _TUNING_STREAMS, self._seed, "training", factor)
            for factor in self._factors
        ]

    @cached_property
    def _foundation_runs(self) -> list[list[Run]]:
        return self._runs(self.foundation, self._tuning_streams)

    def _cost(self, choice: PolicyArtifact) -> float:
        """Mean over tuning streams of the cost over the foundation's, with a guard on the tail."""
        ours, theirs = self._runs(choice, self._tuning_streams), self._foundation_runs
        costs: list[float] = []
        tails: list[float] = []
        for some, others in zip(ours, theirs, strict=True):
            for mine, its in zip(self._measured(some), self._measured(others), strict=True):
                costs.append(mine[0] / its[0])
                tails.append(mine[1] / its[1])
        return float(np.mean(costs)) + _TAIL_GUARD * max(0.0, float(np.mean(tails)) - 1.0)

    def _measured(self, runs: Sequence[Run]) -> list[tuple[float, float]]:
        """Score and p99 of each run."""
        slo_s = self.scenario.slo_response_s
        rows = [outcome_row(one.outcomes, slo_s) for one in runs]
        return [(score, p99_s) for score, _, p99_s, _ in rows]

    @cached_property
    def _blank(self) -> PolicyArtifact:
        made = {**lineage(), **lineage_of(self.scenario)}
        searched = PolicySearch(self.scenario).artifact({}, made)
        metadata = searched.metadata.model_copy(update={"num_replicas": None})
        return replace(searched, metadata=metadata)

    def _made(self, weights: Sequence[float], order: FloatArray, trainer: str) -> PolicyArtifact:
        metadata = self._blank.metadata.model_copy(update={"trainer": trainer})
        return replace(
            self._blank, metadata=metadata, arrays={"weights": np.array(weights), "order": order}
        )

    @cached_property
    def foundation(self) -> PolicyArtifact:
        """The default rule, as a policy of the kind for these servers."""
        order = order_weights_of(DEFAULT_RULE.partition(BETWEEN)[2])
        rule = self._rule_in("", (1.0,) * len(self._grid))
        return replace(rule, arrays={**rule.arrays, "order": order})

    @cached_property
    def _grid(self) -> Mapping[str, Values]:
        """Values of each weight of the rule for these servers; {}: it has none."""
        batches = server_model(self.scenario).linear_kind == "marginal"
        return FLEET_GRIDS["tuned_marginal_delay"] if batches else {}

    def _rule_in(self, order: str, values: Values) -> PolicyArtifact:
        """The rule for these servers with weights and, where there is an order, its knob last."""
        if not self._grid:
            weights, *_ = server_model(self.scenario).linear_placements(None).values()
        else:
            weights = FleetRules(**dict(zip(self._grid, values, strict=False))).marginal_weights
        return self._made(weights, _order_weights(order, values), "tuning")

    def _tuned(self) -> list[PolicyArtifact]:
        """The best first come, first served, and the best in every order."""
        found = []
        orders = (one for one in server_model(self.scenario).orders if one in ORDER_WEIGHTS)
        for order in ("", *orders):
            grids = [*self._grid.values()]
            start = (1.0,) * len(grids)
            if order:
                grids, start = [*grids, ORDERS[order].grid], (*start, ORDERS[order].default)
            in_order = partial(self._rule_in, order)

            def score_of(
                values: Values, candidate: Callable[[Values], PolicyArtifact] = in_order
            ) -> float:
                return -self._cost(candidate(values))

            found.append(in_order(coordinate_descent(start, grids, score_of)[1]))
        return found

    def _searches(self, rule: PolicyArtifact) -> Iterator[PolicyArtifact]:
        """Searches that go on from a tuned rule and its order, one objective after another."""
        slo_weights = (0.0,) * server_model(self.scenario).num_slo_weights
        config = SearchConfig(
            start=(*rule.arrays["weights"].tolist(), *slo_weights),
            order=tuple(order_weights(rule.arrays).tolist()),
            requests_per_stream=_REQUESTS,
            num_generations=_GENERATIONS,
            randomisation=Randomisation(load_factor=(min(self._factors), max(self._factors))),
        )
        for number, objective in enumerate(_SEARCHED):
            if not self._left():
                return
            search = PolicySearch(
                self.scenario, replace(config, objective=OBJECTIVES[objective]), self._seed + number
            )
            while search.generation < _GENERATIONS and self._left():
                search.step()
            self.remarks.append(
                f"search {number + 1}: {search.generation} generations, "
                f"{search.env_steps:,} requests"
            )
            yield self._made(search.weights.tolist(), search.order, "policy_search")

    def _best_of(self, choices: Sequence[PolicyArtifact]) -> int:
        """Index of the candidate that loses to the foundation nowhere and has the least mean.

        That is the mean over parts of the difference to the foundation's; 0, the foundation, where
        no candidate is below it.
        """
        judge = Judge(self._source, _CHOICE_STREAMS, (DEFAULT_RULE,), self._windows(self._learned))
        found = [judge(choice) for choice in choices[1:]]
        refused = sum(bool(one[LOSSES]) for one in found)
        self.remarks.append(
            f"{len(choices)} candidates, {refused} lose to the foundation somewhere"
        )
        chosen = choose(found, must_win=False)
        return 0 if chosen is None or found[chosen][CHANGE] >= 0.0 else chosen + 1

    def _beside(self, streams: StreamSet, runs: Mapping[str, Sequence[Run]]) -> list[Row]:
        return compare(PROBLEM, self.scenario, streams, runs, DEFAULT_RULE)

    def _windows(self, part: Trace, factor: float = 1.0) -> StreamSet:
        """Recorded windows at a factor on the load, at least five."""
        count = int(np.clip(part.num_requests // 200, 5, _MOST_WINDOWS))
        load = self._source.offered_load if self._load is None else self._load
        return trace_streams(self._source, part, count, load=factor * load)

    def _judge(self, choice: PolicyArtifact) -> tuple[list[Row], bool]:
        rows: list[Row] = []
        for part, factor in (("as recorded", 1.0), ("half of the load", 0.5)):
            streams = self._windows(self._judging, factor)
            both = {DEFAULT_RULE: self.foundation, CANDIDATE: choice}
            runs = {name: self._runs(one, [streams])[0] for name, one in both.items()}
            found = self._beside(streams, runs)
            rows += [{"part": part, "offered_load": streams.offered_load, **row} for row in found]
        ours, at_half = rows[1], rows[3]
        better = float(ours["delta_mean_ci_high"]) < 0.0 and not tail_is_longer(ours)
        return rows, better and not loses(at_half) and not tail_is_longer(at_half)


def _order_weights(order: str, values: Values) -> FloatArray:
    """Weights of an order with the last value as its knob; of none, first come first served."""
    return order_weights_of(f"{order}{KNOB}{values[-1]}") if order else FIRST_COME.copy()


def _told(choice: PolicyArtifact) -> str:
    """Who made a candidate, and in which order requests wait there, in words."""
    weights = order_weights(choice.arrays)
    orders = [f"{one}{KNOB}{weights[at]:g}" for one, at in ORDER_WEIGHTS.items() if weights[at]]
    order = f"the order {orders[0]}" if orders else "first come, first served"
    return f"made by {choice.metadata.trainer}, {order}"

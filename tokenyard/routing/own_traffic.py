"""A champion for one's own fleet and trace: the best rule there, or what a search makes of it.

The first part of the trace is learned from, in three steps. All rules are played on it as it was
recorded, and one of the best is kept (`tokenyard.routing.rule_replay`). A traffic model is fitted
to it (`tokenyard.workload.fit`), and searches of placement and order go on from the best rule on
streams of that model (`tokenyard.routing.search`), until the time is up. What they found is set
beside the best rule, and beside the one that decides where nothing is known (`DEFAULT_RULE`), on
streams that no search has seen: below, at and above the load, and on the recorded first part. What
loses to a rule anywhere (`tokenyard.routing.gate.loses`) is out.

The last part of the trace judges, once. What a search made is kept if its mean response time is
below that of the best rule with an interval below zero, and neither its 99th percentile nor its
SLO violations are higher with an interval above `tokenyard.routing.gate.TOLERANCE`; else the best
rule is. That gives way to the default rule where it loses to it there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from tokenyard.config import fitted, read_fields
from tokenyard.evaluation import compare
from tokenyard.problem import Row
from tokenyard.provenance import lineage
from tokenyard.routing.artifact import DEFAULT_RULE, PolicyArtifact, lineage_of
from tokenyard.routing.choice import CHANGE, LOSSES, Judge, choose
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.gate import MOST_LOAD, load_factors, loses, tail_is_longer
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.rule_replay import Replay
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.search import PolicySearch, SearchConfig, linear_weights, started_at
from tokenyard.routing.search_study import OBJECTIVES
from tokenyard.routing.simulator import Decide
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, trace_streams
from tokenyard.routing.validation import policy_runs
from tokenyard.workload.fit import fit_own
from tokenyard.workload.trace import Trace

CANDIDATE = "candidate"
LEARNED_SHARE = 0.7
"""Of the trace's requests: the first ones are learned from."""
FEWEST_JUDGING = 500
"""Requests of the last part below which nothing is told apart."""
LEAST_RATE_PER_S = 1 / 60
"""Rate of a trace below which next to no request waits for another."""
_SEARCHED = (0, 2, 5)
"""Objectives of `search_study.OBJECTIVES`: the mean, the tail, and SLOs at any price."""
_GENERATIONS = 40
_REQUESTS = 3000
"""Of one stream."""
_REPLAYED, _MOST_REPLAYED = 1000, 5
"""Requests of each stretch of the first part that rules are played on, about, and how many."""
_CHOICE_STREAMS, _MOST_WINDOWS = 10, 30
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
    given = read_fields(fleet, "fleet", "tokenyard", "scenarios/fleets")
    if not ({"fleet", "servers"} & given.keys()):
        raise ValueError(f"fleet {fleet}: the file has neither `fleet` nor `servers`")
    kept = {k: v for k, v in given.items() if k not in ("sessions", "held_out_trace", "arrivals")}
    kept |= {"name": workload.stem, "description": f"{workload.stem} on {Path(fleet).stem}."}
    kept |= {"workload": str(workload), "requests_per_stream": _REQUESTS}
    if "fleet" in given:
        kept.setdefault("slo_response_s", 15.0)
        kept.setdefault("reward", dict.fromkeys(("processing", "queue", "overload", "balance"), 0))
    rate = {"rate_per_s": trace.mean_rate_per_s} if load is None else {"load": load}
    fields = kept | {"arrivals": {"process": "mmpp", **rate}}
    scenario = fitted(Scenario, fields, f"fleet {fleet}")
    offered = StreamSource(scenario).offered_load
    if offered > MOST_LOAD:
        raise ValueError(
            f"the trace asks for {offered:.2g} times what the fleet can do; --load 0.8 slows it"
        )
    return scenario


@dataclass(frozen=True)
class Choice:
    """A candidate: a rule by its name, or what a search made."""

    name: str
    policy: PolicyArtifact | Decide
    """The policy file, or what runs the rule."""

    @property
    def artifact(self) -> PolicyArtifact | None:
        """The policy file; None: a rule needs none."""
        return self.policy if isinstance(self.policy, PolicyArtifact) else None


@dataclass(frozen=True)
class Found:
    """What training on a trace came to."""

    choice: Choice
    """What to serve."""
    rows: list[Row]
    """Of the last part, at the trace's load and at half: the default rule, the best rule, and what
    a search made, where it was good enough to be judged. Differences are to the best rule."""
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
        if load is None and trace.mean_rate_per_s < LEAST_RATE_PER_S:
            raise ValueError(
                f"a request every {1 / trace.mean_rate_per_s:.3g} s leaves nothing to decide; are "
                "the arrivals in seconds? --load scales the trace to an offered load"
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
        """Play all rules, search, and judge."""
        rule = self._best_rule()
        self.remarks.append(f"best of all rules on the first part: {rule.name}")
        searched = self._best_of([*self._searches(rule.name)], rule)
        rows, choice = self._judge(rule, searched)
        return Found(choice, rows, self.remarks)

    @cached_property
    def _factors(self) -> list[float]:
        """Factors on the load at which candidates are tuned and chosen."""
        return list(load_factors(self._source).values())

    def _left(self) -> bool:
        """Whether there is time left for searches."""
        return time.monotonic() - self._begun_s < 60.0 * self._minutes

    def _best_rule(self) -> Choice:
        """The best rule on the recorded first part."""
        count = int(np.clip(self._learned.num_requests // _REPLAYED, 1, _MOST_REPLAYED))
        replay = Replay(self.scenario, self._windows(self._learned, count).requests)
        name = replay.choice()
        return Choice(name, replay.rules[name])

    def _searches(self, rule: str) -> Iterator[Choice]:
        """Searches that go on from a rule and its order, one objective after another."""
        name = RuleName.parse(rule)
        if linear_weights(self.scenario, name.placement) is None:
            placement, *_ = server_model(self.scenario).linear_placements(None)
            name = RuleName(Term.parse(placement), name.order)
        config = SearchConfig(
            requests_per_stream=_REQUESTS,
            num_generations=_GENERATIONS,
            randomisation=Randomisation(load_factor=(min(self._factors), max(self._factors))),
        )
        config = started_at(self.scenario, str(name), config)
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
            yield Choice(CANDIDATE, self._made(search))

    def _made(self, search: PolicySearch) -> PolicyArtifact:
        artifact = search.artifact({}, {**lineage(), **lineage_of(self.scenario)})
        metadata = artifact.metadata.model_copy(update={"num_replicas": None})
        return replace(artifact, metadata=metadata)

    def _best_of(self, searched: Sequence[Choice], rule: Choice) -> Choice | None:
        """What loses to no rule and has the least mean, below that of the best rule; None: none.

        That is the mean over parts of the difference to the best rule's.
        """
        judge = Judge(
            self._source, _CHOICE_STREAMS, tuple(dict.fromkeys((rule.name, DEFAULT_RULE))),
            self._windows(self._learned),
        )  # fmt: skip
        found = [judge(one.policy) for one in searched]
        refused = sum(bool(one[LOSSES]) for one in found)
        self.remarks.append(f"{len(searched)} searched, {refused} of them lose to a rule somewhere")
        chosen = choose(found, must_win=False)
        if chosen is None or found[chosen][CHANGE] >= 0.0:
            return None
        return searched[chosen]

    def _windows(self, part: Trace, count: int | None = None, factor: float = 1.0) -> StreamSet:
        """Recorded windows at a factor on the load: `count`, or at least five."""
        count = count or int(np.clip(part.num_requests // 200, 5, _MOST_WINDOWS))
        load = self._source.offered_load if self._load is None else self._load
        return trace_streams(self._source, part, count, load=factor * load)

    def _judge(self, rule: Choice, searched: Choice | None) -> tuple[list[Row], Choice]:
        default = server_model(self.scenario).compiled_order(DEFAULT_RULE)
        assert default is not None, "compiled code knows it for all servers"
        choices = {DEFAULT_RULE: Choice(DEFAULT_RULE, default), rule.name: rule}
        if searched is not None:
            choices[searched.name] = searched
        rows: list[Row] = []
        for part, factor in (("as recorded", 1.0), ("half of the load", 0.5)):
            streams = self._windows(self._judging, factor=factor)
            runs = {
                name: policy_runs(self.scenario, streams, one.policy)
                for name, one in choices.items()
            }
            found = compare(PROBLEM, self.scenario, streams, runs, rule.name)
            rows += [{"part": part, "offered_load": streams.offered_load, **row} for row in found]
        if searched is not None:
            ours, at_half = (row for row in rows if row["policy"] == searched.name)
            better = float(ours["delta_mean_ci_high"]) < 0.0
            if better and not any(loses(one) or tail_is_longer(one) for one in (ours, at_half)):
                return rows, searched
        # The differences are the default rule's to the best one.
        ahead = float(rows[0]["delta_mean_ci_high"]) < 0.0 and not tail_is_longer(rows[0])
        return rows, choices[DEFAULT_RULE if ahead else rule.name]

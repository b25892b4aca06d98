"""A champion for one's own fleet and trace: the best rule there, or what a search makes of it.

The first part of the trace is learned from, in three steps. All rules are played on it as it was
recorded, and one of the best is kept (`tokenyard.routing.rule_replay`). A traffic model is fitted
to it (`tokenyard.workload.fit`), and searches of placement and order go on from the best rule on
streams of that model (`tokenyard.routing.search`), until the time is up. What they found is set
beside the best rule, and beside the one that decides where nothing is known (`default_rule`), on
streams that no search has seen: below, at and above the load, and on the recorded first part. What
loses to a rule anywhere (`tokenyard.routing.gate.loses`) is out.

The last part of the trace judges, once. It is played in one go behind the end of the first part,
which fills the servers and does not count; intervals are those of `statistics.jackknife`, and a
99th percentile that tells of one or two bursts is none. What a search made is kept if its mean
response time is below that of the best rule with an interval below zero, and neither its 99th
percentile nor its SLO violations are higher with an interval above
`tokenyard.routing.gate.TOLERANCE`; else the best rule is. That gives way to the default rule where
it loses to it there.

Where it is known what decides today, as from a decision log, that is judged with the others: what a
search made has to beat it, too, and the best rule gives way to it where it loses. Searches go on
from a policy of weights that decides today if it is better than the best rule on the first part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from tokenyard.artifact import NoChampionError, RegistryLookup
from tokenyard.config import fitted, read_fields
from tokenyard.evaluation import compare
from tokenyard.problem import Row
from tokenyard.provenance import lineage
from tokenyard.routing.artifact import PolicyArtifact, default_rule, lineage_of
from tokenyard.routing.choice import CHANGE, LOSSES, Judge, choose
from tokenyard.routing.decision_log import (
    fleet_of,
    read_log,
    served_policy,
    trace_of,
    windows_of,
)
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.gate import MOST_LOAD, load_factors, loses, rule_runs, tail_is_longer
from tokenyard.routing.log_replay import Window, fit_speeds, mean_error, repeat_error
from tokenyard.routing.policies import is_rule
from tokenyard.routing.policies.learned import order_weights
from tokenyard.routing.policies.makers import MAKERS_NAMES, rule_of
from tokenyard.routing.policies.public import Needs, needs_of
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.rule_replay import Replay
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.search import PolicySearch, SearchConfig, linear_weights, started_at
from tokenyard.routing.search_study import OBJECTIVES
from tokenyard.routing.simulator.run import Run, run_compiled
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, trace_streams
from tokenyard.routing.validation import NAMES
from tokenyard.statistics.jackknife import is_settled
from tokenyard.workload.fit import fit_own
from tokenyard.workload.trace import Trace

CANDIDATE = "candidate"
ORDER_NOTE = (
    "what follows + says which waiting request is next: it does nothing at endpoints without "
    "`order: priority`, unless the gateway holds requests back"
)
LEARNED_SHARE = 0.7
"""Of the trace's requests: the first ones are learned from."""
FEWEST_JUDGING = 1000
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
_CHOICE_STREAMS = 10
_WARM_UP = 500
"""Requests, at most, that fill the servers before a stretch of the first part begins."""
_MODEL_STEP_S = 1.0
_FEW_STEPS = 500


def own_scenario(
    fleet: str | Scenario, workload: Path, trace: Trace, load: float | None
) -> Scenario:
    """Put a trace's traffic on a fleet.

    Args:
        fleet: Name of a fleet that ships, or a YAML file: a fleet as in `scenarios/fleets`, or a
            scenario, whose servers and SLOs are taken (what `calibrate.py --url` writes); or a
            scenario that was read.
        workload: The traffic model fitted to the trace.
        trace: Whose rate is offered.
        load: Offered load in place of the trace's own.

    Raises:
        ValueError: The file is none of both, or the trace asks for more than the fleet can do.
    """
    if isinstance(fleet, Scenario):
        given, fleet = fleet.model_dump(), fleet.name
    else:
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
    """A rule by its name, or a trained policy."""

    name: str
    artifact: PolicyArtifact | None = None
    """The policy; None: a rule, which needs no file."""

    @classmethod
    def named(cls, policy: str) -> Choice:
        """What a name or the path of a policy file means.

        Raises:
            ValueError: It is neither.
        """
        if policy.endswith(".npz"):
            artifact = PolicyArtifact.load(policy)
            return cls(f"{Path(policy).stem}@{artifact.sha256}", artifact)
        name = rule_of(policy)
        if not is_rule(name):
            raise ValueError(
                f"{policy} is no rule, and no policy file (.npz); routers are known by their "
                f"makers' names, too: {', '.join(MAKERS_NAMES)}"
            )
        return cls(name)

    def runs(self, scenario: Scenario, streams: StreamSet) -> list[Run]:
        """Run it over streams."""
        if self.artifact is None:
            return rule_runs(PROBLEM, self.name, scenario, streams)
        return run_compiled(scenario, streams, self.artifact.decide)

    def check(self, scenario: Scenario, trace: Trace) -> None:
        """Refuse what cannot be compared on this traffic.

        Raises:
            ValueError: It is tuned for another scenario, for other replicas, or goes by prefixes
                and the trace holds none.
        """
        if self.artifact is None:
            needs = needs_of(RuleName.parse(self.name).base)
            if needs == Needs.PREFIX_CACHE and trace.prefix_hashes is None:
                raise ValueError(
                    f"the rule {self.name} decides today and goes by prefixes: the requests come "
                    "without prompts, so there is nothing to compare with; give a trace with hash "
                    "ids, or --now least_connections, which most such rules are without a match"
                )
            PROBLEM.candidate(scenario, self.name)
            return
        num, batches = self.artifact.metadata.num_replicas, self.artifact.needs_engine
        if num not in (None, scenario.num_servers) or batches not in (None, bool(scenario.fleet)):
            raise ValueError(f"{self.name}, which decides today, is for other replicas")


@dataclass(frozen=True)
class Traffic:
    """What a policy is trained for."""

    trace: Trace
    """Requests in their own time."""
    fleet: str | Scenario
    """As of `own_scenario`."""
    now: Choice | None = None
    """What decides today; None: nobody knows."""
    lineage: Mapping[str, str] = field(default_factory=dict)
    """Where the requests come from."""
    remarks: tuple[str, ...] = ()
    """What was found while they were read, in sentences."""
    twin_error_fraction: float | None = None
    """How far the simulator that repeats the logged decisions is off the logged mean response, as a
    fraction; None: no replicas were fitted."""
    log: Window | None = None
    """Where the requests went and how long they took; None: nothing was logged."""


def logged_traffic(
    folder: Path, fleet: str | Scenario, now: Choice | None = None,
    registry: RegistryLookup | None = None, since_s: float = -math.inf,
) -> Traffic:  # fmt: skip
    """What a gateway was asked, on the replicas of a fleet or on those that were logged.

    Args:
        folder: Of the decision log.
        fleet: As of `own_scenario`. Of a scenario that was read the SLOs count: replicas are those
            of the log, as fast as they were in its first part.
        now: What decides today; None: what placed most requests of the log's last part.
        registry: Where the scenario's champion is looked up, if it was that.
        since_s: Unix time of the first arrival that counts, seconds.

    Raises:
        ValueError: The log cannot be read, or does not suit the scenario.
    """
    decisions, digest = read_log(folder, since_s)
    num_learned = int(LEARNED_SHARE * len(decisions))
    label = served_policy(decisions[num_learned:])
    now = now or _served(label, fleet, registry)
    note = f"{label}, which served the log, is not compared: give its file with --now"
    traffic = Traffic(
        trace_of(decisions), fleet, now, {"log_sha256": digest, "served": label},
        () if now else (note,), log=windows_of(decisions, 1)[0],
    )  # fmt: skip
    if not isinstance(fleet, Scenario):
        return traffic
    declared = fleet_of(decisions, fleet, fleet.name)
    num_windows = max(1, num_learned // _REPLAYED)
    twin = fit_speeds(declared, windows_of(decisions[:num_learned], num_windows))
    factors, error = twin.speed_factors.round(2).tolist(), twin.error_fraction
    remark = (
        f"replicas of the log: iterations take {factors} times as long as declared; the simulator "
        f"that repeats its decisions is off by {error:.1%}"
    )
    return replace(
        traffic, fleet=twin.scenario, remarks=(remark, *traffic.remarks), twin_error_fraction=error
    )


def _served(label: str, fleet: str | Scenario, registry: RegistryLookup | None) -> Choice | None:
    """The rule of that label, `name@sha256`, or the scenario's champion, if it is that."""
    name, _, sha256 = label.rpartition("@")
    if is_rule(name):
        return Choice(name)
    if not isinstance(fleet, Scenario):
        return None
    try:
        artifact, _ = PolicyArtifact.champion(fleet.name, registry=registry)
    except NoChampionError:
        return None
    return Choice(label, artifact) if artifact.sha256 == sha256 else None


@dataclass(frozen=True)
class Found:
    """What training on a trace came to."""

    choice: Choice
    """What to serve."""
    rule: Choice
    """The best rule on the first part."""
    searched: Choice | None
    """What a search made, if it was good enough to be judged."""
    rows: list[Row]
    """Of the last part, at the trace's load and at half: the default rule, what decides today, the
    best rule, and what a search made. Differences are to the best rule."""
    remarks: list[str]
    """What was found on the way, in sentences."""


def measured(
    scenario: Scenario, streams: StreamSet, runs: Mapping[str, Sequence[Run]], baseline: str
) -> list[Row]:
    """Rows of `compare` on one recorded stream, with a p99 only where it has settled."""
    rows = compare(PROBLEM, scenario, streams, runs, baseline)
    for row, (run,) in zip(rows, runs.values(), strict=True):
        if not is_settled(run.outcomes.offered_response_s):
            row["p99_response_s"] = math.nan
    return rows


class OwnTraffic:
    """Trains on the first part of a trace, and judges on the last."""

    def __init__(
        self, traffic: Traffic, workload: Path, minutes: float, load: float | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """Fit the traffic model and write it.

        Args:
            traffic: What is asked, and of which replicas.
            workload: File (.json) for the traffic model.
            minutes: After which no search begins or goes on.
            load: Offered load in place of the trace's own.
            seed: Of streams and searches.

        Raises:
            ValueError: The trace is too short, or does not suit the fleet; or what decides today
                cannot be compared.
        """
        trace = traffic.trace
        self._begun_s, self._minutes, self._seed = time.monotonic(), minutes, seed
        self.trace, self.first_judged = trace, int(LEARNED_SHARE * trace.num_requests)
        self._learned, judging = trace.split(self.first_judged)
        if judging.num_requests < FEWEST_JUDGING:
            raise ValueError(
                f"a trace of {trace.num_requests} requests leaves {judging.num_requests} to "
                f"judge by; at least {FEWEST_JUDGING} are needed"
            )
        if load is None and trace.mean_rate_per_s < LEAST_RATE_PER_S:
            raise ValueError(
                f"a request every {1 / trace.mean_rate_per_s:.3g} s leaves nothing to decide; are "
                "the arrivals in seconds? --load scales the trace to an offered load"
            )
        provenance = f"first {self._learned.num_requests} of {trace.num_requests} requests"
        # Only searches draw arrivals from the model; without one it may be coarse, and is fast.
        coarse_s = 0.0 if minutes else self._learned.duration_s / _FEW_STEPS
        step_s = max(_MODEL_STEP_S, coarse_s)
        model = fit_own(self._learned, workload.stem, provenance, step_s)
        workload.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")
        self.scenario = own_scenario(traffic.fleet, workload.absolute(), trace, load)
        self._now, self._lineage = traffic.now, traffic.lineage
        if self._now is not None:
            self._now.check(self.scenario, trace)
        self._source = StreamSource(self.scenario)
        self._default = default_rule(self.scenario)
        self._load = load
        self.load = self._source.load_of(judging) if load is None else load
        """Offered load of the last part."""
        self.load_of_one_per_s = self._source.load_of(judging, 1.0)
        """Offered load of one such request a second."""
        self.remarks = [
            *traffic.remarks,
            f"offered load of the last part {self.load:.2f}, "
            f"{self.load / self.load_of_one_per_s:.3g} requests a second",
        ]

    def train(self) -> Found:
        """Play all rules, search, and judge."""
        rule = Choice(self._replay.choice())
        self.remarks.append(f"best of all rules on the first part: {rule.name}")
        searched = self._best_of([*self._searches(rule.name)], rule)
        rows, choice = self._judge(rule, searched)
        return Found(choice, rule, searched, rows, self.remarks)

    def twin_error(self, traffic: Traffic) -> float:
        """How far the simulated mean response is off the measured one, as a fraction.

        Logged decisions are repeated on the replicas of the fleet. A trace with measured response
        times is played under what decides today. NaN: nothing was measured, or it is not known what
        decided.

        Raises:
            ValueError: The log tells of another number of replicas.
        """
        trace, log = traffic.trace, traffic.log
        if traffic.twin_error_fraction is not None:
            return traffic.twin_error_fraction
        if log is not None:
            return repeat_error(self.scenario, [log])
        if trace.response_s is None or self._now is None:
            return math.nan
        streams = trace_streams(self._source, trace, 1, native_time=True)
        (run,) = self._now.runs(self.scenario, streams)
        return mean_error(run.outcomes.response_s, trace.response_s)

    def judging(self, load: float) -> StreamSet:
        """The last part at an offered load, played on behind the end of the first part."""
        return trace_streams(
            self._source, self.trace, 1, native_time=load == self.load and self._load is None,
            load=load, first=self.first_judged,
        )  # fmt: skip

    @cached_property
    def _factors(self) -> list[float]:
        """Factors on the load at which candidates are tuned and chosen."""
        return list(load_factors(self._source).values())

    def _left(self) -> bool:
        """Whether there is time left for searches."""
        return time.monotonic() - self._begun_s < 60.0 * self._minutes

    @cached_property
    def _replay(self) -> Replay:
        """The recorded first part, to play policies on."""
        count = int(np.clip(self._learned.num_requests // _REPLAYED, 1, _MOST_REPLAYED))
        windows = self._recorded(count)
        return Replay(self.scenario, windows.requests, warm_up=windows.warm_up[0])

    def _start(self, rule: str) -> SearchConfig:
        """Begin at what decides today, if its weights are better than a rule; else at the rule."""
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
        if self._now is None or (now := self._now.artifact) is None:
            return config
        if now.metadata.kind != "marginal":
            return config
        runs = (now.decide, self._replay.rules[rule])
        ours, theirs = (self._replay.rows(run)[:, NAMES.index("score")].mean() for run in runs)
        if ours <= theirs:
            return config
        self.remarks.append(f"{self._now.name} decides today, and better: searches begin there")
        return replace(
            config,
            start=tuple(now.arrays["weights"].tolist()),
            order=tuple(order_weights(now.arrays).tolist()),
        )

    def _searches(self, rule: str) -> Iterator[Choice]:
        """Searches that go on from a rule or what decides today, one objective after another."""
        config = self._start(rule)
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
        artifact = search.artifact({}, {**lineage(), **lineage_of(self.scenario), **self._lineage})
        metadata = artifact.metadata.model_copy(update={"num_replicas": None})
        return replace(artifact, metadata=metadata)

    def _best_of(self, searched: Sequence[Choice], rule: Choice) -> Choice | None:
        """What loses to no rule and has the least mean, below that of the best rule; None: none.

        That is the mean over parts of the difference to the best rule's.
        """
        if not searched:
            return None
        judge = Judge(
            self._source, _CHOICE_STREAMS, tuple(dict.fromkeys((rule.name, self._default))),
            self._recorded(1),
        )  # fmt: skip
        rows = [judge(choice.artifact) for choice in searched if choice.artifact is not None]
        refused = sum(bool(row[LOSSES]) for row in rows)
        self.remarks.append(f"{len(searched)} searched, {refused} of them lose to a rule somewhere")
        chosen = choose(rows, must_win=False)
        if chosen is None or float(rows[chosen][CHANGE]) >= 0.0:
            return None
        return searched[chosen]

    def _recorded(self, count: int) -> StreamSet:
        """The first part in so many windows, but for the requests that fill the servers."""
        warm_up = min(_WARM_UP, self._learned.num_requests // 4)
        return trace_streams(
            self._source, self._learned, count, native_time=self._load is None, load=self._load,
            first=warm_up, warm_up=warm_up,
        )  # fmt: skip

    def _judge(self, rule: Choice, searched: Choice | None) -> tuple[list[Row], Choice]:
        now = self._now or rule
        compared = (Choice(self._default), now, rule, *([] if searched is None else [searched]))
        choices = {choice.name: choice for choice in compared}
        rows: list[Row] = []
        ours: list[Row] = []
        for part, factor in (("as recorded", 1.0), ("half of the load", 0.5)):
            streams = self.judging(factor * self.load)
            runs = {name: choice.runs(self.scenario, streams) for name, choice in choices.items()}
            beside = {
                name: measured(self.scenario, streams, runs, name) for name in {rule.name, now.name}
            }
            context: Row = {"part": part, "offered_load": streams.offered_load}
            rows += [{**context, **row} for row in beside[rule.name]]
            if searched is not None:
                ours += [differences[-1] for differences in beside.values()]
        return rows, self._chosen(rows[: len(choices)], ours, choices, rule)

    def _chosen(
        self, rows: Sequence[Row], searched: Sequence[Row], choices: Mapping[str, Choice],
        rule: Choice,
    ) -> Choice:  # fmt: skip
        """What to serve, by the rows at the load and all that compare what a search made."""
        at_load = searched[: len(searched) // 2]
        better = searched and all(float(row["delta_mean_ci_high"]) < 0.0 for row in at_load)
        if better and not any(loses(row) or tail_is_longer(row) for row in searched):
            return choices[CANDIDATE]
        # The differences are those of the default rule, and of what decides today, to the best.
        ahead = [
            row for row in rows
            if row["policy"] != CANDIDATE
            and float(row["delta_mean_ci_high"]) < 0.0
            and not tail_is_longer(row)
        ]  # fmt: skip
        if not ahead:
            return rule
        return choices[str(min(ahead, key=lambda row: float(row["delta_mean_fraction"]))["policy"])]

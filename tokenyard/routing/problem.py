"""Routing as a `Problem`: which replica serves this request.

Bounds see the simulator or the future and are no policies; here they only stand beside them in
a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.artifact import NoChampionError, RegistryLookup
from tokenyard.problem import RULE, Candidate, Problem, Purpose, Row, Runner, Score, StreamOptions
from tokenyard.routing import evaluation
from tokenyard.routing.artifact import (
    PolicyArtifact,
    best_tuned_rule,
    learned_policy,
    rule_for,
)
from tokenyard.routing.bounds import BOUNDS
from tokenyard.routing.policies import BASELINES, is_rule, make_policy, rows_for
from tokenyard.routing.policies.makers import MAKERS_NAMES, rule_of
from tokenyard.routing.policies.order import ORDERS, Ordered, is_order, order_of
from tokenyard.routing.policies.rule_name import RuleName
from tokenyard.routing.policy_file import SUFFIX, PolicyOfFile
from tokenyard.routing.scenario import Scenario, load_scenario, scenario_names
from tokenyard.routing.simulator.run import (
    Run,
    context_of,
    run_compiled,
    run_each,
    run_policy,
    run_rule,
)
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    held_out_streams,
    synthetic_streams,
    trace_streams,
)
from tokenyard.routing.suites import SUITES
from tokenyard.routing.types import RoutingPolicy
from tokenyard.routing.validation import Validation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHAMPION = "champion"
"""The scenario's best policy."""


class Routing(Problem[Scenario, PolicyArtifact, StreamSet, Run]):
    """Streams are requests, paired by stream, or by blocks of one recorded stream's requests."""

    name = "routing"
    suites = SUITES
    default_policies = ("champion",)
    default_baseline = "sed"
    default_streams = 30
    score = Score("score", 1, "s")
    headline = ("mean_response_s", "p99_response_s", "slo_violation_fraction")
    trade_off = ("mean_response_s", "p99_response_s")
    num_validation_streams = 8
    scenario_names = staticmethod(scenario_names)
    load_scenario = staticmethod(load_scenario)
    load_artifact = staticmethod(PolicyArtifact.load)
    measures = staticmethod(lambda scenario: server_model(scenario).measures())
    summary = staticmethod(evaluation.mean_summary)
    samples = staticmethod(evaluation.samples)

    def without_reward(self, scenario: Scenario) -> Scenario:
        """The same without weights, so that hand-written rules run in compiled code."""
        return scenario.without_reward()

    def policies_for(self, scenario: Scenario) -> list[str]:
        """The baselines whose signals its servers have, and the champion."""
        return [*rows_for(scenario.name, server_model(scenario).has), *self.default_policies]

    def candidate(
        self, scenario: Scenario, name: str, registry: RegistryLookup | None = None
    ) -> Candidate[Scenario, StreamSet, Run]:
        """Load a rule, a bound, `champion`, or a policy file (.npz or .py) by path.

        Rules are also known by their makers' names (`tokenyard.routing.policies.makers`).

        Raises:
            ValueError: The name is unknown, or it cannot be run on this scenario; a missing or
                broken artifact gives an ArtifactError, a Python file a PolicyFileError.
        """
        if not is_rule(name):
            name = rule_of(name)
        if is_rule(name):
            # Report missing parameters before a long run.
            make_policy(name, context_of(scenario, np.random.default_rng(0)))
            return Candidate(name, RULE, partial(run_rule, name))
        if name in BOUNDS:
            # One request suffices to refuse a bound that does not exist for the servers.
            BOUNDS[name](scenario, StreamSource(scenario).sample(1, np.random.default_rng(0)), 0)
            return Candidate(name, "bound, no policy", partial(_run_bound, name))
        rule = RuleName.parse(name)
        if str(rule.placement) == CHAMPION and is_order(rule.order):
            order_of(rule, context_of(scenario, np.random.default_rng(0)))
            return _champion_in_order(rule, scenario, registry)
        if name == CHAMPION:
            return _champion(scenario, registry)
        if name.endswith(".npz"):
            artifact, words = _policy_of(scenario, name)
            run = partial(_run_trained, artifact)
            return Candidate(Path(name).stem, words, run)
        if name.endswith(SUFFIX):
            path = Path(name)
            PolicyOfFile(path)
            return Candidate(path.stem, f"the rule of {path}", partial(_run_file, path))
        names = [*BASELINES, CHAMPION, *BOUNDS]
        raise ValueError(
            f"unknown policy {name!r}; give a policy file (.npz or .py) or one of {names}; "
            f"+ and one of {sorted(ORDERS)} may follow a rule or champion; makers' names are "
            f"{', '.join(MAKERS_NAMES)}"
        )

    def trained(self, artifact: PolicyArtifact) -> Runner[Scenario, StreamSet, Run]:
        """What runs a trained policy."""
        return partial(_run_trained, artifact)

    def streams(self, scenario: Scenario, purpose: Purpose, count: int, seed: int) -> StreamSet:
        """Synthetic streams of the scenario's own length."""
        return synthetic_streams(StreamSource(scenario), count, seed, purpose)

    def evaluation_streams(
        self, scenario: Scenario, options: StreamOptions
    ) -> tuple[StreamSet, list[str]]:
        """Windows of a trace, the recorded test part, or synthetic streams.

        Raises:
            ValueError: There is no recorded test part, the trace is too short, or options
                contradict each other.
        """
        if options.load is not None and options.native_time:
            raise ValueError("--load scales time and --native-time keeps it: give one of them")
        if options.native_time and options.trace is None:
            raise ValueError("--native-time keeps the time of a trace: give one with --trace")
        if options.trace is not None and options.source is not None:
            raise ValueError("--trace and --source name two kinds of traffic: give one of them")
        streams, notes = _find_streams(StreamSource(scenario), options)
        load, warm_load = f"offered load: {streams.offered_load:.2f}", streams.warm_load
        if not math.isnan(warm_load):
            load += f", as if nothing were cached; {warm_load:.2f}, as if all repeated were"
        return streams, [
            *notes,
            load,
            f"output length known to the router: {scenario.output_length}",
        ]

    def overload(self, scenario: Scenario, streams: StreamSet) -> float | None:
        """Load above 1, unless much of the prompts is cached, or whoever waits long is given up."""
        load, fleet = streams.offered_load, scenario.fleet
        ends = fleet is not None and fleet.gives_up
        return load if load > 1.0 and math.isnan(streams.warm_load) and not ends else None

    def validation(
        self, scenario: Scenario, num_streams: int
    ) -> Callable[[PolicyArtifact], dict[str, float]]:
        """What decides all streams together, cheap enough for every iteration of training."""
        return Validation(StreamSource(scenario), num_streams)

    def best_tuned_rule(self, scenario: Scenario) -> str | None:
        """Rule with the smallest worst regret over the loads, on training streams."""
        return best_tuned_rule(scenario.name)

    def gate(self, scenario: Scenario, num_streams: int) -> Callable[[PolicyArtifact], list[Row]]:
        """Several loads and recorded training requests, beside the rules that matter."""
        # Only whoever promotes a policy needs it.
        from tokenyard.routing.gate import Gate, gate_streams

        source = StreamSource(scenario)
        compare_at_gate = Gate(self, source, parts=gate_streams(source, num_streams))
        return lambda artifact: compare_at_gate(
            lambda streams: run_compiled(scenario, streams, artifact.decide)
        )

    def figures(
        self,
        scenario: Scenario,
        streams: StreamSet,
        runs: Mapping[str, Sequence[Run]],
        rows: Sequence[Row],
    ) -> dict[str, Figure]:
        """The figures of the paper."""
        # matplotlib takes a second to import, and most runs draw nothing.
        from tokenyard.routing.figures import draw_evaluation

        credit = f"Traffic: {streams.origin}"
        if streams.is_synthetic:
            credit += f"\nWorkload model fitted to {StreamSource(scenario).model.provenance}"
        return draw_evaluation(scenario, runs, rows, credit)


PROBLEM = Routing()


def _find_streams(source: StreamSource, options: StreamOptions) -> tuple[StreamSet, list[str]]:
    if options.trace is not None:
        trace, skipped = options.reading.read(options.trace)
        streams = trace_streams(source, trace, options.count, options.native_time, options.load)
        return streams, [f"trace {options.trace}: {skipped} malformed rows skipped"]
    held_out = None if options.source == "synthetic" else held_out_streams(source, options.load)
    if held_out is not None:
        return held_out, ["intervals: block bootstrap of one recorded stream, none below 30 blocks"]
    missing = "no recorded test part of this scenario was found (TOKENYARD_DATA)"
    if options.source == "held-out":
        raise ValueError(f"--source held-out: {missing}")
    needs_no_note = source.scenario.held_out_trace is None or options.source
    notes = [] if needs_no_note else [f"synthetic: {missing}"]
    factor = 1.0 if options.load is None else options.load / source.offered_load
    return synthetic_streams(source, options.count, options.seed, load_factor=factor), notes


def _champion(
    scenario: Scenario, registry: RegistryLookup | None
) -> Candidate[Scenario, StreamSet, Run]:
    """The champion; where no policy was trained, the rule that decides in its place."""
    try:
        artifact, words = _policy_of(scenario, registry=registry)
    except NoChampionError:
        rule = rule_for(scenario)
        return Candidate(CHAMPION, f"the rule {rule}", partial(run_rule, rule), rule)
    return Candidate(CHAMPION, words, partial(_run_trained, artifact))


def _policy_of(
    scenario: Scenario, path: str | None = None, registry: RegistryLookup | None = None
) -> tuple[PolicyArtifact, str]:
    """Return a trained policy that fits the scenario, and a description of its source.

    Raises:
        NoChampionError: There is none; `rule_for` names the rule that replaces it.
    """
    artifact, source = PolicyArtifact.champion(scenario.name, path, registry)
    metadata = artifact.metadata
    if metadata.num_replicas not in (None, scenario.num_servers):
        raise ValueError(
            f"{source} decides between {metadata.num_replicas} replicas; "
            f"scenario {scenario.name!r} has {scenario.num_servers}"
        )
    made = f"trained by {metadata.trainer} on {metadata.scenario}"
    return artifact, f"{source}, {made}, {artifact.sha256}"


def _champion_in_order(
    name: RuleName, scenario: Scenario, registry: RegistryLookup | None
) -> Candidate[Scenario, StreamSet, Run]:
    """Return the champion's placement with another order."""
    try:
        artifact, words = _policy_of(scenario, registry=registry)
    except NoChampionError:
        rule = str(RuleName.parse(rule_for(scenario)).ordered(name.order))
        return Candidate(str(name), f"the rule {rule}", partial(run_rule, rule), rule)
    return Candidate(str(name), words, partial(_run_in_order, name, artifact))


def _run_in_order(
    name: RuleName, artifact: PolicyArtifact, scenario: Scenario, streams: StreamSet, seed: int
) -> list[Run]:
    def factory(rng: np.random.Generator) -> RoutingPolicy:
        return Ordered(_made(artifact, scenario), order_of(name, context_of(scenario, rng)))

    return run_policy(scenario, streams, factory, seed)


def _made(artifact: PolicyArtifact, scenario: Scenario) -> RoutingPolicy:
    diurnal = scenario.arrivals.diurnal
    return learned_policy(artifact, diurnal.started_at if diurnal else None)


def _run_trained(
    artifact: PolicyArtifact, scenario: Scenario, streams: StreamSet, seed: int
) -> list[Run]:
    return run_policy(scenario, streams, lambda rng: _made(artifact, scenario), seed)


def _run_file(path: Path, scenario: Scenario, streams: StreamSet, seed: int) -> list[Run]:
    return run_policy(scenario, streams, lambda rng: PolicyOfFile(path), seed)


def _run_bound(name: str, scenario: Scenario, streams: StreamSet, seed: int) -> list[Run]:
    return run_each(scenario, streams, [BOUNDS[name](scenario, s, seed) for s in streams.requests])

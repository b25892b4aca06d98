"""Studies of regions beside the paper's: loads, prediction accuracy, ablation, failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tokenyard.evaluation import compare, run_candidates
from tokenyard.problem import Row
from tokenyard.regions.forecast import DemandForecaster, NoisyOracle, fit_seasonal, sd_for_accuracy
from tokenyard.regions.problem import PROBLEM, episodes
from tokenyard.regions.scenario import RegionFailure, RegionScenario

Study = Literal["loads", "accuracy", "ablation", "failures"]
LOADS = (0.6, 0.8, 0.95)
ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.9)
FAILURES = {
    "none": (),
    "region down for 15 minutes": (
        RegionFailure(kind="region_down", start_slot=200, num_slots=20),
    ),
    "half of a region's capacity lost for 15 minutes": (
        RegionFailure(kind="capacity_lost", start_slot=200, num_slots=20),
    ),
    "all links five times slower for 15 minutes": (
        RegionFailure(kind="links_slow", start_slot=200, num_slots=20),
    ),
}


@dataclass(frozen=True)
class Case:
    """One setting of a study."""

    name: str
    scenario: RegionScenario
    policies: tuple[str, ...]
    forecaster: DemandForecaster | None = None


def cases(
    study: Study, scenario: RegionScenario, policies: tuple[str, ...], seed: int
) -> Iterator[Case]:
    """The settings that a study compares; `ablation` takes the first and the last policy."""
    if study == "loads":
        for load in LOADS:
            demand = scenario.demand.model_copy(update={"load": load})
            yield Case(f"load {load:g}", scenario.model_copy(update={"demand": demand}), policies)
    elif study == "failures":
        for name, failures in FAILURES.items():
            yield Case(name, scenario.model_copy(update={"failures": failures}), policies)
    elif study == "accuracy":
        streams = PROBLEM.streams(scenario, "evaluation", 1, seed + 1).streams
        for accuracy in ACCURACIES:
            sd = sd_for_accuracy(accuracy, streams)
            oracle = NoisyOracle(sd, scenario.forecast_slots, seed)
            yield Case(f"accuracy {accuracy:g}", scenario, policies, oracle)
    else:
        for rule in ("earliest", "score"):
            search = rule == "score"
            micro = scenario.micro.model_copy(update={"rule": rule, "local_search": search})
            changed = scenario.model_copy(update={"micro": micro})
            yield Case(f"micro {rule}", changed, (policies[0], policies[-1]))


def run_case(case: Case, num_streams: int, seed: int) -> list[Row]:
    """Run the policies of one setting; differences are to the first."""
    scenario, forecaster = case.scenario, case.forecaster or fit_seasonal(case.scenario)
    candidates = [PROBLEM.candidate(scenario, name) for name in case.policies]
    streams = episodes(scenario, "evaluation", num_streams, seed, forecaster)
    runs = run_candidates(candidates, scenario, streams, seed)
    rows = compare(PROBLEM, scenario, streams, runs, case.policies[0])
    return [{"case": case.name, **row} for row in rows]

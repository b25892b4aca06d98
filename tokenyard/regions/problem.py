"""Regions as a `Problem`: what share of each region's demand goes where, which servers are on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tokenyard.artifact import NoChampionError, RegistryLookup
from tokenyard.problem import RULE, Candidate, Drawn, Measure, Problem, Purpose, Runner, Score
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.artifact import RegionArtifact, learned_regions
from tokenyard.regions.demand import RegionStream, sample_stream, stream_rng
from tokenyard.regions.evaluation import MEASURES, measure
from tokenyard.regions.forecast import DemandForecaster, fit_seasonal
from tokenyard.regions.policies import BEST_RULE, REGION_BASELINES, make_region_policy
from tokenyard.regions.scenario import RegionScenario, load_regions, region_names
from tokenyard.regions.simulator.run import run_regions
from tokenyard.regions.types import RegionPolicy

SUITES = {"regions": ("abilene", "polska", "gabriel", "cost266")}
Measured = dict[str, float]
"""What `measure` says of one episode: all that is kept of a run, whose tasks are many."""
_PARTS = {"validation": "validation", "evaluation": "test"}
"""Words of `stream_rng` for the purposes of streams."""


@dataclass(frozen=True)
class Episodes(Drawn[RegionStream]):
    """Independent episodes, and the forecaster whose predictions every policy is shown."""

    forecaster: DemandForecaster


class Regions(Problem[RegionScenario, RegionArtifact, Episodes, Measured]):
    """Streams are episodes of a day's part, paired by episode."""

    name = "regions"
    suites = SUITES
    default_policies = tuple(REGION_BASELINES)
    default_baseline = BEST_RULE
    score = Score("total_cost", -1, "$ an episode")
    headline = ("total_cost", "energy_cost", "switching_cost", "lateness_cost", "mean_response_s")
    trade_off = ("total_cost", "mean_response_s")
    scenario_names = staticmethod(region_names)
    load_scenario = staticmethod(load_regions)
    load_artifact = staticmethod(RegionArtifact.load)
    rivals = (
        "skylb", "sdib", "round_robin", "prox_ot_forecast", "prox_ot_forecast_live",
        "prox_ot_forecast_live_cost", "receding_horizon", "receding_horizon_live",
        "receding_horizon_live_cost",
    )  # fmt: skip

    def candidate(
        self, scenario: RegionScenario, name: str, registry: RegistryLookup | None = None
    ) -> Candidate[RegionScenario, Episodes, Measured]:
        """A rule, `champion` or the path of a policy file (.npz).

        Raises:
            ValueError: The name is unknown, or the policy is missing or broken.
        """
        make, source, rule = policy_maker(scenario, name, registry)
        return Candidate(name, source, partial(_run, make), rule)

    def best_tuned_rule(self, scenario: RegionScenario) -> str | None:
        """The rule that ships."""
        return BEST_RULE

    def trained(self, artifact: RegionArtifact) -> Runner[RegionScenario, Episodes, Measured]:
        """What runs a trained policy."""
        return partial(_run, partial(_learned, artifact))

    def streams(
        self, scenario: RegionScenario, purpose: Purpose, count: int, seed: int
    ) -> Episodes:
        """Episodes of the scenario's length, with the seasonal forecaster fitted in training."""
        return episodes(scenario, purpose, count, seed, fit_seasonal(scenario))

    def measures(self, scenario: RegionScenario) -> Sequence[Measure]:
        """Cost and its parts, response and its parts, violations."""
        return MEASURES


PROBLEM = Regions()


def episodes(
    scenario: RegionScenario, purpose: Purpose, count: int, seed: int, forecaster: DemandForecaster
) -> Episodes:
    """Draw episodes that every policy lives through with a forecaster of one's own."""
    drawn = [sample_stream(scenario, stream_rng(seed, _PARTS[purpose], i)) for i in range(count)]
    described = (
        f"{count} streams of {scenario.num_slots} slots, load {scenario.demand.load:g}, "
        f"{scenario.num_servers} servers"
    )
    return Episodes(drawn, described, forecaster)


Maker = Callable[[RegionScenario], RegionPolicy]
"""Makes a policy anew for every stream: some remember."""


def policy_maker(
    scenario: RegionScenario, name: str, registry: RegistryLookup | None = None
) -> tuple[Maker, str, str | None]:
    """What makes the policies of a candidate, and its `source` and `rule`.

    Raises:
        ValueError: The name is unknown, or the policy is missing or broken.
    """
    if name in REGION_BASELINES:
        return partial(make_region_policy, name), RULE, None
    if name != PROBLEM.learned and not name.endswith(".npz"):
        raise ValueError(
            f"unknown regional policy {name!r}; give a policy file (.npz) or one of "
            f"{[*REGION_BASELINES, PROBLEM.learned]}"
        )
    path = None if name == PROBLEM.learned else name
    try:
        artifact, source = RegionArtifact.champion(scenario.name, path, registry)
    except NoChampionError:
        return partial(make_region_policy, BEST_RULE), f"best tuned rule, {BEST_RULE}", BEST_RULE
    words = f"{source}, trained by {artifact.metadata.trainer}, {artifact.sha256}"
    return partial(_learned, artifact), words, None


def _learned(artifact: RegionArtifact, scenario: RegionScenario) -> RegionPolicy:
    return learned_regions(artifact, ActivationRule.from_scenario(scenario))


def _run(make: Maker, scenario: RegionScenario, among: Episodes, seed: int) -> list[Measured]:
    return [
        measure(run_regions(scenario, stream, make(scenario), among.forecaster))
        for stream in among.streams
    ]

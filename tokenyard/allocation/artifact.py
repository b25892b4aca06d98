"""The exported allocation policy: its kinds, and which one is the champion.

One npz file (`tokenyard.artifact`): the scenario (pool, model, SLOs), the forecaster and what was
learned. `KINDS` is the one table of what there is to know of a kind. To add one, write its class in
`tokenyard.allocation.policies.learned` and its line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenyard.allocation.forecast import Forecaster, scenario_forecaster
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.policies.learned import ForecastPlanner, NetworkPlan, ValueTable
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.types import AllocationPolicy
from tokenyard.artifact import Artifact, Kind, NoChampionError, RegistryLookup
from tokenyard.config import FrozenModel
from tokenyard.network import Network, check_names, check_only_network


class AllocationMetadata(FrozenModel):
    """What an allocation policy is, where it comes from, and what it decides for."""

    format_version: Literal[1] = 1
    problem: Literal["allocation"] = "allocation"
    kind: Literal["planner", "table", "network"]
    """`planner`: that of `tokenyard.allocation.planner`, whose forecaster was learned; no arrays.
    `table`: a plan by backlog, part of the day, bin of demand and plan in force, arrays
    `edges_per_s` and `best`. `network`: from observations to what is added to the planner's
    preference for each shape, as `tokenyard.network.Network` has it."""
    scenario: AllocationScenario
    trainer: str
    """Algorithm that made it."""
    forecaster: Forecaster | None = None
    """Needed by planners and networks."""
    planner_scale: float = 0.0
    """Networks: what the planner's costs lower a preference by."""
    metrics: Mapping[str, float] = {}
    """What it scored when it was exported."""
    lineage: Mapping[str, str] = {}
    """Hashes and names of what it was made from."""


@dataclass(frozen=True, eq=False)
class AllocationArtifact(Artifact[AllocationMetadata]):
    """A trained allocation policy.

    Raises:
        ValueError: The arrays do not fit the metadata.
    """

    METADATA = AllocationMetadata

    def check(self) -> None:
        """Check what the kind needs."""
        KINDS[self.metadata.kind].check(self)

    @property
    def forecaster(self) -> Forecaster:
        """Of demand.

        Raises:
            ValueError: A kind that needs one has none.
        """
        if self.metadata.forecaster is None:
            raise ValueError(f"a {self.metadata.kind} needs a forecaster in its metadata")
        return self.metadata.forecaster


def _check_planner(artifact: AllocationArtifact) -> None:
    check_names(artifact.arrays, [])
    _ = artifact.forecaster


def _check_table(artifact: AllocationArtifact) -> None:
    check_names(artifact.arrays, ["edges_per_s", "best"])
    for name, dimensions in (("edges_per_s", 1), ("best", 4)):
        if artifact.arrays[name].ndim != dimensions:
            raise ValueError(f"array {name!r} must have {dimensions} dimensions")


def _check_network(artifact: AllocationArtifact) -> None:
    check_only_network(artifact.arrays)
    _ = artifact.forecaster


def _network_plan(artifact: AllocationArtifact) -> NetworkPlan:
    metadata, network = artifact.metadata, Network.from_arrays(artifact.arrays)
    return NetworkPlan(metadata.scenario, artifact.forecaster, network, metadata.planner_scale)


def _table(artifact: AllocationArtifact) -> ValueTable:
    arrays: Mapping[str, Any] = artifact.arrays
    return ValueTable(artifact.metadata.scenario, arrays["edges_per_s"], arrays["best"])


KINDS: dict[str, Kind[AllocationArtifact]] = {
    "planner": Kind(
        check=_check_planner,
        policy=lambda artifact: ForecastPlanner(artifact.metadata.scenario, artifact.forecaster),
    ),
    "table": Kind(check=_check_table, policy=_table),
    "network": Kind(check=_check_network, policy=_network_plan),
}
"""Kind of an artifact to what there is to know of it."""


def learned_for(
    artifact: AllocationArtifact, scenario: AllocationScenario, source: str
) -> AllocationPolicy:
    """Make the policy of an artifact for a scenario that may not be the one it was trained on.

    Raises:
        ValueError: It decides between other plans.
    """
    theirs = artifact.metadata.scenario
    if plan_table(theirs).plans != plan_table(scenario).plans:
        raise ValueError(
            f"{source} decides between the plans of scenario {theirs.name!r}, which are not those "
            f"of {scenario.name!r}"
        )
    return learned_allocation(artifact)


def learned_allocation(artifact: AllocationArtifact) -> AllocationPolicy:
    """Make the policy of an artifact."""
    policy: AllocationPolicy = KINDS[artifact.metadata.kind].policy(artifact)
    return policy


def champion_or_planner(
    scenario: AllocationScenario,
    path: str | Path | None = None,
    registry: RegistryLookup | None = None,
) -> tuple[AllocationArtifact, str]:
    """The champion, and where it was found; where there is none, the planner as it is.

    Raises:
        ArtifactError: What was found cannot be used.
    """
    try:
        return AllocationArtifact.champion(scenario.name, path, registry)
    except NoChampionError:
        metadata = AllocationMetadata(
            kind="planner", scenario=scenario, trainer="regression",
            forecaster=scenario_forecaster(scenario),
        )  # fmt: skip
        return AllocationArtifact(metadata, {}), "no champion, but the planner"

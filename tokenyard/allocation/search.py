"""Direct policy search over the twelve parameters of the forecast planner.

The cross-entropy method (`tokenyard.cross_entropy`) over stretches of the training part: all
candidates of a generation live through the same days with the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tokenyard.allocation.artifact import AllocationArtifact, AllocationMetadata
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.forecast import scenario_forecaster
from tokenyard.allocation.planner import NUM_PARAMETERS, make_planner
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.cross_entropy import CrossEntropy
from tokenyard.provenance import lineage
from tokenyard.types import FloatArray


@dataclass(frozen=True)
class AllocationSearchConfig:
    """How wide and how long the search looks."""

    population: int = 24
    num_elites: int = 5
    days_per_generation: int = 8
    initial_std: tuple[float, ...] = (
        0.02, 0.1, 0.1, 0.2, 0.02, 0.02, 0.02, 0.01, 0.02, 0.04, 0.04, 0.2,
    )  # fmt: skip
    """Spread of the first generation per parameter: each changes costs by about one percent."""
    noise: float = 0.2
    """Share of the first spread that is added to the elites' in the first generation; fades to
    nothing over the search."""
    num_generations: int = 12
    validation_streams: int = 2
    """Draws of noise over the whole training part on which the centre is at last judged."""


class AllocationSearch(CrossEntropy):
    """A search over the planner's parameters for one scenario."""

    def __init__(
        self,
        scenario: AllocationScenario,
        config: AllocationSearchConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Start at the planner as it is: all parameters zero."""
        self.scenario = scenario
        self.config = config = config or AllocationSearchConfig()
        super().__init__(
            np.zeros(NUM_PARAMETERS), np.array(config.initial_std), seed=seed,
            population=config.population, num_elites=config.num_elites, noise=config.noise,
            noise_unit=np.array(config.initial_std), num_generations=config.num_generations,
        )  # fmt: skip
        self._source, self._planner = demand_source(scenario), make_planner(scenario)

    @property
    def env_steps(self) -> int:
        """Slots lived through so far, over all candidates."""
        config = self.config
        per_candidate = config.days_per_generation * self.scenario.slots_per_day
        return self.generation * (config.population + 1) * per_candidate

    def step(self) -> dict[str, float]:
        """Run one generation and return its costs relative to the planner as it is."""
        rng = self.rng()
        slots = self.config.days_per_generation * self.scenario.slots_per_day
        runner = StreamRunner(self.scenario, self._source.episode(slots, rng))
        candidates = self.draw(rng)
        baseline = self._cost(runner, np.zeros(NUM_PARAMETERS))
        costs = np.array([self._cost(runner, theta) for theta in candidates])
        self.update(candidates, costs)
        return {
            "cost_minus_planner": float(costs[0] - baseline),
            "best_cost_minus_planner": float(costs.min() - baseline),
            "mean_std": float(self.std.mean()),
        }

    def _cost(self, runner: StreamRunner, theta: FloatArray) -> float:
        return -float(runner.run_planner(self._planner, theta).column(REWARD).mean())

    def validate(self, theta: FloatArray | None = None) -> float:
        """Mean cost per slot over the training part with noise that no search saw.

        Args:
            theta: Parameters; None: the centre of the search.
        """
        runners = [
            StreamRunner(self.scenario, self._source.train(1000 + i))
            for i in range(self.config.validation_streams)
        ]
        centre = self.mean if theta is None else theta
        return float(np.mean([self._cost(runner, centre) for runner in runners]))

    def artifact(
        self, metrics: Mapping[str, float] | None = None, lineage: Mapping[str, str] | None = None
    ) -> AllocationArtifact:
        """Export the centre of the search."""
        metadata = AllocationMetadata(
            kind="planner",
            scenario=self.scenario,
            trainer="policy_search",
            forecaster=scenario_forecaster(self.scenario),
            metrics=metrics or {},
            lineage=lineage or {},
        )
        return AllocationArtifact(metadata, {"theta": self.mean.copy()})


@dataclass(frozen=True)
class FinishedSearch:
    """A search at its end."""

    search: AllocationSearch
    cost: float
    """Of its centre in validation, per slot."""


def run_search(
    scenario: AllocationScenario, config: AllocationSearchConfig, seed: int
) -> FinishedSearch:
    """Search to the last generation, and validate."""
    search = AllocationSearch(scenario, config, seed)
    for _ in range(config.num_generations):
        search.step()
    return FinishedSearch(search, search.validate())


def export_best(found: Sequence[FinishedSearch]) -> AllocationArtifact:
    """The planner of least cost in validation.

    It is the one that they began with, where none is better.
    """
    start = found[0].search.validate(np.zeros(NUM_PARAMETERS))
    best = min(found, key=lambda one: one.cost)
    search, cost = best.search, best.cost
    if cost > start:
        search.mean, cost = np.zeros(NUM_PARAMETERS), start
    scored = {"validation_cost_per_slot": cost, "planner_cost_per_slot": start}
    made_by = {**lineage(), "seed": str(search.seed), "env_steps": str(search.env_steps)}
    return search.artifact(scored, made_by)

"""Direct policy search over the parameters of the regional mix.

The cross-entropy method of `tokenyard.rl.policy_search`, over several clusters at once: all
candidates of a generation live through the same streams, and every cost counts relative to that of
the start, the mix with all parameters zero, on the same stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenyard.policies.regions import LearnedMix
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.artifact import RegionArtifact, RegionMetadata
from tokenyard.regions.demand import RegionStream, sample_stream, stream_rng
from tokenyard.regions.forecast import DemandForecaster, fit_seasonal
from tokenyard.regions.mixing import COSTS, NUM_PARAMETERS
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions_evaluation import measure
from tokenyard.sim.regions_run import run_regions
from tokenyard.types import FloatArray

_WEIGHTS = {
    "total_cost": 1.0,
    "mean_response_s": 1.0,
    "energy_cost": 1.0,
    "overhead_fraction": 0.1,
    "load_balance": -1.0,
}


def _initial_std() -> tuple[float, ...]:
    return (0.7, 0.3, 0.7, 0.5, 0.3) + (0.4,) * (NUM_PARAMETERS - len(COSTS))


@dataclass(frozen=True)
class RegionSearchConfig:
    """How wide and how long the search looks."""

    weights: Mapping[str, float] = field(default_factory=lambda: dict(_WEIGHTS))
    """Of the measures over those of the start, in what the search makes small."""
    population: int = 14
    num_elites: int = 4
    slots: int = 160
    """Length of training episodes."""
    noise: float = 0.2
    """Share of the first spread that is added to the elites' in the first generation; fades to
    nothing over the search."""
    num_generations: int = 8


class RegionSearch:
    """A search that advances one generation at a time and can be stopped and resumed."""

    def __init__(
        self,
        scenarios: Sequence[RegionScenario],
        config: RegionSearchConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Start at the mix as it is: all parameters zero."""
        self.config = config or RegionSearchConfig()
        self.seed, self.generation = seed, 0
        self._scenarios = list(scenarios)
        self._short = [one.model_copy(update={"num_slots": self.config.slots}) for one in scenarios]
        self._forecasters = [fit_seasonal(one) for one in scenarios]
        self.mean: FloatArray = np.zeros(NUM_PARAMETERS)
        self.std: FloatArray = np.array(_initial_std())

    @property
    def env_steps(self) -> int:
        """Slots lived through so far, over all candidates."""
        per_candidate = len(self._scenarios) * self.config.slots
        return self.generation * (self.config.population + 1) * per_candidate

    def step(self) -> dict[str, float]:
        """Run one generation and return its costs relative to the start."""
        config = self.config
        rng = np.random.default_rng([self.seed, self.generation])
        candidates = rng.normal(self.mean, self.std, (config.population, NUM_PARAMETERS))
        candidates[0] = self.mean
        costs = np.zeros(config.population)
        for scenario, forecaster in zip(self._short, self._forecasters, strict=True):
            stream = sample_stream(scenario, stream_rng(self.seed, "training", self.generation))
            base = self._measure(np.zeros(NUM_PARAMETERS), scenario, stream, forecaster)
            for i, theta in enumerate(candidates):
                ours = self._measure(theta, scenario, stream, forecaster)
                costs[i] += self.relative_cost(ours, base) / len(self._short)
        elites = candidates[np.argsort(costs, kind="stable")[: config.num_elites]]
        self.generation += 1
        fade = max(0.0, 1.0 - self.generation / config.num_generations)
        self.mean = elites.mean(axis=0)
        self.std = elites.std(axis=0) + config.noise * fade * np.array(_initial_std())
        return {
            "cost_over_start": float(costs[0]),
            "best_cost_over_start": float(costs.min()),
            "mean_std": float(self.std.mean()),
        }

    def relative_cost(self, ours: Mapping[str, float], base: Mapping[str, float]) -> float:
        """Weighted sum of measures over those of the start, over the same sum of the start."""
        weights = self.config.weights
        total = sum(w * ours[key] / max(base[key], 1e-12) for key, w in weights.items())
        return total / sum(weights.values())

    def _measure(
        self,
        theta: FloatArray,
        scenario: RegionScenario,
        stream: RegionStream,
        forecaster: DemandForecaster,
    ) -> dict[str, float]:
        policy = LearnedMix(theta, ActivationRule.of(scenario))
        return measure(run_regions(scenario, stream, policy, forecaster))

    def validate(self, theta: FloatArray | None = None, index: int = 0) -> float:
        """Mean relative cost over whole episodes that no search saw.

        Args:
            theta: Parameters; None: the centre of the search.
            index: Which episode of the validation part.
        """
        centre = self.mean if theta is None else theta
        costs = []
        for scenario, forecaster in zip(self._scenarios, self._forecasters, strict=True):
            stream = sample_stream(scenario, stream_rng(self.seed, "validation", index))
            base = self._measure(np.zeros(NUM_PARAMETERS), scenario, stream, forecaster)
            costs.append(
                self.relative_cost(self._measure(centre, scenario, stream, forecaster), base)
            )
        return float(np.mean(costs))

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on as if nothing had happened."""
        return {
            "seed": self.seed,
            "generation": self.generation,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state`."""
        self.seed, self.generation = state["seed"], state["generation"]
        self.mean, self.std = np.array(state["mean"]), np.array(state["std"])

    def artifact(
        self, metrics: Mapping[str, float] | None = None, lineage: Mapping[str, str] | None = None
    ) -> RegionArtifact:
        """Export the centre of the search."""
        metadata = RegionMetadata(
            scenarios=tuple(one.name for one in self._scenarios),
            trainer="policy_search",
            metrics=metrics or {},
            lineage=lineage or {},
        )
        return RegionArtifact(metadata, {"theta": self.mean.copy()})

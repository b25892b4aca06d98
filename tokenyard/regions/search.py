"""Direct policy search over the parameters of the regional mix.

The cross-entropy method (`tokenyard.cross_entropy`) over several clusters at once: all
candidates of a generation live through the same streams. What it makes small is the total cost over
that of the start, the policy with all parameters zero, plus what is missing to given margins over a
rival that decides without plans.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tokenyard.cross_entropy import CrossEntropy
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.artifact import RegionArtifact, RegionMetadata
from tokenyard.regions.demand import RegionStream, sample_stream, stream_rng
from tokenyard.regions.evaluation import measure
from tokenyard.regions.forecast import DemandForecaster, fit_seasonal
from tokenyard.regions.mixing import NUM_PARAMETERS
from tokenyard.regions.policies import make_region_policy
from tokenyard.regions.policies.learned import LearnedMix
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.simulator.run import run_regions
from tokenyard.regions.types import RegionPolicy
from tokenyard.types import FloatArray

_MARGINS = {
    "mean_response_s": -0.15,
    "energy_cost": -0.20,
    "overhead_fraction": -0.76,
    "load_balance": 0.06,
}
"""By how much to differ from the rival: the greatest of the TORTA paper's margins over SkyLB on its
four topologies (arXiv 2507.10259v2, figures 8 to 10), and something on top."""
INITIAL_STD = np.concatenate(
    [(0.7, 0.7, 0.5, 0.3, 0.8, 0.4, 0.4, 0.4, 0.4), np.full(NUM_PARAMETERS - 9, 0.4)]
)
"""How far from the start the first generation looks, by parameter."""


@dataclass(frozen=True)
class RegionSearchConfig:
    """How wide and how long the search looks."""

    rival: str = "skylb"
    margins: Mapping[str, float] = field(default_factory=lambda: dict(_MARGINS))
    """Wanted relative differences to the rival by measure; the sign says which way is good."""
    hinge: float = 5.0
    """Cost of a margin that is missed by its whole rival, in units of the start's total cost."""
    population: int = 24
    num_elites: int = 6
    slots: int = 160
    """Length of training episodes."""
    spread: float = 1.0
    """Of the first generation, as a share of `INITIAL_STD`."""
    noise: float = 0.2
    """Share of the first spread that is added to the elites' in the first generation; fades to
    nothing over the search."""
    num_generations: int = 24


class RegionSearch(CrossEntropy):
    """A search over the parameters of the mix for one or several clusters."""

    def __init__(
        self,
        scenarios: Sequence[RegionScenario],
        config: RegionSearchConfig | None = None,
        seed: int = 0,
        start: FloatArray | None = None,
    ) -> None:
        """Start at the parameters `start`, by default all zero, and measure costs against zero."""
        self.config = config = config or RegionSearchConfig()
        self._scenarios = list(scenarios)
        self._short = [one.model_copy(update={"num_slots": config.slots}) for one in scenarios]
        self._forecasters = [fit_seasonal(one) for one in scenarios]
        super().__init__(
            np.zeros(NUM_PARAMETERS) if start is None else start, config.spread * INITIAL_STD,
            population=config.population, num_elites=config.num_elites, seed=seed,
            noise=config.noise * config.spread, noise_unit=INITIAL_STD,
            num_generations=config.num_generations,
        )  # fmt: skip

    @property
    def env_steps(self) -> int:
        """Slots lived through so far, over all candidates."""
        per_candidate = len(self._scenarios) * self.config.slots
        return self.generation * (self.config.population + 2) * per_candidate

    def step(self) -> dict[str, float]:
        """Run one generation and return its costs relative to the start."""
        candidates = self.draw(self.rng())
        costs = np.zeros(len(candidates))
        for scenario, forecaster in zip(self._short, self._forecasters, strict=True):
            stream = sample_stream(scenario, stream_rng(self.seed, "training", self.generation))
            judge = self._judge(scenario, stream, forecaster)
            for i, theta in enumerate(candidates):
                costs[i] += judge(theta) / len(self._short)
        self.update(candidates, costs)
        return {
            "cost_over_start": float(costs[0]),
            "best_cost_over_start": float(costs.min()),
            "mean_std": float(self.std.mean()),
        }

    def _judge(
        self, scenario: RegionScenario, stream: RegionStream, forecaster: DemandForecaster
    ) -> Callable[[FloatArray], float]:
        """Return what gives the cost of parameters on a stream."""

        def measured(policy: RegionPolicy) -> dict[str, float]:
            return measure(run_regions(scenario, stream, policy, forecaster))

        rule = ActivationRule.from_scenario(scenario)
        start = measured(LearnedMix(np.zeros(NUM_PARAMETERS), rule))
        rival = measured(make_region_policy(self.config.rival, scenario))
        return lambda theta: self.cost(measured(LearnedMix(theta, rule)), start, rival)

    def cost(
        self, ours: Mapping[str, float], start: Mapping[str, float], rival: Mapping[str, float]
    ) -> float:
        """Total cost over the start's, and what is missing to the margins over the rival."""
        missing = 0.0
        for key, margin in self.config.margins.items():
            difference = ours[key] / max(rival[key], 1e-12) - 1.0
            missing += max(0.0, math.copysign(1.0, margin) * (margin - difference))
        return ours["total_cost"] / max(start["total_cost"], 1e-12) + self.config.hinge * missing

    def validate(self, theta: FloatArray | None = None, index: int = 0) -> float:
        """Mean cost over whole episodes that no search saw.

        Args:
            theta: Parameters; None: the centre of the search.
            index: Which episode of the validation part.
        """
        centre = self.mean if theta is None else theta
        costs = []
        for scenario, forecaster in zip(self._scenarios, self._forecasters, strict=True):
            stream = sample_stream(scenario, stream_rng(self.seed, "validation", index))
            costs.append(self._judge(scenario, stream, forecaster)(centre))
        return float(np.mean(costs))

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


def go_on(search: RegionSearch, path: Path) -> Iterator[dict[str, float]]:
    """Search to the last generation, and yield what each found.

    Args:
        search: Goes on with the state at `path`, where there is one.
        path: Where its state is kept.
    """
    if path.exists():
        search.restore(json.loads(path.read_text(encoding="utf-8")))
    while search.generation < search.config.num_generations:
        found = search.step()
        path.write_text(json.dumps(search.state()), encoding="utf-8")
        yield found

"""A search over the knobs of regional rules.

The cross-entropy method (`tokenyard.cross_entropy`). Every generation draws a layout of one of the
scenarios and a stream, and all its candidates live through them. What it makes small is total cost
over that of the start, plus mean response over that of the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tokenyard.cross_entropy import CrossEntropy
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.demand import RegionStream, draw_layout, sample_stream, stream_rng
from tokenyard.regions.evaluation import measure
from tokenyard.regions.forecast import DemandForecaster, fit_seasonal
from tokenyard.regions.policies import REGION_BASELINES
from tokenyard.regions.policies.rules import Knobs
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.simulator.run import run_regions
from tokenyard.regions.types import LiveCost, RegionPolicy
from tokenyard.types import FloatArray

_CAPS, _MOST_SMOOTHING, _MOST_LOG = (0.3, 1.2), 3.0, 4.0
_NUM_LIVE = len(LiveCost().weights)


@dataclass(frozen=True)
class RegionSearchConfig:
    """How wide and how long a search looks; the same for every rule."""

    population: int = 16
    num_elites: int = 4
    slots: int = 160
    """Length of training episodes."""
    spread: float = 1.0
    """Of the first generation, as a share of the usual."""
    noise: float = 0.2
    """Share of the first spread that is added to the elites' in the first generation; fades to
    nothing over the search."""
    num_generations: int = 16


_KNOB_STD = {"cap": np.full(1, 0.15), "smoothing": np.ones(1), "live": np.ones(_NUM_LIVE)}
"""How far from a rule's knobs the first generation looks."""


class KnobSearch(CrossEntropy):
    """A search over drawn layouts of one or several scenarios.

    Raises:
        ValueError: The rule is unknown or has no knobs, or the population is empty.
    """

    def __init__(
        self,
        name: str,
        scenarios: Sequence[RegionScenario],
        config: RegionSearchConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Start at the rule's own knobs, which the zero vector stands for."""
        if name not in REGION_BASELINES:
            tunable = [rule for rule, recipe in REGION_BASELINES.items() if recipe.tunable]
            raise ValueError(f"unknown regional rule {name!r}; choose one of {tunable}")
        self._recipe = REGION_BASELINES[name]
        if not self._recipe.tunable:
            raise ValueError(f"{name} has no knobs")
        self.config = config = config or RegionSearchConfig()
        if config.population < 1:
            raise ValueError(f"a population of {config.population} must be at least 1")
        self.scenarios = [
            scenario.model_copy(update={"num_slots": config.slots}) for scenario in scenarios
        ]
        std = np.concatenate([_KNOB_STD[knob] for knob in self._recipe.tunable])
        super().__init__(
            np.zeros(len(std)), config.spread * std, population=config.population,
            num_elites=config.num_elites, seed=seed, noise=config.noise * config.spread,
            noise_unit=std, num_generations=config.num_generations,
        )  # fmt: skip

    def policy(self, theta: FloatArray, scenario: RegionScenario) -> RegionPolicy:
        """The rule with other knobs."""
        return self._recipe.make(ActivationRule.from_scenario(scenario), self.knobs(theta))

    def knobs(self, theta: FloatArray) -> Knobs:
        """The knobs that parameters stand for: the cap moves, all else is multiplied."""
        knobs, at = self._recipe.knobs, 0
        cap, smoothing, live = knobs.cap, knobs.smoothing, knobs.live
        for name in self._recipe.tunable:
            size = len(_KNOB_STD[name])
            part, at = theta[at : at + size], at + size
            factor = np.exp(np.clip(part, -_MOST_LOG, _MOST_LOG))
            if name == "cap":
                cap = float(np.clip(cap + part[0], *_CAPS))
            elif name == "smoothing":
                smoothing = float(min(smoothing * factor[0], _MOST_SMOOTHING))
            else:
                live = LiveCost(*(np.array(live.weights) * factor).tolist())
        return Knobs(cap, smoothing, live)

    def step(self) -> dict[str, float]:
        """Run one generation and return its costs relative to the start."""
        candidates = self.draw(self.rng())
        costs = self.costs(candidates, "training", self.generation)
        self.update(candidates, costs)
        return {
            "cost_over_start": float(costs[0]),
            "best_cost_over_start": float(costs.min()),
            "mean_std": float(self.std.mean()),
        }

    def costs(self, candidates: FloatArray, part: str, index: int) -> FloatArray:
        """Return costs of candidates, shape (candidates, parameters), on a drawn layout and stream.

        A cost of 1 equals the start's.
        """
        drawn = draw_layout(self.scenarios[index % len(self.scenarios)], self.seed, part, index)
        stream = sample_stream(drawn, stream_rng(self.seed, part, index))
        forecaster = fit_seasonal(drawn)
        start = self._measured(np.zeros_like(self.mean), drawn, stream, forecaster)
        runs = [self._measured(candidate, drawn, stream, forecaster) for candidate in candidates]
        return np.array([cost(run, start) for run in runs])

    def _measured(
        self,
        theta: FloatArray,
        drawn: RegionScenario,
        stream: RegionStream,
        forecaster: DemandForecaster,
    ) -> dict[str, float]:
        return measure(run_regions(drawn, stream, self.policy(theta, drawn), forecaster))

    def validate(self, theta: FloatArray | None = None, num_layouts: int = 4) -> float:
        """Mean cost on unseen layouts and streams; None: of the centre of the search."""
        centre = (self.mean if theta is None else theta)[None]
        return float(
            np.mean([self.costs(centre, "validation", index) for index in range(num_layouts)])
        )


def cost(ours: Mapping[str, float], start: Mapping[str, float]) -> float:
    """Mean of total cost and mean response, each over the start's."""
    ratios = [ours[key] / max(start[key], 1e-12) for key in ("total_cost", "mean_response_s")]
    return float(np.mean(ratios))

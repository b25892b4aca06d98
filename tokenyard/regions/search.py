"""Searches over what policies leave open: the knobs of rules, and the parameters of the mix.

The cross-entropy method (`tokenyard.cross_entropy`). Every generation draws a layout of one of the
scenarios and a stream, and all its candidates live through them. What it makes small is total cost
over that of the start, plus mean response over that of the start.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenyard.cross_entropy import CrossEntropy
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.artifact import RegionArtifact, RegionMetadata
from tokenyard.regions.demand import RegionStream, draw_layout, sample_stream, stream_rng
from tokenyard.regions.evaluation import measure
from tokenyard.regions.forecast import DemandForecaster, fit_seasonal
from tokenyard.regions.mixing import NUM_PARAMETERS
from tokenyard.regions.policies import RECIPES
from tokenyard.regions.policies.learned import LearnedMix
from tokenyard.regions.policies.rules import Knobs
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.simulator.run import run_regions
from tokenyard.regions.types import LiveCost, RegionPolicy
from tokenyard.types import FloatArray

INITIAL_STD = np.concatenate(
    [(0.7, 0.7, 0.5, 0.3, 0.8, 0.4, 0.4, 0.4, 0.4), np.full(NUM_PARAMETERS - 9, 0.4)]
)
"""How far from the start the first generation of the mix looks, by parameter."""
_CAPS, _MOST_SMOOTHING, _MOST_LOG = (0.3, 1.2), 3.0, 4.0
_NUM_LIVE = len(LiveCost().weights)


@dataclass(frozen=True)
class RegionSearchConfig:
    """How wide and how long a search looks; the same for every rule and for the mix."""

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


class LayoutSearch(CrossEntropy):
    """A search over drawn layouts of one or several scenarios."""

    def __init__(
        self,
        scenarios: Sequence[RegionScenario],
        start: FloatArray,
        std: FloatArray,
        config: RegionSearchConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Start at the parameters `start`, and measure costs against those of all zero."""
        self.config = config = config or RegionSearchConfig()
        self.scenarios = [one.model_copy(update={"num_slots": config.slots}) for one in scenarios]
        super().__init__(
            start, config.spread * std, population=config.population,
            num_elites=config.num_elites, seed=seed, noise=config.noise * config.spread,
            noise_unit=std, num_generations=config.num_generations,
        )  # fmt: skip

    @abstractmethod
    def policy(self, theta: FloatArray, scenario: RegionScenario) -> RegionPolicy:
        """Make the policy of parameters; all zero stand for the start."""

    @property
    def env_steps(self) -> int:
        """Slots lived through so far, over all candidates."""
        return self.generation * (self.config.population + 1) * self.config.slots

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
        """Costs of candidates on one drawn layout and stream, 1 for what is as good as the start.

        Args:
            candidates: Shape (candidates, parameters).
            part: Training or validation.
            index: Which layout and stream of it.
        """
        drawn = draw_layout(self.scenarios[index % len(self.scenarios)], self.seed, part, index)
        stream = sample_stream(drawn, stream_rng(self.seed, part, index))
        forecaster = fit_seasonal(drawn)
        start = self._measured(np.zeros_like(self.mean), drawn, stream, forecaster)
        found = [self._measured(one, drawn, stream, forecaster) for one in candidates]
        return np.array([cost(one, start) for one in found])

    def _measured(
        self,
        theta: FloatArray,
        drawn: RegionScenario,
        stream: RegionStream,
        forecaster: DemandForecaster,
    ) -> dict[str, float]:
        return measure(run_regions(drawn, stream, self.policy(theta, drawn), forecaster))

    def validate(self, theta: FloatArray | None = None, num_layouts: int = 4) -> float:
        """Mean cost over layouts and streams that no search saw.

        Args:
            theta: Parameters; None: the centre of the search.
            num_layouts: How many.
        """
        centre = (self.mean if theta is None else theta)[None]
        return float(
            np.mean([self.costs(centre, "validation", index) for index in range(num_layouts)])
        )


def cost(ours: Mapping[str, float], start: Mapping[str, float]) -> float:
    """Mean of total cost and mean response, each over the start's."""
    ratios = [ours[key] / max(start[key], 1e-12) for key in ("total_cost", "mean_response_s")]
    return float(np.mean(ratios))


class RegionSearch(LayoutSearch):
    """A search over the parameters of the mix."""

    def __init__(
        self,
        scenarios: Sequence[RegionScenario],
        config: RegionSearchConfig | None = None,
        seed: int = 0,
        start: FloatArray | None = None,
    ) -> None:
        """Start at the parameters `start`, by default all zero."""
        begin = np.zeros(NUM_PARAMETERS) if start is None else start
        super().__init__(scenarios, begin, INITIAL_STD, config, seed)

    def policy(self, theta: FloatArray, scenario: RegionScenario) -> RegionPolicy:
        """The mix."""
        return LearnedMix(theta, ActivationRule.from_scenario(scenario))

    def artifact(
        self, metrics: Mapping[str, float] | None = None, lineage: Mapping[str, str] | None = None
    ) -> RegionArtifact:
        """Export the centre of the search."""
        metadata = RegionMetadata(
            scenarios=tuple(one.name for one in self.scenarios),
            trainer="policy_search",
            metrics=metrics or {},
            lineage=lineage or {},
        )
        return RegionArtifact(metadata, {"theta": self.mean.copy()})


class KnobSearch(LayoutSearch):
    """A search over the knobs of a rule.

    Raises:
        ValueError: The rule has none.
    """

    def __init__(
        self,
        name: str,
        scenarios: Sequence[RegionScenario],
        config: RegionSearchConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Start at the rule's knobs as they are."""
        self._recipe = RECIPES[name]
        if not self._recipe.tunable:
            raise ValueError(f"{name} has no knobs")
        std = np.concatenate([_KNOB_STD[one] for one in self._recipe.tunable])
        super().__init__(scenarios, np.zeros(len(std)), std, config, seed)

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


_KNOB_STD = {"cap": np.full(1, 0.15), "smoothing": np.ones(1), "live": np.ones(_NUM_LIVE)}
"""How far from a rule's knobs the first generation looks."""


def go_on(search: LayoutSearch, path: Path) -> Iterator[dict[str, float]]:
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

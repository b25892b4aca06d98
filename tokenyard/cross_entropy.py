"""The cross-entropy method: the one loop of every direct policy search.

Candidates are drawn from a normal distribution, and the best of them say where the next generation
is drawn. Which candidate is better is for the problem to say, on common random numbers. No
gradient, no network, no torch.

Source: Rubinstein 1999 (cross-entropy method); the fading extra noise is of Szita and Lorincz
2006, "Learning Tetris using the noisy cross-entropy method".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tokenyard.types import FloatArray


class CrossEntropy:
    """A search that advances one generation at a time and can be stopped and resumed."""

    def __init__(
        self,
        mean: FloatArray,
        std: FloatArray,
        *,
        population: int,
        num_elites: int,
        seed: int = 0,
        noise: float = 0.0,
        noise_unit: FloatArray | float = 1.0,
        num_generations: int,
    ) -> None:
        """Begin before the first generation.

        Args:
            mean: Centre of the first generation, shape (parameters,).
            std: Its spread, shape (parameters,).
            population: Candidates of a generation.
            num_elites: The best of them, which say where the next generation is drawn.
            seed: Of `rng`.
            noise: Spread added to that of the elites, in units of `noise_unit`.
            noise_unit: One for all parameters, or one for each.
            num_generations: Generations over which the noise fades to nothing.
        """
        self.seed, self.generation = seed, 0
        self.mean: FloatArray = mean.copy()
        self.std: FloatArray = std.copy()
        self._population, self._num_elites = population, num_elites
        self._noise, self._noise_unit = noise, noise_unit
        self._num_generations = num_generations

    def rng(self) -> np.random.Generator:
        """Make the generator of this generation, whatever was drawn before it."""
        return np.random.default_rng([self.seed, self.generation])

    def draw(self, rng: np.random.Generator) -> FloatArray:
        """Draw a generation of candidates, the centre first, shape (population, parameters)."""
        candidates = rng.normal(self.mean, self.std, (self._population, len(self.mean)))
        candidates[0] = self.mean
        return candidates

    def update(self, candidates: FloatArray, costs: FloatArray) -> None:
        """Move to the candidates of least cost.

        Args:
            candidates: What `draw` returned.
            costs: Cost of each, shape (population,).
        """
        elites = candidates[np.argsort(costs, kind="stable")[: self._num_elites]]
        self.generation += 1
        fade = max(0.0, 1.0 - self.generation / self._num_generations)
        self.mean = elites.mean(axis=0)
        self.std = elites.std(axis=0) + self._noise * fade * self._noise_unit

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on as if nothing had happened, as JSON has it."""
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

"""The cross-entropy method: the one loop of every direct policy search.

Candidates are drawn from a normal distribution, and the best of them say where the next generation
is drawn. Which candidate is better is for the problem to say, on common random numbers. No
gradient, no network, no torch.

Source: Rubinstein 1999 (cross-entropy method); the fading extra noise is of Szita and Lorincz
2006, "Learning Tetris using the noisy cross-entropy method".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
        num_generations: int | None = None,
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
            num_generations: Generations over which the noise fades to nothing; None: it stays.
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

    def draw(self, rng: np.random.Generator, known: Sequence[FloatArray] = ()) -> FloatArray:
        """Draw a generation of candidates, shape (population, parameters).

        Args:
            rng: What they are drawn with.
            known: Parameters to be tried as well. They come second, after the centre.
        """
        candidates = rng.normal(self.mean, self.std, (self._population, len(self.mean)))
        for place, one in enumerate((self.mean, *known)):
            candidates[place] = one
        return candidates

    def update(self, candidates: FloatArray, costs: FloatArray) -> None:
        """Move to the candidates of least cost.

        Args:
            candidates: What `draw` returned.
            costs: Cost of each, shape (population,).
        """
        elites = candidates[np.argsort(costs, kind="stable")[: self._num_elites]]
        self.generation += 1
        fade = 1.0
        if self._num_generations is not None:
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


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How a log is cut, and for routing how wide and how long to search from a champion."""

    windows: int = 10
    """Into which a router's log is cut. Replicas are empty where one begins: let them be long."""
    held_out: float = 0.4
    """Share of the log, the last part, that judges."""
    generations: int = 12
    """Of a router's search."""
    population: int = 24
    """Candidates in a generation."""
    spread: float | None = None
    """Of the first generation around the champion, in units of the SLO per feature (0.1)."""
    behaviour: float = 0.05
    """Price of changing every logged decision of a router, as a share of the cost."""
    seed: int = 0


def minimise(
    search: CrossEntropy,
    cost: Callable[[FloatArray], float],
    rng: np.random.Generator,
    num_generations: int,
    known: Sequence[FloatArray] = (),
    tolerance: float = 0.0,
) -> tuple[FloatArray, list[float]]:
    """Search a cost that is the same in every generation, as that of a logged stretch is.

    Args:
        search: Where to begin; it is advanced.
        cost: Of parameters.
        rng: Draws all candidates.
        num_generations: How long to search.
        known: Parameters that every generation tries as well.
        tolerance: By how much the centre may cost more than the best candidate.

    Returns:
        The centre, which is less of a lucky draw, or the best candidate where that is better by
        more than the tolerance; and the least cost of every generation.
    """
    found, least = search.mean, cost(search.mean)
    curve = []
    for _ in range(num_generations):
        candidates = search.draw(rng, known)
        costs = np.array([cost(one) for one in candidates])
        if costs.min() < least:
            found, least = candidates[costs.argmin()], float(costs.min())
        search.update(candidates, costs)
        curve.append(float(costs.min()))
    return (search.mean if cost(search.mean) <= least + tolerance else found), curve

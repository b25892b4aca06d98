"""A distribution by its mean, deviation and bounds, as catalogues of workloads publish them."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from tokenyard.config import FrozenModel
from tokenyard.types import FloatArray, IntArray


class Spread(FrozenModel):
    """How a length or a time is distributed; what is drawn beyond a bound is put on it."""

    kind: Literal["lognormal", "normal", "exponential", "uniform"] = "lognormal"
    """`exponential` needs no `std`; `uniform` is between the bounds and needs only them."""
    mean: Annotated[float, Field(ge=0)] = 0.0
    """Before the bounds apply."""
    std: Annotated[float, Field(ge=0)] = 0.0
    low: Annotated[float, Field(ge=0)] = 0.0
    high: float | None = None
    """None: there is no bound."""

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        if self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low:g} must not be above high {self.high:g}")
        if self.kind == "uniform" and self.high is None:
            raise ValueError("a uniform spread needs high")
        if self.kind != "uniform" and not self.mean > 0:
            raise ValueError(f"a {self.kind} spread needs a mean above 0")
        return self

    def draw(self, num: int, rng: np.random.Generator) -> FloatArray:
        """Draw independent values, shape (num,)."""
        if self.kind == "uniform":
            assert self.high is not None
            return rng.uniform(self.low, self.high, num)
        if self.kind == "exponential":
            drawn = rng.exponential(self.mean, num)
        elif self.kind == "normal":
            drawn = rng.normal(self.mean, self.std, num)
        else:
            variance = math.log1p((self.std / self.mean) ** 2)
            drawn = rng.lognormal(math.log(self.mean) - variance / 2.0, math.sqrt(variance), num)
        return np.clip(drawn, self.low, self.high)

    def draw_whole(self, num: int, rng: np.random.Generator) -> IntArray:
        """Draw independent whole numbers, shape (num,)."""
        return np.rint(self.draw(num, rng)).astype(np.int64)

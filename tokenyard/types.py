"""The few types that all problems speak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective (SLO) of a request."""

    response_s: float = 2.0
    """Longest acceptable end-to-end response time, seconds."""

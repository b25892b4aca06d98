"""Pareto fronts of two objectives, both better when higher."""

from __future__ import annotations

import numpy as np

from tokenyard.types import FloatArray


def front(points: FloatArray) -> FloatArray:
    """Return the points that no other one beats, first objective falling, shape (k, 2).

    Args:
        points: Shape (n, 2).
    """
    order = np.lexsort((-points[:, 1], -points[:, 0]))
    ordered = points[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(ordered[:, 1])[:-1]])
    return np.asarray(ordered[ordered[:, 1] > before])


def hypervolume(points: FloatArray, reference: FloatArray) -> float:
    """Area that is dominated by points and dominates a reference (Zitzler and Thiele 1999).

    Args:
        points: Shape (n, 2); those that do not dominate the reference add nothing.
        reference: Shape (2,).
    """
    best = front(points[(points > reference).all(axis=1)]) if len(points) else points
    area, reached = 0.0, float(reference[1])
    for first, second in best:
        area += (float(first) - float(reference[0])) * (float(second) - reached)
        reached = float(second)
    return area

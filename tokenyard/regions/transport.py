"""Plans of who serves whose demand: optimal transport in several forms, and smoothing over time.

Two of them are the TORTA paper's (Du et al. 2025, arXiv 2507.10259v2): the balanced form of Eq 2,
in which prices cannot matter, as column sums are fixed and a price belongs to a column; and the
closed form that its first two reward terms have. The others let capacities be inequalities.

Solvers are POT's where it is installed, else scipy's HiGHS.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import numpy as np

from tokenyard.types import FloatArray

_TINY = 1e-12
_TIE = 1e-9
"""Of the greatest cost, what decides between plans that cost the same."""


@cache
def has_pot() -> bool:
    """Whether POT is installed."""
    return importlib.util.find_spec("ot") is not None


def check_solver() -> None:
    """Refuse to plan where nothing can.

    Raises:
        ModuleNotFoundError: scipy is not installed, without which POT is not either.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ModuleNotFoundError(
            "regions are planned with scipy: pip install 'tokenyard[train]'", name="scipy"
        )


def exact(supply: FloatArray, demand: FloatArray, cost: FloatArray) -> FloatArray:
    """Solve the transport problem with equal totals: the plan of least cost, shape (n, m).

    Row sums have shape (n,), column sums (m,); cost is per unit, shape (n, m). Of plans that cost
    the same it is always the same one. The last digits of the sums would else decide, as latencies
    are alike in both directions, and three regions can send their excess round either way.
    """
    cost = cost + _TIE * (np.abs(cost).max() or 1.0) * _tie_breaker(*cost.shape)
    # Solvers hold sums to be equal within fixed bounds; a power of two rounds nothing.
    unit = np.ldexp(1.0, np.frexp(supply.sum())[1])
    solve = _by_pot if has_pot() else _by_linprog
    return np.asarray(unit * solve(supply / unit, demand / unit, cost))


@cache
def _tie_breaker(n: int, m: int) -> FloatArray:
    return np.random.default_rng(0).random((n, m))


def _by_pot(supply: FloatArray, demand: FloatArray, cost: FloatArray) -> FloatArray:
    # POT would import every installed array library, torch too, which takes seconds.
    for library in ("PYTORCH", "JAX", "TENSORFLOW", "CUPY"):
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{library}", "1")
    import ot

    supply, demand, cost = (np.ascontiguousarray(values) for values in (supply, demand, cost))
    plan = ot.emd(
        supply, demand, cost, numItermax=1_000_000,
        center_dual=False, check_marginals=False,  # The dual is not used.
    )  # fmt: skip
    return np.asarray(plan)


@cache
def _incidence(n: int, m: int) -> Any:
    from scipy.sparse import identity, kron

    rows = kron(identity(n), np.ones((1, m)), format="csr")
    return rows, kron(np.ones((1, n)), identity(m), format="csr")


def _by_linprog(supply: FloatArray, demand: FloatArray, cost: FloatArray) -> FloatArray:
    from scipy.optimize import linprog
    from scipy.sparse import vstack

    rows, columns = _incidence(len(supply), len(demand))
    # One equation follows from the others, and rounding would make it contradict them.
    solution = linprog(
        cost.ravel(),
        A_eq=vstack([rows, columns[:-1]]),
        b_eq=np.concatenate([supply, demand[:-1]]),
        method="highs",
    )
    assert solution.success, solution.message
    return np.asarray(solution.x).reshape(cost.shape)


def as_shares(plan: FloatArray, instead: FloatArray) -> FloatArray:
    """Divide every row by its sum; `instead` has the rows that have no mass."""
    mass = plan.sum(axis=1, keepdims=True)
    return np.where(mass > _TINY, plan / np.maximum(mass, _TINY), instead)


def balanced(demand: FloatArray, capacity: FloatArray, cost: FloatArray) -> FloatArray:
    """The paper's Eq 2: demand and capacity both scaled to mass 1; returns the plan."""
    if demand.sum() <= 0:
        return np.diag(capacity / capacity.sum())
    return exact(demand / demand.sum(), capacity / capacity.sum(), cost)


def within(demand: FloatArray, capacity: FloatArray, cost: FloatArray) -> FloatArray:
    """Least cost with capacities as upper bounds: a slack source takes what is left over.

    What all capacities together cannot take goes to an overflow sink; it is then divided over the
    columns in proportion to capacity, so that every row keeps its mass.

    Args:
        demand: Row sums, shape (n,).
        capacity: Bounds of the column sums in the same unit, shape (m,).
        cost: Per unit, shape (n, m).

    Returns:
        The plan, shape (n, m).
    """
    slack = capacity.sum() - demand.sum()
    if slack >= 0:
        supply = np.append(demand, slack)
        return exact(supply, capacity, np.vstack([cost, np.zeros(len(capacity))]))[:-1]
    costly = 10.0 * (1.0 + float(np.abs(cost).max()))  # Far above all others.
    wide = np.hstack([cost, np.full((len(cost), 1), costly)])
    plan = exact(demand, np.append(capacity, -slack), wide)
    total = capacity.sum()
    where = capacity / total if total > 0 else np.full(len(capacity), 1 / len(capacity))
    return np.asarray(plan[:, :-1] + plan[:, -1:] * where)


def sinkhorn(
    demand: FloatArray,
    capacity: FloatArray,
    cost: FloatArray,
    regularisation: float = 0.05,
    num_iterations: int = 500,
) -> FloatArray:
    """`within` with an entropy term, which smooths the plan (Cuturi 2013).

    Capacities are raised in proportion where they do not suffice. The entropy's weight counts in
    units of the greatest cost; `num_iterations` bounds the scalings of rows and columns.
    """
    capacity = capacity * max(1.0, demand.sum() / capacity.sum() * (1 + 1e-9))
    slack = max(capacity.sum() - demand.sum(), 0.0)
    supply = np.append(demand, slack)
    wide = np.vstack([cost, np.zeros(len(capacity))])
    scale = max(float(np.abs(cost).max()), _TINY)
    kernel = np.exp(-wide / (scale * regularisation))
    u, v = np.ones(len(supply)), np.ones(len(capacity))
    for _ in range(num_iterations):
        # Not a product of matrices, which rounds as the processor has it.
        v = capacity / np.maximum((kernel * u[:, None]).sum(axis=0), 1e-300)
        into = (kernel.T * v[:, None]).sum(axis=0)
        if np.abs(u * into - supply).max() <= 1e-6 * supply.sum():
            break
        u = supply / np.maximum(into, 1e-300)
    plan = (u[:, None] * kernel * v)[:-1]
    return as_shares(plan, np.zeros_like(plan)) * demand[:, None]


def prox(target: FloatArray, previous: FloatArray, weight: float) -> FloatArray:
    """Return argmin over A of |A - target|^2 + weight |A - previous|^2.

    The optimum of the paper's first two reward terms, one slot at a time; rows that sum to 1 stay
    so. For targets independent over time its steps are (1 + weight)(1 + 2 weight) times smaller.
    """
    return np.asarray((target + weight * previous) / (1.0 + weight))


def receding_horizon(
    demand: FloatArray,
    capacity: FloatArray,
    cost: FloatArray,
    previous_load: FloatArray,
    switching_cost: float,
) -> FloatArray:
    """Plan several slots at once with a cost for changes of the regions' loads.

    min sum_h <cost_h, P_h> + switching_cost |load_h - load_(h-1)|_1, with loads the column sums,
    row sums given and capacities as bounds. Capacities are scaled up if demand exceeds them.

    Args:
        demand: Row sums by slot, shape (slots, n).
        capacity: Shape (n,).
        cost: Per unit by slot, shape (slots, n, n).
        previous_load: Column sums of the last slot, shape (n,).
        switching_cost: Per unit of change.

    Returns:
        Plans, shape (slots, n, n).
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, hstack, identity, kron, vstack

    slots, n = demand.shape
    bound = capacity * max(1.0, float(demand.sum(axis=1).max() / capacity.sum()) * (1 + 1e-9))
    rows, columns = _incidence(n, n)
    over_time = identity(slots)
    change = kron(identity(slots) - csr_array(np.eye(slots, k=-1)), columns)
    moves = kron(over_time, identity(n))
    equal = hstack([kron(over_time, rows), csr_array((slots * n, slots * n))])
    before = np.zeros(slots * n)
    before[:n] = previous_load
    upper = vstack(
        [
            hstack([kron(over_time, columns), csr_array((slots * n, slots * n))]),
            hstack([change, -moves]),
            hstack([-change, -moves]),
        ],
        format="csr",
    )
    solution = linprog(
        np.concatenate([cost.ravel(), np.full(slots * n, switching_cost)]),
        A_eq=equal.tocsr(),
        b_eq=demand.ravel(),
        A_ub=upper,
        b_ub=np.concatenate([np.tile(bound, slots), before, -before]),
        method="highs",
    )
    assert solution.success, solution.message
    return np.asarray(solution.x[: slots * n * n]).reshape(slots, n, n)

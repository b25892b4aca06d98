"""How this project compiles: one decorator, so that every kernel obeys the same rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function that allocates nothing; the plain form stays reachable as `py_func`.

    Without reference counting (`_nrt`) slicing an array costs nothing, which makes the
    simulator's step twice as fast; in return a compiled function must not create arrays: it
    works in those it is given. Division follows IEEE, as in numpy, without checks.
    """
    options: dict[str, Any] = {"cache": True, "error_model": "numpy", "_nrt": False}
    result: Function = numba.njit(**options)(function)
    return result

"""Settings of Python for a process with one event loop for all requests."""

from __future__ import annotations

import gc
import sys

_SWITCH_S = 1e-3
"""Time for which a thread keeps the interpreter while another wants it; Python's own 5 ms would be
the longest part of a decision that was interrupted."""
_YOUNG_OBJECTS = 20_000
"""New containers after which the new ones are looked through for cycles. With Python's 700 that is
at every dozen requests, and all containers are looked through at every few hundredth."""
_YOUNG_COLLECTIONS = 20
"""Collections of the young after which those that stayed are looked through as well."""


def share() -> None:
    """Have threads give the interpreter up soon while another waits for it."""
    sys.setswitchinterval(_SWITCH_S)


def settle() -> None:
    """Exempt existing objects from garbage collection, which would hold requests up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _YOUNG_COLLECTIONS)

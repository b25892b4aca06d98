"""Routers of this process, by deployment, so that whoever sends can see what they know.

A module of its own: Serve ships a router's class with a copy of its module's globals, so that a
dictionary beside the class would be another one in the router than for everybody else.
"""

from __future__ import annotations

from typing import Any, Protocol


class LiveReplicas(Protocol):
    """A router, as far as others look at it."""

    live: tuple[Any, ...]
    """Replicas that Serve knows of."""
    version: int
    """Grows with every change of `live` or of what its replicas publish."""


ROUTERS: dict[tuple[str, str], LiveReplicas] = {}
"""By application and deployment."""

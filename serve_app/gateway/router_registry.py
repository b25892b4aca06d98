"""Routers of this process, by deployment, so that senders can read what they know.

A module of its own: Serve ships a router's class with a copy of its module's globals, so that a
dictionary beside the class would be another one in the router than for everybody else.
"""

from __future__ import annotations

from typing import Any

ROUTERS: dict[tuple[str, str], Any] = {}
"""`serve_app.router.ChosenReplicaRouter` by application and deployment."""

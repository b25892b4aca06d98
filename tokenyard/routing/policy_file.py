"""A rule of one's own: a Python file with one class that has `route`.

    class Mine:
        def route(self, request, snapshots):
            return min(range(len(snapshots)), key=lambda i: snapshots[i].num_outstanding)

It may also order what waits: `order_key(self, request, now_s)` returns seconds, lower goes first,
and `request.arrival_s` is first come, first served. The scenario bounds what it adds to that.

The class is made afresh for every stream, without arguments. `tokenyard.routing.types` says what a
request and a snapshot are. The file is run as it is: it is trusted like any other program.
"""

from __future__ import annotations

import importlib.util
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenyard.routing.types import Decision, OrderKey, ReplicaSnapshot, Request, RoutingPolicy

SUFFIX = ".py"


class PolicyFileError(ValueError):
    """A policy file that is not one, or whose rule failed; the text says how."""


class PolicyOfFile:
    """The rule of a file; what it answers is checked."""

    sees_queues = False

    def __init__(self, path: Path) -> None:
        """Load the file, and make its class.

        Raises:
            PolicyFileError: It cannot be loaded or made.
        """
        self._file = path.name
        self._rule: RoutingPolicy = self._try(load_rule(path))

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return what the rule chooses.

        Raises:
            PolicyFileError: It raised, or what it returned is no index of a replica.
        """
        answer = self._try(self._rule.route, request, snapshots)
        try:
            chosen = operator.index(answer)
        except TypeError:
            chosen = -1
        if not 0 <= chosen < len(snapshots):
            raise PolicyFileError(
                f"{self._file}: route returned {answer!r:.50} for {len(snapshots)} replicas"
            )
        return chosen

    def place(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return what the rule chooses, with its order key where it has one.

        Raises:
            PolicyFileError: It raised, or what it returned is no index, or no number.
        """
        replica = self.route(request, snapshots)
        order_key = getattr(self._rule, "order_key", None)
        if order_key is None:
            return Decision(replica, None)
        key_s = self._try(order_key, request, request.arrival_s)
        if not isinstance(key_s, (int, float)) or math.isnan(key_s):
            raise PolicyFileError(f"{self._file}: order_key returned {key_s!r:.50}, not seconds")
        return Decision(replica, None, OrderKey(float(key_s)))

    def _try(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:  # The user's code may raise anything.
            raise PolicyFileError(f"{self._file}: {type(error).__name__}: {error}") from error


def load_rule(path: Path) -> type:
    """Return the one class of a file that has `route`.

    Raises:
        PolicyFileError: The file is missing or fails, or there is not exactly one such class.
    """
    if not path.is_file():
        raise PolicyFileError(f"policy file {path} was not found")
    spec = importlib.util.spec_from_file_location(f"policy_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # The user's code may raise anything.
        text = f"{path.name} cannot be loaded: {type(error).__name__}: {error}"
        raise PolicyFileError(text) from error
    rules = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and hasattr(kind, "route")
    ]
    if len(rules) != 1:
        raise PolicyFileError(f"{path.name} has {len(rules)} classes with `route`, and not one")
    return rules[0]

"""The core of Tokenyard: what a cluster is, what a policy may see, and what it decides.

Reading order: `problem` (what the three problems have in common), `evaluation` (how policies are
compared), `workload` (where requests come from). Then one problem, such as `routing`: `types`,
`scenario` (what is fixed in an experiment), `simulator`, `observation` (snapshots to numbers),
`policies` (who decides) and `artifact` (how a trained policy travels).
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Find `tokenyard.envs`: in a checkout it is the folder beside this one."""
    if name == "envs":
        return import_module("envs")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

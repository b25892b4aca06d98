"""What `make sweep` runs: both problems of the cluster that `make serve` serves, in one chain."""

from __future__ import annotations

from tune_configs import allocation, routing
from tune_configs.experiment import Experiment


def default() -> tuple[Experiment, ...]:
    """Who serves which request, and with how many GPUs in which configuration."""
    return routing.default(), allocation.default()


def smoke() -> tuple[Experiment, ...]:
    """The smallest of both."""
    return routing.smoke(), allocation.smoke()

"""What the autopilot says of itself, and whether a person has stopped it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from tokenyard.config import FrozenModel

Step = Literal["waiting", "training", "shadow", "comparing", "watching", "stopped"]


class AutopilotReport(FrozenModel):
    """Where the autopilot stands; it reports after each step."""

    step: Step
    note: str = ""
    """What it does, or why it stopped, in a sentence."""
    dry_run: bool = True
    """Whether it changes nothing."""
    candidate: str | None = None
    """The policy that it tries, or has promoted."""
    in_place_of: str | None = None
    """What decided before."""
    pairs: int = 0
    """Pairs of stretches of time in which both have decided, in random order."""
    gain_fraction: float | None = None
    """Mean response of what decided before over that of the candidate, minus 1, by those pairs."""
    gain_ci_low: float | None = None
    gain_ci_high: float | None = None
    """Its 95 % interval; null: fewer than 15 pairs."""
    twin_error_fraction: float | None = None
    """How far the simulator is off the logged mean response."""
    next_s: float | None = None
    """Unix time at which it goes on, seconds."""


class AutopilotAnswer(BaseModel):
    """Answer of `/v1/autopilot`."""

    vetoed: bool
    """Whether a person has stopped it: it tries and promotes nothing until that is taken back."""
    report: AutopilotReport | None
    """Null: none has reported since the gateway began."""
    reported_s: float | None
    """Unix time of the report, seconds."""


class AutopilotStatus:
    """The last report, and the veto, which outlives the gateway."""

    def __init__(self) -> None:
        self.vetoed = False
        self._report: AutopilotReport | None = None
        self._reported_s: float | None = None

    def report(self, report: AutopilotReport) -> None:
        """Take a report."""
        self._report, self._reported_s = report, time.time()

    def describe(self) -> AutopilotAnswer:
        """Return all of it."""
        return AutopilotAnswer(vetoed=self.vetoed, report=self._report, reported_s=self._reported_s)

    def saved(self) -> dict[str, Any]:
        """Return the veto, as JSON has it."""
        return {"vetoed": self.vetoed}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take the veto up."""
        self.vetoed = bool(saved["vetoed"])

"""The arena's cells of sessions, where rules that hold, pause and place whole sessions are ranked.

A rule of sessions decides more than a routing policy does, so these have a board of their own.
Regret is in the mean completion of a session, against the cell's best rule in hindsight.
"""

from __future__ import annotations

import math

import numpy as np

from tokenyard.evaluation import Map, run_candidates
from tokenyard.problem import Row
from tokenyard.routing.arena import Entry, Measured, rows_of_cell
from tokenyard.routing.sessions.evaluation import MEASURES
from tokenyard.routing.sessions.problem import PROBLEM
from tokenyard.routing.sessions.rules import RULES

MEAN = "mean_completion_s"
KIND = "session_rule"
"""Of these rows."""
QUICK_CELLS = ("agentic_sessions_mixed",)
CELLS = (
    *QUICK_CELLS, "agentic_sessions_equal", "agentic_sessions_mixed_host",
    "agentic_sessions_mixed_scarce", "agentic_sessions_mixed_ample", "code_sessions_mixed",
    "code_sessions_equal", "chat_sessions_mixed", "chat_sessions_equal",
)  # fmt: skip
"""Session scenarios, each at its own rate."""
HELD = "index_las:lease_s=5:order=0:pinned=0:paused_first=0"
ENTRIES = (
    *(Entry(name, "rule", name) for name in RULES),
    Entry("held", "rule", HELD),
)
"""All rules with their own numbers; `held` is what a gateway does, before engines that serve first
come, first served."""


def rows_of_sessions(cell: str, num_streams: int, seed: int, mapped: Map) -> list[Row]:
    """Play all entries on equal streams of a session scenario; rows as `arena.rows_of_cell`."""
    scenario = PROBLEM.load_scenario(cell)
    streams = PROBLEM.streams(scenario, "evaluation", num_streams, seed)
    candidates = [PROBLEM.candidate(scenario, entry.policy) for entry in ENTRIES]
    runs = run_candidates(candidates, scenario, streams, seed, mapped)
    results: dict[Entry, Measured] = {
        entry: {
            measure.key: np.array([run[measure.key] for run in runs[entry.policy]])
            for measure in MEASURES
        }
        for entry in ENTRIES
    }
    # Sessions have no load as a share of what the fleet can do: memory is scarce before time is.
    rows = rows_of_cell(scenario.name, math.nan, results, seed, MEAN)
    changed: Row = {"kind": KIND, "sessions_per_a100_hour": scenario.sessions_per_a100_hour}
    return [row | changed for row in rows]

"""What is measured of sessions; docs/metrics.md defines every key."""

from __future__ import annotations

import numpy as np

from tokenyard import metrics
from tokenyard.problem import Measure
from tokenyard.routing.sessions.scenario import SessionScenario, idle_s
from tokenyard.routing.simulator.sessions import SessionRun
from tokenyard.routing.simulator.sessions_kernel import layout as lay

STRETCH, SLACK_S = 2.0, 60.0
"""A session is in SLO if it ends within STRETCH times its idle time and SLACK_S."""
_FROM, _TO = 0.15, 0.85
"""Measured are sessions between these shares of all arrivals: the fleet is as it will be."""
MEASURES = (
    Measure(
        "sessions_in_slo_fraction", "in SLO %", ".1f", 100.0, interval=True,
        delta="delta_in_slo_fraction", more_is_better=True,
    ),
    Measure("mean_completion_s", "completion s", ".0f", interval=True,
            delta="delta_completion_fraction"),
    Measure("p99_completion_s", "p99 completion", ".0f", delta="delta_p99_completion_fraction"),
    Measure("mean_ttft_s", "ttft s", delta="delta_ttft_fraction"),
    Measure("p99_ttft_s", "p99 ttft", ".1f", delta="delta_p99_ttft_fraction"),
    Measure("longest_hold_s", "longest hold s", ".1f"),
    Measure("held_turns_fraction", "held %", ".1f", 100.0),
    Measure("sessions_per_gpu_hour", "in SLO/GPU-h", ".1f"),
    Measure("prefix_hit_fraction", "hit %", ".1f", 100.0),
    Measure("sessions_offered"),
)  # fmt: skip


def summarise(scenario: SessionScenario, run: SessionRun) -> dict[str, float]:
    """Measure one stream."""
    stream = run.stream
    start_s, end_s = np.quantile(stream.arrival_s, (_FROM, _TO))
    measured = (stream.arrival_s >= start_s) & (stream.arrival_s <= end_s)
    turns = measured[stream.session]
    # Nothing is dropped, so all sessions end.
    completion_s = run.completion_s[measured]
    within_s = STRETCH * idle_s(scenario.replicas, stream)[measured] + SLACK_S
    in_slo = completion_s <= within_s
    ttft_s = run.ttft_s[turns]
    gpu_hours = scenario.num_gpus * (end_s - start_s) / 3600.0
    return {
        "sessions_offered": float(measured.sum()),
        "sessions_in_slo_fraction": float(in_slo.mean()),
        "mean_completion_s": metrics.mean(completion_s),
        "p99_completion_s": metrics.percentile(completion_s, 99),
        "mean_ttft_s": metrics.mean(ttft_s),
        "p99_ttft_s": metrics.percentile(ttft_s, 99),
        "longest_hold_s": float(run.hold_s.max()),
        "held_turns_fraction": float(run.totals[lay.HELD_TURNS] / len(stream.context)),
        "sessions_per_gpu_hour": float(in_slo.sum() / gpu_hours),
        "prefix_hit_fraction": run.hit_fraction,
        "preemptions_per_request": float(run.totals[lay.PREEMPTIONS] / len(stream.context)),
    }

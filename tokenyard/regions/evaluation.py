"""What is measured of a regional episode; docs/metrics.md defines every key."""

from __future__ import annotations

import numpy as np

from tokenyard.metrics import percentile
from tokenyard.problem import Measure
from tokenyard.regions.simulator import world
from tokenyard.regions.simulator.run import RegionOutcomes

MEASURES = (
    Measure("total_cost", "total $", ".1f", delta="delta_cost_fraction"),
    Measure("mean_response_s", "response s", delta="delta_mean_response_s_fraction"),
    Measure("p50_response_s", "p50", ".0f"),
    Measure("p95_response_s", "p95", ".0f", delta="delta_p95_response_s_fraction"),
    Measure("p99_response_s", "p99", ".0f", delta="delta_p99_response_s_fraction"),
    Measure("network_s", "network"),
    Measure("waiting_s", "wait"),
    Measure("inference_s", "serve"),
    Measure("load_balance", "balance", ".3f", delta="delta_load_balance_fraction"),
    Measure("energy_cost", "energy $", ".1f", delta="delta_energy_cost_fraction"),
    Measure(
        "overhead_fraction", "overhead %", factor=100, delta="delta_overhead_fraction_fraction"
    ),
    Measure("switching_cost", "switching $", ".1f"),
    Measure("lateness_cost", "lateness $", ".1f"),
    Measure("deadline_miss_fraction", "violation %", ".1f", 100),
    Measure("dropped_fraction", "dropped %", factor=100),
    Measure("decision_ms", "decision ms"),
)


def measure(outcomes: RegionOutcomes) -> dict[str, float]:
    """The measures of one episode by key; docs/metrics.md defines them."""
    response = outcomes.response_s
    total = outcomes.total
    offered = max(total(world.OUT_OFFERED), 1.0)
    placed = max(total(world.OUT_PLACED), 1.0)
    served_s = max(total(world.OUT_SERVED_S), 1e-9)
    network = total(world.OUT_NETWORK_S) / offered
    inference = total(world.OUT_INFERENCE_S) / offered
    mean_s = float(response.mean()) if len(response) else np.nan
    lost_s = total(world.OUT_WARMUP_S) + total(world.OUT_SWITCH_S) + total(world.OUT_MIGRATION_S)
    energy, switching = total(world.OUT_ENERGY_USD), total(world.OUT_OVERHEAD_USD)
    late = total(world.OUT_LATE_USD)
    steps = np.diff(outcomes.shares, axis=0)
    return {
        "mean_response_s": mean_s,
        **{f"p{share}_response_s": percentile(response, share) for share in (50, 95, 99)},
        "network_s": network,
        "waiting_s": mean_s - network - inference,
        "inference_s": inference,
        "load_balance": float(outcomes.outs[:, world.OUT_BALANCE].mean()),
        "energy_cost": energy,
        "energy_kwh": total(world.OUT_ENERGY_KWH),
        "overhead_fraction": lost_s / served_s,
        "warmup_fraction": total(world.OUT_WARMUP_S) / served_s,
        "model_switch_fraction": total(world.OUT_SWITCH_S) / served_s,
        "switching_cost": switching,
        "lateness_cost": late,
        "total_cost": energy + switching + late,
        "deadline_miss_fraction": total(world.OUT_DEADLINE_MISSES) / offered,
        "dropped_fraction": total(world.OUT_DROPPED) / offered,
        "restarted_tasks": total(world.OUT_RESTARTED),
        "rerouted_tasks": total(world.OUT_REROUTED),
        "migrated_tasks": total(world.OUT_MIGRATED),
        "lost_gpu_s": total(world.OUT_LOST_S),
        "mean_active_servers": float(outcomes.outs[:, world.OUT_ACTIVE].mean()),
        "remote_fraction": total(world.OUT_REMOTE) / placed,
        "shares_step": float((steps**2).sum(axis=(1, 2)).mean()) if len(steps) else 0.0,
        "decision_ms": 1e3 * float(np.median(outcomes.decision_s)),
        "unaccounted_tasks": float(len(outcomes.labels))
        - total(world.OUT_PLACED)
        - total(world.OUT_DROPPED),
    }

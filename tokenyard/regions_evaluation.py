"""Sets regional policies beside each other on the same streams, with paired intervals over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tokenyard.artifact import RegistryLookup
from tokenyard.intervals import Interval, t_interval
from tokenyard.policies.regions import REGION_BASELINES, learned_regions, make_region_policy
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.artifact import RegionArtifact, resolve_region_champion
from tokenyard.regions.demand import RegionStream, sample_stream, stream_rng
from tokenyard.regions.forecast import DemandForecaster, fit_seasonal
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.simulator import world
from tokenyard.regions.simulator.run import RegionOutcomes, run_regions
from tokenyard.regions.state import RegionPolicy
from tokenyard.types import FloatArray

Row = dict[str, str | float]
LEARNED = ("torta",)
COMPARED = ("mean_response_s", "energy_cost", "overhead_fraction", "load_balance", "total_cost")
"""What differences are taken of."""


@dataclass(frozen=True)
class RegionCandidate:
    """Something to be evaluated."""

    name: str
    source: str
    """Where it comes from, in words for a table."""
    make: Callable[[RegionScenario], RegionPolicy]
    """Made anew for every stream: some remember."""


def resolve_region_candidate(
    name: str, scenario: RegionScenario, registry: RegistryLookup | None = None
) -> RegionCandidate:
    """Find what a name means: a baseline, `torta` or a policy file.

    Raises:
        ValueError: The name is unknown, or the policy is missing or broken.
    """
    if name in REGION_BASELINES:
        return RegionCandidate(name, "baseline", lambda one: make_region_policy(name, one))
    if name in LEARNED or name.endswith(".npz"):
        path = name if name.endswith(".npz") else None
        artifact, source = resolve_region_champion(scenario.name, path, registry)
        words = f"{source}, trained by {artifact.metadata.trainer}, {artifact.sha256}"
        return RegionCandidate(
            name, words, lambda one: learned_regions(artifact, ActivationRule.of(one))
        )
    raise ValueError(
        f"unknown regional policy {name!r}; give a policy file (.npz) or one of "
        f"{[*REGION_BASELINES, *LEARNED]}"
    )


def held_out_streams(scenario: RegionScenario, num_streams: int, seed: int) -> list[RegionStream]:
    """Streams that no training and no validation sees."""
    return [sample_stream(scenario, stream_rng(seed, "test", i)) for i in range(num_streams)]


def measure(outcomes: RegionOutcomes) -> dict[str, float]:
    """The measures of one episode by key; docs/metrics.md defines them."""
    response = outcomes.response_s
    total = outcomes.total
    offered = max(total(world.OUT_OFFERED), 1.0)
    placed = max(total(world.OUT_PLACED), 1.0)
    served_s = max(total(world.OUT_SERVED_S), 1e-9)
    network = total(world.OUT_NETWORK_S) / placed
    inference = total(world.OUT_INFERENCE_S) / placed
    lost_s = total(world.OUT_WARMUP_S) + total(world.OUT_SWITCH_S) + total(world.OUT_MIGRATION_S)
    energy, switching = total(world.OUT_ENERGY_USD), total(world.OUT_OVERHEAD_USD)
    late = total(world.OUT_LATE_USD)
    steps = np.diff(outcomes.shares, axis=0)
    p50, p95, p99 = np.percentile(response, [50, 95, 99]) if len(response) else [np.nan] * 3
    return {
        "mean_response_s": float(response.mean()) if len(response) else np.nan,
        "p50_response_s": float(p50),
        "p95_response_s": float(p95),
        "p99_response_s": float(p99),
        "network_s": network,
        "waiting_s": total(world.OUT_RESPONSE_S) / placed - network - inference,
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
        "deadline_miss_fraction": total(world.OUT_MISSED) / offered,
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


Measured = dict[str, list[dict[str, float]]]
"""Measures of every stream by policy."""


def run_region_candidates(
    scenario: RegionScenario,
    candidates: Sequence[RegionCandidate],
    num_streams: int,
    seed: int,
    forecaster: DemandForecaster | None = None,
) -> Measured:
    """Run every candidate over the same streams."""
    foretold = forecaster or fit_seasonal(scenario)
    streams = held_out_streams(scenario, num_streams, seed)
    return {
        one.name: [
            measure(run_regions(scenario, stream, one.make(scenario), foretold))
            for stream in streams
        ]
        for one in candidates
    }


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Paired difference over streams, over the other's mean."""
    other: FloatArray = np.asarray(theirs)
    return t_interval(np.asarray(ours) - other).over(abs(float(other.mean())))


def compare_regions(scenario: RegionScenario, measured: Measured, baseline: str) -> list[Row]:
    """Return one row per policy: means over streams, and paired differences to a baseline.

    Raises:
        ValueError: The baseline is not among what was measured.
    """
    if baseline not in measured:
        raise ValueError(f"baseline {baseline!r} was not run; choose one of {sorted(measured)}")
    return [region_row(scenario, measured, name, baseline) for name in measured]


def region_row(scenario: RegionScenario, measured: Measured, name: str, baseline: str) -> Row:
    """One policy beside one other."""
    ours, theirs = measured[name], measured[baseline]
    row: Row = {
        "policy": name,
        "scenario": scenario.name,
        "baseline": baseline,
        "stream_count": len(ours),
        **{key: float(np.mean([one[key] for one in ours])) for key in ours[0]},
    }
    for key in COMPARED:
        delta = difference([one[key] for one in ours], [one[key] for one in theirs])
        short = "cost" if key == "total_cost" else key
        row |= {
            f"delta_{short}_fraction": delta.estimate,
            f"delta_{short}_ci_low": delta.low,
            f"delta_{short}_ci_high": delta.high,
        }
    return row


def margins(
    scenario: RegionScenario, measured: Measured, name: str, others: Sequence[str]
) -> Mapping[str, Row]:
    """One policy beside several others, by their names."""
    return {
        other: region_row(scenario, measured, name, other) for other in others if other in measured
    }


def validation_streams(scenario: RegionScenario, num_streams: int, seed: int) -> list[RegionStream]:
    """Streams by which policies are chosen, and on which none is judged in the end."""
    return [sample_stream(scenario, stream_rng(seed, "validation", i)) for i in range(num_streams)]


class RegionValidation:
    """Scores a policy on validation streams, the same for all trials of all sweeps."""

    def __init__(self, scenario: RegionScenario, num_streams: int = 2, seed: int = 0) -> None:
        """Draw the streams."""
        self.scenario = scenario
        self.streams = validation_streams(scenario, num_streams, seed)
        self._forecaster = fit_seasonal(scenario)

    def __call__(self, artifact: RegionArtifact) -> dict[str, float]:
        """Return mean measures, and `score`: minus the total cost of an episode, dollars."""
        rule = ActivationRule.of(self.scenario)
        found = [
            measure(
                run_regions(
                    self.scenario, stream, learned_regions(artifact, rule), self._forecaster
                )
            )
            for stream in self.streams
        ]
        means = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
        return {"score": -means["total_cost"], **means}

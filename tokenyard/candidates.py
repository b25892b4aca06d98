"""What evaluation can name: baselines, trained policies and bounds, behind one call.

Bounds see the simulator or the future and are no policies; here they only stand beside them in
a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from tokenyard.artifact import PolicyArtifact, RegistryLookup, resolve_champion
from tokenyard.policies import BASELINES, PolicyContext, make_policy
from tokenyard.policies.learned import learned_policy
from tokenyard.policies.tuned import load_tuned
from tokenyard.scenario import Scenario
from tokenyard.sim.bounds import BOUNDS
from tokenyard.sim.run import Run, run_compiled, run_each, run_policy
from tokenyard.sim.streams import StreamSet, StreamSource
from tokenyard.types import RoutingPolicy

TRAINED = ("champion", "generic")
"""Names that stand for a trained policy: the scenario's best, and the one for any cluster."""


@dataclass(frozen=True)
class Candidate:
    """Something to be evaluated; picklable."""

    name: str
    source: str
    """Where it comes from, in words for a table; with the hash of a trained policy."""
    run: Callable[[Scenario, StreamSet, int], list[Run]]
    """Runs it over streams, with a seed for its own randomness."""


def resolve_candidate(
    name: str, scenario: Scenario, registry: RegistryLookup | None = None
) -> Candidate:
    """Find what a name means.

    Args:
        name: A baseline, a bound, `champion`, `generic`, or the path of a policy file (.npz).
        scenario: Whose champion, tuned rules and servers apply.
        registry: Where registered champions are looked up.

    Raises:
        ValueError: The name is unknown, or it cannot be run on this scenario; a policy file that
            is missing or broken gives an ArtifactError.
    """
    if name in BASELINES:
        context = PolicyContext(
            scenario.name, scenario.slo, np.random.default_rng(0), scenario.num_servers
        )
        make_policy(name, context)  # Parameters that are missing must show before a long run.
        return Candidate(name, "baseline", partial(_run_baseline, name))
    if name in BOUNDS:
        # One request is enough to be refused, where the bound does not exist for the servers.
        BOUNDS[name](scenario, StreamSource(scenario).sample(1, np.random.default_rng(0)), 0)
        return Candidate(name, "bound, no policy", partial(_run_bound, name))
    if name in TRAINED or name.endswith(".npz"):
        return _trained(name, scenario, registry)
    known = [*BASELINES, *TRAINED, *BOUNDS]
    raise ValueError(f"unknown policy {name!r}; give a policy file (.npz) or one of {known}")


def run_candidates(
    candidates: Sequence[Candidate],
    scenario: Scenario,
    streams: StreamSet,
    seed: int,
    jobs: int = 1,
) -> dict[str, list[Run]]:
    """Run candidates over equal streams, in as many processes as `jobs`; runs by name."""
    run = partial(_run, scenario=scenario, streams=streams, seed=seed)
    if jobs == 1:
        runs = [run(candidate) for candidate in candidates]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            runs = list(pool.map(run, candidates))
    return {candidate.name: some for candidate, some in zip(candidates, runs, strict=True)}


def _run(candidate: Candidate, scenario: Scenario, streams: StreamSet, seed: int) -> list[Run]:
    return candidate.run(scenario, streams, seed)


def _trained(name: str, scenario: Scenario, registry: RegistryLookup | None) -> Candidate:
    if name == "champion":
        artifact, source = resolve_champion("routing", scenario.name, registry=registry)
    elif name == "generic":
        artifact, source = resolve_champion("routing", "generic", registry=registry)
    else:
        artifact, source = resolve_champion("routing", scenario.name, path=name)
        name = Path(name).stem
    metadata = artifact.metadata
    if metadata.num_replicas not in (None, scenario.num_servers):
        raise ValueError(
            f"{source} decides between {metadata.num_replicas} replicas; "
            f"scenario {scenario.name!r} has {scenario.num_servers}"
        )
    rule = metadata.lineage.get("rule")
    made = f"trained by {metadata.trainer}" if rule is None else f"the rule {rule}"
    words = f"{source}, {made} on {metadata.scenario}, {artifact.sha256}"
    return Candidate(name, words, partial(_run_trained, artifact))


def _run_baseline(name: str, scenario: Scenario, streams: StreamSet, seed: int) -> list[Run]:
    if name in ("sed", "sed_reserve", "sed_dump"):
        # What the simulator of servers has compiled decides alike, a hundred times as fast.
        reserve_above_tokens, dump_server = np.inf, -1
        if name == "sed_reserve":
            reserve_above_tokens = load_tuned(scenario.name).reserve_above_tokens
        if name == "sed_dump":
            dump_server = load_tuned(scenario.name).dump_replica
        known = run_compiled(
            scenario, streams, lambda sim: sim.run_delay_rule(reserve_above_tokens, dump_server)
        )
        if known is not None:
            return known

    def factory(rng: np.random.Generator) -> RoutingPolicy:
        context = PolicyContext(scenario.name, scenario.slo, rng, scenario.num_servers)
        return make_policy(name, context)

    return run_policy(scenario, streams, factory, seed)


def _run_trained(
    artifact: PolicyArtifact, scenario: Scenario, streams: StreamSet, seed: int
) -> list[Run]:
    diurnal = scenario.arrivals.diurnal
    started_at = diurnal.started_at if diurnal else None
    slo = scenario.slo
    if artifact.metadata.kind == "generic":
        weights, mean_total_tokens = artifact.arrays, artifact.metadata.mean_total_tokens
        known = run_compiled(
            scenario,
            streams,
            lambda sim: sim.run_generic(weights["server_weights"], mean_total_tokens),
        )
        if known is not None:
            return known
    return run_policy(
        scenario, streams, lambda rng: learned_policy(artifact, started_at, slo), seed
    )


def _run_bound(name: str, scenario: Scenario, streams: StreamSet, seed: int) -> list[Run]:
    return run_each(scenario, streams, [BOUNDS[name](scenario, s, seed) for s in streams.requests])

"""Policy search for the one policy for any cluster: every generation sees other clusters.

Cross-entropy search (`tokenyard.cross_entropy`) over the weights of
`tokenyard.routing.scores.any_cluster`. What makes them generic is what they are searched on:
servers, or replicas that batch, in clusters of many sizes and mixtures, from idle to nearly
overloaded, under Poisson traffic and recorded kinds of bursts. No scenario that ships is among
them.

A candidate is judged against the best hand rule *of each cluster*, found among several parameters
on the same streams. Its cost is what it gains on average, plus guards: on average over clusters of
a kind, neither mean, nor p99, nor violations may be above that rule's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from tokenyard.cross_entropy import CrossEntropy
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.drawn_clusters import (
    MEAN_TOTAL_TOKENS,
    NOTHING_PAID,
    SLO_S,
    Kind,
    draw_cluster,
)
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.scores.any_cluster import (
    HOPELESS_FEATURES,
    NUM_ENGINE_WEIGHTS,
    NUM_SERVER_FEATURES,
    NUM_SERVER_WEIGHTS,
    SLOT_MODULATORS,
    VIOLATION_FEATURES,
)
from tokenyard.routing.simulator import Simulator, make_simulator
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSource, stream_rng
from tokenyard.routing.validation import outcome_row
from tokenyard.types import FloatArray, IntArray

_INERTIA = 0.2
"""Clusters differ from generation to generation, so that the centre goes most of the way only."""


@dataclass(frozen=True)
class Found:
    """What a policy did on every stream; arrays of shape (streams,)."""

    score: FloatArray
    """`metrics.score`, higher is better."""
    mean_s: FloatArray
    p99_s: FloatArray
    violations: FloatArray

    @classmethod
    def of(cls, sim: Simulator, num_streams: int, slo_s: float) -> Found:
        """Measure streams that have been run to their end."""
        rows = [outcome_row(sim.outcomes(copy), slo_s) for copy in range(num_streams)]
        return cls(*np.array(rows).T)

    @classmethod
    def together(cls, some: Sequence[Found]) -> Found:
        """Put the streams of several clusters into one."""
        fields = ("score", "mean_s", "p99_s", "violations")
        return cls(*(np.concatenate([getattr(one, name) for one in some]) for name in fields))


class TrainingCluster:
    """A cluster with loaded streams, on which policies are tried."""

    def __init__(
        self, scenario: Scenario, num_streams: int, num_requests: int, rng: np.random.Generator
    ) -> None:
        """Draw the streams from `rng`."""
        self.scenario = scenario
        self._num_streams = num_streams
        source = StreamSource(scenario)
        self._sim = make_simulator(scenario, num_streams, num_requests, NOTHING_PAID)
        self._streams = [source.sample(num_requests, rng) for _ in range(num_streams)]
        for copy, stream in enumerate(self._streams):
            self._sim.load(copy, stream)

    def try_weights(self, weights: FloatArray) -> Found:
        """Run all streams under weights of `tokenyard.routing.scores.any_cluster`."""
        self._sim.run_any_cluster(weights, MEAN_TOTAL_TOKENS)
        return self._found()

    def best_rule(self) -> Found:
        """Run the hand rules with several parameters each; return what the best of them did."""
        found = []
        for decide in server_model(self.scenario).rule_variants(self._sim).values():
            decide(self._sim)
            found.append(self._found())
        return max(found, key=lambda one: float(one.score.mean()))

    def _found(self) -> Found:
        return Found.of(self._sim, self._num_streams, self.scenario.slo_response_s)


@dataclass(frozen=True)
class AnyClusterConfig:
    """How wide and how long the search looks, and what it minds."""

    population: int = 32
    num_elites: int = 6
    clusters: int = 36
    """Clusters of a generation."""
    requests_per_cluster: int = 2000
    num_generations: int = 120
    """Generations over which the extra noise fades."""
    initial_std: float = 0.1
    noise: float = 0.3
    """Share of the first spread that is added to the elites' in the first generation."""
    loss_guard: float = 4.0
    """Cost of each unit by which the mean of a kind of cluster exceeds the rule's, relative to it;
    half of it for a single cluster, above 2 %."""
    tail_guard: float = 3.0
    """The same for p99; a quarter of it for a single cluster, above 5 %."""
    violation_guard: float = 4.0
    """Cost of each unit of the share of violations above the rule's."""


class AnyClusterSearch(CrossEntropy):
    """A search over the weights of the policy for any cluster."""

    def __init__(
        self,
        kind: Kind = "servers",
        config: AnyClusterConfig | None = None,
        seed: int = 0,
        start: FloatArray | None = None,
    ) -> None:
        """Start at `start`, or at the rule that is corrected.

        Args:
            kind: What the clusters are made of.
            config: How the search goes.
            seed: Of clusters, traffic and candidates.
            start: Weights to begin with.
        """
        assert kind in get_args(Kind)
        self.kind: Kind = kind
        self.config = config = config or AnyClusterConfig()
        std = _initial_std(kind, config.initial_std)
        super().__init__(
            np.zeros(len(std)) if start is None else start, std, seed=seed,
            population=config.population, num_elites=config.num_elites, noise=config.noise,
            noise_unit=std, num_generations=config.num_generations, inertia=_INERTIA,
        )  # fmt: skip

    @property
    def env_steps(self) -> int:
        """Requests that candidates have routed so far."""
        config = self.config
        each = config.population * config.clusters * config.requests_per_cluster
        return self.generation * each

    def step(self) -> dict[str, float]:
        """Run one generation and return how its centre does beside the best rules."""
        config = self.config
        clusters = self._fresh_clusters()
        rules = Found.together([cluster.best_rule() for cluster in clusters])
        names = [server_model(cluster.scenario).group() for cluster in clusters]
        groups = np.array([sorted(set(names)).index(name) for name in names])
        candidates = self.draw(self.rng())
        found = [
            Found.together([cluster.try_weights(weights) for cluster in clusters])
            for weights in candidates
        ]
        costs = np.array([search_cost(config, one, rules, groups) for one in found])
        self.update(candidates, costs)
        return {
            "cost": float(costs[0]),
            "delta_mean_fraction": float(np.mean(found[0].mean_s / rules.mean_s)) - 1.0,
            "delta_p99_fraction": float(np.mean(found[0].p99_s / rules.p99_s)) - 1.0,
            "delta_slo_violation": float(np.mean(found[0].violations - rules.violations)),
            "mean_std": float(self.std.mean()),
        }

    def _fresh_clusters(self) -> list[TrainingCluster]:
        config = self.config
        clusters = []
        for number in range(config.clusters):
            rng = stream_rng(self.seed, "training", self.generation * config.clusters + number)
            scenario = draw_cluster(rng, self.kind)
            clusters.append(TrainingCluster(scenario, 1, config.requests_per_cluster, rng))
        return clusters

    def state(self) -> dict[str, Any]:
        """What `restore` needs, with the kind of clusters."""
        return super().state() | {"kind": self.kind}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state`."""
        super().restore(state)
        self.kind = state["kind"]


def _initial_std(kind: Kind, std: float) -> FloatArray:
    """Spread of the first generation, one number per weight."""
    if kind == "engines":
        return np.full(NUM_ENGINE_WEIGHTS, std)
    of_weights: FloatArray = np.full(NUM_SERVER_WEIGHTS, std)
    of_features = of_weights.reshape(-1, NUM_SERVER_FEATURES)
    # SLO violations have to be moved further than the rest before it goes elsewhere at all.
    of_features[:, VIOLATION_FEATURES] *= 2.0
    of_features[:, HOPELESS_FEATURES] *= 3.0
    # Slots have modulators of their own: what is found for one slot stays as it is.
    slots = np.zeros(len(of_features), dtype=np.bool_)
    slots[SLOT_MODULATORS] = True
    of_features[slots != (kind == "slots")] = 0.0
    return of_weights


def search_cost(config: AnyClusterConfig, found: Found, rules: Found, groups: IntArray) -> float:
    """What a candidate costs beside the best rules: its gain on average, and its guards.

    Args:
        config: Weights of the guards.
        found: What the candidate did.
        rules: What the best rule of every cluster did.
        groups: Number of the kind of every cluster, shape (clusters,).
    """
    mean = np.log(found.mean_s / rules.mean_s)
    tail = np.log(found.p99_s / rules.p99_s)
    violations = found.violations - rules.violations
    sizes = np.bincount(groups)

    def guard(excess: FloatArray) -> float:
        """Mean over clusters of the excess of their kind, where there is one."""
        of_groups = np.bincount(groups, excess) / sizes
        return float((np.maximum(of_groups, 0.0) * sizes).sum() / sizes.sum())

    cost = float(np.log(found.score / rules.score).mean() + mean.mean())
    losses, tails = (
        float(np.maximum(excess - allowed, 0.0).mean())
        for excess, allowed in ((mean, 0.02), (tail, 0.05))
    )
    cost += config.loss_guard * (guard(mean) + 0.5 * losses)
    cost += config.tail_guard * (guard(tail) + 0.25 * tails)
    return cost + config.violation_guard * guard(violations)


def any_cluster_artifact(
    server_weights: FloatArray,
    engine_weights: FloatArray,
    metrics_found: Mapping[str, float] | None = None,
    lineage: Mapping[str, str] | None = None,
    orders: Mapping[str, FloatArray] | None = None,
) -> PolicyArtifact:
    """Export weights as the policy for any cluster.

    It brings no length predictor: whoever runs it knows the traffic better.

    Args:
        server_weights: Of servers, shape (NUM_SERVER_WEIGHTS,).
        engine_weights: Of replicas that batch, shape (NUM_ENGINE_WEIGHTS,).
        metrics_found: What the search found of it.
        lineage: What it was made from.
        orders: `server_order` and `engine_order`, shape (NUM_ORDER_WEIGHTS,); None: first come.
    """
    metadata = ArtifactMetadata(
        kind="generic",
        scenario="generic",
        trainer="policy_search",
        num_replicas=None,
        slo_response_s=SLO_S,
        mean_total_tokens=MEAN_TOTAL_TOKENS,
        output_length="none",
        metrics=metrics_found or {},
        lineage=lineage or {},
    )
    arrays = {"server_weights": server_weights.copy(), "engine_weights": engine_weights.copy()}
    return PolicyArtifact(metadata, arrays | dict(orders or {}))

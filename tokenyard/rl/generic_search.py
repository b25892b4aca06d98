"""Policy search for one policy that works on any cluster: every generation sees other clusters.

The weights are those of `observation.linear_scores`, which scores every server from its own state
and speed rank, so they decide between any number of servers, and permuting servers permutes the
decision. What makes them generic is what they are searched on: clusters of 2 to 32 servers with
mixed speeds, from idle to nearly overloaded, under Poisson traffic and recorded kinds of bursts,
none of which any regime of the evaluation shares. Units are fixed: a promise of 2 s and requests of
2000 tokens are what "late" and "large" mean to the policy, on every cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenyard.rl.policy_search import Objective, PolicySearch, SearchConfig, StreamCosts
from tokenyard.scenario import Arrivals, RewardWeights, Scenario, Server, load_scenario
from tokenyard.sim.cluster import ClusterSim
from tokenyard.sim.streams import StreamSource, stream_rng
from tokenyard.types import FloatArray

MEAN_TOTAL_TOKENS = 2000.0
SLO_S = 2.0

_LARGEST = 32
_SPEEDS = (2000.0, 10_000.0)
"""Range of a server's tokens per second."""
_NOTHING_PAID = RewardWeights(
    processing=0.0, queue=0.0, overload=0.0, balance=0.0, accept=0.0, drop=0.0
)


def draw_cluster(rng: np.random.Generator) -> Scenario:
    """Draw a cluster and its traffic.

    The number of servers is drawn evenly in its logarithm. A third of clusters has equal servers, a
    third two or three kinds, a third as many as servers.
    """
    num = round(np.exp(rng.uniform(np.log(2), np.log(_LARGEST))))
    kinds = int(rng.choice([1, int(rng.integers(2, 4)), num]))
    slowest, fastest = np.log(_SPEEDS)
    speeds = np.exp(rng.uniform(slowest, fastest, min(kinds, num)))
    # Each kind at least once.
    which = np.concatenate([np.arange(len(speeds)), rng.integers(0, len(speeds), num)])[:num]
    bursty = rng.random() < 0.3
    workload = "azure_code" if rng.random() < 0.6 else "azure_conv"
    # The bursts of code overload any server for minutes at a fraction of this load.
    highest = 0.5 if bursty and workload == "azure_code" else 0.98
    discipline = rng.choice(["serial", "parallel_split", "parallel_full"], p=[0.7, 0.2, 0.1])
    return Scenario(
        name="drawn",
        description="A cluster drawn at random.",
        servers=tuple(
            Server(
                name=f"server-{i}",
                tokens_per_s=round(float(speeds[kind])),
                concurrency=max(round(float(speeds[kind]) / 1000), 1),
            )
            for i, kind in enumerate(which)
        ),
        discipline=str(discipline),
        workload=workload,
        arrivals=Arrivals(process="mmpp" if bursty else "poisson", load=_draw_load(rng, highest)),
        output_length="by_context" if rng.random() < 0.8 else "none",
        slo_response_s=SLO_S,
        reward=_NOTHING_PAID,
    )


def _draw_load(rng: np.random.Generator, highest: float) -> float:
    """More often high than low: where servers are idle, all sensible rules do the same."""
    return float(0.3 + (highest - 0.3) * np.sqrt(rng.random()))


@dataclass(frozen=True)
class EveryCluster(Objective):
    """An objective that a gain on one cluster does not excuse a loss on another."""

    loss_guard: float = 4.0
    """Cost of each unit by which the mean response on a cluster exceeds the rule's, as a fraction
    of it."""
    streams_per_cluster: int = 2

    def relative_cost(self, candidate: StreamCosts, baseline: StreamCosts) -> float:
        """Mean over clusters of the cost over the baseline's, plus the guards of each."""
        cost, p99 = (
            self._of_clusters(one) / self._of_clusters(other)
            for one, other in (
                (candidate.cost_s, baseline.cost_s),
                (candidate.p99_s, baseline.p99_s),
            )
        )
        guards = self.loss_guard * np.maximum(cost - 1.0, 0.0)
        guards += self.tail_guard * np.maximum(p99 - 1.0, 0.0)
        return float((cost + guards).mean())

    def _of_clusters(self, per_stream: FloatArray) -> FloatArray:
        means: FloatArray = per_stream.reshape(-1, self.streams_per_cluster).mean(axis=1)
        return means


@dataclass(frozen=True)
class GenericConfig(SearchConfig):
    """How wide and how long the search over clusters looks."""

    objective: Objective = EveryCluster(cvar99=0.1, violation=2.0, tail_guard=1.5)
    population: int = 48
    num_elites: int = 10
    initial_std: float = 0.08
    noise: float = 0.02
    clusters: int = 32
    """Clusters of a generation."""
    streams_per_generation: int = 64
    requests_per_stream: int = 1500
    num_generations: int = 60


class GenericSearch(PolicySearch):
    """Policy search over clusters that are drawn anew for every generation."""

    config: GenericConfig

    def __init__(self, config: GenericConfig | None = None, seed: int = 0) -> None:
        """Start at shortest expected delay."""
        like = load_scenario("poisson_085").model_copy(
            update={"name": "generic", "slo_response_s": SLO_S}
        )
        super().__init__(like, config or GenericConfig(), seed)
        self._sims: list[ClusterSim] = []

    @property
    def mean_total_tokens(self) -> float:
        """2000, whatever the traffic."""
        return MEAN_TOTAL_TOKENS

    def _load_fresh_streams(self) -> None:
        config = self.config
        per_cluster = config.streams_per_generation // config.clusters
        self._sims = []
        for cluster in range(config.clusters):
            rng = stream_rng(self.seed, "training", self.generation * config.clusters + cluster)
            scenario = draw_cluster(rng)
            source = StreamSource(scenario)
            sim = ClusterSim(scenario, per_cluster, config.requests_per_stream)
            for copy in range(per_cluster):
                sim.load(copy, source.sample(config.requests_per_stream, rng))
            self._sims.append(sim)

    def _costs(self, weights: FloatArray) -> StreamCosts:
        num = self.config.streams_per_generation // self.config.clusters
        found = [
            self._stream_costs(sim, weights, self.mean_total_tokens, num) for sim in self._sims
        ]
        return StreamCosts(
            cost_s=np.concatenate([one.cost_s for one in found]),
            p99_s=np.concatenate([one.p99_s for one in found]),
        )

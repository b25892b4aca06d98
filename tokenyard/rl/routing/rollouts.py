"""Policy improvement by rollouts: a network learns which choices turned out cheaper.

Every round plays the present policy over fresh streams, tries out every replica at some of its
decisions (`tokenyard.routing.simulator.rollouts`), and moves the network so that the choices that
were cheaper become more likely: it lowers the expected cost of a softmax over replicas, for which
all actions' costs are known, so that no action has to be drawn and nothing is bootstrapped. The
differences are small against their noise, and tens of thousands of decisions a round average it
out; what a choice costs others and those who come later is all in them, which no reward that is
paid at once tells, and the discounted sum of such rewards tells late and dimly.

Sources: Lagoudakis and Parr 2003, "Reinforcement learning as classification"; Tesauro and
Galperin 1996 for rollouts.

Shapes: K decisions, N replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tokenyard.routing.artifact import PolicyArtifact, feature_scaling, length_predictor
from tokenyard.routing.equivariant import Observed, scorer_inputs
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS, NUM_REQUEST_FEATURES
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.scores.residual import LAYOUT, ResidualNetwork, fold
from tokenyard.routing.simulator.batching_streams import BatchingStream
from tokenyard.routing.simulator.rollouts import (
    RESPONSE,
    SLOW,
    VIOLATIONS,
    RolloutSim,
    Samples,
    concatenate,
)
from tokenyard.routing.simulator.streams import StreamSource, stream_rng
from tokenyard.types import FloatArray

_SMALLEST_STD = 1e-3


@dataclass(frozen=True)
class RolloutConfig:
    """What is made small, how much is tried out, and how the network is moved."""

    start: tuple[float, ...] = (0.0,) * NUM_MARGINAL_WEIGHTS
    """Weights of the rule that is corrected, and that plays the first round; the default is least
    marginal delay."""
    violation_s: float = 0.0
    """Seconds that an SLO violation costs beside the response time."""
    slow_s: float = 0.0
    """Seconds that a response slower than `slow_after_s` costs beside its length. With that at the
    99th percentile that must be kept, it is the price of the share of requests beyond."""
    slow_after_s: float = 5.0
    load_factor: tuple[float, float] = (1.0, 1.0)
    """Range of factors on the scenario's arrival rate."""
    streams_per_round: int = 20
    requests_per_stream: int = 5000
    every: int = 8
    """Decisions from one at which all choices are tried out to the next."""
    horizon: int = 200
    """Arrivals over which a choice is played on, long enough for a backlog to drain."""
    decide_anew: bool = False
    """Let the policy decide anew in every future; else those who come later stay where they
    went. The one is for policies that are still far from good, the other has less noise."""
    hidden: int = 32
    epochs: int = 15
    batch: int = 1024
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    clip_slos: float = 7.0
    """Costs of choices differ by no more than so many SLOs from the one that was taken."""
    sharpness: float = 2.0
    """How much a cost of one SLO lowers a replica's preference while learning."""
    averaging: float = 0.7
    """Share of the networks of all rounds before in the one that plays and is exported."""
    jobs: int = 1
    """Processes that play."""

    def env_steps_per_round(self, num_replicas: int) -> int:
        """Requests that a round places at most, in all rollouts."""
        num_decisions = -(-self.requests_per_stream // self.every)
        tried = num_decisions * num_replicas * (self.horizon + 1)
        return self.streams_per_round * (self.requests_per_stream + tried)


class RolloutImprovement:
    """Rounds of trying out and learning, which can be stopped and resumed between any two."""

    def __init__(
        self, scenario: Scenario, config: RolloutConfig | None = None, seed: int = 0
    ) -> None:
        """Start at the rule.

        Raises:
            ValueError: The scenario has no fleet.
        """
        self.scenario = scenario
        self.config = config or RolloutConfig()
        self.seed = seed
        self.round = 0
        self._learned = False
        self._source = StreamSource(scenario)
        self._sim = self._make_sim()
        self._network = _Network(self.config.hidden, seed)
        self._average = _Network(self.config.hidden, seed)

    @property
    def env_steps(self) -> int:
        """Requests placed so far, in all rollouts."""
        return self.round * self.config.env_steps_per_round(self.scenario.num_servers)

    @property
    def correction(self) -> ResidualNetwork:
        """The policy as it is after the rounds so far."""
        artifact = self.artifact()
        return fold(artifact.arrays, artifact.layers)

    def step(self) -> dict[str, float]:
        """Run one round.

        Returns:
            How the policy now does on the round's own samples: `expected_gain_s`, by which a
            decision is expected to cost less than the one taken, and `changed_fraction`.
        """
        samples = self.play()
        if not self._learned:
            self._network.sample_decisions(samples)
            self._average.sample_decisions(samples)
        gains_slos = self._gains_slos(samples)
        self._learn(samples, gains_slos)
        # A round is noise for the most part, and what its network adds at random averages out.
        kept = self.config.averaging if self._learned else 0.0
        self._average.move_towards(self._network, 1.0 - kept)
        self._learned = True
        self.round += 1
        return self._found(samples, gains_slos)

    def go_on_from(self, policy: PolicyArtifact) -> None:
        """Take over the network of a policy that was exported, for the rule of `config.start`.

        Raises:
            ValueError: It is not of kind `corrected`, or its network is of another size.
        """
        hidden = len(policy.arrays.get("b0", ()))
        if policy.metadata.kind != "corrected" or hidden != self.config.hidden:
            raise ValueError(
                f"cannot go on from a {policy.metadata.kind} policy of {hidden} hidden units; it "
                f"must be a corrected one of {self.config.hidden}"
            )
        for network in (self._network, self._average):
            network.load(policy.arrays)
        self._learned = True

    def play(self) -> Samples:
        """Try out choices of the present policy on the round's streams."""
        config = self.config
        first = self.round * config.streams_per_round
        indices = np.arange(first, first + config.streams_per_round)
        if config.jobs == 1:
            return concatenate(
                [self._play_one(self.correction, index) for index in indices.tolist()]
            )
        parts = np.array_split(indices, config.jobs)
        with ProcessPoolExecutor(config.jobs, mp_context=get_context("spawn")) as pool:
            futures = [
                pool.submit(
                    _play_apart, self.scenario, config, self.seed, self.correction, part.tolist()
                )
                for part in parts
            ]
            return concatenate([future.result() for future in futures])

    def _make_sim(self) -> RolloutSim:
        length = self.config.requests_per_stream
        return RolloutSim(self.scenario, length, self._source.mean_total_tokens)

    def _play_one(self, correction: ResidualNetwork, index: int) -> Samples:
        config = self.config
        rng = stream_rng(self.seed, "training", index)
        load_factor = rng.uniform(*config.load_factor)
        drawn = self._source.sample(config.requests_per_stream, rng, load_factor)
        stream = cast(BatchingStream, drawn)
        return self._sim.sample(
            correction,
            stream,
            config.every,
            config.horizon,
            config.slow_after_s,
            config.decide_anew,
        )

    def _gains_slos(self, samples: Samples) -> FloatArray:
        """What every choice saves beyond the one taken, bounded, in SLOs, shape (K, N)."""
        config = self.config
        costs_s = (
            samples.costs[..., RESPONSE]
            + config.violation_s * samples.costs[..., VIOLATIONS]
            + config.slow_s * samples.costs[..., SLOW]
        )
        saved_s = np.take_along_axis(costs_s, samples.chosen[:, None], axis=1) - costs_s
        slos: FloatArray = saved_s / self.scenario.slo_response_s
        return np.clip(slos, -config.clip_slos, config.clip_slos)

    def _learn(self, samples: Samples, gains_slos: FloatArray) -> None:
        """Move the network so that a softmax over replicas gains the most."""
        config = self.config
        observations, scores = _inputs(samples)
        gains = torch.as_tensor(gains_slos, dtype=torch.float32)
        optimiser = torch.optim.AdamW(
            self._network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + self.round)
        for _ in range(config.epochs):
            for some in torch.randperm(len(samples), generator=draw).split(config.batch):
                preferences = config.sharpness * self._network(observations[some], scores[some])
                loss = -(torch.softmax(preferences, 1) * gains[some]).sum(1).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()

    def _found(self, samples: Samples, gains_slos: FloatArray) -> dict[str, float]:
        with torch.no_grad():
            choice = self._average(*_inputs(samples)).argmax(1).numpy()
        gain_slos = np.take_along_axis(gains_slos, choice[:, None], axis=1).mean()
        return {
            "expected_gain_s": float(gain_slos * self.scenario.slo_response_s),
            "changed_fraction": float((choice != samples.chosen).mean()),
        }

    def artifact(
        self,
        metrics_found: Mapping[str, float] | None = None,
        lineage: Mapping[str, str] | None = None,
    ) -> PolicyArtifact:
        """Export the present policy.

        Args:
            metrics_found: What it scored, for the record.
            lineage: What it was made from, for the record.
        """
        scenario = self.scenario
        metadata = ArtifactMetadata(
            kind="corrected",
            scenario=scenario.name,
            trainer="rollouts",
            num_replicas=None,
            slo_response_s=scenario.slo_response_s,
            mean_total_tokens=self._source.mean_total_tokens,
            output_length=scenario.output_length,
            predictor=length_predictor(self._source.model),
            scaling=feature_scaling(self._source.scaler),
            activation="tanh",
            metrics=metrics_found or {},
            lineage=lineage or {},
        )
        weights = np.array(self.config.start)
        return PolicyArtifact(metadata, {"weights": weights, **self._average.arrays()})

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on as if nothing had happened."""
        return {
            "seed": self.seed,
            "round": self.round,
            "learned": self._learned,
            "network": _listed(self._network),
            "average": _listed(self._average),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state`."""
        self.seed = state["seed"]
        self.round = state["round"]
        self._learned = state["learned"]
        self._network.load(state["network"])
        self._average.load(state["average"])


def _inputs(samples: Samples) -> tuple[Tensor, Tensor]:
    scores = torch.as_tensor(samples.rule_scores, dtype=torch.float32)
    return torch.as_tensor(samples.observations), scores


def _listed(network: _Network) -> dict[str, Any]:
    return {name: array.tolist() for name, array in network.arrays().items()}


def _play_apart(
    scenario: Scenario,
    config: RolloutConfig,
    seed: int,
    correction: ResidualNetwork,
    part: list[int],
) -> Samples:
    """Play some of a round's streams in another process."""
    torch.set_num_threads(1)
    player = RolloutImprovement(scenario, config, seed)
    return concatenate([player._play_one(correction, index) for index in part])


class _Network(nn.Module):
    """Preference for every replica: what the network adds, less the rule's score in SLOs."""

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        # The seed is the search's own, and nobody else's random numbers are touched.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(
                [
                    nn.Linear(LAYOUT.num_inputs, hidden),
                    nn.Linear(hidden, hidden),
                    nn.Linear(hidden, 1, bias=False),
                ]
            )
        # Before it has learned anything it is the rule.
        nn.init.zeros_(self._layer(2).weight)
        for kind, size in (("request", NUM_REQUEST_FEATURES), ("replica", LAYOUT.num_features)):
            self.register_buffer(f"{kind}_mean", torch.zeros(size))
            self.register_buffer(f"{kind}_std", torch.ones(size))

    def _layer(self, index: int) -> nn.Linear:
        return cast(nn.Linear, self.layers[index])

    def sample_decisions(self, samples: Samples) -> None:
        """Take the units of the inputs from what was observed."""
        observed = LAYOUT.split_observation(torch.as_tensor(samples.observations), torch)
        for kind, values in (
            ("request", observed.request),
            ("replica", observed.replicas[observed.routable]),
        ):
            self.get_buffer(f"{kind}_mean").copy_(values.mean(0))
            self.get_buffer(f"{kind}_std").copy_(values.std(0).clamp(min=_SMALLEST_STD))

    def forward(self, observations: Tensor, rule_scores: Tensor) -> Tensor:
        """Shapes (K, O) and (K, N) to (K, N); minus infinity where not routable."""
        observed = LAYOUT.split_observation(observations, torch)
        normalised = Observed(
            (observed.request - self.get_buffer("request_mean")) / self.get_buffer("request_std"),
            (observed.replicas - self.get_buffer("replica_mean")) / self.get_buffer("replica_std"),
            observed.routable,
        )
        x = scorer_inputs(normalised, torch)
        x = torch.tanh(self._layer(0)(x))
        x = torch.tanh(self._layer(1)(x))
        added = self._layer(2)(x)[..., 0]
        # Where the rule says infinity, the difference would have no gradient, and none would be a
        # number where no replica is routable.
        scores = torch.where(torch.isfinite(rule_scores), rule_scores, 0.0)
        return torch.where(observed.routable, added - scores, -torch.inf)

    def move_towards(self, other: _Network, share: float) -> None:
        """Take over this share of another network's weights."""
        with torch.no_grad():
            for own, new in zip(self.parameters(), other.parameters(), strict=True):
                own.lerp_(new, share)

    def arrays(self) -> dict[str, FloatArray]:
        """Units and layers, as the artifact has them."""
        found = {name: buffer.numpy() for name, buffer in self.named_buffers()}
        for index in range(len(self.layers)):
            layer = self._layer(index)
            found[f"w{index}"] = layer.weight.detach().numpy()
            found[f"b{index}"] = np.zeros(1) if layer.bias is None else layer.bias.detach().numpy()
        return {name: array.astype(np.float64) for name, array in found.items()}

    def load(self, arrays: Mapping[str, Any]) -> None:
        """Take over what `arrays` gave."""
        with torch.no_grad():
            for name, buffer in self.named_buffers():
                buffer.copy_(torch.tensor(arrays[name]))
            for index in range(len(self.layers)):
                layer = self._layer(index)
                layer.weight.copy_(torch.tensor(arrays[f"w{index}"]))
                if layer.bias is not None:
                    layer.bias.copy_(torch.tensor(arrays[f"b{index}"]))

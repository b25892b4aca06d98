"""The exported routing policy: its kinds, which one is the champion, and what it is made from.

`KINDS` is the one table of what there is to know of a kind. To add one, write its class in
`tokenyard.routing.policies.learned` and its line here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenyard.artifact import Artifact, Kind
from tokenyard.network import Arrays, Network, check_layers, check_network, check_shape
from tokenyard.routing import observation as ob
from tokenyard.routing.metadata import ArtifactMetadata, FeatureScaling, LengthPredictor
from tokenyard.routing.policies.learned import (
    InOrder,
    MarginalPolicy,
    NetworkPolicy,
    ResidualPolicy,
    TablePolicy,
    order_weights,
)
from tokenyard.routing.policies.tuned import find_tuned
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.scores import residual as corrected
from tokenyard.routing.scores.order import FIRST_COME, NUM_ORDER_WEIGHTS
from tokenyard.routing.scores.residual import ResidualNetwork
from tokenyard.routing.types import ScoringPolicy
from tokenyard.types import FloatArray
from tokenyard.workload.features import RobustScaler
from tokenyard.workload.model import WorkloadModel, load_model

DEFAULT = "default"
"""What boards and laws call the rule of `default_rule`."""
DEFAULT_RULE, DEFAULT_SERVER_RULE = "marginal_delay+wspt@100:1", "marginal_in_order@3:10+sjf@20:1"
"""What decides where no policy was trained and no rule was tuned: for replicas that batch, and for
servers of a constant rate (docs/results/own-traffic.md)."""


class PolicySimulator(Protocol):
    """Runs streams under a policy, all copies at once: what trained policies need of a simulator.

    Actions have shape (num_copies,), observations (num_copies, size).
    """

    def run_linear(self, weights: FloatArray, mean_total_tokens: float, order: FloatArray) -> None:
        """Run all streams to the end under the linear policy of these weights, in an order."""

    def run_residual(
        self, correction: ResidualNetwork, mean_total_tokens: float, order: FloatArray
    ) -> None:
        """Run all streams to the end under a corrected policy, in an order."""

    def order_by(self, order: FloatArray) -> None:
        """Let requests that are placed one by one wait by an order."""

    def observe(self) -> npt.NDArray[np.float32]:
        """Encode what the router sees."""

    def step_and_observe(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], FloatArray]:
        """Place every copy's waiting request and run to its next decision."""

    def drain(self) -> FloatArray:
        """Let every copy finish what it holds; return what that earns, shape (num_copies,)."""

    def undecided(self) -> bool:
        """Whether any copy has a request left to be placed."""


@dataclass(frozen=True, eq=False)
class PolicyArtifact(Artifact[ArtifactMetadata]):
    """A trained routing policy.

    Arrays of a `marginal` policy: `weights`, shape (NUM_MARGINAL_WEIGHTS,) or
    (NUM_MARGINAL_SLO_WEIGHTS,). Arrays of an `mlp`: those of
    a `tokenyard.network.Network`, from an observation to one preference per replica, higher is
    better.
    A `corrected` policy has the `weights` of a `marginal` one, and a network that scores every
    replica alike: `request_mean`, `request_std`, `replica_mean` and `replica_std`, and three layers
    from `Layout.num_inputs` numbers to what is taken off the cost of one replica.
    All may have an `order`, shape (NUM_ORDER_WEIGHTS,) (`tokenyard.routing.scores.order`).

    Raises:
        ValueError: The arrays do not fit the metadata.
    """

    METADATA = ArtifactMetadata

    def check(self) -> None:
        """Check what the kind needs."""
        KINDS[self.metadata.kind].check(self)
        if self.orders:
            _check_order(self)

    @property
    def orders(self) -> bool:
        """Whether it also says in which order requests wait."""
        return "order" in self.arrays

    @property
    def needs_engine(self) -> bool | None:
        """Whether it decides between replicas that batch continuously; None: between any."""
        return KINDS[self.metadata.kind].needs_engine(self)

    def decide(self, sim: PolicySimulator) -> None:
        """Run all streams of a simulator to the end under the greedy policy, in compiled code."""
        KINDS[self.metadata.kind].run(self, sim)


MakePolicy = Callable[[ArtifactMetadata, Arrays, datetime | None], ScoringPolicy]


@dataclass(frozen=True)
class RoutingKind(Kind[PolicyArtifact]):
    """What there is to know of one kind of routing policies."""

    policy: MakePolicy
    """Makes it for one stream of requests, with the calendar time of second 0."""
    run: Callable[[PolicyArtifact, PolicySimulator], None] = field(kw_only=True)
    """As `PolicyArtifact.decide`."""
    needs_engine: Callable[[PolicyArtifact], bool | None] = lambda artifact: None
    """Whether it decides between replicas that batch continuously; None: between any."""


def _check_order(artifact: PolicyArtifact) -> None:
    check_shape(artifact.arrays, "order", (NUM_ORDER_WEIGHTS,))
    if (artifact.arrays["order"] < 0.0).any():
        raise ValueError("order has a weight below 0")


def _check_marginal(artifact: PolicyArtifact) -> None:
    has_slo_terms = len(artifact.arrays.get("weights", ())) == ob.NUM_MARGINAL_SLO_WEIGHTS
    size = ob.NUM_MARGINAL_SLO_WEIGHTS if has_slo_terms else ob.NUM_MARGINAL_WEIGHTS
    check_shape(artifact.arrays, "weights", (size,))


def _learned_on_batches(artifact: PolicyArtifact) -> bool | None:
    """On servers at a constant rate a policy is for as many as it learned on."""
    return True if artifact.metadata.num_replicas is None else None


def _check_mlp(artifact: PolicyArtifact) -> None:
    _check_inputs(artifact)
    metadata = artifact.metadata
    if metadata.num_replicas is None:
        raise ValueError("a network needs num_replicas in its metadata")
    if metadata.expected_finish or metadata.residual_scale:
        raise ValueError(
            "networks over the flat observation are no longer shown finish times; train another one"
        )
    size = ob.observation_size(metadata.num_replicas, whole=False)
    check_network(artifact.arrays, size, metadata.num_replicas)


def _check_residual(artifact: PolicyArtifact) -> None:
    _check_inputs(artifact)
    _check_marginal(artifact)
    sizes = {"request": ob.NUM_REQUEST_FEATURES, "replica": corrected.LAYOUT.num_features}
    for of, size in sizes.items():
        check_shape(artifact.arrays, f"{of}_mean", (size,))
        check_shape(artifact.arrays, f"{of}_std", (size,))
    check_layers(artifact.arrays, corrected.LAYOUT.num_inputs, 1)
    if len(artifact.layers) != corrected.NUM_LAYERS or artifact.metadata.activation != "tanh":
        raise ValueError(f"a corrected policy has {corrected.NUM_LAYERS} layers with tanh")


def _check_inputs(artifact: PolicyArtifact) -> None:
    if artifact.metadata.scaling is None:
        raise ValueError("a network needs scaling in its metadata")


def _run_linear(artifact: PolicyArtifact, sim: PolicySimulator) -> None:
    order = order_weights(artifact.arrays)
    sim.run_linear(artifact.arrays["weights"], artifact.metadata.mean_total_tokens, order)


def _run_residual(artifact: PolicyArtifact, sim: PolicySimulator) -> None:
    correction = corrected.fold(artifact.arrays, artifact.layers)
    order = order_weights(artifact.arrays)
    sim.run_residual(correction, artifact.metadata.mean_total_tokens, order)


def _run_network(artifact: PolicyArtifact, sim: PolicySimulator) -> None:
    sim.order_by(order_weights(artifact.arrays))
    observations = sim.observe()
    while sim.undecided():
        actions = network_preferences(artifact, observations).argmax(axis=1)
        observations, _rewards = sim.step_and_observe(actions)
    sim.drain()
    sim.order_by(FIRST_COME)


def network_preferences(
    artifact: PolicyArtifact, observations: npt.NDArray[np.float32]
) -> FloatArray:
    """Preferences of an exported `mlp`, shape (num, num_replicas), for observations (num, size)."""
    return Network.from_arrays(artifact.arrays, artifact.metadata.activation)(observations)


def _policy_of(plain: type[TablePolicy]) -> MakePolicy:
    """Make a policy, and put it in an order where its artifact has one: only then it orders."""

    def made(
        metadata: ArtifactMetadata, arrays: Arrays, started_at: datetime | None
    ) -> ScoringPolicy:
        policy = plain(metadata, arrays, started_at)
        return InOrder(policy, arrays) if "order" in arrays else policy

    return made


KINDS: dict[str, RoutingKind] = {
    "marginal": RoutingKind(
        _check_marginal, _policy_of(MarginalPolicy), run=_run_linear,
        needs_engine=_learned_on_batches,
    ),
    "mlp": RoutingKind(
        _check_mlp, _policy_of(NetworkPolicy), run=_run_network,
        needs_engine=lambda _: False,
    ),
    "corrected": RoutingKind(
        _check_residual, _policy_of(ResidualPolicy), run=_run_residual,
        needs_engine=lambda artifact: artifact.metadata.num_replicas is None,
    ),
}  # fmt: skip
"""Kind of an artifact to what there is to know of it; `ArtifactMetadata.kind` says what each is."""


def learned_policy(artifact: PolicyArtifact, started_at: datetime | None = None) -> ScoringPolicy:
    """Make the policy of an artifact's kind, ready for one stream of requests.

    `started_at` is the calendar time of second 0, where training traffic had a calendar.
    """
    metadata, arrays = artifact.metadata, artifact.arrays
    return KINDS[metadata.kind].policy(metadata, arrays, started_at)


def rule_for(scenario: Scenario) -> str:
    """Rule that decides where no policy was trained: the best tuned one, or the default."""
    return best_tuned_rule(scenario.name) or default_rule(scenario)


def default_rule(scenario: Scenario) -> str:
    """Rule that decides where no rule was tuned either."""
    return DEFAULT_SERVER_RULE if scenario.fleet is None else DEFAULT_RULE


def best_tuned_rule(scenario: str) -> str | None:
    """Rule with the smallest worst regret over the loads; None: none was tuned.

    It is one of those that are best at the scenario's own load.
    """
    tuned = find_tuned(scenario)
    return None if tuned is None else tuned.best_over_loads()


def lineage_of(scenario: Scenario) -> dict[str, str]:
    """`trace_sha256` of the traffic model, `calibration_sha256` of replicas; 12 hex digits each."""
    return {
        "trace_sha256": _short(load_model(scenario.workload).model_dump_json()),
        "calibration_sha256": _short(scenario.calibration),
    }


def length_predictor(model: WorkloadModel) -> LengthPredictor:
    """Mean output by context length in the traffic of training."""
    lengths = model.lengths
    return LengthPredictor(
        bin_edges_tokens=lengths.bin_edges_tokens,
        mean_generated_tokens=lengths.mean_generated_tokens,
    )


def feature_scaling(scaler: RobustScaler) -> FeatureScaling:
    """Units of the request features in the traffic of training."""
    return FeatureScaling(
        medians=tuple(scaler.center.tolist()), scales=tuple(scaler.scale.tolist())
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]

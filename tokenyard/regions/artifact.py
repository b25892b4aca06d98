"""The exported regional policy: its kinds, and which one is the champion.

One npz file (`tokenyard.artifact`), read and run with numpy alone. `KINDS` is the one table of what
there is to know of a kind. To add one, write its class in `tokenyard.regions.policies.learned` and
its line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tokenyard.artifact import Artifact, Kind
from tokenyard.config import FrozenModel
from tokenyard.network import Network, check_only_network
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.observation import Action
from tokenyard.regions.policies.learned import RegionNetwork
from tokenyard.regions.types import Dispatch, RegionPolicy


class RegionMetadata(FrozenModel):
    """What a regional policy is and where it comes from."""

    format_version: Literal[2] = 2
    problem: Literal["regions"] = "regions"
    kind: Literal["network"] = "network"
    """A `tokenyard.network.Network` with ReLU, for its own regions."""
    action: Action = "mix"
    """What the outputs of a network mean."""
    dispatch: Dispatch = "live_cost"
    """How tasks are sent that a network decides about."""
    scenarios: tuple[str, ...]
    """What it was trained on."""
    trainer: str
    """Algorithm that made it."""
    metrics: Mapping[str, float] = {}
    """What it scored when it was exported."""
    lineage: Mapping[str, str] = {}
    """Hashes and names of what it was made from."""


@dataclass(frozen=True, eq=False)
class RegionArtifact(Artifact[RegionMetadata]):
    """A trained regional policy.

    Raises:
        ValueError: The arrays do not fit the metadata.
    """

    METADATA = RegionMetadata

    def check(self) -> None:
        """Check what the kind needs."""
        KINDS[self.metadata.kind].check(self)


def _network(artifact: RegionArtifact, rule: ActivationRule) -> RegionNetwork:
    metadata, network = artifact.metadata, Network.from_arrays(artifact.arrays)
    return RegionNetwork(network, metadata.action, rule, metadata.dispatch, metadata.scenarios)


KINDS: dict[str, Kind[RegionArtifact]] = {
    "network": Kind(check=lambda artifact: check_only_network(artifact.arrays), policy=_network)
}
"""Kind of an artifact to what there is to know of it."""


def learned_regions(artifact: RegionArtifact, rule: ActivationRule) -> RegionPolicy:
    """Make the policy of an artifact."""
    policy: RegionPolicy = KINDS[artifact.metadata.kind].policy(artifact, rule)
    return policy

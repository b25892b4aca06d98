"""What a network that scores every replica alike reads from an observation.

Such a network tells replicas apart by their features and not by their place, so it decides
between any number of them, and permuting them permutes what it says (Zaheer et al. 2017, "Deep
Sets", arXiv:1703.06114). Replicas that take no requests are not there for it.

Written once for training and serving: arrays are of NumPy or torch, and `xp` is the module that
they are of. Shapes: B any leading axes, N replicas, F features of a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenyard.routing.observation import (
    NUM_FINISH_FEATURES,
    NUM_REPLICA_FEATURES,
    NUM_REQUEST_FEATURES,
    observation_size,
)

Array = Any
"""An array of NumPy or of torch."""

_FINISH = NUM_REPLICA_FEATURES + NUM_FINISH_FEATURES - 1
_OTHERS = NUM_REPLICA_FEATURES + NUM_FINISH_FEATURES


def _sed(replicas_BNF: Array, xp: Any) -> Array:
    return xp.expm1(replicas_BNF[..., _FINISH])


def _marginal_delay(replicas_BNF: Array, xp: Any) -> Array:
    own_s = _sed(replicas_BNF, xp)
    if replicas_BNF.shape[-1] <= _OTHERS:
        return own_s  # Without batching nobody is delayed who came before.
    return own_s + xp.expm1(replicas_BNF[..., _OTHERS])


BASELINES: dict[str, Callable[[Array, Any], Array]] = {
    "sed": _sed,
    "marginal_delay": _marginal_delay,
}
"""Rules that a network can be a correction of: their cost of every replica in seconds, shape
(B, N), read back from observed features with `expected_finish`, shape (B, N, F)."""


class Observed(NamedTuple):
    """An observation, taken apart."""

    request: Array
    """Shape (B, NUM_REQUEST_FEATURES)."""
    replicas: Array
    """Shape (B, N, F)."""
    routable: Array
    """Which replicas are to be chosen from, bool, shape (B, N); all, where none is routable."""


@dataclass(frozen=True)
class Layout:
    """What an observation holds of every replica (`observation.encode`)."""

    expected_finish: bool
    batches: bool
    """Whether the replicas batch continuously; the last number then is whether they take requests,
    which is no feature, because those that are chosen from all do."""

    @property
    def numbers_per_replica(self) -> int:
        """Length of an observation's part about one replica."""
        size = observation_size(1, self.expected_finish, self.batches)
        return size - NUM_REQUEST_FEATURES

    @property
    def num_features(self) -> int:
        """F, features of one replica."""
        return self.numbers_per_replica - int(self.batches)

    @property
    def num_inputs(self) -> int:
        """Numbers from which one replica is scored."""
        return NUM_REQUEST_FEATURES + 2 * self.num_features

    def split_observation(self, observations: Array, xp: Any) -> Observed:
        """Split observations of shape (B, size)."""
        request = observations[..., :NUM_REQUEST_FEATURES]
        rest = observations[..., NUM_REQUEST_FEATURES:]
        rows = rest.reshape(*rest.shape[:-1], -1, self.numbers_per_replica)
        if not self.batches:
            return Observed(request, rows, xp.ones_like(rows[..., 0], dtype=xp.bool))
        routable = rows[..., -1] > 0.0
        return Observed(request, rows[..., :-1], routable | ~routable.any(-1)[..., None])


def scorer_inputs(observed: Observed, xp: Any) -> Array:
    """Features of each replica, of the request, and their mean over replicas: (B, N, inputs)."""
    request, replicas, routable = observed
    mean = (replicas * routable[..., None]).sum(-2) / routable.sum(-1)[..., None]
    shared = xp.concatenate([request, mean], -1)[..., None, :]
    repeated = xp.broadcast_to(shared, (*replicas.shape[:-1], shared.shape[-1]))
    return xp.concatenate([replicas, repeated], -1)

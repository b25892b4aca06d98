"""What a network that scores every replica alike reads from an observation.

Such a network tells replicas apart by their features and not by their place, so it decides
between any number of them, and permuting them permutes what it says (Zaheer et al. 2017, "Deep
Sets", arXiv:1703.06114). Replicas that take no requests are not there for it.

Arrays are of NumPy or torch, and `xp` is the module that they are of. Shapes: B any leading axes,
N replicas, F features of a replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenyard.routing import observation as ob

Array = Any
"""An array of NumPy or of torch."""


class Observed(NamedTuple):
    """An observation, taken apart."""

    request: Array
    """Shape (B, NUM_REQUEST_FEATURES)."""
    replicas: Array
    """Shape (B, N, F)."""
    routable: Array
    """Which replicas are to be chosen from, bool, shape (B, N); all, where none is routable."""
    rule: Array | None = None
    """What a rule's costs are made from (`scores.linear.encode_rule`), as it is, not squashed.

    Shape (B, N, NUM_RULE_FEATURES); None: it is not shown."""


@dataclass(frozen=True)
class Layout:
    """What the whole observation holds of every replica (`observation.encode`).

    The last number of a replica is whether it takes requests, which is no feature, because those
    that are chosen from all do.
    """

    shows_rule: bool = False
    """Whether what a rule's costs are made from comes last (`Simulator.show_rule`)."""

    @property
    def numbers_per_replica(self) -> int:
        """Length of an observation's part about one replica, without the rule."""
        return ob.observation_size(1, whole=True) - ob.NUM_REQUEST_FEATURES

    @property
    def num_features(self) -> int:
        """F, features of one replica."""
        return self.numbers_per_replica - 1

    @property
    def num_inputs(self) -> int:
        """Numbers from which one replica is scored."""
        return ob.NUM_REQUEST_FEATURES + 2 * self.num_features

    def size(self, num_replicas: int) -> int:
        """Length of an observation of so many replicas."""
        shown = ob.NUM_RULE_FEATURES if self.shows_rule else 0
        return ob.NUM_REQUEST_FEATURES + num_replicas * (self.numbers_per_replica + shown)

    def split_observation(self, observations: Array, xp: Any) -> Observed:
        """Split observations of shape (B, size)."""
        request = observations[..., : ob.NUM_REQUEST_FEATURES]
        rest = observations[..., ob.NUM_REQUEST_FEATURES :]
        rule = None
        if self.shows_rule:
            num = rest.shape[-1] // (self.numbers_per_replica + ob.NUM_RULE_FEATURES)
            end = num * self.numbers_per_replica
            shown = rest[..., end:].reshape(*rest.shape[:-1], num, ob.NUM_RULE_FEATURES)
            rest, rule = rest[..., :end], xp.sign(shown) * xp.expm1(abs(shown))
        rows = rest.reshape(*rest.shape[:-1], -1, self.numbers_per_replica)
        routable = rows[..., -1] > 0.0
        routable = routable | ~routable.any(-1)[..., None]
        return Observed(request, rows[..., :-1], routable, rule)


def scorer_inputs(observed: Observed, xp: Any) -> Array:
    """Features of each replica, of the request, and their mean over replicas: (B, N, inputs)."""
    replicas, routable = observed.replicas, observed.routable
    mean = (replicas * routable[..., None]).sum(-2) / routable.sum(-1)[..., None]
    shared = xp.concatenate([observed.request, mean], -1)[..., None, :]
    repeated = xp.broadcast_to(shared, (*replicas.shape[:-1], shared.shape[-1]))
    return xp.concatenate([replicas, repeated], -1)


def rule_costs(rule: Array, weights: Array, xp: Any) -> Array:
    """What `scores.linear.marginal_scores` says that each replica costs.

    Args:
        rule: What the costs are made from, shape (B, N, NUM_RULE_FEATURES).
        weights: Of the rule, shape (NUM_MARGINAL_WEIGHTS,).
        xp: Module of both.

    Returns:
        Costs in units of the SLO, shape (B, N).
    """
    features, rank = rule[..., :-1], rule[..., -1:]
    by_power = features @ weights.reshape(ob.NUM_SCORE_POWERS, -1).T
    powers = xp.concatenate([rank**p for p in range(ob.NUM_SCORE_POWERS)], -1)
    return features[..., 1:5].sum(-1) + (by_power * powers).sum(-1)

"""By which rule a policy orders what waits, in a form that can be compared.

Keys are times on one clock, so those of two policies may stand in one queue only where both order
by the same rule: else whoever has the earlier keys goes first, whatever either policy is worth.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenyard.routing.scores.order import (
    BOOST_S,
    PREFILL_WEIGHT,
    SERVICE_WEIGHT,
    SET_BACK_WAITS,
    is_first_come,
)
from tokenyard.routing.types import OrderingPolicy, RoutingPolicy
from tokenyard.types import FloatArray

BY_SIZE = "by size"
"""Kind of the orders that are weights of `tokenyard.routing.scores.order`."""
_NAMES = {SERVICE_WEIGHT: "sjf", PREFILL_WEIGHT: "wspt", BOOST_S: "boost"}


class OrderSpec(NamedTuple):
    """All that an order's keys depend on beside the request and the replica.

    Two orders with equal specs give equal keys, unless they count what they are asked about.
    """

    kind: str
    knobs: tuple[float, ...]
    """Of one kind equally many; the last says how far late requests go back, in waits."""
    counts_requests: bool = False
    """Whether keys also depend on the requests that the order was asked about before."""

    def __str__(self) -> str:
        """Write it as it stands behind a placement, where it can stand there."""
        *knobs, set_back = self.knobs
        back = f":{set_back:g}" if set_back else ""
        if self.kind != BY_SIZE:
            return f"{self.kind}@{knobs[0]:g}{back}"
        named = [f"{_NAMES[at]}@{knob:g}" for at, knob in enumerate(knobs) if knob]
        if not named:
            return f"late_last@{set_back:g}"
        if len(named) == 1:
            return named[0] + back
        return " and ".join(named) + (f", set back by {set_back:g} waits" if set_back else "")


UNKNOWN = OrderSpec("an order of its own", (0.0,))
"""Of a policy that orders and does not say by what: it may be another than any, this one too."""


def spec_of_weights(weights: FloatArray) -> OrderSpec | None:
    """Spec of an order of weights, shape (NUM_ORDER_WEIGHTS,); None: they order nothing."""
    assert len(weights) == SET_BACK_WAITS + 1
    return None if is_first_come(weights) else OrderSpec(BY_SIZE, tuple(weights.tolist()))


def order_spec(policy: RoutingPolicy) -> OrderSpec | None:
    """By which rule a policy orders what waits; None: it orders nothing, first come first served.

    That is its attribute `order_spec`.
    """
    if not isinstance(policy, OrderingPolicy):
        return None
    spec: OrderSpec | None = getattr(policy, "order_spec", UNKNOWN)
    return spec


def in_words(spec: OrderSpec | None) -> str:
    """Say by what requests wait."""
    if spec is None:
        return "first come, first served"
    return spec.kind if spec == UNKNOWN else str(spec)

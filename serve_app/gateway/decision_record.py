"""One row of the decision log, as the event loop queues it."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.policy.runner import ReplicaChoice
from tokenyard.routing.types import OrderKey


# Not frozen: that takes four times as long to make, and every request makes one.
@dataclass(slots=True, eq=False)
class DecisionRecord:
    """A decision, and the end of its request."""

    decision_id: str
    request_id: str
    attempt: int
    """0 for the first time that the request was placed."""
    time_s: float
    """Unix time of the decision, seconds."""
    service_class: str
    choice: ReplicaChoice
    pools: tuple[str, ...]
    """Pool of every candidate."""
    outcome: str
    """`stop`, `length`, `abort` (the client left), `timeout`, `cut_off` (the gateway ended),
    `failed`, `rejected` (the endpoint has something against the request); `unknown` where only the
    choice was asked for."""
    output_tokens: int
    ttft_s: float
    """Arrival to first token; NaN: there was none."""
    response_s: float
    """Arrival to the end; NaN: it was not completed."""
    order_key: OrderKey | None = None
    """Key that it waited by, Unix time, seconds; None: behind all that waited."""
    num_sends: int = 0
    """Times that the attempt sent the request: 2 where a connection that was kept was closed."""

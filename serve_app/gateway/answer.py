"""A request that was let in: its answer so far, and what is logged about it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from serve_app.cluster import SloClass
from serve_app.gateway.exchange import Backend, Downstream, InferenceRequest
from serve_app.gateway.rate_limits import Grant
from serve_app.gateway.replicas import Prompt, ReplicaState
from serve_app.gateway.sessions import Turn
from serve_app.models import ServedModel
from tokenyard.routing.types import OrderKey

COMPLETED = ("stop", "length")
"""Reasons with which an answer comes to its end."""


@dataclass(slots=True, eq=False)
class Answer:
    """A request that was let in, and its answer so far."""

    request: InferenceRequest
    service_class: SloClass
    downstream: Downstream
    prompt: Prompt
    arrival_s: float
    wait: asyncio.Timeout
    """When it is given up."""
    model: ServedModel
    """The model that is asked for."""
    grant: Grant | None
    """Its share of its caller's limits; None: the caller has no limits."""
    tenant_share: float
    """Share of the service that the tenant is entitled to."""
    needed_tokens: int
    """Prompt and longest answer, as far as any pool of the model takes it.

    Endpoints that tokenise themselves say what is too long: here their prompts are estimates.
    """
    suspects: list[tuple[ReplicaState, float]] = field(default_factory=list)
    """Replicas that failed it, and when each was sent it, by the outlier detector's clock. They are
    at fault if another answers it: until then the request itself may be."""
    turn: Turn | None = None
    """What it is to its session; None: sessions are not looked at."""
    tried: set[str] = field(default_factory=set)
    """Replicas that were sent the request since one was last waited for."""
    excluded: set[str] = field(default_factory=set)
    """Pools whose replicas can never answer it, as one of each has said."""
    is_ordered: bool = False
    """Whether it has been placed, and so has the key that it waits by."""
    order_key: OrderKey | None = None
    """Its key, Unix time, seconds; None: it waits behind all others."""
    num_tokens: int = 0
    ttft_s: float = math.nan
    """Arrival to first token; NaN: there was none."""
    finish_reason: str | None = None
    response_s: float = math.nan
    """Arrival to the end; NaN: it was not completed."""
    is_rejected: bool = False
    """Whether an endpoint has something against the request itself."""
    is_cut_off: bool = False
    """Whether the gateway ends before it."""

    @property
    def needs(self) -> tuple[str, bytes]:
        """The model and the route that a replica has to support."""
        return self.model.name, self.request.call.path.partition(b"?")[0]

    def fits(self, backend: Backend) -> bool:
        """Whether the replicas of a pool can answer the request."""
        return (
            (backend.takes_any or self.request.generation is not None)
            and self.model.is_served_by(backend.name)
            and backend.name not in self.excluded
            and backend.max_model_tokens >= self.needed_tokens
        )

    @property
    def used_tokens(self) -> int:
        """Tokens that count against the caller's limits: of the answer, and of a prompt once read.

        Whoever leaves before the first token has had the prompt read.
        """
        was_read = self.num_tokens or self.finish_reason in (*COMPLETED, "abort")
        return len(self.request.token_ids) + self.num_tokens if was_read and self.tried else 0

    @property
    def why_cancelled(self) -> str:
        """Outcome of a cancelled attempt: the caller left, or a deadline passed."""
        if not self.wait.expired():
            return "abort"
        return "cut_off" if self.is_cut_off else "timeout"

    def tpot_s(self, now_s: float) -> float:
        """Mean time per token after the first, if the answer ends at `now_s`."""
        return (now_s - self.arrival_s - self.ttft_s) / max(self.num_tokens - 1, 1)

    def attained_slo(self, now_s: float) -> bool | None:
        """Whether an answer that ended at `now_s` attained its SLO.

        None: its client left before, or an endpoint had something against the request. Without a
        first token a target for it is missed once its time has passed.
        """
        slo, waited_s = self.service_class, now_s - self.arrival_s
        ttft_s = waited_s if math.isnan(self.ttft_s) else self.ttft_s
        attained = waited_s <= slo.response_s and not self.tpot_s(now_s) > (slo.tpot_s or math.inf)
        if self.finish_reason in COMPLETED:
            return attained and not self.ttft_s > (slo.ttft_s or math.inf)
        attained = attained and ttft_s <= (slo.ttft_s or math.inf)
        is_open = self.is_rejected or self.finish_reason == "abort"
        return None if is_open and attained else False

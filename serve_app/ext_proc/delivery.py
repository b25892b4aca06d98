"""A request that a proxy delivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve_app.ext_proc.addresses import Addresses
from serve_app.gateway.delivery import Delivery
from serve_app.gateway.exchange import Attempt, Backend
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.generation import Headers, ReplicaUnreachable

_MOST_ENDPOINTS = 3
"""The picked one, and those that stand in for it where the proxy does not reach it."""

Place = Callable[[ExternalBackend, Attempt, Sequence[str]], None]
"""Tells the proxy where a request goes: `ip:port` of endpoints, the best first."""


class ProxyDelivery(Delivery):
    """A delivery to endpoints that a proxy knows by their addresses."""

    is_observed = False
    """Whether another stream of the proxy than the one that asked shows the answer."""

    def __init__(self, addresses: Addresses, place: Place) -> None:
        super().__init__()
        self._addresses, self._place = addresses, place

    async def answer(self, backend: Backend, attempt: Attempt, replica_ids: Sequence[str]) -> None:
        """Have the proxy send the request: see `serve_app.gateway.exchange.Sender`."""
        picked = replica_ids[0]
        if (self._addresses.of(picked) or await self._addresses.look_up(picked)) is None:
            raise ReplicaUnreachable("the name of an endpoint has no address")
        await super().answer(backend, attempt, replica_ids)

    def place(self, backend: Backend, attempt: Attempt, replica_ids: Sequence[str]) -> None:
        """Tell the proxy the addresses of the endpoints that have one."""
        assert isinstance(backend, ExternalBackend)
        named = replica_ids[:_MOST_ENDPOINTS]
        self._place(backend, attempt, [at for name in named if (at := self._addresses.of(name))])

    def show_head(self, headers: Headers, endpoint: str = "") -> None:
        """Take the head of the answer; `endpoint` is the `ip:port` that sent it; empty: unknown."""
        if endpoint and self.is_open and endpoint != self._addresses.of(self._replica_id):
            replica_id = min(self._addresses.replicas_at([endpoint]), default=None)
            if replica_id is not None:
                error = ReplicaUnreachable("the proxy did not reach an endpoint")
                self.note_other(replica_id, error)
        super().show_head(headers)

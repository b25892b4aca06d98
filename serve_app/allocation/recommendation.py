"""Recommends how many endpoints external pools should have; something else starts and ends them."""

from __future__ import annotations

import asyncio
import logging
import time

from serve_app.allocation.replica_count import Looks, ReplicaPlanner
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway

logger = logging.getLogger(__name__)

_LOOK_S = 5.0


class Recommendations:
    """Looks at pools with `autoscaling`, and keeps what each is recommended.

    What waits at the gateway counts at all of these pools in equal parts.
    """

    def __init__(self, gateway: Gateway, registry: str | None) -> None:
        """Read every pool's scenario and policy.

        Raises:
            ValueError: One is unknown, or does not fit the other.
        """
        self._gateway = gateway
        self._looks: dict[str, Looks] = {}
        self._pools: dict[str, tuple[ExternalBackend, ReplicaPlanner, int]] = {}
        for backend in gateway.backends.values():
            if isinstance(backend, ExternalBackend) and backend.settings.autoscaling is not None:
                wanted = backend.settings.autoscaling
                planner = ReplicaPlanner(
                    wanted.scenario, wanted.tensor_parallel, wanted.policy, registry=registry
                )
                self._pools[backend.name] = backend, planner, wanted.min_replicas

    async def run(self) -> None:
        """Look every five seconds."""
        while True:
            try:
                # A policy may take seconds at the end of its slot.
                await asyncio.to_thread(self.look, time.time(), self._in_progress())
            except Exception:
                logger.exception("no number of replicas could be recommended")
            await asyncio.sleep(_LOOK_S)

    def _in_progress(self) -> dict[str, tuple[float, int]]:
        """Requests that run or wait, and endpoints that are there, by pool."""
        held = len(self._gateway.holding or ())
        replicas = [r for r in self._gateway.table.replicas.values() if not r.draining]
        in_flight = {
            name: [replica.in_flight.count for replica in replicas if replica.pool == name]
            for name in self._pools
        }
        share = held / len(self._pools)
        return {name: (sum(counts) + share, len(counts)) for name, counts in in_flight.items()}

    def look(self, now_s: float, in_progress: dict[str, tuple[float, int]]) -> None:
        """Take what runs or waits in each pool, and its endpoints, into account."""
        for name, (backend, planner, least) in self._pools.items():
            requests, num = in_progress[name]
            target = backend.recommended_replicas
            target, self._looks[name] = planner.look(
                self._looks.get(name, Looks()), now_s, requests, num,
                max(num, least) if target is None else target,
            )  # fmt: skip
            backend.recommended_replicas = max(target, least)
            self._gateway.metrics.recommended_replicas.labels(name).set(max(target, least))

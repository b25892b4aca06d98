"""A carrier as a replica of Ray Serve: it listens where the others do, and asks one decider."""

# No `from __future__ import annotations` here: Serve reads the class's signatures.
import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.cluster import Cluster
from serve_app.gateway import interpreter
from serve_app.gateway.backends import make_backends
from serve_app.gateway.carrier import Carrier
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.rate_limits import RateLimits
from serve_app.gateway.tracing import tracing_of
from serve_app.http.auth import Access
from serve_app.http.listener import Listener
from serve_app.http.passage import create_carrier_api
from serve_app.policy.manager import PolicyManager
from serve_app.ray_serve.replica import load_tokenizers

logger = logging.getLogger(__name__)

_PARENT_EVERY_S = 1.0
_START_S = 120.0
"""Time for the decider to start."""
_ASK_S = 2.0
_END_POLL_S = 0.05


async def end_with_ray(parent: int, end: Callable[[], Awaitable[None]]) -> None:
    """Drain and exit where Ray's process on this node is gone.

    Nobody would replace a replica or this process any more, and the port would stay taken.
    """
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_EVERY_S)
    logger.error("Ray is gone from this node, and so is this process once it has answered")
    try:
        await end()
    finally:
        os._exit(1)


class CarrierReplica:
    """One of several processes that carry requests and answers for one gateway."""

    def __init__(
        self,
        cluster: Cluster,
        access: Access,
        pools: dict[str, DeploymentHandle[Any]],
        decider: DeploymentHandle[Any],
    ) -> None:
        interpreter.share()
        manager = PolicyManager(
            cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng()
        )
        manager.switch(cluster.baseline)
        metrics = Metrics()
        self._pools = make_backends(cluster, pools, metrics)
        access.open()
        # Each carrier counts for itself while nobody counts for all.
        limits = RateLimits(access.limits_of)
        tracing = tracing_of(os.environ)
        self._alone = Gateway(
            cluster, manager, self._pools, metrics, limits=limits, tracing=tracing
        )
        self._access, self._decider = access, decider
        self._tokenizers = load_tokenizers(cluster)
        self._listener: Listener | None = None
        self._carrier = Carrier(self._alone, self._find)
        interpreter.settle()

    async def reconfigure(self, address: dict[str, Any]) -> None:
        """Find the decider, and begin to listen beside the other carriers at `host` and `port`.

        Raises:
            OSError: The address cannot be listened on.
            TimeoutError: There is no decider.
        """
        if self._listener is None:
            async with asyncio.timeout(_START_S):
                await self._carrier.start()
            if self._access.keys is not None:
                self._watching = asyncio.create_task(self._access.keys.watch())
            self.__del__ = self.end
            self._orphaned = asyncio.create_task(end_with_ray(os.getppid(), self.end))
        else:
            await self._listener.stop()
        api = create_carrier_api(self._carrier, self._tokenizers, self._access)
        cluster = self._alone.cluster
        self._listener = Listener(api, cluster.limits, cluster.gateway.tls)
        await self._listener.start(address["host"], address["port"])

    async def check_health(self) -> None:
        """Answer from the event loop that carries.

        Raises:
            RuntimeError: It takes no connections, or has to be replaced by what is installed now.
        """
        if self._carrier.outdated is not None:
            raise RuntimeError(self._carrier.outdated)
        if self._listener is None or not self._listener.is_up:
            raise RuntimeError("the carrier does not listen any more")

    async def end(self) -> None:
        """Answer what was let in, while other carriers take what comes."""
        if self._listener is None:
            return
        await self._listener.hand_over()
        self._listener.refuse()
        # The decider gives up what takes longer, unless it is away.
        until_s = asyncio.get_running_loop().time() + self._alone.cluster.limits.drain_s + _ASK_S
        while self._carrier.in_flight and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(_END_POLL_S)
        await self._listener.stop()
        await self._carrier.stop()
        for pool in self._pools.values():
            await pool.stop()
        self._alone.manager.stop()
        if self._alone.tracing is not None:
            await asyncio.to_thread(self._alone.tracing.close)

    async def _find(self) -> str:
        """Ask where the decider is.

        Raises:
            OSError: It does not say, or is on another machine.
        """
        try:
            async with asyncio.timeout(_ASK_S):
                path: str = await self._decider.where.remote()
        except (TimeoutError, RayError, RayServeException) as error:
            raise OSError(f"it does not say where it is: {type(error).__name__}") from None
        if not Path(path).exists():
            raise OSError(
                "it is on another machine, or just gone; carriers share one machine with it: "
                "give `gateway.node_labels` that one node has"
            )
        return path

"""The replicas of an allocated pool, on Ray Serve: an application for every shape there is.

Serve keeps replicas that are ready when their number changes, and lets those that go answer what
they have begun. The gateway sees the new ones as soon as they are ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from serve_app import ray_private
from serve_app.allocation.allocator import Allocator
from serve_app.allocation.plans import check_allocation, load_plan_policy, start_of
from serve_app.allocation.transition import Held, Shape
from serve_app.cluster import AllocatedPool, Cluster, Pool
from serve_app.gateway.backends import ServeBackend
from serve_app.gateway.exchange import Backend
from serve_app.gateway.gateway import Gateway
from tokenyard.allocation.telemetry import TELEMETRY_FILE, SlotRecord, append_record

logger = logging.getLogger(__name__)

BindPool = Callable[[Pool, Cluster], Application]

_READY = ("RUNNING", "RECOVERING", "PENDING_MIGRATION")
"""Those that a new controller has not looked at yet, or whose node is to end, serve."""
_STARTING = ("STARTING", "UPDATING")
_STOPPING = ("STOPPING",)


class ServeReplicaSets:
    """Starts and stops the replicas of one gateway's allocated pool, whatever their shape."""

    def __init__(
        self,
        prefix: str,
        allocation: AllocatedPool,
        gateway: Gateway,
        backends: MutableMapping[str, Backend],
        bind: BindPool,
        log: Path | None = None,
    ) -> None:
        """Take what a replica is; nothing is asked of Serve before `observe`.

        `prefix` begins the names of its applications. `log` is a folder that gets a line per slot
        (`tokenyard.allocation.telemetry`); None: no log.
        """
        self._template = allocation.template
        self._prefix = f"{prefix}-{self._template.name}-"
        self._gateway, self._backends = gateway, backends
        self._bind, self._log = bind, log
        self._wanted: dict[Shape, int] = {}
        self._alive: dict[Shape, int] = {}
        """Replicas when Serve last told of them."""
        self._known: set[Shape] = set()

    def num_offered(self) -> int:
        """Requests that have ever asked to be let in."""
        return self._gateway.num_offered

    def num_waiting(self) -> int:
        """Requests that wait now, at the gateway or at replicas."""
        waiting = [replica.status.num_waiting for replica in self._gateway.table.replicas.values()]
        return sum(waiting) + len(self._gateway.holding or ())

    def record(self, slot: SlotRecord) -> None:
        """Write down what a slot that is over was like."""
        if self._log is not None:
            append_record(self._log / TELEMETRY_FILE, slot)

    async def observe(self) -> dict[Shape, Held]:
        """Return every shape of which there is or should be a replica."""
        applications = (await asyncio.to_thread(serve.status)).applications
        held: dict[Shape, Held] = {}
        for name, status in applications.items():
            if not name.startswith(self._prefix):
                continue
            shape = parse_shape(name.removeprefix(self._prefix))
            if shape is None:
                continue
            states: dict[str, int] = {}
            for deployment in status.deployments.values():
                for state, count in deployment.replica_states.items():
                    states[str(getattr(state, "value", state))] = count
            ready, starting, stopping = (
                sum(states.get(state, 0) for state in kind)
                for kind in (_READY, _STARTING, _STOPPING)
            )
            deleted = status.status == "DELETING"
            if deleted:
                # Serve tells no more of its replicas, which answer what they have begun and hold
                # their GPUs until the application is gone.
                stopping = max(stopping, self._alive.get(shape, 1) - ready - starting)
            else:
                self._alive[shape] = ready + starting + stopping
            # After a restart of the gateway what is there counts as asked for, and replicas come.
            wanted = self._wanted.setdefault(shape, 0 if deleted else max(ready + starting, 1))
            held[shape] = Held(wanted, ready, starting, stopping)
            if shape not in self._known and status.deployments and not deleted:
                self._known.add(shape)
                pool = pool_of(self._template, shape)
                get = serve.get_deployment_handle
                handle = await asyncio.to_thread(get, pool.name, name)
                self._backends[pool.name] = ServeBackend(pool, handle)
        for shape in [shape for shape in self._wanted if shape not in held]:
            if self._wanted[shape]:
                # Asked for, and Serve has not begun.
                held[shape] = Held(self._wanted[shape])
            else:
                await self._forget(shape)
        return held

    async def want(self, shape: Shape, count: int) -> None:
        """Ask for so many replicas of a shape; returns before they are there."""
        before = self._wanted.get(shape, 0)
        if count == before:
            return
        logger.info("%s%s: %d replicas, now %d", self._prefix, shape.name, before, count)
        name = f"{self._prefix}{shape.name}"
        # Noted first: what was asked for counts even while the call is under way.
        self._wanted[shape] = count
        try:
            if count == 0:
                await asyncio.to_thread(serve.delete, name, _blocking=False)
            elif before == 0:
                await asyncio.to_thread(self._run, shape, count, name)
            else:
                await asyncio.to_thread(
                    ray_private.scale_deployment, name, pool_of(self._template, shape).name, count
                )
        except Exception:
            # As after a restart: what Serve has counts as asked for, and the rest is asked anew.
            del self._wanted[shape]
            raise

    async def limit_batch(self, shape: Shape, max_batch: int) -> bool:
        """Let replicas of a shape run so many sequences at once; False while some do not yet."""
        limit = min(self._template.config.max_batch, max_batch)
        name = pool_of(self._template, shape).name
        replicas = [
            replica for replica in self._gateway.table.replicas.values() if replica.pool == name
        ]
        others = [replica.replica_id for replica in replicas if replica.profile.max_batch != limit]
        backend = self._backends.get(name)
        if others and isinstance(backend, ServeBackend):
            await asyncio.gather(*(backend.limit_batch(other, limit) for other in others))
        return not others

    def _run(self, shape: Shape, count: int, name: str) -> None:
        pool = pool_of(self._template, shape).model_copy(update={"replicas": count})
        ray_private.run_application(self._bind(pool, self._gateway.cluster), name)

    async def _forget(self, shape: Shape) -> None:
        del self._wanted[shape]
        self._alive.pop(shape, None)
        if shape in self._known:
            self._known.remove(shape)
            name = pool_of(self._template, shape).name
            backend = self._backends.pop(name)
            self._gateway.table.keep(name, ())
            if isinstance(backend, ServeBackend):
                await backend.stop()


def make_allocator(
    prefix: str,
    gateway: Gateway,
    backends: MutableMapping[str, Backend],
    bind: BindPool,
    registry: str | None = None,
    log: Path | None = None,
) -> Allocator | None:
    """Make the allocator of a gateway; None: its cluster has no allocated pool.

    Raises:
        ValueError: As `check_allocation`.
    """
    allocation = gateway.cluster.allocation
    if allocation is None:
        return None
    scenario = check_allocation(allocation, registry)
    policy, origin = load_plan_policy(allocation.policy, scenario, registry, may_ship=True)
    pool = ServeReplicaSets(prefix, allocation, gateway, backends, bind, log)
    return Allocator(
        scenario, allocation.policy, policy, pool, allocation, start_of(allocation, scenario),
        allocation.time_scale, origin=origin,
    )  # fmt: skip


def pool_of(template: Pool, shape: Shape) -> Pool:
    """The pool of equal replicas of one shape."""
    config = template.config
    changes: dict[str, Any] = {"memory_fraction": shape.memory_fraction}
    if config.emulates is None:
        changes["tensor_parallel"] = shape.tensor_parallel
        changes["pipeline_parallel"] = shape.pipeline_parallel
    else:
        # One process stands in for all GPUs of the replica.
        changes["emulates"] = config.emulates.model_copy(
            update={"tensor_parallel": shape.tensor_parallel}
        )
    # Validated anew: what an emulation has worked out for another shape must not be kept.
    config = type(config).model_validate(config.model_copy(update=changes).model_dump())
    name = f"{template.name}-{shape.name}"
    return template.model_copy(update={"name": name, "config": config, "replicas": 1})


def parse_shape(name: str) -> Shape | None:
    """Read `Shape.name`; None: the text is no such name."""
    parts = name.split("-")
    if len(parts) != 3 or [part.rstrip("0123456789") for part in parts] != ["tp", "pp", "m"]:
        return None
    t, p, memory = (int(part.lstrip("tpm")) for part in parts)
    return Shape(t, p, memory / 100)

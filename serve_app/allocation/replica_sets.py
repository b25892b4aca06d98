"""The replicas of an allocated pool, on Ray Serve: an application for every shape there is.

Serve keeps replicas that are ready when their number changes, and lets those that go answer what
they have begun. The gateway sees the new ones as soon as they are ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

from serve_app.allocation.transition import Held, Shape
from serve_app.cluster import Pool
from serve_app.ray_serve.replica import bind_pool

logger = logging.getLogger(__name__)

_STARTING = ("STARTING", "UPDATING", "RECOVERING", "PENDING_MIGRATION")
_STOPPING = ("STOPPING",)
Found = Callable[[Pool, DeploymentHandle[Any]], None]


class ServeReplicaSets:
    """Starts and stops the replicas of one pool, whatever their shape."""

    def __init__(
        self,
        prefix: str,
        template: Pool,
        routing_stats_period_s: float,
        found: Found,
        lost: Callable[[str], None],
    ) -> None:
        """Know what a replica is; nothing is asked of Serve before `observe`.

        Args:
            prefix: Of the applications' names.
            template: What all replicas have in common.
            routing_stats_period_s: Time between two publications of a replica's state.
            found: Told of every deployment once it is there, with its pool.
            lost: Told the pool's name when its deployment is gone.
        """
        self._prefix, self._template = f"{prefix}-{template.name}-", template
        self._period_s = routing_stats_period_s
        self._found, self._lost = found, lost
        self._wanted: dict[Shape, int] = {}
        self._known: set[Shape] = set()

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
            ready = states.get("RUNNING", 0)
            starting = sum(states.get(one, 0) for one in _STARTING)
            stopping = sum(states.get(one, 0) for one in _STOPPING)
            # After a restart of the gateway what is there counts as asked for.
            deleted = status.status == "DELETING"
            wanted = self._wanted.setdefault(shape, 0 if deleted else ready + starting)
            held[shape] = Held(wanted, ready, starting, stopping)
            if shape not in self._known and status.deployments and not deleted:
                self._known.add(shape)
                pool = pool_of(self._template, shape)
                get = serve.get_deployment_handle
                self._found(pool, await asyncio.to_thread(get, pool.name, name))
        for shape in [one for one in self._wanted if one not in held]:
            if self._wanted[shape]:
                # Asked for, and Serve has not begun.
                held[shape] = Held(self._wanted[shape])
            else:
                self._forget(shape)
        return held

    async def want(self, shape: Shape, count: int) -> None:
        """Ask for so many replicas of a shape; returns before they are there."""
        before = self._wanted.get(shape, 0)
        if count == before:
            return
        logger.info("%s%s: %d replicas, now %d", self._prefix, shape.name, before, count)
        name = f"{self._prefix}{shape.name}"
        # First the books: what was asked for counts even where the call fails half way.
        self._wanted[shape] = count
        if count == 0:
            await asyncio.to_thread(serve.delete, name, _blocking=False)
        elif before == 0:
            await asyncio.to_thread(self._run, shape, count, name)
        else:
            await asyncio.to_thread(_scale, name, pool_of(self._template, shape).name, count)

    def _run(self, shape: Shape, count: int, name: str) -> None:
        pool = pool_of(self._template, shape).model_copy(update={"replicas": count})
        application = bind_pool(pool, self._period_s)
        serve._run(
            application, name=name, route_prefix=None, _blocking=False,
            external_scaler_enabled=True,
        )  # fmt: skip

    def _forget(self, shape: Shape) -> None:
        del self._wanted[shape]
        if shape in self._known:
            self._known.remove(shape)
            self._lost(pool_of(self._template, shape).name)


def _scale(application: str, deployment: str, count: int) -> None:
    """Do what Serve's HTTP API for scaling from outside does; it needs the dashboard, this not."""
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    target = DeploymentID(deployment, application)
    ray.get(controller.update_deployment_replicas.remote(target, count))


def pool_of(template: Pool, shape: Shape) -> Pool:
    """The pool of equal replicas of one shape."""
    config = template.config
    changes: dict[str, Any] = {
        "memory_fraction": shape.memory_fraction,
        "max_batch": min(config.max_batch, shape.max_batch),
    }
    if config.emulates is None:
        changes["tensor_parallel"] = shape.tensor_parallel
    else:
        # One process stands in for all GPUs of the replica.
        changes["emulates"] = config.emulates.model_copy(
            update={"tensor_parallel": shape.tensor_parallel}
        )
    # Validated anew: what a rehearsal has worked out for another shape must not be kept.
    config = type(config).model_validate(config.model_copy(update=changes).model_dump())
    name = f"{template.name}-{shape.name}"
    return template.model_copy(update={"name": name, "config": config, "replicas": 1})


def parse_shape(name: str) -> Shape | None:
    """Read `Shape.name`; None: it is none."""
    parts = name.split("-")
    if len(parts) != 3 or [part.rstrip("0123456789") for part in parts] != ["tp", "m", "b"]:
        return None
    t, memory, batch = (int(part.lstrip("tpmb")) for part in parts)
    return Shape(t, memory / 100, batch)

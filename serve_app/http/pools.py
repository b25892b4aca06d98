"""The state of every replica, and endpoints that are added and removed by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from serve_app.endpoints import AnyEndpoint
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.replicas import ReplicaState
from serve_app.http.auth import Access
from serve_app.http.body import Body
from serve_app.http.errors import DENIED, PROBLEMS
from serve_app.http.reasons import BadRequest

_IN_PROFILE = ("max_batch", "kv_capacity_tokens")


class EndpointsChange(Body):
    """Body of `POST` and `DELETE /v1/pools`."""

    pool: str
    """An external one."""
    endpoints: Annotated[list[AnyEndpoint], Field(min_length=1, max_length=1000)]


def make_router(gateway: Gateway, access: Access) -> APIRouter:
    """Make the routes about pools."""
    router, may_change = APIRouter(), [Depends(access.may_change)]

    @router.get("/v1/pools", dependencies=[Depends(access.may_see_all)], responses=DENIED)
    async def pools() -> dict[str, Any]:
        """Return the state of every replica, and where pools find their endpoints."""
        now_s, backends = gateway.refresh(), gateway.backends.values()
        ejected_s, states = gateway.outliers.ejected_s, gateway.states()
        cluster = gateway.cluster
        models = {pool.name: cluster.model_of(pool) for pool in cluster.pools}
        allocated = next(map(cluster.model_of, cluster.templates), cluster.served_model)
        return {
            "replicas": [
                {
                    **_describe_replica(replica, now_s),
                    "ejected_s": ejected_s(replica.replica_id),
                    "state": states[replica.replica_id],
                    "model": models.get(replica.pool, allocated),
                }
                for replica in gateway.table.replicas.values()
            ],
            "pools": [
                backend.describe() for backend in backends if isinstance(backend, ExternalBackend)
            ],
            "classes": [service_class.model_dump() for service_class in cluster.classes],
        }

    @router.post("/v1/pools", dependencies=may_change, responses=PROBLEMS)
    @router.delete("/v1/pools", dependencies=may_change, responses=PROBLEMS)
    async def change(body: EndpointsChange, request: Request) -> dict[str, Any]:
        """Add endpoints that the cluster file allows, or drain and remove some."""
        pool, adds = gateway.backends.get(body.pool), request.method == "POST"
        if not isinstance(pool, ExternalBackend):
            raise BadRequest(f"pool {body.pool!r} has no endpoints that come and go", 404)
        urls = [endpoint.address for endpoint in body.endpoints]
        try:
            pool.change(urls, adds)
        except (ValueError, LookupError) as error:
            raise BadRequest(str(error), 422 if adds else 404) from None
        what = "endpoints added" if adds else "endpoints removed"
        gateway.manager.note(what, body.pool, ", ".join(urls))
        gateway.refresh()
        return pool.describe()

    return router


def _describe_replica(replica: ReplicaState, now_s: float) -> dict[str, Any]:
    status = asdict(replica.status)
    observed_at_s = status.pop("observed_at_s")
    return {
        "replica_id": replica.replica_id,
        "pool": replica.pool,
        "profile": replica.profile.model_dump(),
        "estimate": None if replica.speed is None else replica.speed.describe(),
        "published": status,
        "age_s": max(now_s - observed_at_s, 0.0),
        "in_flight": replica.in_flight.count,
        "prefill_in_flight_tokens": replica.in_flight.prefill_tokens,
        "output_in_flight_tokens": replica.in_flight.output_tokens,
        "draining": replica.draining,
        **{key: value for key, value in asdict(replica.info).items() if key not in _IN_PROFILE},
    }

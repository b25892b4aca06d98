"""Every private part of Ray that serving uses, in one place, and the version it was checked with.

Ray may change or drop any of them in a minor release. Whoever raises the pin in pyproject.toml
looks at each name below, then runs tests/integration/test_gateway.py, test_allocation_live.py and
test_engine_placement.py.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import ray
from ray import serve
from ray._private import services
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.serve import Application
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaResult, RunningReplica

__all__ = [
    "CHECKED_WITH",
    "DeploymentHandleSource",
    "DeploymentID",
    "PowerOfTwoChoicesRequestRouter",
    "ReplicaID",
    "RequestMetadata",
    "check_alive",
    "choose_replica",
    "run_application",
    "scale_deployment",
    "watch",
]

CHECKED_WITH = "2.60.0"
"""Ray's version. Its base router's `_choose_replica_for_request` and `_replicas_list`, which
`serve_app.router` replaces and reads, are private too."""
"""Namespace of our keys in the cluster's key-value store."""


def check_version(version: str) -> None:
    """Refuse another version of Ray.

    Raises:
        ImportError: It is not the one that the private parts were checked with.
    """
    if version != CHECKED_WITH:
        raise ImportError(
            f"serving uses private parts of Ray that were checked with {CHECKED_WITH}, and this is "
            f"Ray {version}: install ray[serve]=={CHECKED_WITH}, or check "
            "serve_app/ray_private.py against yours"
        )


check_version(ray.__version__)


def check_alive(address: str, within_s: float) -> None:
    """Find out whether a Ray is at an address; to use it takes many minutes where there is none.

    Raises:
        ValueError: There is none, it refuses, or that is no address.
    """
    if address.startswith("ray://"):
        return  # Its client says soon that there is none.
    with init_grpc_channel(services.canonicalize_bootstrap_address(address)) as channel:
        ask = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).CheckAlive
        try:
            ask(gcs_service_pb2.CheckAliveRequest(), timeout=within_s, wait_for_ready=True)
        except grpc.RpcError as error:
            why = error.details()
            raise ValueError(f"no Ray at {address} within {within_s:g} s: {why}") from None


async def choose_replica(
    router: PowerOfTwoChoicesRequestRouter, request: PendingRequest
) -> RunningReplica:
    """Let a router choose, as it does for a request of its own handle."""
    return await router._choose_replica_for_request(request)


def watch(
    result: ReplicaResult, on_piece: Callable[[object], object],
    on_end: Callable[[BaseException], object],
) -> None:  # fmt: skip
    """Have the pieces of a stream told as its caller takes them, and then how it ended.

    Handles look `__anext__` up at the object, which they do not say.
    """
    take = result.__anext__

    async def watched() -> object:
        try:
            piece = await take()
        except BaseException as error:
            on_end(error)
            raise
        on_piece(piece)
        return piece

    result.__anext__ = watched


def run_application(application: Application, name: str) -> None:
    """Start an application whose replicas `scale_deployment` counts; returns at once."""
    serve._run(
        application, name=name, route_prefix=None, _blocking=False, external_scaler_enabled=True,
        # The decision log says more of a request than an access log.
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )  # fmt: skip


def scale_deployment(application: str, deployment: str, count: int) -> None:
    """Do what Serve's HTTP API for scaling from outside does; it needs the dashboard, this not."""
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    target = DeploymentID(deployment, application)
    ray.get(controller.update_deployment_replicas.remote(target, count))

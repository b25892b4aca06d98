"""The gateway before its pools, or without any: Ray Serve's application, or a process of its own.

Ray is imported in functions alone: nothing of a gateway before endpoints needs it.
"""

# No `from __future__ import annotations` here: `serve run` reads the class of build's argument.
import asyncio
import errno
import logging
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from serve_app.cluster import Cluster, ExternalPool, load_cluster
from serve_app.gateway import interpreter
from serve_app.gateway.backends import load_tokenizers, make_backends
from serve_app.gateway.callers import KeyFile
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.exchange import Backend
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.rate_limits import RateLimits
from serve_app.gateway.tracing import tracing_of
from serve_app.gateway.upstream import Origin, UpstreamClient, UpstreamError, url_of
from serve_app.http.api import GatewayApi, create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.listener import Listener, hold_port
from serve_app.http.tls import Certificate
from serve_app.policy.audit_log import AuditLog
from serve_app.policy.loading import LoadedPolicy, check_exploration, resolve_policy
from serve_app.policy.manager import PolicyManager
from serve_app.policy.runner import RAY_DEFAULT
from serve_app.policy.state import STATE_FILE, Remembers, StateFile
from tokenyard.config import fitted
from tokenyard.registry import CANDIDATE

if TYPE_CHECKING:
    from serve_app.allocation.plans import PlanOrigin

logger = logging.getLogger(__name__)

APP_NAME = "tokenyard-routing"
GATEWAY = "gateway"
"""Name of the gateway's deployment."""
REGISTRY_VARIABLE = "MLFLOW_TRACKING_URI"
"""Environment variable that names the store of sweeps, and so the registry."""
TOKEN_VARIABLE = "TOKENYARD_TOKEN"
"""Environment variable that holds the gateway's bearer token."""
ADMIN_TOKEN_VARIABLE = "TOKENYARD_ADMIN_TOKEN"
"""Environment variable that holds the bearer token of changes."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOCAL_ADMIN_VARIABLE = "TOKENYARD_LOCAL_ADMIN"
"""Environment variable that lets callers on this machine change what is served, where it is 1."""


class GatewayOptions(BaseModel):
    """What the gateway is told besides its cluster; also the `args` of a Serve config file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster: str = "local_cpu"
    """Name or YAML path of the cluster; `none`: no pools, decide only."""
    host: str = "127.0.0.1"
    """Address on the gateway's node where it listens; 0.0.0.0 for all."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port where it listens. Ray Serve's own proxy is not used."""
    policy: str | None = None
    """Replaces the cluster's policy; `candidate` also replaces its allocation's."""
    scenario: str | None = None
    """Replaces the cluster's: its champion, tuned rules and length predictor are used."""
    must_be_there: bool = False
    """Refuse to start where a trained policy is missing or broken, in place of serving by the
    cluster's baseline."""
    explore_fraction: float | None = None
    """Replaces the cluster's."""
    registry: str | None = None
    """MLflow tracking URI where champions are looked up; None: that of the environment, or only
    shipped ones count."""
    decision_log: Path | None = None
    """Folder on the gateway's node that gets Parquet files."""
    state: Path | None = None
    """File on the gateway's node with what survives a crash and a new deployment; None: one in the
    folder of the decision log, or none where there is no log."""
    token: Annotated[str | None, Field(repr=False)] = None
    """Bearer token that callers need; None: that of the environment, or none."""
    admin_token: Annotated[str | None, Field(repr=False)] = None
    """Bearer token that changes need; None: that of the environment, or none."""
    local_admin: bool = False
    """Let callers on the gateway's machine change what is served without a token. A proxy on that
    machine makes all its callers such callers, unless it says that it forwards."""


_HEALTH_PERIOD_S = 1.0
_HEALTH_TIMEOUT_S = 3.0
_PROXY_S = 2.0
_END_S = 5.0
"""Time for a drained gateway to end."""
_SQLITE = "sqlite:///"


class GatewayReplica:
    """The gateway: it listens itself; Ray Serve restarts it where it is deployed there."""

    _allocator: Any = None
    """`serve_app.allocation.allocator.Allocator`, where a pool is allocated."""
    _recommending: asyncio.Task[None] | None = None
    _ext_proc: Any = None
    """`serve_app.ext_proc.server.ExtProcServer`, where it picks for Envoy."""

    def __init__(self, cluster: Cluster, options: GatewayOptions, handles: dict[str, Any]) -> None:
        # What follows takes seconds.
        self._held = hold_port(options.host, options.port)
        interpreter.share()
        registry = registry_of(options)
        manager = PolicyManager(
            cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(),
            registry,
        )  # fmt: skip
        metrics = Metrics()
        self._pools = make_backends(cluster, handles, metrics)
        backends: dict[str, Backend] = {**self._pools}  # an allocator adds its own
        log = None if options.decision_log is None else DecisionLog(options.decision_log)
        self._access = make_access(cluster, options)
        self._access.open()
        metrics.know_tenants(self._access.tenants)
        audit_log = cluster.gateway.audit_log
        self._audit_log = None if audit_log is None else AuditLog(audit_log)
        if self._audit_log is not None:
            manager.on_event = self._audit_log.write
        limits = RateLimits(self._access.limits_of)
        self._gateway = Gateway(
            cluster,
            manager,
            backends,
            metrics,
            log=log,
            limits=limits,
            tracing=tracing_of(os.environ),
        )
        self._tokenizers = load_tokenizers(cluster, self._pools)
        self._registry = registry
        if cluster.needs_ray:
            from serve_app.allocation.replica_sets import make_allocator
            from serve_app.ray_serve.replica import bind_pool

            self._allocator = make_allocator(
                APP_NAME, self._gateway, backends, bind_pool, registry, options.decision_log
            )
        self._recommendations = None
        if any(isinstance(pool, ExternalPool) and pool.autoscaling for pool in cluster.pools):
            from serve_app.allocation.recommendation import Recommendations

            self._recommendations = Recommendations(self._gateway, registry)
        gateway = self._gateway
        parts: dict[str, Remembers] = {
            "autopilot": gateway.autopilot, "outliers": gateway.outliers, "limits": limits,
        }  # fmt: skip
        if self._allocator is not None:
            parts["allocation"] = self._allocator
        for name, backend in self._pools.items():
            if isinstance(backend, ExternalBackend):
                parts[f"speeds:{name}"] = backend.estimator
        path = options.state
        if path is None and options.decision_log is not None:
            path = options.decision_log / STATE_FILE
        file = None if path is None else StateFile(path)
        may_be_missing = not options.must_be_there
        manager.resume(cluster.policy, cluster.explore_fraction, may_be_missing, file, parts)
        self._reshaping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        interpreter.settle()

    async def reconfigure(self, address: dict[str, Any]) -> None:
        """Begin to listen; Serve calls this before the replica counts as started.

        Raises:
            OSError: The address, `host` and `port`, cannot be listened on.
        """
        if self._held is None:
            await check_no_proxy(address["host"], address["port"])
        if self._listener is None:
            self._end_with_serve()
        await self.listen(address["host"], address["port"])

    async def listen(self, host: str, port: int) -> None:
        """Begin to answer; an OSError says that the address cannot be used."""
        held, self._held = self._held, None
        if self._listener is None:
            self._start()
        else:
            await self._listener.stop()
        cluster = self._gateway.cluster
        self._listener = Listener(self.api, cluster.limits, cluster.gateway.tls)
        await self._listener.start(host, port, held)

    async def listen_for_proxies(self, host: str, port: int) -> None:
        """Begin to pick endpoints for Envoy; an OSError says that the address cannot be used."""
        from serve_app.ext_proc.server import ExtProcServer

        assert self.api.data_path is not None
        self._ext_proc = ExtProcServer(self.api.data_path, self._gateway, self._access.has_keys)
        await self._ext_proc.start(host, port)

    @cached_property
    def api(self) -> GatewayApi:
        """The HTTP application: one, as it remembers where responses are."""
        api = create_gateway_api(self._gateway, self._tokenizers, self._access)
        if self._allocator is not None:
            from serve_app.allocation.plans import load_plan_policy
            from serve_app.http import allocation

            scenario = self._allocator.scenario
            router = allocation.make_router(
                self._allocator, self._access,
                lambda name: load_plan_policy(name, scenario, self._registry),
                self._gateway.manager.note, self._gateway.manager.store.changing,
            )  # fmt: skip
            api.include_router(router)
        return api

    async def end(self) -> None:
        """Answer the requests that were let in; another gateway may listen already."""
        if self._listener is not None:
            if self._reshaping is not None:
                # Its replicas stay.
                self._reshaping.cancel()
            # The gateway that replaces this one makes the lasting decisions from here on.
            await self._gateway.manager.hand_over()
            await self._listener.hand_over()
            self._listener.refuse()
            if self._ext_proc is not None:
                self._ext_proc.resign()
            await self._gateway.drain()
            await self._listener.stop()
            if self._ext_proc is not None:
                self._ext_proc.stop()
            await self._stop()

    def _end_with_serve(self) -> None:
        """Drain when Serve asks for it, or is gone."""
        from serve_app.ray_serve.ending import end_with_ray

        # Serve awaits it. One of the class would be called by the garbage collector, too.
        self.__del__ = self.end
        self._orphaned = asyncio.create_task(end_with_ray(os.getppid(), self.end))

    async def drain(self, within_s: float | None = None) -> int:
        """Let nothing more in, wait for `limits.drain_s`, and return how many were cut off."""
        return await self._gateway.drain(within_s)

    async def check_health(self) -> None:
        """Answer from the API's event loop, so that a gateway which hangs is replaced."""

    def _start(self) -> None:
        """Start the background tasks."""
        self._gateway.manager.start()
        if self._gateway.peers is not None:
            self._gateway.peers.start()
        if self._access.keys is not None:
            self._watching = asyncio.create_task(self._access.keys.watch(self._note_keys))
        for pool in self._pools.values():
            if isinstance(pool, ExternalBackend):
                pool.start(self._gateway.manager.note)
        if self._allocator is not None:
            self._reshaping = asyncio.create_task(self._allocator.run())
        if self._recommendations is not None:
            self._recommending = asyncio.create_task(self._recommendations.run())

    def _note_keys(self) -> None:
        """Write to the audit log that the key file was read again."""
        file, manager = self._access.keys, self._gateway.manager
        assert file is not None
        if file.problem is None:
            manager.note("keys read", file.path.name, file.difference)
        else:
            manager.note("keys not read", file.path.name, file.problem)
        self._gateway.metrics.know_tenants(self._access.tenants)

    async def _stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._recommending is not None:
            self._recommending.cancel()
        for pool in self._pools.values():
            await pool.stop()
        self._gateway.manager.stop()
        if self._gateway.peers is not None:
            self._gateway.peers.stop()
        if self._gateway.log is not None:
            self._gateway.log.close()
        if self._audit_log is not None:
            self._audit_log.close()
        if self._gateway.tracing is not None:
            await asyncio.to_thread(self._gateway.tracing.close)


async def check_no_proxy(host: str, port: int) -> None:
    """Refuse (OSError) the port of Ray Serve's HTTP proxy: both would listen and share requests."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    origin = Origin.of(url_of(host, port))
    client, head = UpstreamClient(_PROXY_S), origin.head(b"GET", b"/-/healthz", b"", 0)
    try:
        async with asyncio.timeout(_PROXY_S):
            status, _ = await client.get(origin, head, 1 << 16)
    except (UpstreamError, TimeoutError):
        return
    finally:
        await client.close()
    if status == 200:
        raise OSError(
            errno.EADDRINUSE,
            f"Ray Serve's HTTP proxy listens on port {port}: start Serve with "
            "`proxy_location: Disabled`, or give the gateway another port",
        )


def find_cluster(options: GatewayOptions) -> Cluster:
    """Read the cluster that `options` name, with what they put in place of its fields.

    Raises:
        ValueError: The cluster, its policy or its baseline is not known, or cannot explore as told.
    """
    cluster = load_cluster(options.cluster)
    changes = options.model_dump(include={"policy", "scenario"}, exclude_none=True)
    if cluster.allocation is not None and options.policy == CANDIDATE:
        changes["allocation"] = cluster.allocation.model_copy(update={"policy": CANDIDATE})
    cluster = cluster.model_copy(update=changes)
    if options.explore_fraction is not None:
        check_exploration(load_policy(cluster, options), options.explore_fraction)
        changes["explore_fraction"] = options.explore_fraction
    fields = cluster.model_dump(mode="json") | changes
    cluster = fitted(Cluster, fields, f"cluster {options.cluster}")
    load_policy(cluster, options)
    resolve_policy(cluster.baseline, cluster.scenario)
    if cluster.needs_ray:
        from serve_app.allocation.plans import check_allocation
        from serve_app.ray_serve.replica import engine_class

        for pool in (*cluster.own_pools, *cluster.templates):
            engine_class(pool)
        if cluster.allocation is not None:
            check_allocation(cluster.allocation, registry_of(options))
    access = make_access(cluster, options)
    if access.keys is not None and access.keys.path.exists():
        access.open()  # Where the gateway runs elsewhere it says so itself.
    tls = cluster.gateway.tls
    if tls is not None and tls.certificate.exists():
        Certificate(tls)
    return cluster


def load_policy(cluster: Cluster, options: GatewayOptions) -> LoadedPolicy:
    """Load the policy that a gateway asks, or its stand-in.

    Raises:
        ValueError: It is not known; or missing or broken, where that is refused.
    """
    name = cluster.baseline if cluster.policy == RAY_DEFAULT else cluster.policy
    stand_in = None if options.must_be_there else cluster.baseline
    return resolve_policy(name, cluster.scenario, registry_of(options), stand_in)


def plan_origin(cluster: Cluster, options: GatewayOptions) -> "PlanOrigin | None":
    """Where the policy of the allocated pool comes from; None: there is no such pool."""
    if cluster.allocation is None:
        return None
    from serve_app.allocation.plans import load_plan_policy
    from tokenyard.allocation.plans import load_allocation

    scenario = load_allocation(cluster.allocation.scenario)
    name = cluster.allocation.policy
    return load_plan_policy(name, scenario, registry_of(options), may_ship=True)[1]


def registry_of(options: GatewayOptions) -> str | None:
    """Return the registry that champions are looked up in, or None; a path is local."""
    uri = options.registry or os.environ.get(REGISTRY_VARIABLE)
    path = (uri or "").removeprefix(_SQLITE)
    return f"{_SQLITE}{Path(path).absolute()}" if path != (uri or "") else uri or None


def token_of(options: GatewayOptions) -> str | None:
    """Return the bearer token that callers need; None: none."""
    return options.token or os.environ.get(TOKEN_VARIABLE) or None


def admin_token_of(options: GatewayOptions) -> str | None:
    """Return the bearer token that changes need; None: none."""
    return options.admin_token or os.environ.get(ADMIN_TOKEN_VARIABLE) or None


def local_admin_of(options: GatewayOptions) -> bool:
    """Return whether callers on this machine may change what is served without a token."""
    return options.local_admin or os.environ.get(LOCAL_ADMIN_VARIABLE) == "1"


def check_local_admin(options: GatewayOptions) -> None:
    """Refuse (ValueError) changes without a token where other machines may ask."""
    if local_admin_of(options) and options.host not in LOOPBACK:
        raise ValueError(
            f"{LOCAL_ADMIN_VARIABLE} is for {', '.join(LOOPBACK)}; set {ADMIN_TOKEN_VARIABLE}"
        )


def make_access(cluster: Cluster, options: GatewayOptions) -> Access:
    """Make the rules of who may use and who may change the gateway; keys are read later."""
    path = cluster.gateway.keys
    keys = None if path is None else KeyFile(path)
    return Access(token_of(options), admin_token_of(options), local_admin_of(options), keys)


def bind_gateway(cluster: Cluster, options: GatewayOptions) -> Any:
    """Make Ray Serve's application: a gateway and its pools."""
    from ray import serve

    from serve_app.ray_serve.replica import bind_pool

    log, state = options.decision_log, options.state
    options = options.model_copy(
        update={
            "decision_log": None if log is None else log.absolute(),
            "state": None if state is None else state.absolute(),
            "registry": registry_of(options),
            "token": token_of(options),
            "admin_token": admin_token_of(options),
            "local_admin": local_admin_of(options),
        }
    )
    pools = {pool.name: bind_pool(pool, cluster) for pool in cluster.own_pools}
    deploy = serve.deployment(
        name=GATEWAY,
        # One replica: what was sent is known only to itself, and decisions are made on that.
        num_replicas=1,
        # Three checks in a row must fail.
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=cluster.limits.drain_s + _END_S,
        user_config={"host": options.host, "port": options.port},
        ray_actor_options={
            "num_cpus": cluster.gateway.cpus,
            "label_selector": dict(cluster.gateway.node_labels),
        },
    )
    deployment: Any = deploy(GatewayReplica)
    return deployment.bind(cluster, options, pools)


def build_gateway(options: GatewayOptions) -> Any:
    """Find and bind: what `serve run serve_app.app:build_gateway cluster=...` names.

    Raises:
        ValueError: As `find_cluster`.
    """
    return bind_gateway(find_cluster(options), options)

"""Serve a cluster, or a routing policy alone, until Ctrl-C: `python pipelines/deploy.py`."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import psutil
import tyro
import uvloop
from pydantic import ValidationError

from serve_app.app import (
    APP_NAME,
    GATEWAY,
    GatewayOptions,
    bind_gateway,
    check_local_admin,
    find_cluster,
    load_policy,
    plan_origin,
    token_of,
)
from serve_app.cluster import Cluster
from serve_app.gateway.decision_log import DecisionLog
from serve_app.policy.card import PolicyCard
from serve_app.process import serve_until_told
from tokenyard.config import sentence_of
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.routing.fleet import AnyReplica
from tokenyard.routing.scenario import load_scenario

if TYPE_CHECKING:
    from serve_app.allocation.plans import PlanOrigin

DECIDE_ONLY = "none"
_SIGNAL_POLL_S = 0.25
_WATCH_EVERY_S = 2.0
_WATCH_TIMEOUT_S = 5.0
_GONE_AFTER_S = 120.0
"""Time without an answer of the gateway after which nobody is expected to replace it."""
_DRAIN_SLACK_S = 20.0
"""For the gateway's answer to come back."""
_REACH_S, _STARTS = 15.0, 3
"""For a Ray to say that it is there; and how often one is started that does not come up in time."""


@dataclass(frozen=True)
class Args:
    """Serve a cluster's model over HTTP, or a routing policy alone."""

    cluster: str = "local_cpu"
    """Name or YAML path of the cluster whose pools are served; none: decide only, without pools."""
    policy: str | None = None
    """champion, the registry's candidate, a policy file (.npz), a baseline's name or, with pools,
    ray_default; None: the cluster's, or champion. `candidate` holds for allocation too."""
    scenario: str | None = None
    """Whose champion, tuned rules and length predictor are used; None: the cluster's, which is
    poisson_085 without pools."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """Port to listen on."""
    fallback: Literal["sed"] | None = None
    """What to serve without pools where the trained policy is missing or broken; without it:
    refuse to start. With pools the cluster's baseline stands in."""
    decision_log: Path | None = None
    """Folder that gets Parquet files with a row per decision."""
    explore: float | None = None
    """Share of decisions drawn at random among the replicas that keep the SLO, at most 0.05;
    None: the cluster's, which is 0.01 unless its file sets another, and 0 without pools."""
    registry: str | None = None
    """MLflow tracking URI whose registered champion is preferred to the shipped one; by default
    MLFLOW_TRACKING_URI where that is set. One that cannot be read is named, and what ships is
    served."""
    token: str | None = None
    """Bearer token that callers need; by default TOKENYARD_TOKEN where that is set."""
    json: ResultFile | None = None
    """File that gets a row about what is served, as soon as it is."""


@dataclass(frozen=True)
class Deployment:
    """What is about to be served, found and checked."""

    cluster: Cluster
    options: GatewayOptions
    card: PolicyCard
    """Of the policy that is served."""
    origin: PlanOrigin | None
    """Of the allocation policy, where a pool is allocated."""

    @property
    def num_cpus(self) -> float:
        """CPUs that its actors reserve."""
        num_cpus = 1.0 + sum(
            pool.replicas * (pool.replica_cpus + pool.config.num_ranks * pool.config.rank_cpus)
            for pool in self.cluster.own_pools
        )
        if self.cluster.allocation is not None:
            from tokenyard.allocation.plans import load_allocation

            template = self.cluster.allocation.template
            budget = load_allocation(self.cluster.allocation.scenario).num_gpus
            num_cpus += budget * (template.replica_cpus + template.config.rank_cpus)
        return num_cpus

    @property
    def scheme(self) -> str:
        """With what callers ask."""
        return "http" if self.cluster.gateway.tls is None else "https"

    @property
    def example(self) -> str:
        """A command that asks it, without `curl -s` and the URL."""
        path, body = "/v1/chat/completions", _chat_body(self.cluster.served_model)
        if self.cluster.decide_only:
            path, body = "/v1/route", _route_body(self.cluster.scenario)
        name = "TOKENYARD_TOKEN" if token_of(self.options) else "KEY"
        needs_one = token_of(self.options) or self.cluster.gateway.keys is not None
        secret = f' -H "authorization: Bearer ${name}"' if needs_one else ""
        return f"{path} -H 'content-type: application/json'{secret} -d '{dumps(body)}'"


def main(args: Args) -> None:
    """Start, tell how to ask, wait, and shut down cleanly."""
    address = os.environ.get("RAY_ADDRESS") or None
    try:
        deployment = _find(args)
        if address is None:
            _check_port(args.host, args.port)
        if address is None and not deployment.cluster.needs_ray:
            serving = serve_until_told(
                deployment.cluster, deployment.options, lambda: _report(deployment, args)
            )
            return _report_cut(uvloop.run(serving))
        _connect(address, deployment.num_cpus)
    except (ValueError, OSError) as error:
        text = sentence_of(error) if isinstance(error, ValidationError) else str(error)
        sys.exit(f"error: {' '.join(text.split())}")
    signals, local = _Signals(), address is None
    try:
        _start(bind_gateway(deployment.cluster, deployment.options))
        _report(deployment, args)
        if not _wait(signals, args, local, deployment.scheme):
            _give_up()
        _drain(signals, deployment.cluster.limits.drain_s)
    finally:
        _shut_down()
    # The handle that drained leaves threads, which can crash an interpreter that ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _find(args: Args) -> Deployment:
    options = GatewayOptions(
        cluster=args.cluster,
        policy=args.policy,
        scenario=args.scenario,
        must_be_there=args.cluster == DECIDE_ONLY and args.fallback is None,
        explore_fraction=args.explore,
        registry=args.registry,
        decision_log=args.decision_log,
        token=args.token,
        host=args.host,
        port=args.port,
    )
    check_local_admin(options)
    cluster = find_cluster(options)
    if args.decision_log is not None:
        DecisionLog(args.decision_log).close()
    card = load_policy(cluster, options).card
    if not cluster.decide_only:
        card = card.model_copy(update={"name": cluster.policy})
    return Deployment(cluster, options, card, plan_origin(cluster, options))


def _check_port(host: str, port: int) -> None:
    """Find out now what Serve would try three times."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            pass
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from None


class _Signals:
    """Ctrl-C and SIGTERM: the first lets answers end, the second does not wait for them."""

    def __init__(self) -> None:
        self.stop, self.hurry = threading.Event(), threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, *_: object) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


def _wait(signals: _Signals, args: Args, local: bool, scheme: str) -> bool:
    """Wait until told to end; False: what was started here is gone and does not come back.

    Serve replaces replicas that die, but nobody replaces a local Ray.
    """
    import ray

    answered_s = time.monotonic()
    while not signals.stop.wait(_WATCH_EVERY_S if local else None):
        if local and not any(node["Alive"] for node in ray.nodes()):
            return False
        if _gateway_answers(args.host, args.port, scheme):
            answered_s = time.monotonic()
        elif time.monotonic() - answered_s > _GONE_AFTER_S:
            return False
    return True


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _gateway_answers(host: str, port: int, scheme: str = "http") -> bool:
    """Whether the gateway answers, well or not."""
    import httpx

    address = "127.0.0.1" if host == "0.0.0.0" else host
    url = f"{scheme}://{_in_url(address)}:{port}/healthz"
    try:
        # Its certificate names the host that callers use, which is not this address.
        answer = httpx.get(url, timeout=_WATCH_TIMEOUT_S, trust_env=False, verify=False)
        return "replicas" in answer.text
    except httpx.HTTPError:
        return False


def _give_up() -> NoReturn:
    """End with an error, so that a supervisor starts anew."""
    import ray

    # With its Ray gone, hardly anything that ends it comes back.
    last_resort = threading.Timer(_WATCH_TIMEOUT_S, os._exit, (1,))
    last_resort.daemon = True
    last_resort.start()
    print("error: Ray is gone, and nothing is served any more", file=sys.stderr, flush=True)
    ray.shutdown()
    os._exit(1)


def _drain(signals: _Signals, drain_s: float) -> None:
    """Let the gateway finish what it has begun, and take nothing new."""
    from ray import serve

    handle: Any = serve.get_deployment_handle(GATEWAY, APP_NAME)
    drained, until_s = handle.drain.remote(), time.monotonic() + drain_s + _DRAIN_SLACK_S
    try:
        while not signals.hurry.is_set() and time.monotonic() < until_s:
            with suppress(TimeoutError):
                return _report_cut(drained.result(timeout_s=_SIGNAL_POLL_S))
        _report_cut(handle.drain.remote(0.0).result(timeout_s=_DRAIN_SLACK_S))
    except Exception as error:  # Ray raises all kinds.
        print(f"not drained: {(str(error) or 'no answer').splitlines()[0]}", file=sys.stderr)


def _report_cut(num_answers: int) -> None:
    if num_answers:
        print(f"{num_answers} answers are cut", file=sys.stderr, flush=True)


def _connect(address: str | None, num_cpus: float) -> None:
    """Connect to the Ray at an address, or start one, with retries; ValueError: none answers."""
    # Ray gives its workers the lowest priority, which slows ranks that run beside other work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    from serve_app import ray_private

    options: dict[str, Any] = {}
    if address is None:
        # Ranks on a small machine share its cores; Ray only counts what actors reserve.
        num = max(os.cpu_count() or 1, math.ceil(num_cpus))
        options = {"address": "local", "num_cpus": num, "include_dashboard": False}
    else:
        ray_private.check_alive(address, _REACH_S)
    others, reason = psutil.Process().children(recursive=True), ""
    for _ in range(_STARTS if address is None else 1):
        try:
            ray.init(logging_level=logging.WARNING, **options)
            return
        except Exception as error:  # Ray's timeout has no class of its own.
            reason = str(error)
            print(f"Ray did not start: {reason}", file=sys.stderr, flush=True)
        ray.shutdown()
        left = [child for child in psutil.Process().children(recursive=True) if child not in others]
        for child in left:
            child.kill()
        psutil.wait_procs(left, _WATCH_TIMEOUT_S)
    raise ValueError(
        f"no Ray: {reason} (a busy machine may need another try, and a cluster whose pools are all "
        "external needs no Ray)"
    )


def _start(application: Any) -> None:
    from ray import serve

    # The decision log says more than an access log, and costs less per request.
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    # The gateway listens itself.
    serve.start(proxy_location="Disabled", logging_config=quiet)
    serve.run(application, name=APP_NAME, route_prefix=None, logging_config=quiet)


def _shut_down() -> None:
    import ray
    from ray import serve

    # Waits for the last bytes of answers, which a shutdown would cut.
    serve.delete(APP_NAME)
    # On a shared cluster only the application is ours, not Serve itself. One of ours ends whole.
    ray.shutdown()


def _report(deployment: Deployment, args: Args) -> None:
    """Print one line that sums up the deployment, and write it as a row for `--json`."""
    url, card = f"{deployment.scheme}://{_in_url(args.host)}:{args.port}", deployment.card
    run = f", MLflow run {card.mlflow_run}" if card.mlflow_run else ""
    print(
        f"serving {card.name} ({card.source}, {card.sha256}{run}){_allocation_words(deployment)} "
        f"on {url}; ask with: curl -s {url}{deployment.example}",
        flush=True,
    )
    for error in (card.registry_error, deployment.origin and deployment.origin.registry_error):
        if error is not None:
            print(f"what ships is served: {error}", file=sys.stderr, flush=True)
    if args.json is not None:
        keys = {
            "name", "kind", "trainer", "scenario", "sha256", "source", "mlflow_run",
            "registry_error", "startup_fallback",
        }  # fmt: skip
        command = command_line(args.token)
        row = {"url": url, **card.model_dump(include=keys)}
        write_result(args.json, command, None, [row])


def _allocation_words(deployment: Deployment) -> str:
    """Name the allocation policy and its source; empty without one."""
    allocation, origin = deployment.cluster.allocation, deployment.origin
    if allocation is None or origin is None:
        return ""
    run = f"MLflow run {origin.mlflow_run}" if origin.mlflow_run else None
    origin_words = ", ".join(part for part in (origin.source, origin.sha256, run) if part)
    return f", GPUs allocated by {allocation.policy} ({origin_words}),"


def _chat_body(model: str) -> dict[str, Any]:
    """Body of a question to a model."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }


def _route_body(scenario: str) -> dict[str, Any]:
    """Body of an example routing request, with one snapshot per server or replica."""
    loaded = load_scenario(scenario)
    if loaded.fleet is None:
        kinds = [
            {
                "replica_id": server.name,
                "tokens_per_s": server.tokens_per_s,
                "num_slots": 1,
                "max_concurrency": server.concurrency,
            }
            for server in loaded.servers
        ]
    else:
        speeds = zip(loaded.fleet.replicas, loaded.server_capacities_tokens_per_s, strict=True)
        kinds = [
            {
                "replica_id": replica.name,
                "tokens_per_s": per_s / replica.max_batch,
                "num_slots": replica.max_batch,
                "max_concurrency": replica.max_batch,
                "engine": _engine_body(replica),
            }
            for replica, per_s in speeds
        ]
    snapshots = [
        kind | {"num_waiting": 0, "num_running": index, "tokens_in_flight": 2000 * index}
        for index, kind in enumerate(kinds)
    ]
    return {"request": {"context_tokens": 1500}, "snapshots": snapshots}


def _engine_body(replica: AnyReplica) -> dict[str, Any]:
    """How fast a replica that batches is, with nothing in its cache."""
    names = ("iteration_s", "prefill_token_s", "sequence_s", "kv_token_s")
    return dict(zip(names, replica.iteration.tolist(), strict=True)) | {
        "token_budget": replica.token_budget,
        "kv_capacity_tokens": replica.kv_capacity_tokens,
        "kv_used_fraction": 0,
        "prefill_in_flight_tokens": 0,
        "output_in_flight_tokens": 0,
    }


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

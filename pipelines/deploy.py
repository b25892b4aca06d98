"""Serve a routing policy over HTTP until Ctrl-C: `python pipelines/deploy.py`."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Literal

import ray
import tyro
from ray import serve
from ray.serve import Application

from serve_app.app import APP_NAME, RoutingOptions, bind, find
from serve_app.messages import PolicyCard
from tokenyard.provenance import write_result
from tokenyard.scenario import load_scenario


@dataclass(frozen=True)
class Args:
    """Serve a routing policy over HTTP."""

    policy: str = "champion"
    """champion, a policy file (.npz) or a baseline's name."""
    scenario: str = "poisson_085"
    """Whose champion, tuned rules and length predictor are used."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """Port to listen on."""
    fallback: Literal["sed"] | None = None
    """What to serve where the trained policy is missing or broken; without it: refuse to start."""
    decision_log: Path | None = None
    """File that gets one JSON line per decision."""
    explore: float = 0.0
    """Share of decisions drawn at random among the replicas that keep the SLO, at most 0.05."""
    registry: str | None = None
    """MLflow tracking URI whose registered champion is preferred to the shipped one; by default
    MLFLOW_TRACKING_URI where that is set."""
    json: Path | None = None
    """File that gets a row about what is served, as soon as it is."""


def main(args: Args) -> None:
    """Start, tell how to ask, wait, and shut down cleanly."""
    options = _options(args)
    local = "RAY_ADDRESS" not in os.environ
    try:
        served = find(options)
        if local:
            _check_port(args.host, args.port)
            _check_log(args.decision_log)
        _connect(local)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    stop = _stop_on_signals()
    try:
        _start(bind(served, options), args)
        _report(served.card, args)
        stop.wait()
    finally:
        _shut_down(local)


def _options(args: Args) -> RoutingOptions:
    return RoutingOptions(
        policy=args.policy,
        scenario=args.scenario,
        registry=args.registry or os.environ.get("MLFLOW_TRACKING_URI"),
        fallback_to_sed=args.fallback == "sed",
        decision_log=args.decision_log,
        explore_fraction=args.explore,
    )


def _check_port(host: str, port: int) -> None:
    """Find out now what Serve would report as an unhealthy proxy after a minute."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _check_log(path: Path | None) -> None:
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise ValueError(f"cannot write the decision log {path}: {error.strerror}") from None


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _connect(local: bool) -> None:
    ray.init(
        address="local" if local else None,
        include_dashboard=False if local else None,
        logging_level=logging.WARNING,
    )


def _start(application: Application, args: Args) -> None:
    # The decision log says more than an access log, and costs less per request.
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(http_options={"host": args.host, "port": args.port}, logging_config=quiet)
    serve.run(application, name=APP_NAME, route_prefix="/", logging_config=quiet)


def _shut_down(local: bool) -> None:
    # On a shared cluster only the application is ours, not Serve itself.
    if local:
        serve.shutdown()
    else:
        serve.delete(APP_NAME)
    ray.shutdown()


def _report(card: PolicyCard, args: Args) -> None:
    """Print the one line that says all, and write it as a row where that is wanted."""
    url = f"http://{args.host}:{args.port}"
    print(
        f"serving {card.name} ({card.source}, {card.version}) on {url}; ask with: "
        f"curl -s {url}/v1/route -H 'content-type: application/json' "
        f"-d '{_example(args.scenario)}'",
        flush=True,
    )
    if args.json is not None:
        keys = {"name", "kind", "trainer", "scenario", "version", "source", "startup_fallback"}
        write_result(
            args.json, shlex.join(sys.argv), None, [{"url": url, **card.model_dump(include=keys)}]
        )


def _example(scenario: str) -> str:
    """Body of a question about a moment in the life of the scenario's servers."""
    snapshots = [
        {
            "replica_id": server.name,
            "tokens_per_s": server.tokens_per_s,
            "num_slots": 1,
            "max_concurrency": server.concurrency,
            "num_waiting": 0,
            "num_running": index,
            "tokens_in_flight": 2000 * index,
        }
        for index, server in enumerate(load_scenario(scenario).servers)
    ]
    return dumps({"request": {"context_tokens": 1500}, "snapshots": snapshots})


if __name__ == "__main__":
    main(tyro.cli(Args))

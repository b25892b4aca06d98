"""The Ray Serve application: one replica that holds the policy behind the HTTP API."""

# No `from __future__ import annotations` here: `serve run` reads the class of build's argument.
from pathlib import Path

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application, Deployment

from serve_app.api import RoutingService, create_api
from serve_app.decider import Decider, check_exploration
from serve_app.decision_log import DecisionLog
from serve_app.served import ServedPolicy, rehearse, resolve_policy

APP_NAME = "tokenyard-routing"


class RoutingOptions(BaseModel):
    """What to serve; also the `args` of a Serve config file over `serve_app.app:build`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = "champion"
    """`champion`, a policy file (.npz) or a baseline's name."""
    scenario: str = "poisson_085"
    """Whose champion, tuning and predictor are used."""
    registry: str | None = None
    """MLflow tracking URI where champions are looked up; None: only shipped ones count."""
    fallback_to_sed: bool = False
    """Serve shortest expected delay where a trained policy is missing or broken."""
    decision_log: Path | None = None
    """File on the node of the replica that gets a JSON line per decision."""
    explore_fraction: float = 0.0
    """Share of decisions drawn at random among the replicas that keep the SLO."""


class RoutingReplica:
    """The replica; Ray Serve asks it for the API once it is built."""

    def __init__(
        self, served: ServedPolicy, explore_fraction: float, decision_log: Path | None
    ) -> None:
        """Make the policy and open the log."""
        rehearse(served)
        decider = Decider(served, np.random.default_rng(), explore_fraction)
        log = None if decision_log is None else DecisionLog(decision_log)
        self._service = RoutingService(decider, log)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP API."""
        return create_api(self._service)


def find(options: RoutingOptions) -> ServedPolicy:
    """Find the policy that `options` name, so that a bad one is refused before anything starts.

    Raises:
        ValueError: The policy or the exploration is not one that can be served.
    """
    served = resolve_policy(
        options.policy, options.scenario, options.registry, options.fallback_to_sed
    )
    check_exploration(served, options.explore_fraction)
    return served


def bind(served: ServedPolicy, options: RoutingOptions) -> Application:
    """Make the application that serves a policy which was found."""
    log = None if options.decision_log is None else options.decision_log.absolute()
    # One replica: policies remember the last requests, and two of them would remember half each.
    deploy = serve.deployment(name="routing", num_replicas=1, max_ongoing_requests=1000)
    deployment: Deployment = deploy(serve.ingress()(RoutingReplica))
    return deployment.bind(served, options.explore_fraction, log)


def build(options: RoutingOptions) -> Application:
    """Find and bind: what `serve run serve_app.app:build policy=sed` and config files name.

    Raises:
        ValueError: As `find`.
    """
    return bind(find(options), options)

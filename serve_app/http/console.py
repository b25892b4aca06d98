"""The operator's page at `/`, and `/v1/console`, the one answer that it shows."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.routing import NoMatchFound

from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.history import BIN_S, ChoiceOfRule, finite
from serve_app.gateway.replicas import ReplicaState
from serve_app.http.auth import Access
from serve_app.http.policies_schema import describe_policies

_FILES = resources.files("serve_app").joinpath("http/console")
_KINDS = {"index.html": "text/html", "console.css": "text/css", "console.js": "text/javascript",
          "charts.js": "text/javascript"}  # fmt: skip
_PAGE_MAY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src data:; base-uri 'none'; frame-ancestors 'none'"
)
"""The page asks this server alone."""
_NUM_SHOWN = 10
"""Decisions, waiting requests, changes and tenants."""
_COLUMNS = (
    "replica_id", "state", "running", "waiting", "in_flight", "max_batch", "kv_used", "age_s",
    "sessions", "believed_ms", "measured_ms", "contradiction", "pool",
)  # fmt: skip
"""What a row of a replica says. Times are of an iteration with a full batch that only decodes."""


def make_router(gateway: Gateway, access: Access) -> APIRouter:
    """Make the routes of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/v1/console", dependencies=[Depends(access.may_see_all)])
    async def console(
        request: Request, since_s: Annotated[float, Query(allow_inf_nan=False)] = 0.0
    ) -> JSONResponse:
        """Return the bins from a time on, and the present state of everything else."""
        now_s, history, manager = gateway.refresh(), gateway.history, gateway.manager
        policies = describe_policies(manager, access.is_admin(request))
        policies.events = policies.events[:_NUM_SHOWN]
        has_allocation = False
        with suppress(NoMatchFound):
            has_allocation = bool(request.app.url_path_for("allocation"))
        # By replica; those without the key `sessions` have none.
        gate, states, backends = gateway.sessions, gateway.states(), gateway.backends.values()
        homes = [] if gate is None else gate.describe(now_s)["replicas"]
        sessions = {home["replica_id"]: home["running"] + home["idle"] for home in homes}
        # What the baseline itself decides needs no comparison.
        decides = manager.policy.decides
        rule: ChoiceOfRule = manager.picker.by_baseline if decides else lambda _: None
        return JSONResponse({
            "now_s": now_s, "bin_s": BIN_S, "in_flight": gateway.in_flight,
            "draining": gateway.draining,
            "bins": history.look(now_s, since_s),
            "decisions": history.decisions(_NUM_SHOWN, rule),
            "baseline": manager.baseline,
            "tenants": gateway.metrics.tenants(_NUM_SHOWN),
            "problems": {
                pool.name: pool.describe()["problems"] if isinstance(pool, ExternalBackend) else {}
                for pool in backends
            },
            "columns": _COLUMNS,
            "replicas": [
                _row(replica, states[name], sessions.get(name), now_s)
                for name, replica in gateway.table.replicas.items()
            ],
            "policies": json.loads(policies.model_dump_json()), "queue": _queue(gateway),
            "autopilot": json.loads(gateway.autopilot.describe().model_dump_json()),
            "has_allocation": has_allocation,
        })  # fmt: skip

    for name, kind in _KINDS.items():
        text = _FILES.joinpath(name).read_text(encoding="utf-8")
        router.add_api_route("/" if kind == "text/html" else f"/{name}", _teller(text, kind))
    return router


def _teller(text: str, kind: str) -> Any:
    async def tell() -> Response:
        return Response(text, media_type=kind, headers={"content-security-policy": _PAGE_MAY})

    return tell


def _row(replica: ReplicaState, state: str, sessions: int | None, now_s: float) -> list[Any]:
    status, profile, measured, contradiction = replica.status, replica.profile, None, None
    if replica.speed is not None:
        known = replica.speed.describe()
        contradiction = known["contradiction"]
        if known["num_observations"]:
            measured = finite(
                1e3 * (known["iteration_s"] + known["sequence_s"] * profile.max_batch)
            )
    believed = finite(1e3 * (profile.iteration_s + profile.sequence_s * profile.max_batch))
    return [
        replica.replica_id, state, status.num_running, status.num_waiting,
        replica.in_flight.count, profile.max_batch, finite(status.kv_used_fraction),
        round(max(now_s - status.observed_at_s, 0.0), 1), sessions, believed, measured,
        contradiction, replica.pool,
    ]  # fmt: skip


def _queue(gateway: Gateway) -> dict[str, Any]:
    """The requests that wait at the gateway, and how many replicas of each pool are full."""
    if gateway.holding is None:
        return {"held": 0, "requests": [], "full": {}}
    line = gateway.holding.describe()
    full = (row for row in line["full"] if row["in_flight"] >= (row["max_ongoing"] or math.inf))
    shown = {
        "requests": line["requests"][:_NUM_SHOWN],
        "full": Counter(row["pool"] for row in full),
    }
    return line | shown

"""The operator's page at `/`, and `/v1/console`, the one answer that it shows."""

from __future__ import annotations

import json
import math
from collections import Counter
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
_DECISIONS_SHOWN, _REQUESTS_SHOWN, _EVENTS_SHOWN = 8, 8, 8
_COLUMNS = (
    "replica_id", "state", "running", "waiting", "in_flight", "max_batch", "kv_used", "age_s",
    "sessions", "believed_ms", "measured_ms", "contradiction",
)  # fmt: skip
"""What a row of a pool says. Times are of an iteration with a full batch that only decodes."""


def make_router(gateway: Gateway, access: Access) -> APIRouter:
    """Make the routes of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/v1/console", dependencies=[Depends(access.may_see_all)])
    async def console(
        request: Request, since_s: Annotated[float, Query(allow_inf_nan=False)] = 0.0
    ) -> JSONResponse:
        """Return the bins from a time on, and the present state of everything else."""
        now_s, history, manager = gateway.refresh(), gateway.history, gateway.manager
        policies = json.loads(describe_policies(manager).model_dump_json())
        policies["events"] = policies["events"][:_EVENTS_SHOWN]
        if not access.is_admin(request):
            for event in policies["events"]:
                del event["by"]
        has_allocation = True
        try:
            request.app.url_path_for("allocation")
        except NoMatchFound:
            has_allocation = False
        # What the baseline itself decides needs no comparison.
        decides = manager.policy.decides
        rule: ChoiceOfRule = manager.picker.by_baseline if decides else lambda _: None
        return JSONResponse({
            "now_s": now_s, "bin_s": BIN_S, "in_flight": gateway.in_flight,
            "draining": gateway.draining,
            "bins": history.look(now_s, since_s),
            "decisions": history.decisions(_DECISIONS_SHOWN, rule),
            "baseline": manager.baseline, "agreement": history.agreement(rule),
            "tenants": history.tenants(now_s),
            "columns": _COLUMNS, "pools": _pools(gateway, now_s),
            "policies": policies, "queue": _queue(gateway),
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


def _pools(gateway: Gateway, now_s: float) -> list[dict[str, Any]]:
    """Every pool, with a row for each of its replicas."""
    states, sessions = gateway.states(), Counter[str]()
    if gateway.sessions is not None:
        for one in gateway.sessions.describe(now_s)["replicas"]:
            sessions[one["replica_id"]] = one["running"] + one["idle"]
    has_sessions = gateway.sessions is not None
    rows: dict[str, list[Any]] = {name: [] for name in gateway.backends}
    for name, replica in gateway.table.replicas.items():
        number = sessions[name] if has_sessions else None
        rows.setdefault(replica.pool, []).append(_row(replica, states[name], number, now_s))
    backends = gateway.backends
    return [
        {
            "name": name,
            "replicas": sorted(rows[name], key=lambda row: str(row[0])),
            "problems": backend.describe()["problems"]
            if isinstance(backend := backends.get(name), ExternalBackend)
            else {},
        }
        for name in sorted(rows)
    ]


def _row(replica: ReplicaState, state: str, sessions: int | None, now_s: float) -> list[Any]:
    status, profile, measured, contradiction = replica.status, replica.profile, None, None
    if replica.speed is not None:
        known = replica.speed.describe()
        contradiction = known["contradiction"]
        if known["num_observations"]:
            measured = known["iteration_s"] + known["sequence_s"] * profile.max_batch
    believed = profile.iteration_s + profile.sequence_s * profile.max_batch
    return [
        replica.replica_id, state, status.num_running, status.num_waiting,
        replica.in_flight.count, profile.max_batch, finite(status.kv_used_fraction),
        round(max(now_s - status.observed_at_s, 0.0), 1), sessions, finite(1e3 * believed),
        None if measured is None else finite(1e3 * measured), contradiction,
    ]  # fmt: skip


def _queue(gateway: Gateway) -> dict[str, Any]:
    """The requests that wait at the gateway, and how many replicas of each pool are full."""
    if gateway.holding is None:
        return {"held": 0, "requests": [], "full": {}}
    line = gateway.holding.describe()
    windows = line.pop("full")
    of_pool = Counter(one["pool"] for one in windows)
    full = Counter(
        one["pool"] for one in windows if one["in_flight"] >= (one["max_ongoing"] or math.inf)
    )
    return {
        **line, "requests": line["requests"][:_REQUESTS_SHOWN],
        "full": {pool: [full[pool], num] for pool, num in of_pool.items()},
    }  # fmt: skip

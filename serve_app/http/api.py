"""The HTTP application of a gateway, with pools or without."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.gateway.gateway import Gateway
from serve_app.http import admin, decide, errors, openai, pools
from serve_app.http.auth import Access
from serve_app.http.data_path import DataPath, Tokenizers
from serve_app.http.docs_page import documentation
from serve_app.http.intake import OPENAI_PATHS, Intake, PendingBodies
from serve_app.policy.lifecycle import Lifecycle


class GatewayApi(FastAPI):
    """FastAPI, with a short way for requests that are only handed on."""

    data_path: ASGIApp | None = None
    """Answers the routes that replicas answer; None: there are none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        path = self.data_path
        if path is not None and scope["type"] == "http" and scope["path"] in OPENAI_PATHS:
            await path(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Describe all routes, those of the short way included."""
        if self.openapi_schema is None:
            handed_on = () if self.data_path is None else openai.described.routes
            self.openapi_schema = get_openapi(
                title=self.title, version=self.version, routes=[*handed_on, *self.routes]
            )
        return self.openapi_schema


def create_gateway_api(
    gateway: Gateway,
    tokenizers: Tokenizers,
    access: Access,
    lifecycle: Lifecycle | None = None,
) -> FastAPI:
    """Lay the HTTP routes over a gateway; one that only decides has no model, and regions.

    Args:
        gateway: Serves requests.
        tokenizers: Of the models that are served: see `serve_app.http.data_path`.
        access: Who may ask.
        lifecycle: Changes who decides; None: one that forgets.
    """
    # The usual documentation pages load scripts from the network; /docs is plain HTML instead.
    api = GatewayApi(title="Tokenyard gateway", docs_url=None, redoc_url=None)
    limits = gateway.cluster.limits
    # Half of the places that the application holds for requests that are not in flight.
    most = 2 * limits.max_in_flight
    bodies = PendingBodies(limits.body_timeout_s, most, limits.max_body_bytes)
    errors.install(api, access, bodies)
    if not gateway.cluster.decide_only:
        path = DataPath(gateway, tokenizers, errors.refuse)
        api.data_path = Intake(path, access, bodies, errors.refuse)
    for router in _routers(gateway, access, lifecycle or Lifecycle(gateway.manager)):
        api.include_router(router)

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(documentation(api.openapi()))

    return api


def _routers(gateway: Gateway, access: Access, lifecycle: Lifecycle) -> list[APIRouter]:
    decide_only = gateway.cluster.decide_only
    service = decide.RouteService(gateway.manager, decide_only, gateway.log, gateway.clock_s)
    routers = [
        decide.make_router(service, access),
        admin.policy_router(gateway, access, lifecycle),
        admin.state_router(gateway, access),
        pools.make_router(gateway, access),
    ]
    if decide_only:
        # scipy is large, and only regions need it.
        from serve_app import regions

        decider = regions.RegionDecider.shipped(registry=gateway.metrics.registry)
        return [*routers, regions.make_router(decider, access)]
    return [openai.make_router(gateway, access), *routers]

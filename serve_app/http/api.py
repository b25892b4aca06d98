"""The HTTP application of a gateway, with pools or without."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.gateway.gateway import Gateway
from serve_app.http import admin, console, decide, errors, openai, picks, pools
from serve_app.http.auth import Access
from serve_app.http.data_path import DataPath, Tokenizers
from serve_app.http.docs_page import documentation
from serve_app.http.intake import Intake, PendingBodies, with_cors


class GatewayApi(FastAPI):
    """FastAPI, with a short way past it for requests that are handed on."""

    data_path: ASGIApp | None = None
    """Answers the routes that replicas answer; None: there are none."""
    bodies: PendingBodies
    """Know these routes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        way, is_http = self.data_path, scope["type"] == "http"
        if way is not None and is_http and self.bodies.are_handed_on(scope["path"]):
            await way(scope, receive, send)
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


def create_gateway_api(gateway: Gateway, tokenizers: Tokenizers, access: Access) -> GatewayApi:
    """Make the HTTP routes of a gateway; one without pools has only decisions and regions."""
    # The usual documentation pages load scripts from the network; /docs is plain HTML instead.
    api = GatewayApi(title="Tokenyard gateway", docs_url=None, redoc_url=None)
    api.bodies = bodies = PendingBodies.of(gateway.cluster)
    errors.install(api, access, bodies)
    if (cors := gateway.cluster.gateway.cors) is not None:
        api.add_middleware(with_cors, cors=cors)
    if not gateway.cluster.decide_only:
        intake = Intake(access, bodies, errors.refuse)
        path = DataPath(gateway, tokenizers, intake, errors.refuse)
        api.data_path = with_cors(path, gateway.cluster.gateway.cors)
        api.include_router(picks.make_router(path))
    for router in _routers(gateway, access):
        api.include_router(router)
        for own in router.routes:
            if isinstance(own, APIRoute) and bodies.are_handed_on(own.path):
                raise ValueError(f"gateway.routes: the gateway answers {own.path} itself")

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(documentation(api.openapi()))

    return api


def _routers(gateway: Gateway, access: Access) -> list[APIRouter]:
    decide_only = gateway.cluster.decide_only
    picker = gateway.manager.picker
    service = decide.RouteService(picker, decide_only, gateway.log, gateway.clock_s)
    routers = [
        decide.make_router(service, access),
        admin.policy_router(gateway, access),
        admin.state_router(gateway, access),
        console.make_router(gateway, access),
        pools.make_router(gateway, access),
    ]
    if decide_only:
        # scipy is large, and only regions need it.
        from serve_app.http import regions

        decider = regions.RegionDecider.shipped(registry=gateway.metrics.registry)
        return [*routers, regions.make_router(decider, access)]
    return [openai.make_router(gateway, access), *routers]

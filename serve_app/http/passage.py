"""The HTTP side of a carrier: it answers OpenAI's routes, and the decider all others."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.gateway.carrier import Carrier, DeciderUnavailable
from serve_app.http import errors
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.data_path import DataPath, Tokenizers
from serve_app.http.intake import Intake, IntakeMiddleware, PendingBodies, with_cors

_ANSWERED_ALONE = frozenset(("/health", "/healthz", "/v1/models"))
"""Routes that a carrier answers while the decider is away, with those of single models."""


def create_carrier_api(carrier: Carrier, tokenizers: Tokenizers, access: Access) -> ASGIApp:
    """Make the HTTP application of a carrier."""
    bodies = PendingBodies.of(carrier.cluster)
    intake = Intake(access, bodies, errors.refuse)
    data_path = DataPath(carrier, tokenizers, intake, errors.refuse)
    alone = create_gateway_api(carrier.alone, tokenizers, access)

    async def pass_on(scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a complete request on to the decider, with the caller's address."""
        body = (await receive())["body"]
        try:
            answer, content = await carrier.ask(_head(scope), body)
        except DeciderUnavailable:
            is_known = scope["path"] in _ANSWERED_ALONE or scope["path"].startswith("/v1/models/")
            if scope["method"] == "GET" and is_known:
                return await alone(scope, receive, send)
            reason = "the process that decides is away, and is about to come back"
            refusal = JSONResponse({"detail": reason}, 503, {"retry-after": "2"})
            return await refusal(scope, receive, send)
        headers = [(name.encode("latin-1"), value.encode("latin-1"))
                   for name, value in answer["headers"]]  # fmt: skip
        await send({"type": "http.response.start", "status": answer["status"], "headers": headers})
        await send({"type": "http.response.body", "body": content})

    passage = IntakeMiddleware(pass_on, access, bodies, errors.refuse)

    async def api(scope: Scope, receive: Receive, send: Send) -> None:
        handle = data_path if bodies.are_handed_on(scope["path"]) else passage
        await handle(scope, receive, send)

    return with_cors(api, carrier.cluster.gateway.cors)


def _head(scope: Scope) -> dict[str, object]:
    """The head of a request for the decider."""
    return {
        "method": scope["method"],
        "path": scope["path"],
        "query_string": scope["query_string"].decode("latin-1"),
        "http_version": scope["http_version"],
        "headers": [(name.decode("latin-1"), value.decode("latin-1"))
                    for name, value in scope["headers"]],
        "client": scope["client"],
        "server": scope["server"],
    }  # fmt: skip

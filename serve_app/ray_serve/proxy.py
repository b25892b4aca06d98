"""What stands in Ray Serve's HTTP proxy, before it asks any replica.

Serve calls `middlewares` in the proxy's process, where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
names it: `pipelines/deploy.py` sets that for a Ray that it starts.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.http.intake import MAX_HEADER_BYTES, are_too_large

CALLBACK = "serve_app.ray_serve.proxy:middlewares"
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_FOR_SERVE = (b"x-request-disconnect-disabled", b"x-request-timeout-seconds")
"""Headers that Serve obeys whoever sends them: with the first a request whose client has left keeps
its place."""


def middlewares() -> list[Middleware]:
    """Return what Serve puts before its proxy."""
    return [Middleware(HeaderGuard)]


class HeaderGuard:
    """ASGI middleware: refuses headers that are too large, and takes out those meant for Serve."""

    def __init__(self, app: ASGIApp) -> None:
        """Stand before Serve's proxy."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        headers = scope.get("headers", [])
        if are_too_large(headers):
            text = f"headers are larger than {MAX_HEADER_BYTES} bytes"
            answer = PlainTextResponse(text, 431, {"connection": "close"})
            await answer(scope, receive, send)
            return
        kept = [one for one in headers if one[0].lower() not in _FOR_SERVE]
        await self._app({**scope, "headers": kept}, receive, send)

"""MLflow's server: on this machine for `make mlflow`, in a cluster behind the cluster's token.

`python -m tune_configs.mlflow_server FOLDER` shows the sweeps of a folder, and prints where.
`mlflow server --app-name=tokenyard` is for clusters, and asks for the token.
Whoever writes to the registry decides which policy is champion. MLflow's own `basic-auth` keeps
users in a database of its own and needs further packages; all nodes of a cluster have Ray's token
already. MLflow's clients send it where MLFLOW_TRACKING_TOKEN is set, and a browser asks for it: any
user name, the token as the password.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import sys
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"
TOKEN_FILE = Path("~/.ray/auth_token")
"""Where `ray get-auth-token --generate` writes."""
_PUBLIC = "/health"


class TokenRequired:
    """Lets requests through that carry the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        """Protect an application.

        Raises:
            ValueError: The token is empty or not ASCII.
        """
        if not token or not token.isascii():
            raise ValueError("MLflow's token must be ASCII and not empty")
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on what may pass, and refuse the rest with 401."""
        is_open = scope["type"] == "lifespan" or scope["path"] == _PUBLIC
        if is_open or self._has_token(Headers(scope=scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = Response(
                "the cluster's token is missing: set MLFLOW_TRACKING_TOKEN", 401,
                {"www-authenticate": 'Basic realm="tokenyard"'},
            )  # fmt: skip
            await refusal(scope, receive, send)

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        secret = credentials.strip().encode()
        if scheme.lower() == "basic":
            secret = _password(secret)
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(secret, self._token)


def _password(encoded: bytes) -> bytes:
    """The second half of what a browser sends; empty where it is malformed."""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def read_token() -> str:
    """Return the token of the environment, else of Ray's file.

    Raises:
        ValueError: There is none, and the server would be open to all.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    try:
        return token or TOKEN_FILE.expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"MLflow needs a token: set {TOKEN_VARIABLE}, or write {TOKEN_FILE} with "
            "`ray get-auth-token --generate`"
        ) from error


def create_app() -> ASGIApp:
    """Make MLflow's application, closed to those without the token; called by MLflow."""
    from mlflow.server.fastapi_app import app

    return TokenRequired(app, read_token())


def main() -> None:
    """Print where the last sweep of a folder is seen, and become MLflow's server."""
    # They bring Ray along, which the server of a cluster does without.
    from mlflow import MlflowClient

    from tune_configs.mlflow_log import last_sweep_pages

    store = Path(sys.argv[1], "mlflow.db").resolve()
    if not store.exists():
        sys.exit(f"error: no sweeps in {store.parent}: run `make sweep` first")
    uri = f"sqlite:///{store}"
    pages = last_sweep_pages(MlflowClient(uri))
    for what, page in zip(("the last sweep", "its trials"), pages, strict=False):
        sys.stderr.write(f"{what}: {page}\n")
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()

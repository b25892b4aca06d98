"""MLflow answers those alone who have the cluster's token."""

import asyncio
import base64
import tomllib

import httpx
import pytest
from scripts import ROOT
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import tokenyard.__main__ as start
from tune_configs import mlflow_server
from tune_configs.mlflow_server import TokenRequired, read_token

TOKEN = "0123456789abcdef"


def ask(path="/api/2.0/mlflow/registered-models/alias", **headers):
    async def inside():
        app = TokenRequired(PlainTextResponse("well"), TOKEN)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://mlflow") as http:
            return await http.post(path, headers=headers)

    return asyncio.run(inside())


def basic(text):
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "given", [f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic(f"me:{TOKEN}"), basic(f":{TOKEN}")]
)
def test_the_token_is_taken_from_clients_and_browsers(given):
    assert ask(authorization=given).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        None, "", TOKEN, "Bearer", "Bearer wrong", f"Digest {TOKEN}", f"Basic {TOKEN}", "Basic %",
        basic(TOKEN), basic("me:"), basic(f"{TOKEN}:"),
    ],
)  # fmt: skip
def test_without_it_nothing_is_answered_but_health(given):
    headers = {} if given is None else {"authorization": given}
    refused = ask(**headers)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    assert ask("/health", **headers).status_code == 200


def test_a_websocket_without_the_token_is_closed():
    client = TestClient(TokenRequired(PlainTextResponse("well"), TOKEN))
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/any"):
        raise AssertionError("it was let in")


def test_a_server_without_a_token_does_not_start(tmp_path, monkeypatch):
    monkeypatch.delenv(mlflow_server.TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr(mlflow_server, "TOKEN_FILE", tmp_path / "auth_token")
    with pytest.raises(ValueError, match="MLflow needs a token"):
        read_token()
    (tmp_path / "auth_token").write_text("\n")
    with pytest.raises(ValueError, match="not empty"):
        TokenRequired(PlainTextResponse("well"), read_token())
    (tmp_path / "auth_token").write_text(f"{TOKEN}\n")
    assert read_token() == TOKEN


def test_mlflow_finds_the_application_by_the_projects_name(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = project["entry-points"]["mlflow.app"]
    assert named == {"tokenyard": f"{start.__name__}:{start.create_mlflow_app.__name__}"}
    monkeypatch.setattr(mlflow_server, "create_app", lambda: "the application")
    assert start.create_mlflow_app() == "the application"

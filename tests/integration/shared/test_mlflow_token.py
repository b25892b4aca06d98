"""MLflow's own server and client, with the cluster's token and without it."""

import os
import signal
import subprocess
import sys
import time

import httpx
import mlflow
import pytest
from mlflow import MlflowClient
from scripts import ROOT

from serve_app.http.free_port import free_port
from tune_configs import mlflow_server

pytestmark = pytest.mark.integration

TOKEN = "a-token-of-the-cluster"


@pytest.fixture
def url(tmp_path):
    """A server as cluster.yaml starts it; the entry point is there whenever that was installed."""
    plugin = tmp_path / "packages/tokenyard_entry-0.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenyard-entry\nVersion: 0.0\n")
    (plugin / "entry_points.txt").write_text(
        "[mlflow.app]\ntokenyard = tokenyard.__main__:create_mlflow_app\n"
    )
    port = free_port()
    environment = os.environ | {
        mlflow_server.TOKEN_VARIABLE: TOKEN,
        "PYTHONPATH": os.pathsep.join([str(plugin.parent), str(ROOT)]),
    }
    command = [
        sys.executable, "-m", "mlflow", "server", "--app-name=tokenyard", "--workers=1",
        f"--port={port}", f"--backend-store-uri=sqlite:///{tmp_path}/mlflow.db",
        f"--artifacts-destination={tmp_path}/artifacts",
    ]  # fmt: skip
    server = subprocess.Popen(
        command, env=environment, cwd=tmp_path, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{found}/health", server)
        yield found
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def wait_for(url, server, timeout_s=120.0):
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        assert server.poll() is None, "the server ended"
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise AssertionError("the server does not answer")


def test_an_alias_is_set_with_the_token_alone(url, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv(mlflow_server.TOKEN_VARIABLE, TOKEN)
    client = MlflowClient(url)
    client.create_registered_model("champions")
    file = tmp_path / "policy.npz"
    file.write_bytes(b"policy")
    run = client.create_run(client.create_experiment("sweep"))
    client.log_artifact(run.info.run_id, str(file))
    source = f"{run.info.artifact_uri}/policy.npz"
    version = client.create_model_version("champions", source, run.info.run_id)
    client.set_registered_model_alias("champions", "champion", version.version)
    monkeypatch.delenv(mlflow_server.TOKEN_VARIABLE)
    with pytest.raises(mlflow.MlflowException, match="401"):
        client.set_registered_model_alias("champions", "champion", "1")
    for path in ("/", "/version", "/api/2.0/mlflow/registered-models/search", "/graphql"):
        assert httpx.get(f"{url}{path}").status_code == 401, path
    assert httpx.get(f"{url}/version", auth=("anybody", TOKEN)).status_code == 200

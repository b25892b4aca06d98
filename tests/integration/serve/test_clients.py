"""Clients of others, as they are, before a gateway: `make clients` installs them."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from integration.serve.test_gateway import PROFILE, a_pool, health, wait_until
from ray import serve
from unit.openai_endpoint import an_openai_endpoint
from unit.tiny_tokenizer import save_tiny_tokenizer

from serve_app.app import GatewayOptions, build_gateway
from serve_app.http.free_port import free_port

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parents[1]
CLIENTS = Path(os.environ.get("TOKENYARD_CLIENTS", ROOT / ".clients"))
LIMIT_S = 240
NUM = 16
pytestmark = pytest.mark.integration


def program(client, name):
    """A program of a client's own environment."""
    if not (CLIENTS / client / ".installed").exists():
        pytest.skip(f"no {client} in {CLIENTS}: `make clients`")
    return str(CLIENTS / client / "bin" / name)


def call(*command, **env):
    """Run a client to its end; return what it printed."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", **env}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A model's folder in a cache of Hugging Face's, as `local/tiny`: (cache, folder)."""
    cache = tmp_path_factory.mktemp("hub")
    model = cache / "hub" / "models--local--tiny"
    folder = model / "snapshots" / "abc"
    folder.mkdir(parents=True)
    save_tiny_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    return cache, folder


@pytest.fixture(params=["ours", "theirs"])
def model(request):
    """A model: of ours, or of endpoints."""
    return request.param


@pytest.fixture(scope="module")
def url(tmp_path_factory, tokenizer, ray_cluster):
    """A gateway before two replicas of ours, and before two endpoints with another model."""
    folder = tmp_path_factory.mktemp("clients")
    with pytest.MonkeyPatch.context() as patch, an_openai_endpoint() as (_, one), \
            an_openai_endpoint() as (_, two):  # fmt: skip
        patch.syspath_prepend(str(HERE))
        ours = a_pool("own", str(tokenizer[1]), replicas=2, config={"max_model_tokens": 8192})
        theirs = {
            "name": "external", "kind": "external", "served_model": "theirs", "profile": PROFILE,
            "model": "their-name", "endpoints": [{"url": one}, {"url": two}],
        }  # fmt: skip
        file, port = folder / "cluster.yaml", free_port()
        fields = {"name": "c", "description": "d", "served_model": "ours", "pools": [ours, theirs]}
        file.write_text(yaml.safe_dump(fields))
        try:
            serve.start(proxy_location="Disabled")
            options = GatewayOptions(cluster=str(file), port=port)
            serve.run(build_gateway(options), name="clients", route_prefix=None)
            found = f"http://127.0.0.1:{port}"
            wait_until(lambda: health(found)["replicas"] == 4)
            yield found
        finally:
            serve.shutdown()


def test_the_openai_client(url, model):
    python = program("openai", "python")
    call(python, HERE / "clients" / "openai_client.py", url, model)


def test_locust(url, model, tmp_path):
    locust = program("locust", "locust")
    call(
        locust, "--headless", "-f", HERE / "clients" / "locustfile.py", "-u", 6, "-r", 6, "-t",
        "4s", "--host", url, "--only-summary", "--json-file", tmp_path / "out", MODEL=model,
    )  # fmt: skip
    rows = json.loads((tmp_path / "out.json").read_text())
    assert sum(one["num_failures"] for one in rows) == 0
    assert sum(one["num_requests"] for one in rows) >= NUM


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "whole"])
def test_aiperf(url, model, tokenizer, tmp_path, streams):
    aiperf = program("aiperf", "aiperf")
    call(
        aiperf, "profile", "--model", model, "--url", url, "--endpoint-type", "chat",
        *["--streaming"] * streams, "--tokenizer", "local/tiny", "--use-server-token-count",
        "--request-count", NUM, "--concurrency", 4, "--synthetic-input-tokens-mean", 100,
        "--output-tokens-mean", 10, "--artifact-dir", tmp_path, "--ui", "none",
        "--random-seed", 1, HF_HOME=str(tokenizer[0]),
    )  # fmt: skip
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == NUM
    assert not found.get("error_request_count", {}).get("avg")
    assert not found["error_summary"]


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "whole"])
def test_guidellm(url, model, tokenizer, tmp_path, streams):
    guidellm, file = program("guidellm", "guidellm"), tmp_path / "out.json"
    call(
        guidellm, "run", "--backend",
        f"kind=openai_http,target={url},model={model},request_format=/v1/chat/completions,"
        f"stream={str(streams).lower()}",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer[1]}",
        "--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=10",
        "--output", f"kind=json,path={file}", "--disable-progress",
    )  # fmt: skip
    (run,) = json.loads(file.read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (NUM, 0, 0)

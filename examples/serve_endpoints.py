"""Put the gateway in front of endpoints that run already, and send a request through it.

    python examples/serve_endpoints.py MODEL URL [URL ...]
    python examples/serve_endpoints.py my-model http://10.0.0.5:8000 http://10.0.0.6:8000

MODEL is the name by which the endpoints know their model; they speak OpenAI's API. Without any at
hand start `tokenyard serve --cluster emulated --port 8001` in another terminal, an emulated fleet,
and give `emulated http://127.0.0.1:8001`.

Expect the answer of the model, and the endpoints as the gateway sees them. The gateway needs no Ray
and starts in about two seconds; the endpoints stay as they are.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import yaml

POLICY = "marginal_delay+wspt@100:1"
PROFILE = {
    "iteration_s": 0.02,
    "prefill_token_s": 6.0e-5,
    "sequence_s": 5.0e-5,
    "kv_token_s": 8.0e-8,
}
"""How long an iteration of the engine takes: for your own see docs/serving/endpoints.md."""


def cluster(model: str, urls: list[str]) -> dict[str, object]:
    """Write down the endpoints as a cluster of one pool."""
    pool = {
        "name": "mine",
        "kind": "external",
        "model": model,
        "endpoints": urls,
        "profile": PROFILE,
    }
    return {
        "name": "mine",
        "description": "Endpoints that run already.",
        "served_model": model,
        "pools": [pool],
    }


def ask(url: str, model: str) -> None:
    """Send one request, and print the answer and the endpoints."""
    message = {"role": "user", "content": "What is a load balancer?"}
    body = {"model": model, "messages": [message], "max_tokens": 20}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    print(f"answer: {answer.status_code} {answer.text[:300]}")
    for endpoint in httpx.get(f"{url}/v1/pools").json()["replicas"]:
        print(f"endpoint: {endpoint['replica_id']}")


def main() -> None:
    """Start the gateway, ask it once, and end it."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    model, urls = sys.argv[1], sys.argv[2:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.yaml"
        file.write_text(yaml.safe_dump(cluster(model, urls)))
        command = [sys.executable, "-m", "pipelines.cli", "serve", "--cluster", str(file)]
        options = ["--policy", POLICY, "--port", str(port)]
        with subprocess.Popen(command + options, stdout=subprocess.PIPE) as gateway:
            try:
                assert gateway.stdout is not None
                print(gateway.stdout.readline().decode().partition(";")[0])  # Once it answers.
                ask(f"http://127.0.0.1:{port}", model)
            finally:
                gateway.terminate()


if __name__ == "__main__":
    main()

"""A gateway of the tree on PYTHONPATH, before one endpoint, until SIGTERM: PORT ENDPOINT_URL."""

import asyncio
import os
import signal
import sys

import numpy as np

from serve_app.cluster import Cluster
from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.listener import Listener
from serve_app.policy.manager import PolicyManager

PROFILE = {
    "iteration_s": 0.01, "prefill_token_s": 1e-5, "sequence_s": 0.0005, "max_batch": 8,
    "token_budget": 256, "kv_capacity_tokens": 20_000,
}  # fmt: skip


def make_gateway(url):
    """A gateway before one endpoint, and the backend of its pool."""
    pool = {
        "name": "theirs", "kind": "external", "model": "m", "profile": PROFILE,
        "endpoints": [{"url": url}],
    }  # fmt: skip
    known = {"name": "t", "description": "t", "served_model": "m", "pools": [pool]}
    cluster = Cluster.model_validate(known)
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch("round_robin")
    metrics = Metrics()
    backend = ExternalBackend(cluster.external_pools[0], "m", metrics)
    return Gateway(cluster, manager, {backend.name: backend}, metrics), backend


async def main(port: int, url: str) -> None:
    gateway, backend = make_gateway(url)
    api = create_gateway_api(gateway, EstimatingTokenizer(), Access(None))
    listener, ends = Listener(api, gateway.cluster.limits), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends.set)
    backend.start()
    await listener.start("127.0.0.1", port)
    os.write(sys.stdout.fileno(), b"listens\n")
    await ends.wait()
    # As `serve_app.app` ends a gateway.
    if hasattr(listener, "hand_over"):
        await listener.hand_over()
    listener.refuse()
    await gateway.drain()
    await listener.stop()
    gateway.manager.stop()
    await backend.stop()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))

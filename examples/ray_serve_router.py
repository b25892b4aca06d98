"""Let a policy choose among the replicas of your own Ray Serve deployment.

    python examples/ray_serve_router.py

Two replicas answer eight requests that are sent at once. Expect how many each of them got: about
half, since the router counts what it has sent. It takes half a minute, most of it Ray's start.
`ray.serve.llm` takes the same router: docs/serving/embedding.md.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

REQUESTS = 8
ROUTER = RequestRouterConfig(
    request_router_class="serve_app.router:PolicyRequestRouter",
    request_router_kwargs={"policy": "marginal_delay", "scenario": "conversation_mixed_gpus"},
)


class Model:
    """What you serve; prompts are read from `prompt`, `messages` or `token_ids`."""

    async def __call__(self, request: dict[str, str]) -> int:
        """Take a while, and tell which replica this is."""
        await asyncio.sleep(0.3)
        return os.getpid()


@ray.remote(num_cpus=0)
def ask() -> list[int]:
    """Send all requests at once; the router is in the process that holds the handle."""
    handle = serve.get_app_handle("example")
    answers = [handle.remote({"prompt": "What is a load balancer?"}) for _ in range(REQUESTS)]
    return [answer.result(timeout_s=60) for answer in answers]


def main() -> None:
    """Deploy, ask, and shut down."""
    ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
    serve.start(proxy_location="Disabled")  # Callers have handles here, and need no HTTP.
    deployment = serve.deployment(
        Model, num_replicas=2, ray_actor_options={"num_cpus": 0}, request_router_config=ROUTER
    )
    serve.run(deployment.bind(), name="example", route_prefix=None)
    pids: list[int] = ray.get(ask.remote())
    print(f"requests by replica: {sorted(Counter(pids).values())}")
    serve.shutdown()


if __name__ == "__main__":
    main()

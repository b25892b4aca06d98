"""A Prometheus server that has scraped two replicas of vLLM, over HTTP as it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

STEP_S, NUM_STEPS = 300, 72
PROMPT, ANSWER, CACHED = 900.0, 200.0, 0.25
TRUE = np.array([8e-3, 9e-5, 3e-5, 1e-7])
"""Seconds per iteration, prefill token, decoding sequence and KV token of the faster replica."""
LABELS = {
    "fast": {"instance": "10.0.0.1:8000", "pod": "vllm-a", "engine": "0"},
    "slow": {"instance": "10.0.0.2:8000", "pod": "vllm-b", "engine": "0"},
}


def counted(slowness: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What an engine counts in each step while it decodes batches of one size after another."""
    batch = rng.uniform(4, 40, NUM_STEPS)
    busy = rng.uniform(0.5, 1.0, NUM_STEPS)
    held = PROMPT + ANSWER / 2
    # Every sequence that decodes brings a prompt every ANSWER iterations.
    computed = (1 - CACHED) * PROMPT * batch / ANSWER
    mixed = np.column_stack([np.ones(NUM_STEPS), computed, batch, batch * held])
    alone = np.column_stack(
        [np.ones(NUM_STEPS), np.full(NUM_STEPS, (1 - CACHED) * PROMPT), batch, batch * held]
    )
    iterations = busy * STEP_S / (mixed @ TRUE * slowness)
    gaps = iterations * batch
    requests = gaps / ANSWER
    return {
        "inter_token_latency_seconds_sum": gaps * (mixed @ TRUE) * slowness,
        "inter_token_latency_seconds_count": gaps,
        "time_to_first_token_seconds_count": requests,
        "prompt_tokens_total": requests * PROMPT,
        "prefix_cache_hits_total": requests * PROMPT * CACHED,
        "request_prefill_time_seconds_sum": requests * (alone @ TRUE) * slowness,
        "request_prefill_time_seconds_count": requests,
        "num_requests_running": busy,
    }


class Prometheus:
    """Answers the queries that are asked, from these series."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.counted = {"fast": counted(1.0, rng), "slow": counted(3.0, rng)}
        self.running = {"fast": 40.0, "slow": 31.0}
        self.waiting = {"fast": 0.0, "slow": 7.0}
        self.models = {"fast": "m", "slow": "m"}
        self.blocks: dict[str, str] = {"num_gpu_blocks": "1000", "block_size": "16"}
        self.gone: set[str] = set()
        """Replicas that are there no longer."""

    def result(self, path: str, query: str) -> list[dict[str, Any]]:
        names = [name for name in LABELS if f'model_name="{self.models[name]}"' in query]
        names = names or ([] if "model_name" in query else [*LABELS])
        if query == "vllm:num_requests_running":
            names = [name for name in names if name not in self.gone]
        if path.endswith("/query"):
            if query == "vllm:cache_config_info":
                return [{"metric": LABELS[name] | self.blocks, "value": [0, "1"]} for name in names]
            values = self.waiting if "num_requests_waiting" in query else self.running
            return [
                {"metric": LABELS[name] | {"model_name": self.models[name]},
                 "value": [0, str(values[name])]}
                for name in names
            ]  # fmt: skip
        return [
            {"metric": LABELS[name],
             "values": [[STEP_S * at, str(value)] for at, value in enumerate(series)]}
            for name in names
            for metric, series in self.counted[name].items()
            if f"vllm:{metric}{{" in query or f"vllm:{metric}[" in query
            or f"vllm:{metric} " in query
        ]  # fmt: skip


@contextmanager
def serving(api: str = "/api/v1/query") -> Iterator[tuple[str, Prometheus]]:
    """Its URL, and what it knows."""
    known = Prometheus()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            is_api = url.path.startswith(api)
            self.send_response(200 if is_api else 404)
            self.end_headers()
            if is_api:
                query = parse_qs(url.query)["query"][0]
                data = {"resultType": "vector", "result": known.result(url.path, query)}
                self.wfile.write(json.dumps({"status": "success", "data": data}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", known
    server.shutdown()
    server.server_close()

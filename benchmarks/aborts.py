"""How many generations go on after their callers have left.

python benchmarks/aborts.py --url http://127.0.0.1:8000

Callers leave a running gateway's requests, streamed and whole, at any time of their answers. Then
it is waited for, and what replicas publish and the gateway has in flight is counted.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import tyro
from rich.table import Table

from tokenyard.provenance import ResultFile, report


@dataclass(frozen=True)
class Args:
    """Leave requests, and look what goes on."""

    url: str = "http://127.0.0.1:8000"
    """Of the gateway."""
    requests: int = 1_000
    """How many are left."""
    clients: int = 16
    """At a time."""
    stay_s: float = 0.5
    """Longest time until a caller leaves."""
    max_tokens: int = 500
    """Of answers."""
    wait_s: float = 5.0
    """After the last has left."""
    json: ResultFile | None = None
    """File for the row."""


async def leave(url: str, body: bytes, stay_s: float) -> None:
    """Ask, and leave after a while."""
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await asyncio.sleep(stay_s)
    writer.close()


async def leave_all(args: Args, model: str) -> None:
    """Leave all requests, so many at a time."""
    rng, places = random.Random(0), asyncio.Semaphore(args.clients)

    async def one(number: int) -> None:
        fields = {
            "model": model, "prompt": f"Request {number} is a long one.", "stream": number % 2 == 0,
            "max_tokens": args.max_tokens, "ignore_eos": True,
        }  # fmt: skip
        async with places:
            await leave(args.url, json.dumps(fields).encode(), rng.uniform(0, args.stay_s))

    await asyncio.gather(*(one(number) for number in range(args.requests)))


def main(args: Args) -> None:
    """Leave, wait, count, and write the row."""
    with httpx.Client(base_url=args.url, timeout=30) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        asyncio.run(leave_all(args, model))
        asyncio.run(asyncio.sleep(args.wait_s))
        replicas = client.get("/v1/pools").json()["replicas"]
    row = {
        "aborted": args.requests,
        "wait_s": args.wait_s,
        "generations_left": sum(
            one["published"]["num_running"] + one["published"]["num_waiting"] for one in replicas
        ),
        "in_flight": sum(one["in_flight"] for one in replicas),
    }
    table = Table(*row)
    table.add_row(*map(str, row.values()))
    report(table, [row], args.json, None)


if __name__ == "__main__":
    main(tyro.cli(Args))

"""How long a pool is away when one of its processes is killed, and what becomes of the requests.

Start `python pipelines/deploy.py` on this machine, then
`python benchmarks/recovery.py --victims rank replica`: clients ask without a pause, a process gets
SIGKILL, and the gateway is watched until all replicas take requests again.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
import tyro
from rich.table import Table

from tokenyard.provenance import report

Victim = Literal["rank", "replica"]
_TITLES: dict[Victim, str] = {"rank": "ray::Rank", "replica": "ray::ServeReplica:"}
_NOT_A_POOL = ":gateway"
_SETTLED_S = 3.0
_FRESH_S = 2.0


@dataclass(frozen=True)
class Args:
    """Kill processes of a running gateway's pools, and time the recovery."""

    url: str = "http://127.0.0.1:8000"
    """Where the gateway listens, on this machine."""
    victims: tuple[Victim, ...] = ("rank", "replica")
    """What is killed, one after another."""
    clients: int = 4
    """Clients that ask without a pause."""
    max_tokens: int = 32
    """Asked for by each request."""
    timeout_s: float = 120.0
    """Time after which a pool counts as lost."""
    json: Path | None = None
    """File for the rows."""


@dataclass(frozen=True)
class Row:
    """One death."""

    victim: str
    pool: str
    noticed_s: float
    """Until the gateway knew of one replica less that takes requests."""
    back_s: float
    """Until all of them took requests again."""
    requests: int
    answered: int
    with_reason: int
    """Not answered, and told why."""
    lost: int
    """Neither."""


class Load:
    """Clients that ask one request after another, and what they heard."""

    def __init__(self, args: Args, model: str) -> None:
        """Send nothing yet."""
        self._args, self._model = args, model
        self.heard: Counter[str] = Counter()
        self.reasons: list[str] = []
        self._going = True

    async def run(self) -> None:
        """Ask until `stop`."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._args.url, timeout=self._args.timeout_s, limits=limits
        ) as http:
            await asyncio.gather(*(self._client(http) for _ in range(self._args.clients)))

    def stop(self) -> None:
        """Let every client finish its request."""
        self._going = False

    async def _client(self, http: httpx.AsyncClient) -> None:
        body = {
            "model": self._model, "prompt": "The capital of France is", "temperature": 0,
            "max_tokens": self._args.max_tokens, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        while self._going:
            self.heard[await self._outcome(http, body)] += 1

    async def _outcome(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    return self._reason(response.json())
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return "answered"
                    if line.startswith("data: ") and "error" in (event := json.loads(line[6:])):
                        return self._reason(event)
        except (httpx.HTTPError, ValueError) as error:
            self.reasons.append(repr(error))
        return "lost"

    def _reason(self, body: dict[str, Any]) -> str:
        self.reasons.append(str(body.get("error", body)))
        return "with_reason"


def pids_of(victim: Victim) -> list[int]:
    """Processes that may be killed; Ray writes into their titles what they are."""
    titles = {one.pid: " ".join(one.info["cmdline"] or ()) for one in _processes()}
    return sorted(
        pid
        for pid, title in titles.items()
        if title.startswith(_TITLES[victim]) and _NOT_A_POOL not in title
    )


def _processes() -> list[psutil.Process]:
    return list(psutil.process_iter(["cmdline"]))


async def taking(http: httpx.AsyncClient) -> Counter[str]:
    """Replicas by pool that take requests, and were heard of lately."""
    replicas = (await http.get("/v1/pools")).json()["replicas"]
    return Counter(
        one["pool"] for one in replicas if one["published"]["accepting"] and one["age_s"] < _FRESH_S
    )


async def measure(args: Args, victim: Victim) -> Row:
    """Kill one process under load.

    Raises:
        ValueError: There is none, or its pool does not come back in time.
    """
    async with httpx.AsyncClient(base_url=args.url, timeout=args.timeout_s) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        whole = await taking(http)
        candidates = pids_of(victim)
        if not candidates or not whole:
            raise ValueError(f"no {victim} of a gateway at {args.url} runs on this machine")
        load = Load(args, model)
        clients = asyncio.create_task(load.run())
        await asyncio.sleep(_SETTLED_S)
        psutil.Process(candidates[0]).send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        noticed_s, missing = await _until(http, killed_s, args, lambda now: whole - now)
        pool = next(iter(missing))
        back_s, _ = await _until(http, killed_s, args, lambda now: not whole - now)
        load.stop()
        await clients
    for reason in load.reasons:
        print(f"{victim}: {reason}", file=sys.stderr)
    heard = load.heard
    return Row(
        victim, pool, noticed_s, back_s, heard.total(),
        heard["answered"], heard["with_reason"], heard["lost"],
    )  # fmt: skip


async def _until(
    http: httpx.AsyncClient, since_s: float, args: Args, condition: Any
) -> tuple[float, Any]:
    while (passed_s := time.monotonic() - since_s) < args.timeout_s:
        if found := condition(await taking(http)):
            return time.monotonic() - since_s, found
        await asyncio.sleep(0.05)
    raise ValueError(f"nothing changed for {passed_s:.0f} s")


def main(args: Args) -> None:
    rows = []
    for victim in args.victims:
        try:
            rows.append(asyncio.run(measure(args, victim)))
        except (ValueError, httpx.HTTPError) as error:
            sys.exit(f"recovery: {error or type(error).__name__}")
    table = Table(*asdict(rows[0]))
    for row in rows:
        cells = asdict(row).values()
        table.add_row(*(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells))
    report(table, [asdict(row) for row in rows], args.json, 0)


if __name__ == "__main__":
    main(tyro.cli(Args))

"""How long what is killed is away, and what becomes of the requests.

Start `python pipelines/deploy.py` on this machine, then
`python benchmarks/recovery.py --victims rank replica gateway`: clients ask without a pause, a
process gets SIGKILL, and the gateway is watched until all replicas take requests again. Meanwhile
somebody who has no connection yet asks ten times a second. `raylet` needs something that starts
`deploy.py` again when it ends.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx
import psutil
import tyro
from rich.table import Table

from serve_app.app import APP_NAME, GATEWAY
from tokenyard.provenance import ResultFile, report

Victim = Literal["rank", "replica", "gateway", "raylet"]
_TITLES: dict[Victim, str] = {
    "rank": "ray::Rank",
    "replica": "ray::ServeReplica:",
    "gateway": f"ray::ServeReplica:{APP_NAME}:{GATEWAY}",
    "raylet": "",
}
_PROBE_EVERY_S = 0.1
_PROBE_S = 10.0
_SETTLED_S = 3.0
_FRESH_S = 2.0


@dataclass(frozen=True)
class Args:
    """Kill processes of a running gateway and of its pools, and time the recovery."""

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
    json: ResultFile | None = None
    """File for the rows."""


@dataclass(frozen=True)
class Row:
    """One death."""

    victim: str
    pool: str
    noticed_s: float
    """Until the gateway knew of one replica less that takes requests, or was replaced itself."""
    back_s: float
    """Until all of them took requests again."""
    requests: int
    answered: int
    with_reason: int
    """Not answered, and told why."""
    lost: int
    """Neither."""
    refused_s: float
    """Longest time in which no new request was taken."""
    hung_s: float
    """Longest time that a request took which was not answered."""


class Load:
    """Clients that ask one request after another, and what they heard."""

    def __init__(self, args: Args, model: str) -> None:
        self._args, self._model = args, model
        self.hung_s = 0.0
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
            asked_s = time.monotonic()
            outcome = await self._outcome(http, body)
            self.heard[outcome] += 1
            if outcome != "answered":
                self.hung_s = max(self.hung_s, time.monotonic() - asked_s)
                # Whoever asks anew at once takes the time that a process needs to start.
                await asyncio.sleep(_PROBE_EVERY_S)

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


class Probe:
    """Somebody who comes ten times a second, each time with a connection of its own."""

    def __init__(self, args: Args, model: str) -> None:
        self._args = args
        self._body = {"model": model, "prompt": "The capital", "max_tokens": 1}
        self._refused_since_s: float | None = None
        self.refused_s = 0.0
        """Longest time between the first of some that were refused and the next that was not."""
        self._going = True

    async def run(self) -> None:
        """Ask until `stop`."""
        while self._going:
            asked_s = time.monotonic()
            if await self._is_taken():
                if self._refused_since_s is not None:
                    self.refused_s = max(self.refused_s, asked_s - self._refused_since_s)
                self._refused_since_s = None
            elif self._refused_since_s is None:
                self._refused_since_s = asked_s
            await asyncio.sleep(_PROBE_EVERY_S)

    def stop(self) -> None:
        """Ask nothing more."""
        self._going = False

    async def _is_taken(self) -> bool:
        try:
            async with httpx.AsyncClient(base_url=self._args.url, timeout=_PROBE_S) as http:
                return (await http.post("/v1/completions", json=self._body)).is_success
        except httpx.HTTPError:
            return False


def raylet_of(url: str) -> psutil.Process | None:
    """Return the process of Ray that whoever listens at a URL belongs to; None: nobody does."""
    port = httpx.URL(url).port
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid is not None:
            parent = psutil.Process(one.pid).parent()
            # One whose raylet is gone is on its own, until it ends.
            return parent if parent is not None and parent.name() == "raylet" else None
    return None


def pids_of(victim: Victim, raylet: psutil.Process) -> list[int]:
    """Processes of one Ray that may be killed; Ray writes into their titles what they are."""
    if victim == "raylet":
        return [raylet.pid]
    titles = {one.pid: _title(one) for one in raylet.children()}
    return sorted(
        pid
        for pid, title in titles.items()
        if title.startswith(_TITLES[victim])
        and (victim != "replica" or not title.startswith(_TITLES["gateway"]))
    )


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def taking(http: httpx.AsyncClient) -> Counter[str]:
    """Replicas by pool that take requests, and were heard of lately."""
    try:
        answer = (await http.get("/v1/pools")).raise_for_status()
    except httpx.HTTPError:
        return Counter()
    replicas = answer.json()["replicas"]
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
        raylet = raylet_of(args.url)
        candidates = [] if raylet is None else pids_of(victim, raylet)
        if raylet is None or not candidates:
            raise ValueError(f"no {victim} of a gateway at {args.url} runs on this machine")

        def all_up(now: Counter[str]) -> Counter[str] | None:
            # A replica that is still starting would be killed unseen.
            return now if 0 < len(pids_of("replica", raylet)) <= now.total() else None

        _, whole = await _until(http, time.monotonic(), args, all_up)
        candidates = pids_of(victim, raylet)
        load, probe = Load(args, model), Probe(args, model)
        clients = asyncio.gather(load.run(), probe.run())
        await asyncio.sleep(_SETTLED_S)
        psutil.Process(candidates[0]).send_signal(signal.SIGKILL)
        killed_s = time.monotonic()

        def missing(now: Counter[str]) -> Counter[str] | set[int]:
            """What is gone: replicas, or what has taken the place of the gateway's process."""
            if victim in ("rank", "replica"):
                return whole - now
            found = raylet_of(args.url) if victim == "raylet" else raylet
            return set() if found is None else set(pids_of(victim, found)) - set(candidates)

        noticed_s, found = await _until(http, killed_s, args, missing)
        pool = next(iter(found)) if isinstance(found, Counter) else ""
        back_s, _ = await _until(http, killed_s, args, lambda now: not whole - now)
        await asyncio.sleep(_SETTLED_S)
        load.stop()
        probe.stop()
        await clients
    for reason in load.reasons:
        print(f"{victim}: {reason}", file=sys.stderr)
    heard = load.heard
    return Row(
        victim, pool, noticed_s, back_s, heard.total(),
        heard["answered"], heard["with_reason"], heard["lost"], probe.refused_s, load.hung_s,
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

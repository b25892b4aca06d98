"""Does a gateway that runs for long stay as it was, while something goes wrong every minute?

`python benchmarks/soak.py --cluster emulated --minutes 60` serves that cluster and asks it at an
even rate. In turn a replica is killed, one stands still for a while, callers leave in the middle of
their answers, and strangers send what is no HTTP. Policies take turns, shadows and canaries come
and go, and the page is watched. Without `--cluster` it asks a gateway that runs on this machine,
started with TOKENYARD_LOCAL_ADMIN=1.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import tyro
from rich.table import Table
from scipy import stats

from serve_app.http.free_port import free_port
from tokenyard.provenance import ResultFile, report

Row = dict[str, str | int | float]
_TITLE = "ray::ServeReplica:"
_MAX_TOKENS = 8
_HANG_S = 10.0
"""How long a replica stands still."""
_NUM_CALLERS = 30
"""That leave, or are strangers."""
_LEAVE_S = 0.3
_GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n",
    b"\xff" * 4096,
)
"""A TLS handshake, half a head, and noise."""
_DEPLOY = Path(__file__).resolve().parent.parent / "pipelines" / "deploy.py"


@dataclass(frozen=True)
class Args:
    """Load a running gateway for long, with churn, and see whether anything grows."""

    url: str = "http://127.0.0.1:8000"
    """Where the gateway listens, on this machine."""
    cluster: str | None = None
    """Serve this cluster meanwhile, on a free port; None: something is served already."""
    pid: int | None = None
    """Of the gateway's process, where several run on this machine."""
    minutes: float = 20.0
    warm_up_minutes: float = 3.0
    """Not judged: caches fill."""
    rate_per_s: float = 4.0
    """Requests."""
    fault_every_s: float = 60.0
    """Time between two faults; 0: there is none."""
    change_every_s: float = 20.0
    """Time between two changes of policy or trial."""
    bin_s: float = 30.0
    """Length of the bins of responses whose p99 is taken."""
    json: ResultFile | None = None
    """File for the row."""


@dataclass
class Seen:
    """What was measured, with its time since the start, seconds."""

    responses: list[tuple[float, float]]
    size: list[tuple[float, float, float, float]]
    """The gateway's resident memory, bytes, its descriptors and its threads."""
    heard: Counter[str]
    reasons: Counter[str]
    faults: Counter[str]
    changes: int = 0


class Soak:
    """Load, churn and measurement, side by side."""

    def __init__(self, args: Args) -> None:
        """Find the gateway's process.

        Raises:
            ValueError: There is not exactly one on this machine.
        """
        self._args = args
        self._gateway = _the_gateway(args)
        self.seen = Seen([], [], Counter(), Counter(), Counter())
        self._started_s = time.monotonic()

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    async def run(self) -> Seen:
        """Go on for as long as asked."""
        async with httpx.AsyncClient(base_url=self._args.url, timeout=120) as http:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            beside = [
                self._measure(),
                self._change(http),
                self._watch(http),
                self._break(http, model),
            ]
            tasks = [asyncio.create_task(one) for one in beside]
            await self._load(http, model)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
        return self.seen

    async def _load(self, http: httpx.AsyncClient, model: str) -> None:
        body, asked = _body(model, _MAX_TOKENS), []
        period_s = 1.0 / self._args.rate_per_s
        for number in range(int(self._args.minutes * 60 * self._args.rate_per_s)):
            await asyncio.sleep(max(number * period_s - self._now_s, 0.0))
            asked.append(asyncio.create_task(self._ask(http, body)))
        await asyncio.gather(*asked)

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, object]) -> None:
        sent_s = self._now_s
        try:
            answer = await http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.seen.heard["lost"] += 1
            self.seen.reasons[repr(error)] += 1
            return
        if answer.status_code == 200:
            self.seen.heard["answered"] += 1
            self.seen.responses.append((sent_s, self._now_s - sent_s))
        else:
            self.seen.heard["told why"] += 1
            self.seen.reasons[answer.text[:200]] += 1

    async def _measure(self) -> None:
        while True:
            with self._gateway.oneshot():
                rss = float(self._gateway.memory_info().rss)
                counts = float(self._gateway.num_fds()), float(self._gateway.num_threads())
            self.seen.size.append((self._now_s, rss, *counts))
            await asyncio.sleep(1.0)

    async def _change(self, http: httpx.AsyncClient) -> None:
        changes: list[tuple[str, dict[str, object]]] = [
            ("/v1/policies", {"action": "shadow", "policy": "sed"}),
            ("/v1/policies", {"action": "promote"}),
            # Neither of the two orders what waits, else there would be no canary.
            ("/v1/policies", {"action": "canary", "policy": "least_loaded", "share": 0.2}),
            ("/v1/policies", {"action": "rollback"}),
            ("/v1/policy", {"policy": "least_loaded"}),
            ("/v1/policies", {"action": "rollback"}),
        ]
        for path, body in itertools.cycle(changes):
            await asyncio.sleep(self._args.change_every_s)
            await http.post(path, json=body)
            self.seen.changes += 1

    async def _watch(self, http: httpx.AsyncClient) -> None:
        while True:
            for path in ("/v1/console", "/v1/pools", "/v1/policies"):
                (await http.get(path)).raise_for_status()
            await asyncio.sleep(1.0)

    async def _break(self, http: httpx.AsyncClient, model: str) -> None:
        faults = {
            "kill": self._kill, "hang": self._hang, "leave": lambda: self._leave(http, model),
            "garbage": self._garbage,
        }  # fmt: skip
        for name, fault in itertools.cycle(faults.items()):
            if not self._args.fault_every_s:
                return
            await asyncio.sleep(self._args.fault_every_s)
            await fault()
            self.seen.faults[name] += 1

    async def _kill(self) -> None:
        for victim in await self._victim():
            victim.send_signal(signal.SIGKILL)

    async def _hang(self) -> None:
        for victim in await self._victim():
            victim.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(_HANG_S)
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):  # Serve gives up who stands still.
                    victim.send_signal(signal.SIGCONT)

    async def _victim(self) -> list[psutil.Process]:
        """One replica, another each time; none where none is there."""
        replicas = await asyncio.to_thread(_replicas, self._gateway)
        number = self.seen.faults.total() % max(len(replicas), 1)
        return replicas[number : number + 1]

    async def _leave(self, http: httpx.AsyncClient, model: str) -> None:
        """Ask for streams, and leave before their end."""
        body = _body(model, 20 * _MAX_TOKENS) | {"stream": True}

        async def leave() -> None:
            with contextlib.suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(_LEAVE_S):
                    await http.post("/v1/completions", json=body)

        await asyncio.gather(*(leave() for _ in range(_NUM_CALLERS)))

    async def _garbage(self) -> None:
        """Connect, and send what is no request."""
        to = urlsplit(self._args.url)

        async def connect(content: bytes) -> None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(to.hostname, to.port)
                writer.write(content)
                await asyncio.sleep(_LEAVE_S)
                writer.close()

        await asyncio.gather(*(connect(one) for one in _GARBAGE * (_NUM_CALLERS // 3)))


def _body(model: str, max_tokens: int) -> dict[str, object]:
    return {
        "model": model, "prompt": "The capital of France is", "temperature": 0,
        "max_tokens": max_tokens, "ignore_eos": True,
    }  # fmt: skip


@contextlib.contextmanager
def served(args: Args) -> Iterator[Args]:
    """Serve the cluster, if one is named; yield the arguments with its URL.

    Raises:
        ValueError: It did not start.
    """
    if args.cluster is None:
        yield args
        return
    port = free_port()
    command = [sys.executable, str(_DEPLOY), "--cluster", args.cluster, "--port", str(port)]
    own = os.environ | {"TOKENYARD_LOCAL_ADMIN": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as process:
        try:
            assert process.stdout is not None
            if not any(line.startswith("serving") for line in process.stdout):
                raise ValueError(f"{' '.join(command)} did not start")
            yield replace(args, url=f"http://127.0.0.1:{port}")
        finally:
            process.send_signal(signal.SIGINT)


def _titles() -> dict[psutil.Process, str]:
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if title.startswith(_TITLE):
            found[process] = title
    return found


def _the_gateway(args: Args) -> psutil.Process:
    if args.pid is not None:
        return psutil.Process(args.pid)
    found = [process for process, title in _titles().items() if ":gateway" in title]
    if len(found) != 1:
        raise ValueError(f"{len(found)} gateways run on this machine: name one by --pid")
    return found[0]


def _replicas(gateway: psutil.Process) -> list[psutil.Process]:
    """The pools' replicas: of the same Ray as the gateway, whose raylet is their parent too."""
    parent = gateway.ppid()
    same = [one for one, title in _titles().items() if ":gateway" not in title]
    return sorted((one for one in same if one.ppid() == parent), key=lambda one: one.pid)


def judge(args: Args, seen: Seen) -> Row:
    """Growth of the process, and drift of the p99, after the warm-up."""
    warm_s = args.warm_up_minutes * 60
    size = np.array([row[1:] for row in seen.size if row[0] >= warm_s])
    fifth = max(len(size) // 5, 1)
    (first, *were), (last, *are) = size[:fifth].mean(axis=0), size[-fifth:].mean(axis=0)
    responses = np.array([row for row in seen.responses if row[0] >= warm_s])
    bins = (responses[:, 0] // args.bin_s).astype(int)
    p99_s = np.array([np.percentile(responses[bins == one, 1], 99) for one in np.unique(bins)])
    slope, _, low, high = stats.theilslopes(p99_s)
    half = len(p99_s) // 2
    return {
        "minutes": args.minutes, "changes": seen.changes,
        **{f"faults_{name}": seen.faults[name] for name in ("kill", "hang", "leave", "garbage")},
        "requests": seen.heard.total(), "answered": seen.heard["answered"],
        "told_why": seen.heard["told why"], "lost": seen.heard["lost"],
        "memory_first_mb": float(first / 1e6), "memory_last_mb": float(last / 1e6),
        "memory_growth_fraction": float(last / first - 1.0),
        "descriptors_first": float(were[0]), "descriptors_last": float(are[0]),
        "threads_first": float(were[1]), "threads_last": float(are[1]),
        "p99_first_half_s": float(np.median(p99_s[:half])),
        "p99_second_half_s": float(np.median(p99_s[half:])),
        "p99_slope_s_per_minute": float(slope * 60 / args.bin_s),
        "p99_slope_ci_low": float(low * 60 / args.bin_s),
        "p99_slope_ci_high": float(high * 60 / args.bin_s),
    }  # fmt: skip


def main(args: Args) -> None:
    if (args.minutes - args.warm_up_minutes) * 60 < 4 * args.bin_s:
        sys.exit(f"soak: give {4 * args.bin_s:g} s more than the warm-up at least")
    try:
        with served(args) as where:
            seen = asyncio.run(Soak(where).run())
    except (ValueError, httpx.HTTPError, psutil.Error) as error:
        sys.exit(f"soak: {error or type(error).__name__}")
    for reason, count in seen.reasons.most_common(10):
        print(f"{count} x {reason}", file=sys.stderr)
    row = judge(args, seen)
    table = Table("", "")
    for key, value in row.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    report(table, [row], args.json, None)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""How often our rules decide as the routers do that they are named after.

python benchmarks/rival_parity.py

Requests go through a real router to engines that finish them when told, one at a time, so what the
router knows at each decision is known exactly. Our rule is then asked what it would have done. A
rule that draws has a law: it is asked under every draw, and the router's picks are compared with it
by chi-square, among decisions that have the same law. `make rivals` installs the routers.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import tyro
from rich.table import Table
from rival_engines import ANSWER_TIMEOUT_S, Fleet, read_message
from rival_record import TOKENS_PER_S, WAITING_TOKENS, Pick, record
from rival_replay import Parity, parity_of

from tokenyard.provenance import ResultFile, report

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
RAY = "ray"
"""No process: its request routers are classes of our own environment."""


@dataclass(frozen=True)
class Args:
    """Compare decisions of our rules with those of real routers."""

    rivals: tuple[str, ...] = ("vllm-router", "smg", "sglang-router", RAY)
    """Routers to compare with."""
    picks: int = 10_000
    """Decisions of each of their policies."""
    seed: int = 0
    """Of prompts, and of what finishes when."""
    csv: Path | None = None
    """Write the table to this file."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


@dataclass(frozen=True)
class Case:
    """One policy of one router, and the rule of ours that it is compared with."""

    rival: str
    policy: str
    rule: str
    """A name of `BASELINES`."""
    knobs: Mapping[str, float] = field(default_factory=dict)
    """Of the rule, in place of the makers' defaults; the router is given the same."""
    options: tuple[str, ...] = ()
    """More of the router's command line."""
    told_load: bool = False
    """Whether engines answer a router that asks for their load, and it has to ask."""
    names_first: bool = False
    """Tell the rule what no snapshot does: of equal matches, who was sent the prefix first."""
    draws_ties: bool = True
    """Whether the router draws between equals where our rule does."""

    @property
    def setting(self) -> str:
        """What is not as the router ships, in words."""
        words = [f"{knob} {value:g}" for knob, value in self.knobs.items()]
        words += ["load is polled"] * self.told_load + ["holder is told"] * self.names_first
        return ", ".join(words)


BALANCE = {"balance_abs_threshold": 4.0}
"""At the default of 64 a fleet of four hardly ever counts as imbalanced."""
IMBALANCED = {"imbalanced_threshold": 8.0}
"""At the default of infinity no fleet is."""
POLLED = ("--load-monitor-interval", "2")
"""At the default of 10 s what was sent since counts for far more than what is polled."""
CASES = (
    Case("vllm-router", "cache_aware", "vllm_cache_aware"),
    Case("vllm-router", "cache_aware", "vllm_cache_aware", BALANCE),
    Case("vllm-router", "power_of_two", "ray_p2c"),
    Case("vllm-router", "round_robin", "round_robin"),
    Case("vllm-router", "random", "random"),
    Case("smg", "cache_aware", "smg_spill"),
    Case("smg", "cache_aware", "smg_spill", {}, POLLED, told_load=True),
    Case("smg", "cache_aware", "smg_spill", BALANCE, POLLED, told_load=True),
    Case("smg", "least_load", "smg_spill", {"cache_threshold": 1.0}, POLLED, told_load=True),
    Case("smg", "power_of_two", "ray_p2c"),
    Case("smg", "round_robin", "round_robin"),
    Case("smg", "random", "random"),
    Case("sglang-router", "cache_aware", "sglang_cache_aware"),
    Case("sglang-router", "cache_aware", "sglang_cache_aware", names_first=True),
    Case("sglang-router", "cache_aware", "sglang_cache_aware", BALANCE, names_first=True),
    Case("sglang-router", "power_of_two", "random"),
    Case("sglang-router", "round_robin", "round_robin"),
    Case("sglang-router", "random", "random"),
    Case(RAY, "PowerOfTwoChoicesRequestRouter", "ray_p2c"),
    Case(RAY, "PrefixCacheAffinityRouter", "ray_prefix_affinity", draws_ties=False),
    Case(RAY, "PrefixCacheAffinityRouter", "ray_prefix_affinity", IMBALANCED, draws_ties=False),
)


def environments() -> Path:
    """Folder of the routers' environments."""
    return Path(os.environ.get("TOKENYARD_RIVALS", ROOT / ".rivals"))


def missing(rival: str) -> str:
    """A sentence where a router is not installed; empty where it is."""
    if rival == RAY:
        return ""
    folder = environments() / rival
    return "" if (folder / ".installed").exists() else f"no {rival} in {folder}: `make rivals`"


def version_of(rival: str) -> str:
    """The version that is pinned."""
    if rival == RAY:
        return version(RAY)
    pins = (ROOT / "rivals" / f"{rival}.txt").read_text()
    found = re.search(rf"^{rival}==(\S+)$", pins, re.MULTILINE)
    assert found, f"rivals/{rival}.txt pins no {rival}"
    return found[1]


def free_ports() -> tuple[int, int]:
    """Two ports that nobody listens on."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def command(case: Case, ports: tuple[int, int], urls: list[str]) -> list[str]:
    """The router's command line. Retries would send a request twice."""
    programs = {
        "vllm-router": ["bin/vllm-router"],
        # It sets a worker aside that holds requests for 3 s, as engines here do on purpose.
        "smg": [
            *("bin/smg", "launch", "--backend", "vllm", "--worker-wedge-secs", "3600"),
            *("--shutdown-grace-period-secs", "1"),
        ],
        "sglang-router": ["bin/python", "-m", "sglang_router.launch_router"],
    }
    program, *arguments = programs[case.rival]
    knobs = [f"--{knob.replace('_', '-')}={value:g}" for knob, value in case.knobs.items()]
    return [
        str(environments() / case.rival / program), *arguments, "--host", "127.0.0.1",
        "--port", str(ports[0]), "--prometheus-host", "127.0.0.1", "--prometheus-port",
        str(ports[1]), "--log-level", "error", "--disable-retries", "--policy", case.policy,
        *knobs, *case.options, "--worker-urls", *urls,
    ]  # fmt: skip


@contextlib.asynccontextmanager
async def routed(case: Case, fleet: Fleet) -> AsyncIterator[None]:
    """Run the router before a fleet, to the end of the block.

    Raises:
        RuntimeError: It ended, or was not ready in time; with what it printed last.
    """
    ports = free_ports()
    fleet.router_port = ports[0]
    urls = [engine.url for engine in fleet.engines]
    with tempfile.TemporaryFile() as log:
        line = command(case, ports, urls)
        process = subprocess.Popen(line, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            if not await is_ready(process, fleet.router_port):
                log.seek(0)
                said = log.read().decode(errors="replace").strip()[-400:]
                raise RuntimeError(f"{case.rival} does not serve: {said}")
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # It waits for streams that nobody will end.
                process.kill()
                process.wait()


async def is_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the router serves and has workers; False if it ends or takes too long."""
    until_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < until_s:
        gone = OSError, asyncio.IncompleteReadError, asyncio.TimeoutError
        with contextlib.suppress(*gone):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /readiness HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                first, _ = await read_message(reader)
                writer.close()
            if " 200 " in first:
                return True
        await asyncio.sleep(0.1)
    return False


async def picks_of(case: Case, num_picks: int, seed: int) -> list[Pick]:
    """What the router does with the traffic of a seed."""
    if case.rival == RAY:
        # To import Ray takes as long as some of the comparisons.
        from rival_ray import RayFleet

        return await record(RayFleet(case.policy, len(TOKENS_PER_S), case.knobs), num_picks, seed)
    told = list(zip(WAITING_TOKENS, TOKENS_PER_S, strict=True))
    fleet = Fleet(told if case.told_load else [None] * len(told))
    async with fleet.served(), routed(case, fleet):
        if case.told_load:
            await fleet.polled(START_TIMEOUT_S)
        return await record(fleet, num_picks, seed)


def ray_runs() -> bool:
    """Whether this process has a Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def start_ray() -> None:
    """Start one, for the actor that keeps the prefix tree; it ends with this process."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)


def measure(case: Case, args: Args) -> Parity:
    """Record the router's decisions and replay them through our rule."""
    if case.rival == RAY and not ray_runs():
        start_ray()
    started_s = time.monotonic()
    picks = asyncio.run(picks_of(case, args.picks, args.seed))
    parity = parity_of(
        picks,
        case.rule,
        case.knobs,
        names_first=case.names_first,
        told_load=case.told_load,
        draws_ties=case.draws_ties,
    )
    return replace(parity, wall_s=time.monotonic() - started_s)


def row_of(case: Case, parity: Parity) -> dict[str, object]:
    """One row of the table."""
    return {
        "rival": case.rival, "version": version_of(case.rival), "policy": case.policy,
        "setting": case.setting, "rule": case.rule, **asdict(parity),
    }  # fmt: skip


def table(rows: list[dict[str, object]]) -> Table:
    """The rows, for the terminal."""
    shown = Table("router", "policy", "setting", "rule", "picks", "agree", "possible", "p", "s")
    for row in rows:
        drawn = f"{row['p_value']:.3f}" if row["num_drawn"] else ""
        shown.add_row(
            f"{row['rival']} {row['version']}", f"{row['policy']}", f"{row['setting']}",
            f"{row['rule']}", f"{row['num_picks']:,}", f"{row['agreement_fraction']:.2%}",
            f"{row['possible_fraction']:.2%}", drawn, f"{row['wall_s']:.0f}",
        )  # fmt: skip
    return shown


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    """Write the rows as a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def main(args: Args) -> None:
    if absent := [sentence for rival in args.rivals if (sentence := missing(rival))]:
        sys.exit("; ".join(absent))
    # Who ends this process is to end the router as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: list[dict[str, object]] = []
    for case in CASES:
        if case.rival in args.rivals:
            rows.append(row_of(case, measure(case, args)))
            print(f"{case.rival} {case.policy} {case.setting}: done", file=sys.stderr)
    if args.csv:
        write_csv(args.csv, rows)
    report(table(rows), rows, args.json, args.seed)


if __name__ == "__main__":
    main(tyro.cli(Args))

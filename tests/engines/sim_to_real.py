"""Does the simulator say what a client measures, on engines that no model paces?

    PYTHONPATH=.:tests python tests/engines/sim_to_real.py --json FILE

Two llama.cpp servers and a sharded engine of Tokenyard have a share of CPU each (a quota of their
cgroup), so that speeds differ and nobody waits for another's cores. A gateway that has nothing but
their URLs estimates their speeds from some traffic. On other traffic policies take turns, and the
same requests are simulated with what was estimated.
"""

import asyncio
import itertools
import os
import signal
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import tyro
import yaml
from engines.real_engines import ADMIN, LIMIT_S, Engine, Process, wait_until
from rich.console import Console

from pipelines import calibrate, replay
from tokenyard.provenance import command_line, write_result
from tokenyard.routing.scenario import load_scenario
from tokenyard.statistics.intervals import t_interval

TRAFFIC = {"scenario": "conversation", "length_scale": 0.04}
"""Recorded conversations' lengths, shortened for a model of 135 million parameters on a CPU."""
POLICIES = (
    "marginal_delay+sjf@60", "round_robin", "ray_default", "least_loaded", "power_of_two",
    "weighted_least_connections", "sed", "random",
)  # fmt: skip
SHARES = {"llamacpp-0": 0.8, "llamacpp-1": 0.1, "own": 0.4}
"""Cores of each engine; of ours its rank's, as Ray's own processes take what an engine would."""
_STEPS = 6
"""In which the gateway learns."""
PATIENT = {"first_token_s": 300.0, "between_tokens_s": 120.0}


@dataclass(frozen=True, kw_only=True)
class Args:
    """Predict and measure."""

    loads: tuple[float, ...] = (0.4, 0.65, 0.9)
    """Of the capacity that was estimated."""
    policies: tuple[str, ...] = POLICIES
    """At the middle load; the first three of them at the others."""
    repeats: int = 5
    duration_s: float = 40.0
    """Of a turn."""
    learn_s: float = 300.0
    """Of the traffic by which speeds are estimated."""
    seed: int = 7
    engines: tuple[str, ...] = tuple(SHARES)
    json: Path | None = None


class CpuShare:
    """A cgroup with a quota of CPU time, of version 1 or 2; needs the right to make one."""

    def __init__(self, name):
        root = Path("/sys/fs/cgroup")
        self._is_v2 = (root / "cgroup.controllers").exists()
        self._folder = (root if self._is_v2 else root / "cpu") / f"tokenyard-{os.getpid()}-{name}"
        self._folder.mkdir()

    def command(self, command):
        """The same command, run in this group with all that it starts."""
        enter = f'echo $$ > {self._folder}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "sh", *command]

    def take(self, name):
        """Take the processes of that name out of another group, with all their threads."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (process / "cmdline").read_bytes().startswith(name):
                    (self._folder / "cgroup.procs").write_text(process.name)

    def limit(self, cores, period_us=10_000):
        """Let the group have so many cores, in periods that are short beside an iteration."""
        quota_us = max(round(cores * period_us), 1000)
        if self._is_v2:
            (self._folder / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(period_us))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def remove(self):
        """Remove the group once nothing runs in it."""
        wait_until(lambda: not (self._folder / "cgroup.procs").read_text())
        self._folder.rmdir()


def serve(scratch, name, cluster, policy="round_robin"):
    """A process of `tokenyard serve`, and its command."""
    process, file = Process(scratch, name), scratch / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"description": "d", **cluster}))
    tokenyard = Path(sys.executable).with_name("tokenyard")
    return process, [
        tokenyard, "serve", "--cluster", file, "--policy", policy, "--port", process.port,
    ]  # fmt: skip


@contextmanager
def limited(scratch, names):
    """Engines with a share of CPU each, which have it once they have started; yields their URLs."""
    own = {
        "name": "own", "served_model": "smollm2", "scenario": "local_cpu",
        "pools": [{
            "name": "own", "kind": "own", "replica_cpus": 0.1,
            "config": {"model": "default", "max_batch": 32, "max_waiting": 256},
        }],
    }  # fmt: skip
    with ExitStack() as stack:
        processes = []
        for number, name in enumerate(names):
            share = CpuShare(name)
            stack.callback(share.remove)
            if name == "own":
                process, command = serve(scratch, name, own, "least_loaded")
                env = {}
            else:
                process = Engine(scratch, name.partition("-")[0], number)
                command, env = process.command
            stack.callback(process.end, signal.SIGTERM)
            process.begin(command if name == "own" else share.command(command), env)
            process.wait_until_up()
            if name == "own":
                share.take(b"ray::Rank")
            share.limit(SHARES[name])
            processes.append(process)
        yield [process.url for process in processes]


@contextmanager
def gateway_before(scratch, urls):
    """A gateway that knows URLs alone; yields its URL."""
    pool = {
        "name": "real", "kind": "external", "model": "smollm2", "endpoints": urls,
        "deadlines": PATIENT,
    }  # fmt: skip
    cluster = {"name": "real", "served_model": "smollm2", "pools": [pool]}
    process, command = serve(scratch, "gateway", cluster)
    try:
        process.begin(command, ADMIN)
        process.wait_until_up()
        yield process.url
    finally:
        process.end(signal.SIGTERM)


def play(url, console, **options):
    """Replay traffic of which every turn is other; what was measured, and its rows."""
    args = replay.Args(url=url, advance=True, timeout_s=LIMIT_S, **TRAFFIC, **options)
    measured = replay.Measured("generated conversation")
    asyncio.run(replay.run(args, console, measured))
    rows = measured.rows()
    if measured.twin is not None:
        replay.add_simulated(args.seed, measured.twin, measured, rows)
    return measured, rows


def estimated(url, scratch, console):
    """Scenario of the engines as the gateway estimates them."""
    path = scratch / "estimated.yaml"
    calibrate.calibrate_live(
        calibrate.Args(url=url, scenario="conversation_mixed_gpus", out=path), console
    )
    return path


def rate_at(load, path, sent):
    """Requests a second that are a load, by what was estimated and the lengths that were sent."""
    lengths = sent.context_tokens.mean(), sent.generated_tokens.mean()
    return load / load_scenario(str(path)).offered_load(1.0, *lengths)


def learn(url, args, scratch, console):
    """Let the gateway see traffic; return the scenario's path and what was sent.

    The rate grows by steps, so that a first estimate that is too high does no harm.
    """
    rate = 0.5
    for number in range(_STEPS):
        options = {"rate": rate, "compare": "least_loaded", "duration_s": args.learn_s / _STEPS}
        measured, _ = play(url, console, seed=args.seed + 1000 + number, **options)
        path, sent = estimated(url, scratch, console), measured.sent[0]
        rate = min(rate_at(0.7, path, sent), 1.6 * rate)
    return path, sent


def pairs_of(measured, rows):
    """Pairs of policies that part by measured intervals, and whether they were predicted so."""
    simulated = {row["policy"]: row["simulated_mean_response_s"] for row in rows}
    pairs = []
    for first, second in itertools.combinations(simulated, 2):
        turns = zip(measured.turns[first], measured.turns[second], strict=True)
        differences = [
            one["mean_response_s"] - other["mean_response_s"]
            for one, other in turns
            if one is not None and other is not None
        ]
        interval = t_interval(differences)
        if interval.low > 0.0 or interval.high < 0.0:
            predicted = simulated[first] - simulated[second]
            pairs.append((first, second, interval.estimate, predicted))
    return pairs


def study(args, console):
    """Rows of every policy at every load, and pairs that part, printed as they come."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        urls = stack.enter_context(limited(scratch, args.engines))
        url = stack.enter_context(gateway_before(scratch, urls))
        path, sent = learn(url, args, scratch, console)
        middle = args.loads[len(args.loads) // 2]
        for load in args.loads:
            policies = args.policies if load == middle else args.policies[:3]
            measured, load_rows = play(
                url, console, rate=rate_at(load, path, sent), compare=",".join(policies),
                repeats=args.repeats, duration_s=args.duration_s, simulate=str(path),
                seed=args.seed + round(100 * load),
            )  # fmt: skip
            replay.print_simulated(console, load_rows)
            for row in load_rows:
                for key in ("mean_response_s", "p99_response_s", "mean_ttft_s"):
                    row[f"error_{key}"] = row[f"simulated_{key}"] / row[key] - 1.0
                console.print({key: row[key] for key in row if key.startswith(("policy", "error"))})
            pairs = pairs_of(measured, load_rows)
            console.print(f"load {load:g}: pairs that part", pairs)
            rows += [row | {"offered_load": load} for row in load_rows]
            if args.json is not None:
                write_result(args.json, command_line(), args.seed, rows)
    return rows


if __name__ == "__main__":
    study(tyro.cli(Args, description=__doc__), Console(highlight=False, width=160))

"""Whether a simulator that others wrote finds what ours does of Dynamo's KV router.

python benchmarks/dynosim.py

The same traces go to equal replicas of the same speed in NVIDIA's DynoSim and in our simulator,
under round robin and under Dynamo's KV router. Ours has that rule twice: as it ships
(`dynamo_cost`, its maker's defaults), and as DynoSim's own decisions (`placed`). The cells are
drawn from a grid before anything is run. `make rivals` installs DynoSim.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from dynosim_traces import Cell, drawn_cells, engine_of, mooncake_lines, scenario_of, trace_of
from rich.table import Table
from rival_parity import environments, missing, write_csv

from tokenyard.provenance import ResultFile, report
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.policies.cost import cheapest_of
from tokenyard.routing.policies.dynamo import DynamoCost
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator import Simulator
from tokenyard.routing.simulator.batching import BatchingOutcomes, BatchingSim
from tokenyard.routing.simulator.batching_streams import Stream
from tokenyard.routing.simulator.run import Run, run_each, run_policy
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.routing.types import RoutingPolicy
from tokenyard.types import FloatArray
from tokenyard.workload.trace import Trace

REPLAY = Path(__file__).with_name("dynosim_replay.py")
ROUTERS = ("round_robin", "kv_router")
"""Of DynoSim."""
OURS = ("dynamo_cost", "placed")
"""What decides in our simulator as the KV router does."""
MEASURES = ("ttft", "e2e")
SIZE_TOLERANCE = 0.2
"""Sizes agree where one is within this share of the other (the larger)."""
NO_DIFFERENCE = 0.01
"""Changes below it in both simulators are none, of whatever sign."""
Decisions = tuple[tuple[int, ...], ...]
"""Who serves each request of each stream."""


@dataclass(frozen=True)
class Args:
    """Compare our simulator with NVIDIA's."""

    cells: int = 10
    """Cells drawn from the grid of 54."""
    streams: int = 4
    """Traces of each cell."""
    requests: int = 2000
    """Requests of each trace."""
    seed: int = 20
    """Of the draw of cells, and of the traces."""
    csv: Path | None = None
    """Write the table to this file."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


@dataclass(frozen=True)
class Served:
    """What became of the requests of one cell under one router, every stream's in a row."""

    first_token_s: FloatArray
    """Shape (num_streams, num_requests)."""
    response_s: FloatArray
    hit_fraction: float
    """Share of the prompts' tokens that was cached."""
    workers: Decisions
    """Who served each."""

    def mean_s(self, measure: str) -> float:
        """Mean time to the first token (`ttft`) or to the end (`e2e`), seconds."""
        return float((self.first_token_s if measure == "ttft" else self.response_s).mean())


def replayed(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Let DynoSim do a job (`dynosim_replay.py`).

    Raises:
        RuntimeError: It failed; with what it said last.
    """
    python = environments() / "dynosim" / "bin" / "python"
    done = subprocess.run([python, REPLAY], input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"DynoSim failed: {(done.stderr.strip().splitlines() or [''])[-1]}")
    outcomes: list[dict[str, Any]] = json.loads(done.stdout)
    return outcomes


def by_dynosim(
    scenario: Scenario, traces: Sequence[Trace], folder: Path
) -> tuple[dict[str, Served], dict[str, float]]:
    """Replay traces in DynoSim under both routers; files are left in `folder`.

    Returns:
        What became of the requests, and the CPU seconds of the first trace, by router.
    """
    paths = [folder / f"{which}.jsonl" for which in range(len(traces))]
    for path, trace in zip(paths, traces, strict=True):
        path.write_text("\n".join(mooncake_lines(trace)) + "\n")
    num, engine = scenario.num_servers, engine_of(scenario, folder)
    served, cpu_s = {}, {}
    for router in ROUTERS:
        runs = [
            {"trace": str(path), "workers": num, "router": router, "timed": path == paths[0]}
            for path in paths
        ]
        outcomes = replayed({"engine": engine, "runs": runs})
        served[router] = served_by_dynosim(outcomes, traces)
        cpu_s[router] = outcomes[0]["cpu_s"]
    return served, cpu_s


def served_by_dynosim(outcomes: Sequence[dict[str, Any]], traces: Sequence[Trace]) -> Served:
    """What DynoSim made of the streams of a cell."""
    prompts = sum(int(trace.context_tokens.sum()) for trace in traces)
    return Served(
        np.array([one["first_token_s"] for one in outcomes]),
        np.array([one["response_s"] for one in outcomes]),
        sum(sum(one["hit_tokens"]) for one in outcomes) / prompts,
        tuple(tuple(one["worker"]) for one in outcomes),
    )


def served_of(runs: Sequence[Run]) -> Served:
    """What our simulator made of the streams of a cell."""
    outcomes = [BatchingOutcomes.of(run.outcomes) for run in runs]
    hit = sum(one.hit_tokens.sum() for one in outcomes)
    return Served(
        np.array([one.first_token_s for one in outcomes]),
        np.array([one.response_s for one in outcomes]),
        hit / sum(one.context_tokens.sum() for one in outcomes),
        tuple(tuple(one.server.tolist()) for one in outcomes),
    )


def by_ours(
    scenario: Scenario, streams: StreamSet, workers: Decisions, seed: int
) -> tuple[dict[str, Served], float]:
    """Run round robin, and the KV router's rule in each of the ways `OURS`.

    Args:
        scenario: The cell.
        streams: Its requests.
        workers: What DynoSim's KV router decided.
        seed: Of drawn ties.

    Returns:
        What became of the requests, and the share of DynoSim's decisions that `dynamo_cost` may
        have taken in the same state.
    """

    def ruled(name: str) -> Served:
        def make(rng: np.random.Generator) -> RoutingPolicy:
            slo, num = scenario.slo, scenario.num_servers
            return make_policy(name, PolicyContext(scenario.name, slo, rng, num))

        return served_of(run_policy(scenario, streams, make, seed))

    served = {name: ruled(name) for name in ("round_robin", "dynamo_cost")}
    followers = [Follower(mine) for mine in workers]
    served["placed"] = served_of(run_each(scenario, streams, [one.follow for one in followers]))
    same = sum(one.num_same for one in followers)
    return served, same / sum(map(len, workers))


class Follower:
    """Takes what others took of each request, and counts where `dynamo_cost` may have, too."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._workers = workers
        self._rule = DynamoCost(np.random.default_rng(0))
        self.num_same = 0
        """Decisions that are one of the cheapest for the rule."""

    def follow(self, sim: Simulator, copy: int) -> int:
        """Take what was taken."""
        chosen = self._workers[sim.current(copy)]
        snapshots = sim.snapshots(copy, self._rule.prompt_block_tokens)
        costs = self._rule.costs(sim.request(copy), snapshots)
        self.num_same += chosen in cheapest_of(range(len(snapshots)), costs)
        return chosen


def our_requests_per_cpu_s(scenario: Scenario, stream: Stream) -> dict[str, float]:
    """Requests per CPU second on a stream: round robin, and a rule that looks at every replica.

    The rule is least marginal delay. Both are run whole by the compiled simulator.
    """
    num = len(stream)
    sim = BatchingSim(scenario, 1, num)
    in_turn = np.arange(num)[None] % scenario.num_servers
    runs: dict[str, Callable[[], object]] = {
        "round_robin": lambda: sim.run_given(in_turn),
        "kv_router": lambda: sim.run_linear(np.zeros(sim.num_weights), 1.0),
    }

    def run(name: str) -> None:
        sim.load(0, stream)
        runs[name]()

    return {name: num / cpu_seconds(partial(run, name)) for name in runs}


def cpu_seconds(run: Callable[[], None]) -> float:
    """CPU seconds of a call: the median of five, after one that compiles."""
    run()
    taken_s = []
    for _ in range(5):
        started_s = time.process_time()
        run()
        taken_s.append(time.process_time() - started_s)
    return float(np.median(taken_s))


def agree(ours: float, theirs: float, none: float) -> bool:
    """Whether two differences have the same sign and about the same size, or are none."""
    larger = max(abs(ours), abs(theirs))
    return larger < none or abs(ours - theirs) <= SIZE_TOLERANCE * larger


def effects(theirs: dict[str, Served], ours: dict[str, Served], measure: str) -> dict[str, Any]:
    """What the KV router does to a mean: seconds, share of round robin's, and who agrees.

    Returns:
        Columns of the row: `MEASURE_WHO_s`, `MEASURE_WHO_change`, and for ours
        `MEASURE_WHO_agrees` (of the share) and `MEASURE_WHO_saving_agrees` (of the seconds).
    """
    base = theirs["round_robin"].mean_s(measure)
    saving_s = theirs["kv_router"].mean_s(measure) - base
    columns: dict[str, Any] = {
        f"{measure}_dynosim_round_robin_s": base,
        f"{measure}_dynosim_s": base + saving_s,
        f"{measure}_dynosim_change": saving_s / base,
    }
    our_base = ours["round_robin"].mean_s(measure)
    columns[f"{measure}_round_robin_s"] = our_base
    for name in OURS:
        our_saving_s = ours[name].mean_s(measure) - our_base
        columns |= {
            f"{measure}_{name}_s": our_base + our_saving_s,
            f"{measure}_{name}_change": our_saving_s / our_base,
            f"{measure}_{name}_agrees": agree(
                our_saving_s / our_base, saving_s / base, NO_DIFFERENCE
            ),
            f"{measure}_{name}_saving_agrees": agree(our_saving_s, saving_s, NO_DIFFERENCE * base),
        }
    return columns


def measure(cell: Cell, args: Args) -> dict[str, Any]:
    """One row: both simulators on the traces of a cell."""
    scenario = scenario_of(cell)
    rngs = [stream_rng(args.seed, "evaluation", index) for index in range(args.streams)]
    traces = [trace_of(scenario, args.requests, rng) for rng in rngs]
    source = StreamSource(scenario)
    streams = StreamSet([source.encode(trace) for trace in traces], "sessions")
    with tempfile.TemporaryDirectory() as folder:
        theirs, cpu_s = by_dynosim(scenario, traces, Path(folder))
    workers = theirs["kv_router"].workers
    ours, same = by_ours(scenario, streams, workers, args.seed)
    row: dict[str, Any] = asdict(cell)
    for what in MEASURES:
        row |= effects(theirs, ours, what)
    row |= {f"dynosim_{router}_hit_fraction": one.hit_fraction for router, one in theirs.items()}
    row |= {f"{name}_hit_fraction": one.hit_fraction for name, one in ours.items()}
    row["dynamo_cost_decisions_fraction"] = same
    per_cpu_s = our_requests_per_cpu_s(scenario, streams.requests[0])
    for router in ROUTERS:
        row[f"dynosim_{router}_per_cpu_s"] = args.requests / cpu_s[router]
        row[f"ours_{router}_per_cpu_s"] = per_cpu_s[router]
    return row


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows, for the terminal."""
    shown = Table("cell", "measure", "DynoSim, s", "ours, s", "change", *OURS, "ratio of speeds")
    for row in rows:
        cell = "-".join(str(row[key]) for key in ("shared", "load", "num_replicas", "outputs"))
        speeds = " / ".join(
            f"{row[f'ours_{router}_per_cpu_s'] / row[f'dynosim_{router}_per_cpu_s']:.0f}"
            for router in ROUTERS
        )
        for what in MEASURES:
            shown.add_row(
                cell, what,
                f"{row[f'{what}_dynosim_round_robin_s']:.4f} / {row[f'{what}_dynosim_s']:.4f}",
                f"{row[f'{what}_round_robin_s']:.4f} / {row[f'{what}_dynamo_cost_s']:.4f}",
                f"{row[f'{what}_dynosim_change']:+.1%}",
                *(f"{row[f'{what}_{name}_change']:+.1%}" for name in OURS), speeds,
            )  # fmt: skip
    return shown


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How many cells agree, a sentence for each measure and rule; and the speeds."""
    said = []
    for what in MEASURES:
        for name in OURS:
            by_share = sum(row[f"{what}_{name}_agrees"] for row in rows)
            by_seconds = sum(row[f"{what}_{name}_saving_agrees"] for row in rows)
            said.append(f"{what}, {name}: {by_share} of {len(rows)}, in seconds {by_seconds}")
    for router in ROUTERS:
        ratios = [
            row[f"ours_{router}_per_cpu_s"] / row[f"dynosim_{router}_per_cpu_s"] for row in rows
        ]
        middle = float(np.exp(np.mean(np.log(ratios))))
        said.append(f"speed, {router}: {middle:.0f} times, {min(ratios):.0f} to {max(ratios):.0f}")
    return said


def main(args: Args) -> None:
    """Compare, print and write the rows."""
    if absent := missing("dynosim"):
        sys.exit(absent)
    rows = []
    for cell in drawn_cells(args.cells, args.seed):
        rows.append(measure(cell, args))
        print(f"{cell.name}: done", file=sys.stderr)
    if args.csv:
        write_csv(args.csv, rows)
    report(table(rows), rows, args.json, args.seed, width=160)
    print(*verdicts(rows), sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args))

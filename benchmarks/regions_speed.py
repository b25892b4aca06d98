"""How fast regions are on one core: episodes of the simulator, and transport between 64 regions.

python benchmarks/regions_speed.py --json regions_speed.json
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import tyro

from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.regions import transport
from tokenyard.regions.demand import sample_stream, stream_rng
from tokenyard.regions.forecast import fit_seasonal
from tokenyard.regions.problem import policy_maker
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.servers import make_cluster
from tokenyard.regions.simulator.run import run_regions

SIZES = ((12, 250, 100), (37, 600, 300))
"""Regions, servers, tasks per slot."""
POLICIES = ("round_robin", "prox_ot_forecast_live", "prox_ot_forecast_live_cost")


@dataclass(frozen=True)
class Args:
    """Measure CPU time, the least of several runs."""

    runs: int = 3
    seed: int = 0
    json: ResultFile | None = None
    """Write the result rows to this file."""


def a_scenario(num_regions: int, num_servers: int, tasks: float) -> RegionScenario:
    fifth = num_servers // 5
    fields = {
        "name": f"{num_regions} regions",
        "description": "for speed",
        "topology": f"synthetic/gabriel/{num_regions}/1",
        "server_counts": dict.fromkeys(("H100", "A100", "RTX4090", "V100", "T4"), fifth),
    }
    plain = RegionScenario.model_validate(fields)
    load = plain.demand.load * tasks / make_cluster(plain).mean_demand.sum()
    return RegionScenario.model_validate(fields | {"demand": {"load": load}})


def episode_s(scenario: RegionScenario, policy: str, args: Args) -> tuple[float, float]:
    forecaster = fit_seasonal(scenario)
    stream = sample_stream(scenario, stream_rng(args.seed, "training", 0))
    make, *_ = policy_maker(scenario, policy)
    times = []
    for _ in range(args.runs + 1):  # the first compiles
        started = time.process_time()
        run_regions(scenario, stream, make(scenario), forecaster)
        times.append(time.process_time() - started)
    return min(times[1:]), len(stream.numbers) / stream.num_slots


def transport_ms(num_regions: int, args: Args) -> float:
    rng = np.random.default_rng(args.seed)
    demand, capacity = rng.dirichlet(np.ones(num_regions), 2) * [[100.0], [140.0]]
    cost = rng.uniform(0, 1, (num_regions, num_regions)) + rng.uniform(0, 1, num_regions)
    times = []
    for _ in range(200):
        started = time.process_time()
        transport.within(demand, capacity, cost)
        times.append(time.process_time() - started)
    return 1e3 * float(np.median(times))


def main(args: Args) -> None:
    rows: list[dict[str, str | float]] = []
    for num_regions, servers, tasks in SIZES:
        scenario = a_scenario(num_regions, servers, tasks)
        for policy in POLICIES:
            seconds, per_slot = episode_s(scenario, policy, args)
            row: dict[str, str | float] = {
                "what": "episode of 480 slots",
                "policy": policy,
                "regions": num_regions,
                "servers": servers,
                "tasks_per_slot": per_slot,
                "cpu_s": seconds,
            }
            rows.append(row)
            print(f"{num_regions} regions, {servers} servers, {per_slot:.0f} tasks a slot, "
                  f"{policy}: {seconds:.3f} s", flush=True)  # fmt: skip
    median_ms = transport_ms(64, args)
    rows.append({"what": "transport", "regions": 64, "median_ms": median_ms})
    print(f"transport between 64 regions: {median_ms:.3f} ms median")
    if args.json:
        write_result(args.json, command_line(), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))

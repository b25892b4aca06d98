"""What several routers lose that do not talk to each other, on a large fleet of unequal replicas.

python benchmarks/router_replicas.py

The fleet simulator shares the requests among `num_routers` at random. Each router knows what it has
sent itself, and of the rest only what replicas published at their last scrape: the picture that
router replicas behind one load balancer have. All combinations see the same requests.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import tyro
from rich.table import Table

from tokenyard.evaluation import compare
from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.simulator.run import PolicyFactory, run_policy
from tokenyard.routing.simulator.streams import StreamSource, synthetic_streams


@dataclass(frozen=True)
class Args:
    """Measure what partial views cost."""

    scenario: str = "conversation_mixed_gpus"
    """Fleet that is repeated, and its traffic at the same load."""
    copies: int = 8
    """Times that the fleet's replicas are repeated."""
    routers: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of routers; the first is what the others are compared to."""
    scrape_s: tuple[float, ...] = (0.25, 1.0)
    """Times between two publications of a replica's state."""
    policies: tuple[str, ...] = ("marginal_delay", "power_of_two")
    """Rules that decide."""
    streams: int = 4
    """Streams per combination."""
    requests: int = 6000
    """Requests per stream."""
    seed: int = 0
    """Of the traffic."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


def repeated(args: Args, num_routers: int, scrape_s: float) -> Scenario:
    """The scenario with more replicas, and traffic for them, before so many routers."""
    scenario = load_scenario(args.scenario).without_reward()
    declared = scenario.required_fleet
    replicas = tuple(
        one.model_copy(update={"name": f"{one.name}-{copy}"})
        for copy in range(args.copies)
        for one in declared.replicas
    )
    changes = {"replicas": replicas, "num_routers": num_routers, "scrape_interval_s": scrape_s}
    fleet = declared.model_copy(update=changes)
    return scenario.model_copy(update={"fleet": fleet, "requests_per_stream": args.requests})


def measure(args: Args, policy: str, scrape_s: float) -> list[Row]:
    """One row per number of routers."""
    runs, cpu_us = {}, {}
    for num_routers in args.routers:
        scenario = repeated(args, num_routers, scrape_s)
        streams = synthetic_streams(StreamSource(scenario), args.streams, args.seed)
        name = str(num_routers)
        started_s = time.process_time()
        runs[name] = run_policy(scenario, streams, factory_of(scenario, policy), args.seed)
        spent_s = time.process_time() - started_s
        cpu_us[name] = spent_s / (args.streams * args.requests) * 1e6
    return [
        {
            **row,
            "policy": policy,
            "num_routers": int(row["policy"]),
            "num_replicas": scenario.num_servers,
            "scrape_interval_s": scrape_s,
            "cpu_us_per_decision": cpu_us[str(row["policy"])],
        }
        for row in compare(PROBLEM, scenario, streams, runs, str(args.routers[0]))
    ]


def factory_of(scenario: Scenario, policy: str) -> PolicyFactory:
    """Make the policy for each stream anew."""
    return lambda rng: make_policy(
        policy, PolicyContext(scenario.name, scenario.slo, rng, scenario.num_servers)
    )


def main(args: Args) -> None:
    try:
        rows = [row for s in args.scrape_s for p in args.policies for row in measure(args, p, s)]
    except ValueError as error:
        sys.exit(f"error: {error}")
    table = Table(title=f"{rows[0]['num_replicas']} replicas of {args.scenario}")
    for column in (
        "policy",
        "scrape s",
        "routers",
        "mean s",
        "p99 s",
        "violations",
        "mean vs first",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row["delta_mean_ci_low"], row["delta_mean_ci_high"]
        table.add_row(
            str(row["policy"]), f"{row['scrape_interval_s']:g}", str(row["num_routers"]),
            f"{row['mean_response_s']:.2f}", f"{row['p99_response_s']:.1f}",
            f"{row['slo_violation_fraction']:.1%}",
            f"{row['delta_mean_fraction']:+.1%} [{low:+.1%}, {high:+.1%}]",
        )  # fmt: skip
    report(table, rows, args.json, args.seed)


if __name__ == "__main__":
    main(tyro.cli(Args))

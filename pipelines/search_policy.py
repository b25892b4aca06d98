"""Search the linear policy of a scenario from several seeds and keep the best on validation.

This is how the shipped champions are made:

    python pipelines/search_policy.py --scenario poisson_085 --out tokenyard/artifacts/routing
"""

from __future__ import annotations

import itertools
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from tokenyard import metrics
from tokenyard.provenance import git_sha, write_result
from tokenyard.routing.artifact import PolicyArtifact, lineage_of
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.observation import NUM_SCORE_WEIGHTS, NUM_SLO_WEIGHTS
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.search import Objective, PolicySearch, SearchConfig
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.routing.validation import (
    RULES_LOST_TO,
    PairedScore,
    choose,
    mean_and_violations_s,
    worst_p99,
)


@dataclass(frozen=True)
class Args:
    """Search a scenario's linear policy and export the best of all seeds and objectives."""

    scenario: str = "poisson_085"
    """Name or YAML path."""
    out: Path | None = None
    """Folder for <scenario>.npz; nothing is written without it."""
    seeds: int = 3
    """Independent searches per objective; 0: the hand rule itself is written."""
    objectives: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Which of the objectives to search with: 0 is eager for the mean, 4 careful with the tail, 5
    wants SLOs attained at any price; give it a `p99_margin` that lets it."""
    generations: int = 50
    streams: int = 6
    """Streams per generation, of 5000 requests each."""
    load_range: tuple[float, float] = (1.0, 1.0)
    """Range of factors on the scenario's arrival rate."""
    speed_range: tuple[float, float] = (1.0, 1.0)
    """Range of factors on the speed of every replica of a fleet."""
    scrape_range: tuple[float, float] | None = None
    """Range of a fleet's scrape interval, seconds."""
    slo_terms: bool = True
    """Search the prices of likely SLO violations too, on a fleet."""
    violation_s: float | None = None
    """Seconds that a share of 1 of SLO violations costs; None: what each objective says, and
    what the score says in choosing between them."""
    p99_margin: float = 0.01
    """How far p99 may exceed that of the hand rule, as a fraction: at the upper end of
    its 95 % interval over validation streams, and on the recorded training part where found."""
    jobs: int = 2
    """Processes."""
    json: Path | None = None
    """Where to write the rows."""


NUM_VALIDATION_STREAMS = 90
OBJECTIVES = (
    Objective(cvar99=0.0, violation=2.0, tail_guard=2.0),
    Objective(cvar99=0.05, violation=2.0, tail_guard=2.0),
    Objective(cvar99=0.1, violation=2.0, tail_guard=5.0),
    Objective(cvar99=0.2, violation=1.0, tail_guard=5.0),
    Objective(cvar99=0.3, violation=1.0, tail_guard=5.0),
    Objective(cvar99=0.0, violation=30.0, tail_guard=0.0),
)
"""From eager for the mean to careful with the tail, and one for SLOs at any price; validation
decides between them."""


@dataclass(frozen=True)
class Found:
    """One finished search and what its policy does on the validation streams."""

    row: dict[str, float | int | str]
    weights: list[float]


def search(args: Args, objective: Objective, seed: int) -> Found:
    """Run one search to the end and judge it on the validation streams."""
    scenario = load_scenario(args.scenario)
    start = hand_rule(scenario)
    if args.slo_terms and scenario.fleet is not None:
        start += (0.0,) * NUM_SLO_WEIGHTS
    if args.violation_s is not None:
        objective = replace(objective, violation=args.violation_s)
    config = SearchConfig(
        start=start,
        objective=objective,
        streams_per_generation=args.streams,
        num_generations=args.generations,
        randomisation=Randomisation(
            load_factor=args.load_range,
            speed_factor=args.speed_range,
            scrape_interval_s=args.scrape_range,
        ),
    )
    policy = PolicySearch(scenario, config, seed)
    for _ in range(args.generations):
        policy.step()
    row: dict[str, float | int | str] = {"seed": seed, "env_steps": policy.env_steps}
    row |= {f"objective_{name}": value for name, value in asdict(objective).items()}
    return Found(row | validate(policy, start), policy.mean.tolist())


def baseline_only(scenario_name: str) -> Found:
    """The hand rule itself: what ships where nothing that was searched passes the gate."""
    scenario = load_scenario(scenario_name)
    start = hand_rule(scenario)
    rule = PolicySearch(scenario, SearchConfig(start=start))
    row: dict[str, float | int | str] = {"seed": 0, "env_steps": 0}
    row |= {f"objective_{name}": 0.0 for name in asdict(OBJECTIVES[0])}
    found = validate(rule, start)
    del found[RULES_LOST_TO]  # Untuned it may do better at half load, and yet not at the whole.
    return Found(row | found, list(start))


def hand_rule(scenario: Scenario) -> tuple[float, ...]:
    """Weights of the strongest hand rule: shortest expected delay, or tuned marginal delay."""
    if scenario.fleet is None:
        return (0.0,) * NUM_SCORE_WEIGHTS
    return load_tuned(scenario.name).fleet.marginal_weights


def validate(policy: PolicySearch, start: tuple[float, ...]) -> dict[str, float]:
    """Compare what a search found with the hand rule on streams that it was not trained on."""
    rule = PolicySearch(policy.scenario, SearchConfig(start=start))
    source = StreamSource(policy.scenario)
    return PairedScore(source, rule.artifact(), NUM_VALIDATION_STREAMS)(policy.artifact())


def export(args: Args, best: Found) -> PolicyArtifact:
    policy = PolicySearch(load_scenario(args.scenario), seed=int(best.row["seed"]))
    policy.mean = np.array(best.weights)
    found = {key: float(value) for key, value in best.row.items() if not isinstance(value, str)}
    lineage = {"command": command_line(), "git_sha": git_sha()}
    scenario = load_scenario(args.scenario)
    lineage |= lineage_of(scenario)
    if best.row["env_steps"] == 0:
        lineage["rule"] = "sed" if scenario.fleet is None else "tuned_marginal_delay"
    return policy.artifact(found, lineage)


def command_line() -> str:
    return shlex.join(["python", *sys.argv])


def report(found: list[Found], best: Found, violation_s: float) -> None:
    table = Table(
        "objective (cvar99, violation, guard)",
        "seed",
        "score",
        "mean",
        "p99",
        "at most",
        "violations",
    )
    for one in sorted(found, key=lambda one: mean_and_violations_s(one.row, violation_s)):
        row = one.row
        objective = (
            row["objective_cvar99"],
            row["objective_violation"],
            row["objective_tail_guard"],
        )
        table.add_row(
            ", ".join(str(term) for term in objective) if row["env_steps"] else "the hand rule",
            str(row["seed"]),
            f"{row['score']:.4f}",
            f"{row['delta_mean_fraction']:+.1%}",
            f"{row['delta_p99_fraction']:+.1%}",
            f"{worst_p99(one.row):+.1%}",
            f"{row['delta_slo_violation']:+.2%}",
            style="bold" if one is best else "",
        )
    Console().print(table)


def main(args: Args) -> None:
    objectives = [OBJECTIVES[index] for index in args.objectives]
    tasks = list(itertools.product(objectives, range(args.seeds)))
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(search, args, objective, seed) for objective, seed in tasks]
        found = [future.result() for future in futures]
    found.append(baseline_only(args.scenario))
    violation_s = metrics.VIOLATION_WEIGHT_S if args.violation_s is None else args.violation_s
    chosen = choose([one.row for one in found], violation_s, args.p99_margin)
    assert chosen is not None, "the rule itself is never refused"
    best = found[chosen]
    report(found, best, violation_s)
    artifact = export(args, best)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"{artifact.metadata.scenario}.npz"
        artifact.save(path)
        print(f"wrote {path} ({artifact.sha256})")
    if args.json is not None:
        write_result(args.json, command_line(), 0, [f.row for f in found])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

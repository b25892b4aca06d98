"""What training adds: the last policies of a sweep's trials, beside their starts or beside a rule.

python benchmarks/learned_gain.py --json learned_gain.json
python benchmarks/learned_gain.py --experiment from_scratch --beside sed --streams 30

Trains the RLlib trials of an experiment of `tune_configs.routing` once per seed and compares the
last policy of each, on fresh streams, with the one that it began with, or with a rule. Nothing is
chosen on these streams. *Cost* is what the trial's reward pays for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import ray
import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import envs
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.rl.routing.rewards import reward_weights
from tokenyard.rl.routing.trial import RllibAlgorithm, RoutingTrialConfig
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import RewardWeights, load_scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.streams import StreamSource, synthetic_streams
from tokenyard.routing.validation import NAMES, artifact_runs, outcome_row
from tokenyard.statistics.intervals import t_interval
from tokenyard.types import FloatArray
from tune_configs import routing as sweeps

START = "start"
"""What a trial began with, in place of a rule."""


@dataclass(frozen=True)
class Args:
    """Train the trials of an experiment and compare their last policies on fresh streams."""

    experiment: str = "default"
    """Function of `tune_configs.routing`."""
    algorithms: tuple[RllibAlgorithm, ...] = ("ppo", "a2c", "dqn")
    beside: str = START
    """`start`, or the name of a rule."""
    seeds: int = 3
    """Of training: `first_seed` and up."""
    first_seed: int = 0
    streams: int = 24
    """On which the policies are judged."""
    seed: int = 92117
    """Of those streams."""
    json: ResultFile | None = None
    """Where to write the rows, after every trial."""


def cost_s(run: Run, reward: RewardWeights, slo_s: float) -> float:
    """What a request costs by the reward's terms that are paid at the decision, seconds."""
    outcomes = run.outcomes
    response_s = outcomes.offered_response_s
    violations = outcomes.violations(slo_s)
    beyond_s = np.maximum(response_s - reward.tail_after_s, 0.0)
    energy_j = getattr(outcomes, "energy_j", 0.0) / len(response_s)
    return -float(
        reward.response * response_s.mean()
        + reward.slo * violations.mean()
        + reward.tail * beyond_s.mean()
        + reward.energy * energy_j
    )


def trained(trial: RoutingTrialConfig, args: Args) -> dict[str, Any]:
    """Train one trial; what its last policy adds to what it is compared with."""
    scenario = load_scenario(trial.scenario)
    streams = synthetic_streams(StreamSource(scenario), args.streams, args.seed)
    reward, slo_s = reward_weights(trial.reward_weights, scenario), scenario.slo_response_s

    def measured(runs: Sequence[Run]) -> FloatArray:
        return np.array(
            [(cost_s(run, reward, slo_s), *outcome_row(run.outcomes, slo_s)) for run in runs]
        )

    start_cpu_s, learner = _spent(lambda: trial.make_training(scenario))
    if args.beside == START:
        before = measured(artifact_runs(scenario, streams, learner.artifact({}, {})))
    else:
        rule = PROBLEM.candidate(scenario, args.beside)
        before = measured(rule.run(scenario, streams, args.seed))
    cpu_s = 0.0
    while learner.env_steps < trial.env_steps:
        cpu_s += _spent(learner.step)[0]
    more = measured(artifact_runs(scenario, streams, learner.artifact({}, {}))) - before
    env_steps = learner.env_steps
    learner.stop()
    row: dict[str, Any] = {
        "cell": scenario.name, "algorithm": trial.algorithm, "seed": trial.seed,
        "reward_weights": trial.reward_weights, "beside": args.beside, "env_steps": env_steps,
        "start_cpu_s": start_cpu_s, "cpu_s": cpu_s,
    }  # fmt: skip
    for column, key in enumerate(("cost_s", *NAMES)):
        found = t_interval(more[:, column])
        row |= {
            f"baseline_{key}": float(before[:, column].mean()), f"delta_{key}": found.estimate,
            f"delta_{key}_ci_low": found.low, f"delta_{key}_ci_high": found.high,
        }  # fmt: skip
    return row


def _spent(work: Callable[[], Any]) -> tuple[float, Any]:
    started_s = time.process_time()
    found = work()
    return time.process_time() - started_s, found


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay the rows out, one per trial and seed, and below each trial its mean over seeds."""
    table = Table(box=box.SIMPLE_HEAD)
    heads = ("algorithm", "reward", "seed", "cost, %", "mean, %", "p99, %", "violations, points",
             "score, 0.01 s", "CPU s")  # fmt: skip
    for head in heads:
        table.add_column(head, no_wrap=True)
    keys = (
        ("cost_s", True), ("mean_response_s", True), ("p99_response_s", True),
        ("slo_violation_fraction", False), ("score", False),
    )  # fmt: skip
    for kind in dict.fromkeys((row["algorithm"], row["reward_weights"]) for row in rows):
        mine = [row for row in rows if (row["algorithm"], row["reward_weights"]) == kind]
        for row in mine:
            cells = [_interval(row, *key) for key in keys]
            table.add_row(*kind, str(row["seed"]), *cells, f"{row['cpu_s']:.0f}")
        below = sum(row["delta_cost_s"] <= 0.0 for row in mine)
        cells = [_over_seeds(mine, *key) for key in keys]
        table.add_row(*kind, f"{below} of {len(mine)} at or below", *cells, "", end_section=True)
    return table


def _interval(row: Mapping[str, Any], key: str, relative: bool) -> str:
    unit = 100.0 / (abs(row[f"baseline_{key}"]) if relative else 1.0)
    mean, low, high = (unit * row[f"delta_{key}{end}"] for end in ("", "_ci_low", "_ci_high"))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _over_seeds(rows: Sequence[Mapping[str, Any]], key: str, relative: bool) -> str:
    values = [
        100.0 * row[f"delta_{key}"] / (abs(row[f"baseline_{key}"]) if relative else 1.0)
        for row in rows
    ]
    found = t_interval(values)
    if np.isnan(found.low):
        return f"{found.estimate:+.1f}"
    return f"{found.estimate:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def main(args: Args) -> None:
    """Train, write after every trial, and print the table."""
    torch.set_num_threads(1)
    envs.register()
    experiment = getattr(sweeps, args.experiment)()
    trials = [trial for trial in experiment.trials if trial.algorithm in args.algorithms]
    rows = []
    # RLlib wants a Ray; nothing runs in it.
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    try:
        for seed, trial in product(range(args.first_seed, args.first_seed + args.seeds), trials):
            rows.append(trained(trial.model_copy(update={"seed": seed}), args))
            told = {key: rows[-1][key] for key in ("delta_cost_s", "delta_score", "cpu_s")}
            print(f"{trial.algorithm} {trial.reward_weights} seed {seed}: {told}", file=sys.stderr)
            if args.json is not None:
                write_result(args.json, command_line(), args.seed, rows)
    finally:
        ray.shutdown()
    width = None if sys.stdout.isatty() else 180
    Console(width=width, highlight=False).print(table_of(rows))


if __name__ == "__main__":
    main(tyro.cli(Args))

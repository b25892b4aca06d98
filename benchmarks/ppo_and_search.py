"""PPO and policy search for the same CPU-seconds, on four clusters of servers and four fleets.

python benchmarks/ppo_and_search.py --json ppo_and_search.json

All place requests before queues that are first come, first served, and all begin at the best tuned
rule that does: no order is searched, because no network says one. `ppo_after_search` spends the
first half of its CPU time on policy search and begins at what that found.

CPU time is that of the process, which samples and learns itself. A short training of each kind
before is left out: it compiles, and says how many steps and generations the budget will allow, for
schedules that end with it. Every trainer has `--checkpoints` candidates, taken at equal shares of
its budget. The one with the best score on validation streams is judged on fresh streams.

A cell is level where the 95 % interval of PPO's score less search's, over training seeds, is not
wholly below 0; it is better where the mean is not. Fewer than five seeds have no such interval, and
that over streams, of the mean over seeds, decides.

With `--sweep` the trials of the default sweep are trained in place of all this, and the last policy
of each is compared with the one that it began with, on fresh streams, in what it is paid for.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from tokenyard.rl.training import SearchTraining, Training
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.scenario import RewardWeights, Scenario, load_scenario
from tokenyard.routing.search import PolicySearch, SearchConfig, started_at_best_rule
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.streams import StreamSource, synthetic_streams
from tokenyard.routing.validation import NAMES, Validation, artifact_runs, outcome_row
from tokenyard.statistics.intervals import t_interval
from tokenyard.types import FloatArray
from tune_configs import routing as sweeps

SERVERS = ("poisson_085", "bursty_serial", "two_speeds", "three_speeds")
FLEETS = ("local_cpu", "azure_code_slo", "azure_code_mixed_gpus", "conversation_mixed_gpus")
SEARCH, PPO, PPO_AFTER_SEARCH = "policy_search", "ppo", "ppo_after_search"
WARM_START_SHARE = 1 / 2
"""Of the budget of `ppo_after_search`."""
SCORE, MEAN, P99, VIOLATIONS = range(len(NAMES))


@dataclass(frozen=True)
class Args:
    """Train by gradients and by search for the same CPU time, and compare on fresh streams."""

    scenario: tuple[str, ...] = (*SERVERS, *FLEETS)
    trainers: tuple[str, ...] = (SEARCH, PPO_AFTER_SEARCH)
    seeds: int = 5
    """Of training: `first_seed` and up."""
    first_seed: int = 0
    sweep: tuple[RllibAlgorithm, ...] = ()
    """Learners of the default sweep, each under its three reward weightings."""
    budget_cpu_s: float = 20.0
    checkpoints: int = 10
    validation_streams: int = 12
    streams: int = 30
    """On which the chosen policies are judged."""
    seed: int = 92117
    """Of those streams."""
    json: ResultFile | None = None
    """Where to write the rows, after every run; runs that it has already are not repeated."""


class Cell:
    """One scenario: the rule that all begin at, what PPO is told, and the streams that judge."""

    def __init__(self, name: str, args: Args) -> None:
        self.scenario: Scenario = load_scenario(name)
        self.start = started_at_best_rule(self.scenario, SearchConfig(), orders=False)
        source = StreamSource(self.scenario)
        self.validation = Validation(source, args.validation_streams)
        fresh = synthetic_streams(source, args.streams, args.seed)
        self.fresh = Validation(source, args.streams, streams=fresh)
        rule = PolicySearch(self.scenario, self.start).artifact()
        self.rule = self.fresh.rows(rule)
        self.measure()

    def measure(self) -> None:
        """Compile, and find how much of each kind of training a CPU-second allows."""
        search = PolicySearch(self.scenario, self.start)
        search.step()
        self._generation_s, _ = _spent(search.step)
        learner = self._ppo(seed=0, env_steps=10**6).make_training(self.scenario)
        learner.step()
        before = learner.env_steps
        step_s, _ = _spent(learner.step)
        self._steps_per_cpu_s = (learner.env_steps - before) / step_s
        learner.stop()

    def plan(self, trainer: str, seed: int, budget_cpu_s: float) -> Callable[[], Training[Any]]:
        """What builds a learner whose schedules end with the budget."""
        if trainer == SEARCH:
            generations = max(1, round(budget_cpu_s / self._generation_s))
            config = replace(self.start, num_generations=generations)
            return lambda: SearchTraining(PolicySearch(self.scenario, config, seed), 1)
        share = WARM_START_SHARE if trainer == PPO_AFTER_SEARCH else 0.0
        trial = self._ppo(
            seed,
            env_steps=max(1, round((1.0 - share) * budget_cpu_s * self._steps_per_cpu_s)),
            warm_start_generations=round(share * budget_cpu_s / self._generation_s),
        )
        return lambda: trial.make_training(self.scenario)

    def _ppo(
        self, seed: int, env_steps: int, warm_start_generations: int = 0
    ) -> RoutingTrialConfig:
        return RoutingTrialConfig(
            algorithm="ppo",
            scenario=self.scenario.name,
            recipe="linear" if self.scenario.fleet is None else "linear_fleet",
            seed=seed,
            env_steps=env_steps,
            iterations=env_steps,
            warm_start_generations=warm_start_generations,
        )


def _spent(work: Callable[[], Any]) -> tuple[float, Any]:
    started_s = time.process_time()
    found = work()
    return time.process_time() - started_s, found


def train(
    plan: Callable[[], Training[Any]], budget_cpu_s: float, checkpoints: int
) -> tuple[list[PolicyArtifact], float, int]:
    """Spend the budget.

    Returns:
        The policy that steps began at and that at every share of the budget, CPU-seconds spent, and
        environment steps.
    """
    cpu_s, learner = _spent(plan)
    policies: list[PolicyArtifact] = [learner.artifact({}, {})]
    for number in range(1, checkpoints + 1):
        while cpu_s < budget_cpu_s * number / checkpoints:
            cpu_s += _spent(learner.step)[0]
        policies.append(learner.artifact({}, {}))
    env_steps = learner.env_steps
    learner.stop()
    return policies, cpu_s, env_steps


def run(cell: Cell, trainer: str, seed: int, args: Args) -> tuple[dict[str, Any], list[float]]:
    """Train once and judge the candidate that validation chooses: its row, and score by stream."""
    plan = cell.plan(trainer, seed, args.budget_cpu_s)
    policies, cpu_s, env_steps = train(plan, args.budget_cpu_s, args.checkpoints)
    start, *candidates = policies
    validated = [cell.validation(policy)["score"] for policy in candidates]
    chosen = int(np.argmax(validated))
    found = cell.fresh.rows(candidates[chosen])
    begun = float((cell.fresh.rows(start) - cell.rule)[:, SCORE].mean())
    row = {
        "cell": cell.scenario.name,
        "seed": seed,
        "trainer": trainer,
        "cpu_s": cpu_s,
        "env_steps": env_steps,
        "checkpoint": chosen + 1,
        "validation_score": validated[chosen],
        "last_validation_score": validated[-1],
        **dict(zip(NAMES, found.mean(axis=0).tolist(), strict=True)),
        **_beside(found, cell.rule, "rule"),
        "start_delta_score_to_rule": begun,
    }
    return row, found[:, SCORE].tolist()


def _beside(ours: FloatArray, theirs: FloatArray, whose: str) -> dict[str, float]:
    """Differences on equal streams, shape (streams, len(NAMES)) each; above 0 a better score."""
    ours, theirs = ours.mean(axis=0), theirs.mean(axis=0)
    return {
        f"delta_score_to_{whose}": float(ours[SCORE] - theirs[SCORE]),
        f"delta_mean_fraction_to_{whose}": float(ours[MEAN] / theirs[MEAN] - 1.0),
        f"delta_p99_fraction_to_{whose}": float(ours[P99] / theirs[P99] - 1.0),
        f"delta_slo_violation_to_{whose}": float(ours[VIOLATIONS] - theirs[VIOLATIONS]),
    }


def compared(
    rows: Sequence[Mapping[str, Any]], streams: Sequence[Sequence[float]]
) -> Iterator[dict[str, Any]]:
    """One row per cell and trainer: means over seeds, and the score beside search's.

    Args:
        rows: Of all runs.
        streams: Score of each run on every fresh stream.
    """
    scores = {_key(row): np.array(some) for row, some in zip(rows, streams, strict=True)}
    for cell, trainer in dict.fromkeys((row["cell"], row["trainer"]) for row in rows):
        mine = [row for row in rows if (row["cell"], row["trainer"]) == (cell, trainer)]
        pairs = [(scores[_key(row)], scores.get((cell, row["seed"], SEARCH))) for row in mine]
        less = np.array([ours - theirs for ours, theirs in pairs if theirs is not None])
        found = {
            key: float(np.mean([row[key] for row in mine]))
            for key in mine[0]
            if "delta_" in key or key in ("cpu_s", "env_steps", "score")
        }
        row = {"cell": cell, "trainer": trainer, "seeds": len(mine), **found}
        if trainer != SEARCH and len(less):
            over_seeds, over_streams = (t_interval(less.mean(axis=axis)) for axis in (1, 0))
            row |= {
                "delta_score_to_search": over_seeds.estimate,
                "delta_score_to_search_by_seed": " ".join(f"{x:+.4f}" for x in less.mean(axis=1)),
                "seeds_ci_low": over_seeds.low, "seeds_ci_high": over_seeds.high,
                "streams_ci_low": over_streams.low, "streams_ci_high": over_streams.high,
            }  # fmt: skip
            known = over_streams if np.isnan(over_seeds.high) else over_seeds
            row["verdict"] = _verdict(*known)
        yield row


def _key(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["cell"], row["seed"], row["trainer"]


def _verdict(mean: float, low: float, high: float) -> str:
    if mean >= 0.0:
        return "better"
    return "worse" if high < 0.0 else "level"


def table_of(summary: Sequence[Mapping[str, Any]]) -> Table:
    """Lay the comparison out, a row per cell and trainer."""
    table = Table(box=box.SIMPLE_HEAD)
    heads = (
        "cell", "trainer", "seeds", "steps", "CPU s", "score s", "to rule s", "of it begun with",
        "mean %", "p99 %", "violations, points", "score beyond search, s",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, no_wrap=True)
    for row in summary:
        beyond = ""
        if "verdict" in row:
            over = "streams" if np.isnan(row["seeds_ci_high"]) else "seeds"
            keys = ("delta_score_to_search", f"{over}_ci_low", f"{over}_ci_high")
            mean, low, high = (row[key] for key in keys)
            beyond = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}] {row['verdict']}"
        table.add_row(
            row["cell"], row["trainer"], str(row["seeds"]), f"{row['env_steps']:,.0f}",
            f"{row['cpu_s']:.1f}", f"{row['score']:.3f}", f"{row['delta_score_to_rule']:+.3f}",
            f"{row['start_delta_score_to_rule']:+.3f}",
            f"{100 * row['delta_mean_fraction_to_rule']:+.1f}",
            f"{100 * row['delta_p99_fraction_to_rule']:+.1f}",
            f"{100 * row['delta_slo_violation_to_rule']:+.1f}", beyond,
        )  # fmt: skip
    return table


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


def last_beside_start(trial: RoutingTrialConfig, args: Args) -> dict[str, Any]:
    """Train one trial of the sweep; what its last policy adds to the one that it began with."""
    scenario = load_scenario(trial.scenario)
    streams = synthetic_streams(StreamSource(scenario), args.streams, args.seed)
    reward = reward_weights(trial.reward_weights, scenario)

    def measured(policy: PolicyArtifact) -> FloatArray:
        runs = artifact_runs(scenario, streams, policy)
        slo_s = scenario.slo_response_s
        return np.array(
            [(cost_s(run, reward, slo_s), *outcome_row(run.outcomes, slo_s)) for run in runs]
        )

    searched_s, learner = _spent(lambda: trial.make_training(scenario))
    start = measured(learner.artifact({}, {}))
    learned_s = 0.0
    while learner.env_steps < trial.env_steps:
        learned_s += _spent(learner.step)[0]
    more = measured(learner.artifact({}, {})) - start
    env_steps = learner.env_steps
    learner.stop()
    row: dict[str, Any] = {
        "cell": scenario.name, "algorithm": trial.algorithm, "seed": trial.seed,
        "reward_weights": trial.reward_weights, "env_steps": env_steps,
        "start_cpu_s": searched_s, "cpu_s": learned_s,
    }  # fmt: skip
    keys = ("cost_s", "score", "mean_response_s", "p99_response_s", "slo_violation_fraction")
    for column, key in enumerate(keys):
        found = t_interval(more[:, column])
        row |= {
            f"start_{key}": float(start[:, column].mean()), f"delta_{key}": found.estimate,
            f"delta_{key}_ci_low": found.low, f"delta_{key}_ci_high": found.high,
        }  # fmt: skip
    return row


def _compare_with_starts(args: Args) -> None:
    rows = []
    trials = [trial for trial in sweeps.default().trials if trial.algorithm in args.sweep]
    for seed, trial in product(range(args.first_seed, args.first_seed + args.seeds), trials):
        rows.append(last_beside_start(trial.model_copy(update={"seed": seed}), args))
        told = {key: rows[-1][key] for key in ("delta_cost_s", "delta_score", "cpu_s")}
        print(f"{trial.algorithm} {trial.reward_weights} seed {seed}: {told}", file=sys.stderr)
        if args.json is not None:
            write_result(args.json, command_line(), args.seed, rows)
    table = Table(box=box.SIMPLE_HEAD)
    heads = (
        "algorithm", "reward", "not above the start", "cost, 0.01 s", "over seeds", "score, 0.01 s",
        "mean %", "p99 %", "violations, points", "CPU s",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, no_wrap=True)
    for kind in dict.fromkeys((row["algorithm"], row["reward_weights"]) for row in rows):
        mine = [row for row in rows if (row["algorithm"], row["reward_weights"]) == kind]
        costs = [100 * row["delta_cost_s"] for row in mine]
        over_seeds = t_interval(costs)

        def mean(key: str, over: str = "", mine: list[dict[str, Any]] = mine) -> float:
            return 100 * float(np.mean([row[key] / (row[over] if over else 1.0) for row in mine]))

        table.add_row(
            *kind, f"{sum(cost <= 0.0 for cost in costs)} of {len(costs)}",
            f"{over_seeds.estimate:+.2f}",
            "-" if np.isnan(over_seeds.low) else f"[{over_seeds.low:+.2f}, {over_seeds.high:+.2f}]",
            f"{mean('delta_score'):+.2f}",
            f"{mean('delta_mean_response_s', 'start_mean_response_s'):+.2f}",
            f"{mean('delta_p99_response_s', 'start_p99_response_s'):+.2f}",
            f"{mean('delta_slo_violation_fraction'):+.2f}", f"{mean('cpu_s') / 100:.0f}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 180, highlight=False).print(table)


def main(args: Args) -> None:
    """Train what is missing, write after every run, and print the table."""
    torch.set_num_threads(1)
    envs.register()
    # RLlib wants a Ray; nothing runs in it.
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    try:
        (_compare_with_starts if args.sweep else _compare)(args)
    finally:
        ray.shutdown()


def _compare(args: Args) -> None:
    rows: list[dict[str, Any]] = []
    streams: list[list[float]] = []
    if args.json is not None and args.json.exists():
        known = json.loads(args.json.read_text(encoding="utf-8"))
        rows, streams = known["rows"], known["stream_scores"]
    done = {_key(row) for row in rows}
    cells = {name: Cell(name, args) for name in args.scenario}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    runs = product(seeds, cells.items(), args.trainers)
    for seed, (name, cell), trainer in runs:
        if (name, seed, trainer) in done:
            continue
        row, scores = run(cell, trainer, seed, args)
        rows.append(row)
        streams.append(scores)
        told = {key: row[key] for key in ("cpu_s", "env_steps", "delta_score_to_rule")}
        print(f"{name} seed {seed} {trainer}: {told}", file=sys.stderr)
        if args.json is not None:
            more = {"stream_scores": streams, "cells": list(compared(rows, streams))}
            write_result(args.json, command_line(), args.seed, rows, **more)
    width = None if sys.stdout.isatty() else 180
    summary = list(compared(rows, streams))
    Console(width=width, highlight=False).print(table_of(summary))


if __name__ == "__main__":
    main(tyro.cli(Args))

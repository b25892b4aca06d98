"""The paper's tables, cell by cell: one training or one rule, judged on the same episodes.

Source: Abbaraju, "Intelligent Load Balancing Using RL for Heterogeneous LLM Inference Systems",
Tables I and II. Ours: the same agents on `poisson_085`, and the ablations of the reward.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import ray

from tokenyard.problem import Runner
from tokenyard.provenance import git_sha
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.evaluation import summarise
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    held_out_streams,
    synthetic_streams,
)
from tune_configs import routing
from tune_configs.experiment import ENV_STEPS
from tune_configs.tuner import start_ray

TABLES = {
    "I": routing.paper,
    "II": routing.paper_high_load,
    "poisson_085": routing.paper_poisson,
    "ablation": routing.ablation,
}
BASELINES = (
    "round_robin",
    "least_connections",
    "least_loaded",
    "weighted_least_connections",
    "sed",
    "sed_dump",
    "champion",
)
"""Rules of the paper, rules of ours, and the policy that ships for its scenario."""
NUM_EPISODES = 5
RouterRunner = Runner[Scenario, StreamSet, Run]
MEASURES = ("reward", "mean_response_s", "mean_queue_length", "slo_violation_fraction")
CURVE_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Moments of a training that its learning curve is printed at: shares of its length."""
CURVE_KEYS = (
    "train/reward_per_request", "eval/score", "eval/mean_response_s", "eval/slo_violation_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class TableEntry:
    """One training, or one rule: what adds lines to the CSV together."""

    table: str
    policy: str
    reward_weights: str
    training_seed: int | None
    scenario: str
    trial: dict[str, Any] | None
    """What is trained; None for a rule."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """First four columns of the cell's lines: table, policy, reward weights, training seed."""
        seed = "" if self.training_seed is None else str(self.training_seed)
        return self.table, self.policy, self.reward_weights, seed


def cells(tables: Sequence[str]) -> Iterator[TableEntry]:
    """All lines there should be: rules first, since they take no training."""
    for table in tables:
        experiment = TABLES[table]()
        if table != "ablation":
            for name in BASELINES:
                yield TableEntry(table, name, "", None, experiment.scenario, None)
    for table in tables:
        experiment = TABLES[table]()
        for trial in experiment.designed_trials(seed=0):
            algorithm, weights, seed = trial["algorithm"], trial["reward_weights"], trial["seed"]
            yield TableEntry(table, algorithm, weights, seed, experiment.scenario, trial)


def run_cell(cell: TableEntry, folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train what there is to train; return its learning curve and its episodes, as CSV lines."""
    head = dict(zip(("table", "policy", "reward_weights", "training_seed"), cell.key, strict=True))
    started = time.perf_counter()
    curve: list[dict[str, Any]] = []
    if cell.trial is None:
        run = PROBLEM.candidate(load_scenario(cell.scenario), cell.policy).run
    else:
        run, curve = train(cell.trial, Path(folder) / f"{'-'.join(cell.key)}.npz")
    wall_s = round(time.perf_counter() - started, 1)
    env_steps = curve[-1]["env_steps"] if curve else ""
    made = {"env_steps": env_steps, "wall_s": wall_s, "git_sha": git_sha()[:12]}
    episodes = [{**head, **episode, **made} for episode in judge(cell.scenario, run)]
    return [{**head, **point} for point in curve], episodes


def train(trial: dict[str, Any], path: Path) -> tuple[RouterRunner, list[dict[str, Any]]]:
    """Train in this process to the trial's budget; the last policy counts, as in the paper."""
    # The paper's recipe is about what a library does as it comes.
    stock = {"num_env_runners": 0, "implementation": "rllib_stock"}
    trainer = routing.RoutingTrial({**trial, **stock})
    curve: list[dict[str, Any]] = []
    try:
        while not curve or curve[-1]["env_steps"] < trial["env_steps"]:
            result = trainer.train()
            point = {key.partition("/")[2]: result.get(key, "") for key in CURVE_KEYS}
            curve.append({"env_steps": int(result[ENV_STEPS]), **point})
        artifact = trainer.artifact()
        assert isinstance(artifact, PolicyArtifact)
    finally:
        trainer.stop()
    artifact.save(path)
    return PROBLEM.trained(artifact), curve


def judge(scenario_name: str, run: RouterRunner) -> Iterator[dict[str, Any]]:
    """Measure a policy on fresh synthetic episodes, and on the recorded one if there is one."""
    scenario = load_scenario(scenario_name)
    source = StreamSource(scenario)
    sets: list[StreamSet | None] = [
        synthetic_streams(source, NUM_EPISODES, seed=0, purpose="evaluation"),
        held_out_streams(source),
    ]
    for streams in sets:
        if streams is not None:
            origin = "recorded" if streams.bootstrap else "synthetic"
            for episode, result in enumerate(run(scenario, streams, 0)):
                yield {"origin": origin, "episode": episode, **summarise(scenario, result)}


def finished(out: Path) -> set[tuple[str, ...]]:
    """Keys of the cells in the CSV."""
    if not out.exists():
        return set()
    with out.open(newline="", encoding="utf-8") as file:
        return {
            (line["table"], line["policy"], line["reward_weights"], line["training_seed"])
            for line in csv.DictReader(file)
        }


def run_cells(
    left: Sequence[TableEntry],
    out: Path,
    policies: Path,
    jobs: int,
    tell: Callable[[TableEntry, int], None],
) -> None:
    """Work the cells off, `jobs` at a time; each is written as a whole when it is done.

    Args:
        left: What is not in the CSV yet.
        out: The CSV; learning curves go beside it.
        policies: Folder for the trained policies.
        jobs: Trainings at a time, one core each.
        tell: Is told of every cell that is done, and how many are left.
    """
    warm_up = routing.default().warm_up
    assert warm_up is not None
    warm_up()
    policies.mkdir(parents=True, exist_ok=True)
    start_ray(jobs)
    # A worker per cell: nothing of one training can reach the next.
    remote = ray.remote(num_cpus=1, max_calls=1)(run_cell)
    folder = str(policies.resolve())
    pending = {remote.remote(cell, folder): cell for cell in left}
    while pending:
        (ready,), _ = ray.wait(list(pending), num_returns=1)
        cell = pending.pop(ready)
        curve, episodes = ray.get(ready)
        append(curves_path(out), curve)
        append(out, episodes)
        tell(cell, len(pending))
    ray.shutdown()


def curves_path(out: Path) -> Path:
    """Where the learning curves of a CSV go."""
    return out.with_name(f"{out.stem}-curves.csv")


def append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add lines to a CSV in one write, with its header when it is new."""
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = pd.DataFrame(lines).to_csv(index=False, header=not path.exists(), float_format="%.6g")
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def summary(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Mean and standard deviation over training seeds and episodes, one row per printed row."""
    rows = []
    keys = ["table", "origin", "policy", "reward_weights"]
    for key, group in frame.groupby(keys, sort=False, dropna=False):
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        row["training_seeds"] = int(group["training_seed"].nunique())
        row["episodes"] = len(group)
        for measure in MEASURES:
            row[measure] = float(group[measure].mean())
            row[f"{measure}_std"] = float(group[measure].std())
        rows.append(row)
    return rows


def curve_summary(curves: pd.DataFrame) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each agent's name and its reward per request at five moments of its training."""
    for key, group in curves.groupby(["table", "policy", "reward_weights"], sort=False):
        seeds = [curve.sort_values("env_steps") for _, curve in group.groupby("training_seed")]
        cells = []
        for share in CURVE_SHARES:
            at = [curve.iloc[round(share * len(curve)) - 1] for curve in seeds]
            earned = pd.Series([point["reward_per_request"] for point in at])
            cells.append(
                f"{at[0]['env_steps'] / 1000:.0f}k: {earned.mean():.2f}±{earned.std():.2f}"
            )
        yield [str(part) for part in key], cells

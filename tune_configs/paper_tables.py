"""The paper's tables, cell by cell: one training or one rule, judged on the same episodes.

Source: Abbaraju, "Intelligent Load Balancing Using RL for Heterogeneous LLM Inference Systems",
Tables I and II. Ours: the same agents on `poisson_085`, and the ablations of the reward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
)
NUM_EPISODES = 5
RouterRunner = Runner[Scenario, StreamSet, Run]
CURVE_KEYS = ("reward_per_request", "score", "mean_response_s", "slo_violation_fraction")


@dataclass(frozen=True)
class Cell:
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


def cells(tables: Sequence[str]) -> Iterator[Cell]:
    """All lines there should be: rules first, since they take no training."""
    for table in tables:
        experiment = TABLES[table]()
        if table != "ablation":
            for name in BASELINES:
                yield Cell(table, name, "", None, experiment.scenario, None)
    for table in tables:
        experiment = TABLES[table]()
        for trial in experiment.designed_trials(seed=0):
            algorithm, weights, seed = trial["algorithm"], trial["reward_weights"], trial["seed"]
            yield Cell(table, algorithm, weights, seed, experiment.scenario, trial)


def run_cell(cell: Cell, folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
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
            point = {key: result.get(key, "") for key in CURVE_KEYS}
            curve.append({"env_steps": int(result[ENV_STEPS]), **point})
        artifact = trainer.artifact()
        assert isinstance(artifact, PolicyArtifact)
    finally:
        trainer.stop()
    artifact.save(path)
    return PROBLEM.trained(artifact), curve


def judge(scenario_name: str, run: RouterRunner) -> Iterator[dict[str, Any]]:
    """Measure a policy on fresh synthetic episodes, and on the recorded one where it is there."""
    scenario = load_scenario(scenario_name)
    source = StreamSource(scenario)
    sets: list[StreamSet | None] = [
        synthetic_streams(source, NUM_EPISODES, seed=0, purpose="evaluation"),
        held_out_streams(source),
    ]
    for streams in sets:
        if streams is not None:
            origin = "recorded" if streams.bootstrap else "synthetic"
            for episode, one in enumerate(run(scenario, streams, 0)):
                yield {"origin": origin, "episode": episode, **summarise(scenario, one)}

"""The paper's three algorithms under three readings of its environment, beside the optimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from tokenyard.allocation.paper import simulator as paper
from tokenyard.allocation.paper.decision_quality import decision_quality, one_vs_rest_roc
from tokenyard.problem import Row
from tokenyard.types import FloatArray, IntArray

LEARNERS: tuple[paper.Update, ...] = get_args(paper.Update)
MEASURES = (
    "mean_reward", "accuracy", "state_accuracy", "tie_accuracy", "precision", "recall", "f1",
    "regret", "roc_auc",
)  # fmt: skip


@dataclass(frozen=True)
class PaperStudy:
    """Run the paper's three algorithms under three readings of its environment."""

    seeds: int = 10
    """Data sets and trainings."""
    passes: int = 5
    """Passes over the 30 days."""
    bins: Literal["uniform", "quantile"] = "uniform"
    of_maxima: bool = False
    """The reward of section 2.3 in place of that of section 3."""


Scored = tuple[IntArray, FloatArray]
"""Action per state, and action scores."""


def policies(table: paper.LiteralTable, passes: int, seed: int) -> dict[str, Scored]:
    """Learn or compute every policy of one data set."""
    config = paper.LearningConfig(passes=passes)
    by_policy: dict[str, Scored] = {}
    for update in LEARNERS:
        q, _ = paper.learn(table, update, config, seed)
        by_policy[update] = (q.argmax(axis=1), q)
    rng = np.random.default_rng(seed)
    fixed = paper.fixed_policy()
    static = np.full(paper.NUM_STATES, int(table.rewards.mean(axis=0).argmax()))
    optimal = paper.exact_values(table, config.gamma)
    drawn = rng.integers(0, paper.NUM_ACTIONS, paper.NUM_STATES)
    for name, policy in (("fixed", fixed), ("random_table", drawn), ("best_static", static)):
        by_policy[name] = (policy, np.eye(paper.NUM_ACTIONS)[policy])
    by_policy["oracle"] = (optimal.argmax(axis=1), optimal)
    return by_policy


def measure(table: paper.LiteralTable, scored: Scored, optimal: FloatArray) -> dict[str, float]:
    """Return all measures of one policy on one data set."""
    policy, scores = scored
    quality = decision_quality(policy, optimal, table.states)
    _, _, area = one_vs_rest_roc(scores, optimal.argmax(axis=1), table.states)
    values = {name: getattr(quality, name) for name in MEASURES[1:-1]}
    return {"mean_reward": paper.mean_reward(table, policy), **values, "roc_auc": area}


def run_study(study: PaperStudy) -> list[Row]:
    """Return each measure's mean and standard deviation over seeds, by reading and policy."""
    rows = []
    weights = paper.LiteralWeights(of_maxima=study.of_maxima)
    for reading in get_args(paper.Reading):
        values: dict[str, list[dict[str, float]]] = {}
        for seed in range(study.seeds):
            table = paper.literal_table(reading, weights, study.bins, seed)
            optimal = paper.exact_values(table)
            for name, scored in policies(table, study.passes, seed).items():
                values.setdefault(name, []).append(measure(table, scored, optimal))
        for name, per_seed in values.items():
            row: Row = {"reading": reading, "policy": name, "seeds": study.seeds}
            for key in MEASURES:
                row[key] = float(np.mean([measured[key] for measured in per_seed]))
                row[f"{key}_std"] = float(np.std([measured[key] for measured in per_seed]))
            rows.append(row)
    return rows

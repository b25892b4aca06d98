"""Rounds of rollouts that improve a policy, each judged: how champions with a network are made.

Each round plays the present policy, tries out every replica at some of its decisions over the
same next arrivals, and learns which choices turned out cheaper (`tokenyard.rl.routing.rollouts`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenyard.artifact import NoChampionError
from tokenyard.provenance import lineage
from tokenyard.rl.routing.rollouts import RolloutConfig, RolloutImprovement
from tokenyard.routing.artifact import PolicyArtifact, lineage_of, resolve_champion
from tokenyard.routing.choice import Judge, recorded
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.simulator.streams import StreamSource


@dataclass(frozen=True)
class ImprovementConfig(RolloutConfig):
    """Rollouts whose price of a slow response follows from the tail of the best rule."""

    violation_s: float = 1.0
    """Seconds that an SLO violation costs beside the response time."""
    slow_s: float = 5.0
    """Seconds that a response slower than `slow_share` of the best rule's 99th percentile costs
    beside its length."""
    slow_share: float = 0.92


@dataclass(frozen=True)
class Round:
    """The policy after a round."""

    number: int
    """0 before the first."""
    row: dict[str, float]
    """What it does on validation streams, beside the best rule."""
    policy: PolicyArtifact
    changed_fraction: float
    """Share of the round's decisions that it would now take otherwise."""
    wall_s: float


def hand_rule(source: StreamSource) -> PolicyArtifact:
    """Tuned marginal delay, where the scenario has tuned rules; else as it is."""
    try:
        weights = load_tuned(source.scenario.name).fleet.marginal_weights
    except ValueError:
        weights = (0.0,) * NUM_MARGINAL_WEIGHTS
    return RolloutImprovement(source.scenario, RolloutConfig(start=weights)).artifact()


def start_policy(source: StreamSource, path: Path | None = None) -> PolicyArtifact:
    """The policy to be improved; the hand rule, where the scenario has no champion of its own.

    Args:
        source: Traffic of the scenario.
        path: Policy file in place of the champion.

    Raises:
        ValueError: It is not one of weights on added delays.
    """
    try:
        artifact, where = resolve_champion("routing", source.scenario.name, path=path)
    except NoChampionError:
        return hand_rule(source)
    if artifact.metadata.kind not in ("marginal", "corrected"):
        raise ValueError(f"{where} is {artifact.metadata.kind}; start from a `marginal` policy")
    return artifact


def improve(
    source: StreamSource,
    start: PolicyArtifact,
    config: ImprovementConfig,
    judge: Judge,
    rounds: int,
    seed: int = 0,
    fresh: bool = False,
) -> Iterator[Round]:
    """Yield the policy to begin with, and that of every round.

    Args:
        source: Traffic of the scenario, which has a fleet.
        start: Whose weights are corrected, and whose network is improved where it has one.
        config: Its `start` and `slow_after_s` follow from the other arguments.
        judge: Sets every round beside the rules.
        rounds: How many.
        seed: Of traffic and network.
        fresh: Take the weights alone, where `start` has a network.
    """
    torch.set_num_threads(1)
    weights = tuple(start.arrays["weights"].tolist())
    slow_after_s = config.slow_share * judge.bar_p99_s
    played = replace(config, start=weights, slow_after_s=slow_after_s)
    improvement = RolloutImprovement(source.scenario, played, seed)
    if start.metadata.kind == "corrected" and not fresh:
        improvement.go_on_from(start)
    made_by = {**lineage(), **lineage_of(source.scenario), "start": start.sha256}
    for number in range(rounds + 1):
        started = time.perf_counter()
        found = improvement.step() if number else {"changed_fraction": 0.0}
        policy = improvement.artifact()
        row = judge(policy)
        described = policy.described(recorded(row), {**made_by, "round": str(number)})
        wall_s = time.perf_counter() - started
        yield Round(number, row, described, found["changed_fraction"], wall_s)

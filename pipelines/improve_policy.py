"""Improve the policy of a fleet by rollouts and keep the best round on validation.

Each round plays the present policy, tries out every replica at some of its decisions over the
same next arrivals, and learns which choices turned out cheaper (`tokenyard.rl.routing.rollouts`).
This is how the shipped champions of kind `corrected` are made:

    python pipelines/improve_policy.py --scenario azure_code_mixed_gpus --out policies
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from tokenyard.provenance import git_sha, write_result
from tokenyard.rl.routing.rollouts import RolloutConfig, RolloutImprovement
from tokenyard.routing.artifact import PolicyArtifact, lineage_of, resolve_champion
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.routing.validation import REFUSED, PairedScore, choose, worst_p99

NUM_VALIDATION_STREAMS = 90


@dataclass(frozen=True)
class Args:
    """Improve a fleet's policy by rollouts and export the best round."""

    scenario: str = "azure_code_mixed_gpus"
    """Name or YAML path, with a fleet."""
    out: Path | None = None
    """Folder for <scenario>.npz, and for rounds/<scenario>-<round>.npz while it goes on; nothing is
    written without it."""
    start: Path | None = None
    """Policy file whose weights are corrected, and whose network is improved where it has one;
    None: the scenario's champion, or tuned marginal delay where it has none."""
    fresh: bool = False
    """Start from the weights alone, where the policy to start from has a network."""
    rounds: int = 30
    streams: int = 20
    """Streams per round, of 5000 requests each."""
    every: int = 8
    """Decisions from one at which all replicas are tried out to the next."""
    horizon: int = 200
    """Arrivals over which each choice is played on."""
    decide_anew: bool = False
    """Let the policy decide anew in every future; else those who come later stay where they went.
    For the first rounds of a policy that is still far from good, with a short horizon."""
    violation_s: float = 1.0
    """Seconds that an SLO violation costs beside the response time."""
    slow_s: float = 5.0
    """Seconds that a response slower than `slow_share` of the hand rule's 99th percentile costs
    beside its length."""
    slow_share: float = 0.92
    learning_rate: float = RolloutConfig.learning_rate
    clip_slos: float = RolloutConfig.clip_slos
    """Costs of choices differ by no more than so many SLOs from the one that was taken."""
    load_range: tuple[float, float] = (1.0, 1.0)
    """Range of factors on the scenario's arrival rate."""
    p99_margin: float = 0.0
    """How far p99 may exceed that of the tuned hand rule, as a fraction: at the upper end of its
    95 % interval over validation streams, and on the recorded training part where found."""
    seed: int = 0
    jobs: int = 1
    """Processes."""
    json: Path | None = None
    """Where to write the rows."""


def hand_rule(source: StreamSource) -> PolicyArtifact:
    """Tuned marginal delay, where the scenario has tuned rules; else as it is."""
    try:
        weights = load_tuned(source.scenario.name).fleet.marginal_weights
    except ValueError:
        weights = (0.0,) * NUM_MARGINAL_WEIGHTS
    return RolloutImprovement(source.scenario, RolloutConfig(start=weights)).artifact()


def start_policy(args: Args, source: StreamSource) -> PolicyArtifact:
    """The policy to be improved; the hand rule, where the scenario has no champion of its own.

    Raises:
        ValueError: It is not one of weights on added delays.
    """
    artifact, where = resolve_champion("routing", source.scenario.name, path=args.start)
    if artifact.metadata.kind == "generic" and args.start is None:
        return hand_rule(source)
    if artifact.metadata.kind not in ("marginal", "corrected"):
        raise ValueError(f"{where} is {artifact.metadata.kind}; start from a `marginal` policy")
    return artifact


def report(rows: list[dict[str, float]], best: int | None) -> None:
    table = Table("round", "mean, s", "against the rule", "p99", "at most", "violations, points")
    for index, row in enumerate(rows):
        table.add_row(
            str(index),
            f"{row['mean_response_s']:.3f}",
            f"{row['delta_mean_fraction']:+.1%}",
            f"{row['delta_p99_fraction']:+.1%}",
            f"{worst_p99(row):+.1%}",
            f"{row['delta_slo_violation']:+.2%}",
            style="bold" if index == best else "",
        )
    Console().print(table)


def save(policy: PolicyArtifact, folder: Path | None, suffix: str = "") -> Path | None:
    """Write a policy into a folder, where there is one to write to."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{policy.metadata.scenario}{suffix}.npz"
    policy.save(path)
    return path


def main(args: Args) -> None:
    torch.set_num_threads(1)
    scenario = load_scenario(args.scenario)
    source = StreamSource(scenario)
    start = start_policy(args, source)
    judge = PairedScore(source, hand_rule(source), NUM_VALIDATION_STREAMS)
    improvement = RolloutImprovement(
        scenario,
        RolloutConfig(
            start=tuple(start.arrays["weights"].tolist()),
            violation_s=args.violation_s,
            slow_s=args.slow_s,
            slow_after_s=args.slow_share * judge.rule_p99_s,
            streams_per_round=args.streams,
            every=args.every,
            horizon=args.horizon,
            decide_anew=args.decide_anew,
            clip_slos=args.clip_slos,
            learning_rate=args.learning_rate,
            load_factor=args.load_range,
            jobs=args.jobs,
        ),
        args.seed,
    )
    if start.metadata.kind == "corrected" and not args.fresh:
        improvement.go_on_from(start)
    lineage = {"command": command_line(), "git_sha": git_sha(), **lineage_of(scenario)}
    lineage["start"] = start.sha256
    policies: list[PolicyArtifact] = []
    rows: list[dict[str, float]] = []

    def judged() -> None:
        policy = improvement.artifact()
        rows.append(judge(policy))
        policies.append(policy.described(rows[-1], {**lineage, "round": str(improvement.round)}))
        save(policies[-1], args.out and args.out / "rounds", f"-{improvement.round}")

    judged()
    for number in range(1, args.rounds + 1):
        started = time.perf_counter()
        found = improvement.step()
        judged()
        print(
            f"round {number}: mean {rows[-1]['delta_mean_fraction']:+.1%}, "
            f"p99 {rows[-1]['delta_p99_fraction']:+.1%}, "
            f"violations {rows[-1]['slo_violation_fraction']:.2%}, "
            f"{found['changed_fraction']:.0%} of decisions changed, "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )
    best = choose(rows, args.violation_s, args.p99_margin)
    report(rows, best)
    if best is None:
        raise SystemExit(f"improve_policy: {REFUSED}")
    path = save(policies[best], args.out)
    if path is not None:
        print(f"wrote {path} ({policies[best].sha256})")
    if args.json is not None:
        write_result(args.json, command_line(), args.seed, [dict(row) for row in rows])


def command_line() -> str:
    return shlex.join(["python", *sys.argv])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""Who becomes champion: what beats every rival on fresh streams, and loses at no gate.

A sweep asks here before the alias moves. `pipelines/train.py --scenario`, which makes the artifacts
that ship, asks the same gate. A canary is promoted by a person, on what live requests have shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenyard.artifact import NoChampionError, RegistryLookup
from tokenyard.evaluation import Map, run_all
from tokenyard.problem import A, Candidate, D, Problem, R, Row, S
from tokenyard.statistics.intervals import Interval


@dataclass(frozen=True)
class Gain:
    """What a policy's score has over a rival's."""

    rival: str
    source: str
    """Where the rival comes from, in words."""
    interval: Interval
    """Mean paired difference of the scores, in the score's unit; above 0, the policy is better."""

    @property
    def won(self) -> bool:
        """Whether the whole 95 % interval lies above zero."""
        return self.interval.low > 0.0

    @property
    def row(self) -> Row:
        """As a row of a table."""
        low, high = self.interval.low, self.interval.high
        return {
            "rival": self.rival, "source": self.source, "gain": self.interval.estimate,
            "gain_ci_low": low, "gain_ci_high": high, "won": int(self.won),
        }  # fmt: skip


@dataclass(frozen=True)
class PromotionVerdict:
    """Whether a policy may be champion, and by how much it won or lost."""

    gains: tuple[Gain, ...]
    """Over every rival, on the same streams."""
    gate: tuple[Row, ...]
    """Rows of `Problem.gate`: what it was compared with besides, and whether it `loses`."""

    @property
    def losses(self) -> list[Row]:
        """Rows of the gate in which it loses."""
        return [row for row in self.gate if row["loses"]]

    @property
    def rows(self) -> list[Row]:
        """Gains and what the gate found, as rows of one table whose keys differ."""
        rows = [gain.row for gain in self.gains]
        for row in self.gate:
            deltas = {key: value for key, value in row.items() if key.startswith("delta_")}
            rows.append(
                {"rival": row["baseline"], "part": row["part"], **deltas, "loses": row["loses"]}
            )
        return rows

    @property
    def accepted(self) -> bool:
        """Whether it beats every rival and loses nowhere at the gate."""
        return all(gain.won for gain in self.gains) and not self.losses

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        if self.accepted:
            return f"it beats {' and '.join(gain.rival for gain in self.gains)}"
        beaten_by = [gain.rival for gain in self.gains if not gain.won]
        reasons = [f"it does not beat {' and '.join(beaten_by)}"] if beaten_by else []
        lost = [f"{row['baseline']} ({row['part']})" for row in self.losses]
        reasons += [f"it loses to {', '.join(lost)} at the gate"] if lost else []
        return "; ".join(reasons)


def rivals(
    problem: Problem[S, A, D, R], scenario: S, rule: str, registry: RegistryLookup | None = None
) -> list[Candidate[S, D, R]]:
    """What a new champion has to beat: what `champion` means now, and the best tuned rule.

    `rule` stands for the latter where none was tuned.

    Raises:
        ValueError: The rule is unknown, or the present champion cannot be read.
    """
    best_rule = problem.candidate(scenario, problem.best_tuned_rule(scenario) or rule)
    try:
        champion = problem.candidate(scenario, problem.learned, registry)
    except NoChampionError:
        return [best_rule]
    # Where no policy is champion a rule decides as such, mostly this one.
    return [best_rule] if champion.rule == best_rule.name else [champion, best_rule]


def judge_candidate(
    problem: Problem[S, A, D, R],
    scenario: S,
    artifact: A,
    against: Sequence[Candidate[S, D, R]],
    gate: Sequence[Row],
    streams: D,
    seed: int,
    mapped: Map = map,
) -> PromotionVerdict:
    """Set a policy against its rivals on fresh streams, with the rows of `Problem.gate` for it."""
    policies = {f"rival {number}": rival.run for number, rival in enumerate(against)}
    policies["candidate"] = problem.trained(artifact)
    *theirs, ours = run_all(policies, scenario, streams, seed, mapped).values()
    gains = [
        Gain(rival.name, rival.source, gain_over(problem, scenario, streams, ours, runs))
        for rival, runs in zip(against, theirs, strict=True)
    ]
    return PromotionVerdict(tuple(gains), tuple(gate))


def gain_over(
    problem: Problem[S, A, D, R], scenario: S, streams: D, ours: Sequence[R], theirs: Sequence[R]
) -> Interval:
    """By how much the score of one policy's runs exceeds another's, with its 95 % interval."""
    runs = {"ours": ours, "theirs": theirs}
    samples = problem.samples(scenario, streams, runs, "theirs")
    key, sign = problem.score.key, problem.score.sign
    better, worse = ("ours", "theirs") if sign > 0 else ("theirs", "ours")
    return samples[better].difference(samples[worse], key, relative=False)

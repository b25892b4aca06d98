"""The law: on clusters that nobody searched on, a policy is not worse than the best tuned rule.

Every draw is a cluster and its traffic (`drawn_clusters.draw_wide`). The rival is the rule with the
best score (`metrics.score`) of all placements, orders and knobs that the draw's servers have, found
on one half of the draw's streams. Policies are judged beside it on the other half. A policy is
worse where the 95 % interval of its paired difference lies wholly beyond `WORSE`, in the mean, the
99th percentile or the SLO violations. Policies are rules with an order, policy files that work on
clusters of any size, and `tuned`: the rule that is chosen as the rival is, by playing all of them,
but on other streams, each of which stands for a thousand requests of one's own log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from tokenyard.problem import Row
from tokenyard.routing.artifact import KINDS, PolicyArtifact
from tokenyard.routing.drawn_clusters import draw_wide
from tokenyard.routing.rule_replay import Replay
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator import Decide
from tokenyard.routing.validation import NAMES
from tokenyard.statistics.intervals import t_interval
from tokenyard.types import FloatArray

WORSE = 0.02
"""Difference beyond which an interval counts: a share of the rival's mean or p99, and a share of
all requests of SLO violations."""
FAR_WORSE = 0.10
"""Beyond which no interval may lie."""
MOST_WORSE = 0.05
"""Share of draws that may be worse."""
STREAMS = 5
"""Streams of each half."""
_LAW = 21_000
"""Keeps the law's random numbers apart from those of all searches."""
_, _MEAN, _P99, _VIOLATIONS = range(len(NAMES))
TUNED, BEST = "tuned", "best"
"""The choice and the best score on one stream of its own; `tuned:5`: on five; `tuned@0.5`: at half
of the load."""
MEASURES = {"mean": _MEAN, "p99": _P99, "slo": _VIOLATIONS}


def law_rng(seed: int, draw: int) -> np.random.Generator:
    """Generator of one draw."""
    return np.random.default_rng([_LAW, seed, draw])


def play(draw: int, policies: Sequence[str], seed: int = 0, streams: int = STREAMS) -> list[Row]:
    """Play one draw: find its rival, and compare policies with it.

    Args:
        draw: Number of the draw.
        policies: `TUNED` or `BEST` with what may follow, policy files (.npz), or rules that
            compiled code decides for (`Replay.decide`).
        seed: Seed of all draws.
        streams: Streams of each half.

    Returns:
        One row per policy for such servers: `draw`, `cell`, `policy`, `rival`, both results,
        paired differences with 95 % intervals, `worse` and `far_worse`.

    Raises:
        ValueError: There are too few streams for an interval, or a policy is not known.
    """
    if streams < STREAMS:
        raise ValueError(f"{streams} streams have no interval: give at least {STREAMS}")
    rng = law_rng(seed, draw)
    cluster = draw_wide(rng)
    scenario = cluster.scenario
    choosing, judging = (Replay(scenario, cluster.streams(streams, each)) for each in rng.spawn(2))
    own_rng = rng.spawn(1)[0]

    @cache
    def own(which: str) -> Replay:
        # The copy lets all tuned policies see the same requests.
        return Replay(scenario, cluster.streams(*_own_streams(which, deepcopy(own_rng))))

    rival = choosing.best_rules()[0]
    theirs = judging.rows(choosing.decide(rival))
    rows = []
    for name in policies:
        rule = name
        decide: Decide | None
        if name.startswith((TUNED, BEST)):
            replay = own(name.removeprefix(TUNED).removeprefix(BEST))
            rule = replay.choice() if name.startswith(TUNED) else replay.best_rules()[0]
            decide = replay.decide(rule)
        elif name.endswith(".npz"):
            decide = _of_file(_artifact(name), scenario)
        else:
            decide = judging.decide(name)
        if decide is None:
            continue
        ours = judging.rows(decide)
        row: Row = {
            "draw": draw, "cell": scenario.name, "policy": name, "rule": rule,
            "rival": rival, "seed": seed, "stream_count": streams,
        }  # fmt: skip
        rows.append(row | compared(ours, theirs))
    return rows


def _own_streams(which: str, rng: np.random.Generator) -> tuple[int, np.random.Generator, float]:
    """Number, generator and load factor of streams of one's own, by what follows `TUNED`."""
    number, _, factor = which.partition("@")
    return int(number.removeprefix(":") or 1), rng, float(factor or 1.0)


def compared(ours: FloatArray, theirs: FloatArray) -> Row:
    """Return paired differences on streams, and whether they break the law.

    Args:
        ours: Measures of a policy, shape (streams, len(NAMES)).
        theirs: Measures of its rival on the same streams.
    """
    row: Row = {}
    beyond = []
    for key, at in MEASURES.items():
        base = 1.0 if at == _VIOLATIONS else float(theirs[:, at].mean())
        interval = t_interval(ours[:, at] - theirs[:, at])
        unit = "violation" if at == _VIOLATIONS else "fraction"
        of = "slo" if at == _VIOLATIONS else key
        row[f"delta_{of}_{unit}"] = interval.estimate / base
        row[f"delta_{of}_ci_low"] = interval.low / base
        row[f"delta_{of}_ci_high"] = interval.high / base
        beyond.append(interval.low / base)
    return row | {
        "mean_response_s": float(ours[:, _MEAN].mean()),
        "p99_response_s": float(ours[:, _P99].mean()),
        "slo_violation_fraction": float(ours[:, _VIOLATIONS].mean()),
        "rival_mean_response_s": float(theirs[:, _MEAN].mean()),
        "worse": int(max(beyond) > WORSE),
        "far_worse": int(max(beyond) > FAR_WORSE),
        "worst_delta_ci_low": float(max(beyond)),
    }


@dataclass(frozen=True)
class LawVerdict:
    """What the law says of one policy."""

    policy: str
    draws: int
    worse: int
    far_worse: int
    by_measure: Mapping[str, int]
    """Draws that are worse in each measure."""
    better: int
    """Draws where an interval of the mean lies wholly below zero and the draw is not worse."""
    median: Mapping[str, float]
    """Of each difference, over draws."""
    mean_of: Mapping[str, float]
    """Mean of each difference, over draws."""

    @property
    def holds(self) -> bool:
        """Whether the law holds."""
        return self.worse <= MOST_WORSE * self.draws and not self.far_worse

    @property
    def row(self) -> Row:
        """One flat row, with `draw` "all"."""
        row: Row = {
            "draw": "all", "policy": self.policy, "draws": self.draws, "worse": self.worse,
            "far_worse": self.far_worse, "better": self.better, "holds": int(self.holds),
        }  # fmt: skip
        for key, number in self.by_measure.items():
            row[f"worse_{key}"] = number
            row[f"median_{key}"] = self.median[key]
            row[f"mean_{key}"] = self.mean_of[key]
        return row


def verdict(rows: Sequence[Row]) -> LawVerdict:
    """Judge one policy by its rows of all draws."""
    deltas = {
        "mean": "delta_mean_fraction", "p99": "delta_p99_fraction", "slo": "delta_slo_violation",
    }  # fmt: skip
    values = {key: np.array([float(row[column]) for row in rows]) for key, column in deltas.items()}
    low = {key: np.array([float(row[f"delta_{key}_ci_low"]) for row in rows]) for key in deltas}
    gains = [float(row["delta_mean_ci_high"]) < 0.0 and not row["worse"] for row in rows]
    return LawVerdict(
        policy=str(rows[0]["policy"]),
        draws=len(rows),
        worse=sum(int(row["worse"]) for row in rows),
        far_worse=sum(int(row["far_worse"]) for row in rows),
        by_measure={key: int((some > WORSE).sum()) for key, some in low.items()},
        better=sum(gains),
        median={key: float(np.median(some)) for key, some in values.items()},
        mean_of={key: float(np.mean(some)) for key, some in values.items()},
    )


def _of_file(artifact: PolicyArtifact, scenario: Scenario) -> Decide | None:
    metadata = artifact.metadata
    if metadata.num_replicas is not None:
        raise ValueError(
            f"the law draws clusters of any size; the policy of {metadata.scenario} decides "
            f"between {metadata.num_replicas} replicas"
        )
    if bool(artifact.needs_engine) != (scenario.fleet is not None):
        return None
    return partial(KINDS[metadata.kind].run, artifact)


@cache
def _artifact(name: str) -> PolicyArtifact:
    return PolicyArtifact.load(Path(name))

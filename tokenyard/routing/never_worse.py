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

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np

from tokenyard.problem import Row
from tokenyard.routing.artifact import DEFAULT, PolicyArtifact, default_rule
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
TUNED = "tuned"
"""The choice on one stream of its own; `tuned:5`: on five."""
DELTAS = {"mean": "delta_mean_fraction", "p99": "delta_p99_fraction", "slo": "delta_slo_violation"}
"""Keys of the differences that are judged."""


def law_rng(seed: int, draw: int) -> np.random.Generator:
    """Generator of one draw."""
    return np.random.default_rng([_LAW, seed, draw])


def play(draw: int, policies: Sequence[str], seed: int = 0, streams: int = STREAMS) -> list[Row]:
    """Play one draw: find its rival, and compare policies with it.

    Args:
        draw: Number of the draw.
        policies: `DEFAULT`, `TUNED` with what may follow, policy files (.npz), or rules that
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
    choosing, judging = (Replay(scenario, cluster.streams(streams, fork)) for fork in rng.spawn(2))
    own_rng = rng.spawn(1)[0]
    rival = choosing.best_rules()[0]
    theirs = judging.rows(choosing.decide(rival))
    rows = []
    for name in policies:
        rule = default_rule(scenario) if name == DEFAULT else name
        decide: Decide | None
        if name.startswith(TUNED):
            number = int(name.removeprefix(TUNED).removeprefix(":") or 1)
            # The copy lets all tuned policies see the same requests.
            replay = Replay(scenario, cluster.streams(number, deepcopy(own_rng)))
            rule = replay.choice()
            decide = replay.decide(rule)
        elif name.endswith(".npz"):
            decide = _of_file(_artifact(name), scenario)
        else:
            decide = judging.decide(rule)
        if decide is None:
            continue
        ours = judging.rows(decide)
        row: Row = {
            "draw": draw, "cell": scenario.name, "policy": name, "rule": rule,
            "rival": rival, "seed": seed, "stream_count": streams,
        }  # fmt: skip
        rows.append(row | compared(ours, theirs))
    return rows


def compared(ours: FloatArray, theirs: FloatArray) -> Row:
    """Return paired differences on streams, and whether they break the law.

    Args:
        ours: Measures of a policy, shape (streams, len(NAMES)).
        theirs: Measures of its rival on the same streams.
    """
    row: Row = {}
    beyond = []
    for (key, delta), at in zip(DELTAS.items(), (_MEAN, _P99, _VIOLATIONS), strict=True):
        base = float(theirs[:, at].mean()) if delta.endswith("_fraction") else 1.0
        interval = t_interval(ours[:, at] - theirs[:, at])
        row[delta] = interval.estimate / base
        row[f"delta_{key}_ci_low"] = interval.low / base
        row[f"delta_{key}_ci_high"] = interval.high / base
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


def verdict(rows: Sequence[Row]) -> Row:
    """Judge one policy by its rows of all draws.

    Returns:
        One row with `draw` "all": draws that are `worse` and `far_worse`; `better`, those that are
        not worse and whose interval of the mean lies wholly below zero; `holds`, whether the law
        does; of every measure the number of draws that are worse in it alone, and median and mean
        of its difference.
    """
    worse, far_worse = (sum(int(row[key]) for row in rows) for key in ("worse", "far_worse"))
    summary: Row = {
        "draw": "all", "policy": rows[0]["policy"], "draws": len(rows), "worse": worse,
        "far_worse": far_worse,
        "better": sum(float(row["delta_mean_ci_high"]) < 0.0 and not row["worse"] for row in rows),
        "holds": int(worse <= MOST_WORSE * len(rows) and not far_worse),
    }  # fmt: skip
    for key, delta in DELTAS.items():
        differences = [float(row[delta]) for row in rows]
        summary[f"worse_{key}"] = sum(float(row[f"delta_{key}_ci_low"]) > WORSE for row in rows)
        summary[f"median_{key}"] = float(np.median(differences))
        summary[f"mean_{key}"] = float(np.mean(differences))
    return summary


def _of_file(artifact: PolicyArtifact, scenario: Scenario) -> Decide | None:
    metadata = artifact.metadata
    if metadata.num_replicas is not None:
        raise ValueError(
            f"the law draws clusters of any size; the policy of {metadata.scenario} decides "
            f"between {metadata.num_replicas} replicas"
        )
    if bool(artifact.needs_engine) != (scenario.fleet is not None):
        return None
    return artifact.decide


@cache
def _artifact(name: str) -> PolicyArtifact:
    return PolicyArtifact.load(Path(name))

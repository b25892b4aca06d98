"""The law: on clusters that nobody searched on, a policy is not worse than the best tuned rule.

Every draw is a cluster and its traffic (`drawn_clusters.draw_wide`). The rival is the rule with the
best score (`metrics.score`) of all placements, orders and knobs that the draw's servers have, found
on one half of the draw's streams. Policies are judged beside it on the other half. A policy is
worse where the 95 % interval of its paired difference lies wholly beyond `WORSE`, in the mean, the
99th percentile or the SLO violations. Policies are rules with an order, policy files that work on
clusters of any size, and `tuned`: the rule that is chosen as the rival is, by playing all of them,
but on one other stream, which stands for a thousand requests of one's own log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from tokenyard.problem import Row
from tokenyard.routing.artifact import KINDS, PolicyArtifact
from tokenyard.routing.drawn_clusters import WideCluster, draw_wide
from tokenyard.routing.policies.order import BETWEEN, IN_ORDER, KNOB, ORDERS
from tokenyard.routing.scenario import UNPAID, Scenario
from tokenyard.routing.scores.order import FIRST_COME
from tokenyard.routing.simulator import Decide, Simulator, make_simulator
from tokenyard.routing.simulator.server_models import ServerModel, order_weights_of, server_model
from tokenyard.routing.validation import NAMES, outcome_row
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
_FIRST_STREAMS, _FINALISTS = 2, 5
"""Streams that every rule is tried on, and how many of the best rules are tried on all."""
_LAW = 21_000
"""Keeps the law's random numbers apart from those of all searches."""
_SCORE, _MEAN, _P99, _VIOLATIONS = range(len(NAMES))
TUNED = "tuned"
"""The best rule on one stream of its own; `tuned@0.5`: at half of the load that it is judged at."""
MEASURES = {"mean": _MEAN, "p99": _P99, "slo": _VIOLATIONS}


def law_rng(seed: int, draw: int) -> np.random.Generator:
    """Generator of one draw."""
    return np.random.default_rng([_LAW, seed, draw])


class Half:
    """Streams of one draw, on which anything may be run."""

    def __init__(
        self, cluster: WideCluster, count: int, rng: np.random.Generator, load_factor: float = 1.0
    ) -> None:
        """Draw `count` streams from `rng`, at a factor on the cluster's load."""
        self._scenario = cluster.scenario
        self._streams = cluster.streams(count, rng, load_factor)
        self._sims = {count: self.simulator(count)}

    def simulator(self, count: int) -> Simulator:
        """One with the first `count` streams loaded."""
        sim = make_simulator(self._scenario, count, len(self._streams[0]), UNPAID)
        for copy, stream in enumerate(self._streams[:count]):
            sim.load(copy, stream)
        return sim

    def rows(self, decide: Decide, count: int) -> FloatArray:
        """What a policy does on the first `count` streams, shape (count, len(NAMES))."""
        if count not in self._sims:
            self._sims[count] = self.simulator(count)
        sim = self._sims[count]
        decide(sim)
        slo_s = self._scenario.slo_response_s
        return np.array([outcome_row(sim.outcomes(copy), slo_s) for copy in range(count)])


def best_rule(half: Half, rules: Mapping[str, Decide], count: int) -> str:
    """Name of the rule of the best mean score.

    Placements are tried first come first served and with the default knob of their orders; the best
    of them with all knobs; and the best rules on all streams.
    """
    few = min(_FIRST_STREAMS, count)
    found: dict[str, float] = {}

    def best(names: Iterable[str], most: int) -> list[str]:
        for name in names:
            if name not in found:
                found[name] = float(half.rows(rules[name], few)[:, _SCORE].mean())
        return sorted(found, key=found.__getitem__, reverse=True)[:most]

    default = f"{KNOB}{ORDERS['sjf'].default:g}"
    leading = best((name for name in rules if BETWEEN not in name or name.endswith(default)), 4)
    placements = {name.partition(BETWEEN)[0] for name in leading}
    all_knobs = (name for name in rules if name.partition(BETWEEN)[0] in placements)
    finalists = best(all_knobs, _FINALISTS)
    return max(finalists, key=lambda name: half.rows(rules[name], count)[:, _SCORE].mean())


def play(draw: int, policies: Sequence[str], seed: int = 0, streams: int = STREAMS) -> list[Row]:
    """Play one draw: find its rival, and judge policies beside it.

    Args:
        draw: Number of the draw.
        policies: `TUNED`, or names that `law_policy` knows.
        seed: Of all draws.
        streams: Of each half.

    Returns:
        One row per policy that is for such servers: `draw`, `cell`, `policy`, `rival`, what both
        do, paired differences with 95 % intervals, `worse` and `far_worse`.

    Raises:
        ValueError: There are too few streams for an interval, or a policy is not known.
    """
    if streams < STREAMS:
        raise ValueError(f"{streams} streams have no interval: give at least {STREAMS}")
    rng = law_rng(seed, draw)
    cluster = draw_wide(rng)
    choosing, judging = (Half(cluster, streams, each) for each in rng.spawn(2))
    own_rng = rng.spawn(1)[0]
    rival, run_rival = tuned(choosing, cluster.scenario, streams)
    theirs = judging.rows(run_rival, streams)
    rows = []
    for name in policies:
        rule = name
        decide: Decide | None
        if name.partition(KNOB)[0] == TUNED:
            # Copied, so that all that are tuned see the same requests.
            own = Half(cluster, 1, deepcopy(own_rng), float(name.partition(KNOB)[2] or 1.0))
            rule, decide = tuned(own, cluster.scenario, 1)
        else:
            decide = law_policy(name, cluster.scenario)
        if decide is None:
            continue
        ours = judging.rows(decide, streams)
        found: Row = {
            "draw": draw, "cell": cluster.scenario.name, "policy": name, "rule": rule,
            "rival": rival, "seed": seed, "stream_count": streams,
        }  # fmt: skip
        rows.append(found | compared(ours, theirs))
    return rows


def tuned(half: Half, scenario: Scenario, count: int) -> tuple[str, Decide]:
    """Name of the best of all rules on a number of streams, and what runs it."""
    rules = server_model(scenario).rule_variants(half.simulator(count))
    name = best_rule(half, rules, count)
    return name, rules[name]


def compared(ours: FloatArray, theirs: FloatArray) -> Row:
    """Paired differences on streams, and whether they break the law.

    Args:
        ours: What a policy does, shape (streams, len(NAMES)).
        theirs: What its rival does on the same streams.
    """
    found: Row = {}
    beyond = []
    for key, at in MEASURES.items():
        base = 1.0 if at == _VIOLATIONS else float(theirs[:, at].mean())
        interval = t_interval(ours[:, at] - theirs[:, at])
        unit = "violation" if at == _VIOLATIONS else "fraction"
        of = "slo" if at == _VIOLATIONS else key
        found[f"delta_{of}_{unit}"] = interval.estimate / base
        found[f"delta_{of}_ci_low"] = interval.low / base
        found[f"delta_{of}_ci_high"] = interval.high / base
        beyond.append(interval.low / base)
    return found | {
        "mean_response_s": float(ours[:, _MEAN].mean()),
        "p99_response_s": float(ours[:, _P99].mean()),
        "slo_violation_fraction": float(ours[:, _VIOLATIONS].mean()),
        "rival_mean_response_s": float(theirs[:, _MEAN].mean()),
        "worse": int(max(beyond) > WORSE),
        "far_worse": int(max(beyond) > FAR_WORSE),
        "worst_delta_ci_low": float(max(beyond)),
    }


@dataclass(frozen=True)
class Verdict:
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
        found: Row = {
            "draw": "all", "policy": self.policy, "draws": self.draws, "worse": self.worse,
            "far_worse": self.far_worse, "better": self.better, "holds": int(self.holds),
        }  # fmt: skip
        for key, number in self.by_measure.items():
            found[f"worse_{key}"] = number
            found[f"median_{key}"] = self.median[key]
            found[f"mean_{key}"] = self.mean_of[key]
        return found


def verdict(rows: Sequence[Row]) -> Verdict:
    """Judge one policy by its rows of all draws."""
    deltas = {
        "mean": "delta_mean_fraction", "p99": "delta_p99_fraction", "slo": "delta_slo_violation",
    }  # fmt: skip
    values = {key: np.array([float(row[column]) for row in rows]) for key, column in deltas.items()}
    low = {key: np.array([float(row[f"delta_{key}_ci_low"]) for row in rows]) for key in deltas}
    gains = [float(row["delta_mean_ci_high"]) < 0.0 and not row["worse"] for row in rows]
    return Verdict(
        policy=str(rows[0]["policy"]),
        draws=len(rows),
        worse=sum(int(row["worse"]) for row in rows),
        far_worse=sum(int(row["far_worse"]) for row in rows),
        by_measure={key: int((some > WORSE).sum()) for key, some in low.items()},
        better=sum(gains),
        median={key: float(np.median(some)) for key, some in values.items()},
        mean_of={key: float(np.mean(some)) for key, some in values.items()},
    )


def law_policy(name: str, scenario: Scenario) -> Decide | None:
    """Compiled run of a policy that the law may judge.

    Args:
        name: `marginal_delay` or `marginal_in_order`, with an order behind `+` where it is wanted,
            or a policy file (.npz).
        scenario: The draw's.

    Returns:
        The run; None: the file was trained on servers of the other model.

    Raises:
        ValueError: There is no such placement or order, compiled code does not know it, or the file
            is for a number of replicas.
    """
    if name.endswith(".npz"):
        return _of_file(_artifact(name), scenario)
    placement, between, order = name.partition(BETWEEN)
    weights = order_weights_of(order) if between else FIRST_COME
    if placement == "marginal_delay":
        return partial(_hand_rule, server_model(scenario), weights)
    if placement == IN_ORDER:
        return lambda sim: sim.run_in_order(weights)
    raise ValueError(
        f"the law judges marginal_delay, {IN_ORDER} or a policy file (.npz), not {placement!r}"
    )


def _hand_rule(servers: ServerModel, order: FloatArray, sim: Simulator) -> None:
    """Least marginal delay as it is without tuning; of constant rates shortest expected delay."""
    next(iter(servers.placements(sim).values()))(sim, order)


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

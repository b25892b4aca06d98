"""Which placement and order the policy for any cluster has: found on drawn clusters, by cost.

Candidates are few: the weights of a placement with no correction and with the learned one, and
the numbers of an order (`tokenyard.routing.scores.order`). Each plays all training clusters
beside the best ordering rule of each. The cost is what it loses on average, plus the mean of the
tenth of the clusters on which it loses most (conditional value at risk).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tokenyard.problem import Row
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.drawn_clusters import TRAINING, draw_wide
from tokenyard.routing.never_worse import Half, best_rule
from tokenyard.routing.policies.learned import order_array
from tokenyard.routing.scores.order import (
    FIRST_COME,
    NUM_ORDER_WEIGHTS,
    PREFILL_WEIGHT,
    SERVICE_WEIGHT,
)
from tokenyard.routing.simulator import Simulator
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import stream_rng
from tokenyard.types import FloatArray

KNOBS = (5.0, 20.0, 60.0)
WORST_SHARE = 0.1
"""Of the clusters, those whose mean loss is added to the mean over all."""
PLACEMENTS = ("learned", "rule")
"""With the weights of the policy to start from, or without: least marginal delay, or SED."""
LOSSES = ("loss_score", "loss_mean", "loss_p99", "loss_slo")
_FIRST_CLUSTER = 500_000
"""Keeps these clusters apart from those of other searches."""


def order_grid() -> list[FloatArray]:
    """First come first served, then by service and by prefill with every knob."""
    found = [FIRST_COME.copy()]
    for at, knob in itertools.product((SERVICE_WEIGHT, PREFILL_WEIGHT), KNOBS):
        weights = np.zeros(NUM_ORDER_WEIGHTS)
        weights[at] = knob
        found.append(weights)
    return found


def losses(number: int, start: PolicyArtifact, num_streams: int = 3, seed: int = 0) -> list[Row]:
    """Play one training cluster with every candidate.

    Args:
        number: Of the cluster.
        start: Has the learned weights of the placement.
        num_streams: Of the cluster.
        seed: Of all clusters.

    Returns:
        One row per candidate: `cluster`, `cell`, `array`, `placement`, the `order`'s weights, and
        by how much score, mean and p99 (logarithms of ratios) and violations are above the best
        rule's.
    """
    rng = stream_rng(seed, "training", _FIRST_CLUSTER + number)
    cluster = draw_wide(rng, TRAINING)
    half = Half(cluster, num_streams, rng)
    sim = half.simulator(num_streams)
    array, tokens = sim.any_cluster_weights, start.metadata.mean_total_tokens
    rules = server_model(cluster.scenario).rule_variants(sim)
    theirs = half.rows(rules[best_rule(half, rules, num_streams)], num_streams).mean(axis=0)
    rows: list[Row] = []
    for placement, order in itertools.product(PLACEMENTS, order_grid()):
        if array == "server_weights" and order[PREFILL_WEIGHT] > 0.0:
            continue  # All of a server's time is one.
        weights = start.arrays[array] * (placement == "learned")
        run = partial(_run, weights, tokens, order)
        ours = half.rows(run, num_streams).mean(axis=0)
        score, mean, p99 = np.log(ours[:3] / theirs[:3])
        rows.append(
            {
                "cluster": number, "cell": cluster.scenario.name, "array": array,
                "placement": placement, "order": ",".join(f"{one:g}" for one in order),
                "loss_score": float(score), "loss_mean": float(mean), "loss_p99": float(p99),
                "loss_slo": float(ours[3] - theirs[3]),
            }
        )  # fmt: skip
    return rows


def _run(weights: FloatArray, tokens: float, order: FloatArray, sim: Simulator) -> None:
    sim.run_any_cluster(weights, tokens, order)


def cost(rows: Iterable[Row]) -> float:
    """What a candidate costs, by its rows of all clusters."""
    some = list(rows)
    loss = np.array([float(row["loss_score"]) for row in some])
    keys = ("loss_mean", "loss_p99", "loss_slo")
    worst = np.array([max(float(row[key]) for key in keys) for row in some])
    num = max(1, round(WORST_SHARE * len(worst)))
    return float(loss.mean() + np.sort(worst)[-num:].mean())


def candidates(rows: Sequence[Row]) -> list[Row]:
    """One row per candidate with its `cost`, the best of each array first."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        key = (str(row["array"]), str(row["placement"]), str(row["order"]))
        groups.setdefault(key, []).append(row)
    found: list[Row] = [
        {
            "array": array, "placement": placement, "order": order, "clusters": len(some),
            "cost": cost(some),
            **{key: float(np.mean([float(one[key]) for one in some])) for key in LOSSES},
        }
        for (array, placement, order), some in groups.items()
    ]  # fmt: skip
    return sorted(found, key=lambda row: (str(row["array"]), float(row["cost"])))


def with_best(start: PolicyArtifact, found: Sequence[Row]) -> PolicyArtifact:
    """The policy with the placement and the order that cost least, of servers and of replicas."""
    arrays = dict(start.arrays)
    for array in ("server_weights", "engine_weights"):
        best = next((row for row in found if row["array"] == array), None)
        if best is not None:
            arrays[array] = start.arrays[array] * (best["placement"] == "learned")
            order = np.array([float(one) for one in str(best["order"]).split(",")])
            arrays[order_array(array)] = order
    return replace(start, arrays=arrays)

"""Which rule is best: over drawn layouts, on fresh streams.

Every unit is a layout of its own (`draw_layout`) with one stream on it; policies are paired by
unit, and compared to the best rule, which is chosen on the other half of the units. The p-values of
one scenario are corrected together (Holm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tokenyard.evaluation import compare
from tokenyard.problem import Candidate, Row
from tokenyard.regions.demand import draw_layout, sample_stream, stream_rng
from tokenyard.regions.forecast import fit_seasonal
from tokenyard.regions.policies import REGION_BASELINES
from tokenyard.regions.problem import PROBLEM, Episodes, Measured
from tokenyard.regions.scenario import RegionScenario
from tokenyard.statistics.intervals import holm, paired_p_value

BEST = "best_rule"
CLAIMS = ("total_cost", "mean_response_s")
Runs = dict[str, list[Measured]]


def run_layouts(
    scenario: RegionScenario, names: Sequence[str], num_layouts: int, seed: int
) -> Runs:
    """Run policies over drawn layouts, one stream on each.

    Raises:
        ValueError: A name is unknown, or there is no layout.
    """
    if num_layouts < 1:
        raise ValueError(f"{num_layouts} layouts must be at least 1")
    candidates: list[Candidate[RegionScenario, Episodes, Measured]] = [
        PROBLEM.candidate(scenario, name) for name in names
    ]
    runs: Runs = {name: [] for name in names}
    for index in range(num_layouts):
        drawn = draw_layout(scenario, seed, "test", index)
        stream = sample_stream(drawn, stream_rng(seed, "test", index))
        episode = Episodes([stream], scenario.name, fit_seasonal(drawn))
        for candidate in candidates:
            runs[candidate.name] += candidate.run(drawn, episode, seed)
    return runs


def best_rules(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    """Return each unit's baseline: the rule of least cost on the half without that unit.

    Raises:
        ValueError: No rule was run, or there is only one unit.
    """
    rules = [name for name in runs if name in REGION_BASELINES]
    if not rules:
        raise ValueError("no rule was run: name a baseline, or a rule among the policies")
    costs = {name: np.array([measured["total_cost"] for measured in runs[name]]) for name in rules}
    count = len(next(iter(costs.values())))
    if count < 2:
        raise ValueError("one layout has no other half to choose a rule on: name a baseline")
    half = np.arange(count) % 2
    best = [min(rules, key=lambda name: float(costs[name][half != part].mean())) for part in (0, 1)]
    return [best[part] for part in half]


def judge(
    scenario: RegionScenario, runs: Mapping[str, Sequence[Measured]], baseline: str | None = None
) -> list[Row]:
    """Compare what `run_layouts` found.

    The first row is that of the baseline, by default of the best rules; the others follow with
    their differences to it.

    Raises:
        ValueError: The baseline, or any rule in its place, was not run.
    """
    chosen = best_rules(runs) if baseline is None else [baseline]
    if not set(chosen) <= set(runs):
        raise ValueError(f"baseline {baseline!r} was not run; choose one of {sorted(runs)}")
    count = len(next(iter(runs.values())))
    best = [runs[chosen[unit % len(chosen)]][unit] for unit in range(count)]
    streams = Episodes([], f"{count} layouts of {scenario.name}", fit_seasonal(scenario))
    rows = compare(PROBLEM, scenario, streams, {BEST: best, **runs}, BEST)
    rows[0]["policy"] = "/".join(dict.fromkeys(chosen))
    pairs: list[tuple[Sequence[Measured], Sequence[Measured]]] = [
        (runs[str(row["policy"])], best) for row in rows[1:]
    ]
    corrected = holm([_p_value(ours, theirs, key) for ours, theirs in pairs for key in CLAIMS])
    for number, row in enumerate(rows[1:]):
        for place, key in enumerate(CLAIMS):
            row[f"{key}_p_holm"] = corrected[number * len(CLAIMS) + place]
    return rows


def _p_value(ours: Sequence[Measured], theirs: Sequence[Measured], key: str) -> float:
    return paired_p_value(np.array([a[key] - b[key] for a, b in zip(ours, theirs, strict=True)]))

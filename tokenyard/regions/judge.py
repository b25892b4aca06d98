"""Which rule is best, and what learning adds to its start: over drawn layouts, on fresh streams.

Every unit is a layout of its own (`draw_layout`) with one stream on it; policies are paired by
unit. Two differences are reported, in total cost and in response: to the best rule, and of the
learned policy to its unlearned start. The best rule is chosen on the other half of the units. The
p-values of one scenario are corrected together (Holm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from tokenyard.evaluation import compare
from tokenyard.problem import Candidate, Row
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.demand import draw_layout, sample_stream, stream_rng
from tokenyard.regions.forecast import fit_seasonal
from tokenyard.regions.mixing import NUM_PARAMETERS
from tokenyard.regions.policies import REGION_BASELINES
from tokenyard.regions.policies.learned import LearnedMix
from tokenyard.regions.problem import LEARNED, PROBLEM, Episodes, Measured, runner
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.types import RegionPolicy
from tokenyard.statistics.intervals import holm, paired_p_value

START = "torta_unlearned"
"""The mix with all parameters zero."""
BEST = "best_rule"
CLAIMS = ("total_cost", "mean_response_s")
Runs = dict[str, list[Measured]]


def unlearned(scenario: RegionScenario) -> RegionPolicy:
    """The learned policy without what it learned."""
    return LearnedMix(np.zeros(NUM_PARAMETERS), ActivationRule.from_scenario(scenario))


def run_layouts(
    scenario: RegionScenario, names: Sequence[str], num_layouts: int, seed: int
) -> Runs:
    """Run policies over drawn layouts, one stream on each.

    Args:
        scenario: Whose topology, servers and demand.
        names: Rules, `torta`, its unlearned start, or policy files.
        num_layouts: How many.
        seed: Of layouts and streams.

    Raises:
        ValueError: A name is unknown.
    """
    candidates: list[Candidate[RegionScenario, Episodes, Measured]] = [
        Candidate(name, "", runner(unlearned))
        if name == START
        else PROBLEM.candidate(scenario, name)
        for name in names
    ]
    runs: Runs = {name: [] for name in names}
    for index in range(num_layouts):
        drawn = draw_layout(scenario, seed, "test", index)
        stream = sample_stream(drawn, stream_rng(seed, "test", index))
        episode = Episodes([stream], fit_seasonal(drawn), scenario.name)
        for one in candidates:
            runs[one.name] += one.run(drawn, episode, seed)
    return runs


def best_rules(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    """The rule that each unit is compared to: of least cost on the half without the unit."""
    rules = [name for name in runs if name in REGION_BASELINES]
    costs = {name: np.array([one["total_cost"] for one in runs[name]]) for name in rules}
    count = len(next(iter(costs.values())))
    half = np.arange(count) % 2
    best = [min(rules, key=lambda name: float(costs[name][half != part].mean())) for part in (0, 1)]
    return [best[part] for part in half]


def judge(scenario: RegionScenario, runs: Mapping[str, Sequence[Measured]]) -> list[Row]:
    """Compare what `run_layouts` found.

    The first row is that of the best rules, then each policy against them, then the learned policy
    against its unlearned start.
    """
    chosen = best_rules(runs)
    best = [runs[name][unit] for unit, name in enumerate(chosen)]
    streams = Episodes([], fit_seasonal(scenario), f"{len(best)} layouts of {scenario.name}")
    against = partial(compare, PROBLEM, scenario, streams)
    rows = against({BEST: best, **runs}, BEST)
    rows[0]["policy"] = "/".join(dict.fromkeys(chosen))
    pairs: list[tuple[Sequence[Measured], Sequence[Measured]]] = [
        (runs[str(row["policy"])], best) for row in rows[1:]
    ]
    for name in (one for one in runs if one == LEARNED and START in runs):
        rows.append(against({name: runs[name], START: runs[START]}, START)[0])
        pairs.append((runs[name], runs[START]))
    corrected = holm([_p_value(ours, theirs, key) for ours, theirs in pairs for key in CLAIMS])
    for number, row in enumerate(rows[1:]):
        for place, key in enumerate(CLAIMS):
            row[f"{key}_p_holm"] = corrected[number * len(CLAIMS) + place]
    return rows


def _p_value(ours: Sequence[Measured], theirs: Sequence[Measured], key: str) -> float:
    return paired_p_value(np.array([a[key] - b[key] for a, b in zip(ours, theirs, strict=True)]))

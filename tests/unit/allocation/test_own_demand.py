"""A forecaster for a pool whose demand is not what the planner that ships was fitted to."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from pipelines import train
from tokenyard.allocation import own_demand
from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.allocation.demand import DemandStream
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.forecast import NUM_HORIZONS, NUM_RECENT, fit_forecaster
from tokenyard.allocation.plans import load_allocation, plan_table
from tokenyard.allocation.scenario import PAPER_WEIGHTS
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.allocation.tabular import TabularConfig, TabularLearner
from tokenyard.allocation.telemetry import TELEMETRY_FILE, SlotRecord, append_record
from tokenyard.artifact import ArtifactError

SCENARIO = load_allocation("l4x4_7b")
QUIET = Console(quiet=True)
NO_WEIGHTS = ((0.0,) * (NUM_RECENT + 3),) * NUM_HORIZONS


def write_log(folder, demand):
    for slot, value in enumerate(demand.tolist()):
        append_record(
            folder / TELEMETRY_FILE,
            SlotRecord(slot=slot, time_s=300.0 * slot, demand_per_s=value, waiting=0, gpus_held=1,
                       plan="data on 1 GPUs", proposed="data on 1 GPUs"),
        )  # fmt: skip


def a_demand(days, seed=0):
    """High at night and low by day, unlike anything that the champion has seen."""
    rng = np.random.default_rng(seed)
    slots = np.arange(days * 288)
    share = 0.45 + 0.35 * np.sign(np.cos(2 * np.pi * slots / 288))
    return (
        share
        * plan_table(SCENARIO).pool_goodput_capacity_per_s
        * np.exp(rng.normal(0, 0.05, len(slots)))
    )


def trained(log, **fields):
    (row,) = train.train(train.Args(log=log, scenario="l4x4_7b", **fields), QUIET)
    return row


def test_traffic_of_another_rhythm_is_learned_and_accepted(tmp_path):
    write_log(tmp_path, a_demand(days=7))
    out = tmp_path / "candidate.npz"
    row = trained(tmp_path, out=out)
    assert row["accepted"]
    assert row["delta_cost_ci_high"] < 0
    candidate = AllocationArtifact.load(out)
    assert candidate.sha256 == row["sha256"]
    assert candidate.metadata.lineage["champion_sha256"] != candidate.sha256
    assert candidate.metadata.scenario == SCENARIO
    # What was offered is gone on from, and the same log teaches it nothing.
    again = trained(tmp_path, now=str(out))
    assert (again["changed_fraction"], again["accepted"]) == (0, 0)


@pytest.mark.parametrize(
    ("slots", "says"),
    [(60, "60 slots are too few: both parts"), (4 * 288, "691 slots are too few to learn a daily")],
)
def test_a_log_that_is_too_short_is_refused(tmp_path, slots, says):
    write_log(tmp_path, a_demand(days=4)[:slots])
    with pytest.raises(ValueError, match=says):
        trained(tmp_path)


def test_only_planners_are_fitted(tmp_path):
    write_log(tmp_path, a_demand(days=1))
    TabularLearner(SCENARIO, TabularConfig("sarsa", 1_000)).artifact().save(tmp_path / "t.npz")
    with pytest.raises(ArtifactError, match="only planners"):
        trained(tmp_path, now=str(tmp_path / "t.npz"))


def test_the_held_out_part_comes_after_what_is_learned_from_and_at_its_time_of_day():
    stream = DemandStream(np.arange(1000.0), 0, 100)
    learned, held_out = own_demand.split(stream, 0.2, 288)
    assert learned.per_s[-1] == 799
    assert held_out.per_s[held_out.first] == 800
    assert (held_out.start_slot + held_out.first) % 288 == (100 + 800) % 288


def test_where_rewards_are_positive_what_earns_less_is_worse():
    """Costs are then negative, and to plan for a tenth of the demand earns less."""
    scenario = SCENARIO.model_copy(update={"objective": PAPER_WEIGHTS})
    stream = DemandStream(a_demand(days=10), 0, 0)
    fitted = fit_forecaster([stream], scenario.slots_per_day)
    usual = fitted.model_copy(update={"earlier_days": None})
    profile = (usual.profile[0] - np.log(10), *usual.profile[1:])
    blind = usual.model_copy(update={"profile": profile, "weights": NO_WEIGHTS})
    known, wasted = (StreamRunner(scenario, stream, one) for one in (usual, blind))
    worse, changed = own_demand.judge(known, wasted, 0)
    earned = [one.run_planner().column(REWARD).mean() for one in (known, wasted)]
    assert 0.0 < earned[1] < earned[0]
    assert worse.estimate == pytest.approx((earned[0] - earned[1]) / earned[0])
    assert worse.low <= worse.estimate <= worse.high
    assert changed > 0
    better, _ = own_demand.judge(wasted, known, 0)
    assert better.high < 0.0 < worse.low

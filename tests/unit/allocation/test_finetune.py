"""Fine-tuning the allocator: a pool whose traffic is not what its champion was trained for."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from pipelines import finetune as pipeline
from tokenyard.allocation import finetune
from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.allocation.demand import DemandStream
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.forecast import NUM_HORIZONS, NUM_RECENT, fit_forecaster
from tokenyard.allocation.planner import make_planner
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


def args(log, **fields):
    return pipeline.Args(log=log, problem="allocation", scenario="l4x4_7b", **fields)


def test_traffic_of_another_rhythm_is_learned_and_offered(tmp_path):
    write_log(tmp_path, a_demand(days=7))
    out = tmp_path / "candidate.npz"
    row = pipeline.finetune(args(tmp_path, out=out), QUIET)
    assert row["offered"]
    assert row["delta_cost_ci_high"] < 0
    candidate = AllocationArtifact.load(out)
    assert candidate.sha256 == row["candidate"]
    assert candidate.metadata.lineage["champion_sha256"] == row["champion"]
    assert candidate.metadata.scenario == SCENARIO
    # What was offered is gone on from, and the same log teaches it nothing.
    again = pipeline.finetune(args(tmp_path, champion=out), QUIET)
    assert again["champion"] == candidate.sha256
    assert (again["changed_fraction"], again["offered"]) == (0, False)


@pytest.mark.parametrize(
    ("slots", "says"),
    [(60, "60 slots are too few: both parts"), (4 * 288, "691 slots are too few to learn a daily")],
)
def test_a_log_that_is_too_short_is_refused(tmp_path, slots, says):
    write_log(tmp_path, a_demand(days=4)[:slots])
    with pytest.raises(ValueError, match=says):
        pipeline.finetune(args(tmp_path), QUIET)


def test_only_planners_are_fine_tuned(tmp_path):
    write_log(tmp_path, a_demand(days=1))
    TabularLearner(SCENARIO, TabularConfig("sarsa", 1_000)).artifact().save(tmp_path / "t.npz")
    with pytest.raises(ArtifactError, match="only planners"):
        pipeline.finetune(args(tmp_path, champion=tmp_path / "t.npz"), QUIET)


def test_the_held_out_part_comes_after_what_is_learned_from_and_at_its_time_of_day():
    stream = DemandStream(np.arange(1000.0), 0, 100)
    learned, held_out = finetune.split(stream, 0.2, 288)
    assert learned.per_s[-1] == 799
    assert held_out.per_s[held_out.first] == 800
    assert (held_out.start_slot + held_out.first) % 288 == (100 + 800) % 288


def test_where_rewards_are_positive_what_earns_less_is_worse():
    """Costs are then negative, and to plan for a tenth of the demand earns less."""
    scenario = SCENARIO.model_copy(update={"objective": PAPER_WEIGHTS})
    stream, planner = DemandStream(a_demand(days=10), 0, 0), make_planner(scenario)
    usual = fit_forecaster([stream], scenario.slots_per_day)
    profile = (usual.profile[0] - np.log(10), *usual.profile[1:])
    blind = usual.model_copy(update={"profile": profile, "weights": NO_WEIGHTS})
    known, wasted = (StreamRunner(scenario, stream, one) for one in (usual, blind))
    worse, changed = finetune.judge(planner, known, wasted, 0)
    earned = [one.run_planner(planner).column(REWARD).mean() for one in (known, wasted)]
    assert 0.0 < earned[1] < earned[0]
    assert worse.estimate == pytest.approx((earned[0] - earned[1]) / earned[0])
    assert worse.low <= worse.estimate <= worse.high
    assert changed > 0
    better, _ = finetune.judge(planner, wasted, known, 0)
    assert better.high < 0.0 < worse.low

"""Fine-tuning the allocator: a pool whose traffic is not what its champion was trained for."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from pipelines import finetune as pipeline
from tokenyard.allocation import finetune
from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.allocation.demand import DemandStream
from tokenyard.allocation.planner import BIAS, NUM_PARAMETERS, make_planner
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.scenario import PAPER_WEIGHTS, load_allocation
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.allocation.telemetry import TELEMETRY_FILE, SlotRecord, append_record
from tokenyard.cross_entropy import FinetuneConfig

SCENARIO = load_allocation("l4x4_7b")
QUIET = Console(quiet=True)


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
    known = dict(
        problem="allocation", scenario="l4x4_7b", generations=2, population=8, behaviour=0.0
    )
    return pipeline.Args(log=log, **(known | fields))


def test_traffic_of_another_rhythm_is_learned_and_offered(tmp_path):
    write_log(tmp_path, a_demand(days=7))
    out = tmp_path / "candidate.npz"
    row = pipeline.finetune(args(tmp_path, out=out), QUIET)
    assert row["forecaster_refitted"]
    assert row["offered"]
    assert row["delta_cost_ci_high"] < 0
    candidate = AllocationArtifact.load(out)
    assert candidate.sha256 == row["candidate"]
    assert candidate.metadata.lineage["champion_sha256"] == row["champion"]
    assert candidate.metadata.scenario == SCENARIO


def test_a_short_log_keeps_the_forecaster(tmp_path):
    write_log(tmp_path, a_demand(days=1))
    row = pipeline.finetune(args(tmp_path, behaviour=1e3), QUIET)
    assert not row["forecaster_refitted"]
    # At such a price nothing is changed, and what changes nothing is not offered.
    assert row["changed_fraction"] == 0
    assert not row["offered"]


def test_a_log_of_a_few_slots_is_refused(tmp_path):
    write_log(tmp_path, a_demand(days=1)[:60])
    with pytest.raises(ValueError, match="60 slots are too few"):
        pipeline.finetune(args(tmp_path), QUIET)


def test_the_held_out_part_comes_after_what_is_learned_from_and_at_its_time_of_day():
    stream = DemandStream(np.arange(1000.0), 0, 100)
    learned, held_out = finetune.split(stream, 0.2, 288)
    assert learned.per_s[-1] == 799
    assert held_out.per_s[held_out.first] == 800
    assert (held_out.start_slot + held_out.first) % 288 == (100 + 800) % 288


def test_where_rewards_are_positive_what_earns_less_is_worse():
    scenario = SCENARIO.model_copy(update={"objective": PAPER_WEIGHTS})
    runner = StreamRunner(scenario, DemandStream(a_demand(days=10), 0, 0))
    planner = make_planner(scenario)
    usual, lavish = np.zeros(NUM_PARAMETERS), np.zeros(NUM_PARAMETERS)
    lavish[BIAS] = 1.5
    known, wasted = (
        finetune.cost_and_plans(runner, planner, one)[0].mean() for one in (usual, lavish)
    )
    assert known < wasted < 0.0
    worse, _ = finetune.judge(planner, runner, usual, runner, lavish, 0)
    assert worse.estimate == pytest.approx((wasted - known) / -known)
    assert worse.low <= worse.estimate <= worse.high
    better, _ = finetune.judge(planner, runner, lavish, runner, usual, 0)
    assert better.high < 0.0 < worse.low


def test_where_rewards_are_positive_changes_of_plan_have_their_price():
    scenario = SCENARIO.model_copy(update={"objective": PAPER_WEIGHTS})
    runner = StreamRunner(scenario, DemandStream(a_demand(days=2), 0, 0))
    planner, start = make_planner(scenario), np.zeros(NUM_PARAMETERS)
    start[BIAS] = 1.5
    config = FinetuneConfig(generations=2, population=8, behaviour=1e3)
    found = finetune.search(start, planner, runner, runner, config)
    plans, chosen = (finetune.cost_and_plans(runner, planner, one)[1] for one in (start, found))
    np.testing.assert_array_equal(chosen, plans)

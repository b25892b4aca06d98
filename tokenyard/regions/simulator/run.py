"""Episodes of the regional simulator: any policy by its public method."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tokenyard.regions.demand import RegionStream
from tokenyard.regions.forecast import DemandForecaster
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.simulator import RegionSim, world
from tokenyard.regions.types import RegionPolicy
from tokenyard.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class RegionOutcomes:
    """What one episode measured."""

    outs: FloatArray
    """Shape (slots, NUM_OUT) of `tokenyard.regions.simulator.world`."""
    tasks: FloatArray
    """Shape (tasks, NUM_TASK_FLOATS)."""
    labels: IntArray
    """Shape (tasks, NUM_TASK_INTS)."""
    shares: FloatArray
    """Shares in force, shape (slots, regions, regions)."""
    decision_s: FloatArray
    """Wall time of each decision, shape (slots,)."""
    patience_s: float
    """The longest that a task waits before it is dropped."""

    def total(self, column: int) -> float:
        """Sum of a column over all slots."""
        return float(self.outs[:, column].sum())

    @property
    def response_s(self) -> FloatArray:
        """Response time of every task, return path included; the patience of one that was dropped.

        The patience is the longest that it could have waited.
        """
        done = self.labels[:, world.STATUS] == world.PLACED
        ends = self.tasks[:, world.FINISH_S] + self.tasks[:, world.BACK_S]
        return np.where(done, ends - self.tasks[:, world.ARRIVAL_S], self.patience_s)


def run_regions(
    scenario: RegionScenario,
    stream: RegionStream,
    policy: RegionPolicy,
    forecaster: DemandForecaster,
) -> RegionOutcomes:
    """Let a policy decide every slot of a stream, shown states and nothing else."""
    sim = RegionSim(scenario, stream, forecaster)
    num, slots = sim.cluster.num_regions, stream.num_slots
    shares, decision_s = np.zeros((slots, num, num)), np.zeros(slots)
    for slot in range(slots):
        state = sim.state()
        started = time.perf_counter()
        decision = policy.decide(state)
        decision_s[slot] = time.perf_counter() - started
        sim.step(decision)
        shares[slot] = sim.shares
    sim.finish()
    w = sim.arrays
    patience_s = scenario.micro.patience_s
    return RegionOutcomes(w.out, w.tasks, w.labels, shares, decision_s, patience_s)

"""Call every compiled function once, so that the cache has it: run each simulator for a moment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tokenyard.allocation.bounds import clairvoyant_plans, free_switching
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.paper.simulator import LearningConfig, learn, literal_table
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.allocation.tabular import TabularLearner
from tokenyard.regions.demand import sample_stream
from tokenyard.regions.forecast import fit_seasonal
from tokenyard.regions.policies import make_region_policy
from tokenyard.regions.scenario import RegionFailure, load_regions
from tokenyard.regions.simulator.run import run_regions
from tokenyard.routing import snapshot_table as st
from tokenyard.routing.bounds import clairvoyant
from tokenyard.routing.policies.delay import MarginalDelay, finish_times_s, mark_safe
from tokenyard.routing.policies.in_order import MarginalInOrder
from tokenyard.routing.policies.order import Ordered, ShortestJob
from tokenyard.routing.prefix_index import PrefixIndex
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.scores.order import NUM_ORDER_WEIGHTS
from tokenyard.routing.sessions.rules import make_rule
from tokenyard.routing.sessions.scenario import load_session_scenario
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_streams import token_rows
from tokenyard.routing.simulator.constant_rate import ClusterSim
from tokenyard.routing.simulator.sessions import run_sessions
from tokenyard.routing.simulator.streams import StreamSource, stream_rng
from tokenyard.routing.types import Request

_NUM_REQUESTS = 20


def compile_batching() -> None:
    """Replicas that batch, and what a gateway knows of them."""
    _read_columns()
    scenario = load_scenario("azure_code_mixed_gpus_085")
    stream = StreamSource(scenario).sample(_NUM_REQUESTS, stream_rng(0, "training"))
    sim = BatchingSim(scenario, 1, _NUM_REQUESTS)
    sim.load(0, stream)
    sim.view().best_ahead(1.0)
    sim.view().snapshots(1)
    _play(sim)


def _read_columns() -> None:
    """Read what a gateway keeps, as at a decision."""
    PrefixIndex()
    state, rows = np.zeros((1, st.NUM_STATE)), np.zeros(1, dtype=np.int64)
    st.offer(state, rows, 0.0, 1.0, rows.copy())
    live = np.empty((1, st.NUM_LIVE))
    st.fill_live(state, rows, np.zeros(1, dtype=np.int64), 1.0, 1.0, live)
    st.keep_with_room(state, rows, np.ones(1), rows.copy())
    table, request = st.SnapshotTable.idle(1), Request(0.0, 1, 2.0)
    finish_times_s(request, table)
    mark_safe(request, table, 1.0)
    MarginalInOrder(ShortestJob()).place(request, table)
    Ordered(MarginalDelay(), ShortestJob()).place(request, table)


def compile_constant_rate() -> None:
    """Servers of constant rates, bursts of traffic, and what bounds response times."""
    StreamSource(load_scenario("bursty_serial")).sample(_NUM_REQUESTS, stream_rng(0, "training"))
    scenario = load_scenario("poisson_085")
    stream = StreamSource(scenario).sample(_NUM_REQUESTS, stream_rng(0, "training"))
    sim = ClusterSim(scenario, 1, _NUM_REQUESTS)
    sim.load(0, stream)
    _play(sim)
    sim.run_delay_rule(1.0, -1)
    clairvoyant(scenario, token_rows(stream))


def _play(sim: ClusterSim | BatchingSim) -> None:
    """Call whatever steps a simulator."""
    first = np.zeros(1, dtype=np.int64)
    sim.step(first)
    sim.observe()
    sim.step_and_observe(first)
    sim.drain()
    sim.run_linear(np.zeros(sim.num_weights), 1.0)
    sim.run_linear(np.ones(sim.num_weights), 1.0, np.ones(NUM_ORDER_WEIGHTS))


def compile_sessions() -> None:
    """Whole sessions on replicas that batch."""
    scenario = load_session_scenario("agentic_sessions_mixed")
    few = scenario.model_copy(update={"sessions_per_a100": 5})
    run_sessions(few.replicas, few.draw(np.random.default_rng(0)), make_rule("index"))


def compile_allocation() -> None:
    """Plans for one pool: simulator, planner, bounds, and the two tabular learners."""
    scenario = load_allocation("a100x8_13b")
    runner = StreamRunner(scenario, demand_source(scenario).episode(4, stream_rng(0, "training")))
    runner.run_planner()
    plans, _ = clairvoyant_plans(runner)
    runner.run_plans(plans)
    free_switching(runner)
    runner.run_autoscaler(plans[:1], runner.highest(1), runner.highest(1), 1)
    sim = runner.sim
    sim.restart(0, int(plans[0]))
    sim.observe()
    sim.step(plans[:1])
    sim.bounds()
    TabularLearner(scenario).step()
    learn(literal_table("independent"), "sarsa", LearningConfig(passes=1), seed=0)


def compile_regions() -> None:
    """Regions, one of which fails."""
    scenario = load_regions("abilene").model_copy(update={"num_slots": 3})
    failure = RegionFailure(kind="region_down", start_slot=1, num_slots=1, region=0)
    stream = replace(sample_stream(scenario, np.random.default_rng(0)), failures=(failure,))
    policy = make_region_policy("least_loaded", scenario)
    run_regions(scenario, stream, policy, fit_seasonal(scenario))

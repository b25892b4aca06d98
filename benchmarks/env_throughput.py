"""How many routing decisions a second of CPU time simulates, with observations.

python benchmarks/env_throughput.py

The simulator itself, the environments over it, and Stable-Baselines3's DummyVecEnv over the same
environment, measured in turn in one process. A repetition is one episode of random actions in
every copy, with what it takes to start it: clearing the simulator, or drawing fresh traffic.
Of a fleet, actions are random in proportion to capacity, and there are two rewards: what is paid
when a request is accepted, and its response time, for which every decision looks ahead. Its
`run_linear` rows have the rule of least marginal delay decide inside the kernel, unobserved.
Of allocation, plans are drawn at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import tyro
from rich.table import Table

from envs import LoadBalancingEnv, LoadBalancingVectorEnv, ParallelismVectorEnv
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.scenario import RewardWeights, load_scenario
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.constant_rate import ClusterSim
from tokenyard.routing.simulator.streams import StreamSource

NOTHING = RewardWeights(processing=0, queue=0, overload=0, balance=0, accept=0, drop=0)
FLEET_REWARDS = {
    "accept": NOTHING.model_copy(update={"accept": 1.0}),
    "response": NOTHING.model_copy(update={"response": -1.0}),
}


@dataclass(frozen=True)
class Args:
    """Measure the throughput of the simulator and its environments."""

    scenario: str = "poisson_085"
    """Token-level servers: name or YAML path."""
    fleet: str = "azure_code_mixed_gpus_085"
    """Replicas that batch: name or YAML path."""
    allocation: str = "a100x8_13b"
    """Pool whose parallelism plan is chosen: name or YAML path."""
    episode_requests: int = 1000
    """Requests, of allocation slots, per episode."""
    repetitions: int = 7
    """Episodes measured of each; their median counts."""
    seed: int = 0
    """Of traffic and actions."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


@dataclass(frozen=True)
class Contestant:
    """One thing to measure."""

    env: str
    implementation: str
    num_envs: int
    run_episode: Callable[[], None]
    reward: str = ""
    """Where a fleet is measured: what is paid, `accept` or `response`."""
    scenario: str = ""
    """In place of the one of its kind."""


def simulator(args: Args, num_copies: int) -> Contestant:
    scenario = load_scenario(args.scenario)
    length = args.episode_requests + 1
    rng = np.random.default_rng(args.seed)
    stream = StreamSource(scenario).sample(length, rng)
    sim = ClusterSim(scenario, num_copies, length)
    for copy in range(num_copies):
        sim.load(copy, stream)
    actions = random_actions(args, num_copies)

    def run_episode() -> None:
        for copy in range(num_copies):
            sim.clear(copy)
        for action in actions:
            sim.step_and_observe(action)

    return Contestant("ClusterSim", "tokenyard", num_copies, run_episode)


def single(args: Args) -> Contestant:
    env = LoadBalancingEnv(env_config(args))
    env.reset(seed=args.seed)
    episode = partial(play, env, random_actions(args, 1)[:, 0])
    return Contestant("LoadBalancingEnv", "tokenyard", 1, episode)


def vectorised(args: Args, num_envs: int) -> Contestant:
    env = LoadBalancingVectorEnv(num_envs, env_config(args))
    env.reset(seed=args.seed)
    episode = partial(play, env, random_actions(args, num_envs))
    return Contestant("LoadBalancingVectorEnv", "tokenyard", num_envs, episode)


def kernel_rule(args: Args, reward: str) -> Contestant:
    scenario = load_scenario(args.fleet)
    source = StreamSource(scenario)
    length, num_copies = args.episode_requests, 16
    sim = BatchingSim(scenario, num_copies, length, FLEET_REWARDS[reward])
    rng = np.random.default_rng(args.seed)
    for copy in range(num_copies):
        sim.load(copy, source.sample(length, rng))
    episode = partial(sim.run_linear, np.zeros(sim.num_weights), source.mean_total_tokens)
    return Contestant("BatchingSim.run_linear", "tokenyard", num_copies, episode, reward)


def fleet_env(args: Args, reward: str, num_envs: int) -> Contestant:
    scenario = load_scenario(args.fleet)
    env = LoadBalancingVectorEnv(
        num_envs, scenario=scenario, reward=FLEET_REWARDS[reward],
        episode_requests=args.episode_requests,
    )  # fmt: skip
    env.reset(seed=args.seed)
    capacity = np.array(scenario.server_capacities_tokens_per_s)
    rng = np.random.default_rng(args.seed)
    shape = (args.episode_requests, num_envs)
    actions = rng.choice(len(capacity), shape, p=capacity / capacity.sum())
    episode = partial(play, env, actions)
    return Contestant("LoadBalancingVectorEnv", "tokenyard", num_envs, episode, reward)


def allocation_env(args: Args, action: str, num_envs: int) -> Contestant:
    # One slot more than is stepped: an episode that ends draws the next one's demand.
    slots = args.episode_requests + 1
    env = ParallelismVectorEnv(
        num_envs, scenario=args.allocation, action=action, episode_slots=slots
    )
    env.action_space.seed(args.seed)
    env.reset(seed=args.seed)
    actions = [env.action_space.sample() for _ in range(50)]

    def run_episode() -> None:
        # Demand and forecasts are drawn once: with them, starting costs as much as stepping.
        for copy in range(num_envs):
            env.sim.restart(copy, 0)
        for step in range(args.episode_requests):
            env.step(actions[step % len(actions)])

    name = f"ParallelismVectorEnv, {action}"
    return Contestant(name, "tokenyard", num_envs, run_episode, scenario=args.allocation)


def stable_baselines(args: Args, num_envs: int) -> Contestant:
    """Wrap the same environment in the peer's vector environment.

    Raises:
        ImportError: Stable-Baselines3 is not installed.
    """
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = DummyVecEnv([lambda: LoadBalancingEnv(env_config(args))] * num_envs)
    env.seed(args.seed)
    env.reset()
    actions = random_actions(args, num_envs)

    def run_episode() -> None:
        # It starts the next episode by itself at the end of each.
        for action in actions:
            env.step(action)

    return Contestant("LoadBalancingEnv", "sb3_dummy", num_envs, run_episode)


def play(env: LoadBalancingEnv | LoadBalancingVectorEnv, actions: np.ndarray) -> None:
    """Live through an episode."""
    env.reset()
    for action in actions:
        env.step(action)


def env_config(args: Args) -> dict[str, object]:
    return {"scenario": args.scenario, "episode_requests": args.episode_requests}


def random_actions(args: Args, num_envs: int) -> np.ndarray:
    num_servers = load_scenario(args.scenario).num_servers
    rng = np.random.default_rng(args.seed)
    return rng.integers(0, num_servers, (args.episode_requests, num_envs))


def contestants(args: Args) -> tuple[list[Contestant], list[str]]:
    """Make all that can be measured here, and say what cannot."""
    ours = [
        *(simulator(args, num) for num in (1, 64, 256)),
        single(args),
        *(vectorised(args, num) for num in (8, 64, 256)),
        *(kernel_rule(args, reward) for reward in FLEET_REWARDS),
        *(fleet_env(args, reward, num) for reward in FLEET_REWARDS for num in (1, 64, 256)),
        *(allocation_env(args, action, num) for action in ("hybrid", "grid") for num in (64, 256)),
    ]
    try:
        return [*ours, stable_baselines(args, 8)], []
    except ImportError:
        missing = "Stable-Baselines3 is not installed (extra `bench`): its rows are left out"
        return ours, [missing]


def measure(args: Args, some: list[Contestant]) -> list[dict[str, str | int | float]]:
    """Run one episode of each in turn, again and again, so that a slow minute hits all alike."""
    for contestant in some:
        contestant.run_episode()
    cpu_s = np.empty((args.repetitions, len(some)))
    for repetition in range(args.repetitions):
        for index, contestant in enumerate(some):
            started_s = time.process_time()
            contestant.run_episode()
            cpu_s[repetition, index] = time.process_time() - started_s
    return [
        {
            "env": contestant.env,
            "implementation": contestant.implementation,
            "num_envs": contestant.num_envs,
            "scenario": contestant.scenario or (args.fleet if contestant.reward else args.scenario),
            "reward": contestant.reward or "scenario's",
            "env_steps_per_cpu_s": args.episode_requests * contestant.num_envs / float(median_s),
        }
        for contestant, median_s in zip(some, np.median(cpu_s, axis=0), strict=True)
    ]


def main(args: Args) -> None:
    """Measure, print a table and write the rows."""
    some, notes = contestants(args)
    rows = measure(args, some)
    table = Table(*rows[0])
    for row in rows:
        cells = (f"{cell:,.0f}" if isinstance(cell, float) else str(cell) for cell in row.values())
        table.add_row(*cells)
    report(table, rows, args.json, args.seed, notes=notes)


if __name__ == "__main__":
    main(tyro.cli(Args))

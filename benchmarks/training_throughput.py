"""How fast routers are trained, beside Stable-Baselines3 and RLlib as shipped, in one run.

python benchmarks/training_throughput.py
python benchmarks/training_throughput.py --problem allocation

Everyone trains the same two networks (128 x 128, ReLU) on the same environment and reward, with
equal batches, epochs and step sizes, in one process with one thread. They take turns, slice by
slice, and CPU time is counted, so that a slow minute of the machine hits all alike; a throughput is
the median over slices. After each slice the greedy policy is judged on validation streams (not
counted): `seconds_to_baseline` is the CPU time spent in training until its mean response is below
shortest expected delay's, null if that takes longer than the budget.

| trainer | samples from | with |
|---|---|---|
| tokenyard | the vectorised environment, 64 copies | arrays (`tokenyard.rl.columnar.columns`) |
| rllib_stock | the same | RLlib's env runner, connectors and learners |
| sb3_dummy | DummyVecEnv of 8 single environments, its usual way | Stable-Baselines3 |
| sb3_vec | the vectorised environment, 64 copies, through an adapter | Stable-Baselines3 |

They see what the paper's agents see. The recipe `equivariant`, what `make sweep` trains, has
normalised observations and a network that corrects a rule, which Stable-Baselines3 does not have.
On a fleet (`--scenario local_cpu`) there is that recipe alone, and the baseline is tuned marginal
delay. Stable-Baselines3 is shown the same observations there.

Allocators have a recipe of their own; arrays and RLlib as shipped take turns in
the same way, judged by their cost per hour against the tuned autoscaler's. `--budget-cpu-s 0` gives
all of them `--least-slices` slices, so that what they have learned from as many slots can be
compared.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import ray
import torch
import tyro
from rich.table import Table

import envs
from envs import LoadBalancingEnv, LoadBalancingVectorEnv
from tokenyard import metrics
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.problem import PROBLEM as ALLOCATION
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.provenance import ResultFile, report
from tokenyard.rl.allocation.training import AllocationRllib, AllocationTrialConfig, RllibAlgorithm
from tokenyard.rl.columnar.sampling import TrainingSettings
from tokenyard.rl.routing.export import export_policy
from tokenyard.rl.routing.training import (
    MARGINAL_DELAY,
    RESPONSE_REWARD,
    AlgorithmRecipe,
    Recipe,
    build_config,
    equivariant,
    scaled,
)
from tokenyard.rl.routing.trial import RllibTraining
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.policies.rule_name import Term
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import linear_weights
from tokenyard.routing.simulator import Decide
from tokenyard.routing.simulator.run import run_compiled
from tokenyard.routing.simulator.server_models import TUNED_DELAY
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, synthetic_streams
from tokenyard.routing.validation import Validation

# Ray starts its workers with a lower priority; on a busy machine they would come last.
os.environ.setdefault("RAY_worker_niceness", "0")


_SCENARIOS = {"routing": "poisson_085", "allocation": "a100x8_13b"}
REWARD_SCALE = 0.1
HIDDEN = (128, 128)
COPIES = 64
DUMMY_COPIES = 8
BATCH = {"ppo": 4096, "a2c": 512, "dqn": 256}
"""On-policy: steps per update. DQN: transitions replayed per update, one update every 64 steps."""
DQN_STEPS_PER_UPDATE = 64
COMMON = {"lr": 3e-4, "gamma": 0.99}
PPO = {"lambda_": 0.95, "minibatch_size": 256, "num_epochs": 4}
A2C = {"lambda_": 1.0, "entropy_coeff": 0.0}
SLICE = {"ppo": 16_384, "a2c": 16_384, "dqn": 4_096}
"""Environment steps of a turn."""


@dataclass(frozen=True)
class Args:
    """Measure the throughput of training and the time to beat the baseline."""

    problem: Literal["routing", "allocation"] = "routing"
    """What is learned."""
    scenario: str | None = None
    """Name or YAML path; poisson_085 for routing, a100x8_13b for allocation."""
    algorithms: tuple[RllibAlgorithm, ...] = ("ppo", "a2c", "dqn")
    """Of ppo, a2c and dqn."""
    budget_cpu_s: float = 30.0
    """CPU time that each may spend in training."""
    least_slices: int = 3
    """Slices that each trains at least."""
    validation_streams: int = 4
    """Streams on which routers are judged."""
    slice_fraction: float = 1.0
    """Share of the usual length of a slice; less only to try the benchmark out."""
    seed: int = 0
    """Of networks, exploration and traffic."""
    json: ResultFile | None = None
    """Write the result rows to this file."""

    @property
    def scenario_name(self) -> str:
        """What was asked for, or else the scenario of the problem."""
        return self.scenario or _SCENARIOS[self.problem]


@dataclass
class Contestant:
    """One trainer of one algorithm, and how it has fared."""

    trainer: str
    algorithm: str
    recipe: str
    train: Callable[[int], int]
    """Train for at least so many environment steps and return how many it were."""
    policy: Callable[[], Any]
    """What has been learned so far, exported."""
    stop: Callable[[], None] = lambda: None
    sample: Callable[[], int] | None = None
    """Sample one batch without learning and return its steps."""
    cpu_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    seconds_to_baseline: float | None = None
    judged: float = float("nan")
    """What the policy after the last slice costs."""

    def row(self, measure: str) -> dict[str, Any]:
        """What is reported of it."""
        # The first slice holds what happens once.
        rates = [num / s for num, s in zip(self.steps[1:], self.cpu_s[1:], strict=True)]
        return {
            "trainer": self.trainer,
            "algorithm": self.algorithm,
            "recipe": self.recipe,
            "env_steps_per_cpu_s": float(np.median(rates)),
            "sampling_steps_per_cpu_s": None if self.sample is None else _rate(self.sample),
            "seconds_to_baseline": self.seconds_to_baseline,
            "env_steps": sum(self.steps),
            "cpu_s": sum(self.cpu_s),
            measure: self.judged,
        }


@dataclass(frozen=True)
class Contest:
    """Who takes part, and by what policies are judged."""

    contestants: list[Contestant]
    notes: list[str]
    """What could not be measured here."""
    judge: Callable[[Any], float]
    """What a policy costs on validation streams."""
    to_beat: float
    """What the baseline costs there."""
    measure: str
    """Name of that cost, with its unit."""


def _rate(sample: Callable[[], int]) -> float:
    rates = []
    for _ in range(7):
        started_s = time.process_time()
        num = sum(sample() for _ in range(4))
        rates.append(num / (time.process_time() - started_s))
    return float(np.median(rates))


def plain(copies: int) -> Recipe:
    """What all trainers can do alike: no normaliser, no residual."""
    per_copy = {name: size // copies for name, size in BATCH.items()}
    per_copy["dqn"] = DQN_STEPS_PER_UPDATE // copies
    dqn = {
        "train_batch_size_per_learner": BATCH["dqn"],
        "target_network_update_freq": 2_000,
        "num_steps_sampled_before_learning_starts": 1_000,
        "double_q": False,
    }
    settings = {"ppo": PPO, "a2c": A2C, "dqn": dqn}
    return Recipe(
        reward_scale=REWARD_SCALE,
        num_envs=copies,
        hidden=HIDDEN,
        algorithms={
            name: AlgorithmRecipe(
                per_copy[name], {**COMMON, **own}, RESPONSE_REWARD, epsilon=(0.1, 0.05)
            )
            for name, own in settings.items()
        },
    )


def _router(
    args: Args, source: StreamSource, algorithm: str, implementation: Any, recipe: Recipe, name: str
) -> Contestant:
    rule = linear_weights(source.scenario, Term(TUNED_DELAY)) or MARGINAL_DELAY
    config = build_config(
        algorithm,
        recipe.for_slo(source.scenario.slo_response_s),
        envs.LOAD_BALANCING_ENV,
        {"scenario": args.scenario_name},
        _settings(args, algorithm, implementation, train_steps=400_000),
        rule,
    )
    training = RllibTraining(config, source, algorithm, recipe.reward_scale)
    return _contestant(training, implementation, algorithm, name)


def _settings(
    args: Args, algorithm: str, implementation: Any, train_steps: int
) -> TrainingSettings:
    steps = 4_096 if algorithm != "dqn" else 1_024
    iterations = train_steps // steps
    return TrainingSettings(
        seed=args.seed,
        env_steps=iterations * steps,
        iterations=iterations,
        implementation=implementation,
    )


def allocator(
    args: Args, scenario: AllocationScenario, algorithm: RllibAlgorithm, implementation: Any
) -> Contestant:
    """Ours, or RLlib as shipped, over the allocation environment."""
    settings = _settings(args, algorithm, implementation, train_steps=200_000).model_dump()
    trial = AllocationTrialConfig(algorithm=algorithm, scenario=scenario.name, **settings)
    training = AllocationRllib(trial.algorithm_config(scenario), scenario, algorithm)
    return _contestant(training, implementation, algorithm, "plain")


def _contestant(
    training: RllibTraining | AllocationRllib, trainer: str, algorithm: str, recipe: str
) -> Contestant:
    def train(num_steps: int) -> int:
        first = training.env_steps
        while training.env_steps < first + num_steps:
            training.step()
        return training.env_steps - first

    def sample() -> int:
        return sum(map(len, training.env_runner.sample()))

    return Contestant(
        trainer, algorithm, recipe, train, lambda: training.artifact({}, {}), training.stop, sample
    )


def stable_baselines(args: Args, source: StreamSource, algorithm: str, trainer: str) -> Contestant:
    """Stable-Baselines3 over its own vector environment or over ours."""
    from stable_baselines3 import A2C as Sb3A2C
    from stable_baselines3 import DQN as Sb3DQN
    from stable_baselines3 import PPO as Sb3PPO

    batches = source.scenario.fleet is not None
    # As large as on constant-rate servers, where the SLO is 2 s.
    scale = REWARD_SCALE * (2.0 / source.scenario.slo_response_s if batches else 1.0)
    env_config = {
        "scenario": args.scenario_name,
        "reward": scaled(RESPONSE_REWARD, scale),
        "shows_rule": batches,
    }
    num = COPIES if trainer == "sb3_vec" else DUMMY_COPIES
    env = _sb3_vec_env(env_config, num, trainer)
    env.seed(args.seed)
    layers = list(HIDDEN)
    net_arch: Any = layers if algorithm == "dqn" else {"pi": layers, "vf": layers}
    options: dict[str, Any] = {
        "policy_kwargs": {"net_arch": net_arch, "activation_fn": torch.nn.ReLU},
        "learning_rate": COMMON["lr"],
        "gamma": COMMON["gamma"],
        "device": "cpu",
        "seed": args.seed,
    }
    model: Any
    if algorithm == "ppo":
        model = Sb3PPO(
            "MlpPolicy", env, n_steps=BATCH["ppo"] // num, batch_size=PPO["minibatch_size"],
            n_epochs=PPO["num_epochs"], gae_lambda=PPO["lambda_"], **options,
        )  # fmt: skip
    elif algorithm == "a2c":
        model = Sb3A2C("MlpPolicy", env, n_steps=BATCH["a2c"] // num, **options)
    else:
        model = Sb3DQN(
            "MlpPolicy", env, buffer_size=50_000, batch_size=BATCH["dqn"], learning_starts=1_000,
            train_freq=max(DQN_STEPS_PER_UPDATE // num, 1), target_update_interval=2_000,
            exploration_initial_eps=0.1, **options,
        )  # fmt: skip

    def train(num_steps: int) -> int:
        before = model.num_timesteps
        model.learn(num_steps, reset_num_timesteps=before == 0)
        return int(model.num_timesteps - before)

    def policy() -> PolicyArtifact | Decide:
        if batches:
            return partial(_greedily, model, source.mean_total_tokens)
        return export_policy(_Sb3Network(model.policy), source, algorithm)

    return Contestant(trainer, algorithm, "plain", train, policy)


def _greedily(model: Any, mean_total_tokens: float, sim: Any) -> None:
    """Run a fleet to the end under the policy of Stable-Baselines3, of which no artifact is."""
    sim.show_rule(mean_total_tokens)
    observations = sim.observe()
    while sim.undecided():
        actions, _ = model.predict(observations, deterministic=True)
        observations, _rewards = sim.step_and_observe(actions)
    sim.drain()


class _Sb3Network:
    """What the export reads of one of our modules, read from a Stable-Baselines3 policy."""

    normaliser = torch.nn.Identity()

    def __init__(self, policy: Any) -> None:
        self.observation_space = policy.observation_space
        q_net = getattr(policy, "q_net", None)
        networks = [q_net] if q_net else [policy.mlp_extractor.policy_net, policy.action_net]
        self.policy_layers = [
            layer
            for network in networks
            for layer in network.modules()
            if isinstance(layer, torch.nn.Linear)
        ]


def _sb3_vec_env(env_config: dict[str, Any], num: int, trainer: str) -> Any:
    from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

    if trainer == "sb3_dummy":
        return DummyVecEnv([lambda: LoadBalancingEnv(env_config)] * num)

    class Adapter(VecEnv):
        """Our vectorised environment as Stable-Baselines3 wants it.

        The step that begins a new episode counts as one of it, which it does once in 5000 steps.
        """

        def __init__(self) -> None:
            self.env = LoadBalancingVectorEnv(num, env_config)
            super().__init__(num, self.env.single_observation_space, self.env.single_action_space)
            self.first_seed: int | None = None

        def seed(self, seed: int | None = None) -> list[int | None]:
            self.first_seed = seed
            return [seed] * num

        def reset(self) -> Any:
            return self.env.reset(seed=self.first_seed)[0]

        def step_async(self, actions: Any) -> None:
            self.actions = actions

        def step_wait(self) -> Any:
            observations, rewards, _, ended, _ = self.env.step(self.actions)
            infos: list[dict[str, Any]] = [{} for _ in range(num)]
            for copy in np.flatnonzero(ended):
                infos[copy]["terminal_observation"] = observations[copy]
                infos[copy]["TimeLimit.truncated"] = True
            return observations, rewards.astype(np.float32), ended, infos

        def close(self) -> None:
            pass

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [getattr(self.env, attr_name, None)] * num

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            raise NotImplementedError(attr_name)

        def env_method(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
            raise NotImplementedError(method_name)

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * num

    return Adapter()


def routers(args: Args, source: StreamSource) -> Contest:
    """All that can learn to route here, and what cannot."""
    if source.scenario.fleet is not None:
        plans = [(name, "tokenyard", equivariant(), "equivariant") for name in args.algorithms]
    else:
        both = ("tokenyard", "rllib_stock")
        plans = [(name, by, plain(COPIES), "plain") for name in args.algorithms for by in both]
        plans += [(name, both[0], equivariant(), "equivariant") for name in args.algorithms]
    some = [_router(args, source, *plan) for plan in plans]
    notes = []
    try:
        some += [
            stable_baselines(args, source, algorithm, trainer)
            for algorithm in args.algorithms
            for trainer in ("sb3_dummy", "sb3_vec")
        ]
    except ImportError:
        notes = ["Stable-Baselines3 is not installed (extra `bench`): its rows are left out"]
    validate = Validation(source, args.validation_streams)
    streams = synthetic_streams(source, args.validation_streams, 0, "validation")

    def judge(policy: PolicyArtifact | Decide) -> float:
        if isinstance(policy, PolicyArtifact):
            return validate(policy)["mean_response_s"]
        return _mean_response_s(source, streams, policy)

    to_beat = baseline_response_s(source, args.validation_streams)
    return Contest(some, notes, judge, to_beat, measure="mean_response_s")


def allocators(args: Args, scenario: AllocationScenario) -> Contest:
    """All that learn to allocate through RLlib's algorithms."""
    some = [
        allocator(args, scenario, algorithm, implementation)
        for algorithm in args.algorithms
        for implementation in ("tokenyard", "rllib_stock")
    ]
    validate = ALLOCATION.validation(scenario, ALLOCATION.num_validation_streams)
    streams = ALLOCATION.streams(scenario, "validation", ALLOCATION.num_validation_streams, seed=0)
    runs = ALLOCATION.candidate(scenario, "autoscaler_tuned").run(scenario, streams, args.seed)
    return Contest(
        some,
        notes=[],
        judge=lambda policy: -validate(policy)["score"],
        to_beat=ALLOCATION.summary(scenario, runs)["cost_with_penalty"],
        measure="cost_per_hour",
    )


def baseline_response_s(source: StreamSource, num_streams: int) -> float:
    """Mean response of the hand rule on the streams of `Validation`.

    It is shortest expected delay, or tuned marginal delay on a fleet.
    """
    scenario = source.scenario
    weights = np.array(linear_weights(scenario, Term(TUNED_DELAY)) or MARGINAL_DELAY)
    streams = synthetic_streams(source, num_streams, 0, "validation")
    size_tokens = source.mean_total_tokens
    return _mean_response_s(source, streams, lambda sim: sim.run_linear(weights, size_tokens))


def _mean_response_s(source: StreamSource, streams: StreamSet, decide: Decide) -> float:
    runs = run_compiled(source.scenario, streams, decide)
    return float(np.mean([metrics.mean(run.outcomes.offered_response_s) for run in runs]))


def take_turns(args: Args, contest: Contest) -> None:
    """Train slice by slice in turn until everyone has beaten the baseline or spent the budget."""
    left = list(contest.contestants)
    while left:
        for trained in list(left):
            num_steps = int(SLICE[trained.algorithm] * args.slice_fraction)
            started_s = time.process_time()
            trained.steps.append(trained.train(num_steps))
            trained.cpu_s.append(time.process_time() - started_s)
            trained.judged = contest.judge(trained.policy())
            spent_s = sum(trained.cpu_s)
            if trained.seconds_to_baseline is None and trained.judged < contest.to_beat:
                trained.seconds_to_baseline = spent_s
            print(
                f"{trained.trainer} {trained.algorithm} {trained.recipe}: {sum(trained.steps)} "
                f"steps in {spent_s:.1f} s, {contest.measure} {trained.judged:.3f} against "
                f"{contest.to_beat:.3f}",
                file=sys.stderr,
            )
            enough = len(trained.steps) >= args.least_slices
            done = trained.seconds_to_baseline is not None or spent_s >= args.budget_cpu_s
            if enough and done:
                left.remove(trained)


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of our own for a while."""
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def main(args: Args) -> None:
    """Measure, print a table and write the rows."""
    torch.set_num_threads(1)
    with local_ray():
        envs.register()
        if args.problem == "routing":
            contest = routers(args, StreamSource(load_scenario(args.scenario_name)))
        else:
            contest = allocators(args, load_allocation(args.scenario_name))
        take_turns(args, contest)
        rows = [one.row(contest.measure) for one in contest.contestants]
        for one in contest.contestants:
            one.stop()
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    report(table, rows, args.json, args.seed, 140, contest.notes)


def _shown(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.2f}" if cell < 100 else f"{cell:,.0f}"
    return "-" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)


if __name__ == "__main__":
    main(tyro.cli(Args))

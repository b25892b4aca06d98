"""The allocation paper as it is printed: a table of features over a CPU trace, and 12 actions.

State is the bin of the normalised average CPU use, which no action can change: a contextual bandit.
The paper does not say how an action changes the other features, so there are three readings:
`independent` (it does not), `random` (uniform features times an effect of the action), `correlated`
(features that follow the CPU use, times that effect). The effects are ours. Every feature is
min-max normalised over all slots and actions.

Source: Dadizadeh Dargiry 2026, "Adaptive Optimization of Resource Allocation in Parallel Processing
of LLMs Using RL", sections 2.3, 2.6 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from tokenyard.allocation.demand import normalised, read_vm_cpu, shipped_generator
from tokenyard.compiled import compiled
from tokenyard.config import FrozenModel
from tokenyard.types import FloatArray, IntArray

NUM_STATES = 10
TYPES = ("data", "model", "hybrid")
MAX_GPUS = 4
NUM_ACTIONS = len(TYPES) * MAX_GPUS
FEATURES = ("cpu", "memory", "latency", "power", "bandwidth")
CPU, MEMORY, LATENCY, POWER, BANDWIDTH = range(5)
Reading = Literal["independent", "random", "correlated"]
Update = Literal["q_learning", "printed", "sarsa"]
UPDATES: dict[Update, int] = {"q_learning": 0, "printed": 1, "sarsa": 2}
_NUM_GENERATED_DAYS = 30


class LiteralWeights(FrozenModel):
    """Weights of the paper's two rewards, over features in [0, 1].

    The one of section 3: `bandwidth` x B + `power` x (1 - P) + `latency` x (1 - L) + `memory` x
    (1 - M) + `cpu` x (1 - CPU). The one of section 2.3 (`of_maxima`): latency, memory, throughput
    (`bandwidth`) and energy (`power`) over their maxima, all with a positive sign, as printed.
    """

    bandwidth: Annotated[float, Field(ge=0)] = 0.5
    power: Annotated[float, Field(ge=0)] = 0.4
    latency: Annotated[float, Field(ge=0)] = 0.3
    memory: Annotated[float, Field(ge=0)] = 0.2
    cpu: Annotated[float, Field(ge=0)] = 0.1
    of_maxima: bool = False

    @model_validator(mode="after")
    def _weighs_something(self) -> LiteralWeights:
        if not any((self.bandwidth, self.power, self.latency, self.memory, self.cpu)):
            raise ValueError("weights are all zero; give at least one a positive weight")
        return self

    def reward(self, features: FloatArray) -> FloatArray:
        """Reward of features whose last axis is in the order of `FEATURES`."""
        parts = np.moveaxis(features, -1, 0)
        weighted = (
            (self.memory, parts[MEMORY]),
            (self.latency, parts[LATENCY]),
            (self.power, parts[POWER]),
        )
        total = self.bandwidth * parts[BANDWIDTH]
        for weight, part in weighted:
            total = total + weight * (part if self.of_maxima else 1.0 - part)
        if not self.of_maxima:
            total = total + self.cpu * (1.0 - parts[CPU])
        return np.asarray(total)


def decode_action(action: int) -> tuple[str, int]:
    """Kind of parallelism and number of GPUs of an action in 0..11."""
    return TYPES[action // MAX_GPUS], action % MAX_GPUS + 1


def encode_action(kind: str, num_gpus: int) -> int:
    """The inverse of `decode_action`."""
    return TYPES.index(kind) * MAX_GPUS + num_gpus - 1


@dataclass(frozen=True, eq=False)
class LiteralTable:
    """The paper's data set under one reading; T slots."""

    features: FloatArray
    """In [0, 1], shape (T, NUM_ACTIONS, 5)."""
    states: IntArray
    """Bin of the CPU use, shape (T,)."""
    rewards: FloatArray
    """Shape (T, NUM_ACTIONS)."""
    cpu: FloatArray
    """Normalised minimum, maximum and average CPU use, shape (T, 3)."""

    @property
    def num_slots(self) -> int:
        """Slots of the trace, T."""
        return len(self.states)


def literal_table(
    reading: Reading,
    weights: LiteralWeights | None = None,
    bins: Literal["uniform", "quantile"] = "uniform",
    seed: int = 0,
) -> LiteralTable:
    """Make the data set: the CPU trace where its file is found, else generated CPU use.

    `reading` says how actions and CPU use change the features, which are drawn. Without weights of
    the reward those of section 3 count. Bins are ten of equal width, or ten that are visited
    equally often.
    """
    rng = np.random.default_rng(seed)
    cpu = cpu_use(rng)
    average = cpu[:, 2]
    base = _base_features(reading, average, rng)
    effects = np.ones((NUM_ACTIONS, 5)) if reading == "independent" else action_effects()
    features = base[:, None, :] * effects
    low, high = features.min(axis=(0, 1)), features.max(axis=(0, 1))
    features = (features - low) / (high - low)
    edges = (
        np.linspace(0, 1, NUM_STATES + 1)[1:-1]
        if bins == "uniform"
        else np.quantile(average, np.linspace(0, 1, NUM_STATES + 1)[1:-1])
    )
    states = np.searchsorted(edges, average, side="right").astype(np.int64)
    rewards = (weights or LiteralWeights()).reward(features)
    return LiteralTable(features, states, rewards, cpu)


def cpu_use(rng: np.random.Generator) -> FloatArray:
    """Normalised minimum, maximum and average CPU use, shape (T, 3)."""
    frame = read_vm_cpu()
    if frame is not None:
        return np.column_stack([normalised(frame[name].to_numpy()) for name in frame.columns])
    values = shipped_generator().sample(_NUM_GENERATED_DAYS * 288, rng, 288)
    # The three columns of the trace correlate by 0.9 and more: one stands for all.
    return np.column_stack([normalised(values)] * 3)


def _base_features(reading: Reading, cpu: FloatArray, rng: np.random.Generator) -> FloatArray:
    noise = rng.random((len(cpu), 5))
    noise[:, CPU] = cpu
    if reading != "correlated":
        return noise
    slopes = np.array([1.0, 0.6, 0.7, 0.8, 0.5])
    base: FloatArray = slopes * cpu[:, None] + (1.0 - slopes) * noise
    return base


def action_effects() -> FloatArray:
    """Factor of every action on every feature, shape (NUM_ACTIONS, 5): invented, not the paper's.

    More GPUs are faster, draw more power and talk more; splitting the model saves memory per node
    and talks most.
    """
    effects = np.ones((NUM_ACTIONS, 5))
    kinds = {"data": (1.0, 0.75, 0.4), "model": (0.55, 0.65, 1.0), "hybrid": (0.75, 0.6, 0.75)}
    for action in range(NUM_ACTIONS):
        kind, gpus = decode_action(action)
        memory, speed_up, traffic = kinds[kind]
        effects[action, MEMORY] = 1.0 if gpus == 1 else memory + (1 - memory) / gpus
        effects[action, LATENCY] = gpus**-speed_up
        effects[action, POWER] = (0.4 + 0.6 * gpus) / (0.4 + 0.6 * MAX_GPUS)
        effects[action, BANDWIDTH] = traffic * (0.2 + 0.8 * (gpus - 1) / (MAX_GPUS - 1))
    return effects


def fixed_policy() -> IntArray:
    """Action per state of the Fixed policy, shape (NUM_STATES,).

    The paper gives one rule, average CPU above 0.7: hybrid on four GPUs; ours for the rest: above
    0.4 model parallelism on two, else data parallelism on one.
    """
    centres = (np.arange(NUM_STATES) + 0.5) / NUM_STATES
    return np.where(
        centres > 0.7,
        encode_action("hybrid", 4),
        np.where(centres > 0.4, encode_action("model", 2), encode_action("data", 1)),
    ).astype(np.int64)


@dataclass(frozen=True)
class LearningConfig:
    """What the paper leaves open."""

    alpha: float = 0.1
    gamma: float = 0.9
    epsilon: tuple[float, float] = (1.0, 0.05)
    """Share of random actions at first and at last, falling linearly."""
    passes: int = 5
    """Passes over the data set."""


@compiled
def uniform(random: npt.NDArray[np.uint64]) -> float:
    """Next number in [0, 1) of a xorshift generator (Marsaglia 2003, 64 bit) in `random[0]`."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def _epsilon_greedy(values: FloatArray, epsilon: float, random: npt.NDArray[np.uint64]) -> int:
    if uniform(random) < epsilon:
        return int(uniform(random) * len(values))
    return int(np.argmax(values))


@compiled
def _learn(
    states: IntArray,
    rewards: FloatArray,
    q: FloatArray,
    update: int,
    settings: tuple[float, float, float, float],
    passes: int,
    random: npt.NDArray[np.uint64],
    curve: FloatArray,
) -> None:
    """Learn action values from `passes` passes; `curve` gets the mean reward of each."""
    alpha, gamma, first, last = settings
    num_slots = len(states)
    total = passes * num_slots
    done = 0
    action = _epsilon_greedy(q[states[0]], first, random)
    for number in range(passes):
        earned = 0.0
        for t in range(num_slots - 1):
            epsilon = first + (last - first) * done / total
            state, following = states[t], states[t + 1]
            reward = rewards[t, action]
            earned += reward
            next_action = _epsilon_greedy(q[following], epsilon, random)
            best = q[following, np.argmax(q[following])]
            if update == 2:
                target = reward + gamma * q[following, next_action]
            else:
                target = reward + gamma * best
            row = following if update == 1 else state
            q[row, action] += alpha * (target - q[row, action])
            action = next_action
            done += 1
        curve[number] = earned / (num_slots - 1)


def learn(
    table: LiteralTable, update: Update, config: LearningConfig, seed: int
) -> tuple[FloatArray, FloatArray]:
    """Learn action values, shape (NUM_STATES, NUM_ACTIONS), with the mean reward of every pass.

    `update` is `q_learning` (Watkins), `printed` (the paper's, which writes to Q(s', a)) or
    `sarsa`.
    """
    q = np.zeros((NUM_STATES, NUM_ACTIONS))
    curve = np.zeros(config.passes)
    random = np.random.default_rng(seed).integers(1, 2**63, 1, dtype=np.uint64)
    settings = (config.alpha, config.gamma, *config.epsilon)
    _learn(table.states, table.rewards, q, UPDATES[update], settings, config.passes, random, curve)
    return q, curve


def exact_values(table: LiteralTable, gamma: float = 0.9) -> FloatArray:
    """Optimal action values of the empirical process, shape (NUM_STATES, NUM_ACTIONS).

    Transitions are counted; since no action changes them, Q(s, a) = E[r(s, a)] + gamma E[V(s')].
    States that are never visited have the values of their nearest visited one below.
    """
    reward = np.zeros((NUM_STATES, NUM_ACTIONS))
    visits = np.bincount(table.states, minlength=NUM_STATES)
    for state in range(NUM_STATES):
        if visits[state]:
            reward[state] = table.rewards[table.states == state].mean(axis=0)
        elif state:
            reward[state] = reward[state - 1]
    counts = np.zeros((NUM_STATES, NUM_STATES))
    np.add.at(counts, (table.states[:-1], table.states[1:]), 1.0)
    counts += np.diag(counts.sum(axis=1) == 0).astype(float)
    transition = counts / counts.sum(axis=1, keepdims=True)
    best = reward.max(axis=1)
    values = np.linalg.solve(np.eye(NUM_STATES) - gamma * transition, best)
    return np.asarray(reward + gamma * (transition @ values)[:, None])


def mean_reward(table: LiteralTable, policy: IntArray) -> float:
    """Mean reward per slot of a policy, an action per state, shape (NUM_STATES,)."""
    chosen = policy[table.states]
    return float(table.rewards[np.arange(table.num_slots), chosen].mean())

"""Q-learning and SARSA on a table, over the allocation simulator: one compiled loop.

State is the bin of the last demand, the half of the day, the plan in force and whether requests
wait. Rewards are centred on a running mean (Naik et al. 2024, "Reward Centering",
arXiv:2405.09999, equation 4), without which a table of zeros is a pessimistic start; exploration
prefers to stay, since every other random action is a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.allocation.artifact import AllocationArtifact, AllocationMetadata
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.dynamics import BACKLOG, NUM_OUT, Model, make_model, run_slot
from tokenyard.allocation.paper.simulator import UPDATES, Update, uniform
from tokenyard.allocation.planner import make_planner
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

NUM_BINS = 24
NUM_HALVES = 2
_NUM_DRAWS = 8
ALPHA, LAST_ALPHA, GAMMA, EPSILON, LAST_EPSILON, STAY, CENTRE = range(7)


@dataclass(frozen=True)
class TabularConfig:
    """What the two algorithms are given."""

    update: Update = "q_learning"
    """`printed` is the allocation paper's, which writes to Q(s', a)."""
    num_steps: int = 20_000_000
    alpha: tuple[float, float] = (0.1, 0.005)
    """Step size at first and at last, falling linearly."""
    gamma: float = 0.98
    epsilon: tuple[float, float] = (0.3, 0.01)
    """Share of exploring steps at first and at last."""
    stay: float = 0.9
    """Share of exploring steps that keep the plan in force."""
    centring: float = 0.001
    """Step size of the mean reward over that of the values; 0: rewards are not centred."""


@compiled
def _choose(
    values: FloatArray, current: int, epsilon: float, stay: float, random: npt.NDArray[np.uint64]
) -> int:
    """Greedy, or exploring with a preference for the plan in force."""
    if uniform(random) < epsilon:
        if uniform(random) < stay:
            return current
        return int(uniform(random) * len(values))
    best = current
    for action in range(len(values)):
        if values[action] > values[best]:
            best = action
    return best


@compiled
def learn_slots(
    model: Model,
    candidates: IntArray,
    demands: FloatArray,
    bins: IntArray,
    halves: IntArray,
    q: FloatArray,
    update: int,
    settings: FloatArray,
    progress: FloatArray,
    state: IntArray,
    scalars: FloatArray,
    random: npt.NDArray[np.uint64],
    out: FloatArray,
) -> None:
    """Learn along one stretch of demand; state and scalars go on in the next call.

    Args:
        model: A `Model`.
        candidates: Plans, shape (S,).
        demands: Requests per second, shape (T,).
        bins: Bin of each, shape (T,).
        halves: Half of the day of each, shape (T,).
        q: Values, shape (NUM_BINS, 2, S, 2, S), changed in place.
        update: 0 Q-learning, 1 as printed, 2 SARSA.
        settings: In the order of the constants above, shape (7,).
        progress: Share of the training done at the start and at the end, shape (2,).
        state: Plan in force and next action, shape (2,).
        scalars: Backlog and mean reward, shape (2,).
        random: State of the generator, shape (1,).
        out: Scratch, shape (NUM_OUT,).
    """
    plan, action = state[0], state[1]
    backlog, mean = scalars[0], scalars[1]
    for t in range(1, len(demands)):
        done = progress[0] + (progress[1] - progress[0]) * t / len(demands)
        alpha = settings[ALPHA] + (settings[LAST_ALPHA] - settings[ALPHA]) * done
        epsilon = settings[EPSILON] + (settings[LAST_EPSILON] - settings[EPSILON]) * done
        waits = 1 if backlog > 1.0 else 0
        reward = run_slot(model, candidates[plan], candidates[action], demands[t], backlog, out)
        backlog = out[BACKLOG]
        wait_next = 1 if backlog > 1.0 else 0
        ahead = q[bins[t], halves[t], action, wait_next]
        next_action = _choose(ahead, action, epsilon, settings[STAY], random)
        best = ahead[0]
        for other in range(1, len(ahead)):
            best = max(best, ahead[other])
        value = ahead[next_action] if update == 2 else best
        row = q[bins[t - 1], halves[t - 1], plan, waits]
        error = reward - mean + settings[GAMMA] * value
        if update == 1:
            ahead[action] += alpha * (error - ahead[action])
        else:
            error -= row[action]
            row[action] += alpha * error
            mean += settings[CENTRE] * alpha * error
        plan, action = action, next_action
    state[0], state[1] = plan, action
    scalars[0], scalars[1] = backlog, mean


class TabularLearner:
    """A training that advances in parts and can be stopped and resumed."""

    def __init__(
        self, scenario: AllocationScenario, config: TabularConfig | None = None, seed: int = 0
    ) -> None:
        self.scenario, self.seed = scenario, seed
        self.config = config or TabularConfig()
        self.env_steps = 0
        planner = make_planner(scenario)
        self._model, self._candidates = make_model(scenario), planner.candidates
        source = demand_source(scenario)
        draws = [source.train(10_000 * (seed + 1) + i, is_learned=True) for i in range(_NUM_DRAWS)]
        self.edges: FloatArray = np.quantile(
            np.concatenate([draw.per_s for draw in draws]), np.linspace(0, 1, NUM_BINS + 1)[1:-1]
        )
        per_day = scenario.slots_per_day
        self._draws = [
            (
                draw.per_s,
                np.searchsorted(self.edges, draw.per_s, side="right"),
                (draw.start_slot + np.arange(len(draw.per_s))) % per_day * NUM_HALVES // per_day,
            )
            for draw in draws
        ]
        size = len(self._candidates)
        self.q: FloatArray = np.zeros((NUM_BINS, NUM_HALVES, size, 2, size))
        self._state = np.zeros(2, np.int64)
        self._scalars = np.zeros(2)
        self._random = np.random.default_rng(seed).integers(1, 2**63, 1, dtype=np.uint64)
        self._out = np.zeros(NUM_OUT)
        self.slots_per_step = len(self._draws[0][0])

    def step(self) -> dict[str, float]:
        """Learn along one draw of demand; return the running mean of the reward."""
        own = self.config
        settings = np.array([*own.alpha, own.gamma, *own.epsilon, own.stay, own.centring])
        demands, bins, halves = self._draws[self.env_steps // self.slots_per_step % _NUM_DRAWS]
        steps = np.array([self.env_steps, self.env_steps + self.slots_per_step])
        learn_slots(
            self._model, self._candidates, demands, bins, halves, self.q, UPDATES[own.update],
            settings, np.minimum(steps / own.num_steps, 1.0), self._state, self._scalars,
            self._random, self._out,
        )  # fmt: skip
        self.env_steps += self.slots_per_step
        return {"mean_reward": float(self._scalars[1])}

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on as if nothing had happened, as JSON has it."""
        arrays = (self.q, self._state, self._scalars, self._random)
        return {"env_steps": self.env_steps, "arrays": [array.tolist() for array in arrays]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state`."""
        self.env_steps = state["env_steps"]
        q, plans, scalars, random = state["arrays"]
        self.q, self._state = np.array(q), np.array(plans, np.int64)
        self._scalars, self._random = np.array(scalars), np.array(random, np.uint64)

    def artifact(
        self, metrics: Mapping[str, float] | None = None, lineage: Mapping[str, str] | None = None
    ) -> AllocationArtifact:
        """Export the greedy policy; ties, and states never visited, keep the plan in force."""
        metadata = AllocationMetadata(
            kind="table",
            scenario=self.scenario,
            trainer=self.config.update,
            metrics=metrics or {},
            lineage=lineage or {},
        )
        # From (bin, half, plan, waits, next) to (waits, half, bin, plan, next).
        values = self.q.transpose(3, 1, 0, 2, 4)
        own = np.arange(values.shape[3])
        stays = values[..., own, own] >= values.max(axis=-1)
        best = np.where(stays, own, values.argmax(axis=-1))
        return AllocationArtifact(metadata, {"edges_per_s": self.edges, "best": best})

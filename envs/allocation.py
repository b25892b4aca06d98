"""Allocation as an environment: one step is one control interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from envs.copies import IndependentCopies, Stepped
from envs.picture import RENDER_METADATA, Picture, check_render_mode, draw_bars
from tokenyard.allocation import dynamics as dyn
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.forecast import scenario_forecaster
from tokenyard.allocation.observation import OBSERVATION_LIMIT, observation_size
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.allocation.simulator import AllocationSim, Observations
from tokenyard.config import FrozenModel
from tokenyard.types import FloatArray, IntArray

_MEASURED = {
    "offered_requests": dyn.OFFERED,
    "served_requests": dyn.SERVED,
    "dropped_requests": dyn.DROPPED,
    "slo_violations": dyn.VIOLATIONS,
    "usd": dyn.USD,
    "energy_j": dyn.ENERGY_J,
    "switched": dyn.SWITCHED,
}
"""Numbers of a step's `info` by column of the dynamics."""


class ParallelismEnvConfig(FrozenModel):
    """What `ParallelismEnv` and its vectorised twin are made from."""

    scenario: AllocationScenario
    """A scenario, or the name or YAML path of one."""
    objective: Objective | None = None
    """What is rewarded, in place of the scenario's."""
    action: Literal["hybrid", "grid"] = "hybrid"
    """`hybrid`: parallelism, number of GPUs and memory, the last continuous; `grid`: one number for
    the feasible pairs of the first two, with the memory and batch limit of
    `PlanTable.best_memory`."""
    shows_planner: bool = False
    """Whether observations end with what the planner expects of every feasible pair."""
    episode_slots: Annotated[int, Field(ge=1)] = 288
    """Steps of an episode."""
    reward_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on rewards; it changes no preference."""
    subtract_bound: bool = False
    """Whether a reward is told relative to the best one of its slot were changes free and nothing
    waiting. It depends on demand alone, so the optimum is the same, with less noise."""

    @field_validator("scenario", mode="before")
    @classmethod
    def _load_by_name(cls, value: object) -> object:
        return load_allocation(value) if isinstance(value, str) else value


class _Feed:
    """Draws episodes and turns actions into plans."""

    def __init__(self, config: ParallelismEnvConfig, num_copies: int) -> None:
        self.config = config
        self.source = demand_source(config.scenario)
        forecaster = scenario_forecaster(config.scenario)
        self.sim = AllocationSim(
            config.scenario, num_copies, config.episode_slots, forecaster, config.objective,
            config.shows_planner,
        )  # fmt: skip
        self._memories = np.array(config.scenario.memory_fractions)
        self._shape_index = np.argwhere(self.sim.table.shape_mask)
        self._grid = np.array(self.sim.table.best_memory, np.int64)

    def spaces(self) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Space[Any]]:
        scenario, table = self.config.scenario, self.sim.table
        size = observation_size(table) + len(self._grid) * self.config.shows_planner
        box = gymnasium.spaces.Box(-OBSERVATION_LIMIT, OBSERVATION_LIMIT, (size,), np.float32)
        if self.config.action == "grid":
            return box, gymnasium.spaces.Discrete(len(self._grid))
        parts: dict[str, gymnasium.spaces.Space[Any]] = {
            "memory_fraction": gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
        }
        parts["parallelism"] = gymnasium.spaces.Discrete(len(table.parallelism))
        parts["num_gpus"] = gymnasium.spaces.Discrete(scenario.num_gpus, start=1)
        if len(scenario.max_batches) > 1:
            parts["max_batch"] = gymnasium.spaces.Discrete(len(scenario.max_batches))
        return box, gymnasium.spaces.Dict(parts)

    def start(self, copy: int, rng: np.random.Generator) -> None:
        """Give one copy a fresh stretch of demand and a random plan to start from."""
        stream = self.source.episode(self.config.episode_slots, rng)
        plans = self._grid if self.config.action == "grid" else np.arange(self.sim.table.num_plans)
        self.sim.load(copy, stream, int(plans[rng.integers(len(plans))]))

    def plans(self, actions: Any) -> IntArray:
        """Plans of actions, -1 where infeasible, shape (num_copies,).

        Raises:
            ValueError: A part of an action is out of its range.
        """
        if self.config.action == "grid":
            chosen = np.asarray(actions, np.int64).reshape(-1)
            if chosen.min() < 0 or chosen.max() >= len(self._grid):
                raise ValueError(f"action {chosen} is out of range")
            return np.asarray(self._grid[chosen])
        if not isinstance(actions, Mapping):
            # Vector environments of RLlib give one action per copy.
            actions = {name: np.array([action[name] for action in actions]) for name in actions[0]}
        kind = np.asarray(actions["parallelism"], np.int64).reshape(-1)
        gpus = np.asarray(actions["num_gpus"], np.int64).reshape(-1) - 1
        memory = np.asarray(actions["memory_fraction"], float).reshape(-1)
        batch = np.asarray(actions.get("max_batch", 0), np.int64).reshape(-1)
        index = self.sim.table.index
        checks = {"parallelism": (kind, 0), "num_gpus": (gpus, 1), "max_batch": (batch, 3)}
        for name, (part, axis) in checks.items():
            if part.min() < 0 or part.max() >= index.shape[axis]:
                raise ValueError(f"action {name} {part} is out of range")
        if not (memory >= 0).all() or memory.max() > 1:
            raise ValueError(f"action memory_fraction {memory} is not in [0, 1]")
        step = np.maximum(np.searchsorted(self._memories, memory + 1e-6, side="right") - 1, 0)
        plans: IntArray = index[kind, gpus, step, batch]
        return plans

    def mask(self, copy: int) -> npt.NDArray[np.int8]:
        """What may be chosen: shape (parallelism, GPUs), or (feasible pairs,)."""
        sim = self.sim
        frozen = not sim.may_switch(copy)
        mask = sim.table.shape_mask & (not frozen)
        plan = sim.table.plans[sim.plan(copy)]
        mask[sim.table.parallelism.index(plan.parallelism), plan.num_gpus - 1] = True
        if self.config.action == "grid":
            mask = mask[tuple(self._shape_index.T)]
        return mask.astype(np.int8)

    def rewards(self, earned: FloatArray) -> FloatArray:
        """What is told of the rewards of a step."""
        bound = self.sim.bounds() if self.config.subtract_bound else 0.0
        return np.asarray((earned - bound) * self.config.reward_scale)


class ParallelismEnv(gymnasium.Env[Observations, Any]):
    """Choose the parallelism plan of a pool of GPUs, one control interval after the other.

    Observation:
        float32, shape (27 + S,) for S feasible pairs of parallelism and GPUs; 42 numbers on eight
        A100. Of the last slot: utilisation, share of the pool's memory in use by the plan, share of
        the batch limit, latency over what the SLO allows, share of the time in collectives
        (the paper's five); log(1 + backlog in requests), share of the slot without service. Slots
        since the last change over 72 (at most 1), share of the switch budget left, 1 where a change
        is allowed, the plan's goodput capacity over the pool's best, GPUs over 8, share of
        SLO violations. Then sine and cosine of the time of day, demand of the last six slots, the
        forecasts 1, 2, 3, 6, 12 and 24 slots ahead, both over the pool's best; then one 1 at the
        plan's shape. All within [-5, 5]; `sim.num_saturated` counts numbers set to the limit. With
        `shows_planner` S more: what the planner expects each pair to cost over its horizon beyond
        the cheapest, over the pool's price of a slot, at most 5.

    Action:
        Dict: `parallelism`, index of the plan table's `parallelism`; `num_gpus`;
        `memory_fraction` in [0, 1], rounded down to the scenario's steps and raised to the plan's
        least; `max_batch`, index, where the scenario has several. With `action="grid"` an index of
        the feasible pairs alone.
        `info["action_mask"]` says what is feasible and allowed; what is not is refused: the plan
        stays, and `sim.num_refused` counts.

    Reward: Sum of weight x term over `Objective`, times `reward_scale`. By default minus dollars,
        an SLO violation at `violation_usd`: one A100 for five minutes costs 5.12 / 12 = 0.4267; at
        one request per second Llama-2 13B violates 5.399 of 300 there, -0.4267 - 0.002 x 5.399 =
        -0.4375.

    Episode end:
        Truncated after `episode_slots` steps, never terminated: demand goes on.

    Source:
        Dadizadeh Dargiry 2026, "Adaptive Optimization of Resource Allocation in Parallel Processing
        of LLMs Using RL", sections 2.1 to 2.6. Ours: the dynamics, and the state that makes them
        Markov.
    """

    metadata = RENDER_METADATA

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        """Validate the fields of `ParallelismEnvConfig`, in a mapping (RLlib) or as keywords."""
        self.render_mode = check_render_mode(render_mode)
        self.config = ParallelismEnvConfig.model_validate({**(config or {}), **options})
        self._feed = _Feed(self.config, num_copies=1)
        self.sim = self._feed.sim
        self.observation_space, self.action_space = self._feed.spaces()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Start an episode with fresh demand; `seed` fixes it and all that follow."""
        super().reset(seed=seed)
        self._feed.start(0, self.np_random)
        return self.sim.observe()[0].copy(), {"action_mask": self._feed.mask(0)}

    def step(self, action: Any) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Put a plan into force for one slot.

        Raises:
            ValueError: A part of the action is out of range, or the episode is over.
        """
        if self.sim.ended()[0]:
            raise ValueError("the episode is over: call reset first")
        reward = float(self._feed.rewards(self.sim.step(self._feed.plans(action)))[0])
        measured = {name: float(self.sim.outs[0, which]) for name, which in _MEASURED.items()}
        info = {**measured, "action_mask": self._feed.mask(0)}
        ended = bool(self.sim.ended()[0])
        return self.sim.observe()[0].copy(), reward, False, ended, info

    def render(self) -> Picture:  # type: ignore[override]
        """Draw the pool: its GPUs in use; how busy they were; what waits, half at 100 requests."""
        on = self.sim.table.plans[self.sim.plan(0)].num_gpus / self.config.scenario.num_gpus
        load, waiting = self.sim.outs[0, [dyn.LOAD, dyn.BACKLOG]].tolist()
        return draw_bars(np.array([[on, load, waiting / (waiting + 100.0)]]))


class ParallelismVectorEnv(IndependentCopies):
    """Many independent `ParallelismEnv`s stepped by one compiled call; see `IndependentCopies`.

    Masks are not in `info`: they cost more than the steps.
    """

    def __init__(
        self, num_envs: int, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Validate the configuration and make `num_envs` copies; see `ParallelismEnv`."""
        self.config = ParallelismEnvConfig.model_validate({**(config or {}), **options})
        self._feed = _Feed(self.config, num_envs)
        super().__init__(num_envs, *self._feed.spaces())
        self.sim = self._feed.sim

    def start(self, copy: int, rng: np.random.Generator) -> None:
        """Give one copy fresh demand and a random plan."""
        self._feed.start(copy, rng)

    def observe(self) -> Observations:
        """What every copy shows."""
        return self.sim.observe().copy()

    def step(self, actions: Any) -> Stepped:
        """Put a plan into force in every copy; copies whose episode ended begin a new one.

        Raises:
            ValueError: A part of an action is out of range.
        """
        # A copy whose stream is over is not stepped: it earns 0.
        rewards = self._feed.rewards(self.sim.step(self._feed.plans(actions)))
        self.begin_anew()
        return self.stepped(self.observe(), rewards, self.sim.ended())

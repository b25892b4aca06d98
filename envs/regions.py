"""Regions as an environment: one step is one slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from pydantic import field_validator

from envs.copies import IndependentCopies, Observations, Stepped
from envs.picture import RENDER_METADATA, Picture, check_render_mode, draw_bars
from tokenyard.config import FrozenModel
from tokenyard.regions import observation as ob
from tokenyard.regions import transport
from tokenyard.regions.activation import ActivationRule, targets
from tokenyard.regions.demand import sample_stream
from tokenyard.regions.forecast import DemandForecaster, fit_seasonal
from tokenyard.regions.policies.rules import COST_KNOBS
from tokenyard.regions.scenario import RegionReward, RegionScenario, load_regions
from tokenyard.regions.servers import make_cluster
from tokenyard.regions.simulator import RegionSim, world
from tokenyard.regions.types import Dispatch, RegionDecision, RegionState
from tokenyard.types import FloatArray

_MEASURED = {
    "offered_tasks": world.OUT_OFFERED,
    "dropped_tasks": world.OUT_DROPPED,
    "deadline_misses": world.OUT_DEADLINE_MISSES,
    "response_s": world.OUT_RESPONSE_S,
    "energy_usd": world.OUT_ENERGY_USD,
    "switching_usd": world.OUT_OVERHEAD_USD,
    "late_usd": world.OUT_LATE_USD,
    "load_balance": world.OUT_BALANCE,
    "waiting_tasks": world.OUT_WAITING,
}
"""Numbers of a step's `info` by column of what a slot measures."""


class RegionEnvConfig(FrozenModel):
    """What `RegionEnv` and its vectorised twin are made from."""

    scenario: RegionScenario
    """A scenario, or the name or YAML path of one."""
    action: ob.Action = "mix"
    reward: RegionReward = RegionReward()
    dispatch: Dispatch = "shares"
    """How tasks are sent within a slot."""

    @field_validator("scenario", mode="before")
    @classmethod
    def _load_by_name(cls, value: object) -> object:
        return load_regions(value) if isinstance(value, str) else value


class _Copy:
    """One simulator with what the reward and the observation need."""

    def __init__(self, config: RegionEnvConfig, forecaster: DemandForecaster) -> None:
        transport.check_solver()
        self.config, self._forecaster = config, forecaster
        self._rule = ActivationRule.from_scenario(config.scenario)
        cluster = make_cluster(config.scenario)
        self.num_regions = cluster.num_regions
        kinds = list(config.scenario.kinds.values())
        watts = sum(kinds[kind].tdp_w for kind in cluster.kind.tolist())
        kwh = watts * config.scenario.prices.pue * config.scenario.slot_s / 3.6e6
        self._full_usd = float(kwh * cluster.usd_per_kwh.mean())
        self.num_saturated = 0

    def start(self, rng: np.random.Generator) -> None:
        stream = sample_stream(self.config.scenario, rng)
        self.sim = RegionSim(self.config.scenario, stream, self._forecaster)
        self.state = self.sim.state()

    def step(self, action: npt.NDArray[Any]) -> tuple[float, FloatArray]:
        """Run a slot; return its reward and what it measured."""
        before, state = self.sim.shares, self.state
        shares = ob.shares_of(action, state, self.config.action)
        active = targets(state, shares, self._rule)
        decision = RegionDecision(shares, active, self.config.dispatch, COST_KNOBS.live)
        out = self.sim.step(decision)
        reward = self._reward(shares, before, state, out)
        # After the last slot the state before it stands in: nothing follows.
        self.state = state if self.sim.ended else self.sim.state()
        return reward, out

    def _reward(
        self, shares: FloatArray, before: FloatArray, state: RegionState, out: FloatArray
    ) -> float:
        weights, size = self.config.reward, 2 * self.num_regions
        usd = out[[world.OUT_ENERGY_USD, world.OUT_OVERHEAD_USD, world.OUT_LATE_USD]].sum()
        reward = -weights.usd * usd / self._full_usd
        if weights.response:
            mean_s = out[world.OUT_RESPONSE_S] / max(out[world.OUT_PLACED], 1.0)
            reward -= weights.response * mean_s / 20.0
        if weights.transport:
            wanted = ob.wanted_shares(state)
            reward -= weights.transport * ((shares - wanted) ** 2).sum() / size
        if weights.smoothness:
            reward -= weights.smoothness * ((shares - before) ** 2).sum() / size
        if weights.waiting:
            whole = max(float(state.capacity.sum()), 1e-9)
            reward -= weights.waiting * out[world.OUT_WAITING] / whole
        return float(reward)

    def observe(self) -> Observations:
        """Return `tokenyard.regions.observation.encode` within its limits."""
        flat = ob.encode(self.state, self.config.action)
        self.num_saturated += int((np.abs(flat) > ob.LIMIT).sum())
        return np.asarray(np.clip(flat, -ob.LIMIT, ob.LIMIT), dtype=np.float32)


def _spaces(
    config: RegionEnvConfig, num_regions: int
) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Box]:
    num_observed = ob.observation_size(num_regions, config.action)
    num_actions = ob.action_size(num_regions, config.action)
    observation = gymnasium.spaces.Box(-ob.LIMIT, ob.LIMIT, (num_observed,), np.float32)
    action = gymnasium.spaces.Box(-1.0, 1.0, (num_actions,), np.float32)
    return observation, action


class RegionEnv(gymnasium.Env[Observations, npt.NDArray[np.float32]]):
    """Decide, slot after slot, what share of each region's tasks goes to which region.

    Servers go on and off by Eq 6 from the shares and the forecast, in all configurations alike.

    Observation:
        float32, shape (8 R,): by region, each over what its servers can serve in a slot, the last
        slot's arrivals, the forecast of this slot and of the last one forecast; log(1 + tasks that
        wait, likewise); share of the last slot in which its servers were at work; servers on over
        servers; price of electricity over the mean, minus 1; share of all capacity times R, minus
        1. With `action="shares"` the last shares follow, and those of the transport of the
        forecast: (8 R + 2 R^2,). All within [-10, 10]; `num_saturated` counts numbers set to the
        limit.

    Action:
        float32 in [-1, 1], shape (4 R,): a fifth of the logits of the weights of four plans by row
        (`combine` in `tokenyard.regions.observation`). With `action="shares"`, (R^2,): a fifth of
        the logits of the shares by row.

    Reward:
        `RegionReward`; by default minus dollars over the energy bill of a slot with all servers at
        work. With 250 servers of the paper's kinds that bill is 83 kW x 1.3 x 45 s = 1.35 kWh, 0.25
        dollars at 0.185 per kWh; a slot that costs 0.20 of energy, 0.05 of switching and 0.025 of
        lateness earns -0.275 / 0.25 = -1.1.

    Episode end:
        Truncated after the scenario's slots, never terminated: demand goes on.

    Source:
        Du et al. 2025, arXiv 2507.10259v2, sections V-B and V-C. Ours: what the paper leaves out,
        see docs/results/regions.md; the decision comes before the slot's arrivals are known.
    """

    metadata = RENDER_METADATA

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        """Validate the fields of `RegionEnvConfig`, and fit the forecaster."""
        self.render_mode = check_render_mode(render_mode)
        self.config = RegionEnvConfig.model_validate({**(config or {}), **options})
        self._copy = _Copy(self.config, fit_seasonal(self.config.scenario))
        self.observation_space, self.action_space = _spaces(self.config, self._copy.num_regions)

    @property
    def sim(self) -> RegionSim:
        """The simulator of the episode."""
        return self._copy.sim

    @property
    def state(self) -> RegionState:
        """What a policy would be shown now."""
        return self._copy.state

    @property
    def num_saturated(self) -> int:
        """Observed numbers that were set to the limit so far."""
        return self._copy.num_saturated

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Start an episode with fresh demand; `seed` fixes it and all that follow."""
        super().reset(seed=seed)
        self._copy.start(self.np_random)
        return self._copy.observe(), {}

    def step(
        self, action: npt.NDArray[np.float32]
    ) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Divide one slot's demand, and run to the next.

        Returns:
            The observation of the slot that begins; the reward of the one that ended; False, since
            no state ends an episode; whether the stream is over; and what the slot measured.

        Raises:
            ValueError: The action is not finite, or the episode is over.
        """
        if self._copy.sim.ended:
            raise ValueError("the episode is over: call reset first")
        reward, out = self._copy.step(action)
        info = {name: float(out[column]) for name, column in _MEASURED.items()}
        return self._copy.observe(), reward, False, self._copy.sim.ended, info

    def render(self) -> Picture:  # type: ignore[override]
        """Draw of every region: servers that are on; how busy they were; what waits.

        Waiting tasks fill half of their bar when they are what the region serves in a slot.
        """
        state = self.state
        on = state.num_active / (state.server_tasks > 0).sum(axis=1)
        waiting = state.waiting / (state.waiting + state.capacity)
        return draw_bars(np.column_stack([on, state.used, waiting]))


class RegionVectorEnv(IndependentCopies):
    """Several independent `RegionEnv`s with one forecaster; a slot is compiled, copies follow.

    See `IndependentCopies`.
    """

    def __init__(
        self, num_envs: int, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Validate the configuration and make `num_envs` copies; see `RegionEnv`."""
        self.config = RegionEnvConfig.model_validate({**(config or {}), **options})
        forecaster = fit_seasonal(self.config.scenario)
        self._copies = [_Copy(self.config, forecaster) for _ in range(num_envs)]
        super().__init__(num_envs, *_spaces(self.config, self._copies[0].num_regions))

    def start(self, copy: int, rng: np.random.Generator) -> None:
        """Give one copy fresh demand."""
        self._copies[copy].start(rng)

    def observe(self) -> Observations:
        """What every copy shows."""
        return np.stack([copy.observe() for copy in self._copies])

    def step(self, actions: npt.NDArray[Any]) -> Stepped:
        """Run one slot in every copy; copies whose episode ended begin a new one.

        Raises:
            ValueError: An action is not finite.
        """
        fresh = self.begin_anew()
        rewards = np.zeros(self.num_envs)
        for i, copy in enumerate(self._copies):
            if i not in fresh:
                rewards[i] = copy.step(actions[i])[0]
        ended = np.array([copy.sim.ended for copy in self._copies])
        return self.stepped(self.observe(), rewards, ended)

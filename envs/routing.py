"""Routing as an environment: one step places one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

import gymnasium
import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator, model_validator

from envs.copies import IndependentCopies, Stepped
from envs.picture import RENDER_METADATA, Picture, check_render_mode, draw_bars
from tokenyard import metrics
from tokenyard.config import FrozenModel
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.observation import OBSERVATION_LIMIT
from tokenyard.routing.scenario import RewardWeights, Scenario, load_scenario
from tokenyard.routing.scores.order import FIRST_COME, NUM_ORDER_WEIGHTS
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.copies import Observations
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.types import IntArray


class RoutingEnvConfig(FrozenModel):
    """What `LoadBalancingEnv` and its vectorised twin are made from."""

    scenario: Scenario
    """A scenario, or the name or YAML path of one."""
    reward: RewardWeights | None = None
    """Reward weights in place of the scenario's."""
    episode_requests: Annotated[int, Field(ge=1)] | None = None
    """Requests per episode; None: the scenario's `requests_per_stream`."""

    order: tuple[Annotated[float, Field(ge=0)], ...] = tuple(FIRST_COME.tolist())
    """Weights of the order in which requests wait at a replica (`tokenyard.routing.scores.order`);
    all 0: first come, first served."""
    randomisation: Randomisation = Randomisation()
    """How one episode's traffic and fleet differ from the next's."""
    shows_rule: bool = False
    """Whether what a rule's costs are made from is shown of every replica. Of servers, delays are
    only then shown too; else their observation is the paper's."""
    copies_per_stream: Annotated[int, Field(ge=1)] = 1
    """Copies of the vectorised environment that have the same traffic and the same fleet. What one
    of them earns beyond the others was not luck (common random numbers)."""

    @field_validator("scenario", mode="before")
    @classmethod
    def _load_by_name(cls, value: object) -> object:
        return load_scenario(value) if isinstance(value, str) else value

    @field_validator("order")
    @classmethod
    def _order_has_all_weights(cls, order: tuple[float, ...]) -> tuple[float, ...]:
        if len(order) != NUM_ORDER_WEIGHTS:
            raise ValueError(f"{len(order)} weights of an order given; give {NUM_ORDER_WEIGHTS}")
        return order

    @model_validator(mode="after")
    def _reward_has_only_terms_of_the_scenario(self) -> Self:
        self.scenario.check_reward(self.weights)
        return self

    @property
    def weights(self) -> RewardWeights:
        """The reward weights in force."""
        return self.reward or self.scenario.reward

    @property
    def num_steps(self) -> int:
        """Length of an episode in steps."""
        return self.episode_requests or self.scenario.requests_per_stream


class _Feed:
    """Draws episodes and loads them into copies of the cluster."""

    def __init__(self, config: RoutingEnvConfig, num_copies: int) -> None:
        self.config = config
        self.source = StreamSource(config.scenario)
        # One request more than is placed: the last observation shows a request that waits.
        length = config.num_steps + 1
        self.sim = make_simulator(config.scenario, num_copies, length, config.weights)
        self.sim.order_by(np.array(config.order))
        if config.shows_rule:
            self.sim.show_rule(self.source.mean_total_tokens)

    def start(self, copy: int, rng: np.random.Generator) -> None:
        """Empty one copy and give it a fresh stream drawn from `rng`."""
        randomisation = self.config.randomisation
        low, high = randomisation.load_factor
        # A range of no width draws nothing, so that streams do not depend on there being one.
        load_factor = low if low == high else rng.uniform(low, high)
        self.sim.load(copy, self.source.sample(self.config.num_steps + 1, rng, load_factor))
        if randomisation.varies_fleet:
            self.sim.vary(copy, randomisation, rng)


def _spaces(feed: _Feed) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Discrete[np.int64]]:
    size = feed.sim.observations.shape[1]
    box = gymnasium.spaces.Box(-OBSERVATION_LIMIT, OBSERVATION_LIMIT, (size,), np.float32)
    return box, gymnasium.spaces.Discrete(feed.config.scenario.num_servers)


class LoadBalancingEnv(gymnasium.Env[Observations, np.int64]):
    """Place one request after the other on a heterogeneous cluster, or fleet of engines.

    Observation:
        float32, shape (16 + 6 N,): 34 numbers for three servers. A fleet adds 8 N: 72 numbers for
        four replicas. First the request: hour, day of week, day of month, ISO week, total, context
        and generated tokens
        as the router knows them, mean and standard deviation of the last 5, 10 and 20 requests,
        and the last request's three counts; robustly scaled and squashed by sign(x) log(1 + |x|).
        Then per server log(1 + x) of requests waiting, thousands of tokens in flight, seconds of
        recent mean response (-1: none yet), outstanding over concurrency; utilisation of its
        slots; log(1 + thousands of tokens per second). Then, of a fleet's replica, log(1 + x) of
        the seconds until its first token could be computed, until the request would finish there,
        and by which it would delay all others, and of thousands of prompt and of output tokens in
        flight; the share of KV memory in use; the share of the prompt believed to be cached; and
        1 where the replica is believed to take requests, else 0. With `shows_rule` these are there
        of servers too, and what the cost of every replica is made from comes last
        (`scores.linear.encode_rule`). All are within [-20, 20]; `sim.num_saturated` counts
        numbers that hit it.

    Action:
        Index of the server. A replica of a fleet that is down or full refuses the request, which
        comes again `retry_delay_s` later: that was a step too.

    Reward:
        Sum of weight x quantity over `RewardWeights`. The response terms are paid at the decision
        by playing what the chosen replica holds to its end: for what the request adds to the
        response times, SLO violations and tails of all that are there. With the scenario's default
        weights, 4000 tokens sent to an idle 5000 tokens/s server of an otherwise idle three-server
        cluster (concurrency 5) earn -0.01 * 0.8 (processing) - 0.1 * 0 (queue) + 0.1 * balance + 1,
        and the balance of loads (0.16, 0, 0) is 1 - 0.0754 / 0.0533 = -0.414: 0.951 in all.

    Info:
        `replica`, where the request was sent; `waiting`, requests that waited at all replicas then;
        `finished`, requests that were done before the next decision, and where there are any
        `response_s`, their mean response time. The last step's info also has `mean_response_s`,
        `p99_response_s` and `slo_violation_fraction` of the episode's requests, which are played to
        their end for it. Copies of the vectorised environment have none.

    Episode end:
        Truncated after `episode_requests` placements, repeated ones included, never terminated:
        traffic goes on, and the value of the last observation, which shows the next request, is
        bootstrapped.

    Source:
        Abbaraju, "Intelligent Load Balancing Using RL for Heterogeneous LLM Inference Systems",
        section IV. Ours: that the router is told no output length unless the scenario says so.
    """

    metadata = RENDER_METADATA

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        """Validate the fields of `RoutingEnvConfig`, in a mapping (RLlib) or as keywords."""
        self.render_mode = check_render_mode(render_mode)
        self.config = RoutingEnvConfig.model_validate({**(config or {}), **options})
        self._feed = _Feed(self.config, num_copies=1)
        self.sim = self._feed.sim
        self.observation_space, self.action_space = _spaces(self._feed)
        self._actions = np.zeros(1, dtype=np.int64)
        self._steps_left = 0
        self._in_flight: IntArray = np.zeros(0, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Start an episode with fresh traffic; `seed` fixes it and all that follow."""
        super().reset(seed=seed)
        self._feed.start(0, self.np_random)
        self._steps_left = self.config.num_steps
        self._in_flight = np.zeros(0, np.int64)
        return self.sim.observe()[0].copy(), {}

    def step(self, action: np.int64) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Place the waiting request and run until the next one is to be placed.

        Raises:
            ValueError: The action names no server, or the episode is over.
        """
        if self._steps_left == 0:
            raise ValueError("the episode is over: call reset first")
        self._actions[0] = action
        view = self.sim.view()
        info: dict[str, Any] = {"replica": int(action), "waiting": view.num_waiting()}
        current = view.current()
        if not (self._in_flight == current).any():  # A request that was refused comes again.
            self._in_flight = np.append(self._in_flight, current)
        observations, rewards = self.sim.step_and_observe(self._actions)
        observed, reward = observations[0].copy(), float(rewards[0])
        self._steps_left -= 1
        response_s = view.response_s(self._in_flight)
        finished = ~np.isnan(response_s)
        info["finished"] = int(finished.sum())
        if info["finished"]:
            info["response_s"] = float(response_s[finished].mean())
            self._in_flight = self._in_flight[~finished]
        ended = self._steps_left == 0
        if ended:
            info |= self._measured()
        return observed, reward, False, ended, info

    def _measured(self) -> dict[str, float]:
        """Play what is held to its end, and measure the requests that were placed."""
        self.sim.drain()
        outcomes = self.sim.view().outcomes()
        placed = outcomes.server >= 0
        response_s = outcomes.offered_response_s[placed]
        violations = outcomes.violations(self.config.scenario.slo_response_s)[placed]
        return {
            "mean_response_s": metrics.mean(response_s),
            "p99_response_s": metrics.percentile(response_s, 99),
            "slo_violation_fraction": metrics.slo_violation_fraction(violations),
        }

    def render(self) -> Picture:  # type: ignore[override]
        """Draw of every replica, from the left: its slots at work, its KV memory, what waits.

        Waiting requests fill half of their bar when they are as many as the replica's slots.
        """
        view = self.sim.view()
        shares = np.zeros((self.config.scenario.num_servers, 3))
        for replica, snapshot in zip(view.offered(), view.snapshots(), strict=True):
            shares[replica] = (
                snapshot.num_running / snapshot.num_slots,
                snapshot.engine.kv_used_fraction if snapshot.engine else 0.0,
                snapshot.num_waiting / (snapshot.num_waiting + snapshot.num_slots),
            )
        return draw_bars(shares)


class LoadBalancingVectorEnv(IndependentCopies):
    """Many `LoadBalancingEnv`s stepped by one compiled call; see `IndependentCopies`."""

    def __init__(
        self, num_envs: int, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Validate the configuration and make `num_envs` copies; see `LoadBalancingEnv`."""
        self.config = RoutingEnvConfig.model_validate({**(config or {}), **options})
        self._feed = _Feed(self.config, num_envs)
        super().__init__(num_envs, *_spaces(self._feed), self.config.copies_per_stream)
        self.sim = self._feed.sim

    def start(self, copy: int, rng: np.random.Generator) -> None:
        """Empty one copy and give it fresh traffic."""
        self._feed.start(copy, rng)

    def observe(self) -> Observations:
        """What the router of every copy sees."""
        return self.sim.observe().copy()

    def step(self, actions: npt.NDArray[np.int64]) -> Stepped:
        """Place every copy's waiting request; copies whose episode ended begin a new one.

        Raises:
            ValueError: An action names no server.
        """
        for copy in self.begin_anew():
            self.sim.skip_next(copy)
        observations, rewards = self.sim.step_and_observe(np.asarray(actions, dtype=np.int64))
        ended = self.sim.num_placed() >= self.config.num_steps
        return self.stepped(observations.copy(), rewards.copy(), ended)

"""Direct policy search over where requests go and in which order they wait there, together.

The numbers searched are the linear policy's weights, then one for each order by size that suits the
servers. An order's number u is the weight e^u - 1 in seconds of waiting per second of service; u at
or below 0 is first come, first served, so a search may leave the order out or find it.

Every candidate of a generation is run through the same fresh streams (common random numbers),
so candidates differ by what they decide and not by their luck. The simulator's kernel scores
millions of decisions a second, and a few hundred thousand requests per generation are enough to
tell candidates apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tokenyard import metrics
from tokenyard.artifact import NoChampionError
from tokenyard.cross_entropy import CrossEntropy
from tokenyard.routing.artifact import PolicyArtifact, length_predictor
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.policies.order import IN_ORDER
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.policies.tuned import FleetRules, find_tuned
from tokenyard.routing.scenario import NO_REWARD, Scenario
from tokenyard.routing.scores.order import FIRST_COME, NUM_ORDER_WEIGHTS
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.server_models import (
    DELAY,
    ORDER_WEIGHTS,
    in_order_rules,
    order_weights_of,
    server_model,
)
from tokenyard.routing.simulator.streams import StreamSource, stream_rng
from tokenyard.types import BoolArray, FloatArray


@dataclass(frozen=True)
class SearchObjective:
    """What the search makes small, relative to the rule that it began with on the same streams."""

    mean: float = 1.0
    """Per second of mean response."""
    cvar99: float = 0.1
    """Per second of mean response of the slowest hundredth."""
    violation: float = 2.0
    """Seconds that a share of 1 of violations, drops included, costs."""
    tail_guard: float = 0.0
    """Cost of each unit by which the p99 of a stream exceeds that of the rule, as a fraction of it:
    what is won at one load does not pay for another. 0 leaves the tail to `cvar99`."""

    def stream_cost(self, offered_s: FloatArray, violations: BoolArray) -> float:
        """Cost in seconds of the response times of one stream's offered requests, shape (n,)."""
        return (
            self.mean * metrics.mean(offered_s)
            + self.cvar99 * metrics.cvar99_s(offered_s)
            + self.violation * metrics.slo_violation_fraction(violations)
        )

    def relative_cost(self, candidate: StreamCosts, baseline: StreamCosts) -> float:
        """Mean over streams of the candidate's cost over the baseline's, with the guard.

        The ratio per stream keeps one stream with a long backlog from outweighing the others.
        """
        ratio = float((candidate.cost_s / baseline.cost_s).mean())
        longer = np.maximum(candidate.p99_s / baseline.p99_s - 1.0, 0.0)
        return ratio + self.tail_guard * float(longer.mean())


@dataclass(frozen=True)
class StreamCosts:
    """What one candidate cost on every stream of a generation, arrays of shape (streams,)."""

    cost_s: FloatArray
    p99_s: FloatArray


@dataclass(frozen=True)
class SearchConfig:
    """How wide and how long the search looks."""

    objective: SearchObjective = SearchObjective()
    population: int = 32
    num_elites: int = 8
    streams_per_generation: int = 4
    requests_per_stream: int = 3000
    start: tuple[float, ...] | None = None
    """Weights to start from and to compare costs with, such as a tuned rule's; None: all zero,
    which is shortest expected delay, or least marginal delay on a fleet."""
    order: tuple[float, ...] = (0.0,) * NUM_ORDER_WEIGHTS
    """Weights of the order that both start with (`tokenyard.routing.scores.order`)."""
    order_std: float = 0.2
    """Spread of the first generation's orders, in units of u; 0: the order is not searched."""
    initial_std: float = 0.05
    """Spread of the first generation, in units of the SLO per feature. Searches begin at rules that
    were tuned: from four times this spread they end further from the best, or behind the rule."""
    noise: float = 0.0125
    """Spread added to the elites' in the first generation; fades to nothing over the search."""
    num_generations: int = 36
    """Generations over which the noise fades."""
    randomisation: Randomisation = field(default_factory=Randomisation)
    """How streams differ: a policy that has seen more and less traffic, and other replicas, than
    the scenario's suits more of what comes. The streams of a generation share the range of loads
    evenly, so that no generation is without the busiest hours."""


def best_start(scenario: Scenario, orders: bool = True) -> str:
    """Best tuned rule that the linear policy can be: where learning begins.

    That is a placement that its weights can be, first come, first served or with an order by size.
    With an order it is the rule that ships, or the next by its regret over the loads; else that
    with the best training score. Where none was tuned, it is the placement without learned weights.
    """
    tuned = find_tuned(scenario.name)

    def can_be(name: str) -> bool:
        rule = RuleName.parse(name)
        is_known = rule.order is None or rule.order.base in ORDER_WEIGHTS
        return is_known and linear_weights(scenario, rule.placement) is not None

    first, *_ = server_model(scenario).linear_placements(tuned)
    if tuned is None:
        return first
    best = tuned.best_over_loads(can_be) if orders else None
    scores = tuned.scores | (tuned.order_scores if orders else {})
    return best or max(filter(can_be, scores), key=scores.__getitem__, default=first)


def started_at_best_rule(
    scenario: Scenario, config: SearchConfig, orders: bool = True
) -> SearchConfig:
    """Start at `best_start`.

    Args:
        scenario: Whose rules were tuned.
        config: What else is searched, and how.
        orders: Whether orders are searched too; else all is first come, first served.
    """
    tuned, rule = find_tuned(scenario.name), best_start(scenario, orders)
    knobs = None if tuned is None else tuned.orders.get(rule)
    order_std = config.order_std if orders else 0.0
    return started_at(scenario, rule, replace(config, order_std=order_std), knobs)


def started_at(
    scenario: Scenario, rule: str, config: SearchConfig, knobs: Mapping[str, float] | None = None
) -> SearchConfig:
    """Start at a rule: `PLACEMENT`, `PLACEMENT+ORDER` or `PLACEMENT+ORDER@KNOB:SET_BACK`.

    `knobs` are those of the order and of an order-aware placement, if the name has none.

    Raises:
        ValueError: The linear policy cannot express that placement, or the order is unknown.
    """
    placement, order = RuleName.parse(rule)
    servers = server_model(scenario)
    weights = linear_weights(scenario, placement, knobs)
    if weights is None:
        placements = sorted((*servers.linear_placements(find_tuned(scenario.name)), IN_ORDER))
        raise ValueError(f"a search cannot begin at {str(placement)!r}; give one of {placements}")
    return replace(
        config,
        start=(*weights, *(0.0,) * servers.num_slo_weights),
        order=tuple((order_weights_of(order, knobs) if order else FIRST_COME).tolist()),
    )


def linear_weights(
    scenario: Scenario, placement: Term, knobs: Mapping[str, float] | None = None
) -> tuple[float, ...] | None:
    """Weights with which the linear policy is a placement; None: it cannot be that one."""
    servers = server_model(scenario)
    if placement.base == IN_ORDER:
        return in_order_rules(placement, knobs or {}).in_order_weights
    if placement.base == DELAY and placement.numbers is not None:
        wait, others = placement.values()
        return FleetRules(wait_weight=wait, others_weight=others).marginal_weights
    return servers.linear_placements(find_tuned(scenario.name)).get(str(placement))


class PolicySearch(CrossEntropy):
    """A search over the weights of one scenario's policy and of its order."""

    def __init__(
        self, scenario: Scenario, config: SearchConfig | None = None, seed: int = 0
    ) -> None:
        """Start at the rule that the policy corrects, or at `config.start` and `config.order`."""
        self.scenario = scenario
        self.config = config = config or SearchConfig()
        self._source = StreamSource(scenario)
        # Rewards are not used here.
        self._sim = make_simulator(
            scenario, config.streams_per_generation, config.requests_per_stream, NO_REWARD
        )
        weights = np.array(config.start or np.zeros(self._sim.num_weights))
        self._num_weights = len(weights)
        names = (name for name in server_model(scenario).orders if name in ORDER_WEIGHTS)
        self._orders = [ORDER_WEIGHTS[name] for name in names]
        orders = np.log1p(np.array(config.order)[self._orders])
        self._start: FloatArray = np.concatenate((weights, orders))
        std = np.full(len(self._start), config.initial_std)
        std[self._num_weights :] = config.order_std
        super().__init__(
            self._start, std, seed=seed, population=config.population,
            num_elites=config.num_elites, noise=config.noise, noise_unit=std / config.initial_std,
            num_generations=config.num_generations,
        )  # fmt: skip

    @property
    def weights(self) -> FloatArray:
        """Where requests go, at the centre of the search, shape (num_weights,)."""
        return self.mean[: self._num_weights].copy()

    @property
    def order(self) -> FloatArray:
        """In which order they wait, at the centre of the search, shape (NUM_ORDER_WEIGHTS,)."""
        return self._order_of(self.mean)

    def _order_of(self, parameters: FloatArray) -> FloatArray:
        order = FIRST_COME.copy()
        order[self._orders] = np.expm1(np.maximum(parameters[self._num_weights :], 0.0))
        return order

    @property
    def env_steps(self) -> int:
        """Requests routed so far, over all candidates."""
        config = self.config
        per_candidate = config.streams_per_generation * config.requests_per_stream
        # One more candidate a generation: the baseline that costs are compared to.
        return self.generation * (config.population + 1) * per_candidate

    def step(self) -> dict[str, float]:
        """Run one generation and return its cost relative to the rule."""
        self._load_fresh_streams()
        candidates = self.draw(self.rng())
        baseline = self._costs(self._start)
        objective = self.config.objective
        costs = np.array(
            [objective.relative_cost(self._costs(candidate), baseline) for candidate in candidates]
        )
        self.update(candidates, costs)
        return {
            "cost_over_baseline": float(costs[0]),
            "best_cost_over_baseline": float(costs.min()),
            "mean_std": float(self.std.mean()),
        }

    def _load_fresh_streams(self) -> None:
        config = self.config
        low, high = config.randomisation.load_factor
        for copy in range(config.streams_per_generation):
            index = self.generation * config.streams_per_generation + copy
            rng = stream_rng(self.seed, "training", index)
            share = (copy + rng.random()) / config.streams_per_generation
            load_factor = low + share * (high - low)
            stream = self._source.sample(config.requests_per_stream, rng, load_factor)
            self._sim.load(copy, stream)
            if config.randomisation.varies_fleet:
                self._sim.vary(copy, config.randomisation, rng)

    def _costs(self, parameters: FloatArray) -> StreamCosts:
        weights, order = parameters[: self._num_weights], self._order_of(parameters)
        self._sim.run_linear(weights, self._source.mean_total_tokens, order)
        outcomes = [self._sim.view(i).outcomes() for i in range(self.config.streams_per_generation)]
        slo_s = self.scenario.slo_response_s
        objective = self.config.objective
        return StreamCosts(
            cost_s=np.array(
                [
                    objective.stream_cost(outcome.offered_response_s, outcome.violations(slo_s))
                    for outcome in outcomes
                ]
            ),
            p99_s=np.array(
                [metrics.percentile(outcome.offered_response_s, 99.0) for outcome in outcomes]
            ),
        )

    def artifact(
        self,
        metrics_found: Mapping[str, float] | None = None,
        lineage: Mapping[str, str] | None = None,
    ) -> PolicyArtifact:
        """Export the centre of the search as a policy."""
        scenario, servers = self.scenario, server_model(self.scenario)
        metadata = ArtifactMetadata(
            kind="marginal",
            scenario=scenario.name,
            trainer="policy_search",
            # Replicas that are down are not offered.
            num_replicas=None if servers.refuses else scenario.num_servers,
            slo_response_s=scenario.slo_response_s,
            mean_total_tokens=self._source.mean_total_tokens,
            output_length=scenario.output_length,
            predictor=length_predictor(self._source.model),
            metrics=metrics_found or {},
            lineage=lineage or {},
        )
        arrays = {"weights": self.weights}
        if self.order.any():
            arrays["order"] = self.order
        return PolicyArtifact(metadata, arrays)


def champion_or_rule(scenario: Scenario) -> tuple[PolicyArtifact, str]:
    """The champion, and where it was found; where there is none, the rule that a search begins at.

    Raises:
        ArtifactError: What was found cannot be used.
    """
    try:
        return PolicyArtifact.champion(scenario.name)
    except NoChampionError:
        rule = PolicySearch(scenario, started_at_best_rule(scenario, SearchConfig()))
        return rule.artifact(), "no champion, but the best rule that a search begins at"

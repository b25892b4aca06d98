"""Routing policies: every baseline by name, and how to make one.

A policy sees the request and snapshots of the replicas, never the simulator; `BASELINES` is the
only list of those that are not learned. To add one, write its class and add its line here: the
property tests, the evaluation and the server pick it up by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tokenyard.config import did_you_mean
from tokenyard.routing.policies.backlog import (
    LeastConnections,
    LeastLoaded,
    PowerOfTwoChoices,
    WeightedLeastConnections,
)
from tokenyard.routing.policies.delay import (
    MarginalDelay,
    SedDump,
    SedReserve,
    ShortestExpectedDelay,
)
from tokenyard.routing.policies.oblivious import Random, RoundRobin, WeightedRandom
from tokenyard.routing.policies.prefix import (
    KvCost,
    PrefixAffinity,
    StickyUntilSaturated,
    WeightedScorers,
)
from tokenyard.routing.policies.size_interval import SizeIntervals
from tokenyard.routing.policies.tuned import FleetRules, TunedRules, load_tuned
from tokenyard.routing.types import RoutingPolicy
from tokenyard.types import Slo


@dataclass(frozen=True)
class PolicyContext:
    """What a baseline may be built from."""

    scenario_name: str
    """Whose tuned parameters apply."""
    slo: Slo
    rng: np.random.Generator
    """Draws the choices of the randomised rules."""
    num_replicas: int
    tuned: TunedRules | None = None
    """Parameters of the tuned rules; None: those that ship for the scenario, read when needed."""

    def tuned_rules(self) -> TunedRules:
        """Return the tuned parameters, some of which name replicas by position.

        Raises:
            ValueError: There are none for the scenario, or they are for another number of replicas.
        """
        rules = self._any_rules()
        if rules.num_replicas != self.num_replicas:
            raise ValueError(
                f"the rules of scenario {rules.scenario!r} are tuned for {rules.num_replicas} "
                f"replicas, not for {self.num_replicas}"
            )
        return rules

    def fleet_rules(self) -> FleetRules:
        """Return the tuned parameters of rules that suit any number of replicas.

        Raises:
            ValueError: There are none for the scenario.
        """
        return self._any_rules().fleet

    def _any_rules(self) -> TunedRules:
        return self.tuned or load_tuned(self.scenario_name)


def _sed_reserve(context: PolicyContext) -> SedReserve:
    return SedReserve(context.tuned_rules().reserve_above_tokens)


def _sed_dump(context: PolicyContext) -> SedDump:
    rules = context.tuned_rules()
    return SedDump(context.slo, rules.dump_replica, rules.num_replicas)


def _sita(context: PolicyContext) -> SizeIntervals:
    rules = context.tuned_rules()
    return SizeIntervals(rules.sita_cuts_tokens, rules.sita_replicas)


def _tuned_marginal_delay(context: PolicyContext) -> MarginalDelay:
    rules = context.fleet_rules()
    return MarginalDelay(rules.wait_weight, rules.others_weight)


def _weighted_scorers(context: PolicyContext) -> WeightedScorers:
    rules = context.fleet_rules()
    return WeightedScorers(
        rules.scorer_queue_weight, rules.scorer_kv_weight, rules.scorer_prefix_weight
    )


BASELINES: dict[str, Callable[[PolicyContext], RoutingPolicy]] = {
    "round_robin": lambda context: RoundRobin(),
    "random": lambda context: Random(context.rng),
    "weighted_random": lambda context: WeightedRandom(context.rng),
    "least_connections": lambda context: LeastConnections(),
    "weighted_least_connections": lambda context: WeightedLeastConnections(),
    "least_loaded": lambda context: LeastLoaded(),
    "power_of_two": lambda context: PowerOfTwoChoices(context.rng),
    "sed": lambda context: ShortestExpectedDelay(),
    "marginal_delay": lambda context: MarginalDelay(),
    "sed_reserve": _sed_reserve,
    "sed_dump": _sed_dump,
    "sita": _sita,
    "tuned_marginal_delay": _tuned_marginal_delay,
    "prefix_affinity": lambda context: PrefixAffinity(context.fleet_rules().affinity_load_ratio),
    "sticky_until_saturated": lambda context: StickyUntilSaturated(
        context.fleet_rules().sticky_saturated_s
    ),
    "kv_cost": lambda context: KvCost(context.fleet_rules().kv_overlap_weight),
    "weighted_scorers": _weighted_scorers,
}
"""Name of every baseline to what makes a fresh one."""


def make_policy(name: str, context: PolicyContext) -> RoutingPolicy:
    """Make a fresh baseline by name.

    Raises:
        ValueError: The name is unknown, or the rule is tuned and its parameters are missing.
    """
    if name not in BASELINES:
        hint = did_you_mean(name, BASELINES)
        raise ValueError(f"unknown policy {name!r}; choose one of {sorted(BASELINES)}{hint}")
    return BASELINES[name](context)

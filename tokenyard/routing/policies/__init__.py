"""Routing policies: every baseline by name, and how to make one.

A policy sees the request and snapshots of the replicas, never the simulator; `BASELINES` is the
only list of those that are not learned. To add one, write its class and add its line here: the
property tests, the evaluation and the server pick it up by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tokenyard.config import did_you_mean
from tokenyard.routing.policies.backlog import (
    LeastConnections,
    LeastLoaded,
    PowerOfTwoChoices,
    WeightedLeastConnections,
    WeightedLeastLoaded,
)
from tokenyard.routing.policies.context import PolicyContext
from tokenyard.routing.policies.delay import (
    MarginalDelay,
    SedDump,
    SedReserve,
    ShortestExpectedDelay,
)
from tokenyard.routing.policies.in_order import MarginalInOrder
from tokenyard.routing.policies.oblivious import Random, RoundRobin, WeightedRandom
from tokenyard.routing.policies.order import IN_ORDER, ORDERS, Ordered, is_order, order_of
from tokenyard.routing.policies.public import Needs, draws, is_tuned, needs_of, public_factories
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.policies.size_interval import SizeIntervals
from tokenyard.routing.policies.tuned import find_tuned, load_tuned
from tokenyard.routing.types import RoutingPolicy

__all__ = [
    "BASELINES", "Needs", "PolicyContext", "draws", "is_placement", "is_rule",
    "load_tuned", "make_policy", "rows_for",
]  # fmt: skip


def _sita(context: PolicyContext) -> SizeIntervals:
    rules = context.tuned_rules()
    return SizeIntervals(rules.sita_cuts_tokens, rules.sita_replicas)


def _tuned_marginal_delay(context: PolicyContext) -> MarginalDelay:
    rules = context.rules().fleet
    return MarginalDelay(rules.wait_weight, rules.others_weight)


_OF_TUNED_RULES: dict[str, Callable[[PolicyContext], RoutingPolicy]] = {
    "sed_reserve": lambda context: SedReserve(context.tuned_rules().reserve_above_tokens),
    "sed_dump": lambda context: SedDump(
        context.slo, context.tuned_rules().dump_replica, context.num_replicas
    ),
    "sita": _sita,
    "tuned_marginal_delay": _tuned_marginal_delay,
}
"""Baselines that exist only where rules were tuned for the scenario."""
BASELINES: dict[str, Callable[[PolicyContext], RoutingPolicy]] = {
    "round_robin": lambda context: RoundRobin(),
    "random": lambda context: Random(context.rng),
    "weighted_random": lambda context: WeightedRandom(context.rng),
    "least_connections": lambda context: LeastConnections(),
    "weighted_least_connections": lambda context: WeightedLeastConnections(),
    "least_loaded": lambda context: LeastLoaded(),
    "weighted_least_loaded": lambda context: WeightedLeastLoaded(),
    "power_of_two": lambda context: PowerOfTwoChoices(context.rng),
    "sed": lambda context: ShortestExpectedDelay(),
    "marginal_delay": lambda context: MarginalDelay(),
    **_OF_TUNED_RULES,
    **public_factories(),
}
"""Name of every baseline to what makes a fresh one."""
PARAMETERS: dict[str, Callable[..., RoutingPolicy]] = {
    "marginal_delay": lambda context, wait, others: MarginalDelay(wait, others),
    "sed_reserve": lambda context, above_tokens: SedReserve(above_tokens),
    "sed_dump": lambda context, replica: SedDump(context.slo, int(replica), context.num_replicas),
}
"""Baselines that may have parameters of one's own, behind `@`: `marginal_delay@0.5:2` has the
weights of the wait and of others' delays, `sed_reserve@1800` tokens, `sed_dump@0` a replica."""


def is_rule(name: str) -> bool:
    """Whether a name is that of a baseline, or of one with an order."""
    rule = RuleName.parse(name)
    if rule.order is not None:
        return is_placement(rule.placement) and is_order(rule.order)
    return is_placement(rule.placement) and rule.placement.base != IN_ORDER


def is_placement(placement: Term) -> bool:
    """Whether it is a baseline, or the placement that exists only with an order.

    Some of them take parameters.
    """
    takes = BASELINES if placement.numbers is None else PARAMETERS
    return placement.base in (*takes, IN_ORDER)


def make_policy(name: str, context: PolicyContext) -> RoutingPolicy:
    """Make a fresh baseline by name; `PLACEMENT+ORDER` also orders what waits.

    Raises:
        ValueError: The name is unknown, or the rule is tuned and its parameters are missing.
    """
    rule = RuleName.parse(name)
    placement = rule.placement
    if rule.order is not None:
        if placement.base == IN_ORDER:
            return _in_order(rule, context)
        return Ordered(make_policy(str(placement), context), order_of(rule, context))
    if placement.numbers is not None and placement.base in PARAMETERS:
        values = placement.values()
        try:
            return PARAMETERS[placement.base](context, *values)
        except TypeError:
            reason = f"{placement.numbers!r} are too many parameters, or too few"
            raise ValueError(f"{name!r}: {reason}") from None
    if name not in BASELINES:
        hint = did_you_mean(name, BASELINES)
        raise ValueError(f"unknown policy {name!r}; choose one of {sorted(BASELINES)}{hint}")
    return BASELINES[name](context)


def _in_order(rule: RuleName, context: PolicyContext) -> MarginalInOrder:
    placement, kind = rule.placement, rule.order.base if rule.order else ""
    if kind in ORDERS and ORDERS[kind].counts_replicas:
        raise ValueError(
            f"{str(rule)!r}: {kind} counts a request at the replica that it is sent to, and "
            f"{IN_ORDER} asks about all of them; put another placement before it"
        )
    if placement.numbers is not None:
        wait, others = (*placement.values(), math.nan, math.nan)[:2]
        if math.isnan(others):
            raise ValueError(f"{str(placement)!r} needs two weights: {Term.of(IN_ORDER, 1, 0.5)}")
    else:
        tuned = context.order_knobs(str(rule.ordered(Term(kind))))
        wait, others = tuned.get("wait_weight", 1.0), tuned.get("others_weight", 1.0)
    return MarginalInOrder(order_of(rule, context), wait, others)


def rows_for(scenario_name: str, has: Needs) -> list[str]:
    """Names of the baselines that stand in a table of a scenario, with the orders tuned for it.

    Args:
        scenario_name: Tuned rules are rows where they were tuned for it.
        has: What its replicas have. A rule that needs more would be a plain rule by another name.
    """
    rules = find_tuned(scenario_name)
    tuned = set(rules.scores) | set(_OF_TUNED_RULES) if rules else set()
    rows = [
        name
        for name in BASELINES
        if needs_of(name) <= has
        and (name in tuned or not (is_tuned(name) or name in _OF_TUNED_RULES))
    ]
    return rows + list(rules.order_scores if rules else ())

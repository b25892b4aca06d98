"""The two models of a server, and all that is asked of one.

A server takes requests at a constant rate (`ConstantRate`), or it is a replica that batches
continuously (`Batching`). What needs no simulator is answered by `Scenario` itself: names,
capacities, calibration, and which reward terms there are. To add a third model, write its class
and its simulator, and name them in `ServerModel`, `Simulator` and `server_model`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Protocol, cast

import numpy as np

from tokenyard.config import did_you_mean
from tokenyard.problem import Measure
from tokenyard.routing.fleet import Fleet
from tokenyard.routing.observation import MARGINAL_PREFILL, NUM_SLO_WEIGHTS
from tokenyard.routing.policies.order import IN_ORDER, ORDERS, SET_BACK, knobs_of
from tokenyard.routing.policies.public import Needs
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.policies.tuned import (
    FLEET_GRIDS,
    FleetRules,
    Grids,
    TunedRules,
    find_tuned,
    load_tuned,
)
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.scores.order import (
    BOOST_S,
    FIRST_COME,
    PREFILL_WEIGHT,
    SERVICE_WEIGHT,
    SET_BACK_WAITS,
)
from tokenyard.routing.simulator import constant_rate_kernel as kernel
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_streams import Stream, dispatch_s, encode_for_fleet
from tokenyard.routing.simulator.constant_rate import ClusterSim
from tokenyard.types import FloatArray
from tokenyard.workload.trace import Trace

_MOST_SHARES = 8
"""Servers up to which the share of each is printed."""
ORDER_WEIGHTS = {
    "sjf": SERVICE_WEIGHT,
    "wspt": PREFILL_WEIGHT,
    "boost": BOOST_S,
    "late_last": SET_BACK_WAITS,
}
"""Orders that compiled code knows, and the place of each one's knob among their weights."""
DELAY, TUNED_DELAY = "marginal_delay", "tuned_marginal_delay"


def order_weights_of(order: Term, tuned: Mapping[str, float] | None = None) -> FloatArray:
    """Weights of an order in compiled code: by its name's knobs, else those tuned, else defaults.

    Raises:
        ValueError: Compiled code does not know the order, or a knob is no number.
    """
    name = order.base
    if name not in ORDER_WEIGHTS:
        hint = did_you_mean(name, ORDER_WEIGHTS)
        raise ValueError(f"compiled orders are {sorted(ORDER_WEIGHTS)}, not {name!r}{hint}")
    knobs = knobs_of(order) or tuned or {}
    weights = FIRST_COME.copy()
    weights[SET_BACK_WAITS] = knobs.get(SET_BACK, 0.0)
    weights[ORDER_WEIGHTS[name]] = knobs.get(ORDERS[name].knob, ORDERS[name].default)
    return weights


def in_order_rules(placement: Term, knobs: Mapping[str, float]) -> FleetRules:
    """Weights of the placement that knows the order: those of its name, else of the knobs.

    Raises:
        ValueError: The name has other than two numbers.
    """
    names = ("wait_weight", "others_weight")
    if placement.numbers is not None:
        knobs = dict(zip(names, placement.values(), strict=True))
    return FleetRules.model_validate({name: knobs[name] for name in names if name in knobs})


def _with_few_knobs(order: str) -> list[Term]:
    """An order with each of the knobs that are tried where every rule is played."""
    rule = ORDERS[order]
    set_back = [Term.of(order, knob, back) for knob in rule.few for back in rule.few_set_backs]
    return [Term.of(order, knob) for knob in rule.few] + set_back


def _with_every_knob(names: Iterable[str]) -> Iterator[RuleName]:
    """Rules as they were tuned, and with each of the knobs that are tried."""
    for rule in map(RuleName.parse, names):
        yield rule
        assert rule.order is not None
        yield from map(rule.ordered, _with_few_knobs(rule.order.base))


class _Servers:
    """What both models say in the same words, of the servers of one scenario."""

    num_slo_weights: ClassVar[int]
    """Weights of SLO terms that the linear policy may have. On servers they made searches worse."""
    rules: ClassVar[tuple[str, ...]]
    """Rules that a champion has to stand beside; those that are never best are left out."""
    compiled_rules: ClassVar[tuple[str, ...]]
    """Those of them that compiled code decides for, so that searches can afford them."""
    hand_rule: ClassVar[str]
    """The strongest of them first come, first served, beside which orders are tuned."""
    refuses: ClassVar[bool]
    """Whether a server may refuse a request, or go: requests are placed more than once."""
    num_sizes: ClassVar[int]
    """Sizes that are tried of a rule that tells requests apart by their size."""
    most_ordered: ClassVar[int]
    """Servers up to which every order of them is tried for SITA; of more, the two by speed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    @property
    def has(self) -> Needs:
        """What rules may need of such servers."""
        return Needs.NOTHING

    @abstractmethod
    def linear_placements(self, tuned: TunedRules | None) -> Mapping[str, tuple[float, ...]]:
        """Weights of the placements that the linear policy can be, by name; the first is untuned.

        Args:
            tuned: The scenario's tuned rules; None: there are none.
        """

    @abstractmethod
    def _placement(self, placement: Term, tuned: TunedRules | None) -> Place | None:
        """What runs a placement of `compiled_rules`; None: it is none of them."""

    def compiled(self, name: str, tuned: TunedRules | None = None) -> Decide | None:
        """What runs one of `compiled_rules`, or a placement with an order by size.

        None: no compiled code decides alike. It is a hundred times as fast.

        Args:
            name: With an order the placement may be the one that knows the order, too.
            tuned: Its parameters and knobs; None: those that ship for the scenario.

        Raises:
            ValueError: It is a tuned one, and none was tuned for the scenario.
        """
        rule = RuleName.parse(name)
        if rule.order is None:
            place = self._placement(rule.placement, tuned)
            return None if place is None else partial(place, order=FIRST_COME)
        if rule.order.base not in ORDER_WEIGHTS:
            return None
        tuned = tuned or find_tuned(self.scenario.name)
        as_tuned = str(rule.ordered(Term(rule.order.base)))
        knobs = {} if tuned is None else tuned.orders.get(as_tuned, {})
        weights = order_weights_of(rule.order, knobs)
        place = self._placement(rule.placement, tuned)
        if rule.base == IN_ORDER:
            place = self.linear(in_order_rules(rule.placement, knobs).in_order_weights)
        # Weights of 0 order nothing, and are no order of arrivals.
        if place is None or not weights.any():
            return None
        return partial(place, order=weights)

    @property
    def orders(self) -> tuple[str, ...]:
        """Orders that are tuned beside `hand_rule` and the best tuned rule."""
        return ("sjf", "boost", "late_last")

    def grids(self) -> Grids:
        """Values tried of every parameter of rules that only such servers tell apart."""
        return {}

    @abstractmethod
    def placements(self, sim: Simulator) -> Mapping[str, Place]:
        """The compiled placements with several parameters each, by name; the hand rule first."""

    def rule_variants(self, sim: Simulator) -> dict[str, Decide]:
        """Combine `placements` and the order-aware one with first come first served and orders.

        Each order comes with every knob.
        """
        placements = self.placements(sim)
        variants: dict[str, Decide] = {
            name: partial(place, order=FIRST_COME) for name, place in placements.items()
        }
        for order in (order for order in ORDER_WEIGHTS if order in self.orders):
            for knobs in _with_few_knobs(order):
                weights = order_weights_of(knobs)
                for name, place in [*placements.items(), *self.in_order().items()]:
                    rule = RuleName(Term.parse(name), knobs)
                    variants[str(rule)] = partial(place, order=weights)
        return variants

    def tuned_variants(self) -> dict[str, Decide]:
        """The scenario's tuned rules that run compiled, and its tuned orders with every knob."""
        tuned = find_tuned(self.scenario.name)
        if tuned is None:
            return {}
        rules = {name: self.compiled(name) for name in self.compiled_rules} | {
            str(rule): self.compiled(str(rule), tuned) for rule in _with_every_knob(tuned.orders)
        }
        return {name: decide for name, decide in rules.items() if decide is not None}

    def linear(self, weights: Sequence[float]) -> Place:
        """What runs a placement of the linear policy."""
        coefficients, size = np.array(weights), sum(self.scenario.mean_lengths_tokens)
        return lambda sim, order: sim.run_linear(coefficients, size, order)

    def in_order(self) -> Mapping[str, Place]:
        """The placement that knows the order, with weights of the wait and of others' delays."""
        return {
            str(Term.of(IN_ORDER, wait, others)): self.linear(
                FleetRules(wait_weight=wait, others_weight=others).in_order_weights
            )
            for wait, others in ((1.0, 0.5), (1.0, 1.0), (1.0, 2.0), (2.0, 2.0))
        }


class ConstantRate(_Servers):
    """Servers that work through requests at a constant rate, one or several at a time."""

    simulator = ClusterSim
    num_slo_weights = 0
    rules = ("sed", "sed_reserve", "sed_dump", "sed_linear", "sita", "weighted_least_connections")
    compiled_rules = ("sed", "sed_reserve", "sed_dump")
    hand_rule = "sed"
    refuses = False
    num_sizes = 24
    most_ordered = 4

    def encode(
        self, trace: Trace, predicted_total: FloatArray, features: FloatArray,
        rng: np.random.Generator,
    ) -> FloatArray:  # fmt: skip
        """Lay a trace out as rows of shape (num_requests, NUM_REQUEST).

        Args:
            trace: Requests.
            predicted_total: What the router is told of their sizes, tokens, shape (num_requests,).
            features: Scaled request features, shape (num_requests, NUM_REQUEST_FEATURES).
            rng: Not drawn from.
        """
        rows = np.empty((trace.num_requests, kernel.NUM_REQUEST))
        rows[:, kernel.ARRIVAL_S] = trace.arrival_s
        rows[:, kernel.DISPATCH_S] = dispatch_s(trace.arrival_s, self.scenario.decision_epoch_s)
        rows[:, kernel.TRUE_TOTAL] = trace.total_tokens
        rows[:, kernel.PREDICTED_TOTAL] = predicted_total
        rows[:, kernel.CONTEXT] = trace.context_tokens
        rows[:, kernel.FEATURES :] = features
        return rows

    def measures(self) -> list[Measure]:
        """Response times, reward and, for few servers, each server's share of requests."""
        scenario = self.scenario
        measures = [
            *_compared(3, 2, f"over {scenario.slo_response_s:g} s %"),
            Measure("p50_response_s", "p50 s"),
            Measure("p95_response_s", "p95 s"),
            Measure("reward", "reward", ".0f", interval=True),
            Measure("mean_queue_length", "queue", interval=True),
            Measure("goodput_per_s", "goodput/s"),
            Measure("dropped_fraction", "drop %", ".1f", 100),
        ]
        if scenario.num_servers > _MOST_SHARES:
            return measures
        return measures + [
            Measure(f"share_server_{i}_fraction", name, ".0f", 100, table="requests by server, %")
            for i, name in enumerate(scenario.server_names)
        ]

    def violated(self, or_dropped: bool = False) -> str:
        """What requests did that violated an SLO, in words; dropped ones may be named."""
        late = f"later than {self.scenario.slo_response_s:g} s"
        return f"{late} or dropped" if or_dropped else late

    def linear_placements(self, tuned: TunedRules | None) -> Mapping[str, tuple[float, ...]]:
        """Return shortest expected delay, and its variant with a weight of the service time."""
        weights_of = {"sed": FleetRules().marginal_weights}
        if tuned is not None and "sed_linear" in tuned.scores:
            weight = tuned.knobs.get("sed_linear", {}).get("service_weight", 1.0)
            weights = [*weights_of["sed"]]
            weights[MARGINAL_PREFILL] = weight - 1.0
            weights_of["sed_linear"] = tuple(weights)
        return weights_of

    def _placement(self, placement: Term, tuned: TunedRules | None) -> Place | None:
        name, values = str(placement), placement.values()
        if values and placement.base == "sed_reserve":
            return _placed_by_delay(values[0], -1)
        if values and placement.base == "sed_dump":
            return _placed_by_delay(np.inf, int(values[0]))
        # Nobody is delayed by a request that comes last, so least marginal delay is the same.
        if name not in (*self.compiled_rules, DELAY, TUNED_DELAY):
            return None
        above_tokens, dump_server = np.inf, -1
        if name not in ("sed", DELAY, TUNED_DELAY):
            tuned = tuned or load_tuned(self.scenario.name)
            if name == "sed_reserve":
                above_tokens = tuned.reserve_above_tokens
            else:
                dump_server = tuned.dump_replica
        return _placed_by_delay(above_tokens, dump_server)

    def placements(self, sim: Simulator) -> Mapping[str, Place]:
        """Return shortest expected delay, then its variants with up to four parameters each."""
        by_speed = np.argsort([server.tokens_per_s for server in self.scenario.servers])
        places = sorted({0, len(by_speed) // 4, len(by_speed) // 2, len(by_speed) - 1})
        sizes = np.quantile(sim.sizes_seen(), (0.6, 0.75, 0.85, 0.95))
        by_name = {"sed": _placed_by_delay(np.inf, -1)}
        if len(by_speed) == 1:
            return by_name
        for place in places:
            server = int(by_speed[place])
            by_name[str(Term.of("sed_dump", server))] = _placed_by_delay(np.inf, server)
        for size in sizes.tolist():
            by_name[str(Term("sed_reserve", f"{size:.0f}"))] = _placed_by_delay(round(size), -1)
        return by_name


class Batching(_Servers):
    """A fleet of replicas that batch continuously (docs/engine.md)."""

    simulator = BatchingSim
    num_slo_weights = NUM_SLO_WEIGHTS
    rules = (
        "sed", "sed_dump", DELAY, TUNED_DELAY, "weighted_least_connections",
        "weighted_least_loaded", "tuned_filter_dump", "tuned_lmetric", "tuned_pending_prefill",
        "tuned_dynamo_cost", "tuned_llmd_blend",
    )  # fmt: skip
    compiled_rules = (DELAY, TUNED_DELAY)
    hand_rule = TUNED_DELAY
    refuses = True
    # It takes ten times as long to simulate.
    num_sizes = 8
    most_ordered = 0

    def encode(
        self, trace: Trace, predicted_total: FloatArray, features: FloatArray,
        rng: np.random.Generator,
    ) -> Stream:  # fmt: skip
        """Lay a trace out, with classes, routers and failures drawn from `rng`."""
        scenario = self.scenario
        return encode_for_fleet(
            scenario.required_fleet, trace, predicted_total - trace.context_tokens, features,
            scenario.slo_response_s, rng, scenario.decision_epoch_s,
        )  # fmt: skip

    def measures(self) -> list[Measure]:
        """Latencies, memory, energy and, where there are several, classes and tenants."""
        return [
            *COMPARED,
            Measure("mean_ttft_s", "ttft s"),
            Measure("p99_ttft_s", "p99 ttft"),
            Measure("p99_tpot_s", "p99 tpot ms", ".0f", 1000),
            Measure("p99_itl_s", "p99 itl ms", ".0f", 1000),
            Measure("goodput_per_s", "goodput/s"),
            Measure("dropped_fraction", "drop %", ".1f", 100),
            Measure("retried_fraction", "retry %", ".1f", 100),
            Measure("prefix_hit_fraction", "hit %", ".1f", 100),
            Measure("kv_used_fraction", "kv %", ".1f", 100),
            Measure("preemptions_per_request", "preempt"),
            Measure("wasted_tokens_fraction", "waste %", ".1f", 100),
            Measure("energy_j_per_token", "J/token"),
            Measure("reward", interval=True),
            Measure("mean_queue_length", interval=True),
            *_of_classes(self.scenario.required_fleet),
        ]

    def violated(self, or_dropped: bool = False) -> str:
        """Each class has its own SLOs; what was dropped attained none."""
        return "that violated an SLO of their class"

    def linear_placements(self, tuned: TunedRules | None) -> Mapping[str, tuple[float, ...]]:
        """Return least marginal delay, plain and tuned."""
        weights_of = {DELAY: FleetRules().marginal_weights}
        if tuned is not None:
            weights_of[TUNED_DELAY] = tuned.fleet.marginal_weights
        return weights_of

    def _placement(self, placement: Term, tuned: TunedRules | None) -> Place | None:
        if placement.base == DELAY and placement.numbers is not None:
            return self._marginal(*placement.values())
        if str(placement) not in self.compiled_rules:
            return None
        rules = FleetRules()
        if placement.base == TUNED_DELAY:
            rules = (tuned or load_tuned(self.scenario.name)).fleet
        return self._marginal(rules.wait_weight, rules.others_weight)

    def placements(self, sim: Simulator) -> Mapping[str, Place]:
        """Least marginal delay, with weights of the wait and of others' delays."""
        weights = ((1.0, 1.0), (0.25, 1.0), (3.0, 1.0), (0.0, 3.0), (0.5, 2.0), (0.5, 3.0),
                   (2.0, 2.0))  # fmt: skip
        return {
            str(Term.of(DELAY, wait, others)): self._marginal(wait, others)
            for wait, others in weights
        }

    def _marginal(self, wait_weight: float, others_weight: float) -> Place:
        rules = FleetRules(wait_weight=wait_weight, others_weight=others_weight)
        return self.linear(rules.marginal_weights)

    @property
    def has(self) -> Needs:
        """Batching, and a prefix cache where the fleet has one."""
        caches = self.scenario.required_fleet.prefix_block_tokens > 0
        return Needs.PREFIX_CACHE if caches else Needs.BATCHING

    @property
    def orders(self) -> tuple[str, ...]:
        """By size; by SLO where a priority has several classes; by tenant where there are some."""
        fleet = self.scenario.required_fleet
        several = len(fleet.classes) > len(
            {service_class.priority for service_class in fleet.classes}
        )
        return (
            *("sjf", "wspt", "boost", "late_last"),
            *(("edf", "slack") if several else ()),
            *(("fair",) if len(fleet.tenants) > 1 else ()),
        )

    def grids(self) -> Grids:
        """Those of rules for replicas that batch."""
        return FLEET_GRIDS


ServerModel = ConstantRate | Batching
Simulator = ClusterSim | BatchingSim
Decide = Callable[[Simulator], None]
"""Runs all copies of a simulator to the end."""


class Place(Protocol):
    """Runs all copies of a simulator to the end under one placement and the weights of an order."""

    def __call__(self, sim: Simulator, order: FloatArray) -> None:
        """Run them."""


def server_model(scenario: Scenario) -> ServerModel:
    """The model of a scenario's servers."""
    return ConstantRate(scenario) if scenario.fleet is None else Batching(scenario)


def _placed_by_delay(reserve_above_tokens: float, dump_server: int) -> Place:
    return lambda sim, order: cast(ClusterSim, sim).run_delay_rule(
        reserve_above_tokens, dump_server, order
    )


def _compared(digits: int, tail_digits: int, violation: str) -> list[Measure]:
    return [
        Measure(
            "mean_response_s", "mean s", f".{digits}f", interval=True, delta="delta_mean_fraction"
        ),
        Measure(
            "p99_response_s", "p99 s", f".{tail_digits}f", interval=True, delta="delta_p99_fraction"
        ),
        Measure(
            "slo_violation_fraction", violation, ".1f", 100, interval=True,
            delta="delta_slo_violation",
        ),
    ]  # fmt: skip


COMPARED = tuple(_compared(2, 1, "violation %"))
"""What every table compares of replicas that batch, and studies of all servers."""


def _of_classes(fleet: Fleet) -> list[Measure]:
    """Return attainment by class and tenant, if there are several of either."""
    tenants = fleet.tenants if len(fleet.tenants) > 1 else ()
    if not tenants and len(fleet.classes) == 1:
        return []
    title = "SLO attainment by class and tenant"
    names = {service_class.name: service_class.name for service_class in fleet.classes}
    names |= {f"tenant_{tenant.name}": f"tenant {tenant.name}" for tenant in tenants}
    measures = [
        Measure(f"attained_{key}_fraction", f"{name.replace('_', ' ')} %", ".1f", 100, table=title)
        for key, name in names.items()
    ]
    if tenants:
        measures += [
            Measure("service_gap_tokens_per_s", "gap tokens/s", ".0f", table=title),
            Measure("max_service_gap_tokens_per_s", "largest gap", ".0f", table=title),
        ]
    return measures

"""Search the parameters of the tuned hand rules, on the score that sweeps rank learned ones on.

A rule is judged on training streams, as a learned policy is trained on them; every value of its
parameter sees the same streams.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tokenyard.routing.evaluation import per_stream
from tokenyard.routing.gate import FULL_LOAD, load_factors
from tokenyard.routing.policies import public
from tokenyard.routing.policies.delay import SedDump, SedReserve
from tokenyard.routing.policies.order import IN_ORDER, ORDERS, SET_BACK, SET_BACKS, OrderRule
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.policies.size_interval import SizeIntervals
from tokenyard.routing.policies.tuned import FLEET_GRIDS, FleetRules, TunedRules
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator import Simulator, make_simulator
from tokenyard.routing.simulator.run import Run, run_each, run_policy, run_rule
from tokenyard.routing.simulator.server_models import (
    DELAY,
    TUNED_DELAY,
    in_order_rules,
    server_model,
)
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, synthetic_streams
from tokenyard.routing.types import RoutingPolicy
from tokenyard.statistics.intervals import t_interval
from tokenyard.types import FloatArray

Values = tuple[float, ...]

MOST_TRIALS = 40
"""Settings that are tried of any rule with knobs: the same for those of all makers and ours."""


def tune_rules(scenario: Scenario, num_streams: int, seed: int) -> TunedRules:
    """Search all tuned rules of a scenario on fresh training streams.

    Sizes are searched over quantiles of the sizes that the router sees, the dump replica over
    all replicas, and SITA's cuts one at a time until none of them moves, for every order of
    unequal servers. The rules of the scenario's servers and the public rules (`tune_public_rules`)
    are searched on their grids, from the values of their sources.
    """
    source = StreamSource(scenario)
    search = _Search(scenario, synthetic_streams(source, num_streams, seed, "training"))
    reserve, reserve_score = search.reserve_above_tokens()
    dump, dump_score = search.dump_replica()
    cuts, replicas, sita_score = search.size_intervals()
    rules = TunedRules(
        scenario=scenario.name,
        reserve_above_tokens=reserve,
        dump_replica=dump,
        sita_cuts_tokens=cuts,
        sita_replicas=replicas,
        scores={
            "sed": search.score_of("sed"),
            "sed_reserve": reserve_score,
            "sed_dump": dump_score,
            "sita": sita_score,
        },
        tuned_on=_stream_words(scenario, num_streams, seed),
    )
    tuned = search.with_orders(search.with_public_rules(search.with_rules_of_servers(rules)))
    return tune_loads(scenario, tuned, num_streams, seed)


def tune_public_rules(
    scenario: Scenario, rules: TunedRules, num_streams: int, seed: int
) -> TunedRules:
    """Search the knobs of the public rules anew and keep the other rules' parameters.

    Every rule may try `MOST_TRIALS` settings, on the same streams, from its makers' values. The
    other rules are scored on these streams too, so that scores can be compared.
    """
    streams = synthetic_streams(StreamSource(scenario), num_streams, seed, "training")
    search = _Search(scenario, streams)
    others = [
        name
        for name in rules.scores
        if name.removeprefix(public.TUNED_PREFIX) not in public.PUBLIC_RULES
    ]
    tuned_on = _stream_words(scenario, num_streams, seed)
    tuned = search.with_public_rules(search.scored_anew(rules, others, "public rules", tuned_on))
    # An order may be combined with a public rule, whose knobs have changed.
    orders = {name: search.score_of(name, tuned) for name in tuned.order_scores}
    tuned = tuned.model_copy(update={"order_scores": orders})
    return tune_loads(scenario, tuned, num_streams, seed)


def _stream_words(scenario: Scenario, num_streams: int, seed: int) -> str:
    """Describe the training streams in words."""
    requests = scenario.requests_per_stream
    return f"{num_streams} training streams of {requests} requests, seed {seed}"


def tune_orders(scenario: Scenario, rules: TunedRules, num_streams: int, seed: int) -> TunedRules:
    """Search the knobs of orders anew and keep the parameters of placements.

    Every order is combined with the hand rule and the best tuned rule, on the same streams. The
    other rules are scored on these streams too, so that scores can be compared.
    """
    streams = synthetic_streams(StreamSource(scenario), num_streams, seed, "training")
    search = _Search(scenario, streams)
    tuned_on = _stream_words(scenario, num_streams, seed)
    tuned = search.with_orders(search.scored_anew(rules, list(rules.scores), "orders", tuned_on))
    return tune_loads(scenario, tuned, num_streams, seed)


def tune_loads(scenario: Scenario, rules: TunedRules, num_streams: int, seed: int) -> TunedRules:
    """Score at several loads the rules that may ship, and keep all parameters.

    These are the tuned orders, their placements and, if the best of them has weights of delays,
    its variants with another value of one weight. Of the rules that no other certainly beats at
    the scenario's own load, the scores at other loads decide which one ships.
    """
    source = StreamSource(scenario)
    streams = {
        part: synthetic_streams(source, num_streams, seed, "training", factor)
        for part, factor in load_factors(source).items()
    }

    def scores_at(part: str, names: Sequence[str]) -> dict[str, FloatArray]:
        return {name: _scores(scenario, streams[part], name, rules) for name in names}

    placements = [str(RuleName.parse(name).placement) for name in rules.order_scores]
    names = [name for name in placements if name != IN_ORDER] + list(rules.order_scores)
    own = scores_at(FULL_LOAD, list(dict.fromkeys(names)))
    best, *_ = not_beaten(own)
    own |= scores_at(FULL_LOAD, with_other_weights(best, rules))
    names = not_beaten(own)
    by_part = {part: own if part == FULL_LOAD else scores_at(part, names) for part in streams}
    scores = {name: {part: float(by_part[part][name].mean()) for part in by_part} for name in names}
    words = _stream_words(scenario, num_streams, seed)
    return rules.model_copy(update={"load_scores": scores, "load_scores_on": words})


def not_beaten(scores: Mapping[str, FloatArray]) -> list[str]:
    """Return the names that the best is not certainly better than, the best first.

    Args:
        scores: By name, on the same streams, shape (num_streams,). With too few streams for an
            interval, every difference counts as certain.
    """
    ranked = sorted(scores, key=lambda name: float(scores[name].mean()), reverse=True)
    behind = {name: t_interval(scores[ranked[0]] - scores[name]) for name in ranked}
    return [
        name for name, gap in behind.items()
        if (gap.estimate if math.isnan(gap.low) else gap.low) <= 0.0
    ]  # fmt: skip


def with_other_weights(name: str, rules: TunedRules) -> list[str]:
    """Name the variants of a rule with one weight of its placement at another grid value.

    Empty if the placement has no weights of delays.
    """
    placement, order = RuleName.parse(name)
    knobs = rules.orders.get(name, {})
    in_order = in_order_rules(Term(IN_ORDER), knobs)
    weights_of = {DELAY: FleetRules(), TUNED_DELAY: rules.fleet, IN_ORDER: in_order}
    weights = weights_of.get(str(placement))
    if weights is None:
        return []
    if order is not None:
        knob, set_back = ORDERS[order.base].knob, knobs[SET_BACK]
        more = (set_back,) if set_back and knob != SET_BACK else ()
        order = Term.of(order.base, knobs[knob], *more)
    moved = [
        weights.model_copy(update={field: value})
        for field, grid in FLEET_GRIDS[TUNED_DELAY].items()
        for value in grid
        if value != getattr(weights, field)
    ]
    base = IN_ORDER if placement.base == IN_ORDER else DELAY
    placements = [Term.of(base, rules.wait_weight, rules.others_weight) for rules in moved]
    return [str(RuleName(moved_placement, order)) for moved_placement in placements]


def _scores(
    scenario: Scenario, streams: StreamSet, name: str, rules: TunedRules | None
) -> FloatArray:
    """Score of a rule by name on each stream, made afresh for each."""
    # A score is of responses alone.
    runs = run_rule(name, scenario.without_reward(), streams, tuned=rules)
    return per_stream(scenario, runs)["score"]


def coordinate_descent(
    start: Values,
    grids: Sequence[Sequence[float]],
    score_of: Callable[[Values], float],
    allowed: Callable[[Values], bool] = lambda values: True,
    most_trials: float = math.inf,
) -> tuple[float, Values]:
    """Move one value at a time along its grid while that raises the score.

    Args:
        start: Values to begin with.
        grids: What each of the values may become.
        score_of: To be raised; called once for equal values.
        allowed: Which values may be tried together.
        most_trials: How often `score_of` may be called; what it found by then is returned.

    Returns:
        The best score and its values; the first found of equals.
    """
    seen = {start: score_of(start)}
    best = start
    improved = True
    while improved:
        improved = False
        for at, grid in enumerate(grids):
            for value in grid:
                trial = (*best[:at], value, *best[at + 1 :])
                if trial in seen or not allowed(trial):
                    continue
                if len(seen) >= most_trials:
                    return seen[best], best
                seen[trial] = score_of(trial)
                if seen[trial] > seen[best]:
                    best, improved = trial, True
    return seen[best], best


class _Search:
    def __init__(self, scenario: Scenario, streams: StreamSet) -> None:
        # A score is of responses alone.
        self._scenario = scenario.without_reward()
        self._streams = streams
        self._servers = server_model(scenario)
        sim = make_simulator(scenario, len(streams), len(streams.requests[0]))
        for copy, stream in enumerate(streams.requests):
            sim.load(copy, stream)
        self._sizes = sim.sizes_seen()
        levels = np.linspace(0, 1, self._servers.num_sizes + 1)[1:]
        self._quantiles: list[float] = np.unique(np.quantile(self._sizes, levels)).tolist()

    def score_of(self, name: str, rules: TunedRules | None = None) -> float:
        """Mean score over streams of a rule by name, made afresh for each."""
        return float(_scores(self._scenario, self._streams, name, rules).mean())

    def _score_made(self, policy: RoutingPolicy) -> float:
        """Mean score over streams of a policy without memory."""
        runs = run_policy(self._scenario, self._streams, lambda rng: policy, seed=0)
        return self._mean_score(runs)

    def _mean_score(self, runs: Sequence[Run]) -> float:
        return float(per_stream(self._scenario, runs)["score"].mean())

    def scored_anew(
        self, rules: TunedRules, names: Sequence[str], tuned: str, streams: str
    ) -> TunedRules:
        """Score rules on these streams with their present parameters.

        Args:
            rules: Rules of the scenario.
            names: Rules to score; the scores of others are dropped.
            tuned: Description of the rules tuned on these streams.
            streams: Description of the streams.
        """
        first = rules.tuned_on.partition("; ")[0]
        both = f"{first}; {tuned}, and all scores: {streams}"
        return rules.model_copy(
            update={
                "scores": {name: self.score_of(name, rules) for name in names},
                "tuned_on": streams if streams == first else both,
            }
        )

    def reserve_above_tokens(self) -> tuple[float, float]:
        """Best size for SED-reserve, and its score; the largest size bars nothing."""
        scores = [self._score_made(SedReserve(above)) for above in self._quantiles]
        best = int(np.argmax(scores))
        return self._quantiles[best], scores[best]

    def dump_replica(self) -> tuple[int, float]:
        """Best replica for SED-dump, and its score."""
        slo, num = self._scenario.slo, self._scenario.num_servers
        scores = [self._score_made(SedDump(slo, i, num)) for i in range(num)]
        best = int(np.argmax(scores))
        return best, scores[best]

    def size_intervals(self) -> tuple[Values, tuple[int, ...], float]:
        """Return SITA's best cuts and order of servers, and their score."""
        speeds = self._scenario.server_capacities_tokens_per_s
        orders = _orders(speeds, self._servers.most_ordered)
        searched = [(*self._cuts(order), order) for order in orders]
        best_score, cuts, order = max(searched)
        return cuts, order, best_score

    def with_rules_of_servers(self, rules: TunedRules) -> TunedRules:
        """Add the best parameters of rules that only such servers tell apart, and their scores."""
        scores = {}
        for name, grids in self._servers.grids().items():
            scores[name], rules = self._tune_rule(name, rules, grids)
        return rules.model_copy(update={"scores": rules.scores | scores})

    def _tune_rule(
        self, name: str, rules: TunedRules, grids: Mapping[str, Values]
    ) -> tuple[float, TunedRules]:
        def with_values(values: Mapping[str, float]) -> TunedRules:
            return rules.model_copy(update={"fleet": rules.fleet.model_copy(update=values)})

        start = {field: getattr(FleetRules(), field) for field in grids}
        best_score, best = self._tuned(name, start, grids, with_values)
        return best_score, with_values(best)

    def _tuned(
        self, name: str, start: Mapping[str, float], grids: Mapping[str, Values],
        rules_with: Callable[[Mapping[str, float]], TunedRules],
    ) -> tuple[float, dict[str, float]]:  # fmt: skip
        """The best score of a rule, and the values by name that give it."""
        score, best = coordinate_descent(
            tuple(start.values()),
            [grids[knob] for knob in start],
            lambda values: self.score_of(name, rules_with(dict(zip(start, values, strict=True)))),
            most_trials=MOST_TRIALS,
        )
        return score, dict(zip(start, best, strict=True))

    def with_public_rules(self, rules: TunedRules) -> TunedRules:
        """Add the score of every public rule that is a row here, and the best of its knobs."""
        has = self._servers.has
        scores, knobs = dict(rules.scores), dict(rules.knobs)
        for name in [name for name, rule in public.PUBLIC_RULES.items() if rule.needs <= has]:
            if name != public.ALWAYS_TUNED:
                scores[name] = self.score_of(name, rules)
            if public.grid_of(name, has):
                label = name if name == public.ALWAYS_TUNED else public.TUNED_PREFIX + name
                scores[label], knobs[name] = self._tune_knobs(name, label, rules, has)
        return rules.model_copy(update={"scores": scores, "knobs": knobs})

    def _tune_knobs(
        self, name: str, label: str, rules: TunedRules, has: public.Needs
    ) -> tuple[float, dict[str, float]]:
        grid, defaults = public.grid_of(name, has), public.PUBLIC_RULES[name].defaults
        score, best = self._tuned(
            label, {knob: defaults[knob] for knob in grid}, grid,
            lambda values: rules.model_copy(update={"knobs": {name: values}}),
        )  # fmt: skip
        # Unchanged knobs are not written: a maker's value may be infinite, and may change.
        return score, {knob: value for knob, value in best.items() if value != defaults[knob]}

    def with_orders(self, rules: TunedRules) -> TunedRules:
        """Add the score of every order beside the placements that matter, and its knob."""
        best = max(rules.scores, key=rules.scores.__getitem__)
        scores: dict[str, float] = {}
        knobs: dict[str, dict[str, float]] = {}
        for placement in dict.fromkeys((self._servers.hand_rule, best, IN_ORDER)):
            for order in self._servers.orders:
                if placement == IN_ORDER and ORDERS[order].counts_replicas:
                    continue  # It would count a request once for every replica.
                name = str(RuleName(Term(placement), Term(order)))
                scores[name], knobs[name] = self._tune_order(name, ORDERS[order], rules)
        return rules.model_copy(update={"order_scores": scores, "orders": knobs})

    def _tune_order(
        self, name: str, order: OrderRule, rules: TunedRules
    ) -> tuple[float, dict[str, float]]:
        start, grid = {order.knob: order.default}, {order.knob: order.grid}
        if name.startswith(IN_ORDER):
            start |= rules.fleet.model_dump()
            grid |= FLEET_GRIDS["tuned_marginal_delay"]
        start.setdefault(SET_BACK, 0.0)
        grid.setdefault(SET_BACK, SET_BACKS)

        return self._tuned(
            name, start, grid, lambda values: rules.model_copy(update={"orders": {name: values}})
        )

    def _cuts(self, order: tuple[int, ...]) -> tuple[float, Values]:
        """Best cuts for an order of servers: coordinate descent from equal load."""
        start = self._balanced_cuts(order)
        return coordinate_descent(
            start,
            [self._quantiles] * len(start),
            lambda cuts: self._sita_score(SizeIntervals(cuts, order)),
            lambda cuts: list(cuts) == sorted(cuts),
        )

    def _balanced_cuts(self, order: tuple[int, ...]) -> Values:
        """Cuts that give every server work in proportion to its capacity."""
        capacity = np.array(self._scenario.server_capacities_tokens_per_s)[list(order)]
        sizes = np.sort(self._sizes, axis=None)
        work = np.cumsum(sizes) / sizes.sum()
        at = np.searchsorted(work, (np.cumsum(capacity) / capacity.sum())[:-1])
        return tuple(sizes[at].tolist())

    def _sita_score(self, rule: SizeIntervals) -> float:
        # While all servers are up the rule looks at the size alone, so its choices are made before
        # the stream runs, which is several times faster than making snapshots.
        choices = [[rule.replica_of(size) for size in row] for row in self._sizes.tolist()]

        def choose(sim: Simulator, copy: int) -> int:
            seen = sim.view(copy)
            offered = seen.offered()
            if len(offered) == self._scenario.num_servers:
                return choices[copy][seen.current()]
            return offered[rule.route(seen.request(), seen.snapshots())]

        return self._mean_score(
            run_each(self._scenario, self._streams, [choose] * len(self._streams))
        )


def _orders(speeds: Sequence[float], most: int) -> list[tuple[int, ...]]:
    """Orders of servers that are worth telling apart: equal servers are swapped in vain."""
    if len(speeds) > most:
        by_speed = sorted(range(len(speeds)), key=speeds.__getitem__)
        return [tuple(by_speed), tuple(reversed(by_speed))]
    orders = itertools.permutations(range(len(speeds)))
    unlike = {tuple(speeds[i] for i in order): order for order in reversed(list(orders))}
    return sorted(unlike.values())

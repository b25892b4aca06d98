"""The best rule for some traffic, found by playing all rules on it.

Nothing is learned: a few thousand requests and the replicas are enough. `Replay.best_rules` finds
the rival of the law (`tokenyard.routing.never_worse`), `Replay.choice` what `tokenyard train`
begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from tokenyard.routing.policies.order import IN_ORDER, LATE_LAST, ORDERS, SET_BACKS
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.scenario import NO_REWARD, Scenario
from tokenyard.routing.simulator import Decide, Simulator, make_simulator
from tokenyard.routing.simulator.batching_streams import Stream
from tokenyard.routing.simulator.server_models import DELAY, ORDER_WEIGHTS, server_model
from tokenyard.routing.validation import NAMES, outcome_row
from tokenyard.types import FloatArray

_FIRST_STREAMS, _FINALISTS = 2, 5
"""Streams that every rule is tried on, and how many of the best rules are tried on all."""
_WAIT_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0)
_OTHERS_WEIGHTS = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0)
"""Weights of the wait and of others' delays that the descent from the best rule tries."""
_COORDINATES, _MOST_SWEEPS = (0, 1, 2, 3, 4), 3
"""What the descent changes, one after the other, and how often (`Replay._neighbours`)."""
_COMPARED = 20
"""Rules that `Replay.choice` tries on all streams."""
NEAR = 0.02
"""How far below the best score a rule may be as good, for `Replay.choice`: a share of it."""


class Replay:
    """Streams of one scenario, on which anything may be run."""

    def __init__(
        self, scenario: Scenario, streams: Sequence[Stream], tuned: bool = False, warm_up: int = 0
    ) -> None:
        """Take streams of equal length.

        Args:
            scenario: Of the servers.
            streams: What arrives.
            tuned: Whether the rules that ship for the scenario play too.
            warm_up: Requests that every stream begins with, and that do not count.
        """
        self._scenario, self._streams, self._warm_up = scenario, streams, warm_up
        self._tuned = server_model(scenario).tuned_variants() if tuned else {}
        self._sims: dict[int, Simulator] = {}
        self._means: dict[tuple[str, int], FloatArray] = {}

    def rows(self, decide: Decide, count: int | None = None) -> FloatArray:
        """What a policy does on the first `count` streams, or on all, shape (count, len(NAMES))."""
        count = count or len(self._streams)
        sim = self._simulator(count)
        decide(sim)
        slo_s = self._scenario.slo_response_s
        counted = (sim.view(copy).outcomes().after(self._warm_up) for copy in range(count))
        return np.array([outcome_row(outcomes, slo_s) for outcomes in counted])

    def best_rules(self, by: str = "score") -> list[str]:
        """Names of the rules of the best mean scores (`metrics.score`), the best first.

        Placements are tried first come first served and with the default knob of their orders; the
        best of them with all knobs, and tuned rules; and the best of these on all streams. From the
        very best the search goes on, one coordinate at a time (`_neighbours`), until none of them
        improves it.

        Args:
            by: One of `NAMES`; what is not the score is better where it is lower.
        """
        names = self._leading(by, _FINALISTS)
        scores = {name: self._score(name, len(self._streams), by) for name in names}
        ranked = sorted(names, key=scores.__getitem__, reverse=True)
        best = self._descended(ranked[0], by)
        return list(dict.fromkeys([best, *ranked]))

    def _descended(self, name: str, by: str) -> str:
        """The rule that no neighbour beats, found from `name` one coordinate at a time."""
        best, best_score = name, self._score(name, len(self._streams), by)
        for at in _COORDINATES * _MOST_SWEEPS:
            for rule in self._neighbours(RuleName.parse(best))[at]:
                score = self._score(str(rule), len(self._streams), by)
                if score > best_score:
                    best, best_score = str(rule), score
        return best

    def _neighbours(self, rule: RuleName) -> tuple[list[RuleName], ...]:
        """Rules that differ in the placement, either of its weights, the order, or the set-back."""
        placement, order = rule
        weights = placement.values() if placement.base in (DELAY, IN_ORDER) else []
        wait, others = weights or (1.0, 1.0)
        knob, back = (*(order.values() if order else ()), 0.0, 0.0)[:2]
        servers = server_model(self._scenario)
        placements = [Term.parse(name) for name in servers.placements(self._simulator(1))]
        if placements[0].base == DELAY:
            placements = [Term.of(DELAY, wait, others)]
        if order is not None:
            placements.append(Term.of(IN_ORDER, wait, others))
        orders = [
            Term.of(name, value) if name == LATE_LAST or not back else Term.of(name, value, back)
            for name in servers.orders
            if name in ORDER_WEIGHTS
            for value in ORDERS[name].grid
            if value
        ]
        waits = [Term.of(placement.base, value, others) for value in _WAIT_WEIGHTS if weights]
        shares = [Term.of(placement.base, wait, value) for value in _OTHERS_WEIGHTS if weights]
        set_backs = [
            Term.of(order.base, knob, value)
            for value in SET_BACKS
            if value and order is not None and knob and order.base != LATE_LAST
        ]
        return (
            [rule._replace(placement=term) for term in placements],
            [rule._replace(placement=term) for term in waits],
            [rule._replace(placement=term) for term in shares],
            [rule.ordered(term) for term in orders],
            [rule.ordered(term) for term in set_backs],
        )

    def decide(self, name: str) -> Decide:
        """What runs a rule by name, one of `rules` or one with other weights and knobs.

        Raises:
            ValueError: No compiled code decides as it does.
        """
        run = self.rules.get(name) or server_model(self._scenario).compiled(name)
        if run is None:
            raise ValueError(f"no compiled code decides as {name!r}")
        return run

    def choice(self, near: float = NEAR) -> str:
        """Name of the rule to serve: near the best score, and not far beyond others that are.

        A few streams do not tell rules of nearly equal scores apart, and some of them have a mean
        or a p99 that is a quarter below that of others. So this takes the rule that lies least
        beyond the others in its worst measure, where those near the best score count most.

        Args:
            near: See `least_beyond`.
        """
        names = self._leading("score", _COMPARED)
        means = np.array([self._mean(name, len(self._streams)) for name in names])
        return names[least_beyond(means, near)]

    def _leading(self, by: str, most: int) -> list[str]:
        """Names of the best rules on the first streams, the best first."""
        few = min(_FIRST_STREAMS, len(self._streams))
        scores: dict[str, float] = {}

        def best(names: Iterable[str], most: int) -> list[str]:
            for name in names:
                if name not in scores:
                    scores[name] = self._score(name, few, by)
            return sorted(scores, key=scores.__getitem__, reverse=True)[:most]

        defaults = {None, *(Term.of(name, order.default) for name, order in ORDERS.items())}
        parsed = {name: RuleName.parse(name) for name in self._variants}
        leading = best((name for name, rule in parsed.items() if rule.order in defaults), 4)
        placements = {parsed[name].placement for name in leading}
        all_knobs = [name for name, rule in parsed.items() if rule.placement in placements]
        return best([*all_knobs, *self._tuned], most)

    @cached_property
    def rules(self) -> dict[str, Decide]:
        """Name of every rule to what runs it: all placements, orders and knobs."""
        return self._variants | self._tuned

    @cached_property
    def _variants(self) -> dict[str, Decide]:
        return server_model(self._scenario).rule_variants(self._simulator(len(self._streams)))

    def _mean(self, name: str, count: int) -> FloatArray:
        if (name, count) not in self._means:
            self._means[name, count] = self.rows(self.decide(name), count).mean(axis=0)
        return self._means[name, count]

    def _score(self, name: str, count: int, by: str) -> float:
        value = float(self._mean(name, count)[NAMES.index(by)])
        return value if by == "score" else -value

    def _simulator(self, count: int) -> Simulator:
        if count not in self._sims:
            sim = make_simulator(self._scenario, count, len(self._streams[0]), NO_REWARD)
            for copy, stream in enumerate(self._streams[:count]):
                sim.load(copy, stream)
            self._sims[count] = sim
        return self._sims[count]


def beyond(ours: FloatArray, theirs: FloatArray) -> FloatArray:
    """How far rules lie beyond others in their worst measure.

    Args:
        ours: What rules do, shape (..., len(NAMES)).
        theirs: What others do, of a shape that broadcasts with it.

    Returns:
        The largest difference, or 0: of the mean and the p99 as a share of the other's, of SLO
        violations as a share of all requests; shape (...).
    """
    _, *measures = range(len(NAMES))
    base = np.where(np.array(NAMES) == "slo_violation_fraction", 1.0, theirs)
    worse: FloatArray = ((ours - theirs) / base)[..., measures].max(axis=-1)
    return np.maximum(worse, 0.0)


def least_beyond(means: FloatArray, near: float) -> int:
    """Index of the rule that lies least beyond the others, by their means (rules, len(NAMES)).

    Others count by exp(-gap / near), where the gap to the best score is a share of it. Where no
    score is near the best, it is the rule of that. No rule is taken that another of no lower score
    beats in one measure and equals in the others.
    """
    score = means[:, NAMES.index("score")]
    weights = np.exp((score - score.max()) / (near * abs(score.max())))
    cost = beyond(means[:, None], means) @ weights
    return int(np.lexsort((-score, cost))[0])

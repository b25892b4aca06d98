"""Recorded decisions of a router, asked of one of our rules again: agreement, and chi-square."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rival_record import TOKENS_PER_S, WAITING_TOKENS, Pick
from scipy.stats import chi2

from tokenyard.routing.policies import BASELINES, PolicyContext
from tokenyard.routing.policies.cache_aware import SglangCacheAware
from tokenyard.routing.policies.public import PUBLIC_RULES
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request, RoutingPolicy
from tokenyard.types import Slo

REQUEST_TOKENS = 1024.0
"""What smg takes a request for whose tokens it was not told."""
LEAST_EXPECTED = 5.0
"""Decisions of one law are tested where each engine that it may take is expected so often."""
NO_LIMIT = 1 << 20

Law = tuple[float, ...]
"""Probability of each engine."""


@dataclass(frozen=True)
class Parity:
    """How a rule of ours compares with the picks of a router."""

    num_picks: int
    agreement_fraction: float
    """Of the decisions that our rule does not draw, those with the same engine; NaN without any."""
    possible_fraction: float
    """Of all decisions, those with an engine that our rule may take."""
    num_drawn: int
    """Decisions that our rule draws."""
    chi_square: float
    """Of those, given their law; NaN where there are too few of each law."""
    degrees: int
    p_value: float
    wall_s: float = 0.0


class EnumeratedDraws:
    """Stands for a generator: takes the values of `path`, then zeros, and notes all of them."""

    def __init__(self) -> None:
        self.path: list[int] = []
        self.taken: list[tuple[int, int]] = []

    def integers(self, high: int) -> int:
        """The next value of the path, of so many that are equally likely."""
        place = len(self.taken)
        self.taken.append((self.path[place] if place < len(self.path) else 0, high))
        return self.taken[-1][0]

    def advance(self) -> bool:
        """Set the path to the next one; False after the last."""
        while self.taken:
            value, high = self.taken.pop()
            if value + 1 < high:
                self.path = [*(one for one, _ in self.taken), value + 1]
                self.taken = []
                return True
        self.path = []
        return False


class NamesFirst(SglangCacheAware):
    """The rule, told which engine the tree names: no snapshot says who was sent a prefix first."""

    named = -1

    def holder(self, longest: Sequence[int], snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the engine that is named."""
        return self.named if self.named in longest else super().holder(longest, snapshots)


class Replay:
    """A rule of ours that is asked what it may do, and then remembers what the router did."""

    def __init__(self, rule: str, knobs: Mapping[str, float], names_first: bool) -> None:
        self._draws: Any = EnumeratedDraws()
        context = PolicyContext("", Slo(), self._draws, 0)
        if names_first:
            self._rule: RoutingPolicy = NamesFirst(**knobs)
        elif rule in PUBLIC_RULES:
            self._rule = PUBLIC_RULES[rule].make(context, knobs)
        else:
            self._rule = BASELINES[rule](context)

    def law(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot], named: int, chosen: int
    ) -> Law:
        """Probability of each replica; what the rule remembers follows the one that was chosen."""
        law, before, after = [0.0] * len(snapshots), self._rule, None
        more = True
        while more:
            rule = copy.deepcopy(before, {id(self._draws): self._draws})
            if isinstance(rule, NamesFirst):
                rule.named = named
            self._draws.taken = []
            taken = rule.route(request, snapshots)
            law[taken] += 1.0 / float(np.prod([high for _, high in self._draws.taken] or [1]))
            after = rule if after is None or taken == chosen else after
            more = self._draws.advance()
        assert after is not None
        self._rule = after
        return tuple(round(one, 9) for one in law)


def waits_of(picks: Sequence[Pick]) -> list[list[float]]:
    """What smg expects a request to wait at each engine, seconds, before each decision.

    What is queued by the engine's last word, and a fixed number of tokens per request that was sent
    there since, over the tokens that it says it does per second.
    """
    num = len(WAITING_TOKENS)
    since, polls, waits = [0] * num, picks[0].num_polls, []
    for pick in picks:
        since = [
            0 if now > then else sent
            for sent, now, then in zip(since, pick.num_polls, polls, strict=True)
        ]
        polls = pick.num_polls
        waits.append(
            [(WAITING_TOKENS[i] + REQUEST_TOKENS * since[i]) / TOKENS_PER_S[i] for i in range(num)]
        )
        since[pick.chosen] += 1
    return waits


def snapshots_of(pick: Pick, order: Sequence[int], waits: Sequence[float]) -> list[ReplicaSnapshot]:
    """What the router knew of each engine, in the order in which it keeps them."""
    return [
        ReplicaSnapshot(
            replica_id=str(i),
            tokens_per_s=1.0,
            num_slots=1,
            max_concurrency=NO_LIMIT,
            num_waiting=0,
            num_running=pick.in_flight[i],
            tokens_in_flight=float(pick.in_flight[i]),
            predicted_wait_s=waits[i],
            engine=EngineSnapshot(
                0.01, 1e-4, 1e-4, 1e-6, 2048, 1e6, 0.0, 0.0, 0.0, pick.matches[i]
            ),
        )
        for i in order
    ]


def parity_of(
    picks: Sequence[Pick],
    rule: str,
    knobs: Mapping[str, float],
    *,
    names_first: bool = False,
    told_load: bool = False,
    draws_ties: bool = True,
) -> Parity:
    """Ask a rule of ours for every recorded decision.

    The order of the engines is that of their first requests, which were sent while all were idle,
    as the routers break ties by their own order. Engines that tell no load have the requests in
    flight in place of a wait, as in smg.

    Args:
        picks: What the router did.
        rule: A name of `BASELINES`.
        knobs: Of the rule; the others are its makers'.
        names_first: The rule is told which engine was sent the longest match first.
        told_load: The router was told the load of the engines.
        draws_ties: The router draws between equals, as our rule does.
    """
    order = list(dict.fromkeys(pick.chosen for pick in picks))
    waits = waits_of(picks) if told_load else [list(map(float, one.in_flight)) for one in picks]
    replay, laws, chosen = Replay(rule, knobs, names_first), [], []
    for pick, wait in zip(picks, waits, strict=True):
        request = Request(0.0, pick.num_chars, float(pick.num_chars))
        snapshots = snapshots_of(pick, order, wait)
        named = order.index(pick.first_sent) if pick.first_sent >= 0 else -1
        chosen.append(order.index(pick.chosen))
        laws.append(replay.law(request, snapshots, named, chosen[-1]))
    return compare(laws, chosen, draws_ties)


def compare(laws: Sequence[Law], chosen: Sequence[int], draws_ties: bool) -> Parity:
    """Compare what was chosen with the laws by which it should have been."""
    sure = [law[one] == 1.0 for law, one in zip(laws, chosen, strict=True) if max(law) == 1.0]
    possible = [law[one] > 0.0 for law, one in zip(laws, chosen, strict=True)]
    statistic, degrees = chi_square(laws, chosen, draws_ties)
    return Parity(
        num_picks=len(laws),
        agreement_fraction=float(np.mean(sure)) if sure else float("nan"),
        possible_fraction=float(np.mean(possible)),
        num_drawn=len(laws) - len(sure),
        chi_square=statistic if degrees else float("nan"),
        degrees=degrees,
        p_value=float(chi2.sf(statistic, degrees)) if degrees else float("nan"),
    )


def chi_square(laws: Sequence[Law], chosen: Sequence[int], draws_ties: bool) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, summed over decisions of the same law.

    What the law excludes is not counted: `possible_fraction` says how often that was chosen. Laws
    of equals are left out where the router does not draw between them.
    """
    counts: defaultdict[Law, Counter[int]] = defaultdict(Counter)
    for law, one in zip(laws, chosen, strict=True):
        counts[law][one] += law[one] > 0.0
    statistic, degrees = 0.0, 0
    for law, found in counts.items():
        cells = [i for i, probability in enumerate(law) if probability > 0.0]
        expected = {i: law[i] * found.total() for i in cells}
        is_tie = max(expected.values()) == min(expected.values())
        if is_tie and not draws_ties:
            continue
        if len(cells) > 1 and min(expected.values()) >= LEAST_EXPECTED:
            statistic += sum((found[i] - expected[i]) ** 2 / expected[i] for i in cells)
            degrees += len(cells) - 1
    return statistic, degrees

"""Search the parameters of the tuned hand rules, on the score that sweeps rank learned ones on.

A rule is judged on training streams, as a learned policy is trained on them; every value of its
parameter sees the same streams.
"""

from __future__ import annotations

import itertools

import numpy as np

from tokenyard.evaluation import mean_summary, run_policy, score
from tokenyard.policies.delay import SedDump, SedReserve, ShortestExpectedDelay
from tokenyard.policies.size_interval import SizeIntervals
from tokenyard.policies.tuned import TunedRules
from tokenyard.scenario import Scenario
from tokenyard.sim import kernel
from tokenyard.sim.batching_streams import token_rows
from tokenyard.sim.cluster import ClusterSim
from tokenyard.sim.streams import StreamSet, StreamSource, synthetic_streams
from tokenyard.types import Request, RoutingPolicy

_NUM_QUANTILES = 24
_MAX_ORDERED_SERVERS = 4
"""Up to here every order of servers is tried for SITA; beyond, only the two by speed."""


def tune_rules(scenario: Scenario, num_streams: int, seed: int) -> TunedRules:
    """Search all tuned rules of a scenario on fresh training streams.

    Sizes are searched over quantiles of the sizes that the router sees, the dump replica over
    all replicas, and SITA's cuts one at a time until none of them moves, for every order of
    unequal servers.
    """
    source = StreamSource(scenario)
    search = _Search(scenario, synthetic_streams(source, num_streams, seed, "training"))
    reserve, reserve_score = search.reserve_above_tokens()
    dump, dump_score = search.dump_replica()
    cuts, replicas, sita_score = search.size_intervals()
    return TunedRules(
        scenario=scenario.name,
        reserve_above_tokens=reserve,
        dump_replica=dump,
        sita_cuts_tokens=cuts,
        sita_replicas=replicas,
        scores={
            "sed": search.score_of(ShortestExpectedDelay()),
            "sed_reserve": reserve_score,
            "sed_dump": dump_score,
            "sita": sita_score,
        },
        tuned_on=f"{num_streams} training streams of {scenario.requests_per_stream} requests, "
        f"seed {seed}",
    )


class _Search:
    def __init__(self, scenario: Scenario, streams: StreamSet) -> None:
        self._scenario = scenario
        self._streams = streams
        self._sizes = np.stack([token_rows(s)[:, kernel.PREDICTED_TOTAL] for s in streams.requests])
        self._requests = [[Request(0.0, 0, size) for size in row] for row in self._sizes.tolist()]
        levels = np.linspace(0, 1, _NUM_QUANTILES + 1)[1:]
        self._quantiles: list[float] = np.unique(np.quantile(self._sizes, levels)).tolist()
        self._sim = ClusterSim(scenario, len(self._sizes), self._sizes.shape[1])
        for copy, stream in enumerate(streams.requests):
            self._sim.load(copy, stream)

    def score_of(self, policy: RoutingPolicy) -> float:
        """Mean score over streams of a policy without memory."""
        runs = run_policy(self._scenario, self._streams, lambda rng: policy, seed=0)
        return mean_summary(self._scenario, runs)["score"]

    def reserve_above_tokens(self) -> tuple[float, float]:
        """Best size for SED-reserve, and its score; the largest size bars nothing."""
        scores = [self.score_of(SedReserve(above)) for above in self._quantiles]
        best = int(np.argmax(scores))
        return self._quantiles[best], scores[best]

    def dump_replica(self) -> tuple[int, float]:
        """Best replica for SED-dump, and its score."""
        slo = self._scenario.slo
        scores = [self.score_of(SedDump(slo, i)) for i in range(self._scenario.num_servers)]
        best = int(np.argmax(scores))
        return best, scores[best]

    def size_intervals(self) -> tuple[tuple[float, ...], tuple[int, ...], float]:
        """Best cuts and order of servers for SITA, and their score."""
        found = [(*self._cuts(order), order) for order in _orders(self._scenario)]
        best_score, cuts, order = max(found)
        return cuts, order, best_score

    def _cuts(self, order: tuple[int, ...]) -> tuple[float, tuple[float, ...]]:
        """Best cuts for an order of servers: coordinate descent from equal load."""
        cuts = self._balanced_cuts(order)
        best = self._sita_score(cuts, order)
        improved = True
        while improved:
            improved = False
            for at, value in itertools.product(range(len(cuts)), self._quantiles):
                trial = (*cuts[:at], value, *cuts[at + 1 :])
                if trial == cuts or list(trial) != sorted(trial):
                    continue
                trial_score = self._sita_score(trial, order)
                if trial_score > best:
                    best, cuts, improved = trial_score, trial, True
        return best, cuts

    def _balanced_cuts(self, order: tuple[int, ...]) -> tuple[float, ...]:
        """Cuts that give every server work in proportion to its capacity."""
        capacity = np.array(self._scenario.server_capacities_tokens_per_s)[list(order)]
        sizes = np.sort(self._sizes, axis=None)
        work = np.cumsum(sizes) / sizes.sum()
        at = np.searchsorted(work, (np.cumsum(capacity) / capacity.sum())[:-1])
        return tuple(sizes[at].tolist())

    def _sita_score(self, cuts: tuple[float, ...], order: tuple[int, ...]) -> float:
        # The rule looks at the size alone, so its choices are known before the stream is run;
        # that is ten times faster than asking it at every request.
        rule = SizeIntervals(cuts, order)
        actions = [[rule.route(request, ()) for request in row] for row in self._requests]
        for copy in range(len(self._sizes)):
            self._sim.clear(copy)
        for column in np.array(actions).T:
            self._sim.step(np.ascontiguousarray(column))
        self._sim.drain()
        outcomes = (self._sim.outcomes(copy) for copy in range(len(self._sizes)))
        slo_s = self._scenario.slo_response_s
        return float(np.mean([score(one.response_s, one.missed(slo_s)) for one in outcomes]))


def _orders(scenario: Scenario) -> list[tuple[int, ...]]:
    """Orders of servers that are worth telling apart: equal servers are swapped in vain."""
    speeds = scenario.server_capacities_tokens_per_s
    if len(speeds) > _MAX_ORDERED_SERVERS:
        by_speed = sorted(range(len(speeds)), key=speeds.__getitem__)
        return [tuple(by_speed), tuple(reversed(by_speed))]
    orders = itertools.permutations(range(len(speeds)))
    unlike = {tuple(speeds[i] for i in order): order for order in reversed(list(orders))}
    return sorted(unlike.values())

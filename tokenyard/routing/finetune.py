"""Go on from a routing champion on what a live cluster logged, and judge what came of it.

The first part of the log is learned from, the last part judges. A twin of the replicas is fitted
to the log; the champion's weights are searched from where they are, at a price for every logged
decision that a candidate would change. A candidate is worth offering only if it beats the champion
on the last part, replayed in the twin, and the importance-weighted estimate does not speak of a
disaster. Where a rule was served and not the champion, it has to beat that rule as well: a rule may
place or order as no weights do (`marginal_in_order+boost`), and the search then begins below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenyard import metrics
from tokenyard.artifact import ArtifactError
from tokenyard.cross_entropy import CrossEntropy, FinetuneConfig, minimise
from tokenyard.routing import log_replay as replay
from tokenyard.routing.artifact import KINDS, PolicyArtifact
from tokenyard.routing.decision_log import LoggedDecision, fleet_of, windows_of
from tokenyard.routing.observation import snapshot_columns
from tokenyard.routing.policies import is_rule
from tokenyard.routing.policies.delay import finish_s
from tokenyard.routing.policies.learned import order_weights
from tokenyard.routing.policies.places import QueuePlaces, order_keys_s
from tokenyard.routing.policies.public import Needs, needs_of
from tokenyard.routing.policies.rule_name import RuleName
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.scores.linear import marginal_scores
from tokenyard.routing.simulator import Simulator, make_simulator
from tokenyard.routing.simulator.constant_rate import Outcomes
from tokenyard.routing.simulator.streams import StreamSet
from tokenyard.routing.validation import outcome_row
from tokenyard.statistics import off_policy as estimate
from tokenyard.statistics.intervals import Interval
from tokenyard.types import FloatArray, IntArray

_MAX_COMPARED = 2_000
_SPREAD = 0.1
"""Of the first generation around the champion, in units of the SLO per feature."""
_NOISE = 0.01
"""Spread that stays, in units of the SLO per feature."""
_CLOSE = 0.005
"""Difference of costs, relative to the champion's, that is not worth a lucky draw."""
_DISASTER = 0.5
"""Of the mean response. A policy that minds others looks slower decision by decision, since what it
spares them is not in that estimate; so only a disaster counts against it."""


class TwinRunner:
    """The logged requests in the twin, to run weights over."""

    def __init__(
        self, twin: replay.Twin, windows: Sequence[replay.Window], champion: PolicyArtifact
    ) -> None:
        self._scenario, self._tokens = twin.scenario, champion.metadata.mean_total_tokens
        self._order = order_weights(champion.arrays)
        self._streams: StreamSet = replay.streams_of(twin.scenario, windows)
        length = len(self._streams.requests[0])
        self._sim: Simulator = make_simulator(twin.scenario, len(windows), length)

    def run(self, weights: FloatArray) -> FloatArray:
        """Mean, p99 and share of violations in every window, shape (num_windows, 3)."""
        for copy, stream in enumerate(self._streams.requests):
            self._sim.load(copy, stream)
        self._sim.run_linear(weights, self._tokens, self._order)
        copies = range(len(self._streams.requests))
        return self._rows([self._sim.outcomes(copy) for copy in copies])

    def run_rule(self, rule: str, seed: int) -> FloatArray:
        """The same of a hand-written rule, in its own order.

        Args:
            rule: Its name.
            seed: Of its own randomness.

        Raises:
            ValueError: It cannot be run on the scenario's replicas.
        """
        # Where no reward is asked for, rules run compiled.
        scenario = self._scenario.without_reward()
        runs = PROBLEM.candidate(scenario, rule).run(scenario, self._streams, seed)
        return self._rows([one.outcomes for one in runs])

    def _rows(self, outcomes: Sequence[Outcomes]) -> FloatArray:
        slo_s = self._scenario.slo_response_s
        return np.array([outcome_row(one, slo_s) for one in outcomes])[:, 1:]


class Behaviour:
    """What was decided, and what weights would decide in its place."""

    def __init__(
        self, decisions: Sequence[LoggedDecision], artifact: PolicyArtifact, every: int = 1
    ) -> None:
        """Look at all decisions, and keep those that are compared.

        Args:
            decisions: In order of arrival.
            artifact: In whose order requests would wait.
            every: From one that is kept to the next.
        """
        columns = [snapshot_columns(one.snapshots) for one in decisions]
        if artifact.orders:
            _fill_places(decisions, columns, order_weights(artifact.arrays))
        self.decisions, self._columns = decisions[::every], columns[::every]
        self._metadata = artifact.metadata

    def choices(self, weights: FloatArray) -> IntArray:
        """Index of the replica that weights choose, shape (num_decisions,)."""
        found = np.empty(len(self.decisions), dtype=np.int64)
        for number, (one, columns) in enumerate(zip(self.decisions, self._columns, strict=True)):
            request = one.request
            found[number] = marginal_scores(
                weights, request.context_tokens,
                request.predicted_total_tokens - request.context_tokens,
                self._metadata.mean_total_tokens, self._metadata.slo_response_s, columns,
                np.empty(len(columns)),
            )  # fmt: skip
        return found


def _fill_places(
    decisions: Sequence[LoggedDecision], columns: Sequence[FloatArray], order: FloatArray
) -> None:
    """Write where each request would have stood among those that were logged to wait."""
    places = QueuePlaces()
    for one, table in zip(decisions, columns, strict=True):
        request = one.request
        places.fill(one.snapshots, order_keys_s(order, request, table), table)
        waits_by_s = request.arrival_s if one.order_key is None else one.order_key.key_s
        places.note(request, one.snapshots, one.index, waits_by_s)


def search(
    start: FloatArray, twin: TwinRunner, behaviour: Behaviour, config: FinetuneConfig
) -> tuple[FloatArray, list[float]]:
    """Search from the champion's weights; the price keeps candidates near what is known."""
    champion, as_champion = twin.run(start), behaviour.choices(start)

    def cost(weights: FloatArray) -> float:
        ours = twin.run(weights)
        response, tail = (ours[:, i].mean() / champion[:, i].mean() for i in (0, 1))
        violations = metrics.VIOLATION_WEIGHT_S * (ours[:, 2] - champion[:, 2]).mean()
        changed = float((behaviour.choices(weights) != as_champion).mean())
        return float(
            response + violations / champion[:, 0].mean() + 2.0 * max(0.0, tail - 1.0)
            + config.behaviour * changed
        )  # fmt: skip

    spread = _SPREAD if config.spread is None else config.spread
    loop = CrossEntropy(
        start, np.full(len(start), spread), population=config.population,
        num_elites=max(2, config.population // 5), noise=_NOISE,
    )  # fmt: skip
    rng = np.random.default_rng(config.seed)
    return minimise(loop, cost, rng, config.generations, known=(start,), tolerance=_CLOSE)


def estimated(behaviour: Behaviour, weights: FloatArray) -> Interval:
    """Change of the mean response by the decisions alone, doubly robust, seconds; NaN: unknown.

    What a decision does to other requests is not in it.
    """
    known = [
        number for number, one in enumerate(behaviour.decisions)
        if one.propensity and np.isfinite(one.response_s)
    ]  # fmt: skip
    if len(known) < estimate.NUM_BLOCKS:
        return Interval(np.nan, np.nan, np.nan)
    some = [behaviour.decisions[number] for number in known]
    choices = behaviour.choices(weights)[known]
    logged = np.array([finish_s(one.request, one.snapshots[one.index]) for one in some])
    ours = np.array([
        finish_s(one.request, one.snapshots[i]) for one, i in zip(some, choices, strict=True)
    ])  # fmt: skip
    response_s = np.array([one.response_s for one in some])
    propensity = np.array([one.propensity for one in some], dtype=np.float64)
    same = choices == np.array([one.index for one in some])
    intercept, slope = estimate.calibrated(logged, response_s)
    return estimate.doubly_robust_gain(
        response_s, propensity, same, intercept + slope * logged, intercept + slope * ours
    )


def served_policy(decisions: Sequence[LoggedDecision]) -> str:
    """`name@sha256` of the policy that placed most of the logged requests."""
    ((label, _),) = Counter(one.policy for one in decisions).most_common(1)
    return label


def served_rule(decisions: Sequence[LoggedDecision]) -> str | None:
    """Name of the rule that placed most of the logged requests; None: a trained policy did.

    Raises:
        ValueError: No log tells what it decides by.
    """
    rule = served_policy(decisions).rpartition("@")[0]
    if not is_rule(rule):
        return None
    if needs_of(RuleName.parse(rule).base) == Needs.PREFIX_CACHE:
        raise ValueError(
            f"the rule {rule}, which goes by prefixes, served the log: that holds no prompts, so "
            "there is nothing to compare a candidate with"
        )
    return rule


@dataclass(frozen=True)
class Compared:
    """The candidate against another policy, on what neither was tuned on."""

    with_whom: str
    replayed: Interval
    """Relative change of the mean response of the whole cluster, in the twin."""
    p99_change: float

    @classmethod
    def of(
        cls, with_whom: str, twin: replay.Twin, ours: FloatArray, theirs: FloatArray
    ) -> Compared:
        """Compare what `TwinRunner.run` says of both, shape (num_windows, 3)."""
        p99_change = float(ours[:, 1].mean() / theirs[:, 1].mean() - 1.0)
        return cls(with_whom, replay.difference(twin, ours[:, 0], theirs[:, 0]), p99_change)

    @property
    def objection(self) -> str | None:
        """Why the other is to stay; None: it is not."""
        if not self.replayed.high < 0.0:
            return f"its interval in the twin does not lie below {self.with_whom}"
        if self.p99_change > 0.02:
            return f"its p99 is {self.p99_change:.1%} higher than that of {self.with_whom}"
        return None


@dataclass(frozen=True)
class Judgement:
    """The candidate against the champion and what was served, on what none was tuned on."""

    beside: Compared
    """The champion, where the search begins."""
    beside_served: Compared
    """The rule that placed most of the held-out requests; the champion where it was no rule."""
    by_decisions_s: Interval
    mean_response_s: float
    """Of the held-out part, as logged."""
    changed: float
    """Share of held-out decisions that it would change."""

    @property
    def objection(self) -> str | None:
        """Why it is not offered; None: it is."""
        found = self.beside.objection or self.beside_served.objection
        if found is not None:
            return found
        if self.by_decisions_s.low > _DISASTER * self.mean_response_s:
            return "its own decisions are estimated to be far slower than those that were made"
        return None


def judge(
    twin: replay.Twin, held_out: TwinRunner, behaviour: Behaviour, start: FloatArray,
    weights: FloatArray, seed: int,
) -> Judgement:  # fmt: skip
    """Compare on the held-out windows.

    Raises:
        ValueError: The rule that was served cannot be run on the replicas of the log.
    """
    ours = held_out.run(weights)
    beside = Compared.of("the champion", twin, ours, held_out.run(start))
    served, rule = beside, served_rule(behaviour.decisions)
    if rule is not None:
        theirs = held_out.run_rule(rule, seed)
        served = Compared.of(f"the rule {rule}, which was served", twin, ours, theirs)
    return Judgement(
        beside,
        served,
        estimated(behaviour, weights),
        float(np.nanmean([one.response_s for one in behaviour.decisions])),
        float((behaviour.choices(weights) != behaviour.choices(start)).mean()),
    )


@dataclass(frozen=True)
class Finetuned:
    """What fine-tuning came to."""

    candidate: PolicyArtifact
    """The champion with other weights, and where they come from."""
    judgement: Judgement
    twin: replay.Twin
    curve: Sequence[float]
    """Least cost of every generation, relative to the champion's."""
    served: str
    """`name@sha256` of the policy that placed most of the held-out requests."""
    champion_sha256: str

    @property
    def objection(self) -> str | None:
        """Why the candidate is not worth offering; None: it is."""
        return self.judgement.objection

    @property
    def remark(self) -> str:
        """What was found out on the way."""
        factors, error = self.twin.speed_factors.round(2).tolist(), self.twin.error_fraction
        return (
            f"twin: iterations take {factors} times as long as declared; "
            f"off by {error:.1%} on what it was fitted to; compared with {self._compared_with}"
        )

    @property
    def _compared_with(self) -> str:
        beside, served = self.judgement.beside, self.judgement.beside_served
        if served is not beside:
            return f"{beside.with_whom} and {served.with_whom}"
        if self.served.endswith(f"@{self.champion_sha256}"):
            return f"{beside.with_whom}, which was served"
        return f"{beside.with_whom}, and not with {self.served}, which was served"

    def row(self) -> dict[str, str | float | int | bool]:
        """The judgement as a row."""
        beside, served = self.judgement.beside, self.judgement.beside_served
        replayed, decided = beside.replayed, self.judgement.by_decisions_s
        return {
            "twin_error_fraction": self.twin.error_fraction,
            "delta_mean_fraction": replayed.estimate, "delta_mean_ci_low": replayed.low,
            "delta_mean_ci_high": replayed.high, "delta_p99_fraction": beside.p99_change,
            "served": self.served, "delta_served_mean_fraction": served.replayed.estimate,
            "delta_served_ci_low": served.replayed.low,
            "delta_served_ci_high": served.replayed.high,
            "delta_served_p99_fraction": served.p99_change, "by_decisions_s": decided.estimate,
            "by_decisions_ci_low_s": decided.low, "by_decisions_ci_high_s": decided.high,
            "changed_fraction": self.judgement.changed,
            "training_cost_over_champion": self.curve[-1] if self.curve else 1.0,
        }  # fmt: skip


def finetune(
    champion: PolicyArtifact,
    decisions: Sequence[LoggedDecision],
    scenario: Scenario,
    config: FinetuneConfig,
    lineage: Mapping[str, str],
) -> Finetuned:
    """Learn from the first part of a log, and judge on the last.

    Args:
        champion: Where the search begins.
        decisions: The log, in order of arrival.
        scenario: Whose traffic model and SLOs apply; its replicas are those of the log.
        config: How the log is cut and searched.
        lineage: Where the log comes from, for the record.

    Raises:
        ArtifactError: The champion is of a kind that is not fine-tuned.
        ValueError: The log cannot be used, or the rule that was served cannot be replayed.
    """
    if not KINDS[champion.metadata.kind].is_finetuned:
        raise ArtifactError(
            f"the champion is of kind {champion.metadata.kind!r}; only `marginal` champions are "
            "fine-tuned: train networks with pipelines/sweep.py on a scenario from calibrate.py"
        )
    declared = fleet_of(decisions, scenario, scenario.name)
    learned, held_out = _split(windows_of(decisions, config.windows), config)
    first_held_out = len(learned) * len(learned[0].server)
    before, after = decisions[:first_held_out], decisions[first_held_out:]
    served_rule(after)  # What cannot be judged need not be searched.
    twin = replay.fit_speeds(declared, learned)
    start = np.ascontiguousarray(champion.arrays["weights"], dtype=np.float64)
    some = Behaviour(before, champion, every=max(1, len(before) // _MAX_COMPARED))
    weights, curve = search(start, TwinRunner(twin, learned, champion), some, config)
    judgement = judge(
        twin, TwinRunner(twin, held_out, champion), Behaviour(after, champion), start, weights,
        config.seed,
    )  # fmt: skip
    candidate = continued(champion, weights, judgement, twin, lineage)
    return Finetuned(candidate, judgement, twin, curve, served_policy(after), champion.sha256)


def _split(
    windows: Sequence[replay.Window], config: FinetuneConfig
) -> tuple[Sequence[replay.Window], Sequence[replay.Window]]:
    first_held_out = config.windows - max(2, round(config.held_out * config.windows))
    if first_held_out < 2:
        raise ValueError(f"{config.windows} windows leave too few to learn from")
    return windows[:first_held_out], windows[first_held_out:]


def continued(
    champion: PolicyArtifact, weights: FloatArray, judgement: Judgement, twin: replay.Twin,
    lineage: Mapping[str, str],
) -> PolicyArtifact:  # fmt: skip
    """The champion with other weights, and where they come from."""
    made_of = dict(lineage) | {
        "champion_sha256": champion.sha256,
        "calibration_sha256": replay.fingerprint(twin),
        "speed_factors": ",".join(f"{one:.4f}" for one in twin.speed_factors),
        "sweep_run": champion.metadata.lineage.get("sweep_run", "none"),
    }
    found = {
        "delta_mean_fraction": judgement.beside.replayed.estimate,
        "delta_p99_fraction": judgement.beside.p99_change,
        "changed_fraction": judgement.changed,
    }
    metadata = champion.metadata.model_copy(update={"lineage": made_of, "metrics": found})
    return replace(champion, metadata=metadata, arrays={**champion.arrays, "weights": weights})

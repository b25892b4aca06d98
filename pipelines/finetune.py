"""Go on training the champion on what the live cluster logged, and offer what came of it.

    python pipelines/finetune.py --log /var/log/decisions --scenario conversation_mixed_gpus \
        --out candidate.npz --registry sqlite:///runs/mlflow.db

The first part of the log is learned from, the last part judges. A twin of the replicas is fitted
to the log; the champion's weights are searched from where they are, at a price for every logged
decision that a candidate would change; and the result is offered, as a file and as the alias
`candidate`, only if it beats the champion on the last part, replayed in the twin, and the
importance-weighted estimate does not speak of a disaster. It decides nothing before it has been in
the shadow: `POST /v1/policies`.

    python pipelines/finetune.py --problem allocation --log /var/log/decisions --scenario l4x4_7b

does the same for the planner of an allocated pool, from the demand of its slots.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import finetune_allocation
import numpy as np
import tyro
from mlflow import MlflowClient
from rich.console import Console
from rich.table import Table

from tokenyard import metrics
from tokenyard.artifact import ArtifactError, PolicyArtifact, resolve_champion
from tokenyard.intervals import Interval
from tokenyard.observation import marginal_scores, snapshot_columns
from tokenyard.offpolicy import estimate, replay
from tokenyard.offpolicy.log import LoggedDecision, fleet_of, read_log, windows_of
from tokenyard.policies.delay import finish_s
from tokenyard.provenance import git_sha, write_result
from tokenyard.registry import mlflow_lookup, model_name, offer
from tokenyard.scenario import Scenario, load_scenario
from tokenyard.sim.simulator import Simulator, make_simulator
from tokenyard.sim.streams import StreamSet
from tokenyard.types import FloatArray, IntArray

Row = dict[str, str | float | int | bool]
_MAX_COMPARED = 2_000
_SPREAD, _ALLOCATION_SPREAD = 0.1, 0.5
_CLOSE = 0.005
"""Difference of costs, relative to the champion's, that is not worth a lucky draw."""
_DISASTER = 0.5
"""Of the mean response. A policy that minds others looks slower decision by decision, since what it
spares them is not in that estimate; so only a disaster counts against it."""


@dataclass(frozen=True)
class Args:
    """Fine-tune the champion on a decision log; offer the result if it is better."""

    log: Path
    """Folder of `deploy.py --decision-log`."""
    problem: Literal["routing", "allocation"] = "routing"
    """What is decided."""
    scenario: str = "conversation_mixed_gpus"
    """Whose champion is continued, and whose traffic model and promises apply."""
    champion: Path | None = None
    """Policy file in its place."""
    out: Path | None = None
    """File (.npz) for the candidate; written only if it is offered."""
    registry: str | None = None
    """MLflow tracking URI where the champion is looked up and the candidate is registered."""
    windows: int = 10
    """Into which the log is cut. Replicas are empty where one begins: let them be long."""
    held_out: float = 0.4
    """Share of the windows, the last ones, that judge."""
    generations: int = 12
    """Of the search."""
    population: int = 24
    """Candidates in a generation."""
    spread: float | None = None
    """Of the first generation around the champion: in units of the SLO per feature (0.1), of
    allocation as a share of where a search from nothing begins (0.5)."""
    behaviour: float = 0.05
    """Price, as a share of the cost, of changing every logged decision."""
    seed: int = 0
    json: Path | None = None
    """File for the row."""


class Rehearsal:
    """The logged requests in the twin, to run weights over."""

    def __init__(self, twin: replay.Twin, windows: Sequence[replay.Window], tokens: float) -> None:
        """Lay the requests out."""
        self._scenario, self._tokens = twin.scenario, tokens
        self._streams: StreamSet = replay.streams_of(twin.scenario, windows)
        length = len(self._streams.requests[0])
        self._sim: Simulator = make_simulator(twin.scenario, len(windows), length)

    def run(self, weights: FloatArray) -> FloatArray:
        """Mean, p99 and share of violations in every window, shape (num_windows, 3)."""
        for copy, stream in enumerate(self._streams.requests):
            self._sim.load(copy, stream)
        self._sim.run_linear(weights, self._tokens)
        slo_s = self._scenario.slo_response_s
        outcomes = [self._sim.outcomes(copy) for copy in range(len(self._streams.requests))]
        return np.array(
            [
                [
                    metrics.mean_response_s(one.response_s),
                    metrics.percentile_response_s(one.response_s, 99.0),
                    metrics.slo_violation_fraction(one.missed(slo_s)),
                ]
                for one in outcomes
            ]
        )


class Behaviour:
    """What was decided, and what weights would decide in its place."""

    def __init__(self, decisions: Sequence[LoggedDecision], artifact: PolicyArtifact) -> None:
        """Keep the decisions that can be compared."""
        self.decisions = decisions
        self._metadata = artifact.metadata
        self._columns = [snapshot_columns(one.snapshots) for one in decisions]

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


def search(
    start: FloatArray, rehearsal: Rehearsal, behaviour: Behaviour, args: Args
) -> tuple[FloatArray, list[float]]:
    """Cross-entropy search from the champion's weights; the price keeps it near what is known."""
    rng = np.random.default_rng(args.seed)
    champion, as_champion = rehearsal.run(start), behaviour.choices(start)
    mean, std = start.copy(), np.full(len(start), _SPREAD if args.spread is None else args.spread)
    curve = []

    def cost(weights: FloatArray) -> float:
        ours = rehearsal.run(weights)
        response, tail = (ours[:, i].mean() / champion[:, i].mean() for i in (0, 1))
        late = metrics.VIOLATION_WEIGHT_S * (ours[:, 2] - champion[:, 2]).mean()
        changed = float((behaviour.choices(weights) != as_champion).mean())
        return float(
            response + late / champion[:, 0].mean() + 2.0 * max(0.0, tail - 1.0)
            + args.behaviour * changed
        )  # fmt: skip

    found, least = start, cost(start)
    elites = max(2, args.population // 5)
    for _ in range(args.generations):
        drawn = rng.normal(mean, std, (args.population, len(mean)))
        drawn[0], drawn[1] = mean, start
        costs = np.array([cost(weights) for weights in drawn])
        best = drawn[np.argsort(costs, kind="stable")[:elites]]
        if costs.min() < least:
            found, least = best[0], float(costs.min())
        mean, std = best.mean(axis=0), best.std(axis=0) + 0.01
        curve.append(float(costs.min()))
    # The centre is less of a lucky draw than the best that was seen.
    return (mean if cost(mean) <= least + _CLOSE else found), curve


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


@dataclass(frozen=True)
class Judgement:
    """The candidate against the champion, on what neither was tuned on."""

    replayed: Interval
    """Relative change of the mean response of the whole cluster, in the twin."""
    p99_change: float
    by_decisions_s: Interval
    mean_response_s: float
    """Of the held-out part, as logged."""
    changed: float
    """Share of held-out decisions that it would change."""

    @property
    def objection(self) -> str | None:
        """Why it is not offered; None: it is."""
        if not self.replayed.high < 0.0:
            return "its interval in the twin does not lie below the champion"
        if self.p99_change > 0.02:
            return f"its p99 is {self.p99_change:.1%} higher"
        if self.by_decisions_s.low > _DISASTER * self.mean_response_s:
            return "its own decisions are estimated to be far slower than those that were made"
        return None


def judge(
    twin: replay.Twin, rehearsal: Rehearsal, behaviour: Behaviour, start: FloatArray,
    weights: FloatArray,
) -> Judgement:  # fmt: skip
    """Compare on the held-out windows."""
    ours, theirs = rehearsal.run(weights), rehearsal.run(start)
    return Judgement(
        replay.difference(twin, ours[:, 0], theirs[:, 0]),
        float(ours[:, 1].mean() / theirs[:, 1].mean() - 1.0),
        estimated(behaviour, weights),
        float(np.nanmean([one.response_s for one in behaviour.decisions])),
        float((behaviour.choices(weights) != behaviour.choices(start)).mean()),
    )


def find_champion(args: Args) -> tuple[PolicyArtifact, str]:
    """The policy that is continued.

    Raises:
        ArtifactError: There is none, or it is of a kind that is not searched directly.
    """
    registry = mlflow_lookup(args.registry) if args.registry else None
    artifact, source = resolve_champion(
        args.problem, load_scenario(args.scenario).name, path=args.champion, registry=registry
    )
    if artifact.metadata.kind != "marginal":
        raise ArtifactError(
            f"{source} is of kind {artifact.metadata.kind!r}; only `marginal` champions are "
            "fine-tuned: train networks with pipelines/sweep.py on a scenario from calibrate.py"
        )
    return artifact, source


def finetune(args: Args, console: Console) -> Row:
    """Learn, judge, and offer.

    Raises:
        ValueError: The log or the champion cannot be used.
    """
    champion, source = find_champion(args)
    decisions, trace_hash = read_log(args.log)
    base: Scenario = load_scenario(args.scenario)
    declared = fleet_of(decisions, base, base.name)
    windows = windows_of(decisions, args.windows)
    first_held_out = args.windows - max(2, round(args.held_out * args.windows))
    if first_held_out < 2:
        raise ValueError(f"{args.windows} windows leave too few to learn from")
    learned, held_out = windows[:first_held_out], windows[first_held_out:]
    split = first_held_out * len(windows[0].server)
    console.print(f"champion: {source}, {champion.sha256}; log: {len(decisions)} requests")
    twin = replay.fit_speeds(declared, learned)
    console.print(
        f"twin: iterations take {twin.speed_factors.round(2).tolist()} times as long as declared; "
        f"off by {twin.error_fraction:.1%} on what it was fitted to"
    )
    start = np.ascontiguousarray(champion.arrays["weights"], dtype=np.float64)
    tokens = champion.metadata.mean_total_tokens
    before, after = decisions[:split], decisions[split:]
    some = before[:: max(1, len(before) // _MAX_COMPARED)]
    weights, curve = search(
        start, Rehearsal(twin, learned, tokens), Behaviour(some, champion), args
    )
    judgement = judge(
        twin, Rehearsal(twin, held_out, tokens), Behaviour(after, champion), start, weights
    )
    candidate = continued(champion, weights, judgement, trace_hash, twin, args)
    row = report(champion, candidate, judgement, twin, len(decisions), curve)
    objection = judgement.objection
    if objection is not None:
        console.print(f"not offered: {objection}")
        return row
    if args.out is not None:
        candidate.save(args.out)
        console.print(f"wrote {args.out} ({candidate.sha256}); try it in the shadow first")
    if args.registry:
        client = MlflowClient(args.registry, args.registry)
        version = offer(client, model_name(args.problem, base.name), candidate)
        console.print(f"registered as version {version}, alias candidate")
    return row


def continued(
    champion: PolicyArtifact, weights: FloatArray, judgement: Judgement, trace_hash: str,
    twin: replay.Twin, args: Args,
) -> PolicyArtifact:  # fmt: skip
    """The champion with other weights, and where they come from."""
    calibration = ",".join(f"{one:.4f}" for one in twin.speed_factors)
    lineage = {
        "command": shlex.join(["python", *sys.argv]), "git_sha": git_sha(),
        "champion_sha256": champion.sha256, "trace_sha256": trace_hash,
        "calibration_sha256": replay.fingerprint(twin), "speed_factors": calibration,
        "sweep_run": champion.metadata.lineage.get("sweep_run", "none"),
    }  # fmt: skip
    found = {
        "delta_mean_fraction": judgement.replayed.estimate,
        "delta_p99_fraction": judgement.p99_change,
        "changed_fraction": judgement.changed,
    }
    metadata = champion.metadata.model_copy(update={"lineage": lineage, "metrics": found})
    return replace(champion, metadata=metadata, arrays={"weights": weights})


def report(
    champion: PolicyArtifact, candidate: PolicyArtifact, judgement: Judgement, twin: replay.Twin,
    num_requests: int, curve: Sequence[float],
) -> Row:  # fmt: skip
    """The judgement as a row."""
    replayed, decided = judgement.replayed, judgement.by_decisions_s
    return {
        "champion": champion.sha256, "candidate": candidate.sha256, "requests": num_requests,
        "twin_error_fraction": twin.error_fraction,
        "delta_mean_fraction": replayed.estimate, "delta_mean_ci_low": replayed.low,
        "delta_mean_ci_high": replayed.high, "delta_p99_fraction": judgement.p99_change,
        "by_decisions_s": decided.estimate, "by_decisions_ci_low_s": decided.low,
        "by_decisions_ci_high_s": decided.high, "changed_fraction": judgement.changed,
        "training_cost_over_champion": curve[-1] if curve else 1.0,
        "offered": judgement.objection is None,
    }  # fmt: skip


def of_allocation(args: Args, console: Console) -> Row:
    """Fine-tune the allocation champion."""
    options = finetune_allocation.Options(
        log=args.log, scenario=args.scenario, champion=args.champion, out=args.out,
        registry=args.registry, held_out=args.held_out, generations=args.generations,
        population=args.population, behaviour=args.behaviour, seed=args.seed,
        spread=_ALLOCATION_SPREAD if args.spread is None else args.spread,
    )  # fmt: skip
    return finetune_allocation.finetune(options, console)


def main(args: Args) -> None:
    console = Console(highlight=False, width=200)
    try:
        row = finetune(args, console) if args.problem == "routing" else of_allocation(args, console)
    except (ValueError, OSError) as error:
        sys.exit(f"finetune: {error}")
    table = Table("", "")
    for key, value in row.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if args.json is not None:
        write_result(args.json, shlex.join(["python", *sys.argv]), args.seed, [row])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

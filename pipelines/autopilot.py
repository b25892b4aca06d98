"""Keep a gateway's policy right: learn from its log, try what is better, promote it or say why not.

    tokenyard autopilot --url http://127.0.0.1:8000 --log DIR --scenario NAME            # dry run
    tokenyard autopilot --url ... --log DIR --scenario NAME --registry URI --act --once

A cycle reads the newest requests of the decision log, fits a simulator to them, plays all rules on
it and searches on from the best, and judges on requests that nothing was learned from. What is
better there decides nothing yet: with `--act` it runs in the shadow, then decides in turns with
what decides today, and is promoted once a sequential test says that it is better. After that the
former policy decides for a short while now and then, which measures what was gained. A cycle begins
every `--every-h` hours, and when the traffic has changed.

The autopilot changes nothing but by the gateway's API. A turn ends by itself (`for_s`), so what
serves stays as it was if this process dies; it goes on from `autopilot.json` in the log's folder.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import tyro
from pydantic import BaseModel, ValidationError
from rich.console import Console

from serve_app.policy.autopilot import AutopilotReport, Step
from tokenyard.artifact import RegistryError, model_name
from tokenyard.config import sentence_of
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.registry import (
    CANDIDATE,
    connect,
    fail_soon,
    mlflow_lookup,
    offer,
    open_experiment,
    registry_errors,
)
from tokenyard.routing.artifact import PolicyArtifact, rule_for
from tokenyard.routing.comparison import MOST_ERROR
from tokenyard.routing.decision_log import LoggedOutcomes, read_outcomes
from tokenyard.routing.gate import rule_runs
from tokenyard.routing.own_traffic import (
    FEWEST_JUDGING,
    LEARNED_SHARE,
    Found,
    OwnTraffic,
    Traffic,
    logged_traffic,
)
from tokenyard.routing.policies import is_rule
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.simulator.streams import StreamSet, StreamSource
from tokenyard.statistics.switchback import SETTLE_SHARE, conclusion, mean_gain
from tokenyard.types import FloatArray

_TOKEN = "TOKENYARD_AUTOPILOT_TOKEN"
_LOOK_EVERY_S = 2.0
_RETRY_S = 30.0
"""After a failure of gateway, registry or disk, and between two looks at a veto."""
_FLUSHED_S = 4.0
"""Time after which the gateway has written what has ended."""
_FEWEST_REQUESTS = 20
"""Of a stretch; a pair with fewer in one tells nothing."""
_DRIFT = 0.3
"""Change of the logarithm of rate or mean lengths that begins a cycle."""
_LEARNED, _RECENT = 20_000, 1000
"""Newest requests that are learned from and judged on, and that tell whether traffic changed."""
_FEWEST_LOGGED = math.ceil(FEWEST_JUDGING / (1.0 - LEARNED_SHARE))
_MONTH_S = 30 * 86400.0
_WATCH_PAUSE = 8
"""Stretches without a change between two pairs after a promotion."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Keep a gateway's policy right: train on its log, try what is better, promote it."""

    url: str
    """Of the gateway. Its key is TOKENYARD_AUTOPILOT_TOKEN (docs/access.md)."""
    log: Path
    """The gateway's folder of `--decision-log`."""
    scenario: str
    """Whose SLOs count; replicas are those that were logged."""
    registry: str | None = None
    """MLflow tracking URI: policies are registered there, and every step is a run. None: policies
    are files in the log's folder."""
    act: bool = False
    """Try and promote; without it, only say what would be tried."""
    once: bool = False
    """Do one cycle now, or the rest of one that was broken off, and end."""
    every_h: float = 24.0
    """Hours from one cycle to the next."""
    minutes: float = 10.0
    """Of searches in a cycle, on one CPU."""
    stretch_s: float = 120.0
    """For which one of two policies decides."""
    most_pairs: int = 40
    """Pairs of stretches after which what is not told apart is given up."""
    alpha: float = 0.05
    """Chance, at most, to promote what makes no difference."""
    seed: int = 0
    """Of searches, and of the order of stretches."""
    json: ResultFile | None = None
    """Write a row for each step to this file at the end."""


class Pair(BaseModel):
    """Two stretches of time; in one the candidate decided, in the other what it is to replace."""

    lent: str
    """Label `name@sha256` of the policy that was lent to the gateway."""
    other: str
    """Label of what decides else."""
    lent_from_s: float
    """Gateway's Unix time, seconds."""
    other_from_s: float
    candidate_is_lent: bool
    gain: float = 0.0
    """Logarithm of the former policy's mean response over the candidate's."""
    attained: float = 0.0
    """The candidate's SLO attainment minus the former policy's."""


class AutopilotState(BaseModel):
    """What must not be forgotten."""

    step: Step = "training"
    note: str = ""
    candidate: str | None = None
    """As the gateway takes it."""
    in_place_of: str | None = None
    pairs: list[Pair] = []
    pairs_before_promotion: int = 0
    """Of `pairs`; those after it tell whether the promotion was right."""
    twin: dict[str, Any] | None = None
    """Fields of the scenario that was fitted to the log."""
    twin_error_fraction: float | None = None
    traffic: tuple[float, float, float] | None = None
    """Requests a second, and mean prompt and answer, tokens, that the last cycle learned from."""
    next_s: float | None = None
    """Unix time of the next cycle, seconds."""


class Vetoed(Exception):
    """A person has stopped the autopilot."""


class GatewayError(ValueError):
    """The gateway does not answer, or refuses."""


class GatewayClient:
    """The gateway's API, as far as the autopilot needs it."""

    def __init__(self, url: str) -> None:
        token = os.environ.get(_TOKEN)
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:  # fmt: skip
        """Return the answer; a GatewayError says why there is none."""
        try:
            answer = httpx.request(
                method, self._url + path, json=body, headers=self._headers, timeout=30.0
            )
        except httpx.HTTPError as error:
            raise GatewayError(f"{method} {path}: {error or type(error).__name__}") from None
        if answer.status_code != 200:
            raise GatewayError(f"{method} {path}: {answer.status_code}, {answer.text[:300]}")
        fields: dict[str, Any] = answer.json()
        return fields

    def active(self) -> dict[str, Any]:
        """The card of what decides."""
        return self.ask("GET", "/v1/policy")

    def change(self, action: str, **fields: Any) -> None:
        """Change which policy decides."""
        self.ask("POST", "/v1/policies", {"action": action, **fields})

    def lend(self, policy: str, for_s: float) -> tuple[str, str, float]:
        """Let a policy decide for a while; return two labels and the gateway's clock, seconds.

        The labels, `name@sha256`, are those of the policy and of what decides else.
        """
        before = self.active()
        answer = self.ask("POST", "/v1/policy", {"policy": policy, "for_s": for_s})
        label, other = (f"{card['name']}@{card['sha256']}" for card in (answer, before))
        return label, other, answer["until_s"] - for_s

    def check_veto(self) -> None:
        """Raise Vetoed where a person wants that."""
        if self.ask("GET", "/v1/autopilot")["vetoed"]:
            raise Vetoed


@dataclass
class Autopilot:
    """The loop over steps; each leaves `state` written down."""

    args: Args
    console: Console
    gateway: GatewayClient
    state: AutopilotState = field(default_factory=AutopilotState)
    rows: list[dict[str, Any]] = field(default_factory=list)
    _run: str | None = None
    """MLflow run of the cycle."""

    def __post_init__(self) -> None:
        """Take up what was written down, if anything was."""
        self._file = self.args.log / "autopilot.json"
        self._slo_s = load_scenario(self.args.scenario).slo_response_s
        self._rng = np.random.default_rng(self.args.seed)
        if self.args.registry is not None:
            fail_soon()
        if self._file.is_file():
            try:
                self.state = AutopilotState.model_validate_json(self._file.read_text("utf-8"))
            except ValidationError as error:
                raise ValueError(f"{self._file}: {sentence_of(error)}; delete it") from None

    def run(self) -> None:
        """Go from step to step, for ever or until a cycle is over.

        For ever it tries again where the gateway, the registry or the disk fails.

        Raises:
            ValueError: With `once`, the gateway or the registry cannot be used.
            OSError: With `once`, the state cannot be written down.
        """
        steps: dict[Step, Callable[[], None]] = {
            "training": self._train, "shadow": self._shadow, "comparing": self._compare,
            "watching": self._watch, "waiting": self._wait, "stopped": self._wait,
        }  # fmt: skip
        between_cycles = ("waiting", "watching", "stopped")
        if self.args.once and self.state.step in between_cycles:
            self._begin("one cycle was asked for")
        while not (self.args.once and self.state.step in between_cycles):
            try:
                self._advance(steps[self.state.step])
            except (GatewayError, RegistryError, OSError) as error:
                if self.args.once:
                    raise
                self._say(f"{error}; it tries again in {_RETRY_S:.0f} s")
                time.sleep(_RETRY_S)

    def _advance(self, step: Callable[[], None]) -> None:
        """Do a step, unless a person vetoes it."""
        try:
            self.gateway.check_veto()
            step()
        except Vetoed:
            if self.state.step != "stopped":
                self._go_on("stopped", "a person has vetoed it", next_s=time.time())
            if not self.args.once:
                time.sleep(_RETRY_S)

    def _say(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True, markup=False)

    def _go_on(self, step: Step, note: str, **changes: Any) -> None:
        """Write down that a step has begun, tell the gateway, and log a run for it."""
        self.state = self.state.model_copy(update={"step": step, "note": note, **changes})
        part = self._file.with_suffix(".part")
        part.write_text(self.state.model_dump_json(indent=1), encoding="utf-8")
        part.replace(self._file)
        state, gain = self.state, mean_gain([pair.gain for pair in self.state.pairs])
        numbers = (gain.estimate, gain.low, gain.high)
        fractions = [None if math.isnan(number) else math.expm1(number) for number in numbers]
        report = AutopilotReport(
            step=step, note=note, dry_run=not self.args.act, candidate=state.candidate,
            in_place_of=state.in_place_of, pairs=len(state.pairs),
            gain_fraction=fractions[0], gain_ci_low=fractions[1], gain_ci_high=fractions[2],
            twin_error_fraction=state.twin_error_fraction, next_s=state.next_s,
        )  # fmt: skip
        self._say(f"{step}: {note}")
        self.rows.append(report.model_dump())
        if self.args.act:
            self.gateway.ask("PUT", "/v1/autopilot", report.model_dump())
        if self.args.registry is not None:
            try:
                with registry_errors(self.args.registry):
                    self._log_run(report, self.args.registry)
            except RegistryError as error:
                self._say(f"{error}; this step has no run")

    def _log_run(self, report: AutopilotReport, registry: str) -> None:
        """Make an MLflow run of a step, in the run of its cycle."""
        client = connect(registry)
        experiment = open_experiment(client, "tokenyard-autopilot")
        if self._run is None:
            name = f"cycle {time.strftime('%Y-%m-%d %H:%M')}"
            self._run = client.create_run(experiment, run_name=name).info.run_id
            client.set_terminated(self._run)
        tags = {"mlflow.parentRunId": self._run}
        run = client.create_run(experiment, tags=tags, run_name=report.step).info.run_id
        for key, value in report.model_dump(exclude_none=True).items():
            if isinstance(value, float):
                client.log_metric(run, key, value)
            else:
                client.set_tag(run, key, str(value))
        client.set_terminated(run)

    def _finish(self, note: str, step: Step = "waiting", **changes: Any) -> None:
        self._go_on(step, note, next_s=time.time() + 3600.0 * self.args.every_h, **changes)

    def _wait(self) -> None:
        """Wait for the next cycle, or for other traffic."""
        note = "the next cycle begins"
        while (left_s := (self.state.next_s or 0.0) - time.time()) > 0.0:
            time.sleep(min(60.0, left_s))
            self.gateway.check_veto()
            if self._traffic_has_changed():
                note = "the traffic has changed"
                break
        self._begin(note)

    def _begin(self, note: str) -> None:
        self._run = None
        self._go_on(
            "training", note, pairs=[], pairs_before_promotion=0, candidate=None, in_place_of=None
        )

    def _traffic_has_changed(self) -> bool:
        """Whether rate or lengths are others than those that the last cycle learned from."""
        recent = self._newest(_RECENT)
        if self.state.traffic is None or len(recent) < _RECENT:
            return False
        return bool(np.abs(np.log(np.divide(recent.traffic(), self.state.traffic))).max() > _DRIFT)

    def _train(self) -> None:
        """Learn from the log, and keep what is better on its last part."""
        args = self.args
        newest = self._newest(_LEARNED)
        if len(newest) < _FEWEST_LOGGED:
            few = f"the log holds {len(newest):,} requests of the last month"
            return self._finish(f"{few}; {_FEWEST_LOGGED:,} are needed")
        try:
            trained, traffic = _train_in_ray(args, float(newest.arrival_s[0]))
        except RegistryError:
            raise
        except ValueError as reason:
            return self._finish(f"nothing can be learned from the log: {reason}")
        error = traffic.twin_error_fraction
        for remark in trained.remarks:
            self._say(remark)
        twin = None
        if isinstance(traffic.fleet, Scenario):
            twin = traffic.fleet.model_dump(mode="json", exclude_none=True)
        learned = {
            "twin": twin, "twin_error_fraction": error,
            "traffic": newest.newest(_RECENT).traffic(),
        }  # fmt: skip
        self.state = self.state.model_copy(update=learned)
        if error is not None and error > MOST_ERROR:
            return self._finish(f"the simulator is off by {error:.0%}, so nothing is tried")
        choice, active = trained.choice, self.gateway.active()
        searched = choice.artifact
        if active["sha256"] == searched.sha256 if searched else active["name"] == choice.name:
            return self._finish(f"nothing to gain: {choice.name} decides already, and is best")
        name = choice.name if searched is None else self._offer(searched)
        what = {"candidate": name, "in_place_of": active["active"]}
        if not args.act:
            self.state = self.state.model_copy(update=what)
            return self._finish(f"--act would try {name} in place of {active['active']}")
        note = f"{name} runs beside {active['active']} and decides nothing"
        self._go_on("shadow", note, **what)

    def _offer(self, artifact: PolicyArtifact) -> str:
        """Put a policy where the gateway can find it; return what the gateway calls it."""
        path = self._file.parent.resolve() / f"candidate-{artifact.sha256}.npz"
        artifact.save(path)
        registry = self.args.registry
        if registry is not None:
            model = model_name("routing", load_scenario(self.args.scenario).name)
            try:
                offer(connect(registry), model, artifact)
            except RegistryError as error:
                self._say(f"{error}; the gateway is given the file")
            else:
                return CANDIDATE
        return str(path)

    def _shadow(self) -> None:
        """See whether the candidate can decide what is asked here."""
        self.gateway.change("shadow", policy=self.state.candidate)
        self._pause(self.args.stretch_s)
        experiment = self.gateway.ask("GET", "/v1/policies")["experiment"] or {}
        compared, failed = (
            experiment.get(key) or 0 for key in ("decisions_compared", "decisions_failed")
        )
        if not compared or failed:
            why = f"{failed} decisions failed" if failed else "it was asked for no decision"
            return self._finish(f"{self.state.candidate} was given up in the shadow: {why}")
        self.gateway.change("stop")
        self._go_on("comparing", f"{compared} decisions in the shadow, none failed")

    def _compare(self) -> None:
        """Let both decide in turns until a test tells them apart."""
        candidate = str(self.state.candidate)
        if not self._add_pair(lent=candidate):
            return
        pairs = self.state.pairs
        said = self._conclusion(pairs)
        if said == "worse":
            self._finish(f"{candidate} is worse after {len(pairs)} pairs, and was given up")
        elif said == "better":
            self.gateway.change("shadow", policy=candidate)
            self.gateway.change("promote")
            self._finish(
                f"promoted {candidate} after {len(pairs)} pairs", "watching",
                pairs_before_promotion=len(pairs),
            )  # fmt: skip
        elif len(pairs) >= self.args.most_pairs:
            self._finish(f"{candidate} is not told apart in {len(pairs)} pairs, and was given up")

    def _watch(self) -> None:
        """Let the former policy decide now and then, and go back to it where it is better."""
        former = str(self.state.in_place_of)
        if time.time() >= (self.state.next_s or 0.0) or not is_rule(former):
            return self._go_on("waiting", "the promoted policy decides")
        for _ in range(_WATCH_PAUSE):
            self._pause(self.args.stretch_s)
        if self._traffic_has_changed():
            return self._go_on("waiting", "the traffic has changed", next_s=time.time())
        if not self._add_pair(lent=former):
            return
        if self._conclusion(self.state.pairs[self.state.pairs_before_promotion :]) == "worse":
            self.gateway.change("rollback")
            self._finish(f"went back to {former}: what was promoted has become worse")

    def _conclusion(self, pairs: list[Pair]) -> Literal["better", "worse"] | None:
        columns = [pair.gain for pair in pairs], [pair.attained for pair in pairs]
        return conclusion(*columns, self.args.alpha)

    def _add_pair(self, lent: str) -> bool:
        """Let a policy decide for a stretch beside one without it, in random order.

        False: there were too few requests to tell anything, or one policy decides in both.
        """
        stretch_s, lends_first = self.args.stretch_s, bool(self._rng.integers(2))
        if not lends_first:
            self._pause(stretch_s)
        label, other, from_s = self.gateway.lend(lent, stretch_s)
        if label == other:
            self._finish(f"somebody has made {lent} decide")
            return False
        self._pause(stretch_s * (1.0 + lends_first))
        self._pause(_FLUSHED_S + min(self._slo_s, stretch_s))
        newest = Pair(
            lent=label, other=other, lent_from_s=from_s,
            other_from_s=from_s + (stretch_s if lends_first else -stretch_s),
            candidate_is_lent=lent == self.state.candidate,
        )  # fmt: skip
        measured = self._measure(newest)
        if measured is None:
            self._go_on(self.state.step, f"fewer than {_FEWEST_REQUESTS} requests in a stretch")
            return False
        pairs = self.state.pairs
        # Requests that had not ended when the pair before was measured have ended meanwhile.
        pairs = [*pairs[:-1], *(self._measure(pair) or pair for pair in pairs[-1:]), measured]
        note = f"pair {len(pairs)}: {math.expm1(measured.gain):+.1%}"
        self._go_on(self.state.step, note, pairs=pairs)
        return True

    def _measure(self, pair: Pair) -> Pair | None:
        """A pair with its outcomes, as far as its requests have ended; None: they are too few."""
        stretch_s = self.args.stretch_s
        begins_s = min(pair.lent_from_s, pair.other_from_s)
        # With what came shortly before, so that the simulator's fleet is busy.
        outcomes = read_outcomes(self.args.log, begins_s - 2.0 * stretch_s)
        outcomes = outcomes.between(0.0, begins_s + 2.0 * stretch_s)
        outcomes = replace(outcomes, simulated_s=_simulated_s(self.state, outcomes))

        def decided(label: str, from_s: float) -> LoggedOutcomes:
            settled_s = from_s + SETTLE_SHARE * stretch_s
            stretch = outcomes.between(settled_s, from_s + stretch_s)
            return stretch.where(stretch.policy == label)

        new, old = decided(pair.lent, pair.lent_from_s), decided(pair.other, pair.other_from_s)
        if not pair.candidate_is_lent:
            new, old = old, new
        if min(len(new), len(old)) < _FEWEST_REQUESTS:
            return None
        # What was not answered has waited as long as any.
        longest_s = max(new.longest_s(), old.longest_s(), self._slo_s)
        gain = math.log(old.mean_over_simulated(longest_s) / new.mean_over_simulated(longest_s))
        attained = new.attained(self._slo_s) - old.attained(self._slo_s)
        return pair.model_copy(update={"gain": gain, "attained": attained})

    def _newest(self, count: int) -> LoggedOutcomes:
        """The newest requests of the log, as far as the last month has so many."""
        span_s = 3600.0
        while True:
            outcomes = read_outcomes(self.args.log, time.time() - span_s)
            if len(outcomes) >= count or span_s >= _MONTH_S:
                return outcomes.newest(count)
            span_s = min(4.0 * span_s, _MONTH_S)

    def _pause(self, seconds: float) -> None:
        """Wait, and look whether a person wants it to stop."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0.0:
            time.sleep(min(left_s, _LOOK_EVERY_S))
            self.gateway.check_veto()


def _simulated_s(state: AutopilotState, outcomes: LoggedOutcomes) -> FloatArray | None:
    """Responses of these requests if the former policy had decided about all, seconds.

    What is measured is divided by them, so that a burst in one stretch is not put down to who
    decided then. They depend on what was asked, and not on who decided but where an answer
    broke off.
    """
    if state.twin is None or not len(outcomes):
        return None
    scenario = Scenario.model_validate(state.twin)
    former = str(state.in_place_of)
    rule = former if is_rule(former) else rule_for(scenario)
    streams = StreamSet([StreamSource(scenario).encode(outcomes.trace)], "what was sent")
    (run,) = rule_runs(PROBLEM, rule, scenario, streams)
    return run.outcomes.response_s


def _train_in_ray(args: Args, since_s: float) -> tuple[Found, Traffic]:
    """Train on a log in a task of Ray, as `_train_on_log`; return also what was read."""
    import ray
    from ray.exceptions import RayTaskError

    from tune_configs.tuner import start_ray

    if not ray.is_initialized():
        start_ray(1)
    task = ray.remote(num_cpus=1, max_retries=2)(_train_on_log)
    try:
        result: tuple[Found, Traffic] = ray.get(task.remote(args, since_s))
    except RayTaskError as error:
        raise error.cause from None
    return result


def _train_on_log(args: Args, since_s: float) -> tuple[Found, Traffic]:
    registry = mlflow_lookup(args.registry) if args.registry else None
    scenario = load_scenario(args.scenario)
    traffic = logged_traffic(args.log, scenario, registry=registry, since_s=since_s)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"{scenario.name}.json"
        trained = OwnTraffic(traffic, model, args.minutes, seed=args.seed).train()
    return trained, traffic


def main(args: Args) -> None:
    console = Console(highlight=False)
    try:
        autopilot = Autopilot(args, console, GatewayClient(args.url))
        autopilot.run()
    except (ValueError, OSError) as error:
        sys.exit(f"autopilot: {error}")
    except KeyboardInterrupt:
        sys.exit("autopilot: stopped; it goes on where it was")
    write_result(args.json, command_line(), args.seed, autopilot.rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

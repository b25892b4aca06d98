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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tyro
from pydantic import BaseModel, ValidationError
from rich.console import Console

from serve_app.policy.autopilot import AutopilotReport, Step
from tokenyard.artifact import model_name
from tokenyard.config import sentence_of
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.registry import CANDIDATE, connect, mlflow_lookup, offer
from tokenyard.routing.artifact import rule_for
from tokenyard.routing.comparison import MOST_ERROR
from tokenyard.routing.decision_log import Outcomes, read_outcomes
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
from tokenyard.statistics.sequential import DEFAULT_ALPHA
from tokenyard.statistics.switchback import mean_gain, verdict
from tokenyard.types import FloatArray
from tokenyard.workload.trace import Trace

_TOKEN = "TOKENYARD_AUTOPILOT_TOKEN"
_LOOK_EVERY_S = 2.0
_FLUSHED_S = 4.0
"""Time after which the gateway has written what has ended."""
_FEWEST_REQUESTS = 20
"""Of a stretch; a pair with fewer in one tells nothing."""
_SETTLE_SHARE = 0.25
"""Share of a stretch, at its beginning, whose requests meet the other policy's queues."""
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
    """End after one cycle."""
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


class Progress(BaseModel):
    """What must not be forgotten."""

    step: Step = "training"
    note: str = ""
    candidate: str | None = None
    """As the gateway takes it."""
    in_place_of: str | None = None
    gains: list[float] = []
    """Of each pair: logarithm of the former policy's mean response over the candidate's."""
    attained: list[float] = []
    """Of each pair: the candidate's SLO attainment minus the former policy's."""
    twin: dict[str, Any] | None = None
    """Fields of the scenario that was fitted to the log."""
    twin_error_fraction: float | None = None
    traffic: tuple[float, float, float] | None = None
    """Requests a second, and mean prompt and answer, tokens, that the last cycle learned from."""
    next_s: float | None = None
    """Unix time of the next cycle, seconds."""


class Vetoed(Exception):
    """A person has stopped the autopilot."""


class Gateway:
    """The gateway's API, as far as the autopilot needs it."""

    def __init__(self, url: str) -> None:
        token = os.environ.get(_TOKEN)
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> dict[str, Any]:
        """The answer to a GET; a ValueError says why there is none."""
        return self._ask("GET", path, None)

    def send(self, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a change; a ValueError says why it was refused."""
        return self._ask(method, path, body)

    def lend(self, policy: str, for_s: float) -> tuple[str, str, float]:
        """Let a policy decide for a while; return two labels and the gateway's clock, seconds.

        The labels, `name@sha256`, are those of the policy and of what decides else.
        """
        before = self.get("/v1/policy")
        answer = self.send("POST", "/v1/policy", {"policy": policy, "for_s": for_s})
        label, other = (f"{card['name']}@{card['sha256']}" for card in (answer, before))
        return label, other, answer["until_s"] - for_s

    def check_veto(self) -> None:
        """Raise Vetoed where a person wants that."""
        if self.get("/v1/autopilot")["vetoed"]:
            raise Vetoed

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            answer = httpx.request(
                method, self._url + path, json=body, headers=self._headers, timeout=30.0
            )
        except httpx.HTTPError as error:
            raise ValueError(f"{method} {path}: {error or type(error).__name__}") from None
        if answer.status_code != 200:
            raise ValueError(f"{method} {path}: {answer.status_code}, {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found


@dataclass
class Autopilot:
    """The loop over steps; each leaves `progress` written down."""

    args: Args
    console: Console
    gateway: Gateway
    progress: Progress = field(default_factory=Progress)
    rows: list[dict[str, Any]] = field(default_factory=list)
    _run: str | None = None
    """MLflow run of the cycle."""

    def __post_init__(self) -> None:
        """Take up what was written down, if anything was."""
        self._state = self.args.log / "autopilot.json"
        self._slo_s = load_scenario(self.args.scenario).slo_response_s
        self._rng = np.random.default_rng(self.args.seed)
        if self._state.is_file():
            try:
                self.progress = Progress.model_validate_json(self._state.read_text("utf-8"))
            except ValidationError as error:
                raise ValueError(f"{self._state}: {sentence_of(error)}; delete it") from None

    def run(self) -> None:
        """Go from step to step, for ever or until a cycle is over.

        Raises:
            ValueError: The gateway or the log cannot be used.
            OSError: Progress cannot be written down.
        """
        steps = {
            "training": self._train, "shadow": self._shadow, "comparing": self._compare,
            "watching": self._watch, "waiting": self._wait, "stopped": self._wait,
        }  # fmt: skip
        while True:
            step = self.progress.step
            if self.args.once and step in ("waiting", "watching", "stopped"):
                return
            try:
                self.gateway.check_veto()
                steps[step]()
            except Vetoed:
                self._go_on("stopped", "a person has vetoed it", next_s=time.time())
                if not self.args.once:
                    time.sleep(30.0)

    def _go_on(self, step: Step, note: str, **changes: Any) -> None:
        """Write down that a step has begun, tell the gateway, and log a run for it."""
        self.progress = self.progress.model_copy(update={"step": step, "note": note, **changes})
        part = self._state.with_suffix(".part")
        part.write_text(self.progress.model_dump_json(indent=1), encoding="utf-8")
        part.replace(self._state)
        progress, gain = self.progress, mean_gain(self.progress.gains)
        numbers = (gain.estimate, gain.low, gain.high)
        fractions = [None if math.isnan(number) else math.expm1(number) for number in numbers]
        report = AutopilotReport(
            step=step, note=note, dry_run=not self.args.act, candidate=progress.candidate,
            in_place_of=progress.in_place_of, pairs=len(progress.gains),
            gain_fraction=fractions[0], gain_ci_low=fractions[1], gain_ci_high=fractions[2],
            twin_error_fraction=progress.twin_error_fraction, next_s=progress.next_s,
        )  # fmt: skip
        self.console.print(f"{step}: {note}", soft_wrap=True, markup=False)
        self.rows.append(report.model_dump())
        if self.args.act:
            self.gateway.send("PUT", "/v1/autopilot", report.model_dump())
        self._log_run(report)

    def _log_run(self, report: AutopilotReport) -> None:
        """Make an MLflow run of a step, in the run of its cycle."""
        if self.args.registry is None:
            return
        import mlflow

        mlflow.set_tracking_uri(self.args.registry)
        mlflow.set_experiment("tokenyard-autopilot")
        if self._run is None:
            with mlflow.start_run(run_name=f"cycle {time.strftime('%Y-%m-%d %H:%M')}") as parent:
                self._run = parent.info.run_id
        with (
            mlflow.start_run(run_id=self._run),
            mlflow.start_run(run_name=report.step, nested=True),
        ):
            fields = report.model_dump(exclude_none=True)
            mlflow.log_metrics({k: v for k, v in fields.items() if isinstance(v, float)})
            mlflow.set_tags({k: str(v) for k, v in fields.items() if not isinstance(v, float)})

    def _finish(self, note: str, step: Step = "waiting") -> None:
        self._go_on(step, note, next_s=time.time() + 3600.0 * self.args.every_h)

    def _wait(self) -> None:
        """Wait for the next cycle, or for other traffic."""
        next_s, learned = self.progress.next_s or 0.0, self.progress.traffic
        note = "the next cycle begins"
        while time.time() < next_s:
            time.sleep(min(60.0, max(next_s - time.time(), 0.0)))
            self.gateway.check_veto()
            recent = self._newest(_RECENT)
            if learned is None or len(recent) < _RECENT:
                continue
            if np.abs(np.log(np.divide(recent.traffic(), learned))).max() > _DRIFT:
                note = "the traffic has changed"
                break
        self._run = None
        self._go_on("training", note, gains=[], attained=[], candidate=None, in_place_of=None)

    def _train(self) -> None:
        """Learn from the log, and keep what is better on its last part."""
        args = self.args
        newest = self._newest(_LEARNED)
        if len(newest) < _FEWEST_LOGGED:
            few = f"the log holds {len(newest):,} requests of the last month"
            return self._finish(f"{few}; {_FEWEST_LOGGED:,} are needed")
        found, traffic = _train_in_ray(args, float(newest.arrival_s[0]))
        error, now = traffic.twin_error_fraction, traffic.now.name if traffic.now else None
        for remark in found.remarks:
            self.console.print(remark, soft_wrap=True, markup=False)
        twin = None
        if isinstance(traffic.fleet, Scenario):
            twin = traffic.fleet.model_dump(mode="json", exclude_none=True)
        learned = {
            "twin": twin, "twin_error_fraction": error,
            "traffic": newest.newest(_RECENT).traffic(),
        }  # fmt: skip
        self.progress = self.progress.model_copy(update=learned)
        if error is not None and error > MOST_ERROR:
            return self._finish(f"the simulator is off by {error:.0%}, so nothing is tried")
        choice = found.choice
        if choice.name == now:
            return self._finish(f"nothing to gain: {now} decides already, and is best")
        name = choice.name
        if choice.artifact is not None:
            name = str(self._state.parent.resolve() / f"candidate-{choice.artifact.sha256}.npz")
            choice.artifact.save(Path(name))
            if args.registry is not None:
                model = model_name("routing", load_scenario(args.scenario).name)
                offer(connect(args.registry), model, choice.artifact)
                name = CANDIDATE
        active = self.gateway.get("/v1/policy")["active"]
        what = {"candidate": name, "in_place_of": active}
        if not args.act:
            self.progress = self.progress.model_copy(update=what)
            return self._finish(f"--act would try {name} in place of {active}")
        self._go_on("shadow", f"{name} runs beside {active} and decides nothing", **what)

    def _shadow(self) -> None:
        """See whether the candidate can decide what is asked here."""
        self._change("shadow", policy=self.progress.candidate)
        ends_s = time.monotonic() + self.args.stretch_s
        while time.monotonic() < ends_s:
            self._pause(_LOOK_EVERY_S)
        experiment = self.gateway.get("/v1/policies")["experiment"] or {}
        compared, failed = (
            experiment.get(key) or 0 for key in ("decisions_compared", "decisions_failed")
        )
        if not compared or failed:
            why = f"{failed} decisions failed" if failed else "it was asked for no decision"
            return self._finish(f"{self.progress.candidate} was given up in the shadow: {why}")
        self._change("stop")
        self._go_on("comparing", f"{compared} decisions in the shadow, none failed")

    def _compare(self) -> None:
        """Let both decide in turns until a test tells them apart."""
        candidate, args = str(self.progress.candidate), self.args
        if not self._add_pair(lent=candidate):
            return
        gains, attained = self.progress.gains, self.progress.attained
        told = verdict(gains, args.alpha, DEFAULT_ALPHA)
        if (
            told == "worse"
            or gains[-1] < -math.log(2.0)
            or verdict(attained, args.alpha, DEFAULT_ALPHA) == "worse"
        ):
            return self._finish(f"{candidate} is worse after {len(gains)} pairs, and was given up")
        if told == "better":
            self._change("shadow", policy=candidate)
            self._change("promote")
            return self._finish(f"promoted {candidate} after {len(gains)} pairs", "watching")
        if len(gains) >= args.most_pairs:
            self._finish(f"{candidate} is not told apart in {len(gains)} pairs, and was given up")

    def _watch(self) -> None:
        """Let the former policy decide now and then, and go back to it where it is better."""
        former = str(self.progress.in_place_of)
        if time.time() >= (self.progress.next_s or 0.0) or not is_rule(former):
            return self._go_on("waiting", "the promoted policy decides")
        for _ in range(_WATCH_PAUSE):
            self._pause(self.args.stretch_s)
        if not self._add_pair(lent=former):
            return
        if verdict(self.progress.gains, self.args.alpha, DEFAULT_ALPHA) == "worse":
            self._change("rollback")
            self._finish(f"went back to {former}: what was promoted has become worse")

    def _add_pair(self, lent: str) -> bool:
        """Let a policy decide for a stretch beside one without it, in random order.

        False: there were too few requests to tell anything.
        """
        stretch_s, lends_first = self.args.stretch_s, bool(self._rng.integers(2))
        candidate_is_lent = lent == self.progress.candidate
        if not lends_first:
            self._pause(stretch_s)
        label, other, begins_s = self.gateway.lend(lent, stretch_s)
        self._pause(stretch_s * (1.0 + lends_first))
        self._pause(_FLUSHED_S + min(self._slo_s, stretch_s))
        other_s = begins_s + (stretch_s if lends_first else -stretch_s)
        # With what came shortly before, so that the simulator's fleet is busy.
        outcomes = read_outcomes(self.args.log, min(begins_s, other_s) - 2.0 * stretch_s)
        outcomes = replace(outcomes, simulated_s=self._simulated_s(outcomes))
        settle_s = _SETTLE_SHARE * stretch_s
        with_it = outcomes.between(begins_s + settle_s, begins_s + stretch_s)
        with_it = with_it.where(with_it.policy == label)
        without = outcomes.between(other_s + settle_s, other_s + stretch_s)
        without = without.where(without.policy == other)
        new, old = (with_it, without) if candidate_is_lent else (without, with_it)
        if min(len(new), len(old)) < _FEWEST_REQUESTS:
            self._go_on(self.progress.step, f"fewer than {_FEWEST_REQUESTS} requests in a stretch")
            return False
        # What was not answered has waited as long as any.
        longest_s = max(new.longest_s(), old.longest_s(), self._slo_s)
        gain = math.log(old.mean_over_simulated(longest_s) / new.mean_over_simulated(longest_s))
        attained = new.attained(self._slo_s) - old.attained(self._slo_s)
        self._go_on(
            self.progress.step, f"pair {len(self.progress.gains) + 1}: {math.expm1(gain):+.1%}",
            gains=[*self.progress.gains, gain], attained=[*self.progress.attained, attained],
        )  # fmt: skip
        return True

    def _simulated_s(self, outcomes: Outcomes) -> FloatArray | None:
        """Responses of these requests if the former policy had decided about all, seconds.

        What is measured is divided by them, so that a burst in one stretch is not put down to who
        decided then. They depend on what came alone, which leaves the test valid.
        """
        if self.progress.twin is None:
            return None
        scenario = Scenario.model_validate(self.progress.twin)
        former = str(self.progress.in_place_of)
        rule = former if is_rule(former) else rule_for(scenario.name)
        trace = Trace(
            outcomes.arrival_s - outcomes.arrival_s[0], outcomes.context_tokens.astype(np.int64),
            np.maximum(outcomes.output_tokens, 1.0).astype(np.int64),
        )  # fmt: skip
        streams = StreamSet([StreamSource(scenario).encode(trace)], "what was sent")
        (run,) = rule_runs(PROBLEM, rule, scenario, streams)
        return run.outcomes.response_s

    def _newest(self, count: int) -> Outcomes:
        """The newest requests of the log, as far as the last month has so many."""
        span_s = 3600.0
        while True:
            outcomes = read_outcomes(self.args.log, time.time() - span_s)
            if len(outcomes) >= count or span_s >= _MONTH_S:
                return outcomes.newest(count)
            span_s = min(4.0 * span_s, _MONTH_S)

    def _change(self, action: str, **fields: Any) -> None:
        self.gateway.send("POST", "/v1/policies", {"action": action, **fields})

    def _pause(self, seconds: float) -> None:
        """Wait, and look whether a person wants it to stop."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0.0:
            time.sleep(min(left_s, _LOOK_EVERY_S))
            self.gateway.check_veto()


def _train_in_ray(args: Args, since_s: float) -> tuple[Found, Traffic]:
    """Train on a log in a task of Ray; return also what was read."""
    import ray

    from tune_configs.tuner import start_ray

    if not ray.is_initialized():
        start_ray(1)
    task = ray.remote(num_cpus=1, max_retries=2)(_train_on_log)
    result: tuple[Found, Traffic] = ray.get(task.remote(args, since_s))
    return result


def _train_on_log(args: Args, since_s: float) -> tuple[Found, Traffic]:
    registry = mlflow_lookup(args.registry) if args.registry else None
    scenario = load_scenario(args.scenario)
    traffic = logged_traffic(args.log, scenario, registry=registry, since_s=since_s)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"{scenario.name}.json"
        found = OwnTraffic(traffic, model, args.minutes, seed=args.seed).train()
    return found, traffic


def main(args: Args) -> None:
    console = Console(highlight=False)
    try:
        autopilot = Autopilot(args, console, Gateway(args.url))
        autopilot.run()
    except (ValueError, OSError) as error:
        sys.exit(f"autopilot: {error}")
    except KeyboardInterrupt:
        sys.exit("autopilot: stopped; it goes on where it was")
    if args.json is not None:
        write_result(args.json, command_line(), args.seed, autopilot.rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

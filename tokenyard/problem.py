"""The one thing that sweeping, evaluating, tuning, training and serving know of a problem.

Tokenyard learns to route requests, to allocate GPUs and to divide demand over regions. Each is a
`Problem`: it names its scenarios and policies, draws streams, runs policies over them and says
what is measured. What is made of that (rows, paired differences, tables, sweeps, promotion) stands
once, in `tokenyard.evaluation`, `tokenyard.registry` and `tune_configs`. A problem decides nothing
itself: policies, simulators and observations differ for good reasons and share no interface.

A fourth problem implements this page and adds one line to `PROBLEMS`; `tests/` has one.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import yaml

from tokenyard.artifact import RegistryLookup
from tokenyard.statistics.intervals import Samples
from tokenyard.types import FloatArray
from tokenyard.workload.trace_options import TraceOptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, str | int | float]
"""One line of a results table, with units in its keys."""

Purpose = Literal["validation", "evaluation"]
"""`validation`: to choose between policies; `evaluation`: to judge the one that was chosen. They
share no random numbers with each other, nor with what policies are trained on."""

RULE = "baseline"
"""Source of a candidate that is a rule."""


class Scenario(Protocol):
    """What policies are compared on."""

    @property
    def name(self) -> str:
        """Names rows, registered models and shipped artifacts."""

    @property
    def description(self) -> str:
        """One line for people."""


class Metadata(Protocol):
    """What an artifact says of itself."""

    @property
    def trainer(self) -> str:
        """Algorithm that made it."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """What it scored when it was exported."""

    @property
    def lineage(self) -> Mapping[str, str]:
        """Hashes and names of what it was made from."""


class TrainedPolicy(Protocol):
    """A trained policy as it leaves training."""

    @property
    def metadata(self) -> Metadata:
        """Where it comes from."""

    @property
    def sha256(self) -> str:
        """First 12 hex digits of a hash over all that the policy is."""

    def save(self, path: str | Path) -> None:
        """Write the file that `Problem.load_artifact` reads."""


class Streams(Protocol):
    """Traffic or demand that every policy of a comparison lives through."""

    def __len__(self) -> int:
        """How many streams."""

    @property
    def described(self) -> str:
        """How many of what, and where they come from, in words for a table."""

    @property
    def offered_load(self) -> float | None:
        """Share of what the servers can do that is asked of them; None: no such share is known."""


S = TypeVar("S", bound=Scenario)
A = TypeVar("A", bound=TrainedPolicy)
D = TypeVar("D", bound=Streams)
T = TypeVar("T")
R = TypeVar("R")
"""One run: what one policy did on one stream."""

Runner = Callable[[S, D, int], list[R]]
"""Runs a policy over streams, with a seed for the policy's own randomness; picklable."""


@dataclass(frozen=True)
class Drawn(Generic[T]):
    """`Streams` that are a list."""

    streams: Sequence[T]
    described: str
    offered_load: ClassVar[float | None] = None

    def __len__(self) -> int:
        """How many streams."""
        return len(self.streams)


@dataclass(frozen=True)
class Measure:
    """One number of a row, and how it is printed and compared."""

    key: str
    """Of the row, with its unit; docs/metrics.md defines it."""
    heading: str = ""
    """Of its column in a printed table, with the unit it is printed in; "": it is not printed."""
    form: str = ".2f"
    """Format of the printed number."""
    factor: float = 1.0
    """From the key's unit to the printed one: 100 for a fraction in %."""
    interval: bool = False
    """Whether a row holds its own 95 % interval, `<key>_ci_low` and `<key>_ci_high`."""
    delta: str = ""
    """Key of its paired difference to the baseline, "": it is not compared. A key that ends in
    `_fraction` is over the baseline's mean, any other in the measure's own unit. The interval's
    keys have `_ci_low` and `_ci_high` in place of the last word."""
    table: str = "means over streams ± 95 % interval"
    """Title of the table that it is printed in."""
    more_is_better: bool = False

    @property
    def relative(self) -> bool:
        """Whether the difference is over the baseline's mean."""
        return self.delta.endswith("_fraction")

    @property
    def delta_keys(self) -> tuple[str, str, str]:
        """Keys of the difference and of both ends of its interval."""
        stem = self.delta.rpartition("_")[0]
        return self.delta, f"{stem}_ci_low", f"{stem}_ci_high"

    @property
    def p_key(self) -> str:
        """Key of the difference's p-value, corrected for its table."""
        return f"{self.delta.rpartition('_')[0]}_p_holm"


@dataclass(frozen=True)
class Score:
    """The measure by which policies are ranked."""

    key: str
    """Of the row."""
    sign: Literal[1, -1]
    """-1 where less is better, so that a higher score is always better."""
    unit: str

    def value(self, row: Mapping[str, Any]) -> float:
        """Score of a row, higher is better."""
        return self.sign * float(row[self.key])


@dataclass(frozen=True)
class Candidate(Generic[S, D, R]):
    """Something to be evaluated; picklable where its runner is."""

    name: str
    source: str
    """Where it comes from, in words for a table; with the hash of a trained policy."""
    run: Runner[S, D, R]
    rule: str | None = None
    """Rule that decides under this name, where it has a name of its own."""

    @property
    def is_rule(self) -> bool:
        """Whether it is a hand-written rule, and neither trained nor a bound."""
        return self.source == RULE


@dataclass(frozen=True)
class StreamOptions:
    """Which streams an evaluation is asked to run on."""

    count: int
    """Independent streams, or windows of a trace."""
    seed: int
    source: Literal["synthetic", "held-out"] | None = None
    """None: the recorded test part where there is one, else synthetic."""
    trace: Path | None = None
    """A recorded trace in place of both."""
    native_time: bool = False
    """Whether the trace keeps its recorded time."""
    reading: TraceOptions = field(default_factory=TraceOptions)
    """How the trace is read."""
    load: float | None = None
    """Offered load that time is scaled to; None: the scenario's."""


class Problem(Protocol[S, A, D, R]):
    """Scenarios, artifacts, streams and runs of one kind of decision.

    For example `tokenyard.routing.problem.PROBLEM`: `candidate(load_scenario("poisson_085"),
    "sed").run(...)` gives one run per stream, which `summary` measures. Where a run is a mapping of
    measures, `summary` and `samples` are there already.
    """

    name: str
    """Of rows, of registered models (`model_name`), and of the folder of shipped artifacts."""
    suites: Mapping[str, Sequence[str]]
    """Scenarios that are evaluated together, by the suite's name."""
    default_policies: Sequence[str]
    default_baseline: str
    default_streams: int = 5
    """What an evaluation runs where nothing else is asked for."""
    score: Score
    headline: Sequence[str] = ()
    """Keys of the measures that a sweep prints; (): of those that are compared."""
    learned: str = "champion"
    """Name of the candidate that stands for the best trained policy."""
    rivals: Sequence[str] = ()
    """Candidates that `learned` is set beside one by one, each as its baseline."""
    trade_off: tuple[str, str] | None = None
    """Keys of two measures that policies trade for each other: a sweep draws their Pareto front."""
    num_validation_streams: int = 5
    """Streams by which trials are ranked; their seed is 0, so that all sweeps can be compared."""

    def scenario_names(self) -> list[str]:
        """Names of the scenarios that ship, sorted."""

    def load_scenario(self, name: str) -> S:
        """Read a shipped scenario by name, or a YAML file by path.

        Raises:
            ValueError: Unknown name, with the closest one, or a file that is wrong.
        """

    def policies_for(self, scenario: S) -> Sequence[str]:
        """What an evaluation of the scenario runs where nothing else is asked for."""
        return self.default_policies

    def load_artifact(self, path: str | Path) -> A:
        """Read a policy file.

        Raises:
            ArtifactError: The file is missing, broken, or of another problem.
        """

    def candidate(
        self, scenario: S, name: str, registry: RegistryLookup | None = None
    ) -> Candidate[S, D, R]:
        """Find what a name means: a rule, a bound, a trained policy or the path of a policy file.

        Raises:
            ValueError: The name is unknown, or what it needs is missing or of another scenario.
        """

    def trained(self, artifact: A) -> Runner[S, D, R]:
        """What runs a trained policy."""

    def streams(self, scenario: S, purpose: Purpose, count: int, seed: int) -> D:
        """Draw synthetic streams; equal arguments give equal streams."""

    def measures(self, scenario: S) -> Sequence[Measure]:
        """All that is printed or compared of this scenario's rows, in the order of the columns.

        Rows of runs without a reward have no such column.
        """

    def summary(self, scenario: S, runs: Sequence[R]) -> dict[str, float]:
        """Measures of one policy over all its runs, by key; docs/metrics.md defines them."""
        return {key: float(values.mean()) for key, values in _by_stream(runs).items()}

    def without_reward(self, scenario: S) -> S:
        """The scenario for runs whose reward is not used, where it takes time to compute."""
        return scenario

    def samples(
        self, scenario: S, streams: D, runs: Mapping[str, Sequence[R]], baseline: str
    ) -> dict[str, Samples]:
        """Values by the unit that is paired (a stream, a day, a resample), of every policy.

        They hold at least the measures with an interval or a difference, and the score.
        """
        return {name: Samples(_by_stream(results)) for name, results in runs.items()}

    def evaluation_streams(self, scenario: S, options: StreamOptions) -> tuple[D, list[str]]:
        """Streams that an evaluation asks for, and what is worth knowing about them.

        Raises:
            ValueError: They do not exist; of most problems there are no recorded ones.
        """
        if options.trace or options.source or options.native_time or options.load:
            raise ValueError(
                "--trace, --source, --native-time and --load are for routing; the demand of "
                f"{self.name} is in its scenarios' files"
            )
        return self.streams(scenario, "evaluation", options.count, options.seed), []

    def overload(self, scenario: S, streams: D) -> float | None:
        """Offered load above 1, at which the queue only grows; None: it does not."""
        return None

    def validation(self, scenario: S, num_streams: int) -> Callable[[A], dict[str, float]]:
        """What scores an artifact in training: by `score` and what else is measured and finite.

        The streams are drawn once; equal arguments give equal streams in every trial.
        """
        streams = self.streams(scenario, "validation", num_streams, seed=0)

        def validate(artifact: A) -> dict[str, float]:
            means = self.summary(scenario, self.trained(artifact)(scenario, streams, 0))
            finite = {key: value for key, value in means.items() if math.isfinite(value)}
            return {**finite, "score": self.score.value(means)}

        return validate

    def best_tuned_rule(self, scenario: S) -> str | None:
        """Name of the rule that a champion must beat; None: none was tuned for the scenario."""
        return None

    def gate(self, scenario: S, num_streams: int) -> Callable[[A], list[Row]]:
        """What keeps a policy from being champion besides its score.

        Args:
            scenario: Whose champion it would be.
            num_streams: Streams that are drawn, where any are.

        Returns:
            A function from an artifact to rows of `tokenyard.evaluation.compare` with `part` and
            `loses` (0 or 1); here there is nothing to lose.
        """
        return lambda artifact: []

    def figures(
        self, scenario: S, streams: D, runs: Mapping[str, Sequence[R]], rows: Sequence[Row]
    ) -> dict[str, Figure]:
        """Draw a comparison, by names of files; empty: `tokenyard.evaluation` draws it."""
        return {}


def _by_stream(runs: Sequence[Any]) -> dict[str, FloatArray]:
    return {key: np.array([run[key] for run in runs]) for key in runs[0]}


AnyProblem = Problem[Any, Any, Any, Any]
"""A problem whose types nobody needs to know: that of a table of problems."""


def _shipped(name: str) -> AnyProblem:
    problem: AnyProblem = importlib.import_module(f"tokenyard.{name}.problem").PROBLEM
    return problem


PROBLEMS: dict[str, Callable[[], AnyProblem]] = {
    folder.rpartition(".")[2]: partial(_shipped, folder)
    for folder in ("routing", "allocation", "regions", "routing.sessions")
}
"""All problems by name; one is imported when it is asked for."""


def find_problem(scenario: str | None, suite: str | None) -> AnyProblem:
    """The problem of a suite, of a shipped scenario, or of a file that says `problem: NAME`.

    Anything else is routing's, which refuses it with the names that are known.

    Raises:
        ValueError: Unknown suite, or not exactly one of the two is given.
    """
    if (scenario is None) == (suite is None):
        raise ValueError("give exactly one of --scenario and --suite")
    if suite is not None:
        return _of_suite(suite)
    for problem in _problems():
        # What follows an @ changes a scenario, or names the fleet of a workload.
        if str(scenario).partition("@")[0] in problem.scenario_names():
            return problem
    named = _named_in(Path(str(scenario)))
    return next((load for name, load in PROBLEMS.items() if name == named), PROBLEMS["routing"])()


def _named_in(path: Path) -> object:
    """What a YAML file says under `problem`; None: it is no such file, or says nothing."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return None
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError):
        return None
    return fields.get("problem") if isinstance(fields, dict) else None


def _of_suite(suite: str) -> AnyProblem:
    suites: list[str] = []
    for problem in _problems():
        if suite in problem.suites:
            return problem
        suites += problem.suites
    raise ValueError(f"unknown suite {suite!r}; choose one of {suites}")


def _problems() -> Iterator[AnyProblem]:
    return (load() for load in PROBLEMS.values())

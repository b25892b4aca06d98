"""Sessions as a `Problem`: which session goes on, where, and which is held or paused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tokenyard.artifact import ArtifactError, RegistryLookup
from tokenyard.problem import RULE, Candidate, Drawn, Measure, Problem, Purpose, Runner, Score
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.sessions.evaluation import MEASURES, summarise
from tokenyard.routing.sessions.rules import RULES, make_rule
from tokenyard.routing.sessions.scenario import (
    SessionScenario,
    load_session_scenario,
    scenario_names,
)
from tokenyard.routing.simulator.sessions import SessionStream, run_sessions
from tokenyard.routing.simulator.streams import stream_rng

SessionStreams = Drawn[SessionStream]
Measured = dict[str, float]
"""What `summarise` says of one stream."""


class SessionAdmission(Problem[SessionScenario, PolicyArtifact, SessionStreams, Measured]):
    """Streams are sessions, paired by stream; rules are those of `rules.RULES`."""

    name = "sessions"
    suites = {  # noqa: RUF012
        "sessions": (
            "agentic_sessions_mixed", "agentic_sessions_equal", "agentic_sessions_mixed_host",
            "agentic_sessions_equal_host", "agentic_sessions_mixed_scarce",
            "agentic_sessions_mixed_ample", "code_sessions_mixed", "code_sessions_equal",
            "chat_sessions_mixed", "chat_sessions_equal",
        )
    }  # fmt: skip
    default_policies = tuple(RULES)
    default_baseline = "sticky_most_cached"
    default_streams = 30
    score = Score("sessions_in_slo_fraction", 1, "share")
    headline = ("sessions_in_slo_fraction", "mean_completion_s", "p99_ttft_s")
    scenario_names = staticmethod(scenario_names)
    load_scenario = staticmethod(load_session_scenario)

    def load_artifact(self, path: str | Path) -> PolicyArtifact:
        """Refuse: nothing is trained here.

        Raises:
            ArtifactError: Always.
        """
        raise ArtifactError(f"{path}: no session policy is trained; rules are {list(RULES)}")

    def candidate(
        self, scenario: SessionScenario, name: str, registry: RegistryLookup | None = None
    ) -> Candidate[SessionScenario, SessionStreams, Measured]:
        """Find a rule, `NAME` or `NAME:KEY=VALUE`.

        Raises:
            ValueError: There is no such rule.
        """
        make_rule(name)
        return Candidate(name, RULE, partial(_run, name))

    def trained(
        self, artifact: PolicyArtifact
    ) -> Runner[SessionScenario, SessionStreams, Measured]:
        """Refuse, as `load_artifact`.

        Raises:
            ValueError: Always.
        """
        raise ValueError("no session policy is trained")

    def streams(
        self, scenario: SessionScenario, purpose: Purpose, count: int, seed: int
    ) -> SessionStreams:
        """Draw independent streams."""
        drawn = [scenario.draw(stream_rng(seed, purpose, i)) for i in range(count)]
        num_turns = sum(len(stream.context) for stream in drawn)
        described = (
            f"{count} streams of {len(drawn[0])} sessions, {num_turns} turns in all, at "
            f"{scenario.sessions_per_a100_hour:g} sessions per hour and A100 of speed "
            f"({scenario.a100s:.2f} in the fleet), seed {seed}; predictions are the truth times "
            "e^(0.7 N)"
        )
        return Drawn(drawn, described)

    def measures(self, scenario: SessionScenario) -> Sequence[Measure]:
        """Sessions, then first tokens, then what was held."""
        return MEASURES


PROBLEM = SessionAdmission()


def _run(
    name: str, scenario: SessionScenario, streams: SessionStreams, seed: int
) -> list[Measured]:
    rule = make_rule(name)
    return [
        summarise(scenario, run_sessions(scenario.replicas, stream, rule))
        for stream in streams.streams
    ]

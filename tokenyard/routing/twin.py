"""The same requests through the simulator of the replicas that served them: how well it predicts.

A scenario of the live replicas (`pipelines/calibrate.py --url`) is stepped through what a replay
has sent, under the policies that decided there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean

import numpy as np

from tokenyard.evaluation import run_all
from tokenyard.problem import Runner
from tokenyard.routing.evaluation import mean_summary
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.streams import StreamSet, StreamSource
from tokenyard.types import FloatArray
from tokenyard.workload.answer_lengths import AnswerFeatures, AnswerLengths
from tokenyard.workload.trace import Trace

_STANDS_FOR = {"ray_default": "power_of_two"}
"""Live policies that the simulator knows by another name."""
_COPIES = 10
"""Runs of every policy: those that draw by themselves differ from run to run."""


def learned_sizes(trace: Trace) -> FloatArray:
    """Prompts and expected answers, tokens, shape (num_requests,): as a gateway learns them."""
    lengths, prior_tokens = AnswerLengths(), float(trace.generated_tokens.mean())
    features = [AnswerFeatures(prompt) for prompt in trace.context_tokens.tolist()]
    for request, tokens in zip(features, trace.generated_tokens.tolist(), strict=True):
        lengths.observe(request, tokens, prior_tokens, 0.0)
    expected = [lengths.expected_tokens(request, prior_tokens) for request in features]
    return np.asarray(trace.context_tokens + np.array(expected))


@dataclass(frozen=True)
class Agreement:
    """How well simulated means predict measured ones."""

    mean_error_fraction: float
    """Mean over policies of the relative error, regardless of its sign."""
    max_error_fraction: float
    kendall_tau: float
    """Of the two orders of the policies; NaN for fewer than two."""


def runners(
    scenario: Scenario, policies_of: str, policies: Iterable[str]
) -> dict[str, Runner[Scenario, StreamSet, Run]]:
    """What runs each policy in the simulator of the live replicas, by the name that it has live.

    `policies_of` is the scenario whose champion and tuned rules decide.

    Raises:
        ValueError: A policy is unknown or does not fit the replicas.
    """
    known_as = scenario.model_copy(update={"name": policies_of})
    return {name: PROBLEM.candidate(known_as, _STANDS_FOR.get(name, name)).run for name in policies}


def simulate(
    scenario: Scenario, policies_of: str, trace: Trace, policies: Iterable[str], seed: int
) -> dict[str, dict[str, float]]:
    """Run the sent requests through the simulator; arguments as of `runners`.

    Returns `tokenyard.routing.evaluation.summarise` by policy, as means over a few runs.

    Raises:
        ValueError: A policy is unknown or does not fit the replicas.
    """
    known_as = scenario.without_reward().model_copy(update={"name": policies_of})
    stream = StreamSource(scenario).encode(trace, predicted_total=learned_sizes(trace))
    streams = StreamSet([stream] * _COPIES, "what was sent")
    runs_of = run_all(runners(scenario, policies_of, policies), known_as, streams, seed)
    return {name: mean_summary(known_as, runs) for name, runs in runs_of.items()}


def agreement(measured_s: Mapping[str, float], simulated_s: Mapping[str, float]) -> Agreement:
    """Compare measured with simulated mean responses of policies, seconds."""
    from scipy.stats import kendalltau

    errors = [abs(simulated_s[name] / measured_s[name] - 1.0) for name in measured_s]
    orders = [[means_s[name] for name in measured_s] for means_s in (measured_s, simulated_s)]
    tau = float(kendalltau(*orders).statistic) if len(measured_s) > 1 else float("nan")
    return Agreement(mean(errors), max(errors), tau)

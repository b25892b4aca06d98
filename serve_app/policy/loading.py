"""Which policy a name means: found and checked."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from serve_app.policy.card import PolicyCard
from tokenyard.artifact import ArtifactError, NoChampionError, RegisteredPolicy, RegistryError
from tokenyard.registry import CANDIDATE, CHAMPION, find_registered
from tokenyard.routing.artifact import (
    PolicyArtifact,
    learned_policy,
    length_predictor,
    rule_for,
)
from tokenyard.routing.metadata import LengthPredictor
from tokenyard.routing.policies import BASELINES, PolicyContext, draws, is_placement, make_policy
from tokenyard.routing.policies.order import ORDERS, Order, Ordered, is_order, order_of
from tokenyard.routing.policies.rule_name import RuleName, Term
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.types import RoutingPolicy
from tokenyard.workload.features import FEATURE_NAMES
from tokenyard.workload.model import load_model

logger = logging.getLogger(__name__)

RANDOMISED = frozenset(
    {"random", "weighted_random", "power_of_two"} | {name for name in BASELINES if draws(name)}
)
"""Baselines whose choice is itself a draw, so that its propensity is not known."""
MAX_EXPLORE_FRACTION = 0.05
TUNED = frozenset({"sed_reserve", "sed_dump", "sita"})
"""Baselines whose parameters hold for the scenario's own replicas only."""

_DAY_OF_MONTH = FEATURE_NAMES.index("day_of_month")

# Arrivals are in Unix time, so second 0 of the clock is the epoch.
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy that was found and can be made; picklable."""

    card: PolicyCard
    make: Callable[[np.random.Generator], RoutingPolicy]
    """Makes the policy, fresh, with a source of randomness for those that draw."""
    predictor: LengthPredictor | None
    """Fills in the size of a request that came without; None: the context alone is its size."""
    artifact: PolicyArtifact | None = None
    """The file that it is made from; None: a hand-written rule."""

    @cached_property
    def draws(self) -> bool:
        """Whether the policy's own choice is random."""
        placement = str(RuleName.parse(self.card.name).placement)
        return self.card.kind == "baseline" and placement in RANDOMISED

    def predicted_total_tokens(self, context_tokens: int) -> float:
        """Predicted size of a request of that context, tokens."""
        if self.predictor is None:
            return float(context_tokens)
        return context_tokens + self.predictor.generated_tokens(context_tokens)


def resolve_policy(
    policy: str, scenario_name: str, registry_uri: str | None = None, stand_in: str | None = None
) -> LoadedPolicy:
    """Find the policy that a name means.

    Args:
        policy: `champion`, the registry's `candidate`, the path of a policy file (.npz), or a
            baseline's name; `+ORDER`, `+ORDER@KNOB` or `+ORDER@KNOB:SET_BACK` behind it says how
            requests wait.
        scenario_name: Whose champion or tuned rules apply; of a rule also whose SLO and length
            predictor.
        registry_uri: Where registered champions are looked up; None: only shipped ones count.
        stand_in: Rule that is served where a trained policy is missing or broken; its card says so.
            Where one is given, what ships is served if the registry has nothing or cannot be read.

    Raises:
        ValueError: An unknown name or scenario; without a stand-in also a policy that is missing or
            broken (ArtifactError).
    """
    scenario, name = load_scenario(scenario_name), RuleName.parse(policy)
    is_known = is_placement(name.placement)
    if name.order is not None and not policy.endswith(".npz") and not is_known:
        _order(name.order, scenario)  # Its faults must show before anything is looked for.
        loaded = resolve_policy(str(name.placement), scenario_name, registry_uri, stand_in)
        return in_order(loaded, name.order, scenario)
    try:
        if policy in (CHAMPION, CANDIDATE):
            return _registered_or_shipped(policy, scenario, registry_uri, stand_in is not None)
        if policy.endswith(".npz"):
            artifact, source = PolicyArtifact.champion(scenario.name, path=policy)
            return from_artifact(Path(policy).stem, artifact, source, scenario)
    except ArtifactError as error:
        if stand_in is None:
            raise
        reason, rule = str(error), from_baseline(stand_in, scenario)
        logger.warning("serving %s in place of the policy asked for: %s", stand_in, reason)
        return replace(rule, card=rule.card.model_copy(update={"startup_fallback": reason}))
    if not is_known:
        raise ValueError(
            f"unknown policy {policy!r}; give champion, candidate, a policy file (.npz) or one of "
            f"{sorted(BASELINES)}, and + and one of {sorted(ORDERS)} behind it if its "
            "requests are to wait in an order"
        )
    return from_baseline(policy, scenario)


def _registered_or_shipped(
    policy: str, scenario: Scenario, registry_uri: str | None, may_ship: bool
) -> LoadedPolicy:
    """What the registry names, else what ships, else the rule in its place.

    `may_ship`: what ships is served where the registry cannot be read or, of a candidate, has none;
    the card says why.
    """
    registered, error = ask_registry("routing", scenario.name, policy, registry_uri, may_ship)
    changed: dict[str, str | None] = {"registry_error": error}
    try:
        artifact, source = PolicyArtifact.champion(scenario.name, registry=lambda model: registered)
    except NoChampionError:
        rule = rule_for(scenario)
        loaded = from_baseline(rule, scenario)
        changed["source"] = f"the rule {rule}"
    else:
        name = CHAMPION if registered is None else policy
        loaded = from_artifact(name, artifact, source, scenario)
        changed["mlflow_run"] = None if registered is None else registered.run_id
    return replace(loaded, card=loaded.card.model_copy(update=changed))


def ask_registry(
    problem: str, scenario: str, alias: str, registry_uri: str | None, may_ship: bool
) -> tuple[RegisteredPolicy | None, str | None]:
    """Look a champion or a candidate up.

    Returns:
        The version, or None where there is no champion, or no registry to ask; and, with
        `may_ship`, why the registry is not used.

    Raises:
        RegistryError: It cannot be read, or there is no candidate; not with `may_ship`.
    """
    registered = None
    try:
        if registry_uri is not None:
            registered = find_registered(registry_uri, problem, scenario, alias)
        if registered is None and alias == CANDIDATE:
            where = "there is no registry" if registry_uri is None else f"registry {registry_uri}"
            raise RegistryError(f"{where}: {problem} scenario {scenario!r} has no candidate")
    except RegistryError as refused:
        if not may_ship:
            raise
        logger.warning("%s by what ships: %s", problem, refused)
        return None, str(refused)
    return registered, None


def check_exploration(loaded: LoadedPolicy, explore_fraction: float) -> None:
    """Refuse a share that is out of range, or that has no meaning for the policy.

    Raises:
        ValueError: It is not in [0, MAX_EXPLORE_FRACTION], or the policy draws by itself.
    """
    if not 0.0 <= explore_fraction <= MAX_EXPLORE_FRACTION:
        raise ValueError(
            f"explore fraction {explore_fraction} must lie between 0 and {MAX_EXPLORE_FRACTION}"
        )
    if explore_fraction and loaded.draws:
        raise ValueError(
            f"policy {loaded.card.name!r} draws its choices already: explore with one that does not"
        )


def from_artifact(
    name: str, artifact: PolicyArtifact, source: str, scenario: Scenario
) -> LoadedPolicy:
    """Serve a trained policy, with the SLO and the predictor of its training.

    Raises:
        ArtifactError: It was trained with the true output length in view, which no server has,
            and brings no predictor.
    """
    metadata = artifact.metadata
    if metadata.output_length != "none" and metadata.predictor is None:
        raise ArtifactError(
            f"{source} was trained with output_length {metadata.output_length!r} but brings no "
            "predictor for requests that come without predicted_total_tokens"
        )
    card = PolicyCard(
        name=name,
        kind=metadata.kind,
        trainer=metadata.trainer,
        scenario=metadata.scenario,
        sha256=artifact.sha256,
        source=source,
        num_replicas=metadata.num_replicas,
        needs_engine=artifact.needs_engine,
        output_length="none" if metadata.predictor is None else "by_context",
        slo_response_s=metadata.slo_response_s,
        metrics=dict(metadata.metrics),
        lineage=dict(metadata.lineage),
    )
    return LoadedPolicy(card, partial(_make_learned, artifact), metadata.predictor, artifact)


def from_baseline(name: str, scenario: Scenario) -> LoadedPolicy:
    """Serve a hand-written rule, with the SLO, the tuning and the predictor of `scenario`.

    Raises:
        ValueError: The rule is a tuned one, and there are no parameters for the scenario.
    """
    make = partial(_make_baseline, name, scenario)
    make(np.random.default_rng(0))  # Missing parameters must show before the server starts.
    is_told = scenario.output_length != "none"
    predictor = length_predictor(load_model(scenario.workload)) if is_told else None
    card = PolicyCard(
        name=name,
        kind="baseline",
        trainer=None,
        scenario=scenario.name,
        sha256=_hash_of(name, scenario),
        source="built in",
        num_replicas=scenario.num_servers if RuleName.parse(name).base in TUNED else None,
        output_length="none" if predictor is None else "by_context",
        slo_response_s=scenario.slo_response_s,
    )
    return LoadedPolicy(card, make, predictor)


def in_order(loaded: LoadedPolicy, order: Term, scenario: Scenario) -> LoadedPolicy:
    """Serve what `champion` or a file means with its requests waiting in an order.

    A rule's own order gives way. Tuned knobs of the scenario count where none is given.
    """
    card = loaded.card
    if card.startup_fallback is not None:
        return loaded
    if loaded.artifact is None:
        rule = from_baseline(str(RuleName.parse(card.name).ordered(order)), scenario)
        changed = {"source": f"the rule {rule.card.name}", "registry_error": card.registry_error}
        return replace(rule, card=rule.card.model_copy(update=changed))
    name = str(RuleName(Term(card.name), order))
    digest = hashlib.sha256(f"{card.sha256}\n{order}".encode()).hexdigest()[:12]
    ordered = card.model_copy(update={"name": name, "sha256": digest})
    return replace(loaded, card=ordered, make=partial(_make_in_order, loaded.make, order, scenario))


def reloaded(card: PolicyCard, artifact: PolicyArtifact | None, scenario_name: str) -> LoadedPolicy:
    """Make a policy again from its card and its file; None: it is a rule."""
    if artifact is None:
        return resolve_policy(card.name, scenario_name)
    scenario, rule = load_scenario(scenario_name), RuleName.parse(card.name)
    if rule.order is not None and is_order(rule.order):
        loaded = from_artifact(str(rule.ordered(None)), artifact, card.source, scenario)
        loaded = in_order(loaded, rule.order, scenario)
    else:
        loaded = from_artifact(card.name, artifact, card.source, scenario)
    return replace(loaded, card=loaded.card.model_copy(update={"mlflow_run": card.mlflow_run}))


def _make_in_order(
    make: Callable[[np.random.Generator], RoutingPolicy],
    order: Term,
    scenario: Scenario,
    rng: np.random.Generator,
) -> Ordered:
    return Ordered(make(rng), _order(order, scenario))


def _order(order: Term, scenario: Scenario) -> Order:
    """Make an order that stands behind a trained policy, as it was tuned behind the champion."""
    return order_of(RuleName(Term(CHAMPION), order), _context(scenario, np.random.default_rng(0)))


def _make_learned(artifact: PolicyArtifact, rng: np.random.Generator) -> RoutingPolicy:
    # A policy that never saw a calendar in training must not see one here: without one the day of
    # the month is 0 throughout, and with one it never is.
    scaling = artifact.metadata.scaling
    has_calendar = scaling is not None and scaling.medians[_DAY_OF_MONTH] != 0
    return learned_policy(artifact, _UNIX_EPOCH if has_calendar else None)


def _make_baseline(name: str, scenario: Scenario, rng: np.random.Generator) -> RoutingPolicy:
    return make_policy(name, _context(scenario, rng))


def _context(scenario: Scenario, rng: np.random.Generator) -> PolicyContext:
    return PolicyContext(scenario.name, scenario.slo, rng, scenario.num_servers)


def _hash_of(name: str, scenario: Scenario) -> str:
    """Hash of what a rule depends on: its code's release, and the scenario where it is tuned."""
    parts = [name, version("tokenyard"), scenario.model_dump_json()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

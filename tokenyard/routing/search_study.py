"""Several searches of a scenario's weights, and the choice of one: how champions are made.

Searches differ by seed and by objective. Each is judged on validation streams, beside the hand rule
that it began with, and the one that is kept is chosen by `tokenyard.routing.choice.choose`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

import numpy as np

from tokenyard import metrics
from tokenyard.problem import Row
from tokenyard.provenance import lineage
from tokenyard.routing.artifact import PolicyArtifact, lineage_of
from tokenyard.routing.choice import RULES_LOST_TO, PairedScore, choose
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.search import Objective, PolicySearch, SearchConfig
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSource

NUM_VALIDATION_STREAMS = 90
OBJECTIVES = (
    Objective(cvar99=0.0, violation=2.0, tail_guard=2.0),
    Objective(cvar99=0.05, violation=2.0, tail_guard=2.0),
    Objective(cvar99=0.1, violation=2.0, tail_guard=5.0),
    Objective(cvar99=0.2, violation=1.0, tail_guard=5.0),
    Objective(cvar99=0.3, violation=1.0, tail_guard=5.0),
    Objective(cvar99=0.0, violation=30.0, tail_guard=0.0),
)
"""From eager for the mean to careful with the tail, and one for SLOs at any price; validation
decides between them."""


@dataclass(frozen=True, kw_only=True)
class SearchStudy:
    """How many searches, how long, on what traffic, and what the one that is kept must satisfy."""

    seeds: int = 3
    """Independent searches per objective; 0: the hand rule itself is kept."""
    objectives: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Which of the objectives to search with: 0 is eager for the mean, 4 careful with the tail, 5
    wants SLOs attained at any price; give it a `p99_margin` that lets it."""
    generations: int = 50
    streams: int = 6
    """Streams per generation, of 5000 requests each."""
    load_range: tuple[float, float] = (1.0, 1.0)
    """Range of factors on the scenario's arrival rate."""
    speed_range: tuple[float, float] = (1.0, 1.0)
    """Range of factors on the speed of every replica of a fleet."""
    scrape_range: tuple[float, float] | None = None
    """Range of a fleet's scrape interval, seconds."""
    slo_terms: bool = True
    """Search the prices of likely SLO violations too, on a fleet."""
    violation_s: float | None = None
    """Seconds that a share of 1 of SLO violations costs; None: what each objective says, and
    what the score says in choosing between them."""
    p99_margin: float = 0.01
    """How far p99 may exceed that of the hand rule, as a fraction: at the upper end of
    its 95 % interval over validation streams, and on the recorded training part where found."""

    @property
    def price_s(self) -> float:
        """What a share of 1 of SLO violations costs in choosing, seconds."""
        return metrics.VIOLATION_WEIGHT_S if self.violation_s is None else self.violation_s


@dataclass(frozen=True)
class FinishedSearch:
    """What a search found, and what it does on the validation streams."""

    row: Row
    weights: tuple[float, ...]


def run_study(scenario: Scenario, study: SearchStudy, jobs: int = 1) -> list[FinishedSearch]:
    """Run all searches in so many processes; last comes the hand rule, which every one began with.

    No champion is worse on validation than where it began.
    """
    objectives = [OBJECTIVES[index] for index in study.objectives]
    tasks = list(itertools.product(objectives, range(study.seeds)))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(search, scenario, study, *task) for task in tasks]
        found = [future.result() for future in futures]
    return [*found, untrained(scenario)]


def search(
    scenario: Scenario, study: SearchStudy, objective: Objective, seed: int
) -> FinishedSearch:
    """Run one search to the end and judge it on the validation streams."""
    servers = server_model(scenario)
    start = servers.hand_weights()
    if study.slo_terms:
        start += (0.0,) * servers.num_slo_weights
    if study.violation_s is not None:
        objective = replace(objective, violation=study.violation_s)
    config = SearchConfig(
        start=start,
        objective=objective,
        streams_per_generation=study.streams,
        num_generations=study.generations,
        randomisation=Randomisation(
            load_factor=study.load_range,
            speed_factor=study.speed_range,
            scrape_interval_s=study.scrape_range,
        ),
    )
    policy = PolicySearch(scenario, config, seed)
    for _ in range(study.generations):
        policy.step()
    prices = {f"objective_{name}": value for name, value in asdict(objective).items()}
    row: Row = {"seed": seed, "env_steps": policy.env_steps, **prices, **_validate(policy, start)}
    return FinishedSearch(row, tuple(policy.mean.tolist()))


def untrained(scenario: Scenario) -> FinishedSearch:
    """The hand rule itself: what ships where nothing that was searched passes the gate."""
    start = server_model(scenario).hand_weights()
    rule = PolicySearch(scenario, SearchConfig(start=start))
    prices = {f"objective_{name}": 0.0 for name in asdict(OBJECTIVES[0])}
    row = _validate(rule, start)
    del row[RULES_LOST_TO]  # Untuned it may do better at half load, and yet not at the whole.
    return FinishedSearch({"seed": 0, "env_steps": 0, **prices, **row}, start)


def _validate(policy: PolicySearch, start: tuple[float, ...]) -> dict[str, float]:
    """Compare what a search found with the hand rule on streams that it was not trained on."""
    rule = PolicySearch(policy.scenario, SearchConfig(start=start))
    source = StreamSource(policy.scenario)
    return PairedScore(source, rule.artifact(), NUM_VALIDATION_STREAMS)(policy.artifact())


def best_of(found: Sequence[FinishedSearch], study: SearchStudy) -> FinishedSearch:
    """The search that is kept."""
    chosen = choose([one.row for one in found], study.price_s, study.p99_margin)
    assert chosen is not None, "the rule itself is never refused"
    return found[chosen]


def export(scenario: Scenario, best: FinishedSearch) -> PolicyArtifact:
    """The policy that a search found, with what it scored and where it comes from."""
    policy = PolicySearch(scenario, seed=int(best.row["seed"]))
    policy.mean = np.array(best.weights)
    scored = {key: float(value) for key, value in best.row.items() if not isinstance(value, str)}
    made = {**lineage(), **lineage_of(scenario)}
    if best.row["env_steps"] == 0:
        made["rule"] = server_model(scenario).hand_rule
    return policy.artifact(scored, made)

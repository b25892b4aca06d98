"""Several searches of a scenario's policy, and the choice of one: how champions are made.

Searches differ by seed and by objective. Each begins at the best tuned rule that the policy can be.
Each is judged where nothing was searched, and `tokenyard.routing.choice.choose` keeps one or none.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from tokenyard.problem import Row
from tokenyard.provenance import lineage
from tokenyard.routing.artifact import PolicyArtifact, lineage_of
from tokenyard.routing.choice import Judge, choose, recorded
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.gate import NUM_STREAMS
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.search import (
    PolicySearch,
    SearchConfig,
    SearchObjective,
    started_at,
    started_at_best_rule,
)
from tokenyard.routing.simulator.streams import StreamSource

OBJECTIVES = (
    SearchObjective(cvar99=0.0, violation=2.0, tail_guard=2.0),
    SearchObjective(cvar99=0.05, violation=2.0, tail_guard=2.0),
    SearchObjective(cvar99=0.1, violation=2.0, tail_guard=5.0),
    SearchObjective(cvar99=0.2, violation=1.0, tail_guard=5.0),
    SearchObjective(cvar99=0.3, violation=1.0, tail_guard=5.0),
    SearchObjective(cvar99=0.0, violation=30.0, tail_guard=0.0),
    SearchObjective(cvar99=0.0, violation=5.0, tail_guard=0.0),
)
"""From eager for the mean to careful with the tail, one for SLOs at any price, and one for mean and
SLOs that lets the tail be; validation decides between them."""


@dataclass(frozen=True, kw_only=True)
class SearchStudy:
    """How many searches, how long, on what traffic, and what the one that is kept must satisfy."""

    seeds: int = 2
    """Independent searches per objective."""
    objectives: tuple[int, ...] = (0, 2)
    """Which of the objectives to search with: 0 is eager for the mean, 4 careful with the tail, 5
    wants SLOs attained at any price, 6 wants both and lets the tail be."""
    start: str | None = None
    """Rule that searches begin at (`marginal_delay@0:3+wspt@60`); None: the best tuned one."""
    generations: int = SearchConfig.num_generations
    load_range: tuple[float, float] = (0.5, 1.15)
    """Range of factors on the scenario's arrival rate: a policy is to travel."""
    streams: int = NUM_STREAMS
    """Validation streams at every load."""


@dataclass(frozen=True)
class FinishedSearch:
    """What a search found, and what it does on the validation streams."""

    row: Row
    policy: PolicyArtifact


def run_study(scenario: Scenario, study: SearchStudy, jobs: int = 1) -> list[FinishedSearch]:
    """Run all searches in `jobs` processes, then judge their policies.

    Raises:
        ValueError: A number is out of its range.
    """
    for name, least in (("seeds", 1), ("generations", 0), ("streams", 1)):
        if getattr(study, name) < least:
            raise ValueError(f"--{name} {getattr(study, name)} must be at least {least}")
    wrong = [index for index in study.objectives if not 0 <= index < len(OBJECTIVES)]
    if wrong or not study.objectives:
        reason = f"no {wrong[0]} in them" if wrong else "give one"
        raise ValueError(f"--objectives are 0 to {len(OBJECTIVES) - 1}: {reason}")
    objectives = [OBJECTIVES[index] for index in study.objectives]
    tasks = list(itertools.product(objectives, range(study.seeds)))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(search, scenario, study, *task) for task in tasks]
        searches = [future.result() for future in futures]
    judge = Judge(StreamSource(scenario), study.streams)
    finished = []
    for (objective, seed), (policy, env_steps) in zip(tasks, searches, strict=True):
        scored = judge(policy)
        prices = {f"objective_{name}": value for name, value in asdict(objective).items()}
        made = {**lineage(), **lineage_of(scenario), "beats": judge.bar, "seed": str(seed)}
        row: Row = {**scored, **prices, "seed": seed, "env_steps": env_steps}
        finished.append(FinishedSearch(row, policy.described(recorded(scored) | prices, made)))
    return finished


def search(
    scenario: Scenario, study: SearchStudy, objective: SearchObjective, seed: int
) -> tuple[PolicyArtifact, int]:
    """Run one search to the end.

    Returns:
        What it found, and how many requests it routed.
    """
    config = SearchConfig(
        objective=objective,
        num_generations=study.generations,
        randomisation=Randomisation(load_factor=study.load_range),
    )
    if study.start is None:
        config = started_at_best_rule(scenario, config)
    else:
        config = started_at(scenario, study.start, config)
    policy = PolicySearch(scenario, config, seed)
    for _ in range(study.generations):
        policy.step()
    return policy.artifact(), policy.env_steps


def best_of(searches: list[FinishedSearch]) -> FinishedSearch | None:
    """Return the search to keep; None if none beats the rules."""
    chosen = choose([search.row for search in searches])
    return None if chosen is None else searches[chosen]

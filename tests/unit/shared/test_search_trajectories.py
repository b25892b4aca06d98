"""Where every search went on a small instance, recorded before they had one loop.

Run this file to record again, and say in the commit why a search has changed.
"""

import json
from pathlib import Path

import pytest
from unit.region_builders import a_scenario

from tokenyard.regions.policies import BEST_RULE
from tokenyard.regions.search import KnobSearch, RegionSearchConfig
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import PolicySearch, SearchConfig

FILE = Path(__file__).with_name("search_trajectories.json")


def trajectory(search, generations=3):
    """What every generation says, and the distribution that the next one draws from."""
    told = []
    for _ in range(generations):
        found = search.step()
        told.append([*found.values(), *search.mean.tolist(), *search.std.tolist()])
    return told


def of_routing():
    config = SearchConfig(
        population=6, num_elites=3, streams_per_generation=2, requests_per_stream=200,
        num_generations=5,
    )  # fmt: skip
    return trajectory(PolicySearch(load_scenario("poisson_085"), config, seed=4))


def of_regions():
    config = RegionSearchConfig(
        population=4, num_elites=2, slots=10, spread=0.7, noise=0.3, num_generations=4
    )
    return trajectory(KnobSearch(BEST_RULE, [a_scenario(num_slots=12)], config, 3))


SEARCHES = {
    "routing": of_routing,
    "regions": of_regions,
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_goes_where_it_went_before(name):
    recorded = json.loads(FILE.read_text(encoding="utf-8"))[name]
    for now, before in zip(SEARCHES[name](), recorded, strict=True):
        assert now == pytest.approx(before, rel=1e-9, abs=1e-12)


if __name__ == "__main__":
    found = {name: search() for name, search in SEARCHES.items()}
    FILE.write_text(json.dumps(found) + "\n", encoding="utf-8")

import json

import numpy as np
import pytest

from tokenyard.cross_entropy import CrossEntropy

TARGET = np.array([0.3, -0.2])


def a_search(**changes):
    known = {"population": 20, "num_elites": 5, "seed": 3, "num_generations": 12}
    return CrossEntropy(np.zeros(2), np.full(2, 0.5), **(known | changes))


def distance(parameters):
    return float(((parameters - TARGET) ** 2).sum())


def advance(search):
    candidates = search.draw(search.rng())
    search.update(candidates, np.array([distance(one) for one in candidates]))


def test_the_centre_moves_to_where_costs_are_low():
    search = a_search()
    for _ in range(12):
        advance(search)
    assert search.mean == pytest.approx(TARGET, abs=0.01)


def test_a_search_that_went_through_json_goes_on_as_if_nothing_had_happened():
    one, other = a_search(), a_search(seed=9)
    advance(one)
    other.restore(json.loads(json.dumps(one.state())))
    advance(one), advance(other)
    assert other.state() == one.state()


def test_the_centre_is_tried_first():
    candidates = a_search().draw(np.random.default_rng(0))
    assert candidates.shape == (20, 2)
    assert candidates[0].tolist() == [0.0, 0.0]


def test_noise_fades_over_the_generations():
    same = np.ones((20, 2))
    unit = np.array([1.0, 0.5])
    fading = a_search(noise=0.4, num_generations=2)
    per_weight = a_search(noise=0.4, num_generations=2, noise_unit=unit)
    for search in (fading, per_weight):
        search.update(same, np.zeros(20))
    assert fading.std == pytest.approx([0.2, 0.2])
    assert per_weight.std == pytest.approx(0.2 * unit)
    fading.update(same, np.zeros(20))
    assert fading.std == pytest.approx([0.0, 0.0])

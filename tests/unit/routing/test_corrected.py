"""The corrected policy: the rule without its network, and one function wherever it decides."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.routing.artifact import (
    PolicyArtifact,
    feature_scaling,
    learned_policy,
)
from tokenyard.routing.equivariant import Observed, scorer_inputs
from tokenyard.routing.observation import (
    NUM_COLUMNS,
    NUM_MARGINAL_SLO_WEIGHTS,
    NUM_MARGINAL_WEIGHTS,
    NUM_REQUEST_FEATURES,
    ROUTABLE,
    encode,
    observation_size,
)
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.scores.linear import marginal_scores
from tokenyard.routing.scores.residual import LAYOUT, fold, make_player, residual_scores
from tokenyard.routing.search import PolicySearch, SearchConfig
from tokenyard.routing.simulator.run import run_policy
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.routing.types import OrderingPolicy
from tokenyard.routing.validation import Validation

MIXED, CHURN, SERIAL = "azure_code_mixed_gpus", "churn", "poisson_085"
ORDER = np.array([8.0, 5.0, 2.0, 4.0])
seeds = st.integers(0, 2**32 - 1)


def untrained(scenario_name=MIXED, num_weights=NUM_MARGINAL_WEIGHTS, hidden=8):
    """The rule of least marginal delay, and a network that adds nothing."""
    scenario = load_scenario(scenario_name)
    start = SearchConfig(start=(0.0,) * num_weights)
    rule = PolicySearch(scenario, start).artifact()
    metadata = rule.metadata.model_copy(
        update={
            "kind": "corrected",
            "activation": "tanh",
            "scaling": feature_scaling(StreamSource(scenario).scaler),
        }
    )
    arrays = dict(rule.arrays)
    for kind, size in (("request", NUM_REQUEST_FEATURES), ("replica", LAYOUT.num_features)):
        arrays |= {f"{kind}_mean": np.zeros(size), f"{kind}_std": np.ones(size)}
    widths = (LAYOUT.num_inputs, hidden, hidden, 1)
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        arrays |= {f"w{layer}": np.zeros((outputs, inputs)), f"b{layer}": np.zeros(outputs)}
    return PolicyArtifact(metadata, arrays)


def some_artifact(scenario_name=MIXED, seed=0, size=0.3):
    """A policy whose every number does something."""
    rng = np.random.default_rng(seed)
    fresh = untrained(scenario_name, NUM_MARGINAL_SLO_WEIGHTS)
    arrays = {
        name: np.abs(array) + rng.uniform(0.5, 2.0, array.shape)
        if name.endswith("_std")
        else rng.normal(0.0, size, array.shape)
        for name, array in fresh.arrays.items()
    }
    return PolicyArtifact(fresh.metadata, arrays)


def short_streams(source, count):
    drawn = [source.sample(600, stream_rng(0, "validation", index)) for index in range(count)]
    return StreamSet(drawn, "drawn")


def a_table(rng, num_replicas=4):
    table = rng.uniform(0.1, 30.0, (num_replicas, NUM_COLUMNS))
    table[:, ROUTABLE] = rng.random(num_replicas) < 0.8
    table[:, ROUTABLE][rng.integers(num_replicas)] = 1.0
    return table


def scored(artifact, table, request=None):
    correction = fold(artifact.arrays, artifact.layers)
    player = make_player(correction, len(table), 2000.0, 3.0)
    features = np.zeros(NUM_REQUEST_FEATURES) if request is None else request
    best = residual_scores(player, features, 900.0, 40.0, table)
    return best, player.scores


@given(seeds)
@settings(max_examples=scaled(50))
def test_the_costs_are_those_of_a_plain_network_on_the_plain_observation(seed):
    rng = np.random.default_rng(seed)
    artifact, table = some_artifact(), a_table(rng)
    request = rng.normal(size=NUM_REQUEST_FEATURES)
    best, costs = scored(artifact, table, request)

    rule = np.empty(4)
    arrays = artifact.arrays
    marginal_scores(arrays["weights"], 900.0, 40.0, 2000.0, 3.0, table, rule)
    observation = np.empty(observation_size(4, whole=True), dtype=np.float32)
    encode(request, 900.0, 940.0, table, True, observation)
    seen = LAYOUT.split_observation(observation.astype(np.float64), np)
    x = scorer_inputs(
        Observed(
            (seen.request - arrays["request_mean"]) / arrays["request_std"],
            (seen.replicas - arrays["replica_mean"]) / arrays["replica_std"],
            seen.routable,
        ),
        np,
    )
    (w0, b0), (w1, b1), (w2, _) = artifact.layers
    added = (np.tanh(np.tanh(x @ w0.T + b0) @ w1.T + b1) @ w2.T)[:, 0]
    expected = np.where(table[:, ROUTABLE] > 0.0, rule - added, np.inf)
    np.testing.assert_allclose(costs, expected, rtol=1e-9, atol=1e-9)
    assert best == np.argmin(expected)


@given(seeds)
@settings(max_examples=scaled(50))
def test_a_permutation_of_replicas_permutes_the_costs(seed):
    rng = np.random.default_rng(seed)
    table, artifact = a_table(rng), some_artifact()
    order = rng.permutation(4)
    np.testing.assert_allclose(
        scored(artifact, table[order])[1], scored(artifact, table)[1][order], rtol=1e-9
    )


def test_what_is_not_routable_changes_nothing():
    rng = np.random.default_rng(0)
    table, artifact = a_table(rng), some_artifact()
    table[:, ROUTABLE] = [1, 0, 1, 1]
    before = scored(artifact, table)[1]
    table[1, :ROUTABLE] *= 3.0
    np.testing.assert_array_equal(scored(artifact, table)[1], before)
    assert before[1] == np.inf


def test_without_a_network_it_is_the_rule():
    artifact = untrained()
    table, rule = a_table(np.random.default_rng(1)), np.empty(4)
    best = marginal_scores(np.zeros(NUM_MARGINAL_WEIGHTS), 900.0, 40.0, 2000.0, 3.0, table, rule)
    assert scored(artifact, table)[0] == best
    np.testing.assert_array_equal(scored(artifact, table)[1], rule)


@pytest.mark.parametrize("order", [None, ORDER])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (MIXED, "corrected"),
        ("multi_turn_prefix", "corrected"),
        (SERIAL, "corrected"),
        (MIXED, "marginal"),
        (SERIAL, "marginal"),
    ],
)
def test_kernel_and_served_policy_decide_and_order_alike(name, kind, order):
    """The one runs in the simulator on its rows, the other on snapshots and remembered requests."""
    scenario = load_scenario(name)
    source = StreamSource(scenario)
    artifact = some_artifact(name)
    if kind == "marginal":
        start = tuple(artifact.arrays["weights"].tolist())
        artifact = PolicySearch(scenario, SearchConfig(start=start)).artifact()
    if order is not None:
        artifact = replace(artifact, arrays={**artifact.arrays, "order": order})
    assert isinstance(learned_policy(artifact), OrderingPolicy) == artifact.orders
    streams = short_streams(source, 2)
    runs = run_policy(scenario, streams, lambda rng: learned_policy(artifact), 0)
    rows = Validation(source, 2, streams=streams).rows(artifact)
    served = [run.outcomes.response_s.mean() for run in runs]
    np.testing.assert_allclose(rows[:, 1], served, rtol=1e-12)


def test_it_decides_between_any_number_of_replicas():
    """Replicas that are down are not offered, so that the number changes within a stream."""
    scenario = load_scenario(CHURN)
    streams = short_streams(StreamSource(scenario), 1)
    artifact = some_artifact(CHURN)
    (run,) = run_policy(scenario, streams, lambda rng: learned_policy(artifact), 0)
    assert len(np.unique(run.outcomes.server)) > 1


def test_it_survives_being_saved(tmp_path):
    artifact = some_artifact()
    artifact.save(tmp_path / "policy.npz")
    found, _ = PolicyArtifact.champion(MIXED, path=tmp_path / "policy.npz")
    assert found.sha256 == artifact.sha256
    assert found.needs_engine


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": np.zeros(3)}, "weights"),
        ({"w2": None, "b2": None}, "outputs where there must be"),
        ({"replica_mean": np.zeros(7), "replica_std": np.ones(7)}, "replica_mean"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, words):
    artifact = some_artifact()
    arrays = {k: v for k, v in (dict(artifact.arrays) | change).items() if v is not None}
    with pytest.raises(ValueError, match=words):
        PolicyArtifact(artifact.metadata, arrays)

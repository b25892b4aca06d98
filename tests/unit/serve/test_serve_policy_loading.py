"""Which policy is served, and what is refused before anything starts."""

import pickle

import numpy as np
import pytest
from unit.serve_builders import a_baseline, a_trained_policy, linear_artifact, network_artifact

from serve_app.policy import loading as loading_module
from serve_app.policy.loading import RANDOMISED, TUNED, from_artifact, resolve_policy
from serve_app.policy.runner import warm_up
from tokenyard.artifact import ArtifactError, RegisteredPolicy
from tokenyard.routing.artifact import DEFAULT_RULE, DEFAULT_SERVER_RULE
from tokenyard.routing.metadata import FeatureScaling
from tokenyard.routing.policies import BASELINES, load_tuned
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.types import ReplicaSnapshot, Request


def test_a_policy_file_is_served_under_its_name_and_hash(tmp_path):
    artifact = linear_artifact()
    path = tmp_path / "mine.npz"
    artifact.save(path)
    card = resolve_policy(str(path), "poisson_085").card
    assert (card.name, card.sha256, card.kind) == ("mine", artifact.sha256, "marginal")
    assert card.source == f"file {path}"


@pytest.mark.parametrize("content", [None, b"", b"not a zip file"])
def test_a_missing_or_broken_policy_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "bad.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"bad\.npz"):
        resolve_policy(str(path), "poisson_085")


def test_sed_is_served_in_its_place_when_told_to_and_says_why(tmp_path):
    loaded = resolve_policy(str(tmp_path / "gone.npz"), "poisson_085", stand_in="sed")
    assert loaded.card.name == "sed"
    assert "gone.npz" in loaded.card.startup_fallback
    assert "does not exist" in loaded.card.startup_fallback


def test_a_mistyped_name_is_refused_even_with_a_fallback():
    with pytest.raises(ValueError, match=r"unknown policy 'sedd'.*round_robin"):
        resolve_policy("sedd", "poisson_085", stand_in="sed")
    with pytest.raises(ValueError, match="unknown scenario"):
        resolve_policy("sed", "poison", stand_in="sed")


def test_the_champion_of_a_registry_is_preferred(tmp_path, monkeypatch):
    registered = tmp_path / "registered.npz"
    artifact = linear_artifact(trainer="ppo")
    artifact.save(registered)
    asked = []

    def find(*wanted):
        asked.append(wanted)
        return RegisteredPolicy(registered, "3", "champion", "the-run")

    monkeypatch.setattr(loading_module, "find_registered", find)
    card = resolve_policy("champion", "poisson_085", registry_uri="sqlite:///x.db").card
    assert asked == [("sqlite:///x.db", "routing", "poisson_085", "champion")]
    assert card.mlflow_run == card.reference.mlflow_run == "the-run"
    assert card.sha256 == artifact.sha256
    assert card.source == "registry tokenyard-routing-poisson_085@champion"


@pytest.mark.parametrize("policy", ["champion", "candidate"])
def test_what_ships_is_served_where_the_registry_is_not_there_and_the_card_says_so(
    tmp_path, policy
):
    missing = f"sqlite:///{tmp_path}/none.db"
    with pytest.raises(ArtifactError, match="there is no such file"):
        resolve_policy(policy, "azure_code_slo", missing)
    card = resolve_policy(policy, "azure_code_slo", missing, stand_in="sed").card
    assert (card.name, card.source) == ("champion", "shipped routing/azure_code_slo")
    assert card.registry_error == f"registry {missing}: there is no such file"
    assert (card.mlflow_run, card.startup_fallback) == (None, None)
    assert not list(tmp_path.iterdir())


def untuned(tmp_path, scenario):
    """Write a shipped scenario under a name for which nothing was trained or tuned."""
    told = load_scenario(scenario).model_copy(update={"name": "mine"})
    path = tmp_path / "mine.yaml"
    path.write_text(told.model_dump_json(exclude_none=True, exclude_defaults=True))
    return str(path)


@pytest.mark.parametrize(
    ("scenario", "rule"),
    [
        ("poisson_050", "sed_linear+boost"),
        ("local_cpu", "tuned_marginal_delay+sjf"),
        ("conversation_mixed_gpus", "tuned_marginal_delay+boost"),
        ("poisson_085", DEFAULT_SERVER_RULE),
        ("churn", DEFAULT_RULE),
    ],
)
def test_where_no_champion_is_trained_a_rule_is_served_by_name(scenario, rule, tmp_path):
    name = untuned(tmp_path, scenario) if rule in (DEFAULT_RULE, DEFAULT_SERVER_RULE) else scenario
    loaded = pickle.loads(pickle.dumps(resolve_policy("champion", name)))
    card = loaded.card
    assert (card.name, card.kind, card.source) == (rule, "baseline", f"the rule {rule}")
    assert (card.num_replicas, card.startup_fallback) == (None, None)
    assert card.slo_response_s == load_scenario(name).slo_response_s
    assert loaded.predicted_total_tokens(1000) > 1000
    warm_up(loaded)
    policy = loaded.make(np.random.default_rng(0))
    some = [ReplicaSnapshot(f"r{i}", 1000.0 + i, 1, 5, 0, 0, 0.0) for i in range(7)]
    assert policy.route(Request(0.0, 10, 20.0), some) in range(7)


def test_an_order_behind_a_champion_that_is_a_rule_takes_the_place_of_its_own(tmp_path):
    card = resolve_policy("champion+wspt@5", untuned(tmp_path, "churn")).card
    assert (card.name, card.source) == ("marginal_delay+wspt@5", "the rule marginal_delay+wspt@5")


def test_a_policy_that_saw_true_lengths_is_refused_without_a_predictor():
    artifact = linear_artifact(output_length="oracle", predictor=None)
    with pytest.raises(ArtifactError, match="'oracle' but brings no predictor"):
        from_artifact("test", artifact, "a test", load_scenario("poisson_085"))


def _tuned_for_poisson():
    try:
        return bool(load_tuned("poisson_085"))
    except ValueError:
        return False


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_every_baseline_can_be_served_and_survives_the_trip_to_the_replica(name):
    if name in TUNED and not _tuned_for_poisson():
        pytest.skip("scenarios/tuned/routing/poisson_085.json is not there")
    loaded = pickle.loads(pickle.dumps(a_baseline(name)))
    warm_up(loaded)
    assert loaded.card.num_replicas == (3 if name in TUNED else None)
    assert loaded.draws == (name in RANDOMISED)


@pytest.mark.parametrize("artifact", [linear_artifact(), network_artifact()])
def test_a_trained_policy_survives_the_trip_to_the_replica(artifact):
    loaded = a_trained_policy(artifact)
    sent = pickle.loads(pickle.dumps(loaded))
    assert sent.card == loaded.card
    snapshots = [ReplicaSnapshot(str(i), 5000.0, 1, 5, 0, i, 900.0 * i) for i in range(3)]
    request = Request(0.0, 100, 300.0)
    decisions = [
        s.make(np.random.default_rng(0)).decide(request, snapshots) for s in (loaded, sent)
    ]
    assert decisions[0].replica == decisions[1].replica
    np.testing.assert_array_equal(decisions[0].scores, decisions[1].scores)


def test_the_baselines_that_draw_are_those_that_are_listed():
    snapshots = [ReplicaSnapshot(str(i), 5000.0, 1, 5, 0, 0, 0.0) for i in range(8)]
    request = Request(0.0, 100, 300.0)
    drawing = set()
    for name in set(BASELINES) - TUNED:
        loaded = a_baseline(name)
        routes = [loaded.make(np.random.default_rng(seed)) for seed in range(8)]
        if len({policy.route(request, snapshots) for policy in routes}) > 1:
            drawing.add(name)
    assert drawing == RANDOMISED


@pytest.mark.parametrize("calendar", [False, True])
def test_a_policy_sees_the_calendar_only_where_its_training_did(calendar):
    medians = (12.0, 3.0, 15.0, 26.0) if calendar else (0.0,) * 4
    scaling = FeatureScaling(medians=medians + (0.0,) * 12, scales=(1.0,) * 16)
    loaded = a_trained_policy(network_artifact(scaling=scaling))
    policies = [loaded.make(np.random.default_rng(0)) for _ in range(2)]
    snapshots = [ReplicaSnapshot(str(i), 5000.0, 1, 5, 0, 0, 0.0) for i in range(3)]
    noon_and_evening = [1.7e9, 1.7e9 + 6 * 3600]
    scores = [
        policy.decide(Request(at_s, 100, 300.0), snapshots).scores
        for policy, at_s in zip(policies, noon_and_evening, strict=True)
    ]
    assert np.array_equal(*scores) != calendar

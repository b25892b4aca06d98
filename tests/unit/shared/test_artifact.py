import json
import zipfile
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from tokenyard import artifact as reading
from tokenyard.allocation import artifact as of_allocation
from tokenyard.artifact import (
    ArtifactError,
    RegisteredPolicy,
)
from tokenyard.regions import artifact as of_regions
from tokenyard.routing import artifact as of_routing
from tokenyard.routing.artifact import PolicyArtifact, learned_policy
from tokenyard.routing.metadata import ArtifactMetadata, FeatureScaling
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS, NUM_REQUEST_FEATURES
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request


def a_linear_policy(weights=None, **changes):
    metadata = ArtifactMetadata(
        **{
            "kind": "marginal", "scenario": "poisson_085", "trainer": "policy_search",
            "num_replicas": 3, "slo_response_s": 2.0, "mean_total_tokens": 2000.0,
            "output_length": "by_context",
        } | changes
    )  # fmt: skip
    weights = np.zeros(NUM_MARGINAL_WEIGHTS) if weights is None else weights
    return PolicyArtifact(metadata, {"weights": weights})


def a_network(arrays=None, **changes):
    ones = tuple([1.0] * NUM_REQUEST_FEATURES)
    metadata = a_linear_policy(kind="marginal").metadata.model_copy(
        update={
            "kind": "mlp", "scaling": FeatureScaling(medians=ones, scales=ones),
            "expected_finish": False,
        } | changes
    )  # fmt: skip
    rng = np.random.default_rng(0)
    layers = {"w0": rng.normal(size=(8, 34)), "b0": np.zeros(8)}
    layers |= {"w1": rng.normal(size=(3, 8)), "b1": np.zeros(3)}
    return PolicyArtifact(metadata, {"mean": np.zeros(34), "std": np.ones(34)} | (arrays or layers))


def snapshots(*waits):
    return [
        ReplicaSnapshot(f"r{i}", 1000.0 * (i + 1), 1, 5, int(w > 0), 1, 1000.0, w)
        for i, w in enumerate(waits)
    ]


A_REQUEST = Request(arrival_s=1.0, context_tokens=900, predicted_total_tokens=1000.0)


def test_the_folder_of_a_policy_is_created(tmp_path):
    """What took an hour to search is not lost for want of one."""
    path = tmp_path / "new" / "p.npz"
    a_linear_policy().save(path)
    assert PolicyArtifact.load(path).sha256 == a_linear_policy().sha256


@pytest.mark.parametrize("make", [a_linear_policy, a_network])
def test_a_saved_policy_comes_back_equal(make, tmp_path):
    make().save(tmp_path / "p.npz")
    loaded = PolicyArtifact.load(tmp_path / "p.npz")
    assert loaded.metadata == make().metadata
    assert loaded.sha256 == make().sha256
    before = learned_policy(make()).decide(A_REQUEST, snapshots(0.5, 1.0, 0.0))
    after = learned_policy(loaded).decide(A_REQUEST, snapshots(0.5, 1.0, 0.0))
    assert after.replica == before.replica
    np.testing.assert_array_equal(after.scores, before.scores)


def test_equal_policies_give_equal_bytes(tmp_path):
    for name in "ab":
        a_network().save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_another_weight_gives_another_hash():
    assert a_linear_policy().sha256 != a_linear_policy(np.ones(NUM_MARGINAL_WEIGHTS)).sha256


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"gone\.npz does not exist"):
        PolicyArtifact.load(tmp_path / "gone.npz")


def test_a_broken_file_is_named_with_the_reason(tmp_path):
    (tmp_path / "p.npz").write_bytes(b"not a zip file at all")
    with pytest.raises(ArtifactError, match=r"p\.npz: it is no npz file"):
        PolicyArtifact.load(tmp_path / "p.npz")


@pytest.mark.parametrize("times", [1, 2])
def test_a_stumble_of_the_interpreter_is_no_broken_file(times, tmp_path, monkeypatch):
    path, read = tmp_path / "policy.npz", reading._arrays_in
    a_linear_policy().save(path)
    left = [SystemError("AST constructor recursion depth mismatch")] * times

    def stumbles(data):
        if left:
            raise left.pop()
        return read(data)

    monkeypatch.setattr(reading, "_arrays_in", stumbles)
    if times == 1:
        assert PolicyArtifact.load(path).sha256 == a_linear_policy().sha256
    else:
        with pytest.raises(ArtifactError, match="cannot be read: AST"):
            PolicyArtifact.load(path)


def test_a_truncated_file_is_refused(tmp_path):
    a_network().save(tmp_path / "p.npz")
    whole = (tmp_path / "p.npz").read_bytes()
    (tmp_path / "p.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError):
        PolicyArtifact.load(tmp_path / "p.npz")


def test_a_file_of_another_format_version_says_which_one_is_read(tmp_path):
    text = json.loads(a_linear_policy().metadata.model_dump_json()) | {"format_version": 9}
    np.savez(tmp_path / "p.npz", metadata=np.array(json.dumps(text)))
    with pytest.raises(ArtifactError, match="format version 9; this release reads 1"):
        PolicyArtifact.load(tmp_path / "p.npz")


def test_a_zip_without_metadata_is_no_policy(tmp_path):
    with zipfile.ZipFile(tmp_path / "p.npz", "w"):
        pass
    with pytest.raises(ArtifactError, match="no metadata"):
        PolicyArtifact.load(tmp_path / "p.npz")


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        a_linear_policy(np.full(NUM_MARGINAL_WEIGHTS, np.nan))


def test_layers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"'w0' has shape \(8, 33\)"):
        a_network({"w0": np.zeros((8, 33)), "b0": np.zeros(8)})
    with pytest.raises(ValueError, match="8 outputs where there must be 3"):
        a_network({"w0": np.zeros((8, 34)), "b0": np.zeros(8)})


def test_a_file_of_a_kind_that_is_not_known_is_refused(tmp_path):
    artifact = a_linear_policy()
    metadata = artifact.metadata.model_copy(update={"kind": "generic"})
    object.__setattr__(artifact, "metadata", metadata)
    artifact.save(tmp_path / "old.npz")
    with pytest.raises(ArtifactError, match=r"old\.npz.*kind: Input should be 'marginal', 'mlp'"):
        PolicyArtifact.load(tmp_path / "old.npz")


def test_a_network_of_slots_refuses_replicas_that_batch():
    batching = replace(snapshots(0.0)[0], engine=EngineSnapshot(*[0.1] * 4, 512, 1e4, 0, 0, 0, 0))
    with pytest.raises(ValueError, match="snapshots without `engine`"):
        learned_policy(a_network()).route(A_REQUEST, [*snapshots(0.0, 0.0), batching])


def test_a_policy_refuses_another_number_of_replicas_than_it_was_trained_on():
    with pytest.raises(ValueError, match="2 replicas offered to a policy that was trained on 3"):
        learned_policy(a_network()).route(A_REQUEST, snapshots(0.0, 0.0))


@pytest.mark.parametrize("changes", [{"residual_scale": 3.0}, {"expected_finish": True}])
def test_networks_of_earlier_releases_that_read_finish_times_are_refused(changes):
    with pytest.raises(ValueError, match="no longer shown finish times; train another one"):
        a_network(**changes)


def test_champion_prefers_the_path_then_the_registry_then_what_ships(tmp_path):
    named, registered = tmp_path / "named.npz", tmp_path / "registered.npz"
    a_linear_policy(trainer="ppo").save(named)
    a_linear_policy(trainer="dqn").save(registered)
    version = RegisteredPolicy(registered, "1", "champion", None)
    by_path = PolicyArtifact.champion("azure_code_slo", named, lambda name: version)
    assert (by_path[0].metadata.trainer, by_path[1]) == ("ppo", f"file {named}")
    asked = []
    lookup = lambda name: asked.append(name) or version  # noqa: E731
    found, source = PolicyArtifact.champion("azure_code_slo", registry=lookup)
    assert found.metadata.trainer == "dqn"
    assert asked == ["tokenyard-routing-azure_code_slo"]
    assert source == "registry tokenyard-routing-azure_code_slo@champion"
    _, source = PolicyArtifact.champion("azure_code_slo", registry=lambda name: None)
    assert source == "shipped routing/azure_code_slo"


def test_champion_of_nothing_says_what_to_do():
    with pytest.raises(ArtifactError, match=r"no champion for routing/x.*sweep\.py"):
        PolicyArtifact.champion("x")


def test_where_nothing_is_trained_the_best_tuned_rule_is_named():
    assert of_routing.best_tuned_rule("poisson_085") == "marginal_in_order@2:3+boost@2:0.5"
    assert of_routing.best_tuned_rule("nowhere") is None


def test_a_policy_of_another_problem_is_refused_by_name(tmp_path):
    a_linear_policy().save(tmp_path / "p.npz")
    with pytest.raises(ArtifactError, match="a policy for routing, not for allocation"):
        of_allocation.AllocationArtifact.load(tmp_path / "p.npz")


@pytest.mark.parametrize(
    ("problem", "metadata"),
    [
        (of_routing, ArtifactMetadata),
        (of_allocation, of_allocation.AllocationMetadata),
        (of_regions, of_regions.RegionMetadata),
    ],
)
def test_the_table_of_kinds_has_every_kind_that_a_file_may_be_of(problem, metadata):
    assert set(problem.KINDS) == set(get_args(metadata.model_fields["kind"].annotation))

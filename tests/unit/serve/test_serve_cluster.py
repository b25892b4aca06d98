"""What a cluster file may say."""

from pathlib import Path

import pytest
import yaml

from serve_app.allocation.replica_sets import pool_of
from serve_app.allocation.transition import Held, Shape, gpus_held
from serve_app.app import GatewayOptions, find_cluster, registry_of
from serve_app.cluster import load_cluster
from tokenyard.config import shipped_names


def a_file(path, changes):
    """The shipped `local_cpu`, changed at dotted paths."""
    fields = load_cluster("local_cpu").model_dump(mode="json")
    for where, value in changes.items():
        *parents, last = where.split(".")
        inner = fields
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    path.write_text(yaml.safe_dump(fields))
    return str(path)


@pytest.mark.parametrize("name", shipped_names("serve_app", "clusters"))
def test_every_shipped_cluster_can_be_read(name):
    assert load_cluster(name).name == name


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel"])
def test_a_template_leaves_to_the_plan_how_a_replica_is_divided(name, tmp_path):
    several = {f"allocation.template.config.{name}": 2}
    with pytest.raises(ValueError, match=f"the plan sets {name}"):
        load_cluster(a_file(tmp_path / "two.yaml", several))


def test_a_replica_has_as_many_ranks_as_the_allocator_counts_gpus():
    template = load_cluster("local_cpu").allocation.template
    for tensor_parallel, pipeline_parallel in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 3)):
        shape = Shape(tensor_parallel, pipeline_parallel, 0.9)
        ranks = pool_of(template, shape).config.num_ranks
        assert ranks == gpus_held({shape: Held(wanted=1, ready=1)})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"allocation": None, "pools": []}, "give at least one pool"),
        ({"decide_only": True}, "decide_only serves no pools"),
    ],
)
def test_a_cluster_has_pools_or_only_decides(changes, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        load_cluster(a_file(tmp_path / "c.yaml", changes))


def test_a_class_waits_only_where_there_is_a_queue(tmp_path):
    hasty = {"name": "hasty", "response_s": 5, "max_wait_s": 1}
    changes = {"classes": [{"name": "default", "response_s": 30}, hasty]}
    with pytest.raises(ValueError, match="class 'hasty' has max_wait_s, but nothing waits"):
        load_cluster(a_file(tmp_path / "c.yaml", changes))
    found = load_cluster(a_file(tmp_path / "d.yaml", changes | {"queue": {}}))
    assert found.classes[1].max_wait_s == 1


@pytest.mark.parametrize("version", [0, 2, "one", [1]])
def test_a_cluster_file_of_another_release_says_which_one_is_read(version, tmp_path):
    with pytest.raises(ValueError, match=r"has format version .*; this release reads 1"):
        load_cluster(a_file(tmp_path / "c.yaml", {"format_version": version}))


def test_a_cluster_file_without_a_version_is_of_the_first(tmp_path):
    file = a_file(tmp_path / "c.yaml", {})
    assert "format_version: 1" in Path(file).read_text()
    Path(file).write_text(Path(file).read_text().replace("format_version: 1", ""))
    assert load_cluster(file).format_version == 1


def test_the_registry_is_that_of_the_environment_and_its_path_this_machines(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert registry_of(GatewayOptions()) is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert registry_of(GatewayOptions()) == "http://mlflow:5000"
    relative = GatewayOptions(registry="sqlite:///runs/mlflow.db")
    assert registry_of(relative) == f"sqlite:///{Path.cwd()}/runs/mlflow.db"


def test_a_candidate_is_asked_for_allocation_too(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    cluster = find_cluster(GatewayOptions(cluster="local_cpu", policy="candidate"))
    assert (cluster.policy, cluster.allocation.policy) == ("candidate", "candidate")
    by_rule = find_cluster(GatewayOptions(cluster="local_cpu", policy="sed"))
    assert by_rule.allocation.policy == load_cluster("local_cpu").allocation.policy

"""What a cluster file may say."""

import pytest
import yaml

from serve_app.allocation.replica_sets import pool_of
from serve_app.allocation.transition import Held, Shape, gpus_held
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

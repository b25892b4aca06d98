"""Where the ranks of a worker group go, on nodes whose GPUs are pretended; no model is loaded."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import ray
from ray.cluster_utils import Cluster

from serve_app.engine_config import EngineConfig
from serve_app.engines.base import EngineError
from serve_app.engines.sharded.engine import WorkerGroup, rank_bundles


@pytest.fixture(scope="module", autouse=True)
def two_nodes_with_two_gpus_each(own_ray):
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=1, num_gpus=2)
    ray.init(address=cluster.address)
    yield
    ray.shutdown()
    cluster.shutdown()


def a_config(**fields):
    return EngineConfig(model="none", **fields)


def where(_):
    """Process and node of a rank, and the GPUs that it sees."""
    node_id = ray.get_runtime_context().get_node_id()
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return SimpleNamespace(pid=os.getpid(), node_id=node_id, visible_gpus=visible_gpus)


async def placed(config):
    group = WorkerGroup(config)
    try:
        await group.place()
        calls = [rank.__ray_call__.remote(where) for rank in group.ranks]
        return await asyncio.gather(*calls)
    finally:
        group.disband()


def test_ranks_ask_for_a_gpu_each_and_see_one_of_their_own():
    config = a_config(tensor_parallel=2)
    assert rank_bundles(config) == [{"GPU": 1.0}] * 2
    members = asyncio.run(placed(config))
    assert len({member.pid for member in members}) == 2
    # What fits on one node stays there.
    assert len({member.node_id for member in members}) == 1
    assert {member.visible_gpus for member in members} == {"0", "1"}


def test_a_worker_group_larger_than_a_node_is_spread_over_two():
    members = asyncio.run(placed(a_config(tensor_parallel=2, pipeline_parallel=2)))
    by_node = {}
    for member in members:
        by_node.setdefault(member.node_id, []).append(member.visible_gpus)
    assert [sorted(gpus) for gpus in by_node.values()] == [["0", "1"]] * 2


def test_ranks_on_cpus_can_be_asked_for_and_a_kind_of_gpu_too():
    assert rank_bundles(a_config(device="cpu")) == [{"CPU": 1.0}]
    assert rank_bundles(a_config(accelerator_type="H100")) == [
        {"GPU": 1.0, "accelerator_type:H100": 0.001}
    ]
    (member,) = asyncio.run(placed(a_config(device="cpu")))
    assert member.visible_gpus == ""


@ray.remote(num_cpus=0)
class Replica:
    """What a server does: it makes a worker group within the placement group that it was given."""

    async def members(self, config):
        return await placed(config)

    async def refusal(self, config):
        with pytest.raises(EngineError) as refused:
            await placed(config)
        return str(refused.value)


def test_a_replica_with_a_placement_group_has_its_ranks_in_it():
    config = a_config(tensor_parallel=2)
    group = ray.util.placement_group([{"CPU": 1}, *rank_bundles(config)], strategy="PACK")
    ray.get(group.ready())
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    replica = Replica.options(scheduling_strategy=strategy).remote()
    members = ray.get(replica.members.remote(config))
    assert {member.visible_gpus for member in members} == {"0", "1"}
    # The group is the replica's: ending the group leaves it.
    assert ray.util.placement_group_table(group)["state"] == "CREATED"
    refusal = ray.get(replica.refusal.remote(a_config(tensor_parallel=4)))
    assert "the placement group has 3 bundles for 4 ranks" in refusal
    ray.kill(replica)
    ray.util.remove_placement_group(group)

"""What the allocator believes of its replicas, from what Serve tells."""

import asyncio
from types import SimpleNamespace

import pytest

from serve_app.allocation import replica_sets
from serve_app.allocation.plans import check_allocation
from serve_app.allocation.replica_sets import ServeReplicaSets, parse_shape
from serve_app.allocation.transition import Held, Shape, gpus_held, next_wanted
from serve_app.cluster import load_cluster
from tokenyard.config import read_named

SHAPE = Shape(3, 1, 0.9)
NAME = f"app-sharded-{SHAPE.name}"


@pytest.fixture
def observe(monkeypatch):
    """Look at what Serve tells: the status of the application and its replicas by state."""
    gateway = SimpleNamespace(table=SimpleNamespace(replicas={}, keep=lambda *_: None))
    sets = ServeReplicaSets("app", load_cluster("local_cpu").allocation, gateway, {}, None)
    sets._known.add(SHAPE)  # Its backend would need Ray.
    sets._backends["sharded-" + SHAPE.name] = None

    def look(status=None, **states):
        deployments = {"one": SimpleNamespace(replica_states=states)} if states else {}
        told = {NAME: SimpleNamespace(status=status, deployments=deployments)} if status else {}
        monkeypatch.setattr(
            replica_sets.serve, "status", lambda: SimpleNamespace(applications=told)
        )
        return asyncio.run(sets.observe())

    look.sets = sets
    return look


def test_replicas_of_an_application_that_is_deleted_hold_their_gpus_until_it_is_gone(observe):
    assert observe("RUNNING", RUNNING=1)[SHAPE] == Held(wanted=1, ready=1)
    observe.sets._wanted[SHAPE] = 0
    held = observe("DELETING")
    assert held[SHAPE] == Held(wanted=0, stopping=1)
    assert gpus_held(held) == 3
    held = observe("DELETING", STOPPING=1)
    assert gpus_held(held) == 3
    assert gpus_held(observe()) == 0


def test_replicas_serve_while_a_new_controller_looks_for_them_or_their_node_ends(observe):
    """As starting ones they would be given up in the middle of a change."""
    assert observe("RUNNING", RECOVERING=1)[SHAPE] == Held(wanted=1, ready=1)
    assert observe("RUNNING", PENDING_MIGRATION=1, STARTING=1)[SHAPE] == Held(1, 1, 1)


def test_an_application_that_is_found_without_replicas_was_asked_for(observe):
    """Else nobody would end the replica that comes later, and its GPUs would stay taken."""
    assert observe("DEPLOYING")[SHAPE] == Held(wanted=1)
    held = observe("RUNNING", RUNNING=1)
    assert held[SHAPE] == Held(wanted=1, ready=1)
    other = Shape(1, 1, 0.9)
    assert next_wanted(held | {other: Held(1, 1)}, other, 1, 4, 1) == {other: 1, SHAPE: 0}


def test_what_a_call_that_failed_has_not_changed_counts_as_not_asked_for(observe, monkeypatch):
    """Else nobody would ask again: a change would wait in vain, and a start for ever."""

    def away(*_, **__):
        raise RuntimeError("Serve's controller is away")

    observe("RUNNING", RUNNING=1)
    monkeypatch.setattr(replica_sets.ray_private, "scale_deployment", away)
    monkeypatch.setattr(replica_sets.serve, "delete", away)
    monkeypatch.setattr(observe.sets, "_run", away)
    for count in (2, 0):
        with pytest.raises(RuntimeError, match="away"):
            asyncio.run(observe.sets.want(SHAPE, count))
        assert observe("RUNNING", RUNNING=1)[SHAPE] == Held(wanted=1, ready=1)
    other = Shape(1, 1, 0.9)
    with pytest.raises(RuntimeError, match="away"):
        asyncio.run(observe.sets.want(other, 1))
    assert other not in observe("RUNNING", RUNNING=1)


def test_a_shape_is_read_back_from_the_name_of_its_application():
    for percentage in range(1, 101):
        shape = Shape(4, 2, percentage / 100)
        assert parse_shape(shape.name) == shape


def test_memory_that_no_name_can_hold_is_refused(tmp_path):
    """Its replicas would count as another shape's, and the plan would never be reached."""
    shipped = read_named("local_cpu_ranks", "scenario", "tokenyard", "scenarios/allocation")
    file = tmp_path / "odd.yaml"
    file.write_text(shipped.replace("[0.9]", "[0.875]"))
    allocation = load_cluster("local_cpu").allocation
    allocation = allocation.model_copy(update={"scenario": str(file), "policy": "autoscaler_70"})
    with pytest.raises(ValueError, match=r"has memory fraction 0\.875; an allocated pool takes"):
        check_allocation(allocation)


def test_one_that_is_found_deleting_counts_as_one_replica_at_least(observe):
    assert observe("DELETING")[SHAPE] == Held(wanted=0, stopping=1)

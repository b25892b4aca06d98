"""Starting a group of ranks: what passes by itself is tried anew, what does not is said."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.engine_config import EngineConfig
from serve_app.engines.base import EngineError
from serve_app.engines.sharded import engine as sharded
from serve_app.engines.sharded.messages import GroupLimits

MESH = "rank 0 of 1: RuntimeError: Gloo connectFullMesh failed with Connection closed by peer"


class Group:
    """Fails with each of `errors` in turn, then serves."""

    def __init__(self, errors):
        self.errors, self.ranks, self.num_disbanded = list(errors), [], 0

    async def place(self):
        self.ranks = [SimpleNamespace()]

    async def load(self):
        pass

    async def serve(self):
        if self.errors:
            raise EngineError(self.errors.pop(0))
        return GroupLimits(1024, frozenset())

    def disband(self):
        self.ranks, self.num_disbanded = [], self.num_disbanded + 1


async def started(errors, monkeypatch):
    shape = SimpleNamespace(max_positions=64, vocab_size=100)
    monkeypatch.setattr(sharded, "find_model", lambda name: Path(name))
    monkeypatch.setattr(sharded, "read_shape", lambda folder: shape)
    monkeypatch.setattr(sharded, "check_plan", lambda shape, config: None)
    group = Group(errors)
    engine = sharded.ShardedEngine(EngineConfig(model="none"), group)
    monkeypatch.setattr(sharded.ray, "cluster_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(engine, "_watch", lambda number: asyncio.sleep(0))
    monkeypatch.setattr(engine, "_read", lambda: asyncio.sleep(0))
    await engine.start()
    return group


def test_ranks_that_did_not_reach_each_other_are_started_anew(monkeypatch):
    group = asyncio.run(started([MESH, MESH], monkeypatch))
    assert group.num_disbanded == 2
    assert group.ranks


@pytest.mark.parametrize("errors", [[MESH] * 3, ["rank 0 of 1: OutOfMemoryError"]])
def test_what_does_not_pass_is_said(errors, monkeypatch):
    with pytest.raises(EngineError, match=errors[-1]):
        asyncio.run(started(errors, monkeypatch))

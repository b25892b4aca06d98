"""What a policy is handed: values, and no way from them to the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from tokenyard.routing.scenario import load_scenario, scenario_names
from tokenyard.routing.simulator.run import choosing, run_each
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.routing.simulator.table import TableSnapshots
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request

VALUES = (str, int, float, type(None))
DATA = (Request, ReplicaSnapshot, EngineSnapshot)


def reachable(thing: object) -> list[object]:
    """All that can be reached from what a policy holds."""
    if type(thing) in (list, tuple):
        return [one for part in thing for one in reachable(part)]
    if dataclasses.is_dataclass(thing):
        parts = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
        return [thing, *reachable(parts)]
    return [thing]


class Spy:
    """Takes replicas in turn, and looks at everything it is handed."""

    def __init__(self, scribbles: bool = False) -> None:
        self.num_seen = 0
        self.scribbles = scribbles

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        assert type(request) is Request
        assert type(snapshots) is TableSnapshots
        made = list(snapshots)
        assert snapshots.columns.base is None
        for thing in [thing for part in vars(snapshots).values() for thing in reachable(part)]:
            # Arrays are its own: the data of no other stand behind them.
            owns = type(thing) is np.ndarray and thing.base is None
            assert owns or type(thing) in (*VALUES, *DATA, bool, range)
        for thing in reachable([request, made]):
            # Exactly these types: a subclass, or a number of numpy, may hold on to an array.
            assert type(thing) in (*VALUES, *DATA), f"a policy reaches {type(thing)}"
            if type(thing) in DATA:
                assert not hasattr(thing, "__dict__")
        with pytest.raises(dataclasses.FrozenInstanceError):
            request.arrival_s = 0.0
        if self.scribbles:
            snapshots.columns[:] = 7.0
            for snapshot in snapshots:
                for field in dataclasses.fields(snapshot):
                    setattr(snapshot, field.name, 7)
        self.num_seen += 1
        return self.num_seen % len(snapshots)


@pytest.mark.parametrize("name", scenario_names())
def test_a_policy_gets_values_and_can_reach_and_change_nothing_else(name):
    scenario = load_scenario(name)
    source = StreamSource(scenario)
    streams = StreamSet([source.sample(40, stream_rng(0, "evaluation"))], "test")
    spies = [Spy(), Spy(scribbles=True)]
    runs = [run_each(scenario, streams, [choosing(spy)])[0] for spy in spies]
    assert all(spy.num_seen >= 40 for spy in spies)
    # Whoever writes into its snapshots writes into its own copy.
    np.testing.assert_array_equal(runs[0].outcomes.response_s, runs[1].outcomes.response_s)


def test_what_a_policy_saw_does_not_change_when_the_simulator_goes_on():
    scenario = load_scenario("churn")
    streams = StreamSet([StreamSource(scenario).sample(40, stream_rng(0, "evaluation"))], "test")
    kept: list[tuple[ReplicaSnapshot, ...]] = []
    said: list[str] = []

    class Keeper:
        def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
            kept.append(tuple(snapshots))
            said.append(repr(kept[-1]))
            return 0

    run_each(scenario, streams, [choosing(Keeper())])
    assert [repr(snapshots) for snapshots in kept] == said

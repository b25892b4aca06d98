"""Decisions with the counts that Dynamo's KV router keeps, which no snapshot of ours tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tokenyard.routing.policies.cost import cheapest_of
from tokenyard.routing.policies.dynamo import BLOCK_TOKENS, DynamoCost
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import FloatArray
from tokenyard.workload.trace import Trace

Choose = Callable[[BatchingSim, int], int]


class Books:
    """Blocks of the prompts in flight at every replica: from the decision to the last token.

    Equal blocks are one, outputs are not counted, and a prompt's last block counts where it is not
    whole.
    """

    def __init__(self, trace: Trace, num_replicas: int) -> None:
        """Begin without requests.

        Args:
            trace: All requests, with chains of whole blocks.
            num_replicas: How many books.
        """
        chains = trace.prefix_hashes or ((),) * trace.num_requests
        self._blocks = [
            # Only a request itself has what of its prompt is in no shared block.
            {*chain, *((which, k) for k in range(len(chain), -(-int(context) // BLOCK_TOKENS)))}
            for which, (chain, context) in enumerate(zip(chains, trace.context_tokens, strict=True))
        ]
        self._held: list[Counter[object]] = [Counter() for _ in range(num_replicas)]
        self._in_flight: list[list[int]] = [[] for _ in range(num_replicas)]

    def catch_up(self, finish_s: FloatArray, now_s: float) -> None:
        """Forget the requests that have ended.

        Args:
            finish_s: Clock time of every request's end, NaN where it has none, shape (num,).
            now_s: Clock.
        """
        for replica, mine in enumerate(self._in_flight):
            ended = [which for which in mine if finish_s[which] <= now_s]
            for which in ended:
                mine.remove(which)
                self._held[replica].subtract(self._blocks[which])
                self._held[replica] = +self._held[replica]

    def note(self, which: int, replica: int) -> None:
        """A request is sent to a replica."""
        self._in_flight[replica].append(which)
        self._held[replica].update(self._blocks[which])

    def blocks(self, which: int, replica: int) -> int:
        """Different blocks at a replica if the request were sent there."""
        held = self._held[replica]
        return len(held) + sum(block not in held for block in self._blocks[which])


class ToldCost(DynamoCost):
    """`dynamo_cost` that is told the decode blocks of the next decision."""

    told: dict[str, float]
    """Decode blocks by replica."""

    def decode_blocks(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        """Return what was told."""
        return self.told[snapshot.replica_id]


class Bookkeeper:
    """Dynamo's router in our simulator: keeps books, and decides or follows.

    It has to decide on every request of one stream.
    """

    def __init__(self, trace: Trace, names: Sequence[str], rng: np.random.Generator) -> None:
        """Keep books of the replicas with these names; draw ties from `rng`."""
        self._books = Books(trace, len(names))
        self._names = names
        self._told = ToldCost(rng)
        self._snapshot_only = DynamoCost(rng)
        self.num_told = 0
        """Decisions followed that the rule with books may have taken."""
        self.num_untold = 0
        """Decisions followed that the rule may have taken that sees snapshots only."""

    def decide(self, sim: BatchingSim, copy: int) -> int:
        """Take one of the cheapest."""
        which = self._look(sim, copy)
        chosen = self._told.route(sim.request(copy), sim.snapshots(copy))
        self._books.note(which, chosen)
        return chosen

    def following(self, workers: Sequence[int]) -> Choose:
        """Take what others took of each request, and count where the rules agree."""

        def follow(sim: BatchingSim, copy: int) -> int:
            which = self._look(sim, copy)
            request, snapshots = sim.request(copy), sim.snapshots(copy)
            chosen, every = workers[which], range(len(snapshots))
            self.num_told += chosen in cheapest_of(every, self._told.costs(request, snapshots))
            untold = self._snapshot_only.costs(request, snapshots)
            self.num_untold += chosen in cheapest_of(every, untold)
            self._books.note(which, chosen)
            return chosen

        return follow

    def _look(self, sim: BatchingSim, copy: int) -> int:
        which = sim.current(copy)
        self._books.catch_up(sim.arrays.outcomes[copy, :, lay.FINISH_S], sim.now_s(copy))
        self._told.told = {
            name: float(self._books.blocks(which, replica))
            for replica, name in enumerate(self._names)
        }
        return which

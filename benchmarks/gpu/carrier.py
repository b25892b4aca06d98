"""Brings requests to engines: a policy decides by snapshots, as it does behind the gateway."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from serve_app.cluster import EngineProfile
from serve_app.engines.base import EngineStatus
from serve_app.engines.sharded.messages import request_id_in
from serve_app.gateway.replicas import Prompt, ReplicaState, ReplicaTable
from tokenyard.routing.snapshot_table import SnapshotTable
from tokenyard.routing.types import Request, RoutingPolicy
from tokenyard.workload.trace import Trace

_SILENCE_S = 120.0
"""After so long without a word from any engine while requests are open, all is given up."""
_SMALLEST_VOCABULARY = 128


@dataclass
class Sent:
    """A request on its way."""

    engine: str
    due_s: float
    """Unix time of its arrival."""
    context_tokens: int
    num_new: int
    num_generated: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class Carrier:
    """All engines, and what is on its way to them."""

    def __init__(self, pipes: Mapping[str, Connection]) -> None:
        self._pipes = pipes
        self._open: dict[str, Sent] = {}
        self._heard_s = time.time()
        self.iterations: dict[str, list[tuple[int, int, int, float]]] = {name: [] for name in pipes}
        """Those that each engine told of: prefill tokens, sequences, KV tokens read, seconds."""

    def _send(self, request_id: str, sent: Sent) -> None:
        rng = np.random.default_rng([sent.context_tokens, sent.num_new])
        tokens = rng.integers(3, _SMALLEST_VOCABULARY, sent.context_tokens).tolist()
        self._open[request_id] = sent
        self._heard_s = time.time()
        self._pipes[sent.engine].send((request_id, tokens, sent.num_new))

    def _listen(self, timeout_s: float) -> Iterator[tuple[str, float, Any, list[str]]]:
        """Yield of engines that had something to say: name, when, its stats, whose tokens came.

        Raises:
            RuntimeError: An engine died, failed a request, or none says anything any more.
        """
        heard = wait(list(self._pipes.values()), max(timeout_s, 0.0))
        self._heard_s = time.time() if heard or not self._open else self._heard_s
        if time.time() - self._heard_s > _SILENCE_S:
            raise RuntimeError(f"no engine has said anything for {_SILENCE_S:.0f} s")
        for name, pipe in self._pipes.items():
            if pipe in heard:
                try:
                    told_s, progress, stats, iterations = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"engine {name} has died") from None
                self.iterations[name] += iterations
                yield name, told_s, stats, [self._note(name, one) for one in progress]

    def _note(self, name: str, progress: Any) -> str:
        if progress.error is not None:
            raise RuntimeError(f"engine {name} failed {progress.request_id}: {progress.error}")
        request_id, now_s = request_id_in(progress.request_id), time.time()
        sent = self._open[request_id]
        sent.first_s, sent.last_s = sent.first_s or now_s, now_s
        sent.num_generated += 1
        if sent.num_generated == sent.num_new:
            del self._open[request_id]
        return request_id

    def drive(self, waves: Mapping[str, Sequence[Sequence[tuple[int, int]]]]) -> None:
        """Give every engine its waves of (context, output) tokens, all engines at once.

        An engine's next wave begins when its last one is answered.
        """
        left = {name: list(reversed(some)) for name, some in waves.items()}
        while any(left.values()) or self._open:
            busy = {sent.engine for sent in self._open.values()}
            for name in left.keys() - busy:
                for number, (context, new) in enumerate(left[name].pop() if left[name] else ()):
                    sent = Sent(name, time.time(), context, new)
                    self._send(f"{name}-{len(left[name])}-{number}", sent)
            for _ in self._listen(1.0):
                pass

    def replay(
        self,
        trace: Trace,
        make_policy: Callable[[], RoutingPolicy],
        profiles: Mapping[str, EngineProfile],
        predicted_output: Callable[[int], float],
    ) -> list[Sent]:
        """Send a trace at its own times; return its requests once all are answered.

        Args:
            trace: Requests.
            make_policy: Makes the policy that decides, fresh.
            profiles: How fast each engine is.
            predicted_output: Output that the policy is told of, tokens, by context.
        """
        lengths = float(trace.context_tokens.mean()), float(trace.generated_tokens.mean())
        table = ReplicaTable(lengths)
        states = {
            name: table.add(name, "fleet", profile, 0, time.time())
            for name, profile in profiles.items()
        }
        # What it compiles at its first decision must not count: another one makes that.
        first = Request(0.0, 8, 16.0)
        make_policy().route(first, _snapshots(table))
        policy, sent = make_policy(), []
        due_s = (time.time() + trace.arrival_s).tolist()
        while len(sent) < len(due_s) or self._open:
            until_s = due_s[len(sent)] - time.time() if len(sent) < len(due_s) else 1.0
            for name, told_s, stats, grown in self._listen(until_s):
                _publish(states[name], told_s, stats, [(one, sent[int(one)]) for one in grown])
            while len(sent) < len(due_s) and due_s[len(sent)] <= time.time():
                number = len(sent)
                context, new = (
                    int(trace.context_tokens[number]),
                    int(trace.generated_tokens[number]),
                )
                size = context + predicted_output(context)
                request = Request(due_s[number], context, size)
                sent.append(self._place(str(number), request, new, policy, table))
        return sent

    def _place(
        self, name: str, request: Request, num_new: int, policy: RoutingPolicy,
        table: ReplicaTable,
    ) -> Sent:  # fmt: skip
        snapshots = _snapshots(table)
        chosen_id = snapshots.candidates.replica_ids[policy.route(request, snapshots)]
        chosen = table.replicas[chosen_id]
        context, now_s = request.context_tokens, time.time()
        output = request.predicted_total_tokens - context
        chosen.send(name, Prompt([0] * context), 0, output, now_s)
        sent = Sent(chosen.replica_id, request.arrival_s, context, num_new)
        self._send(name, sent)
        return sent


def _snapshots(table: ReplicaTable) -> SnapshotTable:
    """All replicas, none of which has a prefix cache."""
    return table.snapshots(table.offered(0.0, math.inf), Prompt([0]))


def _publish(state: ReplicaState, told_s: float, stats: Any, grown: list[tuple[str, Sent]]) -> None:
    if stats is not None:
        seen = (stats.num_waiting, stats.num_running, stats.kv_used_fraction, told_s)
        state.publish(EngineStatus(*seen))
    for request_id, sent in grown:
        state.in_flight.receive(request_id, sent.num_generated)
        if sent.num_generated == sent.num_new:
            state.in_flight.close(request_id, sent.last_s, sent.last_s - sent.due_s)

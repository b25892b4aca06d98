"""Brings requests to engines: a policy decides by snapshots, as it does behind the gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from serve_app.cluster import EngineProfile
from serve_app.gateway.replicas import EngineStatus, Prompt, ReplicaState
from tokenyard.routing.types import Request, RoutingPolicy
from tokenyard.workload.trace import Trace

_SILENCE_S = 120.0
"""After so long without a word from any engine that owes tokens, it is given up."""
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


@dataclass
class Carrier:
    """All engines, and what is on its way to them."""

    pipes: Mapping[str, Connection]
    iterations: dict[str, list[tuple[int, int, int, float]]] = field(default_factory=dict)
    """Those that each engine told of: prefill tokens, sequences, KV tokens read, seconds."""
    open: dict[str, Sent] = field(default_factory=dict)
    _heard_s: float = 0.0

    def send(self, request_id: str, sent: Sent) -> None:
        """Hand a request of random tokens to its engine."""
        rng = np.random.default_rng([sent.context_tokens, sent.num_new])
        tokens = rng.integers(3, _SMALLEST_VOCABULARY, sent.context_tokens).tolist()
        self.open[request_id] = sent
        self._heard_s = time.time()
        self.pipes[sent.engine].send((request_id, tokens, sent.num_new))

    def listen(self, timeout_s: float) -> list[tuple[str, Any, list[tuple[str, Sent]]]]:
        """Return the engines that had something to say: name, report, what grew.

        Raises:
            RuntimeError: An engine died, refused a request, or says nothing any more.
        """
        names = {pipe: name for name, pipe in self.pipes.items()}
        heard = [self._hear(names[pipe], pipe) for pipe in wait(list(names), max(timeout_s, 0))]
        now_s = time.time()
        self._heard_s = now_s if heard else self._heard_s
        if self.open and now_s - self._heard_s > _SILENCE_S:
            raise RuntimeError(f"no engine has said anything for {_SILENCE_S:.0f} s")
        return heard

    def _hear(self, name: str, pipe: Connection) -> tuple[str, Any, list[tuple[str, Sent]]]:
        try:
            told_s, progress, stats, iterations = pipe.recv()
        except EOFError:
            raise RuntimeError(f"engine {name} has died") from None
        self.iterations.setdefault(name, []).extend(iterations)
        now_s, grown = time.time(), []
        for one in progress:
            if one.error is not None:
                raise RuntimeError(f"engine {name} failed {one.request_id}: {one.error}")
            sent = self.open[one.request_id]
            sent.first_s, sent.last_s = sent.first_s or now_s, now_s
            sent.num_generated += 1
            grown.append((one.request_id, sent))
            if sent.num_generated == sent.num_new:
                del self.open[one.request_id]
        return name, (told_s, stats), grown

    def drive(self, waves: Mapping[str, Sequence[Sequence[tuple[int, int]]]]) -> None:
        """Give every engine its waves of (context, output) tokens, all engines at once.

        An engine's next wave begins when its last one is answered.
        """
        left = {name: list(reversed(some)) for name, some in waves.items()}
        while any(left.values()) or self.open:
            busy = {sent.engine for sent in self.open.values()}
            for name in left.keys() - busy:
                for number, (context, new) in enumerate(left[name].pop() if left[name] else ()):
                    sent = Sent(name, time.time(), context, new)
                    self.send(f"{name}-{len(left[name])}-{number}", sent)
            self.listen(1.0)

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
        states = [
            ReplicaState(name, "fleet", profile, 0, time.time(), lengths)
            for name, profile in profiles.items()
        ]
        known = {state.replica_id: state for state in states}
        # What it compiles at its first decision must not count: another one makes that.
        make_policy().route(Request(0.0, 8, 16.0), [state.snapshot(0) for state in states])
        policy, begun_s = make_policy(), time.time()
        due_s = (begun_s + trace.arrival_s).tolist()
        done: list[Sent] = []
        while len(done) < trace.num_requests or self.open:
            for name, (told_s, stats), grown in self.listen(
                due_s[len(done)] - time.time() if len(done) < len(due_s) else 1.0
            ):
                _note(known[name], told_s, stats, grown)
            while len(done) < len(due_s) and due_s[len(done)] <= time.time():
                number = len(done)
                context = int(trace.context_tokens[number])
                output = predicted_output(context)
                request = Request(due_s[number], context, context + output)
                snapshots = [state.snapshot(0) for state in states]
                chosen = states[policy.route(request, snapshots)]
                new = int(trace.generated_tokens[number])
                sent = Sent(chosen.replica_id, due_s[number], context, new)
                chosen.send(str(number), Prompt([0] * context), 0, output, time.time())
                self.send(str(number), sent)
                done.append(sent)
        return done


def _note(state: ReplicaState, told_s: float, stats: Any, grown: list[tuple[str, Sent]]) -> None:
    if stats is not None:
        state.publish(
            EngineStatus(stats.num_waiting, stats.num_running, stats.kv_used_fraction, told_s)
        )
    for request_id, sent in grown:
        state.in_flight.receive(request_id, sent.num_generated)
        if sent.num_generated == sent.num_new:
            state.in_flight.close(request_id, sent.last_s, sent.last_s - sent.due_s)

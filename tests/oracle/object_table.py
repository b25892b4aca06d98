"""What a router knows of replicas, one object after the other: slow, and easy to believe.

Every snapshot is made anew from what its replica published and was sent. The gateway keeps columns
of numbers instead (`serve_app.gateway.replicas`), which have to say the same.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field

from serve_app.cluster import EngineProfile
from serve_app.engines.base import EngineStatus
from serve_app.gateway.replicas import RECENT_WEIGHT, Prompt
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot


@dataclass
class Sent:
    """A request of one replica."""

    prefill_tokens: float
    output_tokens: float
    num_generated: int = 0


@dataclass
class ObjectReplica:
    """One replica."""

    replica_id: str
    pool: str
    profile: EngineProfile
    block_tokens: int
    status: EngineStatus
    mean_lengths_tokens: tuple[float, float]
    requests: dict[str, Sent] = field(default_factory=dict)
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    times_s: list[float] = field(default_factory=lambda: [-math.inf])
    counts: list[int] = field(default_factory=lambda: [0])
    count_when_published: int = 0
    mean_response_s: float = math.nan
    last_sent_s: float = -math.inf

    def __post_init__(self) -> None:
        capacity = self.profile.kv_capacity_tokens
        self.capacity = int(capacity // self.block_tokens) if self.block_tokens else 0

    def publish(self, status: EngineStatus) -> None:
        if status.observed_at_s <= self.status.observed_at_s:
            return
        if self.status.accepting and not status.accepting:
            self.blocks.clear()
        self.status = status
        at = bisect_right(self.times_s, status.observed_at_s) - 1
        self.count_when_published = self.counts[max(at, 0)]
        if status.max_batch is not None:
            self.profile = self.profile.model_copy(update={"max_batch": status.max_batch})

    def match_tokens(self, prompt: Prompt) -> int:
        if not self.block_tokens:
            return 0
        most, found = (len(prompt.token_ids) - 1) // self.block_tokens, 0
        for block in prompt.blocks(self.block_tokens).tolist():
            if block not in self.blocks:
                break
            found += 1
        return min(found, most) * self.block_tokens

    def send(self, name: str, prompt: Prompt, match: int, output: float, now_s: float) -> None:
        self.requests[name] = Sent(float(len(prompt.token_ids) - match), output)
        self.last_sent_s = now_s
        self._remember(now_s)
        for block in prompt.blocks(self.block_tokens).tolist():
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)

    def receive(self, name: str, num_generated: int) -> None:
        if name in self.requests:
            sent = self.requests[name]
            sent.num_generated = max(sent.num_generated, num_generated)

    def close(self, name: str, now_s: float, response_s: float | None) -> None:
        if self.requests.pop(name, None) is None:
            return
        if response_s is not None:
            recent = self.mean_response_s
            self.mean_response_s = (
                response_s if math.isnan(recent) else recent + RECENT_WEIGHT * (response_s - recent)
            )
        self._remember(now_s)

    def snapshot(self, match_tokens: int) -> ReplicaSnapshot:
        profile, status, count = self.profile, self.status, len(self.requests)
        waiting, running = status.num_waiting, status.num_running
        outstanding = max(waiting + running + count - self.count_when_published, count)
        busy = running if waiting > 0 else profile.max_batch
        waiting = max(outstanding - busy, 0)
        if count:
            share = outstanding / count
            begun = self.requests.values()
            prefill = sum(one.prefill_tokens for one in begun if not one.num_generated) * share
            left = sum(one.output_tokens - one.num_generated for one in begun)
            output = max(left, float(count)) * share
        else:
            prompt_tokens, output_tokens = self.mean_lengths_tokens
            prefill = waiting * prompt_tokens
            output = (outstanding + waiting) / 2 * output_tokens
        return ReplicaSnapshot(
            replica_id=self.replica_id,
            tokens_per_s=profile.slot_tokens_per_s(*self.mean_lengths_tokens),
            num_slots=profile.max_batch,
            max_concurrency=profile.max_batch,
            num_waiting=waiting,
            num_running=outstanding - waiting,
            tokens_in_flight=prefill + output,
            mean_response_s=self.mean_response_s,
            observed_at_s=status.observed_at_s,
            engine=EngineSnapshot(
                profile.iteration_s, profile.prefill_token_s, profile.sequence_s,
                profile.kv_token_s, profile.token_budget, profile.kv_capacity_tokens,
                status.kv_used_fraction, prefill, output, match_tokens,
            ),
        )  # fmt: skip

    def _remember(self, now_s: float) -> None:
        self.times_s.append(max(now_s, self.times_s[-1]))
        self.counts.append(len(self.requests))


class ObjectTable:
    """All replicas."""

    def __init__(self, mean_lengths_tokens: tuple[float, float]) -> None:
        self.mean_lengths_tokens = mean_lengths_tokens
        self.replicas: dict[str, ObjectReplica] = {}

    def add(
        self, replica_id: str, pool: str, profile: EngineProfile, block_tokens: int, now_s: float
    ) -> None:
        status = EngineStatus(0, 0, 0.0, now_s)
        means = self.mean_lengths_tokens
        replica = ObjectReplica(replica_id, pool, profile, block_tokens, status, means)
        self.replicas.setdefault(replica_id, replica)

    def keep(self, pool: str, replica_ids: set[str]) -> None:
        self.replicas = {
            name: one
            for name, one in self.replicas.items()
            if one.pool != pool or name in replica_ids
        }

    def offered(self, now_s: float, stale_after_s: float) -> list[ObjectReplica]:
        everyone = list(self.replicas.values())
        accepting = [r for r in everyone if r.status.accepting] or everyone
        fresh = [r for r in accepting if now_s - r.status.observed_at_s <= stale_after_s]
        return fresh or accepting


def equally_idle(one: ReplicaSnapshot, other: ReplicaSnapshot) -> bool:
    """Whether both are idle, equally fast, and hold as much of the request's prefix."""
    slower, faster = one.mean_response_s, other.mean_response_s
    if faster > slower:
        slower, faster = faster, slower
    if one.engine is None or other.engine is None:
        same_engine = one.engine is other.engine
    else:
        same_engine = one.engine.match_tokens == other.engine.match_tokens and math.isclose(
            one.engine.prefill_token_s, other.engine.prefill_token_s
        )
    return (
        not one.num_outstanding
        and not other.num_outstanding
        and one.full_tokens_per_s == other.full_tokens_per_s
        and one.num_slots == other.num_slots
        and not slower > 2.0 * faster
        and same_engine
    )


def least_recently_used(
    snapshots: list[ReplicaSnapshot], index: int, last_sent_s: list[float]
) -> int:
    """The candidate that is next among those that are as idle as a choice."""
    if snapshots[index].num_outstanding:
        return index
    chosen = snapshots[index]
    equal = [i for i, one in enumerate(snapshots) if one is chosen or equally_idle(one, chosen)]
    return min(equal, key=lambda i: (last_sent_s[i], i != index))

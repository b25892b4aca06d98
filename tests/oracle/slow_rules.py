"""The public rules once more, line by line from their sources, without a thought for speed.

Each names all replicas that the rule may choose, given what was sent where before. Nothing here
uses the package's rules or signals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenyard.routing.types import ReplicaSnapshot, Request

Fleet = Sequence[ReplicaSnapshot]


@dataclass(frozen=True)
class Sent:
    """One earlier request, the fleet as it was offered, and where it went."""

    request: Request
    fleet: Fleet
    chosen: int

    @property
    def name(self) -> str:
        return self.fleet[self.chosen].replica_id


History = Sequence[Sent]
Oracle = Callable[[History, Request, Fleet], set[int]]


def hit(request: Request, s: ReplicaSnapshot) -> int:
    return min(s.engine.match_tokens, request.context_tokens)


def best(indices, value) -> set[int]:
    """All that have the least value, up to rounding."""
    values = {i: value(i) for i in indices}
    least = min(values.values())
    return {i for i, v in values.items() if math.isclose(v, least, rel_tol=1e-9, abs_tol=1e-9)}


def lmetric(history: History, request: Request, fleet: Fleet) -> set[int]:
    keys = []
    for i, s in enumerate(fleet):
        new = request.context_tokens - hit(request, s)
        load = s.num_waiting + s.num_running
        keys.append((new * (load + 1), load, new, i))
    return {min(keys)[3]}


def pending_prefill(history: History, request: Request, fleet: Fleet) -> set[int]:
    keys = []
    for i, s in enumerate(fleet):
        tokens = s.engine.prefill_in_flight_tokens + request.context_tokens - hit(request, s)
        keys.append((tokens, s.num_waiting + s.num_running, i))
    return {min(keys)[2]}


def smetric(history: History, request: Request, fleet: Fleet) -> set[int]:
    num, start = len(fleet), len(history)
    least = longest = None
    anyone_in_time = False
    for offset in range(num):
        i = (start + offset) % num
        s = fleet[i]
        new = request.context_tokens - hit(request, s)
        queued = s.engine.prefill_in_flight_tokens + new
        in_time = queued * s.engine.prefill_token_s <= 2.0
        anyone_in_time |= in_time
        score = queued * (s.num_waiting + s.num_running)
        if least is None or score < least[1]:
            least = (i, score)
        if longest is None or hit(request, s) > longest[1]:
            longest = (i, hit(request, s), in_time)
    expected = max(hit(request, s) for s in fleet)
    if longest[1] > 0.5 * expected and (longest[2] or not anyone_in_time):
        return {longest[0]}
    return {least[0]}


def dynamo_blocks(request: Request, s: ReplicaSnapshot) -> tuple[float, int]:
    raw = (s.engine.prefill_in_flight_tokens + request.context_tokens) / 16
    prefill = max(raw - 1.0 * (hit(request, s) // 16), 0)
    used = s.engine.kv_used_fraction * s.engine.kv_capacity_tokens
    return prefill, math.ceil((used + request.context_tokens) / 16)


def dynamo_cost(history: History, request: Request, fleet: Fleet) -> set[int]:
    return best(range(len(fleet)), lambda i: sum(dynamo_blocks(request, fleet[i])))


def dynamo_lmetric(history: History, request: Request, fleet: Fleet) -> set[int]:
    def cost(i):
        prefill, decode = dynamo_blocks(request, fleet[i])
        return prefill * (decode + 1)

    return best(range(len(fleet)), cost)


def llmd_sticky(history: History, request: Request, fleet: Fleet) -> set[int]:
    sticky, others = [], []
    for i, s in enumerate(fleet):
        enough = hit(request, s) / request.context_tokens >= 0.8
        (sticky if enough else others).append(i)
    kept = sticky or others
    if sticky and others:
        first = [s.engine.prefill_in_flight_tokens / 15928 * 1000 for s in fleet]
        if min(first[i] for i in sticky) - min(first[i] for i in others) > 18000:
            kept = list(range(len(fleet)))

    def load(i):
        tokens = fleet[i].engine.prefill_in_flight_tokens
        tokens += request.context_tokens - hit(request, fleet[i])
        return -(1 - min(tokens, 4194304) / 4194304)

    return best(kept, load)


def llmd_blend(history: History, request: Request, fleet: Fleet) -> set[int]:
    queues = [s.num_waiting for s in fleet]

    def score(i):
        span = max(queues) - min(queues)
        queue = (max(queues) - queues[i]) / span if span else 1.0
        kv = 1 - fleet[i].engine.kv_used_fraction
        prefix = hit(request, fleet[i]) / request.context_tokens
        return -(2 * queue + 2 * kv + 3 * prefix)

    return best(range(len(fleet)), score)


def cache_aware(request: Request, fleet: Fleet) -> tuple[str, list[int]]:
    loads = [s.num_waiting + s.num_running for s in fleet]
    least = loads.index(min(loads))
    if max(loads) - min(loads) > 64 and max(loads) > min(loads) * 1.5:
        return "least", [least]
    longest = max(hit(request, s) for s in fleet)
    if longest / request.context_tokens > 0.3:
        return "prefix", [i for i, s in enumerate(fleet) if hit(request, s) == longest]
    return "least", [least]


def sglang_cache_aware(history: History, request: Request, fleet: Fleet) -> set[int]:
    return {cache_aware(request, fleet)[1][0]}


def vllm_cache_aware(history: History, request: Request, fleet: Fleet) -> set[int]:
    _, holders = cache_aware(request, fleet)
    loads = {i: fleet[i].num_waiting + fleet[i].num_running for i in holders}
    return {min(i for i in holders if loads[i] == min(loads.values()))}


def smg_spill(history: History, request: Request, fleet: Fleet) -> set[int]:
    loads = [s.num_waiting + s.num_running for s in fleet]
    mean = sum(loads) / len(loads)
    margin = min(64, max(4, math.ceil(2 * math.sqrt(mean))))
    gated = [load > mean + margin and load > 1.5 * mean for load in loads]
    longest = max(hit(request, s) for s in fleet)
    everyone = list(range(len(fleet)))
    candidates = everyone
    if longest / request.context_tokens > 0.3:
        holders = [i for i in everyone if hit(request, fleet[i]) == longest]
        candidates = [i for i in holders if not gated[i]]
        candidates = candidates or [i for i in everyone if not gated[i]] or everyone
    return best(candidates, lambda i: fleet[i].wait_s)


def aibrix_prefix_cache(history: History, request: Request, fleet: Fleet) -> set[int]:
    counts = [s.num_waiting + s.num_running for s in fleet]
    mean = sum(counts) / len(counts)
    ready = list(range(len(fleet)))
    if max(counts) > 2.0 * (mean + 1) and max(counts) - min(counts) >= 8:
        ready = [i for i in ready if counts[i] == min(counts)]
    per_cent = {i: int(100 * (hit(request, fleet[i]) / request.context_tokens)) for i in ready}
    matched = sorted((-per_cent[i], counts[i]) for i in ready if per_cent[i] > 0)
    for key in matched:
        if key[1] <= mean + 1 * statistics.pstdev(counts):
            return {i for i in ready if (-per_cent[i], counts[i]) == key}
    return {i for i in range(len(fleet)) if counts[i] == min(counts)}


def aibrix_load_balance(history: History, request: Request, fleet: Fleet) -> set[int]:
    def drain(i):
        def done_by(times, running):
            sent = sum(one.name == fleet[i].replica_id for one in times)
            return max(0, sent - running)

        def running(some):
            return some[i].num_waiting + some[i].num_running

        now = done_by(history, running(fleet))
        before = [now]
        for k, one in enumerate(history):
            if one.request.arrival_s >= request.arrival_s - 60:
                before.append(done_by(history[:k], running(one.fleet)))
                break
        done = now - before[-1]
        return done / 60 if done > 0 else 1.0

    return best(
        range(len(fleet)), lambda i: (fleet[i].num_waiting + fleet[i].num_running) / drain(i)
    )


def recent(history: History, request: Request, name: str) -> list[Sent]:
    return [
        one
        for one in history
        if one.name == name and one.request.arrival_s > request.arrival_s - 180
    ]


def v100_s(num: int, context: int) -> float:
    if num >= 384:
        linear = (0.27106428 * num + 10.52444263) / 1000
    elif num >= 192:
        linear = (-295 + 3.125 * num - 6.4e-3 * num**2) / 1000
    else:
        linear = 55.0 / 1000
    attention = 0.80
    if context > 1024:
        attention = 4.65e-4 * context + 0.398
        if num / 1 <= 1024 and 1 * num <= 32 * 256 * 2048:
            attention /= 2
    quadratic = -18.425 + 9.65e-3 * num + 5.4e-6 * num**2 if num >= 4096 else 0.0
    return (linear + attention / 1000 + quadratic / 1000) / 0.9


def aibrix_preble(history: History, request: Request, fleet: Fleet) -> set[int]:
    longest = max(hit(request, s) for s in fleet)
    everyone = list(range(len(fleet)))
    if longest / request.context_tokens > 0.5:
        holders = [i for i in everyone if hit(request, fleet[i]) == longest]
        return best(holders, lambda i: len(recent(history, request, fleet[i].replica_id)))

    def cost(i):
        total = 0.0
        for one in recent(history, request, fleet[i].replica_id):
            context = one.request.context_tokens
            num = context - hit(one.request, one.fleet[one.chosen])
            total += num / context * v100_s(num, context) + 45 * 0.15
        return total

    return best(everyone, cost)


def preble_e2(history: History, request: Request, fleet: Fleet) -> set[int]:
    def cost(i):
        engine = fleet[i].engine
        load = 0.0
        for one in recent(history, request, fleet[i].replica_id):
            there = one.fleet[one.chosen]
            new = one.request.context_tokens - hit(one.request, there)
            outputs = one.request.predicted_total_tokens - one.request.context_tokens
            load += new * there.engine.prefill_token_s
            load += outputs / (there.tokens_per_s * there.num_slots)
        new = request.context_tokens - hit(request, fleet[i])
        free = (1 - engine.kv_used_fraction) * engine.kv_capacity_tokens
        eviction = max(0.0, new - free) * engine.prefill_token_s
        return load + eviction + new * engine.prefill_token_s

    longest = max(hit(request, s) for s in fleet)
    everyone = list(range(len(fleet)))
    if longest > request.context_tokens - longest:
        return best([i for i in everyone if hit(request, fleet[i]) == longest], cost)
    return best(everyone, cost)


def loadaware(history: History, request: Request, fleet: Fleet) -> set[int]:
    loads = [s.num_waiting + s.num_running for s in fleet]
    mean = sum(loads) / len(loads)

    def score(i):
        relative = (loads[i] - mean) / max(1, mean)
        return -(hit(request, fleet[i]) / request.context_tokens - 1.0 * relative)

    return best(range(len(fleet)), score)


def ray_p2c(history: History, request: Request, fleet: Fleet) -> set[int]:
    queues = [s.num_waiting + s.num_running for s in fleet]
    num = len(fleet)
    room = [queue < s.max_concurrency for queue, s in zip(queues, fleet, strict=True)]
    allowed = set()
    for i in range(num):
        for j in range(num):
            if i == j and num > 1:
                continue
            pair = [k for k in (i, j) if room[k]] if any(room) else [i, j]
            if pair:
                shortest = min(queues[k] for k in pair)
                allowed |= {k for k in pair if queues[k] == shortest}
    return allowed


def ray_prefix_affinity(history: History, request: Request, fleet: Fleet) -> set[int]:
    longest = max(hit(request, s) for s in fleet)
    everyone = list(range(len(fleet)))
    if longest / request.context_tokens >= 0.1:
        tenants = [i for i in everyone if hit(request, fleet[i]) == longest]
    else:
        trees = [0] * len(fleet)
        for one in history:
            new = one.request.context_tokens - hit(one.request, one.fleet[one.chosen])
            trees[[s.replica_id for s in fleet].index(one.name)] += new
        tenants = [i for i in everyone if trees[i] == min(trees)]
    queues = [s.num_waiting + s.num_running for s in fleet]
    room = [i for i in tenants if queues[i] < fleet[i].max_concurrency]
    if not room and any(q < s.max_concurrency for q, s in zip(queues, fleet, strict=True)):
        return ray_p2c(history, request, fleet)
    return best(room or tenants, queues.__getitem__)


ORACLES: dict[str, Oracle] = {
    "lmetric": lmetric,
    "pending_prefill": pending_prefill,
    "smetric": smetric,
    "dynamo_cost": dynamo_cost,
    "dynamo_lmetric": dynamo_lmetric,
    "llmd_sticky": llmd_sticky,
    "llmd_blend": llmd_blend,
    "sglang_cache_aware": sglang_cache_aware,
    "vllm_cache_aware": vllm_cache_aware,
    "smg_spill": smg_spill,
    "aibrix_prefix_cache": aibrix_prefix_cache,
    "aibrix_load_balance": aibrix_load_balance,
    "aibrix_preble": aibrix_preble,
    "preble_e2": preble_e2,
    "loadaware": loadaware,
    "ray_p2c": ray_p2c,
    "ray_prefix_affinity": ray_prefix_affinity,
}

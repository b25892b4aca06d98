"""Clusters and traffic drawn at random: the arena's sealed cells, and the wider ones of the law.

`draw_cluster` draws a sealed cell of the arena (`tokenyard.routing.arena`), `draw_wide` what the
law is judged on (`tokenyard.routing.never_worse`). Nothing is ever searched there, and no scenario
that ships is among either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tokenyard.routing.fleet import (
    AnyReplica,
    Churn,
    Fleet,
    MeasuredReplica,
    ReplicaConfig,
    TrafficClass,
)
from tokenyard.routing.scenario import NO_REWARD, Arrivals, Discipline, Scenario, Server
from tokenyard.routing.simulator.batching_streams import BatchingStream, Stream
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.types import FloatArray
from tokenyard.workload.sessions import Sessions
from tokenyard.workload.spread import Spread

Kind = Literal["servers", "slots", "engines"]
"""Servers of one slot, of several, or replicas that batch continuously."""

_SLO_S = 2.0
"""SLO of most sealed cells of servers."""

_GPUS = ("l4", "a10g", "a100_80g_sxm", "h100_sxm")


def draw_cluster(rng: np.random.Generator, kind: Kind = "servers") -> Scenario:
    """Draw a cluster and its traffic."""
    return _draw_fleet(rng) if kind == "engines" else _draw_servers(rng, kind == "slots")


def _draw_servers(rng: np.random.Generator, slotted: bool) -> Scenario:
    """Draw 2 to 32 servers, mostly few, of one, two, three or all different speeds."""
    num = round(np.exp(rng.uniform(np.log(2), np.log(32))) ** 0.9 * 2**0.1)
    kinds = min(int(rng.choice([1, 2, 3, num], p=[0.15, 0.25, 0.3, 0.3])), num)
    slowest = rng.uniform(np.log(2000), np.log(5000))
    spread = rng.uniform(np.log(1.3), np.log(5.0))
    speeds = np.exp(slowest + rng.uniform(0, spread, kinds))
    # Each kind at least once.
    which = np.concatenate([np.arange(kinds), rng.integers(0, kinds, num)])[:num]
    discipline: Discipline = "serial"
    if slotted:
        discipline = "parallel_split" if rng.random() < 0.6 else "parallel_full"
    workload, arrivals = _draw_traffic(rng)
    return Scenario(
        name="drawn",
        description="A cluster drawn at random.",
        servers=tuple(
            Server(
                name=f"server-{i}",
                tokens_per_s=round(float(speeds[kind])),
                concurrency=max(round(float(speeds[kind]) / 1000), 1),
            )
            for i, kind in enumerate(which)
        ),
        discipline=discipline,
        workload=workload,
        arrivals=arrivals,
        output_length="by_context" if rng.random() < 0.8 else "none",
        # A slot has only a share of the speed, so one SLO would not fit both.
        slo_response_s=3 * _SLO_S if discipline == "parallel_split" else _SLO_S,
        reward=NO_REWARD,
    )


def _draw_fleet(rng: np.random.Generator) -> Scenario:
    """2 to 8 GPUs of up to four kinds; scrapes 0 to 2 s old, up to two routers, some with churn.

    Half of the conversations are of two classes, of which one goes first and has a tighter SLO.
    """
    num = int(rng.integers(2, 9))
    kinds = rng.choice(_GPUS, int(rng.integers(1, 5)), replace=False)
    which = rng.choice(kinds, num)
    workload, arrivals = _draw_traffic(rng)
    conversation = workload == "azure_conv"
    slo_s = float(np.exp(rng.uniform(np.log(10), np.log(20)))) if conversation else 3.0
    classes = [TrafficClass(name="all", ttft_s=2.0 if conversation else 1.0, tpot_s=0.1)]
    if conversation and rng.random() < 0.5:
        classes = [
            TrafficClass(
                name="first",
                share=float(rng.uniform(0.4, 0.9)),
                ttft_s=float(rng.uniform(0.5, 2.0)),
                tpot_s=float(rng.uniform(0.05, 0.1)),
            ),
            TrafficClass(
                name="last",
                share=float(rng.uniform(0.1, 0.6)),
                priority=1,
                response_s=float(rng.uniform(3.0, 6.0)) * slo_s,
                ttft_s=float(rng.uniform(1.0, 3.0)) * slo_s,
            ),
        ]
    churn = Churn(
        mean_up_s=float(rng.uniform(150, 400)),
        mean_down_s=float(rng.uniform(30, 90)),
        drained_share=float(rng.random()),
    )
    return Scenario(
        name="drawn",
        description="A fleet drawn at random.",
        fleet=Fleet(
            replicas=tuple(
                ReplicaConfig(name=f"gpu-{i}", gpu=str(gpu), model="llama3_8b")
                for i, gpu in enumerate(which)
            ),
            scrape_interval_s=float(rng.choice([0.05, rng.uniform(0.0, 2.0)])),
            num_routers=int(rng.integers(1, 3)),
            classes=tuple(classes),
            churn=churn if rng.random() < 0.3 else None,
        ),
        workload=workload,
        arrivals=arrivals,
        output_length="by_context" if rng.random() < 0.8 else "none",
        slo_response_s=slo_s,
        reward=NO_REWARD,
    )


def _draw_traffic(rng: np.random.Generator) -> tuple[str, Arrivals]:
    """High loads more often than low ones: where servers are idle, all sensible rules do the same.

    The bursts of code overload any cluster for minutes at a fraction of the load of others.
    """
    bursty = rng.random() < 0.4
    workload = "azure_code" if rng.random() < 0.6 else "azure_conv"
    low, high = (0.12, 0.45) if bursty and workload == "azure_code" else (0.4, 0.98)
    load = float(low + (high - low) * np.cbrt(rng.random()))
    return workload, Arrivals(process="mmpp" if bursty else "poisson", load=load)


_WIDE_GPUS = (*_GPUS, "h200_sxm", "a100_80g_sxm_vllm", "h100_sxm_vllm", "h200_sxm_vllm",
              "b200_sxm_vllm", "l40s_vllm", "rtx_pro_6000_vllm")  # fmt: skip
_WIDE_MODELS = {
    "llama2_7b": 0.15, "llama2_13b": 0.15, "llama3_8b": 0.4, "internlm_20b": 0.15,
    "llama3_70b": 0.15,
}  # fmt: skip
_WORKLOADS = {
    "code": "azure_code",
    "chat": "azure_conv",
    "short_code": "azure_code_fifth",
    "short_chat": "azure_conv_tenth",
}
_IN_FLIGHT_TIMES = 4.0
"""Requests of a stream over those that are in flight at once, where nobody waits."""
_MOST_WITH_CACHES, _BLOCK_TOKENS = 16, 512
"""Replicas that have prefix caches, at most, as every run clears every block of each; and tokens of
a block."""
_FEWEST, _MOST = 800, 1600
"""Requests of a stream."""
_REPLICAS, _BATCH, _LOAD = (1, 64), (4, 512), (0.05, 1.2)
_MOST_SCRAPE_S = 2.0
"""Longest time between two publications of a replica's state, seconds."""
_MOST_ROUTERS = 4
_SLO_TIMES = 2.0, 12.0
"""SLO of a replica that batches over the response time of a mean request alone."""
_MOST_SPREAD = 10.0
"""Speed of the fastest server over that of the slowest, at most."""
_WRONG_SPEEDS = 0.2
"""Deviation of the logarithm of times over those declared, in some of the clusters."""
_LONGEST_PROMPT = 131_072
"""Tokens."""


@dataclass(frozen=True, eq=False)
class WideCluster:
    """A cluster, and what its streams are like."""

    scenario: Scenario
    num_requests: int
    """Requests of each stream: more where more are in flight at once."""
    time_factors: FloatArray
    """Times of iterations over those that replicas declare, shape (num_replicas,); empty: none."""

    def streams(
        self, count: int, rng: np.random.Generator, load_factor: float = 1.0
    ) -> list[Stream]:
        """Draw independent streams of the cluster's traffic, at a factor on its load."""
        source, num = StreamSource(self.scenario), self.num_requests
        return [self._as_fast(source.sample(num, rng, load_factor)) for _ in range(count)]

    def _as_fast(self, stream: Stream) -> Stream:
        if not isinstance(stream, BatchingStream) or not len(self.time_factors):
            return stream
        drawn = stream.factors if stream.factors.shape[1] else 1.0
        return replace(stream, factors=drawn * self.time_factors[:, None])


def draw_wide(rng: np.random.Generator) -> WideCluster:
    """Draw a cluster and its traffic.

    Replicas are of GPU kinds and models, or have speeds drawn for themselves. Arrivals are Poisson,
    the bursts fitted to recorded traffic, or conversations and documents with prefix caches, also
    of closed clients. A third of the clusters are of servers at a constant rate.
    """
    return _wide_servers(rng) if rng.random() < 1 / 3 else _wide_fleet(rng)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _pick(rng: np.random.Generator, shares: Mapping[str, float]) -> str:
    return str(rng.choice(list(shares), p=list(shares.values())))


def _wide_servers(rng: np.random.Generator) -> WideCluster:
    """Of up to four speeds, of one slot or several."""
    num = round(_log_uniform(rng, *_REPLICAS))
    discipline: Discipline = rng.choice(
        ["serial", "parallel_split", "parallel_full", "processor_sharing"], p=[0.5, 0.2, 0.2, 0.1]
    ).item()
    slowest, spread = _log_uniform(rng, 300, 10_000), _log_uniform(rng, 1.0, _MOST_SPREAD)
    kinds = slowest * spread ** rng.random(int(rng.integers(1, min(num, 4) + 1)))
    speeds = rng.choice(kinds, num)
    slots = int(rng.integers(2, 17))
    traffic = _pick(rng, {"code": 0.4, "chat": 0.35, "short_code": 0.125, "short_chat": 0.125})
    process = _pick(rng, {"poisson": 0.5, "mmpp": 0.5})
    load = float(rng.uniform(*_LOAD))
    scenario = Scenario(
        name=f"{num} servers ({discipline}), {traffic}, {process}, load {load:.2f}",
        description="Servers drawn for the law.",
        servers=tuple(
            Server(name=f"server-{i}", tokens_per_s=float(speed), concurrency=slots)
            for i, speed in enumerate(speeds)
        ),
        discipline=discipline,
        workload=_WORKLOADS[traffic],
        arrivals=Arrivals(process=process, load=load),
        output_length=rng.choice(["by_context", "none", "oracle"], p=[0.7, 0.2, 0.1]).item(),
        output_drift=_log_uniform(rng, 0.5, 2.0) if rng.random() < 0.3 else 1.0,
        reward=NO_REWARD,
    )
    slot_speed = float(np.median(speeds)) / (slots if discipline == "parallel_split" else 1)
    service_s = sum(scenario.mean_lengths_tokens) / slot_speed
    scenario = scenario.model_copy(
        update={"slo_response_s": service_s * _log_uniform(rng, 1.5, 15.0)}
    )
    in_flight = num * (1 if discipline == "serial" else slots)
    return WideCluster(scenario, _requests(in_flight), np.empty(0))


def _wide_fleet(rng: np.random.Generator) -> WideCluster:
    num = round(_log_uniform(rng, *_REPLICAS))
    kinds = [_wide_replica(rng) for _ in range(int(rng.integers(1, min(num, 4) + 1)))]
    replicas = [
        kinds[which].model_copy(update={"name": f"replica-{i}"})
        for i, which in enumerate(rng.integers(0, len(kinds), num))
    ]
    traffic = _pick(
        rng, {"code": 0.25, "chat": 0.25, "short_code": 0.05, "short_chat": 0.05,
              "turns": 0.25, "documents": 0.15}
    )  # fmt: skip
    load = float(rng.uniform(*_LOAD))
    most_tokens = min(kind.kv_capacity_tokens for kind in kinds) / 2
    sessions = None
    if traffic in ("turns", "documents"):
        replicas = replicas[:_MOST_WITH_CACHES]
        sessions = _wide_sessions(rng, traffic == "documents", min(most_tokens, _LONGEST_PROMPT))
        process = _pick(rng, {"poisson": 0.75, "closed": 0.25})
        arrivals = Arrivals(process=process, warm_load=load)
    else:
        process = _pick(rng, {"poisson": 0.5, "mmpp": 0.5})
        arrivals = Arrivals(process=process, load=load)
    limits = "/".join(str(kind.max_batch) for kind in kinds)
    scrape_s = float(rng.choice([0.0, 0.05, rng.uniform(0.0, _MOST_SCRAPE_S)]))
    fleet = Fleet(
        replicas=tuple(replicas),
        prefix_block_tokens=_BLOCK_TOKENS if sessions else 0,
        scrape_interval_s=scrape_s,
        num_routers=int(rng.integers(1, _MOST_ROUTERS + 1)) if num > 1 else 1,
        iteration_jitter=float(rng.uniform(0.05, 0.5)) if rng.random() < 0.3 else 0.0,
    )
    scenario = Scenario(
        name=f"{len(replicas)} replicas (batch {limits}), {traffic}, {process}, load {load:.2f}",
        description="A fleet drawn for the law.",
        fleet=fleet,
        sessions=sessions,
        workload=_WORKLOADS.get(traffic, "azure_conv"),
        arrivals=arrivals,
        output_length=rng.choice(["by_context", "none", "oracle"], p=[0.7, 0.2, 0.1]).item(),
        output_drift=_log_uniform(rng, 0.5, 2.0) if not sessions and rng.random() < 0.3 else 1.0,
        reward=NO_REWARD,
    )
    alone_s = float(
        np.median([_alone_s(replica, *scenario.mean_lengths_tokens) for replica in replicas])
    )
    slo_s = alone_s * _log_uniform(rng, *_SLO_TIMES)
    churn = _wide_churn(rng, alone_s) if rng.random() < 0.15 else None
    fleet = fleet.model_copy(update={"classes": _wide_classes(rng, slo_s), "churn": churn})
    scenario = scenario.model_copy(update={"fleet": fleet, "slo_response_s": slo_s})
    wrong = rng.random() < 0.4
    factors = np.exp(rng.normal(0.0, _WRONG_SPEEDS, len(replicas))) if wrong else np.empty(0)
    in_flight = alone_s * scenario.rate_per_s(sum(scenario.mean_lengths_tokens))
    return WideCluster(scenario, _requests(in_flight), factors)


def _requests(in_flight: float) -> int:
    return int(np.clip(_IN_FLIGHT_TIMES * in_flight, _FEWEST, _MOST))


def _wide_replica(rng: np.random.Generator) -> AnyReplica:
    """One kind: a GPU and a model that fit, or an engine of any speed."""
    batch = round(_log_uniform(rng, *_BATCH))
    budget = max(batch + 1, int(rng.choice([256, 512, 2048, 8192])))
    if rng.random() < 0.25:
        iteration_s = _log_uniform(rng, 0.005, 0.5)
        return MeasuredReplica(
            name="kind", max_batch=batch, token_budget=budget, iteration_s=iteration_s,
            prefill_token_s=iteration_s * _log_uniform(rng, 1e-3, 2e-2),
            sequence_s=iteration_s * _log_uniform(rng, 1e-3, 2e-2),
            kv_token_s=iteration_s * _log_uniform(rng, 1e-6, 2e-5),
            kv_capacity_tokens=_log_uniform(rng, 3e4, 1e6),
        )  # fmt: skip
    model = _pick(rng, _WIDE_MODELS)
    while True:
        try:
            replica = ReplicaConfig(
                name="kind", gpu=str(rng.choice(_WIDE_GPUS)), model=model, max_batch=batch,
                token_budget=budget, tensor_parallel=int(rng.choice([1, 2, 4, 8])),
                precision="fp8" if rng.random() < 0.2 else "fp16",
            )  # fmt: skip
        except ValueError:
            continue
        if replica.kv_capacity_tokens > 3e4:
            return replica


def _wide_sessions(rng: np.random.Generator, documents: bool, most_tokens: float) -> Sessions:
    # Of documents that are mostly too long for the memory none might be left.
    mean, std = (min(_log_uniform(rng, 3000, 30_000), most_tokens / 2) for _ in range(2))
    opening = Spread(mean=mean, std=std)
    return Sessions(
        mean_turns=float(rng.uniform(1.0, 3.0) if documents else rng.uniform(2.0, 10.0)),
        mean_think_s=_log_uniform(rng, 3.0, 60.0),
        num_system_prompts=int(rng.integers(1, 17)),
        system_prompt_tokens=int(rng.integers(0, 4097)),
        opening_tokens=opening if documents else None,
        max_context_tokens=int(most_tokens),
    )


def _wide_classes(rng: np.random.Generator, slo_s: float) -> tuple[TrafficClass, ...]:
    """One class, two of one priority, or two of which one goes first."""
    kind = _pick(rng, {"one": 0.6, "two": 0.2, "priorities": 0.2})
    if kind == "one":
        ttft_s = slo_s * float(rng.uniform(0.2, 0.6)) if rng.random() < 0.5 else None
        return (TrafficClass(name="all", ttft_s=ttft_s),)
    share = float(rng.uniform(0.3, 0.8))
    return (
        TrafficClass(name="first", share=share, ttft_s=slo_s * float(rng.uniform(0.15, 0.5))),
        TrafficClass(
            name="last", share=1.0 - share, priority=int(kind == "priorities"),
            response_s=slo_s * float(rng.uniform(2.0, 6.0)),
        ),
    )  # fmt: skip


def _wide_churn(rng: np.random.Generator, alone_s: float) -> Churn:
    up_s = max(alone_s, 1.0) * _log_uniform(rng, 20, 200)
    return Churn(
        mean_up_s=up_s,
        mean_down_s=up_s * float(rng.uniform(0.05, 0.3)),
        drained_share=float(rng.random()),
        warm_up_s=up_s * float(rng.uniform(0.0, 0.2)),
    )


def _alone_s(replica: AnyReplica, context_tokens: float, output_tokens: float) -> float:
    """Response time of a mean request at a half full replica, seconds."""
    base, prefill, sequence, kv = replica.iteration.tolist()
    held = context_tokens + output_tokens / 2.0
    running = max(1.0, min(replica.max_batch, replica.kv_capacity_tokens / held) / 2.0)
    step_s = base + running * (sequence + kv * held)
    chunks = math.ceil(context_tokens / replica.token_budget)
    return float(context_tokens * prefill + (chunks + output_tokens) * step_s)

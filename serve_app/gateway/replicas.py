"""What the policies are told of the replicas: one table, in the simulator's names and units.

Two sources meet here. A replica publishes its queue, its batch and its memory now and then; what
this router has sent itself and got back it knows at once. `ReplicaTable.snapshots` combines them as
`tokenyard.routing.simulator.batching_kernel` does for a router of the simulator, which a test
compares number by number.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from serve_app.cluster import EngineProfile
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot

RECENT_WEIGHT = 0.1
"""Weight of the newest completion in the mean of response times."""
_MAX_HISTORY = 4096


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What a replica tells of itself."""

    num_waiting: int
    num_running: int
    kv_used_fraction: float
    observed_at_s: float
    """Unix time, seconds."""
    accepting: bool = True
    """Whether it takes requests; false while it drains."""
    max_batch: int | None = None
    """Most sequences that it runs at once now; None: as its profile says."""


@dataclass(slots=True)
class _Sent:
    """A request of one replica."""

    assumed_prefill_tokens: float
    predicted_output_tokens: float
    num_generated: int = 0


class InFlight:
    """What this router sent to one replica and has not got back."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._requests: dict[str, _Sent] = {}
        self._prefill_tokens = 0.0
        self._output_tokens = 0.0
        self._generated_tokens = 0
        self._times_s: deque[float] = deque([-math.inf], _MAX_HISTORY)
        self._counts: deque[int] = deque([0], _MAX_HISTORY)
        self.mean_response_s = math.nan

    @property
    def count(self) -> int:
        """Requests in flight."""
        return len(self._requests)

    @property
    def prefill_tokens(self) -> float:
        """Prompt tokens believed to be still to compute."""
        return max(self._prefill_tokens, 0.0)

    @property
    def output_tokens(self) -> float:
        """Predicted tokens still to come; at least one for each request."""
        return max(self._output_tokens - self._generated_tokens, float(self.count))

    def count_at(self, time_s: float) -> int:
        """Requests that were in flight at a time, as far as is remembered."""
        return self._counts[max(bisect_right(self._times_s, time_s) - 1, 0)]

    def send(
        self,
        request_id: str,
        assumed_prefill_tokens: float,
        predicted_output_tokens: float,
        now_s: float,
    ) -> None:
        """Note a request that is on its way."""
        self._requests[request_id] = _Sent(assumed_prefill_tokens, predicted_output_tokens)
        self._prefill_tokens += assumed_prefill_tokens
        self._output_tokens += predicted_output_tokens
        self._remember(now_s)

    def receive(self, request_id: str, num_generated: int) -> None:
        """Note how many tokens of a request have come so far."""
        request = self._requests.get(request_id)
        if request is None or num_generated <= request.num_generated:
            return
        if request.num_generated == 0:
            self._prefill_tokens -= request.assumed_prefill_tokens
        self._generated_tokens += num_generated - request.num_generated
        request.num_generated = num_generated

    def close(self, request_id: str, now_s: float, response_s: float | None = None) -> None:
        """Note the end of a request.

        Args:
            request_id: Unknown ones are ignored.
            now_s: Unix time, seconds.
            response_s: How long it took; None where it was not completed.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._output_tokens -= request.predicted_output_tokens
        self._generated_tokens -= request.num_generated
        if request.num_generated == 0:
            self._prefill_tokens -= request.assumed_prefill_tokens
        if response_s is not None:
            recent = self.mean_response_s
            self.mean_response_s = (
                response_s if math.isnan(recent) else recent + RECENT_WEIGHT * (response_s - recent)
            )
        self._remember(now_s)

    def _remember(self, now_s: float) -> None:
        self._times_s.append(max(now_s, self._times_s[-1]))
        self._counts.append(self.count)


class PrefixIndex:
    """Prefix blocks that were sent to a replica, the least recently sent forgotten first."""

    def __init__(self, capacity_blocks: int) -> None:
        """Believe in at most `capacity_blocks` blocks."""
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are believed to be cached."""
        for num, block in enumerate(blocks):
            if block not in self._blocks:
                return num
        return len(blocks)

    def send(self, blocks: Iterable[int]) -> None:
        """Note blocks that were sent."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Prompt:
    """A prompt, and the names of its whole blocks: hashed once per size of block."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Hash nothing yet."""
        self.token_ids = token_ids
        self._blocks: dict[int, tuple[int, ...]] = {0: ()}

    def blocks(self, block_tokens: int) -> tuple[int, ...]:
        """Return the names of blocks, each by all tokens up to its end; 0 tokens: none."""
        if block_tokens not in self._blocks:
            self._blocks[block_tokens] = tuple(self._hash(block_tokens))
        return self._blocks[block_tokens]

    def _hash(self, block_tokens: int) -> Iterator[int]:
        name = 0
        for end in range(block_tokens, len(self.token_ids) + 1, block_tokens):
            name = hash((name, *self.token_ids[end - block_tokens : end]))
            yield name


class ReplicaState:
    """One replica: what it is, what it published, and what was sent to it."""

    def __init__(
        self,
        replica_id: str,
        pool: str,
        profile: EngineProfile,
        block_tokens: int,
        now_s: float,
        mean_lengths_tokens: tuple[float, float],
    ) -> None:
        """Believe that the replica is idle until it says otherwise."""
        self._mean_lengths_tokens = mean_lengths_tokens
        self._set_profile(profile)
        self.replica_id = replica_id
        self.pool = pool
        self.block_tokens = block_tokens
        self.in_flight = InFlight()
        self.status = EngineStatus(0, 0, 0.0, now_s)
        self.last_sent_s = -math.inf
        """Unix time when a request was last sent to it, seconds."""
        self._count_when_published = 0
        capacity = int(profile.kv_capacity_tokens // block_tokens) if block_tokens else 0
        self._prefixes = PrefixIndex(capacity)

    def publish(self, status: EngineStatus) -> None:
        """Take what the replica tells, unless something newer is known."""
        if status.observed_at_s > self.status.observed_at_s:
            self.status = status
            self._count_when_published = self.in_flight.count_at(status.observed_at_s)
            if status.max_batch not in (None, self.profile.max_batch):
                self._set_profile(self.profile.model_copy(update={"max_batch": status.max_batch}))

    def _set_profile(self, profile: EngineProfile) -> None:
        self.profile = profile
        self._tokens_per_s = profile.slot_tokens_per_s(*self._mean_lengths_tokens)

    def match_tokens(self, prompt: Prompt) -> int:
        """Leading tokens of a prompt that are believed to be cached; never the last one."""
        if not self.block_tokens:
            return 0
        most = (len(prompt.token_ids) - 1) // self.block_tokens
        found = self._prefixes.match(prompt.blocks(self.block_tokens))
        return min(found, most) * self.block_tokens

    def send(
        self,
        request_id: str,
        prompt: Prompt,
        match_tokens: int,
        predicted_output_tokens: float,
        now_s: float,
    ) -> None:
        """Note a request that is on its way."""
        tokens_to_prefill = float(len(prompt.token_ids) - match_tokens)
        self.in_flight.send(request_id, tokens_to_prefill, predicted_output_tokens, now_s)
        self.last_sent_s = now_s
        self._prefixes.send(prompt.blocks(self.block_tokens))

    def snapshot(self, match_tokens: int) -> ReplicaSnapshot:
        """What a policy may know.

        Args:
            match_tokens: Of the request to be placed.
        """
        profile, in_flight = self.profile, self.in_flight
        # What was sent and what came back since the state was published is known at once.
        since = in_flight.count - self._count_when_published
        waiting, running = self.status.num_waiting, self.status.num_running
        outstanding = max(waiting + running + since, in_flight.count)
        if waiting > 0:
            waiting = max(outstanding - running, 0)
        else:
            waiting = max(outstanding - profile.max_batch, 0)
        if in_flight.count:
            # Others' requests are taken to be like one's own.
            share = outstanding / in_flight.count
            prefill, output = in_flight.prefill_tokens * share, in_flight.output_tokens * share
        else:
            # All are others', which a lone router of the simulator never meets: mean ones, those
            # that run half done.
            prompt_tokens, output_tokens = self._mean_lengths_tokens
            prefill = waiting * prompt_tokens
            output = (outstanding + waiting) / 2 * output_tokens
        return ReplicaSnapshot(
            replica_id=self.replica_id,
            tokens_per_s=self._tokens_per_s,
            num_slots=profile.max_batch,
            max_concurrency=profile.max_batch,
            num_waiting=waiting,
            num_running=outstanding - waiting,
            tokens_in_flight=prefill + output,
            mean_response_s=in_flight.mean_response_s,
            observed_at_s=self.status.observed_at_s,
            engine=EngineSnapshot(
                iteration_s=profile.iteration_s,
                prefill_token_s=profile.prefill_token_s,
                sequence_s=profile.sequence_s,
                kv_token_s=profile.kv_token_s,
                token_budget=profile.token_budget,
                kv_capacity_tokens=profile.kv_capacity_tokens,
                kv_used_fraction=self.status.kv_used_fraction,
                prefill_in_flight_tokens=prefill,
                output_in_flight_tokens=output,
                match_tokens=match_tokens,
            ),
        )


class ReplicaTable:
    """All replicas of all pools; not thread-safe."""

    def __init__(self, mean_lengths_tokens: tuple[float, float]) -> None:
        """Start without replicas.

        Args:
            mean_lengths_tokens: Mean prompt and output of a request, tokens; speeds are for such.
        """
        self._mean_lengths_tokens = mean_lengths_tokens
        self.replicas: dict[str, ReplicaState] = {}

    def add(
        self, replica_id: str, pool: str, profile: EngineProfile, block_tokens: int, now_s: float
    ) -> ReplicaState:
        """Track a replica; one that is known keeps what is in flight."""
        if replica_id not in self.replicas:
            replica = ReplicaState(
                replica_id, pool, profile, block_tokens, now_s, self._mean_lengths_tokens
            )
            self.replicas[replica_id] = replica
        return self.replicas[replica_id]

    def keep(self, pool: str, replica_ids: Iterable[str]) -> None:
        """Forget the replicas of a pool that are no longer there."""
        kept = set(replica_ids)
        for gone in [r.replica_id for r in self.replicas.values() if r.pool == pool]:
            if gone not in kept:
                del self.replicas[gone]

    def offered(self, now_s: float, stale_after_s: float) -> list[ReplicaState]:
        """Replicas that take requests and were heard of lately; all, where there is none."""
        everyone = list(self.replicas.values())
        accepting = [r for r in everyone if r.status.accepting] or everyone
        fresh = [r for r in accepting if now_s - r.status.observed_at_s <= stale_after_s]
        return fresh or accepting

    def snapshots(self, replicas: Sequence[ReplicaState], prompt: Prompt) -> list[ReplicaSnapshot]:
        """What a policy may know of some replicas when a prompt is to be placed."""
        return [one.snapshot(one.match_tokens(prompt)) for one in replicas]


_VLLM_WAITING = "vllm:num_requests_waiting"
_VLLM_RUNNING = "vllm:num_requests_running"
_VLLM_KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")


def parse_vllm(page: bytes, observed_at_s: float) -> EngineStatus:
    """Read what a vLLM server publishes; several engines behind one endpoint are added up.

    Only the lines that are needed are read. vLLM's usages are shares from 0 to 1, not percentages.

    Raises:
        ValueError: A metric is missing, or is no finite number.
    """
    page = b"\n" + page
    waiting, running = _samples(page, _VLLM_WAITING), _samples(page, _VLLM_RUNNING)
    usage = next((found for name in _VLLM_KV_USED if (found := _samples(page, name))), [])
    if not waiting or not running or not usage:
        needed = [_VLLM_WAITING, _VLLM_RUNNING, _VLLM_KV_USED[0]]
        raise ValueError(f"metrics lack one of {needed}")
    return EngineStatus(
        num_waiting=max(int(sum(waiting)), 0),
        num_running=max(int(sum(running)), 0),
        kv_used_fraction=min(max(sum(usage) / len(usage), 0.0), 1.0),
        observed_at_s=observed_at_s,
    )


def _samples(page: bytes, name: str) -> list[float]:
    """Values of a metric, on a page that begins with an end of line."""
    values = [
        float(text) for text in re.findall(rb"\n%b(?:\{.*\})?[ \t]+(\S+)" % name.encode(), page)
    ]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"metric {name} is not finite")
    return values


class HostMetrics:
    """Load of the machine and of its GPUs; NVML where there is a GPU, psutil for the rest."""

    def __init__(self) -> None:
        """Open NVML where it is there."""
        self._gpus = _open_gpus()
        self._network_bytes: tuple[float, float] | None = None
        psutil.cpu_percent()  # The first call only starts the measurement.

    def read(self, now_s: float) -> dict[str, float]:
        """Return what can be measured, by name; shares are from 0 to 1.

        Args:
            now_s: Seconds of any clock.
        """
        memory = psutil.virtual_memory()
        values = {
            "cpu_used_fraction": psutil.cpu_percent() / 100.0,
            "memory_used_fraction": memory.percent / 100.0,
        }
        counters = psutil.net_io_counters()
        if counters is not None:
            total = float(counters.bytes_sent + counters.bytes_recv)
            if self._network_bytes is not None and now_s > self._network_bytes[0]:
                before_s, before = self._network_bytes
                values["network_bytes_per_s"] = (total - before) / (now_s - before_s)
            self._network_bytes = (now_s, total)
        for index, gpu in enumerate(self._gpus):
            values |= _read_gpu(index, gpu)
        return values


def _open_gpus() -> list[object]:
    import pynvml

    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _read_gpu(index: int, gpu: object) -> dict[str, float]:
    import pynvml

    try:
        used = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        return {
            f"gpu{index}_used_fraction": pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100.0,
            f"gpu{index}_memory_used_fraction": used.used / used.total,
            f"gpu{index}_power_w": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000.0,
        }
    except pynvml.NVMLError:
        return {}

"""An engine of several processes: Ray actors that share a Hugging Face model.

`WorkerGroup` places the ranks, forms the process group and loads; `ShardedEngine` serves requests
with it. Ranks are actors of their own, hidden from whoever routes: one engine is one replica. The
engine's own process holds no weights and imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_app.engine_config import EngineConfig
from serve_app.engines.admission import Admission, reason_line
from serve_app.engines.base import IDLE, Chunk, EngineError, EngineStats, FinishReason, Sampling
from serve_app.engines.kv_events import KvEventPublisher
from serve_app.engines.models import check_plan, find_model, read_shape
from serve_app.engines.sharded.messages import GroupLimits, Progress, RankReport, RequestNames
from tokenyard.routing.types import OrderKey

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_MAX_REVIVALS = 3
"""How often dead ranks are replaced before the engine is given up, with its replica."""
_REVIVALS_WITHIN_S = 300.0
_CANCEL_AGAIN_S = 0.1
_MOST_STARTS = 3
_NOT_CONNECTED = "connectFullMesh"
"""What gloo says where ranks did not reach each other: its handshake fails at times, on a busy
machine more often (pytorch/pytorch#53270)."""
_PING_TIMEOUT_S = 10.0
"""A rank that is alive answers from its own event loop, also while it computes."""


def rank_bundles(config: EngineConfig) -> list[dict[str, float]]:
    """Return the resources that ranks reserve, one bundle each.

    A deployment that brings its own placement group puts its own bundle before these.
    """
    if config.device == "gpu" or (
        config.device == "auto" and ray.cluster_resources().get("GPU", 0) >= 1
    ):
        bundle = {"GPU": 1.0}
        if config.accelerator_type is not None:
            bundle[f"accelerator_type:{config.accelerator_type}"] = 0.001
    else:
        bundle = {"CPU": config.rank_cpus}
    return [dict(bundle) for _ in range(config.num_ranks)]


class Rank:
    """The actor of one rank; its methods call those of `serve_app.engines.sharded.rank`."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        if not ray.get_gpu_ids():
            # Ray hides no GPU from an actor that reserved none, and torch would take the first.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._config = config
        self._rank = rank
        self._model: Any = None
        self._manager: Any = None
        self._outbox: Any = None

    async def open_store(self) -> tuple[str, int]:
        """Open the store where ranks meet, and return its address."""
        from serve_app.engines.sharded.rank import open_store

        host = ray.util.get_node_ip_address()
        self._store, port = open_store(host, self._config.num_ranks)
        return host, port

    async def load(self, meeting_place: tuple[str, int] | None) -> None:
        """Meet the others at the store of rank 0, if there are any, and load this share."""
        self._model = await asyncio.to_thread(_in_a_sentence, self._load, meeting_place)

    def _load(self, meeting_place: tuple[str, int] | None) -> Any:
        from serve_app.engines.sharded import rank

        if meeting_place is not None:
            store = rank.meet(meeting_place, self._config.num_ranks)
            rank.join_group(self._rank, self._config.num_ranks, store)
        return rank.load_share(self._config)

    async def serve(self) -> GroupLimits:
        """Allocate the cache and begin to take requests."""
        from serve_app.engines.sharded.rank import LockstepManager, Outbox

        self._outbox = Outbox(asyncio.get_running_loop())

        def begin() -> LockstepManager:
            manager = LockstepManager(self._model, self._config, self._outbox)
            manager.start()
            return manager

        self._manager = await asyncio.to_thread(_in_a_sentence, begin)
        limits: GroupLimits = self._manager.limits
        return limits

    async def submit(self, request_id: str, token_ids: list[int], sampling: Sampling) -> None:
        """Take a request."""
        self._manager.submit(request_id, token_ids, sampling)

    async def cancel(self, request_ids: list[str]) -> None:
        """Forget requests; unknown ones are ignored."""
        for request_id in request_ids:
            self._manager.cancel_request(request_id)

    async def poll(self, timeout_s: float) -> RankReport:
        """Return what has happened since the last call, as soon as something has."""
        report: RankReport = await self._outbox.take(timeout_s)
        return report

    async def ping(self) -> None:
        """Answer, to show that the actor is alive."""

    async def live(self) -> None:
        """Never return: a caller that waits learns when the process ends."""
        await asyncio.Event().wait()


def _in_a_sentence(function: Any, *args: Any) -> Any:
    """Call a function, and turn its failure into an EngineError, which can be sent and shown."""
    try:
        return function(*args)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(reason_line(error)) from error


class WorkerGroup:
    """Ranks that are placed and ready to load; `disband` frees them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.ranks: list[Any] = []
        self._own_group: PlacementGroup | None = None

    async def place(self) -> None:
        """Start one actor per bundle, in the caller's placement group or one of our own.

        Raises:
            EngineError: The caller's placement group is too small.
        """
        group = ray.util.get_current_placement_group()
        if group is None:
            bundles = rank_bundles(self.config)
            group = self._own_group = placement_group(bundles, strategy="PACK")
            while not await asyncio.to_thread(group.wait, 1):
                pass
        bundles = group.bundle_specs
        if len(bundles) < self.config.num_ranks:
            raise EngineError(
                f"the placement group has {len(bundles)} bundles for {self.config.num_ranks} "
                "ranks: take rank_bundles() of the same configuration"
            )
        first = len(bundles) - self.config.num_ranks
        self.ranks = [
            _start_rank(self.config, number, group, first + number)
            for number in range(self.config.num_ranks)
        ]

    async def load(self) -> None:
        """Form the process group and load every share; raises as `call`."""
        place = await self.call(0, "open_store") if self.config.num_ranks > 1 else None
        await self.call_all("load", place)

    async def serve(self) -> GroupLimits:
        """Allocate the cache and begin to take requests; raises as `call`."""
        limits: GroupLimits = (await self.call_all("serve"))[0]
        return limits

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call all ranks, and stop at the first failure: other ranks may wait for it forever."""
        calls = (self.call(number, method, *args) for number in range(len(self.ranks)))
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def call(self, number: int, method: str, *args: Any) -> Any:
        """Call one rank; an EngineError says that it failed or died."""
        try:
            return await getattr(self.ranks[number], method).remote(*args)
        except (RayError, EngineError) as error:
            where = f"rank {number} of {self.config.num_ranks}"
            raise EngineError(f"{where}: {reason_of(error)}") from None

    def disband(self) -> None:
        """End the ranks, and free their reservation."""
        for rank in self.ranks:
            ray.kill(rank)
        self.ranks = []
        if self._own_group is not None:
            remove_placement_group(self._own_group)
            self._own_group = None


def _start_rank(config: EngineConfig, number: int, group: PlacementGroup, bundle: int) -> Any:
    reserved = group.bundle_specs[bundle]
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    actor = ray.remote(Rank).options(
        num_cpus=reserved.get("CPU", 0),
        num_gpus=reserved.get("GPU", 0),
        scheduling_strategy=strategy,
        max_restarts=0,
    )
    return actor.remote(config, number)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def reason_of(error: Exception) -> str:
    """Shorten the many lines of a Ray error to one sentence."""
    if isinstance(error, RayTaskError):
        error = error.cause
    return "its process has died" if isinstance(error, RayError) else reason_line(error)


class _Stream:
    """The queue of chunks for one caller."""

    def __init__(self, request_id: str, key: str, ignore_eos: bool) -> None:
        self.request_id, self.key, self.ignore_eos = request_id, key, ignore_eos
        self.ended = False
        """Whether rank 0 is done with it."""
        self._items: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()

    def put(self, item: Chunk | EngineError) -> None:
        self.ended = isinstance(item, EngineError) or item.finish_reason is not None
        self._items.put_nowait(item)

    async def next(self) -> Chunk:
        item = await self._items.get()
        if isinstance(item, EngineError):
            raise item
        return item


class _Streams:
    """Requests in progress, and aborted ones that rank 0 does not know of yet."""

    def __init__(self, admission: Admission) -> None:
        self.by_id: dict[str, _Stream] = {}
        """Streams by the caller's id."""
        self.orphans: dict[str, None] = {}
        """Keys of requests that nobody waits for, until rank 0 has acknowledged that."""
        self._admission, self._names = admission, RequestNames()
        self._by_key: dict[str, _Stream] = {}
        """Streams by the id at rank 0, which is never used twice."""
        self._has_orphans = asyncio.Event()

    def open(self, request_id: str, sampling: Sampling, order_key: OrderKey | None) -> _Stream:
        key = self._names.new(request_id, order_key)
        stream = _Stream(request_id, key, sampling.ignore_eos)
        self.by_id[request_id] = self._by_key[key] = stream
        self._admission.enter(request_id)
        return stream

    def close(self, stream: _Stream, has_ranks: bool) -> None:
        """Forget a stream; if its request has not ended, have rank 0 forget it too."""
        if self._by_key.pop(stream.key, None) is None:
            return
        del self.by_id[stream.request_id]
        self._admission.leave(stream.request_id)
        if not stream.ended and has_ranks:
            self._orphan(stream.key)

    def _orphan(self, key: str) -> None:
        """Put a request on the list of those that rank 0 is to cancel."""
        self.orphans[key] = None
        self._has_orphans.set()

    async def cancel_orphans(self, rank: Any) -> None:
        """Tell rank 0 of requests that nobody waits for, for as long as it lives.

        In a task of the engine's own: what is sent from a task that Serve cancels is cancelled with
        it, and the request would go on.
        """
        self.orphans.clear()  # Of ranks that are gone.
        while True:
            await self._has_orphans.wait()
            self._has_orphans.clear()
            keys = list(self.orphans)
            try:
                await rank.cancel.remote(keys)
            except RayError as error:
                # Where the rank has died, whoever watches it says so, and ends this.
                name = type(error).__name__
                logger.warning("rank 0 did not take %d cancels: %s", len(keys), name)
                await asyncio.sleep(_CANCEL_AGAIN_S)
                self._has_orphans.set()
                continue
            for key in keys:
                self.orphans.pop(key, None)

    def hand_on(self, progress: Progress, eos_token_ids: frozenset[int]) -> None:
        """Pass the progress of a request to its caller."""
        stream = self._by_key.get(progress.request_id)
        if stream is None:
            # Its cancel was lost, or came before the request itself.
            if not progress.finished and progress.token_id is not None:
                self._orphan(progress.request_id)
        elif progress.token_id is None:
            reason_text = (progress.error or "no reason given").splitlines()[0]
            stream.put(EngineError(f"rank 0 could not go on: {reason_text}"))
        else:
            reason: FinishReason | None = None
            if progress.finished:
                at_eos = progress.token_id in eos_token_ids
                reason = "stop" if at_eos and not stream.ignore_eos else "length"
            stream.put(Chunk((progress.token_id,), reason))


class ShardedEngine:
    """An engine over a `WorkerGroup`, through transformers' continuous batching."""

    def __init__(self, config: EngineConfig, group: WorkerGroup | None = None) -> None:
        """Serve what `config` says; a given `group` has loaded already."""
        self.config = config
        self._group = group or WorkerGroup(config)
        self._doing = "looking for the model"
        self._watchers: list[asyncio.Task[None]] = []
        self._revival: asyncio.Task[None] | None = None
        self._revived_s: list[float] = []
        self._stopped = False
        self._limits = GroupLimits(0, frozenset())
        self._reported = IDLE
        self._admission = Admission(config.max_batch, config.max_waiting)
        self._streams = _Streams(self._admission)
        self._publisher: KvEventPublisher | None = None

    @property
    def kv_events(self) -> dict[str, str] | None:
        """Where it publishes what its prefix cache holds; None: nowhere."""
        return None if self._publisher is None else self._publisher.addresses

    async def start(self) -> None:
        """Load the weights and be ready, within `start_timeout_s`: see `Engine.start`."""
        self._stopped = False
        if self.config.kv_events and self._publisher is None:
            self._publisher = KvEventPublisher(ray.util.get_node_ip_address())
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                await self._start_connected()
        except TimeoutError:
            await self.stop()
            raise EngineError(
                f"the engine was not ready within {self.config.start_timeout_s:g} s: it was still "
                f"{self._doing}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def _start_connected(self) -> None:
        """Start; where ranks cannot reach each other, start again with new processes."""
        for _ in range(_MOST_STARTS - 1):
            try:
                return await self._start()
            except EngineError as error:
                if _NOT_CONNECTED not in str(error):
                    raise
                logger.warning("ranks are started anew: %s", error)
                await self._clear()
        return await self._start()

    async def _start(self) -> None:
        self._reported = IDLE
        folder = await asyncio.to_thread(find_model, self.config.model)
        shape = await asyncio.to_thread(read_shape, folder)
        check_plan(shape, self.config)
        if not self._group.ranks:
            kind = "GPU" if "GPU" in rank_bundles(self.config)[0] else "CPU"
            total = ray.cluster_resources().get(kind, 0)
            self._doing = (
                f"waiting for {self.config.num_ranks} free {kind}s "
                f"(the cluster has {total:g} in all)"
            )
            await self._group.place()
            self._doing = "loading the weights"
            await self._group.load()
        self._doing = "allocating the cache"
        self._limits = await self._group.serve()
        longest = min(
            self.config.max_model_tokens, self._limits.kv_capacity_tokens, shape.max_positions
        )
        self._admission.open(longest, shape.vocab_size)
        watched = (self._watch(number) for number in range(self.config.num_ranks))
        works = (self._read(), self._streams.cancel_orphans(self._group.ranks[0]), *watched)
        self._watchers = [asyncio.create_task(work) for work in works]

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        order_key: OrderKey | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate: see `Engine.generate`."""
        num_running = self._reported.num_running_if_full
        self._admission.check(request_id, token_ids, sampling, num_running)
        stream = self._streams.open(request_id, sampling, order_key)
        try:
            await self._submit(stream.key, list(token_ids), sampling)
            while (chunk := await stream.next()).finish_reason is None:
                yield chunk
            yield chunk
        finally:
            self._streams.close(stream, bool(self._group.ranks))

    async def _submit(self, key: str, token_ids: list[int], sampling: Sampling) -> None:
        if not self._group.ranks:
            raise EngineError(self._admission.closed or "the engine was stopped")
        try:
            await self._group.ranks[0].submit.remote(key, token_ids, sampling)
        except (RayError, EngineError) as error:
            reason = self._admission.closed or f"rank 0: {reason_of(error)}"
            raise EngineError(reason) from None

    async def abort(self, request_id: str) -> None:
        """Forget a request; unknown ones are ignored."""
        stream = self._streams.by_id.get(request_id)
        if stream is not None:
            self._streams.close(stream, bool(self._group.ranks))
            stream.put(Chunk((), "abort"))

    def stats(self) -> EngineStats:
        """Tell the state as of now, without waiting."""
        # Requests on their way to rank 0 wait, whether or not it has counted them.
        return replace(
            self._reported,
            num_waiting=max(0, len(self._streams.by_id) - self._reported.num_running),
            kv_capacity_tokens=self._limits.kv_capacity_tokens,
            accepting=self._admission.closed is None,
        )

    async def check_health(self) -> None:
        """Return if all ranks answer, or are being replaced: see `Engine.check_health`."""
        if self._admission.closed is None:
            try:
                async with asyncio.timeout(_PING_TIMEOUT_S):
                    await self._group.call_all("ping")
            except TimeoutError:
                self._fail(f"a rank did not answer for {_PING_TIMEOUT_S:g} s")
            except EngineError as error:
                self._fail(str(error))
        if self._admission.closed is not None and self._revival is None:
            raise EngineError(self._admission.closed)

    async def drain(self) -> None:
        """Return once everything that was accepted has been answered."""
        await self._admission.emptied()

    async def stop(self) -> None:
        """Free the ranks and their memory."""
        self._stopped = True
        self._fail("the engine was stopped")
        await _ended([self._revival] if self._revival else [])
        await self._clear()
        if self._publisher is not None:
            self._publisher.stop()
            self._publisher = None

    async def _clear(self) -> None:
        await _ended(self._watchers)
        self._watchers = []
        self._group.disband()

    async def _read(self) -> None:
        """Pass on the reports of rank 0 until it ends."""
        while True:
            try:
                report: RankReport = await self._group.ranks[0].poll.remote(_POLL_S)
            except (RayError, EngineError) as error:
                self._fail(f"rank 0 of {self.config.num_ranks}: {reason_of(error)}")
                return
            self._reported = report.stats or self._reported
            if report.blocks and self._publisher is not None:
                self._publisher.publish(report.blocks)
            for progress in report.progress:
                self._streams.hand_on(progress, self._limits.eos_token_ids)

    async def _watch(self, number: int) -> None:
        try:
            await self._group.ranks[number].live.remote()
        except RayError as error:
            self._fail(f"rank {number} of {self.config.num_ranks}: {reason_of(error)}")

    def _fail(self, reason: str) -> None:
        """End every request with one reason; only the first call counts."""
        if self._admission.closed is None:
            self._admission.close(reason)
            if self._publisher is not None:
                self._publisher.publish([("AllBlocksCleared",)])
            # The ranks that are left wait in a collective for the one that is gone.
            for rank in self._group.ranks:
                with contextlib.suppress(RayError):
                    ray.kill(rank)
            if not self._stopped and self._may_revive():
                self._revival = asyncio.create_task(self._revive(reason))
        for stream in self._streams.by_id.values():
            stream.put(EngineError(self._admission.closed or reason))

    def _may_revive(self) -> bool:
        now_s = time.monotonic()
        lately = [at_s for at_s in self._revived_s if now_s - at_s < _REVIVALS_WITHIN_S]
        self._revived_s = [*lately, now_s]
        return len(lately) < _MAX_REVIVALS

    async def _revive(self, reason: str) -> None:
        """Replace ranks that ended, which is faster than a new replica."""
        logger.warning("new ranks are started: %s", reason)
        try:
            await self._clear()
            async with asyncio.timeout(self.config.start_timeout_s):
                await self._start_connected()
        except (EngineError, RayError, TimeoutError) as error:
            logger.error("no new ranks could be started: %s", error or type(error).__name__)
            self._group.disband()
        finally:
            self._revival = None

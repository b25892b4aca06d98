"""The continuous-batching engine told a second time: slow, one loop per iteration, real pages.

Written from docs/engine.md alone, whose steps the methods of `_Replica` are. Every page of KV
memory is a number that lies in exactly one place (the free list, a cached block or a sequence's own
pages), so that what the page says of memory happens instead of being added up. After every
iteration the laws of memory are asserted.
"""

import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class Engine:
    """One replica: docs/engine.md has the symbols."""

    a: float
    b: float
    c: float
    d: float
    max_batch: int
    token_budget: int
    page_tokens: int
    num_pages: int
    block_tokens: int
    queue_limit: int
    warm_until_s: float = 0.0
    warm_up_factor: float = 1.0


@dataclass(frozen=True)
class Job:
    """One request: what is given."""

    submit_s: float
    context: int
    output: int
    priority: int = 0
    order_key_s: float | None = None
    """Place in the queue of its priority; None: when it was submitted."""
    late_at_s: float = math.inf
    """When it is late where it still waits."""
    late_key_s: float = math.inf
    """Its place from then on."""
    abandon_s: float = math.inf
    max_wait_s: float = math.inf
    chain: tuple[int, ...] = ()


@dataclass
class Fate:
    """One request: what becomes of it."""

    refused: bool = False
    """No replica took it, or the last that did failed."""
    first_token_s: float = math.nan
    finish_s: float = math.nan
    preemptions: int = 0
    hit_tokens: int = 0
    """Over all admissions."""
    computed_prefill_tokens: int = 0
    """Over all admissions, those lost again included."""


@dataclass(frozen=True)
class Change:
    """A replica fails, drains or joins; one that joins is warm from `warm_until_s` on."""

    at_s: float
    replica: int
    kind: Literal["fail", "drain", "join"]
    warm_until_s: float = 0.0


@dataclass(frozen=True)
class Loop:
    """Clients of a closed process: who is over with a request sends the next one later."""

    following: Sequence[int]
    """Of each job the one that comes next in its session; -1: none does."""
    think_s: Sequence[float]
    """Of each job the time until its client sends another."""
    num_clients: int


@dataclass(frozen=True)
class Iteration:
    """What one iteration computed: `x`, `y` and `z` of docs/engine.md, and when."""

    start_s: float
    duration_s: float
    prefill_tokens: int
    decoding: int
    kv_tokens: int


@dataclass
class Totals:
    """What one replica did, iteration by iteration."""

    log: list[Iteration] = field(default_factory=list)

    @property
    def iterations(self) -> int:
        return len(self.log)

    @property
    def busy_s(self) -> float:
        return math.fsum(iteration.duration_s for iteration in self.log)


@dataclass(eq=False)
class _Run:
    """A request at a replica."""

    index: int
    job: Job
    fate: Fate
    order: int
    """Place in the order of submission; a new attempt is a new submission."""
    key_s: float
    late_key_s: float = math.inf
    generated: int = 0
    to_prefill: int = 0
    kv: int = 0
    computing: int = 0
    """Prefill tokens of the current iteration."""
    blocks: list[int] = field(default_factory=list)
    """Blocks it holds; always the beginning of its chain."""
    own_pages: list[int] = field(default_factory=list)
    """Pages of its tokens behind those blocks."""

    @property
    def in_prefill(self) -> bool:
        return self.kv < self.to_prefill

    def waits_by(self, now_s: float) -> float:
        preempted = self.key_s == -math.inf
        return self.late_key_s if self.job.late_at_s < now_s and not preempted else self.key_s

    def place(self, now_s: float) -> tuple[float, int]:
        """Of equal keys the one submitted first, of those preempted the last."""
        key_s = self.waits_by(now_s)
        return key_s, self.order if key_s > -math.inf else 0

    def leaves(self, now_s: float, waits: bool) -> bool:
        never_begun = waits and self.key_s > -math.inf
        late = self.job.submit_s + self.job.max_wait_s <= now_s
        return self.job.abandon_s <= now_s or (never_begun and late)


class _Replica:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.totals = Totals()
        self.is_up = True
        self.clock_s = -math.inf
        self.over: Callable[[int, float], None] = lambda index, at_s: None
        """Told when a request has left for good."""
        self.forget(engine.warm_until_s)

    def forget(self, warm_until_s: float) -> None:
        """Be empty: no batch, no queue, no cache, idle."""
        self.warm_until_s = warm_until_s
        self.waiting: dict[int, deque[_Run]] = {}
        self.running: list[_Run] = []  # in the order of their admission
        self.decoding: list[_Run] = []
        self.free = list(range(self.engine.num_pages))
        self.cache: dict[int, list[int]] = {}
        self.parent: dict[int, int | None] = {}
        self.holders: Counter[int] = Counter()
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.end_s = math.inf

    def take(self, run: _Run, now_s: float) -> bool:
        """Take a request, or refuse it."""
        most = self.pages(run.job.context + run.job.output - 1)
        full = sum(map(len, self.waiting.values())) >= self.engine.queue_limit
        if not self.is_up or full or most > self.engine.num_pages:
            return False
        queue = self.waiting.setdefault(run.job.priority, deque())
        queue.append(run)
        # A stable sort: of equal keys the one submitted first comes first.
        self.waiting[run.job.priority] = deque(sorted(queue, key=lambda run: run.key_s))
        if math.isinf(self.end_s):
            self.start(now_s)
        return True

    def change(self, change: Change) -> list[_Run]:
        """Fail, drain or join; returns the requests that are lost, first submitted first."""
        self.is_up = change.kind == "join"
        if change.kind == "drain":
            return []
        lost = sorted(self.held(), key=lambda run: run.order)
        assert change.kind == "fail" or not lost
        if lost:
            cut = self.totals.log[-1]
            self.totals.log[-1] = replace(cut, duration_s=change.at_s - cut.start_s)
        self.forget(change.warm_until_s)
        return lost

    def start(self, now_s: float) -> None:
        """Steps 1 to 5: decide what the iteration computes, and when it ends."""
        assert now_s >= self.clock_s
        self.clock_s = now_s
        self.abandon(now_s)
        preempted = self.preempt()
        self.decoding = [run for run in self.running if not run.in_prefill]
        for run in self.decoding:
            run.own_pages += self.new_pages(self.needs_page(run))
        # A prompt that is not finished has used the budget up: none was admitted behind it.
        assert len(self.running) - len(self.decoding) <= 1
        budget = self.engine.token_budget - len(self.decoding)
        for run in self.running:
            run.computing = min(run.to_prefill - run.kv, budget) if run.in_prefill else 0
            budget -= run.computing
        if not preempted:
            self.admit(budget, now_s)
        self.clock_in(now_s)
        self.check()

    def abandon(self, now_s: float) -> None:
        waiting = itertools.chain.from_iterable(self.waiting.values())
        late = [run for run in waiting if run.leaves(now_s, waits=True)]
        gone = [run for run in self.running if run.leaves(now_s, waits=False)]
        for run in sorted(late + gone, key=lambda run: run.order):
            self.over(run.index, now_s)
        for priority, queue in self.waiting.items():
            self.waiting[priority] = deque(run for run in queue if run not in late)
        for run in sorted(gone, key=lambda run: run.order):
            self.release(run)

    def preempt(self) -> bool:
        """Make room for the new pages of the decoding; whether it took victims."""
        preempted = False
        while sum(map(self.needs_page, self.running)) > self.available():
            worst = max(run.job.priority for run in self.running)
            victim = [run for run in self.running if run.job.priority == worst][-1]
            self.release(victim)
            victim.key_s = -math.inf
            self.waiting[worst].appendleft(victim)
            victim.fate.preemptions += 1
            preempted = True
        return preempted

    def admit(self, budget: int, now_s: float) -> None:
        while budget > 0 and len(self.running) < self.engine.max_batch:
            queues = [queue for _, queue in sorted(self.waiting.items()) if queue]
            if not queues:
                return
            run = min(queues[0], key=lambda run: run.place(now_s))
            hit = self.hit(run)
            tokens = run.job.context + run.generated
            wanted = self.pages(tokens) - sum(len(self.cache[block]) for block in hit)
            if wanted > self.available(pinned=hit):
                return
            queues[0].remove(run)
            for block in hit:
                self.hold(run, block)
            run.own_pages = self.new_pages(wanted)
            run.to_prefill, run.kv = tokens, len(hit) * self.engine.block_tokens
            run.fate.hit_tokens += run.kv
            run.computing = min(run.to_prefill - run.kv, budget)
            budget -= run.computing
            self.running.append(run)

    def clock_in(self, now_s: float) -> None:
        e = self.engine
        prefilling = [run for run in self.running if run.computing > 0]
        x, y = sum(run.computing for run in prefilling), len(self.decoding)
        z = sum(run.kv for run in self.decoding + prefilling)
        if x + y == 0:
            assert not self.held(), "idle with work at hand"
            self.end_s = math.inf
            return
        duration_s = e.a + e.b * x + e.c * y + e.d * z
        if now_s < self.warm_until_s:
            duration_s *= e.warm_up_factor
        self.end_s = now_s + duration_s
        self.totals.log.append(Iteration(now_s, duration_s, x, y, z))

    def end(self) -> None:
        """Steps 6 and 7: what was computed is there; what is complete goes."""
        assert self.end_s >= self.clock_s
        self.clock_s = self.end_s
        for run in self.decoding:
            run.kv += 1
            run.generated += 1
        for run in self.running:
            run.kv += run.computing
            run.fate.computed_prefill_tokens += run.computing
            if run.computing and not run.in_prefill:
                if run.generated == 0:
                    run.fate.first_token_s = self.end_s
                run.generated += 1
                self.register(run, run.job.context)
            run.computing = 0
        complete = [run for run in self.running if run.generated == run.job.output]
        for run in sorted(complete, key=lambda run: run.order):
            self.register(run, run.job.context + run.job.output - 1)
            self.release(run)
            run.fate.finish_s = self.end_s
            self.over(run.index, self.end_s)
        self.check()

    def hit(self, run: _Run) -> list[int]:
        if self.engine.block_tokens == 0:
            return []
        most = (run.job.context - 1) // self.engine.block_tokens
        return list(itertools.takewhile(self.cache.__contains__, run.job.chain[:most]))

    def hold(self, run: _Run, block: int) -> None:
        self.evictable.pop(block, None)
        self.holders[block] += 1
        run.blocks.append(block)

    def register(self, run: _Run, tokens: int) -> None:
        """Give to the cache the blocks that lie within the first `tokens`, or hold its copies."""
        if self.engine.block_tokens == 0:
            return
        block_pages = self.engine.block_tokens // self.engine.page_tokens
        for block in run.job.chain[len(run.blocks) : tokens // self.engine.block_tokens]:
            pages, run.own_pages = run.own_pages[:block_pages], run.own_pages[block_pages:]
            if block in self.cache:
                self.free += pages
            else:
                self.cache[block] = pages
                self.parent[block] = run.blocks[-1] if run.blocks else None
            self.hold(run, block)

    def release(self, run: _Run) -> None:
        """Take a sequence out of the batch and let go of all its memory."""
        self.running.remove(run)
        self.free += run.own_pages
        for block in reversed(run.blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.evictable[block] = None
        run.own_pages, run.blocks, run.kv, run.to_prefill, run.computing = [], [], 0, 0, 0

    def new_pages(self, count: int) -> list[int]:
        while len(self.free) < count:
            block, _ = self.evictable.popitem(last=False)
            self.free += self.cache.pop(block)
        return [self.free.pop() for _ in range(count)]

    def available(self, pinned: Sequence[int] = ()) -> int:
        """Pages that are free or evictable, `pinned` blocks apart."""
        evictable = [block for block in self.evictable if block not in pinned]
        return len(self.free) + sum(len(self.cache[block]) for block in evictable)

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.engine.page_tokens)

    def needs_page(self, run: _Run) -> bool:
        return not run.in_prefill and run.kv % self.engine.page_tokens == 0

    def held(self) -> list[_Run]:
        return [*itertools.chain.from_iterable(self.waiting.values()), *self.running]

    def check(self) -> None:
        """Assert the laws of memory."""
        own = [page for run in self.running for page in run.own_pages]
        cached = [page for pages in self.cache.values() for page in pages]
        assert sorted(self.free + own + cached) == list(range(self.engine.num_pages))
        held = Counter(block for run in self.running for block in run.blocks)
        assert held == +self.holders
        assert set(self.evictable) == set(self.cache) - set(held)
        for block in self.cache:
            assert self.parent[block] is None or self.parent[block] in self.cache
        assert len(self.running) <= self.engine.max_batch
        for run in self.running:
            assert tuple(run.blocks) == run.job.chain[: len(run.blocks)]
            room = len(run.blocks) * self.engine.block_tokens
            room += len(run.own_pages) * self.engine.page_tokens
            assert 0 <= room - max(run.kv, run.to_prefill) <= self.engine.page_tokens


def simulate(
    engine: Engine, jobs: Sequence[Job], max_overtaking_s: float = math.inf
) -> tuple[list[Fate], Totals]:
    """Run `jobs`, in the order of their submission, on one replica until all is done."""
    fates, totals = simulate_cluster(
        [engine], jobs, [(0,)] * len(jobs), max_overtaking_s=max_overtaking_s
    )
    return fates, totals[0]


def simulate_cluster(
    engines: Sequence[Engine],
    jobs: Sequence[Job],
    attempts: Sequence[Sequence[int]],
    retry_delay_s: float = 0.0,
    changes: Sequence[Change] = (),
    max_overtaking_s: float = math.inf,
    loop: Loop | None = None,
) -> tuple[list[Fate], list[Totals]]:
    """Run `jobs` on a cluster until all is done.

    Args:
        engines: The replicas; all are up at first.
        jobs: Requests, in the order of their submission.
        attempts: Of each request the replica it is sent to, and those it is sent to in turn when
            it is refused or its replica fails: `max_retries` more at most.
        retry_delay_s: Time between a refusal or a failure and the next attempt.
        changes: What befalls the replicas.
        max_overtaking_s: Order keys are at most so much above the time of submission.
        loop: Jobs are then submitted when their client is ready; the first of each client when it
            says.
    """
    jobs = list(jobs)
    replicas = [_Replica(engine) for engine in engines]
    fates = [Fate() for _ in jobs]
    left = [deque(route) for route in attempts]
    order = itertools.count()
    events: list[tuple[float, bool, int, Change | int]] = []

    def send(index: int, at_s: float) -> None:
        if left[index]:
            heapq.heappush(events, (at_s, True, next(order), index))
        else:
            fates[index].refused = True
            over(index, at_s - retry_delay_s)

    unbegun = deque(range(len(jobs)) if loop is None else sessions_of(loop))

    def over(index: int, at_s: float) -> None:
        if loop is None:
            return
        following = loop.following[index]
        if following < 0 and unbegun:
            following = unbegun.popleft()
        if following >= 0:
            job, ready_s = jobs[following], at_s + loop.think_s[index]
            patience_s = job.abandon_s - job.submit_s
            jobs[following] = replace(job, submit_s=ready_s, abandon_s=ready_s + patience_s)
            send(following, ready_s)

    for replica in replicas:
        replica.over = over

    def keys_of(job: Job, now_s: float) -> tuple[float, float]:
        if job.order_key_s is None:
            return now_s, now_s
        latest_s = now_s + max_overtaking_s
        key_s = sorted([job.submit_s, job.order_key_s, latest_s])[1]
        return key_s, max(key_s, min(job.late_key_s, latest_s))

    for change in changes:
        heapq.heappush(events, (change.at_s, False, next(order), change))
    for _ in range(len(jobs) if loop is None else loop.num_clients):
        if unbegun:
            index = unbegun.popleft()
            send(index, jobs[index].submit_s)
    while True:
        # At one instant: iterations, then changes, then submissions.
        next_end_s = min(replica.end_s for replica in replicas)
        if events and events[0][0] < next_end_s:
            now_s, _, _, what = heapq.heappop(events)
            if isinstance(what, Change):
                for run in replicas[what.replica].change(what):
                    send(run.index, now_s + retry_delay_s)
            else:
                job = jobs[what]
                if len(left[what]) < len(attempts[what]) and job.abandon_s <= now_s:
                    over(what, now_s)
                    continue
                run = _Run(what, job, fates[what], next(order), *keys_of(job, now_s))
                if not replicas[left[what].popleft()].take(run, now_s):
                    send(what, now_s + retry_delay_s)
        elif next_end_s < math.inf:
            replica = next(r for r in replicas if r.end_s == next_end_s)
            replica.end()
            replica.start(replica.clock_s)
        else:
            break
    assert not any(replica.held() for replica in replicas)
    return fates, [replica.totals for replica in replicas]


def sessions_of(loop: Loop) -> list[int]:
    """The first job of every session."""
    later = set(loop.following)
    return [index for index in range(len(loop.following)) if index not in later]

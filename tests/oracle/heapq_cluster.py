"""The token-level cluster told a second time: slow, one heap of events, no arrays.

It shares no line with `tokenyard.routing.simulator.constant_rate_kernel` and is written from the
rules alone, so that the two can only agree by both being right. Under processor sharing it keeps
the tokens that every running request has been given since the server began, where the kernel keeps
what each has left.
"""

import heapq
import math
import statistics
from dataclasses import dataclass, field, replace

from tokenyard.routing.scenario import Scenario


@dataclass
class Job:
    """One request: what is given, and what becomes of it."""

    dispatch_s: float
    arrival_s: float
    tokens: float
    predicted_tokens: float
    action: int
    order_key_s: float | None = None
    """What it waits by; None: the time of its dispatch, and it is paid for then."""
    late_at_s: float = math.inf
    """When it is late where it still waits."""
    late_key_s: float = math.inf
    """What it waits by from then on."""
    accepted: bool = False
    response_s: float = math.nan


@dataclass
class Seen:
    """One server as the router sees it at a decision."""

    num_waiting: int
    num_running: int
    tokens: float
    predicted_tokens: float
    mean_response_s: float


@dataclass
class _Server:
    speed: float
    slots: int
    concurrency: int
    nominal_speed: float
    waiting: list[tuple[float, int]] = field(default_factory=list)
    """Keys and requests."""
    running: list[tuple[float, int]] = field(default_factory=list)
    given: float = 0.0
    """Tokens given to each running request so far; only sharing servers use it."""
    given_until_s: float = 0.0
    schedule: int = 0
    """Number of the newest completion event; older ones are void."""
    mean_response_s: float = math.nan


class HeapqCluster:
    """Runs one stream under given actions, and remembers what it saw."""

    def __init__(self, scenario: Scenario, jobs: list[Job]) -> None:
        self.scenario = scenario
        self.jobs = jobs
        self.sharing = scenario.discipline == "processor_sharing"
        serial = scenario.discipline == "serial"
        split = scenario.discipline == "parallel_split"
        self.servers = [
            _Server(
                speed=s.tokens_per_s / s.concurrency if split else s.tokens_per_s,
                slots=1 if serial else s.concurrency,
                concurrency=s.concurrency,
                nominal_speed=s.tokens_per_s,
            )
            for s in scenario.servers
        ]
        self.events: list[tuple[float, int, int, int]] = []
        self.seen: list[list[Seen]] = []
        """What the servers looked like at every decision."""
        self.balance: list[float] = []
        """The paper's balance metric after every placement."""
        self.completed: list[list[int]] = [[] for _ in jobs]
        """Requests that completed between a decision and the next, in order."""

    def run(self) -> "HeapqCluster":
        """Place every job, then finish them all; completions come before decisions."""
        for index, job in enumerate(self.jobs):
            self._complete_until(job.dispatch_s, since=index - 1)
            self.seen.append([self._look(server) for server in self.servers])
            self._place(index, job)
            self.balance.append(self._balance())
        self._complete_until(math.inf, since=len(self.jobs) - 1)
        return self

    def rewards(self) -> list[float]:
        """Every step's reward, term by term; the last step has no completions in it."""
        weights = self.scenario.reward
        slo_s = self.scenario.slo_response_s

        def worth(response_s: float) -> float:
            beyond_s = max(response_s - weights.tail_after_s, 0.0)
            paid_s = weights.response * response_s + weights.tail * beyond_s
            return paid_s + weights.slo * (response_s > slo_s)

        rewards = []
        for index, job in enumerate(self.jobs):
            seen, server = self.seen[index][job.action], self.servers[job.action]
            terms = [
                weights.processing * job.tokens / server.speed,
                weights.queue * seen.num_waiting,
                weights.overload * (seen.num_waiting + seen.num_running >= server.concurrency),
                weights.balance * self.balance[index],
                weights.accept if job.accepted else weights.drop,
            ]
            if job.accepted and weights.credits_response:
                before, after = (map(worth, self._if_last_s(index + own)) for own in (0, 1))
                terms.append(math.fsum(after) - math.fsum(before))
            if index < len(self.jobs) - 1:
                done = [self.jobs[i].response_s for i in self.completed[index]]
                terms.append(weights.complete * len(done))
                terms.append(weights.slo_at_completion * sum(r > slo_s for r in done))
            rewards.append(math.fsum(terms))
        return rewards

    def _if_last_s(self, num: int) -> list[float]:
        """Response times of the first `num` jobs that are accepted, if nobody comes later."""
        known = [replace(job, accepted=False, response_s=math.nan) for job in self.jobs[:num]]
        found = HeapqCluster(self.scenario, known).run().jobs
        return [job.response_s for job in found if job.accepted]

    def _place(self, index: int, job: Job) -> None:
        server = self.servers[job.action]
        outstanding = len(server.waiting) + len(server.running)
        no_room = outstanding >= server.slots + self.scenario.queue_limit
        if no_room or (self.scenario.overflow == "drop" and outstanding >= server.concurrency):
            return
        job.accepted = True
        self._give(server, job.dispatch_s)
        key = job.dispatch_s
        if job.order_key_s is not None:
            latest = job.dispatch_s + self.scenario.max_overtaking_s
            key = sorted([job.arrival_s, job.order_key_s, latest])[1]
        server.waiting.append((key, index))
        self._refill(job.action, job.dispatch_s)

    def _give(self, server: _Server, now_s: float) -> None:
        """Share the server's speed, up to now, among those that ran until now."""
        if server.running:
            share = server.speed / len(server.running)
            server.given += (now_s - server.given_until_s) * share
        server.given_until_s = now_s

    def _refill(self, which: int, now_s: float) -> None:
        """Start what can start, then announce the server's next completion."""
        server = self.servers[which]
        while server.waiting and len(server.running) < server.slots:
            first = min(server.waiting, key=lambda one: (self._waits_by(*one, now_s), one[1]))
            server.waiting.remove(first)
            self._start(server, first[1], now_s)
        server.schedule += 1
        if server.running:
            due, index = server.running[0]
            if self.sharing:
                due = now_s + (due - server.given) * len(server.running) / server.speed
            heapq.heappush(self.events, (due, index, which, server.schedule))

    def _waits_by(self, key_s: float, index: int, now_s: float) -> float:
        job = self.jobs[index]
        if job.order_key_s is None or now_s <= job.late_at_s:
            return key_s
        latest_s = job.dispatch_s + self.scenario.max_overtaking_s
        return max(key_s, min(job.late_key_s, latest_s))

    def _start(self, server: _Server, index: int, now_s: float) -> None:
        tokens = self.jobs[index].tokens
        due = server.given + tokens if self.sharing else now_s + tokens / server.speed
        heapq.heappush(server.running, (due, index))

    def _complete_until(self, until_s: float, since: int) -> None:
        while self.events and self.events[0][0] <= until_s:
            now_s, index, which, schedule = heapq.heappop(self.events)
            server = self.servers[which]
            if schedule != server.schedule:
                continue
            self._give(server, now_s)
            heapq.heappop(server.running)
            self._refill(which, now_s)
            response_s = now_s - self.jobs[index].arrival_s
            self.jobs[index].response_s = response_s
            self.completed[since].append(index)
            mean = server.mean_response_s
            server.mean_response_s = (
                response_s if math.isnan(mean) else 0.9 * mean + 0.1 * response_s
            )

    def _held(self, server: _Server) -> list[Job]:
        return [self.jobs[i] for _, i in server.waiting + server.running]

    def _look(self, server: _Server) -> Seen:
        held = self._held(server)
        return Seen(
            num_waiting=len(server.waiting),
            num_running=len(server.running),
            tokens=math.fsum(job.tokens for job in held),
            predicted_tokens=math.fsum(job.predicted_tokens for job in held),
            mean_response_s=server.mean_response_s,
        )

    def _balance(self) -> float:
        loads = [
            math.fsum(job.tokens for job in self._held(server))
            / (server.nominal_speed * server.concurrency)
            for server in self.servers
        ]
        return 1 - statistics.pstdev(loads) / (statistics.fmean(loads) + 1e-8)

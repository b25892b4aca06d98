"""Sessions on batching replicas once more, in plain Python: an iteration at a time, no stretches.

Slow and short on purpose; what it shares with the program are the numbers of a rule and of a
stream.
"""

import math
from dataclasses import dataclass, field

from tokenyard.routing.sessions import rules as ru


@dataclass
class Session:
    arrival: float
    turns: list  # (context, answer, tool, remaining, kept)
    number: int
    turn: int = 0
    state: str = "future"
    home: object = None
    active: bool = False
    forced: bool = False
    started: bool = False
    preempted: bool = False
    marked: bool = False
    ready: float = 0.0
    due: float = math.inf
    tool_end: float = 0.0
    tokens: float = 0.0
    generated: float = 0.0
    attained: float = 0.0
    assumed: float = 0.0


@dataclass
class Running:
    session: Session
    length: float
    computed: float
    missing: float
    chunk: float = 0.0
    held: float = 0.0


@dataclass(eq=False)
class Replica:
    times: tuple
    capacity: float
    max_batch: float
    budget: float
    host_capacity: float
    host_token_s: float
    running: list = field(default_factory=list)
    queue: list = field(default_factory=list)
    idle: dict = field(default_factory=dict)  # session number -> tokens
    last: dict = field(default_factory=dict)
    host: dict = field(default_factory=dict)
    used: float = 0.0
    pending: float = 0.0
    until: float = math.inf
    busy: bool = False
    looks: bool = True


class SlowSessions:
    def __init__(self, replicas, stream, rule):
        self.rule, self.now = rule, 0.0
        self.replicas = [
            Replica(
                tuple(replicas.iteration[i]), replicas.kv_tokens[i], replicas.max_batch[i],
                replicas.token_budget[i], replicas.host_tokens[i], replicas.host_token_s[i],
            )
            for i in range(len(replicas))
        ]  # fmt: skip
        self.sessions = []
        self.out = {}
        self.preemptions = self.held = 0
        for s, first in enumerate(stream.first_turn):
            rows = range(first, first + stream.num_turns[s])
            turns = [
                (
                    stream.context[t],
                    stream.answer[t],
                    stream.tool_s[t],
                    stream.remaining_s[t],
                    stream.kept[t],
                )
                for t in rows
            ]
            self.sessions.append(Session(stream.arrival_s[s], turns, s))

    def live(self):
        return [s for s in self.sessions if s.state not in ("future", "gone")]

    def record(self, s, **values):
        self.out.setdefault((s.number, s.turn), {"hit": 0.0, "prefilled": 0.0}).update(values)

    # memory

    def pinned(self, r, s):
        leased = s.active and s.state == "tool" and s.home is r
        return self.rule.pinned > 0 and leased

    def make_room(self, r, tokens):
        need = r.used + sum(r.idle.values()) + tokens - r.capacity
        while need > 1e-9 and any(r.idle.values()):
            best = None
            for s in self.live():
                if r.idle.get(s.number, 0.0) > 0.0:
                    key = self.now - r.last[s.number]
                    if self.rule.paused_first:
                        key += 1e7 * (not s.active) - 1e7 * (s.state == "queued")
                    key -= 1e9 * self.pinned(r, s)
                    if best is None or key > best[0]:
                        best = key, s
            s = best[1]
            gone = min(r.idle[s.number], 256.0 * math.ceil(need / 256.0))
            r.idle[s.number] -= gone
            need -= gone

    def take(self, r, tokens):
        self.make_room(r, tokens)
        r.used += tokens
        assert r.used + sum(r.idle.values()) <= r.capacity + 1e-6

    def hits(self, r, s, length):
        most = length - 1 if s.preempted else min(length - 1, s.turns[s.turn][4])
        cached = min(r.idle.get(s.number, 0.0), most) // 256 * 256
        return cached, max(cached, min(r.host.get(s.number, 0.0), most) // 256 * 256)

    def store(self, r, s, tokens):
        if r.host_capacity <= 0:
            return
        r.host[s.number] = tokens
        while (excess := sum(r.host.values()) - r.host_capacity) > 0:
            others = [o for o in self.live() if o is not s and r.host.get(o.number, 0.0) > 0]
            victim = min(others, key=lambda o: r.last.get(o.number, -math.inf), default=s)
            r.host[victim.number] -= min(r.host[victim.number], excess)

    # iterations

    def end_iteration(self, r):
        r.busy, r.until = False, math.inf
        ended = False
        for one in list(r.running):
            s = one.session
            answer = s.turns[s.turn][1]
            if one.missing > 0:
                one.missing -= one.chunk
                one.computed += one.chunk
                r.pending -= one.chunk
                if one.missing > 0:
                    continue
                self.out[s.number, s.turn].setdefault("first", self.now)
                one.held = one.length
                s.generated += 1
                r.looks = True
            else:
                one.held += 1
                s.generated += 1
            if s.generated >= answer:
                r.running.remove(one)
                self.end_turn(r, s, one.held)
                r.looks = ended = True
        return ended

    def end_turn(self, r, s, held):
        context, answer, tool, _, _ = s.turns[s.turn]
        r.used -= held
        r.idle[s.number], r.last[s.number] = held, self.now
        self.record(s, finish=self.now)
        s.attained += answer + self.out[s.number, s.turn]["prefilled"]
        s.tokens = context + answer
        if s.turn + 1 == len(s.turns):
            s.state, s.active, s.marked, s.due = "ended", False, False, math.inf
            if self.rule.knows_ends:
                s.state = "gone"
                for q in self.replicas:
                    q.idle[s.number] = q.host[s.number] = 0.0
            return
        s.state, s.tool_end = "tool", self.now + tool
        self.store(r, s, held)
        s.active, s.marked = self.rule.lease_s > 0 and not s.marked, False
        s.due = min(s.tool_end, self.now + self.rule.lease_s) if s.active else s.tool_end

    def preempt(self, r):
        one = r.running.pop()
        s = one.session
        if one.missing > 0:
            r.pending -= one.missing
            r.used -= one.length
            kept = one.computed
        else:
            r.used -= one.held
            kept = one.held
        r.idle[s.number], r.last[s.number] = kept, self.now
        s.state, s.preempted, s.assumed = "queued", True, 0.0
        r.queue.append(s)
        self.preemptions += 1

    def key(self, r, s):
        if s.preempted:
            return -1e18
        rule = self.rule
        uncached = (s.tokens - self.hits(r, s, s.tokens)[1]) * r.times[1]
        if rule.order == ru.BOOST:
            share = (1 - math.exp(-uncached / rule.boost_s)) / (1 - math.exp(-0.001))
            return s.ready + max(0.0, rule.boost_s * math.log(share))
        return {
            ru.FCFS: s.ready,
            ru.PROGRAM_FCFS: s.arrival,
            ru.LEAST_ATTAINED: s.attained,
            ru.MOST_CACHED: uncached * 1e6 + s.ready * 1e-3,
            ru.LEAST_REMAINING: s.turns[s.turn][3] + rule.uncached * uncached,
        }[rule.order]

    def begin(self, r):
        preempted = False
        while r.used + sum(o.missing <= 0 for o in r.running) > r.capacity:
            self.preempt(r)
            preempted = True
        decoding = [o for o in r.running if o.missing <= 0]
        read = sum(o.held for o in decoding)
        self.take(r, len(decoding))
        budget = r.budget - len(decoding)
        prefill = loaded = 0.0
        for one in r.running:
            if one.missing > 0:
                one.chunk = min(one.missing, budget)
                budget -= one.chunk
                prefill += one.chunk
                read += one.computed if one.chunk > 0 else 0.0
        while r.looks and not preempted and budget > 0 and r.queue and len(r.running) < r.max_batch:
            s = min(r.queue, key=lambda s: self.key(r, s))
            length = s.tokens + s.generated
            pinned = sum(
                r.idle.get(o.number, 0.0) for o in self.live() if o is not s and self.pinned(r, o)
            )
            if length + r.used + pinned > r.capacity and (r.running or not pinned):
                break
            cached, hit = self.hits(r, s, length)
            r.idle[s.number] = 0.0
            self.take(r, length)
            r.queue.remove(s)
            one = Running(s, length, hit, length - hit, min(length - hit, budget))
            r.running.append(one)
            r.pending += length - hit - s.assumed
            s.state, s.preempted, s.assumed = "runs", False, 0.0
            done = self.out[s.number, s.turn]
            self.record(s, hit=done["hit"] + hit, prefilled=done["prefilled"] + length - hit)
            budget -= one.chunk
            prefill += one.chunk
            read += hit
            loaded += hit - cached
        if not r.running:
            return
        # A queue that is blocked is looked at again when a turn comes or one ends.
        r.looks = len(r.running) != len(decoding)
        iteration, token, sequence, kv = r.times
        r.busy = True
        r.until = self.now + (
            iteration + token * prefill + sequence * len(decoding) + kv * read
            + r.host_token_s * loaded
        )  # fmt: skip

    # the gate

    def dispatch(self, s):
        r = s.home
        s.state, s.active, s.started = "queued", True, True
        s.due = math.inf
        self.record(s, admitted=self.now)
        self.held += self.now > s.ready
        s.assumed = s.tokens - self.hits(r, s, s.tokens)[1]
        r.pending += s.assumed
        r.queue.append(s)
        r.looks = True

    def urgency(self, s):
        u = self.rule
        cached = s.home.idle.get(s.number, 0.0) / s.tokens if s.home else 0.0
        return (
            u.waited * (self.now - s.ready) / 100 + u.age * (self.now - s.arrival) / 1000
            + u.started * s.started + u.cached_share * cached
            - u.remaining * math.log(s.turns[s.turn][3] + 1) - u.context * s.tokens / 1e5
            - u.attained * math.log1p(s.attained / 1000) + 1e18 * s.forced
        )  # fmt: skip

    def footprints(self, r, half_life_s=math.inf):
        placed = r.used + sum(s.tokens + s.generated for s in r.queue)
        own = [s for s in self.live() if s.active and s.home is r]
        forced = [s for s in own if s.state == "queued" and s.forced]
        idle = sum(
            s.tokens * 0.5 ** ((self.now - s.tool_end + s.turns[s.turn][2]) / half_life_s)
            for s in own
            if s.state == "tool"
        )
        taken = placed + idle - sum(s.tokens + s.generated for s in forced)
        return taken + (len(own) - len(forced)) * self.rule.growth_tokens, placed

    def cheapest(self, s):
        u, best = self.rule, None
        for r in self.replicas:
            if u.sticky and s.home and s.home is not r:
                continue
            taken, placed = self.footprints(r)
            full = taken + s.tokens + u.growth_tokens > u.full_at * r.capacity and taken > 0
            if s.tokens > 0.98 * r.capacity or (full and not s.forced):
                continue
            iteration, token, _, kv = r.times
            held = placed if u.by_running else taken
            cost = (
                u.miss * (s.tokens - self.hits(r, s, s.tokens)[1]) * token
                + u.pending * max(r.pending, 0.0) * token
                + u.decode * 100 * (iteration + kv * (held + s.tokens))
                + u.fill * (taken + s.tokens) / r.capacity
                + u.overflow * 100 * kv * max(0.0, placed + s.tokens - r.capacity)
            )
            if best is None or cost < best[0]:
                best = cost, r
        return best[1] if best else None

    def decide(self):
        held = sorted((s for s in self.live() if s.state == "held"), key=self.urgency, reverse=True)
        skipped = 0
        for s in held:
            active = sum(o.active for o in self.live())
            if active >= self.rule.most_active * len(self.replicas) and not s.forced:
                return
            home = self.cheapest(s)
            if home is not None:
                s.home = home
                self.dispatch(s)
            else:
                skipped += 1
                if skipped >= max(self.rule.backfill, 1):
                    return

    # ThunderAgent (arXiv 2602.13692)

    def group(self, s):
        """Order of paused sessions: turns that wait, new ones, those at a tool; None: active."""
        groups = {"held": 0 if s.started else 1, "tool": 2}
        return None if s.active else groups.get(s.state)

    def roomiest(self, s):
        u, best = self.rule, (-math.inf, None)
        for r in self.replicas:
            own = not (u.own_replica and s.started) or s.home is r
            room = (u.full_at - u.spare) * r.capacity - self.footprints(r, u.half_life_s)[0]
            if own and s.tokens <= 0.98 * r.capacity and room > best[0]:
                best = room, r
        return best

    def resume(self, group):
        u = self.rule
        for s in sorted((s for s in self.live() if self.group(s) == group), key=lambda s: s.tokens):
            room, r = self.roomiest(s)
            if room >= s.tokens + u.growth_tokens:
                s.home, s.active = r, True
                if s.state == "held":
                    self.dispatch(s)
            elif not u.own_replica:
                return

    def size(self, r, s):
        for one in r.running:
            if one.session is s:
                return one.length if one.missing > 0 else one.held + r.busy
        return s.tokens + s.generated * (s.state == "queued")

    def pause(self, r):
        growth = self.rule.growth_tokens
        own = [s for s in self.live() if s.home is r and s.active]
        taken = self.footprints(r)[0] - sum(self.size(r, s) + growth for s in own if s.marked)
        rest = [s for s in own if not s.marked]
        for s in sorted(rest, key=lambda s: (s.state != "tool", self.size(r, s))):
            if taken <= self.rule.full_at * r.capacity:
                return
            taken -= self.size(r, s) + growth
            s.active, s.marked = s.state != "tool", s.state != "tool"

    def decide_by_thunderagent(self, ticks):
        if ticks:
            for group in range(3):
                self.resume(group)
            if ticks % max(1, round(self.rule.pause_s / self.rule.tick_s)) == 0:
                for r in self.replicas:
                    self.pause(r)
        for s in [s for s in self.live() if s.state == "held" and s.forced]:
            if home := self.cheapest(s):
                s.home = home
                self.dispatch(s)
        paused = [s for s in self.live() if self.group(s) is not None and not s.forced]
        if len(paused) == 1 and not paused[0].started and paused[0].ready == self.now:
            room, r = self.roomiest(paused[0])
            if room >= paused[0].tokens + self.rule.growth_tokens:
                paused[0].home = r
                self.dispatch(paused[0])

    # events

    def turn_is_ready(self, s):
        s.state, s.ready, s.generated, s.forced = "held", self.now, 0.0, False
        s.tokens, s.due = s.turns[s.turn][0], self.now + self.rule.hold_s
        self.record(s, ready=self.now)
        if s.active:
            self.dispatch(s)

    def play(self):
        tick_s = self.rule.tick_s or math.inf
        next_tick_s, ticks = tick_s, 0
        while True:
            events = [(r.until, 0, i, r) for i, r in enumerate(self.replicas)]
            events += [(s.due, 1, s.number, s) for s in self.live()]
            events += [(s.arrival, 2, s.number, s) for s in self.sessions if s.state == "future"]
            time, kind, _, who = min(events, key=lambda e: e[:3])
            if time == math.inf and not any(s.state == "held" for s in self.live()):
                return self.out
            if next_tick_s < time:
                time, kind = next_tick_s, 3
                next_tick_s += tick_s
                ticks += 1
            if time == math.inf:
                return self.out
            self.now = time
            decides = True
            if kind == 0:
                decides = self.end_iteration(who)
            elif kind == 2:
                self.turn_is_ready(who)
            elif kind == 3:
                pass
            elif who.state == "held":
                who.forced, who.due = True, math.inf
            elif time < who.tool_end:
                who.active, who.due = False, who.tool_end
                if self.rule.pinned:
                    who.home.looks = True
            else:
                who.turn += 1
                self.turn_is_ready(who)
            if decides and tick_s < math.inf:
                self.decide_by_thunderagent(ticks if kind == 3 else 0)
            elif decides:
                self.decide()
            for r in self.replicas:
                if not r.busy:
                    self.begin(r)

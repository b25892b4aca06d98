"""Do several gateways that are peers decide as well as one before the same engines?

    PYTHONPATH=.:tests python tests/unit/several_pickers.py --json FILE

Four emulated engines, the slowest a quarter as fast as the fastest, keep prefixes in a cache each.
One gateway, several that are peers, and several that know nothing of each other place the same
requests, which come at random times and to a gateway drawn at random. Gateways and peers are the
real ones, on an event loop whose time passes at once: a peer's messages take `lag_s` beside the
time for which they are collected. So a busy machine changes nothing, and a seed repeats a row.
"""

import asyncio
import itertools
import selectors
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import tyro
from rich.console import Console

from serve_app.cluster import Cluster
from serve_app.gateway.engine_metrics import Reading
from serve_app.gateway.exchange import Call, InferenceRequest, Sender
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.policy.manager import PolicyManager
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.statistics.intervals import t_interval

ITERATION = np.array([0.012, 1e-4, 4e-4, 0.0])
SLOWER = (1.0, 1.5, 2.5, 4.0)
MAX_BATCH = 16
BLOCK, BLOCKS_HELD = 16, 1500
NUM_PREFIXES, PREFIX_BLOCKS = 60, 24
ARMS = ("one", "peers", "apart")
BEGAN_S = 1.8e9
SCRAPE_S, LEARN_S, NAME_ALL_S = 0.25, 1.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Args:
    """Compare several gateways with one."""

    gateways: int = 4
    repeats: int = 6
    warm_up_s: float = 180.0
    """Not judged: gateways learn speeds and lengths, and caches fill."""
    duration_s: float = 60.0
    rate_per_s: float = 24.0
    lag_s: float = 0.001
    policy: str = "marginal_delay+sjf@60"
    seed: int = 7
    json: ResultFile | None = None


class Time(selectors.DefaultSelector):
    """Lets time pass where an event loop would wait."""

    now_s = 0.0

    def select(self, timeout=None):
        assert timeout is not None, "nothing will ever happen"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


def run_at_once(main):
    """Run a coroutine function; its loop's time passes while nothing is to do."""
    passing = Time()
    loop = asyncio.SelectorEventLoop(passing)
    loop.time = lambda: passing.now_s
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main())


@dataclass(eq=False)
class Sequence:
    to_compute: int
    prompt: int
    output: int
    take: object
    """Is told how many tokens there are."""
    generated: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Engine:
    """Batches continuously, and computes of a prompt what follows a beginning that is cached."""

    def __init__(self, iteration):
        self._iteration = iteration
        self.waiting, self.running = deque(), []
        self._blocks, self._has_work = OrderedDict(), asyncio.Event()
        self.asked = self.cached = 0

    def add(self, prompt, output, take):
        whole, found = (len(prompt) - 1) // BLOCK, 0
        names = list(itertools.accumulate(
            (tuple(prompt[BLOCK * at : BLOCK * (at + 1)]) for at in range(whole)),
            lambda before, block: hash((before, block)),
        ))  # fmt: skip
        while found < whole and names[found] in self._blocks:
            found += 1
        for name in reversed(names):  # The beginning is what is kept longest.
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > BLOCKS_HELD:
            self._blocks.popitem(last=False)
        self.asked += len(prompt)
        self.cached += found * BLOCK
        sequence = Sequence(len(prompt) - found * BLOCK, len(prompt), output, take)
        self.waiting.append(sequence)
        self._has_work.set()
        return sequence

    async def run(self):
        while True:
            while self.waiting and len(self.running) < MAX_BATCH:
                self.running.append(self.waiting.popleft())
            if not self.running:
                self._has_work.clear()
                await self._has_work.wait()
                continue
            new = sum(one.to_compute for one in self.running if not one.generated)
            old = [one.prompt + one.generated for one in self.running if one.generated]
            await asyncio.sleep(float(self._iteration @ [1, new, len(old), sum(old)]))
            for one in [*self.running]:
                one.generated += 1
                one.take(one.generated, "length" if one.generated == one.output else None)
                if one.generated == one.output:
                    self.running.remove(one)
                    one.ended.set()


class EngineSender(Sender):
    """Has an engine of this process answer."""

    def __init__(self, engines, ask):
        self._engines, self._ask = engines, ask

    async def answer(self, backend, attempt, replica_ids):
        attempt.note_send()
        sequence = self._engines[replica_ids[0]].add(
            self._ask.prompt, self._ask.max_tokens, attempt.take
        )
        await sequence.ended.wait()


class Picker:
    """A gateway, which reads of engines what they publish as others do by HTTP."""

    def __init__(self, engines, policy, rng, has_peers):
        loop = asyncio.get_running_loop()
        self._engines = engines
        pool = {"name": "p", "kind": "external", "model": "m", "endpoints": [*engines],
                "prefix_block_tokens": BLOCK}  # fmt: skip
        peers = {"listen": "tcp://127.0.0.1:1", "connect": ["tcp://127.0.0.1:2"]}
        cluster = Cluster.model_validate({
            "name": "c", "description": "c", "served_model": "m", "pools": [pool],
            "gateway": {"peers": peers} if has_peers else {}, "limits": {"max_in_flight": 10_000},
            "circuit_breaker": {"budget_s": 1.0},
        })  # fmt: skip
        manager = PolicyManager(cluster.scenario, cluster.baseline, cluster.circuit_breaker, rng)
        manager.switch(policy, cluster.explore_fraction)
        [settings], metrics = cluster.external_pools, Metrics()
        self._backend = ExternalBackend(settings, "m", metrics)
        clock_s = lambda: BEGAN_S + loop.time()  # noqa: E731
        self.gateway = Gateway(cluster, manager, {"p": self._backend}, metrics, clock_s=clock_s)
        self.peers = self.gateway.peers
        self.gateway.refresh()
        for replica in self.gateway.table.replicas.values():
            replica.in_flight.meter._clock_s = loop.time

    async def run(self):
        """Scrape, learn, and name what is open, as often as a gateway does."""
        for number in itertools.count():
            for url, engine in self._engines.items():
                endpoint = self._backend._endpoints[url]
                endpoint.scraper.reading = Reading("vllm", len(engine.waiting), len(engine.running))
                endpoint.scraper.heard_s = self.gateway.clock_s()
                self._backend._news[url] = endpoint
            if number % (LEARN_S // SCRAPE_S) == 0:
                self._backend.learn()
            if number % (NAME_ALL_S // SCRAPE_S) == 0 and self.peers is not None:
                self.peers.name_all()
            await asyncio.sleep(SCRAPE_S)

    async def serve(self, ask, name):
        call = Call(b"/v1/completions", b"", b"", True)
        sender = EngineSender(self._engines, ask)
        request = InferenceRequest(name, ask.prompt, ask.max_tokens, call, sender=sender)
        await self.gateway.serve(request, self.gateway.cluster.classes[0], sender)


@dataclass(frozen=True)
class Ask:
    at_s: float
    prompt: list[int]
    max_tokens: int
    which: float
    """Of the gateways, as a fraction."""


def draw(args, repeat):
    """Requests, most of which begin like others."""
    rng = np.random.default_rng([args.seed, repeat])
    prefixes = rng.integers(1, 1 << 16, (NUM_PREFIXES, PREFIX_BLOCKS * BLOCK)).tolist()
    weights = 1 / np.arange(1, NUM_PREFIXES + 1)
    num = int(args.rate_per_s * (args.warm_up_s + args.duration_s))
    at_s = np.cumsum(rng.exponential(1 / args.rate_per_s, num)).tolist()
    which = rng.choice(NUM_PREFIXES, num, p=weights / weights.sum())
    lengths = np.clip(rng.lognormal(np.log(60), 0.8, num), 8, 600).astype(int)
    answers = np.clip(rng.lognormal(np.log(12), 0.7, num), 2, 80).astype(int).tolist()
    drawn = zip(at_s, which, lengths, answers, rng.random(num).tolist(), strict=True)
    return [
        Ask(at, prefixes[one] + rng.integers(1, 1 << 16, length).tolist(), most, fraction)
        for at, one, length, most, fraction in drawn
    ]


def connect(pickers, lag_s):
    """Have peers hear each other after a while."""
    loop = asyncio.get_running_loop()
    for picker in pickers:
        others = [other.peers for other in pickers if other is not picker]

        def publish(message, others=others):
            for other in others:
                loop.call_later(lag_s, other.take, message)

        picker.peers._publish = publish


async def play(args, arm, repeat):
    """Mean response of a repeat, and the share of tokens of prompts that were cached."""
    engines = {
        f"http://engine-{number}": Engine(ITERATION * slower)
        for number, slower in enumerate(SLOWER)
    }
    rngs = [np.random.default_rng([args.seed, repeat, 1, at]) for at in range(args.gateways)]
    num = 1 if arm == "one" else args.gateways
    pickers = [Picker(engines, args.policy, rng, arm == "peers") for rng in rngs[:num]]
    if arm == "peers":
        connect(pickers, args.lag_s)
    loop, asks = asyncio.get_running_loop(), draw(args, repeat)
    runs = [asyncio.create_task(one.run()) for one in (*engines.values(), *pickers)]
    judged = SimpleNamespace(asked=0, cached=0)
    first_judged = int(args.rate_per_s * args.warm_up_s)

    async def one(number, ask):
        await asyncio.sleep(ask.at_s)
        if number == first_judged:
            judged.asked = sum(engine.asked for engine in engines.values())
            judged.cached = sum(engine.cached for engine in engines.values())
        await pickers[int(ask.which * num)].serve(ask, f"r{number}")
        return loop.time() - ask.at_s

    times_s = await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))
    await asyncio.sleep(2 * NAME_ALL_S)
    for picker in pickers:
        replicas = picker.gateway.table.replicas.values()
        assert not any(replica.in_flight.count for replica in replicas)
    for task in runs:
        task.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    for picker in pickers:
        await picker._backend.stop()
    asked = sum(engine.asked for engine in engines.values()) - judged.asked
    cached = sum(engine.cached for engine in engines.values()) - judged.cached
    return float(np.mean(times_s[first_judged:])), cached / asked


def main(args):
    """Play all arms; print and return a row for each."""
    console = Console(highlight=False, width=150)
    results = {
        arm: [run_at_once(lambda: play(args, arm, repeat)) for repeat in range(args.repeats)]  # noqa: B023
        for arm in ARMS
    }
    rows = [row(arm, results) for arm in ARMS]
    for one in rows:
        console.print(one)
    if args.json is not None:
        write_result(args.json, command_line(), args.seed, rows)
    return rows


def row(arm, results):
    mean_s, hits = np.array(results[arm]).T
    one_s, one_hits = np.array(results["one"]).T
    more_s, more_hits = t_interval(mean_s / one_s - 1), t_interval(hits / one_hits - 1)
    return {
        "arm": arm, "repeats": len(mean_s), "mean_response_s": float(mean_s.mean()),
        "cached_fraction": float(hits.mean()), "delta_mean_fraction": more_s.estimate,
        "delta_mean_ci_low": more_s.low, "delta_mean_ci_high": more_s.high,
        "delta_cached_fraction": more_hits.estimate, "delta_cached_ci_low": more_hits.low,
        "delta_cached_ci_high": more_hits.high,
    }  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

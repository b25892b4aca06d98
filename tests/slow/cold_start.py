"""A router that learns the speeds of its replicas from nothing, beside one that was told them.

    PYTHONPATH=.:tests python -m slow.cold_start --sizes 4 16 --draws 45 --minutes 35

Each draw is a fleet whose speeds differ by up to 8 : 1, at load 0.7. The same requests are placed
by the same rule with the true speeds, with those that are learned (`tokenyard.perf.online`), and by
least load.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import tyro
from rich.console import Console

from tokenyard.perf.online import BatchLimitEstimator, PoolEstimator
from tokenyard.problem import Row
from tokenyard.routing import observation as ob
from tokenyard.routing.fleet import Fleet, MeasuredReplica, ReplicaConfig
from tokenyard.routing.policies.backlog import LeastLoaded
from tokenyard.routing.policies.delay import MarginalDelay
from tokenyard.routing.scenario import NO_REWARD, Arrivals, Scenario
from tokenyard.routing.simulator.batching import BatchingSim, BatchingView
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_streams import BatchingStream, fleet_stream
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.types import FloatArray

_GPUS = ("a10g", "l4", "l40s_vllm", "a100_80g_sxm", "h100_sxm")
_FASTEST = 8.0
_LOOK_S = 1.0
"""Time between two looks at all replicas: an equation of each, where a stream lasted so long."""
_UNKNOWN_BATCH = 256.0
_UNKNOWN_BUDGET = 2048.0
_COEFFICIENTS = slice(ob.ITERATION_S, ob.KV_TOKEN_S + 1)
_EVENT_S = 600.0

Event = Literal["none", "slow", "swap"]


def draw_fleet(rng: np.random.Generator, num: int) -> Scenario:
    """Draw replicas of one model, whose speeds differ by up to 8 : 1, and their traffic."""
    gpu = str(rng.choice(_GPUS))
    model = "internlm_20b" if gpu.startswith(("a100", "h100")) else "llama3_8b"
    base = ReplicaConfig(name="base", gpu=gpu, model=model)
    times = _FASTEST ** -rng.random(num) * _FASTEST**0.5
    batch = int(rng.choice([32, 64, 128, 256]))
    replicas = []
    for number, factor in enumerate(times.tolist()):
        # A slow card is not as slow in all it does.
        each = base.iteration * factor * np.exp(rng.normal(0.0, 0.2, 4))
        names = ("iteration_s", "prefill_token_s", "sequence_s", "kv_token_s")
        replicas.append(
            MeasuredReplica(
                name=f"replica-{number}",
                max_batch=batch,
                token_budget=2048,
                kv_capacity_tokens=max(base.kv_capacity_tokens, 30_000),
                **dict(zip(names, each.tolist(), strict=True)),
            )
        )
    fleet = Fleet(replicas=tuple(replicas), scrape_interval_s=0.25, iteration_jitter=0.1)
    return Scenario(
        name="drawn", description="Replicas of unknown speeds.", fleet=fleet,
        workload=str(rng.choice(["azure_conv", "azure_code"])),
        arrivals=Arrivals(process="poisson", load=0.7), output_length="by_context",
        slo_response_s=20.0, reward=NO_REWARD,
    )  # fmt: skip


class Sight:
    """What a gateway sees of the answers of a simulator's replicas, and learns from it.

    It counts tokens as they come, and so knows, between two iterations' ends, how many there were
    and what they computed, where a stream lasted from the first to the second.
    """

    def __init__(self, sim: BatchingSim) -> None:
        num = sim.scenario.num_servers
        self._sim, self._pool = sim, PoolEstimator()
        self.estimators = [self._pool.add(str(i)) for i in range(num)]
        self._limits = [BatchLimitEstimator() for _ in range(num)]
        self._open: list[int] = []
        self._counted = np.zeros(sim.arrays.requests.shape[1], dtype=np.bool_)
        self._done = np.zeros((num, 3))
        self._last, self._last_s = np.zeros((num, 4)), np.full(num, np.nan)
        self._alone: dict[int, int] = {}
        self._next_s = 0.0
        self._told = np.empty((num, 4))
        self._batches = np.full(num, _UNKNOWN_BATCH)
        self._tell()

    def show(self, seen: BatchingView) -> None:
        """Put what is believed in place of what is true, for the request that waits."""
        now_s = seen.now_s()
        if now_s >= self._next_s:
            self._look()
            self._next_s = now_s + _LOOK_S
        table = self._sim.arrays.tables[seen.copy]
        outstanding = table[:, ob.NUM_WAITING] + table[:, ob.NUM_RUNNING]
        published = self._sim.arrays.state[seen.copy, :, lay.SCRAPED_WAITING]
        waiting = np.where(
            published > 0, table[:, ob.NUM_WAITING], np.maximum(outstanding - self._batches, 0)
        )
        table[:, ob.NUM_WAITING], table[:, ob.NUM_RUNNING] = waiting, outstanding - waiting
        table[:, _COEFFICIENTS] = self._told
        table[:, ob.NUM_SLOTS] = table[:, ob.MAX_CONCURRENCY] = self._batches
        table[:, ob.TOKEN_BUDGET] = _UNKNOWN_BUDGET
        for row in table:
            row[ob.WAIT_S] = ob.batching_wait_s(row)

    def send(self, request: int, server: int, was_idle: bool) -> None:
        """Note where a request goes."""
        self._open.append(request)
        alone = self._alone.pop(server, None)
        if alone is not None and not np.isnan(self._outcomes[alone, lay.FIRST_TOKEN_S]):
            self._take_alone(server, alone)
        if was_idle:
            self._alone[server] = request

    @property
    def _outcomes(self) -> FloatArray:
        return self._sim.arrays.outcomes[0]

    def _take_alone(self, server: int, request: int) -> None:
        """The first token of a request that had its replica for itself: its prompt's time."""
        row = self._sim.arrays.requests[0, request]
        time_s = self._outcomes[request, lay.FIRST_TOKEN_S] - row[lay.ARRIVAL_S]
        prompt = row[lay.CONTEXT]
        iterations = np.ceil(prompt / _UNKNOWN_BUDGET)
        self.estimators[server].observe(time_s, iterations, prompt, 0, 0, 0.25)

    def _look(self) -> None:
        """Take an equation of every replica where one stream lasted from look to look."""
        arrays, requests = self._sim.arrays, self._sim.arrays.requests[0]
        state = arrays.state[0]
        num = len(state)
        # The iteration in progress has not shown anything yet.
        ended_s = state[:, lay.UNTIL_S] - state[:, lay.TAKES_S]
        ids = np.array(self._open, dtype=np.int64)
        outcomes = self._outcomes[ids]
        server = outcomes[:, lay.SERVER].astype(np.int64)
        first_s, finish_s = outcomes[:, lay.FIRST_TOKEN_S], outcomes[:, lay.FINISH_S]
        begun, done = ~np.isnan(first_s), ~np.isnan(finish_s)
        lasts = np.zeros(num, dtype=np.bool_)
        lasts[server[begun & ~done & (first_s <= self._last_s[server])]] = True
        new = begun & ~self._counted[ids]
        self._counted[ids[new]] = True
        np.add.at(self._done[:, 0], server[new], requests[ids[new], lay.CONTEXT])
        self._add(self._done, server[done], ids[done], requests[ids[done], lay.OUTPUT] - 1)
        self._open = ids[~done].tolist()
        now = np.concatenate([state[:, [lay.ITERATIONS]] - 1, self._done], axis=1)
        at = int(arrays.rules[lay.DECODE_AT])
        most = (int(arrays.rules[lay.RING_AT]) - at) // lay.DECODE_FIELDS
        rows = state[:, at : at + most * lay.DECODE_FIELDS].reshape(num, most, lay.DECODE_FIELDS)
        where, which = np.nonzero(np.arange(most) < state[:, [lay.DECODING]])
        decoding = rows[where, which]
        index = decoding[:, lay.D_INDEX].astype(np.int64)
        kv = decoding[:, lay.D_BASE] + state[where, lay.STEP]
        self._add(now[:, 1:], where, index, kv - requests[index, lay.CONTEXT])
        for i in np.nonzero(lasts & (state[:, lay.BUSY] > 0))[0].tolist():
            step = now[i] - self._last[i]
            if step[0] >= 4:
                self.estimators[i].observe(ended_s[i] - self._last_s[i], *step.tolist())
        for i, request in [*self._alone.items()]:
            if not np.isnan(self._outcomes[request, lay.FIRST_TOKEN_S]):
                self._take_alone(i, self._alone.pop(i))
        self._last, self._last_s = now, np.where(state[:, lay.BUSY] > 0, ended_s, np.nan)
        for limit, row in zip(self._limits, state, strict=True):
            if row[lay.SCRAPED_KV] < 0.9:
                limit.observe(int(row[lay.SCRAPED_RUNNING]), int(row[lay.SCRAPED_WAITING]))
        self._pool.share()
        self._tell()

    def _add(
        self, sums: FloatArray, server: FloatArray, ids: FloatArray, tokens: FloatArray
    ) -> None:
        """Add tokens that sequences have decoded, and the cached tokens that those have read."""
        context = self._sim.arrays.requests[0][ids, lay.CONTEXT]
        np.add.at(sums[:, 1], server, tokens)
        np.add.at(sums[:, 2], server, tokens * context + tokens * (tokens - 1) / 2)

    def _tell(self) -> None:
        for i, (one, limit) in enumerate(zip(self.estimators, self._limits, strict=True)):
            self._told[i] = one.shared_iteration
            self._batches[i] = limit.estimate or _UNKNOWN_BATCH


def play(scenario: Scenario, stream: BatchingStream, rule: str, event: Event) -> FloatArray:
    """Place a stream; return the response times, seconds; `rule`: told, learned or least_loaded."""
    sim = BatchingSim(scenario, 1, len(stream), NO_REWARD)
    sim.load(0, stream)
    seen, params = sim.view(0), sim.arrays.replica_params[0]
    policy = LeastLoaded() if rule == "least_loaded" else MarginalDelay()
    sight = Sight(sim) if rule == "learned" else None
    action = np.zeros(1, dtype=np.int64)
    while (request := seen.current()) >= 0:
        if event != "none" and seen.now_s() >= _EVENT_S:
            change(params, event)
            event = "none"
        if sight is not None:
            sight.show(seen)
        action[0] = policy.route(seen.request(), seen.snapshots())
        if sight is not None:
            row = sim.arrays.tables[0, action[0]]
            sight.send(request, int(action[0]), not row[ob.NUM_WAITING] + row[ob.NUM_RUNNING])
        sim.step(action)
    sim.drain()
    return seen.outcomes().response_s


def change(params: FloatArray, event: Event) -> None:
    """Halve the speed of the fastest replica, or exchange it with the slowest one's."""
    times = params[:, lay.ITERATION_S : lay.KV_TOKEN_S + 1]
    fastest, slowest = int(times[:, 0].argmin()), int(times[:, 0].argmax())
    if event == "slow":
        times[fastest] *= 2
    else:
        times[[fastest, slowest]] = times[[slowest, fastest]]


def compare(draw: int, replicas: int, minutes: int, event: Event) -> list[Row]:
    """Play one draw; one row per minute of arrival. The event comes after ten minutes."""
    rng = np.random.default_rng([0, draw])
    scenario = draw_fleet(rng, replicas)
    rate = scenario.rate_per_s(sum(scenario.mean_lengths_tokens))
    requests = int(rate * minutes * 60)
    stream = fleet_stream(StreamSource(scenario).sample(requests, rng))
    minute = (stream.requests[:, lay.ARRIVAL_S] // 60).astype(int)
    rules = ("told", "learned", "least_loaded")
    responses = {rule: play(scenario, stream, rule, event) for rule in rules}
    return [
        {"draw": draw, "minute": one, "requests": int((minute == one).sum())}
        | {f"{rule}_mean_s": float(np.nanmean(responses[rule][minute == one])) for rule in rules}
        for one in range(minutes)
        if (minute == one).any()
    ]


@dataclass(frozen=True, kw_only=True)
class Args:
    """Print how much longer means over draws are with what is learned, in percent."""

    sizes: tuple[int, ...] = (4,)
    """Replicas of a fleet."""
    draws: int = 6
    """Fleets of each size."""
    minutes: int = 12
    event: Event = "none"
    """What happens after ten minutes."""
    processes: int = 2


def main(args: Args) -> None:
    """Play all draws, and print each stretch of time beside the true speeds and least load."""
    console = Console(highlight=False, markup=False, width=160)
    for size in args.sizes:
        play_draw = partial(compare, replicas=size, minutes=args.minutes, event=args.event)
        with ProcessPoolExecutor(args.processes) as pool:
            draws = list(pool.map(play_draw, range(args.draws)))
        stretches = [(0, 1), *((first, first + 5) for first in range(5, args.minutes - 4, 5))]
        for first, end in stretches:
            told = [_excess(rows, "told", first, end) for rows in draws]
            load = np.mean([_excess(rows, "least_loaded", first, end) for rows in draws])
            console.print(
                f"{size} replicas, {args.draws} fleets, minutes {first}-{end}: to the true speeds "
                f"{np.mean(told):+.1f} [{max(told):+.1f}], to least load {load:+.1f}"
            )  # fmt: skip
        worst = max(
            float(np.mean([_excess(rows, "least_loaded", minute, minute + 1) for rows in draws]))
            for minute in range(min(args.minutes, 30))
        )
        console.print(f"{size} replicas: worst minute to least load {worst:+.1f}")


def _excess(rows: list[Row], rule: str, first: int, end: int) -> float:
    """Mean response with what is learned over that of a rule, in percent beyond it."""
    chosen = [row for row in rows if first <= row["minute"] < end]
    learned, other = (
        sum(row[f"{name}_mean_s"] * row["requests"] for row in chosen) for name in ("learned", rule)
    )
    return 100.0 * float(learned / other - 1.0)


if __name__ == "__main__":
    main(tyro.cli(Args))

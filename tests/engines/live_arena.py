"""The live arena: routers of others, Envoy and Tokenyard before the same engines, in turns.

    PYTHONPATH=.:tests:benchmarks python tests/engines/live_arena.py --json FILE

Engines are four emulated ones that batch, keep prefixes in a cache, and need no computing; or
llama.cpp, each with a share of CPU. The gateway and the picker have URLs alone. `make rivals plugs
.engines-real/llamacpp/.installed` installs what plays; what is missing is left out.
"""

import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import signal
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
import uvloop
import yaml
from engines.sim_to_real import ADMIN, SHARES, CpuShare
from engines.sim_to_real import Engine as RealEngine
from rival_engines import INFORMATION
from rival_parity import missing
from servers import behind_envoy, external_pool, gateway, ray_application, rival, started
from unit.paced_endpoint import PAGE
from unit.several_pickers import BLOCK, BLOCKS_HELD, MAX_BATCH, Engine
from unit.stub_endpoint import DONE, Stub, served

from pipelines import arena
from serve_app.http.free_port import free_port
from serve_app.load_generator import LoadConfig, make_asks, read_stretches
from tokenyard.provenance import ResultFile
from tokenyard.routing.scenario import NO_REWARD, Scenario
from tokenyard.routing.twin import simulate

ROOT = Path(__file__).parents[2]
ITERATION = np.array([0.05, 5e-4, 1.5e-3, 0.0])
"""Seconds of an iteration, and of each token of a prompt and each sequence that is in it."""
EQUAL, UNEQUAL = (1.5,) * 4, (1.0, 1.5, 2.5, 4.0)
"""Times as slow."""
ROUTERS = (
    "gateway", "Envoy, picker", "Envoy", "vllm-router", "smg", "sglang-router", "litellm", "ray",
)  # fmt: skip
ENVOY = Path(os.environ.get("TOKENYARD_PLUGS", ROOT / ".plugs")) / "envoy"
SLO_S = 6.0
NUM_PREFIXES, PREFIX_BLOCKS = 30, 12
RAY = """
import sys
import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

urls = sys.argv[2:]

@serve.deployment(num_replicas=len(urls), max_ongoing_requests=1000,
                  ray_actor_options={"num_cpus": 0})
class Proxy:
    def __init__(self):
        url = urls[serve.get_replica_context().rank.rank]
        self.client = httpx.AsyncClient(base_url=url, timeout=600)

    async def __call__(self, request: Request):
        if request.method == "GET":
            answer = await self.client.get(request.url.path)
            return Response(answer.content, media_type="application/json")
        events = self.events(request.url.path, await request.body())
        return StreamingResponse(events, media_type="text/event-stream")

    async def events(self, path, body):
        headers = {"content-type": "application/json"}
        async with self.client.stream("POST", path, content=body, headers=headers) as answer:
            async for piece in answer.aiter_raw():
                yield piece

application = Proxy.bind()
"""
"""Ray Serve's own router, by the power of two choices, before a replica for each engine."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Engines, and traffic as `tokenyard replay` takes it."""

    slower: tuple[float, ...] = UNEQUAL
    """Of emulated engines; empty: llama.cpp."""
    traffic: dict
    has_prefixes: bool = False
    """Whether many prompts begin alike: the file of the traffic is then written here."""


CELLS = {
    "equal_chat": Cell(
        slower=EQUAL, traffic={"scenario": "conversation", "rate": 18, "length_scale": 0.06}
    ),
    "unequal_chat": Cell(traffic={"scenario": "conversation", "rate": 16, "length_scale": 0.06}),
    "unequal_code": Cell(
        traffic={"scenario": "azure_code_mixed_gpus", "rate": 15, "length_scale": 0.06}
    ),
    "equal_prefix": Cell(slower=EQUAL, traffic={"rate": 13}, has_prefixes=True),
    "unequal_prefix": Cell(traffic={"rate": 12}, has_prefixes=True),
    "llamacpp": Cell(
        slower=(), traffic={"scenario": "conversation", "rate": 1.4, "length_scale": 0.04}
    ),
}  # fmt: skip


STANDS_FOR = {
    "gateway": "marginal_delay", "Envoy": "power_of_two", "vllm-router": "power_of_two",
    "ray": "ray_default", "sglang-router": "sglang_cache_aware",
}  # fmt: skip
"""The rule by which the simulator plays a router; with prefixes smg is `smg_spill`."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Play the live arena."""

    cells: tuple[str, ...] = tuple(CELLS)
    routers: tuple[str, ...] = ROUTERS
    repeats: int = 5
    duration_s: float = 20.0
    """Of a turn; of llama.cpp twice as long."""
    warm_up_s: float = 5.0
    learn_s: float = 20.0
    seed: int = 7
    hold: bool = False
    """Play nothing: print where the routers of each cell listen, and wait for an end of line."""
    json: ResultFile | None = None


class Endpoint(Stub):
    """An emulated engine over HTTP; a word is a token."""

    def __init__(self, iteration):
        super().__init__()
        self.engine = Engine(iteration)
        self.pages = {path: json.dumps(page) for path, page in INFORMATION.items()}
        self.pages["/metrics"] = lambda: PAGE % (
            len(self.engine.waiting), len(self.engine.running)
        )  # fmt: skip

    async def _answer(self, reader, writer):
        self.heads.clear()
        if not self.bodies[-1]:
            raise ConnectionError  # A router that tries HTTP/2 falls back.
        body = json.loads(self.bodies.pop())
        words, events = body["prompt"].split(), asyncio.Queue()
        sequence = self.engine.add(
            words, body["max_tokens"], lambda _, reason: events.put_nowait(reason)
        )
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        reason = None
        while reason is None:
            reason = await events.get()
            if writer.is_closing():
                raise ConnectionError
            choice = {"index": 0, "text": " a", "finish_reason": reason}
            write_chunk(writer, an_event_of({"object": "text_completion", "choices": [choice]}))
        usage = {"prompt_tokens": len(words), "completion_tokens": sequence.generated}
        usage["total_tokens"] = sum(usage.values())
        write_chunk(
            writer, an_event_of({"object": "text_completion", "choices": [], "usage": usage})
        )
        write_chunk(writer, DONE)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def an_event_of(fields):
    return b"data: %b\n\n" % json.dumps(fields).encode()


def write_chunk(writer, data):
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def serve_engines(slower, ports):
    """Serve emulated engines until the parent is gone."""

    async def run():
        endpoints = [Endpoint(factor * ITERATION) for factor in slower]
        async with served(endpoints, limit_bytes=1 << 20):
            ports.send([int(one.url.rpartition(":")[2]) for one in endpoints])
            await asyncio.gather(*(one.engine.run() for one in endpoints))

    uvloop.run(run())


@contextlib.contextmanager
def emulated(slower):
    """Yield the ports of emulated engines."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_engines, args=(slower, there), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def llamacpp(scratch):
    """Yield the ports of two llama.cpp servers, one with an eighth of the other's share of CPU."""
    with contextlib.ExitStack() as stack:
        engines = []
        for number in range(2):
            name = f"llamacpp-{number}"
            share, engine = CpuShare(f"arena-{name}"), RealEngine(scratch, "llamacpp", number)
            stack.callback(share.remove)
            stack.callback(engine.end, signal.SIGTERM)
            command, env = engine.command
            engine.begin(share.command(command), env)
            engine.wait_until_up()
            share.limit(SHARES[name])
            engines.append(engine)
        yield [engine.port for engine in engines]


@contextlib.contextmanager
def router(name, ports, cell):
    """Yield a router before some engines."""
    known = {"prefix_block_tokens": BLOCK} if cell.has_prefixes else {}
    model = "m" if cell.slower else "smollm2"
    pool = external_pool(ports, **known | {"model": model})
    # Of vllm-router the stronger one on unequal engines; that of sglang-router draws at random.
    keeps_prefixes = name == "sglang-router" or (name == "smg" and cell.has_prefixes)
    policy = "cache_aware" if keeps_prefixes else "power_of_two"
    if name == "gateway":
        context = gateway(name, pool)
    elif name.startswith("Envoy"):
        context = behind_envoy(ENVOY, ports, name, pool)
    elif name == "ray":
        port, urls = free_port(), [f"http://127.0.0.1:{each}" for each in ports]
        context = started(name, port, ray_application(RAY, port, *urls))
    else:
        context = rival(name, ports, policy, model)
    with context as server:
        yield f"http://127.0.0.1:{server.port}"


def is_there(name):
    """Whether a router is installed."""
    if name.startswith("Envoy"):
        return (ENVOY / "bin" / "envoy").exists()
    return name in ("gateway", "ray") or not missing(name)


def write_prefixes(path, seed):
    """Write requests that mostly begin like others, as Mooncake's traces have them."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, NUM_PREFIXES + 1)
    num = 20_000
    which = rng.choice(NUM_PREFIXES, num, p=weights / weights.sum())
    tails = np.clip(rng.lognormal(np.log(60), 0.8, num), 8, 600).astype(int)
    answers = np.clip(rng.lognormal(np.log(12), 0.7, num), 2, 80).astype(int)
    at_ms = 1000 * np.cumsum(rng.exponential(1.0, num))
    with path.open("w") as file:
        for index in range(num):
            first = int(which[index]) * PREFIX_BLOCKS
            row = {
                "timestamp": int(at_ms[index]), "output_length": int(answers[index]),
                "input_length": PREFIX_BLOCKS * BLOCK + int(tails[index]),
                "hash_ids": list(range(first, first + PREFIX_BLOCKS)),
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")


def simulated_s(cell, traffic, args):
    """Simulated mean response of each router's rule, over the traffic of the turns that count."""
    terms = ("iteration_s", "prefill_token_s", "sequence_s", "kv_token_s")
    fleet = {
        "replicas": [
            {
                "name": f"r{number}", "max_batch": MAX_BATCH, "token_budget": 1 << 16,
                "kv_capacity_tokens": BLOCK * BLOCKS_HELD,
                **dict(zip(terms, (factor * ITERATION).tolist(), strict=True)),
            }
            for number, factor in enumerate(cell.slower)
        ],
        "scrape_interval_s": 0.25, **({"prefix_block_tokens": BLOCK} if cell.has_prefixes else {}),
    }  # fmt: skip
    twin = Scenario.model_validate({
        "name": "live", "description": "d", "fleet": fleet, "workload": "azure_conv",
        "arrivals": {"rate_per_s": traffic["rate"]}, "slo_response_s": SLO_S, "reward": NO_REWARD,
    })  # fmt: skip
    config = LoadConfig(**traffic, seed=args.seed, duration_s=args.duration_s)
    learned = math.ceil(args.learn_s / args.duration_s)
    rules = STANDS_FOR | {"smg": "smg_spill" if cell.has_prefixes else "power_of_two"}
    means = []
    for stretch in read_stretches(config, learned + args.repeats)[learned:]:
        asks = make_asks(config, stretch, 1.0, 4096)
        lengths = [len(ask.words) for ask in asks], [ask.max_tokens for ask in asks]
        sent = replace(
            stretch, context_tokens=np.array(lengths[0]), generated_tokens=np.array(lengths[1])
        )
        runs = simulate(twin, "live", sent, {*rules.values()}, args.seed)
        means.append({rule: run["mean_response_s"] for rule, run in runs.items()})
    return {name: float(np.mean([one[rule] for one in means])) for name, rule in rules.items()}


def main(args):
    """Play the cells, one after the other; return the rows."""
    rows = []
    for name in args.cells:
        cell = CELLS[name]
        times = 1 if cell.slower else 2
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            scratch, traffic = Path(folder), cell.traffic | {"timeout_s": 60.0}
            if cell.has_prefixes:
                write_prefixes(scratch / "prefixes.jsonl", args.seed)
                traffic |= {"trace": str(scratch / "prefixes.jsonl"), "block_tokens": BLOCK}
            engines = emulated(cell.slower) if cell.slower else llamacpp(scratch)
            ports = stack.enter_context(engines)
            routers = {
                each: stack.enter_context(router(each, ports, cell))
                for each in args.routers
                if is_there(each)
            }
            if args.hold:
                input(f"{name}: {routers} ")
                continue
            live = {
                "routers": routers, "repeats": args.repeats,
                "cells": {name: traffic | {"slo_response_s": SLO_S}},
                "duration_s": times * args.duration_s, "warm_up_s": times * args.warm_up_s,
                "learn_s": times * args.learn_s,
            }  # fmt: skip
            (scratch / "live.yaml").write_text(yaml.safe_dump(live))
            page = scratch / "arena.html"
            played = scratch / "rows.json"
            arena.main(
                arena.Args(live=scratch / "live.yaml", seed=args.seed, page=page, json=played)
            )
            cell_rows = json.loads(played.read_text())["rows"]
            if cell.slower:
                expected_s = simulated_s(cell, traffic, args)
                for row in cell_rows:
                    row["simulated_mean_response_s"] = expected_s.get(row["entry"])
            rows += cell_rows
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    os.environ |= ADMIN
    main(tyro.cli(Args, description=__doc__))

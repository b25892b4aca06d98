"""Block events over real sockets: an engine in scarce memory, and processes that die."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest
from unit.engine_builders import a_tiny_llama, prompts_of
from unit.serve.test_serve_replicas import PROFILE

from serve_app.endpoints import KvEvents
from serve_app.engine_config import PAGE_TOKENS, EngineConfig
from serve_app.engines.base import Sampling
from serve_app.engines.sharded.engine import ShardedEngine
from serve_app.gateway.kv_events import EventSubscriber
from serve_app.gateway.replicas import Prompt, ReplicaTable
from serve_app.http.free_port import free_port

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

logger = logging.getLogger(__name__)

LIMIT_S = 60.0


@asynccontextmanager
async def subscribed(settings, block_tokens):
    """Yield what a gateway keeps of the replica that publishes there."""
    table = ReplicaTable((100.0, 10.0))
    replica = table.add("r", "pool", PROFILE, block_tokens, 0.0)
    subscriber = EventSubscriber(settings, "127.0.0.1", replica)
    try:
        yield replica, subscriber._events
    finally:
        subscriber.stop()
        assert table._prefixes[block_tokens].num_blocks == 0


async def until(is_so, limit_s=LIMIT_S):
    async with asyncio.timeout(limit_s):
        while not is_so():
            await asyncio.sleep(0.01)


async def really_cached(engine, prompts):
    """Blocks of each prompt that rank 0 would share with another request, and of how many."""

    def matched(rank, prompts):
        (allocator,) = rank._manager.batch_processor.cache.cache_allocators.values()
        blocks = [len(allocator.match_prefix_blocks(prompt)) for prompt in prompts]
        return blocks, len(allocator.ledger.hash_to_block)

    return await engine._group.ranks[0].__ray_call__.remote(matched, prompts)


def believed(replica, prompts):
    return [replica.match_tokens(Prompt(one)) // PAGE_TOKENS for one in prompts]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_index_is_what_an_engine_in_scarce_memory_has(tmp_path, tp):
    pytest.importorskip("transformers")
    a_tiny_llama(tmp_path)
    # Room for a dozen blocks: for one or two of six conversations.
    config = EngineConfig(
        model=str(tmp_path), tensor_parallel=tp, max_batch=3, kv_bytes=(1 << 20) // tp,
        max_model_tokens=256, start_timeout_s=180, kv_events=True,
    )  # fmt: skip
    shared, *openings = prompts_of(70, *range(20, 80, 10))
    asked = []

    async def talk(engine, number, opening):
        prompt = [*shared, *opening]
        for turn in range(3):
            sampling, tokens = Sampling(20, ignore_eos=True), []
            async for chunk in engine.generate(f"{number} {turn}", prompt, sampling):
                tokens += chunk.token_ids
            asked.append(prompt)
            prompt = [*prompt, *tokens, *opening[:15]]

    async def errors_of(engine, replica, events):
        """Blocks by which belief and truth differ, for each prompt that was ever asked."""
        really, number = await really_cached(engine, asked)
        index = replica._prefixes
        # Prompts in flight have ended, so that it has no blocks but those that are stored.
        await until(lambda: events.is_complete and index.num_blocks == number)
        return np.abs(np.subtract(believed(replica, asked), really)), sum(really)

    async def run():
        engine = ShardedEngine(config)
        try:
            await engine.start()
            async with subscribed(KvEvents(**engine.kv_events), PAGE_TOKENS) as (replica, events):
                talks = (talk(engine, *each) for each in enumerate(openings))
                await asyncio.wait_for(asyncio.gather(*talks), LIMIT_S)
                errors, held = await errors_of(engine, replica, events)
                (pid,) = [await engine._group.ranks[0].__ray_call__.remote(lambda _: os.getpid())]
                os.kill(pid, signal.SIGKILL)
                killed_s = time.monotonic()
                await until(lambda: not any(believed(replica, asked)))
                forgotten_s = time.monotonic() - killed_s
                await until(lambda: engine.stats().accepting)
                num_before = len(asked)
                await talk(engine, 9, openings[0])
                again, held_again = await errors_of(engine, replica, events)
                assert len(asked) == num_before + 3
                return errors, held, forgotten_s, again, held_again
        finally:
            await engine.stop()

    errors, held, forgotten_s, again, held_again = asyncio.run(run())
    logger.info("p95 error %g blocks, %d held; forgotten after %.3f s; then p95 %g, %d held",
                np.percentile(errors, 95), held, forgotten_s, np.percentile(again, 95),
                held_again)  # fmt: skip
    assert errors.max() == again.max() == 0
    assert min(held, held_again) > 0


@contextmanager
def a_publisher(*ports):
    """Yield a process, and what tells it to publish."""
    from unit import block_publisher

    process = subprocess.Popen(
        [sys.executable, block_publisher.__file__, *map(str, ports)],
        stdin=subprocess.PIPE, text=True,
    )  # fmt: skip

    def tell(*lines):
        process.stdin.write("".join(f"{line}\n" for line in lines))
        process.stdin.flush()

    try:
        yield process, tell
    finally:
        process.kill()
        process.stdin.close()
        process.wait()


@pytest.mark.smoke
def test_a_replica_that_dies_is_forgotten_and_one_that_comes_back_is_believed():
    ports = free_port(), free_port()
    settings = KvEvents(
        endpoint=f"tcp://*:{ports[0]}", replay_endpoint=f"tcp://*:{ports[1]}", topic="kv@"
    )

    def held(replica, first):
        prompt = Prompt(range(first * 1000, first * 1000 + 100))
        return replica.match_tokens(prompt) // 2

    async def run():
        async with subscribed(settings, 2) as (replica, events):
            with a_publisher(*ports) as (process, tell):
                tell("store 1 8", "store 2 6")
                await until(lambda: (held(replica, 1), held(replica, 2)) == (8, 6))
                tell("lose remove 1 8", "lose store 3 4", "store 4 2")
                await until(lambda: held(replica, 4) == 2)
                assert [held(replica, one) for one in (1, 2, 3)] == [0, 6, 4]
                tell("lose remove 2 6")  # Nothing comes after it.
                await until(lambda: held(replica, 2) == 0)
                replica.send("request", Prompt(range(5000, 5100)), 0, 1.0, 0.0)
                process.kill()
                killed_s = time.monotonic()
                await until(lambda: held(replica, 4) == 0)
                forgotten_s = time.monotonic() - killed_s
                assert not events.is_complete
            # Without events it is believed to have what it is sent.
            replica.in_flight.close("request", 1.0)
            replica.send("another", Prompt(range(6000, 6100)), 0, 1.0, 2.0)
            assert held(replica, 6) == 49
            with a_publisher(*ports) as (process, tell):
                tell("store 3 1")
                await until(lambda: held(replica, 3) == 1)
                assert [held(replica, one) for one in (1, 2, 4, 5, 6)] == [0, 0, 0, 0, 49]
                replica.in_flight.close("another", 3.0)
                assert held(replica, 6) == 0
                tell("clear")
                await until(lambda: held(replica, 3) == 0)
                assert events.is_complete
            return forgotten_s

    forgotten_s = asyncio.run(run())
    logger.info("forgotten %.3f s after the process was killed", forgotten_s)

"""Sharded inference against one process: logits, tokens, and what goes wrong."""

import asyncio
import logging
import os
import signal
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
import ray
from unit.engine_builders import a_tiny_llama, prompts_of

from serve_app.engine_config import Emulation, EngineConfig
from serve_app.engines.base import EngineError, Sampling
from serve_app.engines.models import find_model
from serve_app.engines.sharded import engine as sharded_engine
from serve_app.engines.sharded.engine import ShardedEngine, WorkerGroup
from tokenyard.routing.types import OrderKey

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

logger = logging.getLogger(__name__)

NUM_NEW = 20
EOS = 2
PROMPTS = prompts_of(5, 17, 33, 60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of a tiny model, and the model in this process."""
    folder = tmp_path_factory.mktemp("tiny")
    a_tiny_llama(folder)
    return folder, transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def a_config(folder, **fields):
    small = {"kv_bytes": 4 << 20, "max_model_tokens": 256, "start_timeout_s": 180}
    return EngineConfig(model=str(folder), **(small | fields))


def single_logits(model, prompt):
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


def single_tokens(model, prompt, num_new=NUM_NEW, eos_token_id=EOS):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False,
        eos_token_id=eos_token_id,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@asynccontextmanager
async def started(config, group=None):
    engine = ShardedEngine(config, group)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def collected(engine, name, prompt, sampling=None):
    """Tokens of one request, and why it ended."""
    tokens, reason = [], None
    async for chunk in engine.generate(name, prompt, sampling or Sampling(NUM_NEW)):
        assert reason is None, "nothing comes after the last chunk"
        tokens += chunk.token_ids
        reason = chunk.finish_reason
    return tokens, reason


async def until(condition, seconds=5.0):
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.01)


async def logits_of_ranks(group, token_ids):
    """Logits of every rank, computed by all of them together."""

    def logits(rank):
        from serve_app.engines.sharded.rank import all_logits

        return all_logits(rank._model, token_ids)

    return await asyncio.gather(*(rank.__ray_call__.remote(logits) for rank in group.ranks))


async def pids_of(engine):
    ranks = engine._group.ranks
    return await asyncio.gather(
        *(rank.__ray_call__.remote(lambda _: os.getpid()) for rank in ranks)
    )


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.smoke),
        (4, 1),
        (1, 2),
        (1, 4),
        (2, 2),
    ],
)
def test_a_divided_model_computes_and_generates_what_one_process_does(tiny, tp, pp):
    folder, model = tiny
    config = a_config(folder, tensor_parallel=tp, pipeline_parallel=pp, max_batch=len(PROMPTS))

    async def run():
        group = WorkerGroup(config)
        try:
            await group.place()
            await group.load()
            of_ranks = torch.tensor(await logits_of_ranks(group, PROMPTS[2]))
            # Requests at once, each at another place of its own.
            async with started(config, group) as engine:
                names = map(str, range(len(PROMPTS)))
                requests = map(collected, [engine] * len(PROMPTS), names, PROMPTS)
                answers = await asyncio.wait_for(asyncio.gather(*requests), 60)
                await asyncio.wait_for(who_is_late_goes_back(engine), 60)
                await engine.drain()
                await engine.check_health()
                await until(lambda: engine.stats().kv_used_fraction == 0)
                return of_ranks, answers, engine.stats()
        finally:
            group.disband()

    of_ranks, answers, stats = asyncio.run(run())
    error = (of_ranks - single_logits(model, PROMPTS[2])).abs().max().item()
    equal = [tokens for tokens, _ in answers] == [single_tokens(model, each) for each in PROMPTS]
    logger.info("TP %d x PP %d: logits differ by %.1e, tokens equal: %s", tp, pp, error, equal)
    assert error < 1e-4
    assert equal
    for tokens, reason in answers:
        assert reason == ("stop" if tokens[-1] == EOS else "length")
    assert (stats.num_waiting, stats.num_running) == (0, 0)


async def who_is_late_goes_back(engine):
    """Behind a full batch; ranks that did not agree would compute different batches."""
    busy = [
        engine.generate(f"busy {number}", PROMPTS[0], Sampling(190, ignore_eos=True))
        for number in range(len(PROMPTS))
    ]
    for stream in busy:
        await anext(stream)
    begun, now_s = [], time.time()

    async def begin(name, key):
        async for _ in engine.generate(name, PROMPTS[0], Sampling(1), key):
            begun.append(name)

    keys = {
        "late": OrderKey(1.0, now_s - 1.0, now_s + 60.0),
        "in time": OrderKey(2.0, now_s + 60.0, now_s + 90.0),
        "never late": OrderKey(3.0),
    }
    tasks = [asyncio.create_task(begin(name, key)) for name, key in keys.items()]
    await until(lambda: engine.stats().num_waiting == len(tasks))
    await busy[0].aclose()
    await asyncio.gather(*tasks)
    assert begun == ["in time", "never late", "late"]
    for stream in busy:
        await stream.aclose()


def test_an_engine_keeps_its_futures_in_order(tiny):
    """Laws that need one running engine each take some seconds to start: they share it."""
    folder, model = tiny
    config = a_config(folder, max_batch=2, max_waiting=1, kv_bytes=800 << 10)

    async def run():
        async with started(config) as engine:
            await seeds_repeat(engine)
            await ending_is_told(engine, model)
            await leaving_frees(engine)
            await a_full_queue_refuses(engine)
            await nonsense_is_refused(engine)
            await a_full_cache_preempts_and_recovers(engine, model)

    asyncio.run(run())
    assert ray.util.placement_group_table() == {} or all(
        group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()
    )


async def seeds_repeat(engine):
    def ask(name, seed, temperature=1.5):
        sampling = Sampling(NUM_NEW, temperature, top_p=0.95, seed=seed)
        return collected(engine, name, PROMPTS[0], sampling)

    alone = await ask("a", 7)
    # The same request beside another one, and other seeds.
    beside, other = await asyncio.gather(ask("b", 7), ask("c", 8))
    assert alone == beside != other
    assert await ask("d", None) != await ask("e", None)
    assert (await ask("f", None, temperature=0.0)) == (await ask("g", None, temperature=0.0))


async def ending_is_told(engine, model):
    greedy = single_tokens(model, PROMPTS[1], 60)
    tokens, reason = await collected(engine, "eos", PROMPTS[1], Sampling(60))
    assert (tokens[-1] == EOS) == (reason == "stop")
    assert tokens == greedy
    tokens, reason = await collected(engine, "on", PROMPTS[1], Sampling(60, ignore_eos=True))
    assert (len(tokens), reason) == (60, "length")


async def leaving_frees(engine):
    stream = engine.generate("left", PROMPTS[0], Sampling(190, ignore_eos=True))
    await anext(stream)
    await until(lambda: engine.stats().num_running == 1)
    assert engine.stats().kv_used_fraction > 0
    await stream.aclose()
    await until(lambda: engine.stats().num_running == 0)
    assert engine.stats().kv_used_fraction == 0

    stream = engine.generate("left", PROMPTS[0], Sampling(190, ignore_eos=True))
    await anext(stream)
    await engine.abort("left")
    await engine.abort("never heard of")
    assert [chunk.finish_reason async for chunk in stream][-1] == "abort"
    await until(lambda: engine.stats().num_running == 0)
    await engine.drain()


async def a_full_queue_refuses(engine):
    sampling = Sampling(150, ignore_eos=True)
    streams = [engine.generate(str(number), PROMPTS[0], sampling) for number in range(3)]
    firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await until(lambda: engine.stats().num_running == 2)
    assert engine.stats().num_waiting == 1
    with pytest.raises(EngineError, match="queue is full: 1 requests wait"):
        await collected(engine, "one more", PROMPTS[0])
    await asyncio.gather(*firsts)
    for stream in streams:
        await stream.aclose()
    await until(lambda: engine.stats().num_running == 0)


async def nonsense_is_refused(engine):
    for prompt, sampling, reason in [
        ([], Sampling(1), "prompt is empty"),
        ([5] * 200, Sampling(100), "are more than the"),
        ([5], Sampling(0), "max_tokens is 0"),
        ([5], Sampling(1, temperature=-1.0), "temperature is -1"),
        ([5], Sampling(1, top_p=0.0), "top_p is 0"),
        ([128], Sampling(1), "token 128 is not in the vocabulary of 128"),
    ]:
        with pytest.raises(EngineError, match=reason):
            await collected(engine, "bad", prompt, sampling)


async def a_full_cache_preempts_and_recovers(engine, model):
    """Two that fit one by one and not together: one is pushed out, starts again, and is right."""
    sampling = Sampling(150, ignore_eos=True)
    answers = await asyncio.gather(
        *(collected(engine, f"long {i}", PROMPTS[i], sampling) for i in (2, 3))
    )
    assert engine.stats().num_preemptions > 0
    expected = [single_tokens(model, PROMPTS[i], 150, eos_token_id=None) for i in (2, 3)]
    assert [tokens for tokens, _ in answers] == expected


@pytest.mark.parametrize(("num_ranks", "victim"), [(1, 0), (2, 1)])
def test_a_killed_rank_ends_everything_with_a_reason_and_is_replaced(tiny, num_ranks, victim):
    folder, model = tiny
    config = a_config(folder, tensor_parallel=num_ranks)

    async def run():
        async with started(config) as engine:
            running = [
                asyncio.ensure_future(
                    collected(engine, str(i), PROMPTS[0], Sampling(200, ignore_eos=True))
                )
                for i in range(3)
            ]
            await until(lambda: engine.stats().num_running == 3)
            dead = (await pids_of(engine))[victim]
            os.kill(dead, signal.SIGKILL)
            outcomes = await asyncio.wait_for(
                asyncio.gather(*running, return_exceptions=True), timeout=10
            )
            assert all(isinstance(outcome, EngineError) for outcome in outcomes)
            assert all("rank" in str(outcome) for outcome in outcomes)
            assert all(len(str(outcome).splitlines()) == 1 for outcome in outcomes)
            assert not engine.stats().accepting
            with pytest.raises(EngineError, match="rank"):
                await collected(engine, "meanwhile", PROMPTS[0])
            await engine.check_health()  # What is being replaced needs no other replica.
            await until(lambda: engine.stats().accepting, seconds=60)
            assert dead not in await pids_of(engine)
            tokens, _ = await collected(engine, "after", PROMPTS[0], Sampling(NUM_NEW))
            assert tokens == single_tokens(model, PROMPTS[0])

    asyncio.run(run())
    # What it held is free again.
    deadline_s = time.monotonic() + 10
    while ray.available_resources().get("CPU", 0) < 4:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_ranks_that_die_again_and_again_are_given_up(tiny, monkeypatch):
    monkeypatch.setattr(sharded_engine, "_MAX_REVIVALS", 0)
    folder, _ = tiny

    async def run():
        async with started(a_config(folder)) as engine:
            os.kill((await pids_of(engine))[0], signal.SIGKILL)
            await until(lambda: not engine.stats().accepting)
            with pytest.raises(EngineError, match="rank 0"):
                await engine.check_health()

    asyncio.run(run())


def test_a_start_without_room_is_given_up_and_leaves_nothing_reserved(tiny):
    folder, _ = tiny
    config = a_config(folder, device="gpu", start_timeout_s=2)

    async def run():
        with pytest.raises(EngineError, match=r"within 2 s: .* 1 free GPUs \(the cluster has 0"):
            await ShardedEngine(config).start()

    asyncio.run(run())
    assert ray.available_resources().get("CPU", 0) == 4


def test_a_model_that_cannot_be_divided_is_refused_before_anything_starts(tiny):
    folder, _ = tiny

    async def run(config, reason):
        with pytest.raises(EngineError, match=reason):
            await ShardedEngine(config).start()

    asyncio.run(run(a_config(folder, tensor_parallel=3), "4 attention heads.*3 does not divide"))
    asyncio.run(run(a_config(folder, pipeline_parallel=5), "4 layers: too few"))
    asyncio.run(run(a_config(folder / "gone"), "no model folder"))


def test_an_emulation_keeps_the_pace_of_the_hardware_it_stands_for(tiny):
    folder, model = tiny
    stands_for = Emulation(gpu="a10g", llm="llama3_8b", time_scale=4)
    config = a_config(folder, max_batch=2, token_budget=64, emulates=stands_for)

    async def run():
        async with started(config) as engine:
            # Its tokens are those of the model that it runs, whatever the pace.
            tokens, _ = await collected(engine, "one", PROMPTS[1])
            assert tokens == single_tokens(model, PROMPTS[1])
            sampling = Sampling(60, ignore_eos=True)
            stream = engine.generate("two", PROMPTS[1], sampling)
            return np.diff([time.perf_counter() async for _ in stream])

    gaps_s = asyncio.run(run())
    base_s, _, sequence_s, kv_s = stands_for.iteration
    stated_s = base_s + sequence_s + kv_s * (len(PROMPTS[1]) + 1 + np.arange(len(gaps_s)))
    # An iteration that the machine delays is late; the median is not.
    assert np.median(gaps_s / stated_s) == pytest.approx(1.0, abs=0.03)


def test_a_prompt_that_goes_on_from_an_earlier_one_computes_the_rest_alone(tiny):
    folder, model = tiny
    stands_for = Emulation(gpu="a10g", llm="llama3_8b", time_scale=20)
    config = a_config(
        folder, max_batch=2, token_budget=64, max_model_tokens=512, emulates=stands_for
    )
    first, fresh = prompts_of(384, 64)

    async def first_token_s(engine, name, prompt):
        begun_s = time.perf_counter()
        await collected(engine, name, prompt, Sampling(1))
        return time.perf_counter() - begun_s

    async def run():
        async with started(config) as engine:
            opening_s = await first_token_s(engine, "opening", fresh)
            whole_s = await first_token_s(engine, "whole", first)
            turn_s = await first_token_s(engine, "turn", first + fresh)
            tokens, _ = await collected(engine, "again", first + fresh)
            return opening_s, whole_s, turn_s, tokens

    opening_s, whole_s, turn_s, tokens = asyncio.run(run())
    logger.info("first token: %.3f s for 64 tokens, %.3f for 384, %.3f for 64 after these",
                opening_s, whole_s, turn_s)  # fmt: skip
    assert turn_s < 0.3 * (whole_s + opening_s)
    assert turn_s < 1.4 * opening_s
    assert tokens == single_tokens(model, first + fresh)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_conversations_in_scarce_memory_get_the_tokens_that_they_would_get_alone(tiny, tp):
    folder, model = tiny
    # Room for a dozen blocks of 32 tokens: for one or two of six conversations.
    config = a_config(folder, tensor_parallel=tp, max_batch=3, kv_bytes=(1 << 20) // tp)
    shared, *openings = prompts_of(70, *range(20, 80, 10))

    async def talk(engine, number, opening):
        prompt, answers = [*shared, *opening], []
        for turn in range(3):
            name = f"{number} {turn}"
            tokens, _ = await collected(engine, name, prompt, Sampling(20, ignore_eos=True))
            answers.append((prompt, tokens))
            prompt = [*prompt, *tokens, *opening[:15]]
        return answers

    async def run():
        async with started(config) as engine:
            talks = (talk(engine, *each) for each in enumerate(openings))
            answers = await asyncio.wait_for(asyncio.gather(*talks), 60)
            await until(lambda: engine.stats().kv_used_fraction == 0)
            return [turn for answer in answers for turn in answer], engine.stats()

    turns, stats = asyncio.run(run())
    for prompt, tokens in turns:
        assert tokens == single_tokens(model, prompt, 20, eos_token_id=None)
    assert stats.kv_capacity_tokens < sum(len(prompt) for prompt, _ in turns[::3])


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (1, 2)])
def test_the_default_model_knows_the_capital_of_france_however_divided(tp, pp):
    folder = find_model("default")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    config = EngineConfig(
        model="default", tensor_parallel=tp, pipeline_parallel=pp, max_model_tokens=256
    )

    async def run():
        async with started(config) as engine:
            return await collected(engine, "france", prompt, Sampling(24))

    tokens, reason = asyncio.run(run())
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    logger.info("TP %d x PP %d: %s (%s)", tp, pp, text, reason)
    assert "Paris" in text
    assert reason == "stop"

"""The vLLM engine's own logic over a stand-in that streams like AsyncLLM; vLLM is not run."""

import asyncio
import importlib.util
import json
from types import SimpleNamespace

import pytest

from serve_app.engine_config import EngineConfig
from serve_app.engines import vllm
from serve_app.engines.base import EngineError, Sampling
from serve_app.engines.vllm import VllmEngine
from tokenyard.routing.types import OrderKey

SHAPE = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}


class StandIn:
    """Counts up from the last token of the prompt."""

    def __init__(self, gauge):
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16)
        )
        self._gauge = gauge
        self.aborted, self.priorities = [], []
        self.is_dead = False
        self.is_shut_down = False

    async def generate(self, prompt, sampling, request_id, priority=0):
        self.priorities.append(priority)
        last = prompt["prompt_token_ids"][-1]
        for step in range(sampling.max_tokens):
            await asyncio.sleep(0)
            if self.is_dead:
                raise RuntimeError("engine core died\nwith a long trace")
            running = SimpleNamespace(num_running_reqs=1, num_waiting_reqs=0, kv_cache_usage=0.25)
            counts = SimpleNamespace(num_preempted_reqs=0, num_generation_tokens=1)
            self._gauge.note(running, counts)
            reason = "length" if step == sampling.max_tokens - 1 else None
            if request_id in self.aborted:
                reason = "abort"
            out = SimpleNamespace(token_ids=[last + step + 1], finish_reason=reason)
            yield SimpleNamespace(outputs=[out])
            if reason is not None:
                return

    async def abort(self, request_id):
        self.aborted.append(request_id)

    async def check_health(self):
        if self.is_dead:
            raise RuntimeError("dead")

    def shutdown(self):
        self.is_shut_down = True


@pytest.fixture
def engine(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    monkeypatch.setattr(vllm, "_load", lambda config, folder, gauge: StandIn(gauge))
    monkeypatch.setattr(vllm, "_sampling_params", lambda sampling: sampling)
    return VllmEngine(EngineConfig(model=str(tmp_path), tensor_parallel=2, max_model_tokens=2048))


def test_tokens_stream_and_the_state_is_told(engine):
    async def run():
        await engine.start()
        chunks = [chunk async for chunk in engine.generate("a", [5], Sampling(3))]
        await engine.drain()
        await engine.check_health()
        stats = engine.stats()
        await engine.stop()
        return chunks, stats

    chunks, stats = asyncio.run(run())
    assert [chunk.token_ids for chunk in chunks] == [(6,), (7,), (8,)]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    assert (stats.num_running, stats.num_waiting, stats.kv_used_fraction) == (1, 0, 0.25)
    assert stats.kv_capacity_tokens == 160


def test_vllm_is_told_keys_in_milliseconds_and_the_time_where_there_is_none(engine):
    async def run():
        await engine.start()
        for key in (OrderKey(1.7e9 + 0.25, 0.0, 1.8e9), None, None):
            async for _ in engine.generate("a", [5], Sampling(1), key):
                pass
        told = engine._llm.priorities
        await engine.stop()
        return told

    keyed, first, second = asyncio.run(run())
    assert keyed == 1_700_000_000_250
    assert keyed < first <= second


def test_abort_and_death_end_a_stream(engine):
    async def run():
        await engine.start()
        stream = engine.generate("a", [5], Sampling(50))
        await anext(stream)
        await engine.abort("a")
        assert [chunk.finish_reason async for chunk in stream] == ["abort"]
        llm = engine._llm
        stream = engine.generate("b", [5], Sampling(50))
        await anext(stream)
        llm.is_dead = True
        with pytest.raises(EngineError, match=r"^vLLM failed: RuntimeError: engine core died$"):
            await anext(stream)
        with pytest.raises(EngineError, match="vLLM has died"):
            await engine.check_health()
        await engine.drain()
        await engine.stop()
        assert llm.is_shut_down

    asyncio.run(run())


def test_the_longest_request_is_what_the_model_can_place(engine):
    async def run():
        await engine.start()
        with pytest.raises(EngineError, match="more than the 64 that this engine can hold"):
            await anext(engine.generate("a", [5] * 60, Sampling(5)))

    asyncio.run(run())


def test_without_vllm_its_engine_says_what_to_install(tmp_path):
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed")
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(EngineError, match=r"pip install 'tokenyard\[vllm\]'"):
        asyncio.run(VllmEngine(EngineConfig(model=str(tmp_path))).start())

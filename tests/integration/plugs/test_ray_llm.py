"""`ray.serve.llm` with our router, as docs/serving/embedding.md has it.

It runs in the environment of vLLM, which it needs. The engine computes nothing
(`ray_llm_engine.py`), or is vLLM on a CPU; all else is that of `ray.serve.llm`.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
from document_blocks import blocks
from engines.real_engines import named_vllm
from sizes import is_thorough
from unit.engine_builders import a_tiny_llama
from unit.tiny_tokenizer import save_tiny_tokenizer

from serve_app.http.free_port import free_port

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
ENVIRONMENT = Path(os.environ.get("TOKENYARD_ENGINES", ROOT / ".engines-real")) / "vllm"
PYTHON = ENVIRONMENT / "bin" / "python"
if not [*ENVIRONMENT.glob("lib/*/site-packages/ray/llm")]:
    pytest.skip(
        f"no Ray beside vLLM in {ENVIRONMENT}: `make engines-real`", allow_module_level=True
    )

LIMIT_S = 300.0
NUM = 1000 if is_thorough() else 100
NUM_LEAVING = NUM // 20
FIRST = {"model": "my-model", "prompt": "first", "max_tokens": 1}
BEGIN = """
import os, ray
from ray import serve
ray.init(address="local", num_cpus=16, num_gpus=2, include_dashboard=False, logging_level="error")
serve.start(http_options={{"port": {port}}})
"""


ON_CPU = """LLMConfig(
    accelerator_config={"kind": "cpu"},
    engine_kwargs={
        "enforce_eager": True, "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16,
    },"""


def vllm_on_cpu(folder):
    """A model for vLLM, and what its processes have to know."""
    model = folder / "model"
    a_tiny_llama(model, vocab_size=258, hidden_size=256, max_position_embeddings=2048)
    save_tiny_tokenizer(model)
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    return model, env


@contextlib.contextmanager
def the_application(folder, port, is_vllm):
    [block] = [one for one in blocks("docs/serving/embedding.md") if "serve.llm" in one.text]
    text = BEGIN.format(port=port) + block.text.replace("/tmp/decisions", str(folder / "log"))
    env = {"RAYLLM_VLLM_ENGINE_CLS": "integration.plugs.ray_llm_engine.PacedEngine"}
    if is_vllm:
        named_vllm(ENVIRONMENT, folder)
        model, env = vllm_on_cpu(folder)
        text = text.replace("LLMConfig(", ON_CPU).replace("Qwen/Qwen3-8B", str(model))
    # The project's files are not installed there, and its version is part of policies' names.
    named = folder / f"tokenyard-{version('tokenyard')}.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nVersion: {version('tokenyard')}\n")
    env = os.environ | env | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(folder)]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    env.pop("RAY_ADDRESS", None)
    with (folder / "app.log").open("wb") as log:
        process = subprocess.Popen(
            [str(PYTHON), "-c", text], env=env, stdout=log, stderr=log, start_new_session=True,
            cwd=folder,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        until_s = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                # The ingress may be there before the replicas, and Serve says 500 then.
                if httpx.post(url, json=FIRST, timeout=LIMIT_S).status_code == 200:
                    break
            assert process.poll() is None, (folder / "app.log").read_text()[-3000:]
            assert time.monotonic() < until_s, (folder / "app.log").read_text()[-3000:]
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rows_of(folder):
    return [row for file in folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("is_vllm", [False, True], ids=["paced", "vllm"])
def test_each_request_to_ray_serve_llm_is_a_decision_with_its_outcome(tmp_path, is_vllm):
    port, log = free_port(), tmp_path / "log"

    async def ask_all():
        places = asyncio.Semaphore(16)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}/v1", timeout=LIMIT_S
        ) as client:

            async def ask(number):
                body = {"model": "my-model", "max_tokens": 8, "stream": number % 2 == 1}
                body |= {"ignore_eos": True}
                text = f"A long beginning that all have. {'again ' * 40}" + f"question {number}"
                if number % 4 < 2:
                    route, prompt = "/completions", {"prompt": text}
                else:
                    messages = [{"role": "user", "content": text}]
                    route, prompt = "/chat/completions", {"messages": messages}
                async with places:
                    answer = await client.post(route, json=body | prompt)
                assert answer.status_code == 200, answer.text
                assert is_vllm or answer.text.count("word") == 8

            async def leave(number):
                body = {"model": "my-model", "prompt": "x", "max_tokens": 2000, "stream": True}
                body |= {"ignore_eos": True}
                async with places, client.stream("POST", "/completions", json=body) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_lines():
                        return

            asked = [*map(ask, range(NUM)), *map(leave, range(NUM_LEAVING))]
            await asyncio.gather(*asked)

    with the_application(tmp_path, port, is_vllm):
        asyncio.run(ask_all())
        until_s = time.monotonic() + LIMIT_S
        while len(rows_of(log)) < 1 + NUM + NUM_LEAVING and time.monotonic() < until_s:
            time.sleep(0.5)
    rows = rows_of(log)
    [first, *_] = sorted(rows, key=lambda row: row["time_s"])
    rows.remove(first)
    whole = [row for row in rows if row["outcome"] == "length"]
    assert len(whole) == NUM
    streamed = [row for row in whole if row["ttft_s"] is not None]
    counts = [row["output_tokens"] for row in whole]
    if is_vllm:
        # Tokens of this model are bytes, and vLLM sends none before it has a whole letter.
        assert counts.count(8) >= NUM // 2
        assert max(counts) == 8
    else:
        assert {*counts} == {8}
        assert len(streamed) == NUM // 2
    assert [row["outcome"] for row in rows if row not in whole] == ["abort"] * NUM_LEAVING
    assert len({row["request_id"] for row in rows}) == NUM + NUM_LEAVING
    assert all(0 < row["ttft_s"] < row["response_s"] for row in streamed)
    # How much each gets is by its speed, which is noise where engines compute nothing.
    assert len({row["replica_id"] for row in rows}) == 2
    known = [max(one["match_tokens"] for one in row["candidates"]) for row in whole]
    assert sum(match > 0 for match in known) > 0.9 * NUM, "all prompts begin alike"

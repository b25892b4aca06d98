"""LiteLLM's proxy asks a gateway for each deployment, by plugs/litellm_picker.py."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
import yaml
from sizes import is_thorough
from unit.openai_endpoint import an_openai_endpoint

from serve_app.http.free_port import free_port

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
LITELLM = Path(os.environ.get("TOKENYARD_RIVALS", ROOT / ".rivals")) / "litellm" / "bin" / "litellm"
if not LITELLM.exists():
    pytest.skip(f"no {LITELLM}: `make rivals`", allow_module_level=True)

LIMIT_S = 120.0
NUM = 1000 if is_thorough() else 60


@contextlib.contextmanager
def running(*command, ready, **options):
    """Run a program until the end; it is ready once `ready` answers 200."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*map(str, command)], **quiet, **options)
    try:
        until_s = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(ready).status_code == 200:
                    break
            assert process.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        process.wait()


def test_each_call_of_litellm_is_a_decision_with_its_outcome(tmp_path):
    port, proxy_port, log = free_port(), free_port(), tmp_path / "log"
    with an_openai_endpoint("m") as (one, first), an_openai_endpoint("m") as (other, second):
        pool = {"name": "gpus", "kind": "external", "model": "m", "endpoints": [first, second]}
        cluster = {"name": "c", "description": "c", "served_model": "m", "pools": [pool]}
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        models = [
            {"model_name": "m",
             "litellm_params": {"model": "hosted_vllm/m", "api_base": f"{url}/v1", "api_key": "x"}}
            for url in (first, second)
        ]  # fmt: skip
        settings = {"callbacks": "litellm_picker.instance", "telemetry": False}
        config = {
            "model_list": models, "litellm_settings": settings,
            "router_settings": {"num_retries": 0},
        }  # fmt: skip
        (tmp_path / "litellm.yaml").write_text(yaml.safe_dump(config))
        shutil.copy(ROOT / "plugs" / "litellm_picker.py", tmp_path)
        gateway = running(
            sys.executable, "-m", "pipelines.deploy", "--cluster", tmp_path / "cluster.yaml",
            "--policy", "sed", "--port", port, "--decision-log", log,
            ready=f"http://127.0.0.1:{port}/health",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        proxy = running(
            LITELLM, "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", proxy_port,
            "--num_workers", "1", "--telemetry", "False", cwd=tmp_path,
            ready=f"http://127.0.0.1:{proxy_port}/health/liveliness",
            env=os.environ | {
                "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
                "TOKENYARD_URL": f"http://127.0.0.1:{port}",
            },
        )  # fmt: skip

        async def ask_all():
            limit = asyncio.Semaphore(8)
            url = f"http://127.0.0.1:{proxy_port}"
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:

                async def ask(number):
                    messages = [{"role": "user", "content": f"hello {number}"}]
                    body = {"model": "m", "messages": messages, "max_tokens": 3}
                    body["stream"] = number % 2 == 1
                    async with limit:
                        answer = await client.post("/v1/chat/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    assert "word" in answer.text

                await asyncio.gather(*map(ask, range(NUM)))

        with gateway:
            with proxy:
                asyncio.run(ask_all())
                until_s = time.monotonic() + LIMIT_S
                while time.monotonic() < until_s:
                    replicas = httpx.get(f"http://127.0.0.1:{port}/v1/pools").json()["replicas"]
                    if not any(replica["in_flight"] for replica in replicas):
                        break
                    time.sleep(0.2)
        rows = [row for file in log.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
        assert len(one.asked) + len(other.asked) == NUM
        assert min(len(one.asked), len(other.asked)) > NUM / 4
    assert [row["outcome"] for row in rows] == ["length"] * NUM
    assert {row["output_tokens"] for row in rows} == {3}

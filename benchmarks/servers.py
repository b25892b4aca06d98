"""Gateways, routers, proxies and an Envoy before endpoints, each in processes of its own."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from rival_parity import Case, environments, free_ports
from rival_parity import command as command_of

from serve_app.http.free_port import free_port

ROOT = Path(__file__).parents[1]
ENVOYS = ("Envoy", "Envoy, picker", "Envoy, picker, heads")
_START_S = 120.0
PROFILE = {
    "iteration_s": 0.02, "prefill_token_s": 6e-5, "sequence_s": 5e-5, "max_batch": 64,
    "token_budget": 512, "kv_capacity_tokens": 150_000,
}  # fmt: skip


_ON_RAY = """
import sys
import ray
from ray import serve

quiet = {"log_level": "WARNING", "enable_access_log": False}
ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])}, logging_config=quiet)
serve.run(application, logging_config=quiet)
print("serving", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Server:
    """Something that answers on a port."""

    name: str
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        total_s = 0.0
        for one in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total_s += times.user + times.system
        return total_s


@contextlib.contextmanager
def started(name: str, port: int, command: list[str], root: Path = ROOT) -> Iterator[Server]:
    """Yield a server that says `serving` once it is up, from the checkout at `root`."""
    # Ray's workers look where the driver does, in an order of their own: no other checkout may be
    # there, nor be the working directory.
    others = [one for one in sys.path if Path(one or ".").resolve() != ROOT]
    path = [str(root), str(ROOT / "benchmarks"), *others]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("serving"):
                assert line, f"{name} did not start"
            yield Server(name, port, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def litellm(ports: Sequence[int], model: str) -> Iterator[Server]:
    """Yield LiteLLM's proxy before some ports, in one process, as its makers ship it."""
    port, bases = free_port(), [f"http://127.0.0.1:{one}/v1" for one in ports]
    models = [
        {"model_name": model,
         "litellm_params": {"model": f"hosted_vllm/{model}", "api_base": base, "api_key": "none"}}
        for base in bases
    ]  # fmt: skip
    known = {
        "model_list": models, "router_settings": {"routing_strategy": "least-busy"},
        "litellm_settings": {"telemetry": False},
    }  # fmt: skip
    env = os.environ | {
        # Without a key it asks for permission, and without its own price list for a network.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true", "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": "",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(yaml.safe_dump(known))
        command = [
            str(environments().absolute() / "litellm/bin/litellm"), "--config", "config.yaml",
            "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1",
            "--telemetry", "False",
        ]  # fmt: skip
        ready = f"http://127.0.0.1:{port}/health/liveliness"
        with other("LiteLLM", port, command, ready, env, folder) as server:
            yield server


@contextlib.contextmanager
def rival(
    name: str, ports: Sequence[int], policy: str = "power_of_two", model: str = "m"
) -> Iterator[Server]:
    """Yield a router of others before some ports; LiteLLM has a policy of its own."""
    if name == "litellm":
        with litellm(ports, model) as server:
            yield server
        return
    own, urls = free_ports(), [f"http://127.0.0.1:{port}" for port in ports]
    command = command_of(Case(name, policy, ""), own, urls)
    ready = f"http://127.0.0.1:{own[0]}/readiness"
    with other(name, own[0], command, ready, dict(os.environ)) as server:
        yield server


@contextlib.contextmanager
def other(
    name: str, port: int, command: list[str], ready: str, env: dict[str, str],
    folder: str | None = None,
) -> Iterator[Server]:  # fmt: skip
    """Yield a server of others, which is there once something answers at `ready`."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=env, cwd=folder, **quiet) as process:
        try:
            wait_for(ready, process)
            yield Server(name, port, psutil.Process(process.pid))
        finally:
            process.kill()  # Some wait for connections that nobody closes.


@contextlib.contextmanager
def behind_envoy(
    environment: Path, ports: Sequence[int], name: str, pool: dict[str, Any]
) -> Iterator[Server]:
    """Yield the Envoy of docs/envoy.md before the ports of a pool, in one of `ENVOYS`."""
    picks = name != "Envoy"
    port, grpc_port, http_port = free_port(), free_port(), free_port()
    page = (ROOT / "docs" / "envoy.md").read_text(encoding="utf-8")
    config = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    [listener] = config["static_resources"]["listeners"]
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    if not picks:
        del filters[:-1]
    elif name.endswith("heads"):
        mode = {"response_header_mode": "SEND", "response_trailer_mode": "SEND"}
        filters[0]["typed_config"]["processing_mode"].update(mode)
        del filters[1]
    [places] = config["static_resources"]["clusters"][0]["load_assignment"]["endpoints"]
    places["lb_endpoints"] = [copy.deepcopy(places["lb_endpoints"][0]) for _ in ports]
    for place, engine_port in zip(places["lb_endpoints"], ports, strict=True):
        place["endpoint"]["address"]["socket_address"]["port_value"] = engine_port
    moved = {8080: port, 9002: grpc_port}
    text = re.sub(r"\b(8080|9002)\b", lambda at: str(moved[int(at[0])]), yaml.safe_dump(config))
    cluster = {"name": "b", "description": "b", "served_model": pool["model"], "pools": [pool]}
    picker = (
        f"{sys.executable} {ROOT}/pipelines/epp.py --cluster cluster.yaml --port {grpc_port} "
        f"--http-port {http_port} --decision-log log &"
    )
    script = f"{picker * picks} PYTHONPATH= {environment.absolute()}/bin/envoy --concurrency 1 "
    script += "--disable-hot-restart --log-level error --config-path envoy.yaml & wait"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        (Path(folder) / "envoy.yaml").write_text(text)
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(["bash", "-c", script], env=env, cwd=folder) as process:
            try:
                for url in [f"http://127.0.0.1:{http_port}/healthz"] * picks:
                    wait_for(url, process)
                wait_for(f"http://127.0.0.1:{port}/metrics", process)
                yield Server(name, port, psutil.Process(process.pid))
            finally:
                for child in psutil.Process(process.pid).children():
                    child.terminate()


def ray_application(script: str, port: int, *arguments: str) -> list[str]:
    """The command that serves the `application` of a script on a Ray of its own, for `started`.

    The script finds the arguments from `sys.argv[2]` on.
    """
    return [sys.executable, "-c", script + _ON_RAY, str(port), *arguments]


def wait_for(url: str, process: subprocess.Popen[Any]) -> None:
    """Return once something answers there."""
    until_s = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        assert process.poll() is None, f"what should answer {url} has ended"
        assert time.monotonic() < until_s, f"{url} did not answer in {_START_S:.0f} s"
        time.sleep(0.2)


def external_pool(ports: Sequence[int], **fields: Any) -> dict[str, Any]:
    """A pool of endpoints on these ports, with further fields of a cluster file."""
    return {
        "name": "stubs", "kind": "external", "model": "m",
        "endpoints": [{"url": f"http://127.0.0.1:{port}"} for port in ports], **fields,
    }  # fmt: skip


@contextlib.contextmanager
def gateway(
    name: str, pool: dict[str, Any], root: Path = ROOT, log: bool = True
) -> Iterator[Server]:
    """Yield a gateway before a pool, from the checkout at `root`."""
    port = free_port()
    model = pool.get("model", "m")
    cluster = {"name": "b", "description": "b", "served_model": model, "pools": [pool]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(yaml.safe_dump(cluster))
        command = [
            sys.executable, str(root / "pipelines/deploy.py"), "--cluster", str(file),
            "--port", str(port), *("--decision-log", str(Path(folder) / "log"))[: 2 * log],
        ]  # fmt: skip
        with started(name, port, command, root) as server:
            yield server

"""An engine in a process of its own, at the other end of a pipe; MPS shares for some of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.grid import device_name
from benchmarks.gpu.rank_engine import RankEngine
from serve_app.engines.base import EngineConfig, Sampling
from serve_app.engines.sharded import rank

_MPS = "nvidia-cuda-mps-control"
_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_PROBE = "import torch; torch.zeros(1, device='cuda')"
_WAIT_S = 120.0


def start(config: EngineConfig, share_percent: int | None) -> tuple[Any, Connection]:
    """Start an engine; return its process and the pipe to it, on which it first says what it has.

    Args:
        config: What it runs.
        share_percent: Of the card's multiprocessors, by MPS; None: no share is set.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, config), daemon=True)
    with _environment({} if share_percent is None else {_SHARE: str(share_percent)}):
        process.start()
    theirs.close()
    return process, ours


def _serve(pipe: Connection, config: EngineConfig) -> None:
    asyncio.run(_generate(pipe, rank.load_share(config), config))


async def _generate(pipe: Connection, model: Any, config: EngineConfig) -> None:
    engine, ended = RankEngine(model, config), threading.Event()

    def read() -> None:
        with suppress(EOFError, OSError):
            while (wanted := pipe.recv()) is not None:
                request_id, token_ids, num_new = wanted
                engine.manager.submit(request_id, token_ids, Sampling(num_new, ignore_eos=True))
        ended.set()

    device = "cuda" if model.device.type == "cuda" else "cpu"
    pipe.send((engine.manager.limits.kv_capacity_tokens, device_name(device)))
    threading.Thread(target=read, daemon=True).start()
    num_told = 0
    while not ended.is_set():
        report = await engine.outbox.take(0.2)
        iterations = engine.manager.iterations[num_told:]
        num_told += len(iterations)
        if report.progress or iterations:
            pipe.send((time.time(), report.progress, report.stats, iterations))
    engine.stop()


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def mps(wanted: bool) -> Iterator[bool]:
    """Start MPS where its daemon starts and a process then finds the GPU; yields whether it does.

    No setting of the card is changed: without the daemon, engines take turns on it.
    """
    if not wanted or shutil.which(_MPS) is None:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        place = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with _environment(place):
            begun = _succeeds([_MPS, "-d"])
            works = begun and _succeeds([sys.executable, "-c", _PROBE])
            if begun and not works:
                _quit()
            if works:
                try:
                    yield True
                finally:
                    _quit()
        if not works:
            yield False


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, timeout=_WAIT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _quit() -> None:
    subprocess.run([_MPS], input="quit\n", text=True, timeout=_WAIT_S, check=False)

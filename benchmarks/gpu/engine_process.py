"""An engine in a process of its own, at the other end of a pipe; MPS shares for some of them."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.grid import device_name
from benchmarks.gpu.rank_engine import RankEngine
from serve_app.engine_config import EngineConfig
from serve_app.engines.sharded import rank

_MPS = "nvidia-cuda-mps-control"
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_PROBE = "import torch; torch.zeros(1, device='cuda')"


def start(config: EngineConfig, share_percent: int | None) -> tuple[Any, Connection]:
    """Start an engine; return its process and the pipe to it, on which it first says what it has.

    Args:
        config: What it runs.
        share_percent: Of the card's multiprocessors, by MPS; None: no share is set.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, config, share_percent), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def end(process: Any, pipe: Connection) -> None:
    """End an engine."""
    with suppress(OSError):
        pipe.send(None)
        process.join(30)
    process.kill()


def _serve(pipe: Connection, config: EngineConfig, share_percent: int | None) -> None:
    if share_percent is not None:  # Read when the process first uses the card.
        os.environ[_SHARE] = str(share_percent)
    asyncio.run(_generate(pipe, rank.load_share(config), config))


async def _generate(pipe: Connection, model: Any, config: EngineConfig) -> None:
    engine, ended = RankEngine(model, config), threading.Event()

    def read() -> None:
        with suppress(EOFError, OSError):
            while (wanted := pipe.recv()) is not None:
                engine.submit(*wanted)
        ended.set()

    pipe.send((engine.manager.limits.kv_capacity_tokens, device_name(model.device.type)))
    threading.Thread(target=read, daemon=True).start()
    num_told = 0
    while not ended.is_set():
        report = await engine.outbox.take(0.2)
        iterations = engine.manager.iterations[num_told:]
        num_told += len(iterations)
        if report.progress or iterations:
            pipe.send((time.time(), report.progress, report.stats, iterations))
    engine.stop()


def start_mps() -> bool:
    """Start MPS for the engines to come; return whether its daemon and then a process with it run.

    No setting of the card is changed: without the daemon, engines take turns on it.
    """
    if shutil.which(_MPS) is None:
        return False
    folder = tempfile.mkdtemp()
    os.environ.update(dict.fromkeys(_FOLDERS, folder))
    if _succeeds(_MPS, "-d"):
        quit_it = {"input": b"quit\n", "env": dict(os.environ)}
        atexit.register(subprocess.run, [_MPS], **quit_it)
        if _succeeds(sys.executable, "-c", _PROBE):
            return True
    for name in _FOLDERS:
        del os.environ[name]
    return False


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False

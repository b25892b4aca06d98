"""A gateway as a process of its own, without Ray, until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from serve_app.app import GatewayOptions, GatewayReplica
from serve_app.cluster import Cluster

_BEAT_EVERY_S, _BEAT_TIMEOUT_S, _MOST_MISSED = 1.0, 3.0, 3
"""Of the event loop: as Serve checks the health of a replica."""


async def serve_until_told(
    cluster: Cluster, options: GatewayOptions, report: Callable[[], None],
    ext_proc: tuple[str, int] | None = None,
) -> int:  # fmt: skip
    """Serve until SIGINT or SIGTERM, then drain; a second signal ends that.

    Args:
        cluster: Its pools are endpoints.
        options: The others.
        report: Called once it listens.
        ext_proc: Where it listens for Envoy, as host and port; None: nowhere.

    Returns:
        The number of answers that were cut off.

    Raises:
        OSError: It cannot listen.
    """
    logging.basicConfig(format="%(levelname)s %(asctime)s %(name)s -- %(message)s")
    stop, hurry, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    gateway = GatewayReplica(cluster, options, {})
    if ext_proc is not None:
        await gateway.listen_for_proxies(*ext_proc)
    await gateway.listen(options.host, options.port)
    report()
    threading.Thread(target=watch, args=(loop,), daemon=True).start()
    await stop.wait()
    tasks = [asyncio.create_task(waited) for waited in (gateway.drain(), hurry.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    num_cut: int = await gateway.drain(0.0) if hurry.is_set() else tasks[0].result()
    await gateway.end()
    return num_cut


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """End this process where its event loop hangs, as Serve ends a replica."""
    missed = 0
    while missed < _MOST_MISSED:
        time.sleep(_BEAT_EVERY_S)
        beat = threading.Event()
        loop.call_soon_threadsafe(beat.set)
        missed = 0 if beat.wait(_BEAT_TIMEOUT_S) else missed + 1
    sys.stderr.write("error: the event loop hangs, and nothing is served\n")
    sys.stderr.flush()
    os._exit(1)

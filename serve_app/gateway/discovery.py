"""Finds endpoints that come and go: in a file, in DNS, or in a service of Kubernetes.

Each source is a task that says which URLs there are. What it said last counts where it cannot know.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serve_app.endpoints import AnyEndpoint, Endpoint, Found, ServiceDiscovery
from serve_app.gateway.kubernetes import list_objectives, watch_service
from serve_app.gateway.upstream import url_of
from serve_app.watched_file import WatchedFile, read_message
from tokenyard.config import FrozenModel

LOOK_EVERY_S = 0.5
OBJECTIVES = "objectives"
"""Name of the source of a pool's InferenceObjectives."""


class EndpointsMessage(FrozenModel):
    """The content of a file of endpoints."""

    endpoints: tuple[AnyEndpoint, ...]


def sources_of(
    settings: ServiceDiscovery,
    use: Callable[[str, Found], None],
    prioritise: Callable[[dict[str, int]], None],
    fail: Callable[[str, str], None],
) -> list[Coroutine[Any, Any, None]]:
    """Return a coroutine per source, which runs without end.

    `use` is called with a source and all of its endpoints, `prioritise` with the priorities of all
    objectives, `fail` with a source and why it says nothing that can be used.
    """
    watches: dict[str, Any] = {"file": _watch_file, "dns": _watch_name, "kubernetes": watch_service}
    sources = [
        watch(where, partial(use, name), partial(fail, name))
        for name, watch in watches.items()
        if (where := getattr(settings, name)) is not None
    ]
    if settings.kubernetes is not None and settings.kubernetes.inference_pool is not None:
        fail_objectives = partial(fail, OBJECTIVES)
        sources.append(list_objectives(settings.kubernetes, prioritise, fail_objectives))
    return sources


async def _watch_file(
    path: Path, use: Callable[[Found], None], fail: Callable[[str], None]
) -> None:
    file: WatchedFile[Found] = WatchedFile(path, "endpoints", {}, _read, lambda *_: "new ones")
    while True:
        await asyncio.to_thread(file.reload)
        if file.problem is None:
            use(file.value)
        else:
            fail(file.problem)
        await asyncio.sleep(LOOK_EVERY_S)


def _read(path: Path) -> Found:
    endpoints = read_message(path, EndpointsMessage, "endpoints").endpoints
    return dict.fromkeys(endpoint.address for endpoint in endpoints)


async def _watch_name(
    endpoint: Endpoint, use: Callable[[Found], None], fail: Callable[[str], None]
) -> None:
    parts, port = urlsplit(endpoint.address), endpoint.url.port or 0
    loop = asyncio.get_running_loop()
    while True:
        try:
            infos = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except OSError as error:
            fail(f"{parts.hostname}: {error.strerror or error}")
        else:
            addresses = {str(info[4][0]) for info in infos}
            urls = (
                url_of(address, port, parts.scheme) + parts.path for address in sorted(addresses)
            )
            use(dict.fromkeys(urls, endpoint.address))
        await asyncio.sleep(LOOK_EVERY_S)

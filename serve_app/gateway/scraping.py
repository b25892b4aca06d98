"""Two tasks per endpoint ask for its metrics and its models, whatever the endpoint does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from serve_app.endpoints import MetricNames
from serve_app.gateway import engine_metrics
from serve_app.gateway.clocks import steady_unix_s
from serve_app.gateway.replicas import EndpointInfo
from serve_app.gateway.upstream import ConnectFailed, Origin, UpstreamClient

logger = logging.getLogger(__name__)

EVERY_S = 0.25
TIMEOUT_S = 2.0
"""Longest time for a page."""
INFO_EVERY_S = 10.0
_INFO_AGAIN_S = 1.0
_MAX_PAGE_BYTES = 16 << 20
_GATEWAY_ERRORS = (502, 503, 504)
"""Statuses of proxies before an endpoint that is down."""


class Scraper:
    """Asks one endpoint again and again; the data of one that does not answer goes stale."""

    def __init__(
        self, client: UpstreamClient, origin: Origin, key: bytes, names: MetricNames,
        changed: Callable[[], None], failed: Callable[[], None],
    ) -> None:  # fmt: skip
        """Prepare; nothing is asked before `start`.

        `key` is a header's line with the endpoint's token, or nothing. `changed` is called when
        there is news, `failed` for each scrape that had no answer.
        """
        self.reading, self.heard_s = engine_metrics.Reading(), 0.0
        """The last reading, maybe an empty one, and its time, Unix time, seconds."""
        self.info = EndpointInfo()
        self.num_downs = 0
        """Times that it was found to accept no connection."""
        self._client, self._origin, self._key, self._names = client, origin, key, names
        self._changed, self._failed = changed, failed
        self._pages = origin if names.port is None else replace(origin, port=names.port, idle=[])
        self._paths = (names.path,) if names.path else engine_metrics.PATHS
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; must be called on the event loop."""
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self._watch_metrics()))

    def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _watch_metrics(self) -> None:
        failed = was_down = False
        while True:
            error = await self._failure_of(self._scrape)
            is_down = isinstance(error, ConnectFailed)
            self.num_downs += is_down and not was_down
            was_down = is_down
            if error is not None:
                self._failed()
                if not failed:
                    logger.warning("endpoint %s cannot be scraped: %r", self._origin.url, error)
                # It may be well, and only its metrics not.
                await self._failure_of(self._look)
            failed = error is not None
            if len(self._tasks) == 1:  # By now it is known which engine it is.
                self._tasks.append(asyncio.create_task(self._watch_info()))
            await asyncio.sleep(EVERY_S)

    async def _watch_info(self) -> None:
        while True:
            error = await self._failure_of(self._ask)
            await asyncio.sleep(INFO_EVERY_S if error is None else _INFO_AGAIN_S)

    async def _failure_of(self, ask: Callable[[], Awaitable[None]]) -> Exception | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await ask()
        except Exception as error:
            # Whatever one endpoint does, it is asked again, or its news would end for good.
            return error
        return None

    async def _scrape(self) -> None:
        asked_s, path = steady_unix_s(), self._paths[0]
        status, page = await self._get(self._pages, path)
        reading = engine_metrics.read_metrics(page if status == 200 else b"", self._names)
        if reading.engine is None:
            self._paths = (*self._paths[1:], path)
        self._hear(reading, asked_s)

    async def _look(self) -> None:
        asked_s = steady_unix_s()
        await self._get(self._origin, "/v1/models")
        self._hear(engine_metrics.Reading(), asked_s)

    def _hear(self, reading: engine_metrics.Reading, asked_s: float) -> None:
        self.reading, self.heard_s = reading, asked_s
        self._changed()

    async def _ask(self) -> None:
        info = engine_metrics.read_models(await self._json("/v1/models"))
        engine = self.reading.engine or info.engine
        for path in engine_metrics.pages_of(engine):
            if engine is not None and (page := await self._json(path)) is not None:
                info = engine_metrics.with_page(info, engine, page)
                break
        self.info = replace(info, engine=engine)
        self._changed()

    async def _json(self, path: str) -> Any:
        status, body = await self._get(self._origin, path)
        try:
            return json.loads(body) if status == 200 else None
        except (ValueError, RecursionError):
            return None

    async def _get(self, origin: Origin, path: str) -> tuple[int, bytes]:
        head = origin.head(b"GET", path.encode(), self._key, 0)
        status, body = await self._client.get(origin, head, _MAX_PAGE_BYTES)
        if status in _GATEWAY_ERRORS:
            raise ValueError(f"it answered {status}")
        self._origin.scraped_s = asyncio.get_running_loop().time()
        return status, body

"""One task per endpoint asks for its metrics, whatever the endpoint does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from serve_app.gateway.clocks import steady_unix_s
from serve_app.gateway.replicas import EngineStatus, parse_vllm
from serve_app.gateway.upstream import Origin, UpstreamClient

logger = logging.getLogger(__name__)

EVERY_S = 0.25
TIMEOUT_S = 2.0
"""For a whole page."""
_MAX_PAGE_BYTES = 16 << 20


class Scraper:
    """Asks one endpoint again and again; what is not heard of grows stale."""

    def __init__(
        self,
        client: UpstreamClient,
        origin: Origin,
        key: bytes,
        publish: Callable[[EngineStatus], None],
        fail: Callable[[], None],
    ) -> None:
        """Ask nothing before `start`.

        Args:
            client: Makes the connections.
            origin: The endpoint.
            key: A header's line with its token, or nothing.
            publish: Called with what the endpoint tells.
            fail: Called for each scrape that failed.
        """
        self._client, self._origin = client, origin
        self._head = origin.head(b"GET", b"/metrics", key, 0)
        self._publish, self._fail = publish, fail
        self._task: asyncio.Task[None] | None = None
        self._fails = False

    def start(self) -> None:
        """Begin; must be called on the event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._scrape()
                self._fails = False
            except Exception as error:
                # Whatever one endpoint does, it is asked again, or its news would end for good.
                self._fail()
                if not self._fails:
                    logger.warning("endpoint %s cannot be scraped: %r", self._origin.url, error)
                self._fails = True
            await asyncio.sleep(EVERY_S)

    async def _scrape(self) -> None:
        asked_s = steady_unix_s()
        status, page = await self._client.get(self._origin, self._head, _MAX_PAGE_BYTES)
        self._origin.scraped_s = asyncio.get_running_loop().time()
        if status != 200:
            raise ValueError(f"it answered {status}")
        self._publish(parse_vllm(page, asked_s))

"""One task per endpoint asks for its metrics, whatever the endpoint does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import httpx

from serve_app.gateway.replicas import EngineStatus, parse_vllm

logger = logging.getLogger(__name__)

EVERY_S = 0.25
TIMEOUT_S = 2.0
"""For a whole page."""
_MAX_PAGE_BYTES = 16 << 20


class Scraper:
    """Asks one endpoint again and again; what is not heard of grows stale."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        publish: Callable[[EngineStatus], None],
        fail: Callable[[], None],
    ) -> None:
        """Ask nothing before `start`.

        Args:
            client: Makes the connections.
            url: Of the endpoint, without `/metrics`.
            publish: Called with what the endpoint tells.
            fail: Called for each scrape that failed.
        """
        self._client, self._url = client, url
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
                    logger.warning("endpoint %s cannot be scraped: %r", self._url, error)
                self._fails = True
            await asyncio.sleep(EVERY_S)

    async def _scrape(self) -> None:
        asked_s = time.time()
        page = bytearray()
        async with self._client.stream("GET", f"{self._url}/metrics") as answer:
            answer.raise_for_status()
            async for piece in answer.aiter_bytes():
                page += piece
                if len(page) > _MAX_PAGE_BYTES:
                    raise ValueError(f"its page is longer than {_MAX_PAGE_BYTES} bytes")
        self._publish(parse_vllm(bytes(page), asked_s))

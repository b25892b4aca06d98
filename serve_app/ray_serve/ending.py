"""The end of a process whose Ray is gone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_PARENT_EVERY_S = 1.0


async def end_with_ray(parent: int, end: Callable[[], Awaitable[None]]) -> None:
    """Drain and exit where Ray's process on this node is gone.

    Nobody would replace a replica or this process any more, and the port would stay taken.
    """
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_EVERY_S)
    logger.error("Ray is gone from this node, and so is this process once it has answered")
    try:
        await end()
    finally:
        os._exit(1)

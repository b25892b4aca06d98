"""Publishes what an engine's prefix cache holds, as vLLM's `ZmqEventPublisher` does."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq.asyncio

BlockEvent = tuple[Any, ...]
"""Kind and fields, in vLLM's order."""
_KEPT_BATCHES = 10_000
_END = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Sends batches to all who listen, and those of the past again to who asks."""

    def __init__(self, host: str) -> None:
        """Listen on an address of this machine, on ports that the system chooses."""
        import zmq.asyncio

        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        for socket in (self._socket, self._router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, _KEPT_BATCHES)
            socket.bind(f"tcp://{host}:*")
        self._numbers, self._batches = count(), deque[tuple[bytes, bytes]](maxlen=_KEPT_BATCHES)
        self._replaying = asyncio.create_task(self._replay())

    @property
    def addresses(self) -> dict[str, str]:
        """Where it listens, by vLLM's names."""
        import zmq

        sockets = {"endpoint": self._socket, "replay_endpoint": self._router}
        return {name: socket.get_string(zmq.LAST_ENDPOINT) for name, socket in sockets.items()}

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Send a batch."""
        import msgpack
        import zmq

        number = next(self._numbers).to_bytes(len(_END), "big")
        payload = msgpack.packb([time.time(), events, 0])
        self._batches.append((number, payload))
        self._socket.send_multipart([b"", number, payload], zmq.NOBLOCK)

    async def _replay(self) -> None:
        while True:
            who, *_, first = await self._router.recv_multipart()
            for number, payload in (*self._batches,):
                if number >= first:
                    await self._router.send_multipart([who, b"", number, payload])
            await self._router.send_multipart([who, b"", _END, b""])

    def stop(self) -> None:
        """End."""
        self._replaying.cancel()
        self._router.close()
        self._socket.close()

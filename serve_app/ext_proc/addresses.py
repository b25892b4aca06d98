"""Where replicas are, as proxies name endpoints: `ip:port`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

_AGAIN_S = 5.0


class Addresses:
    """Addresses of the replicas of a table; names of hosts are looked up every few seconds."""

    def __init__(self, replicas: Collection[str]) -> None:
        """Take the replicas by their URLs; they may come and go."""
        self._replicas = replicas
        self._addresses: dict[str, str | None] = {}
        self._named: dict[str, tuple[str, int]] = {}

    def of(self, replica_id: str) -> str | None:
        """Return the `ip:port` of a replica; None: its name has no address, or not yet."""
        if replica_id not in self._addresses:
            self._read(replica_id)
        return self._addresses[replica_id]

    def replicas_at(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Return the replicas at some `ip:port`."""
        wanted = {*endpoints}
        return frozenset(name for name in (*self._replicas,) if self.of(name) in wanted)

    async def resolve(self) -> None:
        """Look names up, for ever."""
        while True:
            for name in self._addresses.keys() - self._replicas:
                del self._addresses[name]
                self._named.pop(name, None)
            for name in (*self._replicas,):
                self.of(name)
            # All at once: a server of names may take its time for one.
            await asyncio.gather(*map(self.look_up, (*self._named,)))
            await asyncio.sleep(_AGAIN_S)

    async def look_up(self, replica_id: str) -> str | None:
        """Look the name of a replica up; return as `of`, and the last address where that fails."""
        host, port = self._named[replica_id]
        loop, places = asyncio.get_running_loop(), []
        with contextlib.suppress(OSError, UnicodeError):  # Names have parts of 63 bytes at most.
            places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if places:
            self._addresses[replica_id] = _joined(str(places[0][4][0]), port)
        return self._addresses.get(replica_id)

    def _read(self, replica_id: str) -> None:
        parts = urlsplit(replica_id)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            self._addresses[replica_id] = _joined(str(ipaddress.ip_address(host)), port)
        except ValueError:
            self._named[replica_id] = host, port
            self._addresses[replica_id] = None


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

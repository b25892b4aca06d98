"""Where replicas are, as proxies name endpoints: `ip:port`."""

from __future__ import annotations

import asyncio
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
            for name, (host, port) in (*self._named.items(),):
                self._addresses[name] = await _look_up(host, port) or self._addresses[name]
            await asyncio.sleep(_AGAIN_S)

    def _read(self, replica_id: str) -> None:
        parts = urlsplit(replica_id)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            self._addresses[replica_id] = _joined(str(ipaddress.ip_address(host)), port)
        except ValueError:
            self._named[replica_id] = host, port
            self._addresses[replica_id] = None


async def _look_up(host: str, port: int) -> str | None:
    try:
        places = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return _joined(str(places[0][4][0]), port)


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

"""A port for a server that is configured now and listens minutes later."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
"""Linux hands out ports from 32768 on to whoever asks for any, and Ray asks for dozens."""


def free_port(host: str = "127.0.0.1") -> int:
    """Find a free port that the system gives to nobody else meanwhile."""
    for port in random.sample(_BELOW_EPHEMERAL, 100):
        try:
            with socket.create_server((host, port)):
                return port
        except OSError:
            continue
    raise OSError(f"no free port on {host} among a hundred below {_BELOW_EPHEMERAL.stop}")

"""What can become of a request at a replica, and names of requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

_IDS = random.Random()


def new_id() -> str:
    """Return 32 hexadecimal digits; `uuid4` would ask the kernel for each."""
    return f"{_IDS.getrandbits(128):032x}"


class ReplicaFailed(RuntimeError):
    """A replica that did not do what it was asked; the text says why."""


class ReplicaFull(ReplicaFailed):
    """A replica that takes no more requests for now."""


class ReplicaRefused(ReplicaFailed):
    """A replica whose engine does not take this request, and is well otherwise."""


class ReplicaTooSmall(ReplicaRefused):
    """A replica that can never hold this request; those of another pool may."""


class ReplicaTimeout(ReplicaFailed):
    """A replica that took longer than its pool's deadlines allow."""


class RequestRejected(RuntimeError):
    """What an endpoint has against the request itself: the caller gets it as it is."""

    def __init__(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Keep the answer, whose status is from 400 to 499."""
        super().__init__(f"the endpoint answered {status}")
        self.status, self.headers, self.body = status, headers, body

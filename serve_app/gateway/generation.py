"""Errors on the path of a request, and request ids."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from serve_app.gateway.rate_limits import OverLimit

Headers = Sequence[tuple[bytes, bytes]]

_IDS = random.Random()


def new_id() -> str:
    """Return 32 hexadecimal digits; `uuid4` would need a system call."""
    return f"{_IDS.getrandbits(128):032x}"


class ReplicaFailed(RuntimeError):
    """A replica failed; the text says how."""


class ReplicaUnreachable(ReplicaFailed):
    """A replica accepted no connection."""


class ReplicaFull(ReplicaFailed):
    """A replica takes no more requests for now."""

    def __init__(
        self,
        reason: str,
        status: int = 429,
        retry_after_s: float | None = None,
        headers: Headers = (),
    ) -> None:
        """Keep the status, 429 or 503, and the headers about limits.

        `retry_after_s` is when it is to be asked again; None: it does not say.
        """
        super().__init__(reason)
        self.status, self.retry_after_s, self.headers = status, retry_after_s, headers


class ReplicaRefused(ReplicaFailed):
    """A healthy replica does not take this request."""


class ReplicaTooSmall(ReplicaRefused):
    """A replica can never hold this request; one of another pool may."""


class ReplicaLacks(ReplicaRefused):
    """A replica does not know the model or the route; another may."""

    def __init__(self, reason: str, model: str | None, rejection: RequestRejected) -> None:
        """Say what it lacks: a model, by the name in the request; None: the route.

        The name is empty where the pool fills it in. `rejection` is what it answered.
        """
        super().__init__(reason)
        self.model, self.rejection = model, rejection


class ReplicaTimeout(ReplicaFailed):
    """A replica took longer than its pool's deadlines allow."""


class RequestRejected(RuntimeError):
    """An endpoint rejects the request itself; the caller gets the endpoint's answer."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"the endpoint answered {status}")
        self.status, self.headers, self.body = status, headers, body


class ResponseGone(RequestRejected):
    """The endpoint that held a response is gone."""

    def __init__(self) -> None:
        message = "the response is not found: the endpoint that made it is gone"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        headers = [(b"content-type", b"application/json")]
        super().__init__(404, headers, json.dumps({"error": error}).encode())


class Refused(RuntimeError):
    """A request is not let in for now."""

    def __init__(
        self,
        reason: str,
        retry_after_s: int,
        over: OverLimit | None = None,
        status: int = 429,
        headers: Headers = (),
    ) -> None:
        """Say when to come back, and which of the caller's limits was reached, if one was.

        The status is 503, and not 429, where endpoints have no room for anybody; `headers` are what
        they say of their limits.
        """
        super().__init__(reason)
        self.retry_after_s, self.over = retry_after_s, over
        self.status, self.headers = status, headers


class Unserved(RuntimeError):
    """A request was let in and could not be answered; the text says why."""


class Unanswerable(Unserved):
    """A request can never be answered, by any pool."""

    status = 400


class Draining(Unserved):
    """A request comes while the gateway ends."""

"""gRPC's health service, by which proxies and Kubernetes see whether there is anything to pick."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.ext_proc.http2 import INTERNAL, NOT_FOUND, Stream
from serve_app.ext_proc.protocol import (
    NOT_SERVING,
    SERVICE_UNKNOWN,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
)

LIVENESS = "liveness"


class Health:
    """Says whether the process answers (`liveness`), and whether endpoints can be picked."""

    def __init__(self, readiness: tuple[str, ...], is_ready: Callable[[], bool]) -> None:
        """Answer for the services `readiness` by `is_ready`."""
        self._readiness, self._is_ready = readiness, is_ready
        self.watching: dict[_Asked, bool | None] = {}
        """Who is told of changes, and what they were told last."""

    def check(self, stream: Stream) -> _Asked:
        """Handle a call of `Check`."""
        return _Asked(self, stream, goes_on=False)

    def watch(self, stream: Stream) -> _Asked:
        """Handle a call of `Watch`."""
        return _Asked(self, stream, goes_on=True)

    def tell(self) -> None:
        """Tell those who watch what has changed."""
        for call, said in (*self.watching.items(),):
            if (now := self.state_of(call.service)) != said:
                self.watching[call] = now
                call.answer(now)

    def state_of(self, service: str) -> bool | None:
        """Whether a service serves; None: there is no such service."""
        if service == LIVENESS:
            return True
        return self._is_ready() if service in self._readiness else None


class _Asked:
    """A question after the health of a service."""

    def __init__(self, health: Health, stream: Stream, goes_on: bool) -> None:
        self._health, self._stream, self.goes_on = health, stream, goes_on
        self.service = ""

    def take(self, message: bytes) -> None:
        self.service = HealthCheckRequest.FromString(message).service
        state = self._health.state_of(self.service)
        if self.goes_on:
            self._health.watching[self] = state
        self.answer(state)

    def answer(self, state: bool | None) -> None:
        if state is None and not self.goes_on:
            return self._stream.end(NOT_FOUND)
        code = SERVING if state else NOT_SERVING
        code = SERVICE_UNKNOWN if state is None else code
        self._stream.send(HealthCheckResponse(status=code).SerializeToString())
        if not self.goes_on:
            self._stream.end()

    def close(self) -> None:
        if self._stream.is_open and self in self._health.watching:
            return
        self._health.watching.pop(self, None)
        self._stream.end(INTERNAL)  # Nothing was asked.

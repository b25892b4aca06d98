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
        self._watching: dict[_Asked, bool | None] = {}

    def check(self, stream: Stream) -> _Asked:
        """Handle a call of `Check`."""
        return _Asked(self, stream, goes_on=False)

    def watch(self, stream: Stream) -> _Asked:
        """Handle a call of `Watch`."""
        return _Asked(self, stream, goes_on=True)

    def tell(self) -> None:
        """Tell those who watch what has changed."""
        for asked, said in (*self._watching.items(),):
            if (now := self._state_of(asked.service)) != said:
                self._watching[asked] = now
                asked.answer(now)

    def take(self, asked: _Asked) -> None:
        """Answer a question, now and where it changes."""
        state = self._state_of(asked.service)
        if asked.goes_on:
            self._watching[asked] = state
        asked.answer(state)

    def tells(self, asked: _Asked) -> bool:
        """Whether someone is told of changes."""
        return asked in self._watching

    def drop(self, asked: _Asked) -> None:
        """Forget who has left."""
        self._watching.pop(asked, None)

    def _state_of(self, service: str) -> bool | None:
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
        self._health.take(self)

    def answer(self, state: bool | None) -> None:
        if state is None and not self.goes_on:
            return self._stream.end(NOT_FOUND)
        code = SERVING if state else NOT_SERVING
        code = SERVICE_UNKNOWN if state is None else code
        self._stream.send(HealthCheckResponse(status=code).SerializeToString())
        if not self.goes_on:
            self._stream.end()

    def close(self) -> None:
        if self._stream.is_open and self._health.tells(self):
            return
        self._health.drop(self)
        self._stream.end(INTERNAL)  # Nothing was asked.

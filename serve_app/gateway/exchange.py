"""A request on its way through the gateway: the question, who answers, and who asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from serve_app.engines.base import EngineStatus, FinishReason, Generation
from serve_app.gateway.callers import ANYBODY, Caller
from serve_app.gateway.generation import Headers
from serve_app.gateway.replicas import Prompt, ReplicaTable
from serve_app.gateway.tracing import PARENT, RequestSpan
from tokenyard.routing.types import OrderKey


# Not frozen: that takes four times as long to make, and every request makes one.
@dataclass(slots=True)
class Call:
    """A request as its caller wrote it."""

    path: bytes
    """The path with its query."""
    headers: bytes
    """Lines of those that are handed on, each with its end; without the body's length."""
    body: bytes
    stream: bool
    """Whether events are asked for."""
    method: bytes = b"POST"
    model_at: tuple[int, int] | None = None
    """Position of the model's name in a form; None: the body is JSON, or empty."""
    others: Headers = ()
    """More headers, which pools may want."""
    generates: bool = True
    """Whether a model writes the answer, token by token."""


# Not frozen: that takes four times as long to make, and every request makes one.
@dataclass(slots=True)
class InferenceRequest:
    """A request, as far as the gateway needs to know it."""

    request_id: str
    token_ids: Sequence[int]
    """Tokens of the prompt; an estimate for endpoints that tokenise themselves."""
    max_tokens: int
    """Longest answer; 0: it does not say, or there are no tokens in answers to it."""
    call: Call
    prompt: Prompt | None = None
    """The prompt, where more is known of it than `token_ids`."""
    model: str | None = None
    """Name of the model that is asked for; None: the cluster's."""
    tenant: str = ""
    """The tenant to be served; empty: none that the cluster file names."""
    caller: Caller = ANYBODY
    """Who asks."""
    generation: Generation | None = None
    """The request for our engines; None: they do not understand it."""
    trace: bytes = b""
    """Header lines by which the caller names its trace; empty: it does not, or nobody traces."""
    span: RequestSpan | None = None
    """Its span; None: it is not traced."""
    session: str | None = None
    """Name of its session; None: it names none."""
    sticks_to: str | None = None
    """The one replica that can answer it, as it holds what the request goes on from; None: any."""
    sender: Sender | None = None
    """Sends it to the replica that is picked; None: the pool's backend does."""
    hear: Callable[[str, str], None] | None = None
    """Is told which replica answers, and the answer's id; None: nobody wants to know."""
    learn: Callable[[int], None] | None = None
    """Is told how many tokens the prompt had; None: that was known."""

    def span_attributes(self, model: str, class_name: str) -> dict[str, str | int]:
        """Attributes of its span: the model that answers, its class and its size."""
        return {
            "gen_ai.request.model": model, "gen_ai.request.max_tokens": self.max_tokens,
            "gen_ai.usage.input_tokens": len(self.token_ids),
            "tokenyard.request_id": self.request_id, "tokenyard.class": class_name,
            "tokenyard.tenant": self.tenant or self.caller.tenant,
        }  # fmt: skip

    def traced(self, line: bytes, span: RequestSpan) -> InferenceRequest:
        """The request for endpoints, with a trace header in place of the caller's."""
        lines = self.call.headers.splitlines(keepends=True)
        others = b"".join(header for header in lines if header.partition(b":")[0] != PARENT)
        return replace(self, call=replace(self.call, headers=others + line), span=span)


class Downstream(Protocol):
    """The caller's side of a request."""

    begun: bool
    """Whether the answer has begun: from then on it cannot be another."""

    def add_headers(self, headers: Headers) -> None:
        """Add these to the answer's head, in place of an endpoint's of the same names."""

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of the answer."""

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the caller reads more slowly."""

    def write_now(self, data: bytes, chunk: bytes | None = None) -> bool:
        """Send a piece of a body that has begun; False: not sent, since it would have to wait.

        `chunk` is the same data as a chunk of HTTP/1.1, where it came as one.
        """


class Attempt(Protocol):
    """One attempt to have a replica answer a request."""

    request: InferenceRequest
    downstream: Downstream
    order_key: OrderKey | None
    """Place among the requests that wait at the replica, lower first, Unix time, seconds; None:
    behind those that are there."""

    def note_send(self) -> None:
        """Note that the request is sent."""

    def take(
        self, num_tokens: int, finish_reason: FinishReason | None = None, is_whole: bool = False
    ) -> None:
        """Note the number of tokens so far; a reason comes once, at the end.

        `is_whole`: all came at once, so that nobody knows when the first token was there.
        """

    def publish(self, status: EngineStatus) -> None:
        """Record the state that the replica sent with its answer."""


class Sender:
    """Sends a request in the place of the pool's backend, and stands in for its caller.

    It is the `Downstream` of a request whose bytes go elsewhere: nothing of an answer comes here.
    """

    allowed: frozenset[str] | None = None
    """The replicas that the request may go to; None: all."""
    serves: str | None = None
    """The replica that answers it already, in place of the one that was picked; None: none does."""
    begun = False
    added: Headers = ()
    """Headers that the gateway adds to the answer's head."""

    async def answer(self, backend: Backend, attempt: Attempt, replica_ids: Sequence[str]) -> None:
        """Have a replica answer a request: see `Backend.answer`.

        The first of `replica_ids` is the one that is picked, and has a place reserved. The others
        can stand in for it, the best first.
        """
        raise NotImplementedError

    def add_headers(self, headers: Headers) -> None:
        """Add these to the head of the answer."""
        self.added = headers

    async def begin(self, status: int, headers: Headers) -> None:
        """Do nothing: another sends the head."""

    async def write(self, data: bytes) -> None:
        """Do nothing: another sends the body."""

    def write_now(self, data: bytes, chunk: bytes | None = None) -> bool:
        """Do nothing: another sends the body."""
        return True


class Backend(Protocol):
    """A pool, as the gateway uses it."""

    name: str
    takes_any: bool
    """Whether its replicas say themselves what they do not understand."""
    objectives: Mapping[str, int] = MappingProxyType({})
    """Priorities of its InferenceObjectives in Kubernetes, by name."""

    @property
    def max_model_tokens(self) -> float:
        """Longest prompt plus output that its replicas take; infinite: unknown."""

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Tell the collector the replicas and what they published; cheap."""

    def ray_replicas(self) -> tuple[Any, ...]:
        """Replicas as Ray's own router takes them."""

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Have one replica answer a request; being cancelled cancels it there.

        Raises:
            ReplicaFailed: It is gone, full, late or broken. The text does not say where it is,
                since callers read it.
            RequestRejected: It has something against the request.
        """

    def host_loads(self) -> dict[str, dict[str, float]]:
        """Load of every replica's machine, by replica and metric; none: nobody publishes it."""
        return {}

    def by_our_clock(self, replica_id: str, status: EngineStatus, now_s: float) -> EngineStatus:
        """Return a status that came with an answer, with its time by our clock."""
        return status

"""What the server asks of an inference engine: tokens in, a stream of tokens out.

An engine knows token ids alone. Texts and stop strings are made of them in
`serve_app.engines.texts`, and HTTP in `serve_app.http.engine_api`, alike for all engines. One
engine is one replica: data parallelism is several of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from serve_app.engine_config import EngineConfig
from tokenyard.routing.types import OrderKey

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence token; `length`: max_tokens; `abort`: the client left."""


class EngineError(RuntimeError):
    """An engine that cannot do what it is asked; the text says why, in one sentence."""


class EngineFull(EngineError):
    """The engine takes no more requests for now."""


class InvalidRequest(EngineError):
    """A request that this engine can never answer: it is too long, or makes no sense."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    max_tokens: int
    temperature: float = 0.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    seed: int | None = None
    """Equal seeds give equal tokens; None: drawn anew."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever is drawn: what replays of a trace need."""


@dataclass(slots=True)
class Generation:
    """What a caller asks an engine for, read from a body of OpenAI's."""

    token_ids: Sequence[int]
    """Tokens of the prompt; at least one."""
    sampling: Sampling
    model: str
    is_chat: bool
    """Whether it is a conversation."""
    stream: bool
    stops: tuple[str, ...] = ()
    """Strings at which the answer is cut."""
    include_usage: bool = False
    """Whether a last event tells how many tokens there were."""
    continuous_usage: bool = False
    """Whether every event does (vLLM)."""
    may_be_shorter: bool = False
    """Whether the caller names no length, so that it is what an engine has room for."""


# Not frozen: that takes twice as long to make, and every token makes one.
@dataclass(slots=True)
class Chunk:
    """What one iteration added to an answer."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set in the last chunk."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What a replica publishes about itself."""

    num_waiting: int
    num_running: int
    kv_used_fraction: float
    observed_at_s: float
    """Unix time, seconds; by the clock of whoever holds it (`serve_app.gateway.clocks`)."""
    accepting: bool = True
    """Whether it takes requests; false while it drains."""
    max_batch: int | None = None
    """Most sequences that it runs at once now; None: as its profile says."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine reports about itself, in the simulator's units."""

    num_waiting: int
    """Requests queued and not yet started."""
    num_running: int
    """Requests in the batch."""
    kv_used_fraction: float
    """Share of the KV memory that requests hold."""
    kv_capacity_tokens: float
    """Tokens whose keys and values fit."""
    num_preemptions: int
    accepting: bool = True
    """Whether it takes requests: not while what died is being replaced."""

    @property
    def num_running_if_full(self) -> int | None:
        """How many run while others have to wait for them."""
        return self.num_running if self.num_waiting and self.num_running else None


IDLE = EngineStats(0, 0, 0.0, 0.0, 0)
"""Of an engine that has done nothing yet."""


def longest_tokens(config: EngineConfig, stats: EngineStats) -> int:
    """Longest prompt plus output of an engine that is started: its memory may hold less."""
    return int(min(config.max_model_tokens, stats.kv_capacity_tokens))


class Engine(Protocol):
    """An inference engine. All coroutines run on the event loop of its replica."""

    async def start(self) -> None:
        """Load the weights and be ready; EngineError: no such model, or it cannot be sharded so."""

    def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        order_key: OrderKey | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate; closing the iterator early aborts the request.

        Args:
            request_id: No other that is answered now has it.
            token_ids: Of the prompt.
            sampling: How tokens are drawn.
            order_key: Place among the requests that wait, lower first and of equals who came
                first, Unix time, seconds; None: the time now.

        Raises:
            InvalidRequest: It is too long, or makes no sense.
            EngineFull: As many wait as may.
            EngineError: The engine died meanwhile.
        """

    async def abort(self, request_id: str) -> None:
        """Forget a request; unknown ones are ignored."""

    def stats(self) -> EngineStats:
        """Tell the state as of now, without waiting."""

    async def check_health(self) -> None:
        """Return if all ranks answer, or are being replaced by the engine itself.

        Raises:
            EngineError: Another replica has to take its place.
        """

    async def drain(self) -> None:
        """Return once everything that was accepted has been answered."""

    async def stop(self) -> None:
        """Free the ranks and their memory."""

"""A trace: when requests arrive and how long they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import numpy as np
import numpy.typing as npt

from tokenyard.types import FloatArray, IntArray

MOST_TOKENS = 2**53
"""Beyond them numbers of tokens are not told apart."""
_Selection = slice | npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SessionTurns:
    """How the requests of a trace follow each other; arrays of shape (n,)."""

    session: IntArray
    turn: IntArray
    """Place in the session, from 0 on."""
    next_turn: IntArray
    """Index of the request that follows in the session; -1: it is the last that is played."""
    think_s: FloatArray
    """Time from the end of this request to the next of its client, seconds."""
    num_clients: int
    """Each has at most one request in flight, and begins the first session that nobody has begun
    when its own is over."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival.

    A trace is a value: its methods return new traces and nobody writes into its arrays.

    Raises:
        ValueError: The arrays differ in length or type, a number is negative or not finite, the
            arrivals are out of order, or `started_at` has no time zone.
    """

    arrival_s: FloatArray
    """Time of arrival since the start of the trace, seconds, never decreasing, shape (n,)."""
    context_tokens: IntArray
    """Prompt lengths, tokens, shape (n,)."""
    generated_tokens: IntArray
    """True output lengths, tokens, shape (n,): known only once a request is done."""
    started_at: datetime | None = None
    """Calendar time of second 0, with its time zone; None where the source has no calendar."""
    prefix_hashes: tuple[tuple[int, ...], ...] | None = None
    """Identities of each prompt's leading token blocks; equal leading hashes are a shared prefix.
    None where the source does not publish them."""
    prefix_block_tokens: int | None = None
    """Tokens of each of those blocks."""
    response_s: FloatArray | None = None
    """Measured response times in the recorded time, seconds, NaN where there is none, shape (n,);
    None where the source does not tell them."""
    sessions: SessionTurns | None = None
    """Set where clients wait for their answers (a closed process): `arrival_s` is then when
    requests would arrive if every answer took its expected time. A part of a trace has none."""

    def __post_init__(self) -> None:
        """Reject what cannot be a trace."""
        _check_columns(self.arrival_s, self.context_tokens, self.generated_tokens)
        if self.started_at is not None and self.started_at.tzinfo is None:
            raise ValueError(f"started_at {self.started_at} has no time zone; give it UTC")
        if (self.prefix_hashes is None) != (self.prefix_block_tokens is None):
            raise ValueError("give prefix_hashes and prefix_block_tokens together")
        count, num = len(self.prefix_hashes or ()), self.num_requests
        if self.prefix_hashes is not None and count != num:
            text = f"prefix_hashes has {count} entries for {num} requests; give one per request"
            raise ValueError(text)

    @property
    def num_requests(self) -> int:
        """How many requests arrive."""
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """Time of the last arrival, seconds; NaN for a trace without requests."""
        return float(self.arrival_s[-1]) if self.num_requests else math.nan

    @property
    def total_tokens(self) -> IntArray:
        """Context plus generated tokens, shape (n,)."""
        return self.context_tokens + self.generated_tokens

    @property
    def mean_rate_per_s(self) -> float:
        """Requests over duration; NaN where the duration is zero or there is no request."""
        return self.num_requests / self.duration_s if self.duration_s > 0 else math.nan

    def window(self, start_s: float, stop_s: float) -> Trace:
        """Return the requests that arrive in [start_s, stop_s); `start_s` becomes second 0."""
        if not 0 <= start_s < stop_s:
            raise ValueError(f"window [{start_s}, {stop_s}) s is empty; need 0 <= start < stop")
        first, last = np.searchsorted(self.arrival_s, (start_s, stop_s))
        return self._select(slice(first, last))._starting_at(start_s)

    def head(self, n: int) -> Trace:
        """Return the first `n` requests."""
        self._check_index(n)
        return self._select(slice(0, n))

    def tail_from(self, n: int) -> Trace:
        """Return all but the first `n` requests; the first one kept arrives at second 0."""
        self._check_index(n)
        return self._select(slice(n, None))._starting_at_first()

    def split(self, num_train: int) -> tuple[Trace, Trace]:
        """Return the first `num_train` requests and, re-based to second 0, those after them."""
        return self.head(num_train), self.tail_from(num_train)

    def windows(self, count: int) -> tuple[Trace, ...]:
        """Cut into `count` consecutive traces of equal request count, each re-based to second 0.

        No request is in two windows; up to `count` - 1 requests at the end are in none.

        Raises:
            ValueError: There are fewer requests than windows.
        """
        size = self.num_requests // count if count > 0 else 0
        if size == 0:
            raise ValueError(f"cannot cut {self.num_requests} requests into {count} windows")
        starts = range(0, count * size, size)
        return tuple(self._select(slice(i, i + size))._starting_at_first() for i in starts)

    def rescaled(self, factor: float) -> Trace:
        """Multiply every arrival time by `factor`; below 1 the requests come closer together."""
        if not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"time factor {factor} must be positive and finite")
        return replace(self, arrival_s=self.arrival_s * factor)

    def with_rate(self, rate_per_s: float) -> Trace:
        """Rescale time so that `mean_rate_per_s` is `rate_per_s`."""
        if not self.duration_s > 0:
            raise ValueError(f"{self.num_requests} requests at one instant have no rate to rescale")
        if not rate_per_s > 0:
            raise ValueError(f"rate {rate_per_s} requests/s must be positive")
        return self.rescaled(self.mean_rate_per_s / rate_per_s)

    def with_lengths_scaled(self, factor: float) -> Trace:
        """Multiply every prompt and output by `factor`, rounded down, to no less than a token.

        Prefixes are dropped: their blocks would no longer be whole.
        """
        if not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"length factor {factor} must be positive and finite")
        longest = factor * float(self.total_tokens.max(initial=0))
        if longest >= MOST_TOKENS:
            raise ValueError(f"length factor {factor} makes a request of {longest:.0g} tokens")
        return replace(
            self,
            context_tokens=np.maximum((self.context_tokens * factor).astype(np.int64), 1),
            generated_tokens=np.maximum((self.generated_tokens * factor).astype(np.int64), 1),
            prefix_hashes=None,
            prefix_block_tokens=None,
        )

    def with_prefix_blocks(self, block_tokens: int) -> Trace:
        """Express shared prefixes in whole blocks of another size; drop a prompt's partial block.

        Two prompts share as many leading tokens as before, rounded down to whole blocks. Blocks
        get new numbers.
        """
        if self.prefix_hashes is None or block_tokens == self.prefix_block_tokens:
            return self
        if block_tokens < 1:
            raise ValueError(f"blocks of {block_tokens} tokens are none; give at least 1")
        numbers: dict[tuple[int, ...], int] = {}
        hashes = tuple(
            self._rechunked(hashes, int(context), block_tokens, numbers)
            for hashes, context in zip(self.prefix_hashes, self.context_tokens, strict=True)
        )
        return replace(self, prefix_hashes=hashes, prefix_block_tokens=block_tokens)

    def _rechunked(
        self, hashes: tuple[int, ...], context: int, block_tokens: int,
        numbers: dict[tuple[int, ...], int],
    ) -> tuple[int, ...]:  # fmt: skip
        size = self.prefix_block_tokens
        assert size is not None
        shared_tokens = min(len(hashes) * size, context)
        blocks: list[int] = []
        for end in range(block_tokens, shared_tokens + 1, block_tokens):
            begun, ended = -(-(end - block_tokens) // size), -(-end // size)
            # The previous block's number stands for the whole prefix before it.
            key = (blocks[-1] if blocks else -1, *hashes[begun:ended])
            blocks.append(numbers.setdefault(key, len(numbers)))
        return tuple(blocks)

    def _select(self, rows: _Selection) -> Trace:
        hashes = self.prefix_hashes
        if hashes is not None:
            hashes = tuple(hashes[i] for i in np.arange(self.num_requests)[rows])
        return replace(
            self,
            arrival_s=self.arrival_s[rows],
            context_tokens=self.context_tokens[rows],
            generated_tokens=self.generated_tokens[rows],
            prefix_hashes=hashes,
            response_s=None if self.response_s is None else self.response_s[rows],
            sessions=None,
        )

    def _starting_at_first(self) -> Trace:
        return self._starting_at(float(self.arrival_s[0])) if self.num_requests else self

    def _starting_at(self, start_s: float) -> Trace:
        started_at = self.started_at and self.started_at + timedelta(seconds=start_s)
        return replace(self, arrival_s=self.arrival_s - start_s, started_at=started_at)

    def _check_index(self, n: int) -> None:
        if not 0 <= n <= self.num_requests:
            raise ValueError(f"index {n} is outside a trace of {self.num_requests} requests")


def _check_columns(arrival_s: FloatArray, *tokens: IntArray) -> None:
    if any(column.shape != arrival_s.shape for column in tokens) or arrival_s.ndim != 1:
        shapes = [column.shape for column in (arrival_s, *tokens)]
        raise ValueError(f"columns of shapes {shapes} must be one-dimensional and equally long")
    if arrival_s.dtype != np.float64 or any(column.dtype != np.int64 for column in tokens):
        dtypes = [str(column.dtype) for column in (arrival_s, *tokens)]
        raise ValueError(f"columns of types {dtypes} must be float64, int64, int64")
    if not np.isfinite(arrival_s).all() or (len(arrival_s) and arrival_s[0] < 0):
        raise ValueError("arrival times must be finite and not before second 0")
    if (np.diff(arrival_s) < 0).any():
        index = int(np.argmax(np.diff(arrival_s) < 0)) + 1
        raise ValueError(f"request {index} arrives before request {index - 1}; sort by time")
    if any((column < 0).any() for column in tokens):
        raise ValueError("token counts must not be negative")

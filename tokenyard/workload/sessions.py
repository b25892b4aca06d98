"""Multi-turn traffic with shared system prompts, for traces that publish no prefixes.

Defaults are invented, not fitted: no public trace with timestamps tells how long people think. The
workloads of published catalogues give a `Spread` for what they tell
(`tokenyard/scenarios/workloads`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from tokenyard.config import FrozenModel
from tokenyard.types import BoolArray, FloatArray, IntArray
from tokenyard.workload.model import WorkloadModel, load_model
from tokenyard.workload.spread import Spread
from tokenyard.workload.trace import Trace

_REQUESTS_FOR_MEANS = 20_000
_INSTEAD = {
    "turns": "mean_turns",
    "think_s": "mean_think_s",
    "message_tokens": "mean_message_tokens",
}


class Sessions(FrozenModel):
    """Conversations: each turn's prompt is all that was said before, and a new message."""

    mean_turns: Annotated[float, Field(ge=1)] = 4.0
    """Mean number of turns, geometrically distributed."""
    mean_think_s: Annotated[float, Field(gt=0)] = 20.0
    """Mean time from an answer to the next message, exponentially distributed."""
    answer_token_s: Annotated[float, Field(ge=0)] = 0.03
    """Time that a client waits for each token of an answer before it begins to think."""
    mean_message_tokens: Annotated[float, Field(ge=1)] = 150.0
    """Mean length of a message, exponentially distributed, at least one token."""
    num_system_prompts: Annotated[int, Field(ge=1)] = 8
    """Different system prompts; the k-th is used in proportion to 1/k."""
    system_prompt_tokens: Annotated[int, Field(ge=0)] = 1024
    max_context_tokens: Annotated[int, Field(ge=1)] = 8192
    """A conversation ends before its prompt is longer than this."""
    warm_up_s: Annotated[float, Field(ge=0)] | None = None
    """Time from the first conversation to the first request of a stream; None: that in which a
    fifth of the requests drawn come."""
    turns: Spread | None = None
    """In place of `mean_turns`; at least one."""
    think_s: Spread | None = None
    """In place of `mean_think_s`; of agents, the time that their tools take."""
    message_tokens: Spread | None = None
    """In place of `mean_message_tokens`."""
    opening_tokens: Spread | None = None
    """What comes with the first message, such as documents; None: nothing."""
    answer_tokens: Spread | None = None
    """Lengths of answers; None: those of the workload model."""

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        for spread, mean in _INSTEAD.items():
            changed = getattr(self, mean) != type(self).model_fields[mean].default
            if getattr(self, spread) is not None and changed:
                raise ValueError(f"give one of {spread} and {mean}")
        return self

    def generate(
        self,
        num_requests: int,
        rng: np.random.Generator,
        rate_per_s: float,
        model: WorkloadModel,
        block_tokens: int,
    ) -> Trace:
        """Draw requests, with `prefix_hashes`, of conversations that begin as a Poisson process.

        Block k of a prompt is told by one number that stands for all up to its end; an answer's
        blocks are told with its request.
        """
        before = num_requests if self.warm_up_s is None else self.warm_up_s * rate_per_s
        num_sessions = int((before + num_requests) / self._least_turns) + 50
        while True:
            turns, gaps = self.draw_turns(num_sessions, rng, model)
            starts_s = self._starts_s(turns, gaps, rate_per_s)
            arrival_s = starts_s[turns.session] + turns.before_s - turns.first_before_s
            # The first turns are left out: there were no conversations under way yet. So are the
            # last, where conversations have stopped to begin.
            order = np.argsort(arrival_s, kind="stable")
            if self.warm_up_s is None:
                order = order[len(order) // 5 : -max(len(order) // 5, 1)]
            else:
                first, last = np.searchsorted(arrival_s[order], (self.warm_up_s, starts_s[-1]))
                order = order[first:last]
            if len(order) >= num_requests:
                order = order[:num_requests]
                return self.trace(turns, order, arrival_s[order], block_tokens)
            num_sessions *= 2

    @property
    def _least_turns(self) -> float:
        """Turns of a session, not overestimated where long prompts end it."""
        if self.turns is None:
            return self.mean_turns
        return min(max(self.turns.mean, 1.0), 20.0)

    def draw_turns(
        self, num_sessions: int, rng: np.random.Generator, model: WorkloadModel
    ) -> tuple[Turns, FloatArray]:
        """Draw turns, and the gaps between sessions over their mean, shape (num_sessions,).

        Raises:
            ValueError: No prompt is within `max_context_tokens`.
        """
        if self.turns is None:
            num_turns = rng.geometric(1.0 / self.mean_turns, num_sessions)
        else:
            num_turns = np.maximum(self.turns.draw_whole(num_sessions, rng), 1)
        gaps = rng.standard_exponential(num_sessions)
        shares = 1.0 / np.arange(1, self.num_system_prompts + 1)
        prompts = rng.choice(self.num_system_prompts, num_sessions, p=shares / shares.sum())
        session = np.repeat(np.arange(num_sessions), num_turns)
        first = np.concatenate([[0], np.cumsum(num_turns)[:-1]])[session]
        num = len(session)
        if self.message_tokens is None:
            message = rng.exponential(self.mean_message_tokens - 1.0, num).astype(np.int64) + 1
        else:
            message = np.maximum(self.message_tokens.draw_whole(num, rng), 1)
        lengths = self.answer_tokens
        drawn = lengths.draw_whole(num, rng) if lengths else model.sample_lengths(num, rng)[1]
        answer = np.maximum(drawn, 1)
        think = self.think_s or Spread(kind="exponential", mean=self.mean_think_s)
        think_s = think.draw(num, rng)
        said = np.cumsum(message + answer)
        before = (said - message - answer) - (said - message - answer)[first]
        opening = np.zeros(num, dtype=np.int64)
        if self.opening_tokens is not None:
            opening = self.opening_tokens.draw_whole(num_sessions, rng)[session]
        waited_s = np.cumsum(answer * self.answer_token_s + think_s)
        before_s = waited_s - answer * self.answer_token_s - think_s
        turns = Turns(
            session, np.arange(num) - first, self.system_prompt_tokens + opening + before + message,
            answer, prompts[session], think_s, np.where(before > 0, message, opening + message),
            before_s, before_s[first],
        )  # fmt: skip
        short = turns.context <= self.max_context_tokens
        if not short.any():
            raise ValueError(
                f"none of {num_sessions} sessions begins with a prompt of at most "
                f"max_context_tokens {self.max_context_tokens}; the shortest has "
                f"{turns.context.min()} tokens"
            )
        return turns.where(short), gaps

    def _starts_s(self, turns: Turns, gaps: FloatArray, rate_per_s: float) -> FloatArray:
        """When sessions begin, seconds, shape (num_sessions,)."""
        is_cut = self.turns is not None or self.opening_tokens is not None
        mean_turns = len(turns.turn) / len(gaps) if is_cut else self.mean_turns
        return np.cumsum(mean_turns / rate_per_s * gaps)

    def trace(
        self, turns: Turns, order: IntArray, arrival_s: FloatArray, block_tokens: int
    ) -> Trace:
        """Some turns, in order of arrival, as a trace; the first arrives at second 0."""
        shared = self.system_prompt_tokens // block_tokens
        longest = int((turns.context + turns.answer).max()) // block_tokens + 1
        hashes = []
        for turn in order.tolist():
            own = int(turns.context[turn] + turns.answer[turn]) // block_tokens
            # Negative numbers are system prompts, which sessions share.
            common = -1 - int(turns.prompt[turn]) * (shared + 1)
            private = int(turns.session[turn]) * longest
            hashes.append(tuple(common - k if k < shared else private + k for k in range(own)))
        return Trace(
            arrival_s - arrival_s[0], turns.context[order], turns.answer[order],
            prefix_hashes=tuple(hashes), prefix_block_tokens=block_tokens,
        )  # fmt: skip


class Turns(NamedTuple):
    """Turns of many sessions, one session after the other; arrays of shape (num,)."""

    session: IntArray
    turn: IntArray
    """Place in the session, from 0 on."""
    context: IntArray
    """Prompt, tokens."""
    answer: IntArray
    """Tokens."""
    prompt: IntArray
    """Which system prompt."""
    think_s: FloatArray
    """From the answer to the next turn, seconds."""
    fresh: IntArray
    """Tokens of the prompt that were in no turn before, and in no system prompt."""
    before_s: FloatArray
    """Answers and thinking of all turns before, of all sessions, seconds."""
    first_before_s: FloatArray
    """The same of the session's first turn."""

    def where(self, kept: BoolArray) -> Turns:
        """Only some."""
        return self._replace(**{name: column[kept] for name, column in self._asdict().items()})


class SessionMeans(NamedTuple):
    """Means over the requests of sessions."""

    context_tokens: float
    answer_tokens: float
    fresh_tokens: float
    """Of a prompt: what nobody sent before."""
    think_s: float
    """Between an answer and the next turn."""


@lru_cache
def session_means(sessions: Sessions, workload: str) -> SessionMeans:
    """Means of one long seeded sample."""
    num_sessions = int(_REQUESTS_FOR_MEANS / sessions._least_turns)
    model = load_model(workload)
    turns, _ = sessions.draw_turns(num_sessions, np.random.default_rng(0), model)
    columns = (turns.context, turns.answer, turns.fresh, turns.think_s)
    return SessionMeans(*(float(column.mean()) for column in columns))

"""Multi-turn traffic with shared system prompts, for traces that publish no prefixes.

Invented, not fitted: no public trace with timestamps tells how long people think. Every number is
an option. Output lengths are those of a fitted workload model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from tokenyard.config import FrozenModel
from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.model import WorkloadModel, load_model
from tokenyard.workload.trace import Trace

_REQUESTS_FOR_MEANS = 20_000


class Sessions(FrozenModel):
    """Conversations: each turn's prompt is all that was said before, and a new message."""

    mean_turns: Annotated[float, Field(ge=1)] = 4.0
    """Mean number of turns, geometrically distributed."""
    mean_think_s: Annotated[float, Field(gt=0)] = 20.0
    """Mean time from an answer to the next message, exponentially distributed."""
    answer_token_s: Annotated[float, Field(ge=0)] = 0.03
    """Time that a client waits for each token of an answer before it begins to think."""
    mean_message_tokens: Annotated[float, Field(gt=0)] = 150.0
    """Mean length of a message, exponentially distributed, at least one token."""
    num_system_prompts: Annotated[int, Field(ge=1)] = 8
    """Different system prompts; the k-th is used in proportion to 1/k."""
    system_prompt_tokens: Annotated[int, Field(ge=0)] = 1024
    max_context_tokens: Annotated[int, Field(ge=1)] = 8192
    """A conversation ends before its prompt is longer than this."""

    def generate(
        self,
        num_requests: int,
        rng: np.random.Generator,
        rate_per_s: float,
        model: WorkloadModel,
        block_tokens: int,
    ) -> Trace:
        """Draw requests of conversations that begin as a Poisson process.

        Args:
            num_requests: How many.
            rng: Source of all randomness.
            rate_per_s: Mean rate of requests, per second.
            model: Whose output lengths answers have.
            block_tokens: Tokens of a prefix block, at least 1; block k of a prompt is told by one
                number that stands for all up to its end. An answer's blocks are told with its
                request.

        Returns:
            A trace with `prefix_hashes`, its first request at second 0.
        """
        num_sessions = int(2 * num_requests / self.mean_turns) + 50
        while True:
            turns = self._turns(num_sessions, rng, rate_per_s, model)
            # The first turns are left out: there were no conversations under way yet. So are the
            # last, where conversations have stopped to begin.
            order = np.argsort(turns.arrival_s, kind="stable")
            order = order[len(order) // 5 : -max(len(order) // 5, 1)]
            if len(order) >= num_requests:
                return turns.trace(order[:num_requests], self, block_tokens)
            num_sessions *= 2

    def _turns(
        self, num_sessions: int, rng: np.random.Generator, rate_per_s: float, model: WorkloadModel
    ) -> _Turns:
        num_turns = rng.geometric(1.0 / self.mean_turns, num_sessions)
        starts = np.cumsum(rng.exponential(self.mean_turns / rate_per_s, num_sessions))
        shares = 1.0 / np.arange(1, self.num_system_prompts + 1)
        prompts = rng.choice(self.num_system_prompts, num_sessions, p=shares / shares.sum())
        session = np.repeat(np.arange(num_sessions), num_turns)
        first = np.concatenate([[0], np.cumsum(num_turns)[:-1]])[session]
        num = len(session)
        message = 1 + rng.exponential(self.mean_message_tokens - 1.0, num).astype(np.int64)
        _, answer = model.sample_lengths(num, rng)
        answer = np.maximum(answer, 1)
        think_s = rng.exponential(self.mean_think_s, num)
        said = np.cumsum(message + answer)
        context = self.system_prompt_tokens + said - answer - (said - message - answer)[first]
        waited_s = np.cumsum(answer * self.answer_token_s + think_s)
        before_s = waited_s - answer * self.answer_token_s - think_s
        arrival_s = starts[session] + before_s - before_s[first]
        kept = context <= self.max_context_tokens
        return _Turns(
            arrival_s[kept], context[kept], answer[kept], session[kept], prompts[session][kept]
        )


class _Turns:
    """Turns of many sessions, arrays of shape (num_turns,)."""

    def __init__(
        self,
        arrival_s: FloatArray,
        context: IntArray,
        answer: IntArray,
        session: IntArray,
        prompt: IntArray,
    ) -> None:
        self.arrival_s, self.context, self.answer = arrival_s, context, answer
        self.session, self.prompt = session, prompt

    def trace(self, order: IntArray, sessions: Sessions, block_tokens: int) -> Trace:
        """Those turns as a trace."""
        shared = sessions.system_prompt_tokens // block_tokens
        longest = int((self.context + self.answer).max()) // block_tokens + 1
        hashes = []
        for turn in order.tolist():
            own = int(self.context[turn] + self.answer[turn]) // block_tokens
            # Negative numbers are system prompts, which sessions share.
            common = -1 - int(self.prompt[turn]) * (shared + 1)
            private = int(self.session[turn]) * longest
            hashes.append(tuple(common - k if k < shared else private + k for k in range(own)))
        arrival_s = self.arrival_s[order]
        return Trace(
            arrival_s - arrival_s[0], self.context[order], self.answer[order],
            prefix_hashes=tuple(hashes), prefix_block_tokens=block_tokens,
        )  # fmt: skip


@lru_cache
def mean_session_lengths(sessions: Sessions, workload: str) -> tuple[float, float]:
    """Mean context and output of its requests, tokens, from one long seeded sample."""
    rng = np.random.default_rng(0)
    turns = sessions._turns(
        int(_REQUESTS_FOR_MEANS / sessions.mean_turns), rng, 1.0, load_model(workload)
    )
    return float(turns.context.mean()), float(turns.answer.mean())

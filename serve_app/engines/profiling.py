"""How fast an engine is, for the router to know: declared, or measured when it starts.

It is measured through nothing but its interface. Prompts of several lengths that ask for one token
show what prefill costs; batches of several sizes at several context lengths show what decoding
costs. Each measured iteration is one row; the four coefficients of the project's linear model are
fitted to all rows.

The measurement is kept by the cluster: a replica that takes the place of one that died is back as
soon as it has loaded. Ranks without GPU share the cores of their machine, so there one replica at a
time loads and measures itself; pools are compared by what each can do alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serve_app import ray_private
from serve_app.cluster import EngineProfile, Pool
from serve_app.engine_config import EngineConfig
from serve_app.engines.base import Engine, EngineError, EngineStats, Sampling, longest_tokens
from serve_app.engines.sharded.engine import rank_bundles
from serve_app.engines.tokenizer import Tokenizer
from tokenyard.perf.calibration import fit_iterations
from tokenyard.perf.coefficients import LinearCoefficients
from tokenyard.perf.profiles import IterationProfile

PREFILL_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
"""Lengths of prompts, as shares of what one iteration may compute."""
CONTEXT_SHARES = (1 / 16, 1 / 3)
"""Lengths of contexts, as shares of the longest possible."""
DECODE_STEPS = 8
"""Iterations measured of every batch."""
REPETITIONS = 3
"""Prompts of every length."""
_SMALLEST_PROMPT = 4
_QUIET_S = 5.0
_BUDGET_S = 10.0
_PACED_BUDGET_S = 25.0
_SMALLEST_VOCABULARY = 32
"""Every model has that many tokens; for engines whose tokenizer does not tell."""


@dataclass(frozen=True)
class Measurement:
    """What an engine can do, measured."""

    iterations: IterationProfile
    coefficients: LinearCoefficients
    kv_capacity_tokens: float
    max_batch: int
    tokens_per_s: float
    """Tokens that came out of a full batch per second, seen from outside."""


Row = tuple[int, int, int, float]
"""Prefill tokens, decoding sequences, cached tokens, seconds."""


async def start_and_measure(
    engine: Engine, pool: Pool, tokenizer: Awaitable[Tokenizer]
) -> EngineProfile:
    """Start an engine and learn how fast it is.

    The tokenizer, which is on its way, says from how many token ids the measurement may draw.

    Raises:
        EngineError: It cannot start, or cannot be measured.
    """
    key = hashlib.sha256(pool.model_dump_json().encode()).hexdigest().encode()
    text = None if pool.profile is not None else ray_private.get_value(key)
    stored = pool.profile if text is None else EngineProfile.model_validate_json(text)
    if stored is not None:
        await engine.start()
        return stored
    # An emulated replica leaves the cores alone most of the time.
    paced = pool.config.emulates is not None
    shares_cores = not paced and "GPU" not in rank_bundles(pool.config)[0]
    budget_s = _PACED_BUDGET_S if paced else _BUDGET_S
    async with _alone_on_this_machine() if shares_cores else contextlib.nullcontext():
        await engine.start()
        vocab_size = (await tokenizer).vocab_size or _SMALLEST_VOCABULARY
        measured = await profile_engine(engine, pool.config, vocab_size, budget_s)
    profile = _engine_profile(measured, pool)
    ray_private.put_value(key, profile.model_dump_json())
    return profile


def _engine_profile(measured: Measurement, pool: Pool) -> EngineProfile:
    coefficients = measured.coefficients
    return EngineProfile(
        iteration_s=max(coefficients.iteration_s, 1e-9),
        prefill_token_s=coefficients.prefill_token_s,
        sequence_s=coefficients.sequence_s,
        kv_token_s=coefficients.kv_token_s,
        max_batch=pool.config.max_batch,
        token_budget=pool.config.token_budget,
        kv_capacity_tokens=max(measured.kv_capacity_tokens, 1.0),
        source="measured",
    )


@contextlib.asynccontextmanager
async def _alone_on_this_machine() -> AsyncIterator[None]:
    """Wait until no other replica on this machine measures itself."""
    with os.fdopen(_open_lock(Path(tempfile.gettempdir())), "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.1)
        yield  # The lock ends with the file, and with the process.


def _open_lock(folder: Path) -> int:
    """Open this user's lock file, but follow no link: another user could have put it there."""
    path = folder / f"tokenyard-speed-{os.getuid()}.lock"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


async def profile_engine(
    engine: Engine, config: EngineConfig, vocab_size: int, budget_s: float = 30.0
) -> Measurement:
    """Measure a running engine that nobody else uses meanwhile.

    After `budget_s` no further batch is begun; the largest ones come first.

    Raises:
        EngineError: It failed meanwhile, or tells no times.
    """
    deadline_s = time.monotonic() + budget_s
    probe = _Probe(engine, vocab_size)
    await probe.prefill(_SMALLEST_PROMPT)  # What is done once for all must not count.
    longest = longest_tokens(config, engine.stats()) - 1
    rows: list[Row] = []
    for length in sorted(_lengths(PREFILL_SHARES, min(config.token_budget, longest)), reverse=True):
        for _ in range(REPETITIONS):
            rows.append(await probe.prefill(length))
    per_s = 0.0
    powers = (1 << i for i in range((config.max_batch - 1).bit_length()))
    for num_sequences in sorted({*powers, config.max_batch}, reverse=True):
        share = int(min(longest, engine.stats().kv_capacity_tokens // num_sequences))
        # Sequences start one after another: the first ones have tokens when the last one starts.
        head_room = DECODE_STEPS + num_sequences + 1
        for context in _lengths(CONTEXT_SHARES, share):
            num_new = head_room + math.ceil(num_sequences * context / config.token_budget)
            if context + num_new > share or (time.monotonic() > deadline_s and len(rows) > 4):
                continue
            measured, reached_per_s = await probe.decode(num_sequences, context, num_new)
            rows += measured
            if num_sequences == config.max_batch:
                per_s = max(per_s, reached_per_s)
    return _profile_of(rows, engine, config, per_s)


def _profile_of(
    rows: Sequence[Row], engine: Engine, config: EngineConfig, per_s: float
) -> Measurement:
    table = np.array([row for row in rows if row[3] > 0], dtype=float)
    if len(table) == 0:
        raise EngineError("the engine tells no iteration times: there is nothing to fit")
    iterations = IterationProfile(table[:, :3].T.copy(), table[:, 3].copy())
    return Measurement(
        iterations=iterations,
        coefficients=fit_iterations(iterations),
        kv_capacity_tokens=engine.stats().kv_capacity_tokens,
        max_batch=config.max_batch,
        tokens_per_s=per_s,
    )


def _lengths(shares: Sequence[float], longest: int) -> list[int]:
    return sorted({max(_SMALLEST_PROMPT, int(share * longest)) for share in shares})


class _Probe:
    """Sends requests and records the engine's iterations."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)
        self._num_sent = 0

    def _prompt(self, length: int) -> list[int]:
        # Drawn anew every time: an engine that keeps prefixes must not recognise one.
        tokens: list[int] = self._rng.integers(0, self._vocab_size, length).tolist()
        return tokens

    def _name(self) -> str:
        self._num_sent += 1
        return f"profile-{self._num_sent}"

    async def prefill(self, length: int) -> Row:
        """Compute one prompt alone, in one iteration."""
        sampling = Sampling(1, ignore_eos=True)
        async for _ in self._engine.generate(self._name(), self._prompt(length), sampling):
            pass
        return length, 0, 0, self._engine.stats().last_batch_s

    async def decode(
        self, num_sequences: int, context: int, num_new: int
    ) -> tuple[list[Row], float]:
        """Measure iterations of a full batch; return them and tokens per second."""
        batch = _Batch(num_sequences, context)
        tasks = [
            asyncio.ensure_future(self._run(batch, context, num_new)) for _ in range(num_sequences)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._quiet()
        return batch.rows, batch.tokens_per_s()

    async def _quiet(self) -> None:
        """Wait until aborted requests no longer run."""
        deadline_s = time.monotonic() + _QUIET_S
        while self._engine.stats().num_running > 0 and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)

    async def _run(self, batch: _Batch, context: int, num_new: int) -> None:
        sampling = Sampling(num_new, ignore_eos=True)
        stream = self._engine.generate(self._name(), self._prompt(context), sampling)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                batch.note(len(chunk.token_ids), self._engine.stats())
                if batch.is_done:
                    return


class _Batch:
    """Sequences that decode together, from when the last of them has its first token."""

    def __init__(self, num_sequences: int, context: int) -> None:
        self._num_sequences = num_sequences
        self._cached = num_sequences * context
        self._full_s: list[float] = []
        """When each iteration of the full batch was heard of."""
        self._last_s = math.nan
        self.rows: list[Row] = []

    @property
    def is_done(self) -> bool:
        return len(self.rows) >= DECODE_STEPS

    def note(self, num_tokens: int, stats: EngineStats) -> None:
        """Record a chunk; the first chunk with a new time starts a new iteration."""
        self._cached += num_tokens
        now_s = time.perf_counter()
        full = stats.last_batch_size == self._num_sequences
        if not full or stats.last_batch_s == self._last_s or self.is_done:
            return
        self._last_s = stats.last_batch_s
        self._full_s.append(now_s)
        # The first full batch may have held the last prompt.
        if len(self._full_s) > 1:
            self.rows.append((0, self._num_sequences, self._cached, stats.last_batch_s))

    def tokens_per_s(self) -> float:
        if len(self._full_s) < 2:
            return 0.0
        iterations_per_s = (len(self._full_s) - 1) / (self._full_s[-1] - self._full_s[0])
        return self._num_sequences * iterations_per_s

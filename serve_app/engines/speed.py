"""How fast a replica is: declared, or measured when the first of its pool starts.

The measurement is kept by the cluster: a replica that takes the place of one that died is back as
soon as it has loaded. Ranks without GPU share the cores of their machine, so there one replica at a
time loads and measures itself; pools are compared by what each can do alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import tempfile
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

from ray.experimental import internal_kv

from serve_app.cluster import EngineProfile, Pool
from serve_app.engines.base import Engine
from serve_app.engines.profiling import Measurement, profile_engine
from serve_app.engines.sharded.engine import rank_bundles
from serve_app.engines.tokenizer import Tokenizer

_BUDGET_S = 10.0
_PACED_BUDGET_S = 25.0
_NAMESPACE = b"tokenyard-speed"
_SMALLEST_VOCABULARY = 32
"""Every model has that many tokens; for engines whose tokenizer does not tell."""


async def start_and_measure(
    engine: Engine, pool: Pool, tokenizer: Awaitable[Tokenizer]
) -> EngineProfile:
    """Start an engine and learn how fast it is.

    Args:
        engine: Not yet started.
        pool: It belongs to.
        tokenizer: On its way; tells from how many token ids the measurement may draw.

    Raises:
        EngineError: It cannot start, or cannot be measured.
    """
    known = pool.profile or _known(pool)
    if known is not None:
        await engine.start()
        return known
    # A rehearsal leaves the cores alone most of the time.
    paced = pool.config.emulates is not None
    shares_cores = not paced and "GPU" not in rank_bundles(pool.config)[0]
    budget_s = _PACED_BUDGET_S if paced else _BUDGET_S
    async with _alone_on_this_machine() if shares_cores else contextlib.nullcontext():
        await engine.start()
        vocab_size = (await tokenizer).vocab_size or _SMALLEST_VOCABULARY
        measured = await profile_engine(engine, pool.config, vocab_size, budget_s)
    profile = _profile(measured, pool)
    internal_kv._internal_kv_put(_key(pool), profile.model_dump_json(), namespace=_NAMESPACE)
    return profile


def _profile(measured: Measurement, pool: Pool) -> EngineProfile:
    found = measured.coefficients
    return EngineProfile(
        iteration_s=max(found.base_s, 1e-9),
        prefill_token_s=found.per_prefill_token_s,
        sequence_s=found.per_sequence_s,
        kv_token_s=found.per_kv_token_s,
        max_batch=pool.config.max_batch,
        token_budget=pool.config.token_budget,
        kv_capacity_tokens=max(measured.kv_capacity_tokens, 1.0),
        source="measured",
    )


def _key(pool: Pool) -> bytes:
    return hashlib.sha256(pool.model_dump_json().encode()).hexdigest().encode()


def _known(pool: Pool) -> EngineProfile | None:
    text = internal_kv._internal_kv_get(_key(pool), namespace=_NAMESPACE)
    return None if text is None else EngineProfile.model_validate_json(text)


@contextlib.asynccontextmanager
async def _alone_on_this_machine() -> AsyncIterator[None]:
    """Wait until no other replica on this machine measures itself."""
    with (Path(tempfile.gettempdir()) / "tokenyard-speed.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.1)
        yield  # The lock ends with the file, and with the process.

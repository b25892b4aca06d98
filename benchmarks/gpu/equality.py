"""The rank of the sharded engine on this device, against plain transformers on the CPU.

Logits; tokens of requests in a batch against each alone; the share of memory that it takes; and a
cache that is too small for all requests. The model is small and of random weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.cells import Deadline, Table
from benchmarks.gpu.grid import device_name
from benchmarks.gpu.rank_engine import Answers, answer, free, save_models
from benchmarks.gpu.shapes import SHAPES
from serve_app.engine_config import EngineConfig
from serve_app.engines.base import EngineError
from serve_app.engines.sharded import rank

COLUMNS = ("stage", "check", "dtype", "value", "bound", "passed", "device")
LOGITS_BOUND = 1e-3
"""Largest difference of fp32 logits."""
TOKENS_BOUND = 0.99
"""Share of fp32 tokens that are equal, each request up to the first that is not."""
KV_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class Case:
    """Which model, and what it is asked."""

    folder: Path
    prompts: list[list[int]]
    num_new: int
    device: str

    @property
    def kv_token_bytes(self) -> int:
        """Of one token in fp32."""
        shape = SHAPES[self.folder.name]
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * 4

    def config(self, dtype: str = "float32", **fields: Any) -> EngineConfig:
        """Prompts that come in chunks, more of them than run at once."""
        sizes = {"max_batch": 3, "token_budget": 64, "kv_bytes": KV_BYTES[self.device]}
        return EngineConfig(model=str(self.folder), dtype=dtype, **(sizes | fields))

    def answer(self, model: Any, config: EngineConfig) -> Answers:
        """Answer all prompts at once."""
        return asyncio.run(answer(model, config, self.prompts, self.num_new))


Row = tuple[str, str, float, float | str, bool | str]
"""Check, dtype, value, bound and whether it is kept; the last two are empty where it is told."""


def run(out: Path, device: str, tiny: bool, deadline: Deadline) -> bool:
    """Check what is not checked yet; return whether all of it is."""
    name = "tiny" if tiny else "small"
    save_models(out / "models", [name], torch.float32, "cpu")
    lengths, num_new = ((5, 17, 33, 60), 12) if tiny else ((5, 33, 60, 150, 400, 700), 64)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, SHAPES[name].vocabulary, n).tolist() for n in lengths]
    case = Case(out / "models" / name, prompts, num_new, device)
    table = Table(out / "equality.csv", COLUMNS)
    for stage, check in STAGES.items():
        if table.has(stage=stage):
            continue
        if deadline.passed:
            return False
        table.add(*((stage, *row, device_name(device)) for row in check(case)))
        free()
    for row in table.rows:
        print("equality:", *list(row.values())[1:6])
    return True


def _told(check: str, value: float, dtype: str = "float32") -> Row:
    return check, dtype, value, "", ""


def _judged(check: str, value: float) -> Row:
    return check, "float32", value, TOKENS_BOUND, value >= TOKENS_BOUND


def _reference(dtype: str, case: Case) -> list[Row]:
    plain = AutoModelForCausalLM.from_pretrained(case.folder, dtype=getattr(torch, dtype)).eval()
    expected = [_plain_tokens(plain, prompt, case.num_new) for prompt in case.prompts]
    with torch.no_grad():
        logits = plain(torch.tensor([case.prompts[-1]])).logits[0].float().numpy()
    model = rank.load_share(case.config(dtype))
    ours = np.array(rank.all_logits(model, case.prompts[-1]))
    off, check = float(np.abs(ours - logits).max()), "largest difference of logits"
    likeliest = float((ours.argmax(1) == logits.argmax(1)).mean())
    # They come at once, more of them than run at once; each was computed alone there.
    found, limit = case.answer(model, case.config(dtype)), case.config().max_batch
    equal, most = _agreement(found.tokens, expected), found.most_running
    told = _told("share of likeliest tokens equal", likeliest, dtype)
    if dtype == "float32":
        kept = (check, dtype, off, LOGITS_BOUND, off <= LOGITS_BOUND)
        batched = ("most sequences at once", dtype, most, limit, 1 < most <= limit)
        return [kept, told, _judged("share of generated tokens equal", equal), batched]
    return [_told(check, off, dtype), told, _told("share of generated tokens equal", equal, dtype)]


def _plain_tokens(model: Any, prompt: list[int], num_new: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None,
        max_new_tokens=num_new, min_new_tokens=num_new, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def _agreement(ours: list[list[int]], expected: list[list[int]]) -> float:
    """Share of tokens before the first that differs, over all requests of equal length."""
    equal = np.array(ours) == np.array(expected)
    return float(np.cumprod(equal, axis=1).mean())


def _memory(case: Case) -> list[Row]:
    model, rows = rank.load_share(case.config()), []
    # Without a GPU it is a share of what is stated, with one it is of the card's memory.
    kv_bytes = KV_BYTES["cpu"] if case.device == "cpu" else None
    for fraction in (0.25, 0.5):
        found = case.answer(model, case.config(memory_fraction=fraction, kv_bytes=kv_bytes))
        used, tokens = found.gpu_used_fraction, found.kv_capacity_tokens
        if kv_bytes is not None:
            used = tokens * case.kv_token_bytes / kv_bytes
        rows.append((f"memory taken of {fraction}", "float32", used, fraction, used <= fraction))
        rows.append(_told(f"KV tokens at {fraction}", tokens))
    return rows


def _limit(case: Case) -> list[Row]:
    model = rank.load_share(case.config())
    expected = case.answer(model, case.config()).tokens
    longest = max(map(len, case.prompts)) + case.num_new
    page_bytes = rank.PAGE_TOKENS * case.kv_token_bytes
    pages = ceil(1.25 * longest / rank.PAGE_TOKENS) + 3
    small = case.config(
        kv_bytes=pages * page_bytes, memory_fraction=1.0, max_batch=len(case.prompts)
    )
    found, refused = case.answer(model, small), False
    try:
        case.answer(model, case.config(kv_bytes=page_bytes))
    except EngineError:
        refused = True
    return [
        _judged("tokens with a small cache equal", _agreement(found.tokens, expected)),
        _told("KV tokens of the small cache", found.kv_capacity_tokens),
        _told("preemptions", found.num_preemptions),
        ("a cache of no page refused", "float32", float(refused), 1.0, refused),
    ]


STAGES: dict[str, Callable[[Case], list[Row]]] = {
    "fp32": partial(_reference, "float32"),
    "bf16": partial(_reference, "bfloat16"),
    "memory": _memory,
    "limit": _limit,
}

"""Times of prefill, decode and mixed iterations over grids, for two models: torch alone.

One file per model, in the columns that `pipelines/calibrate.py --iterations` takes, and more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu.cells import Deadline, Table
from benchmarks.gpu.llama import Batch, Llama
from benchmarks.gpu.shapes import SHAPES

COLUMNS = (
    "prefill_tokens", "decoding_sequences", "kv_tokens", "time_s", "min_s", "max_s", "kind",
    "model", "repeats", "dtype", "device",
)  # fmt: skip
MODELS, TINY_MODELS = ("llama_1b", "llama3_8b"), ("tiny", "tiny_deep")
MOST_CACHED_TOKENS = (1 << 18) + 256
"""Batches that hold more are left out: 34 GB of the 8B model."""
REPEATS, WARM_UPS = 15, 4


def cells(tiny: bool) -> list[Batch]:
    """Return every batch: prompts, sequences that decode, and both."""
    prompts = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    decoding = product((0,), (1, 2, 4, 8, 16, 32, 64, 128, 256), (128, 512, 1024, 2048, 4096))
    mixed = product((128, 512, 1024, 2048), (4, 16, 64), (256, 1024, 2048))
    if tiny:
        prompts = (8, 32, 64)
        decoding, mixed = product((0,), (1, 4), (16, 64)), product((16, 48), (2, 3), (32,))
    found = [Batch(prompt, 0, 0) for prompt in prompts]
    found += [Batch(*one) for one in (*decoding, *mixed)]
    return [cell for cell in found if cell.cache_tokens <= MOST_CACHED_TOKENS]


def run(out: Path, device: str, tiny: bool, deadline: Deadline) -> bool:
    """Measure what is not measured yet; return whether all of it is."""
    for name in TINY_MODELS if tiny else MODELS:
        table = Table(out / f"grid_{name}.csv", COLUMNS)
        missing = [cell for cell in cells(tiny) if not table.has(**_key(cell))]
        if missing and not deadline.passed:
            _measure(name, missing, device, table, deadline)
        print(f"grid {name}: {len(table.rows)} of {len(cells(tiny))} cells")
        if len(table.rows) < len(cells(tiny)):
            return False
    return True


def _key(cell: Batch) -> dict[str, int]:
    kv_tokens = cell.decoding_sequences * cell.context_tokens
    return dict(zip(COLUMNS, (*cell[:2], kv_tokens), strict=False))


def _kind(cell: Batch) -> str:
    if not cell.decoding_sequences:
        return "prefill"
    return "mixed" if cell.prefill_tokens else "decode"


def _measure(
    name: str, missing: list[Batch], device: str, table: Table, deadline: Deadline
) -> None:
    torch.manual_seed(0)
    torch.cuda.empty_cache()  # Of the model before.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cache_tokens = max(cell.cache_tokens for cell in missing)
    positions = 1 + max(max(cell.prefill_tokens, cell.context_tokens) for cell in missing)
    place = {"device": device, "dtype": dtype}
    model = Llama(SHAPES[name], cache_tokens, positions, place).eval()
    for cell in missing:
        if deadline.passed:
            return
        times_s = iteration_times_s(model, cell, device)[WARM_UPS:]
        table.add((
            *_key(cell).values(), median(times_s), min(times_s), max(times_s), _kind(cell), name,
            REPEATS, str(dtype).removeprefix("torch."), device_name(device),
        ))  # fmt: skip


def device_name(device: str) -> str:
    """The card's name, or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


@torch.inference_mode()
def iteration_times_s(model: Llama, cell: Batch, device: str) -> list[float]:
    """Time the same iteration again and again, seconds each."""
    context = torch.full((cell.decoding_sequences,), cell.context_tokens, device=device)
    positions = torch.cat([context, torch.arange(cell.prefill_tokens, device=device)])
    token_ids = torch.randint(len(model.table), positions.shape, device=device)
    clock = _cuda_s if device == "cuda" else _cpu_s
    iteration = _replayable if device == "cuda" else lambda step: step
    step = iteration(lambda: model(token_ids, positions, cell))
    return [clock(step) for _ in range(WARM_UPS + REPEATS)]


def _replayable(step: Callable[[], object]) -> Callable[[], object]:
    """Make a CUDA graph, as engines do: launches of a small batch take longer than its kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # The inputs are made there.
    with torch.cuda.stream(stream):
        step()  # Libraries allocate at their first call, which no graph can hold.
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _cpu_s(step: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    step()
    return time.perf_counter() - begun_s


def _cuda_s(step: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3

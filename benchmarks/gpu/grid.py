"""Times of prefill, decode and mixed iterations over grids, for two models: torch alone.

One file per model, in the columns that `pipelines/calibrate.py --iterations` takes, and more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.gpu.cells import Deadline, Table
from benchmarks.gpu.llama import Batch, Llama
from benchmarks.gpu.shapes import SHAPES, Shape

COLUMNS = (
    "prefill_tokens", "decoding_sequences", "kv_tokens", "time_s", "min_s", "max_s", "kind",
    "model", "repeats", "dtype", "device",
)  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Which batches are measured of which models, and how often."""

    models: tuple[str, ...]
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    mixed_prompts: tuple[int, ...]
    mixed_batches: tuple[int, ...]
    mixed_contexts: tuple[int, ...]
    most_cached_tokens: int
    """Batches that hold more are left out."""
    repeats: int
    warm_ups: int

    def cells(self) -> list[Batch]:
        """Return every batch, prompts first."""
        cells = [Batch(tokens, 0, 0) for tokens in self.prompts]
        cells += [Batch(0, *both) for both in product(self.batches, self.contexts)]
        mixed = product(self.mixed_prompts, self.mixed_batches, self.mixed_contexts)
        cells += [Batch(*one) for one in mixed]
        return [cell for cell in cells if cell.cache_tokens <= self.most_cached_tokens]


FULL = Grid(
    models=("llama_1b", "llama3_8b"),
    prompts=(16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    contexts=(128, 512, 1024, 2048, 4096),
    mixed_prompts=(128, 512, 1024, 2048),
    mixed_batches=(4, 16, 64),
    mixed_contexts=(256, 1024, 2048),
    most_cached_tokens=(1 << 18) + 256,
    repeats=15,
    warm_ups=4,
)
TINY = Grid(
    models=("tiny", "tiny_deep"),
    prompts=(8, 32, 64),
    batches=(1, 4),
    contexts=(16, 64),
    mixed_prompts=(16, 48),
    mixed_batches=(2, 3),
    mixed_contexts=(32,),
    most_cached_tokens=512,
    repeats=5,
    warm_ups=2,
)


def run(out: Path, device: str, tiny: bool, deadline: Deadline) -> bool:
    """Measure what is not measured yet; return whether all of it is."""
    grid = TINY if tiny else FULL
    for name in grid.models:
        table = Table(out / f"grid_{name}.csv", COLUMNS)
        missing = [cell for cell in grid.cells() if not table.has(**_key(cell))]
        if missing and not deadline.passed:
            _measure_model(name, grid, missing, device, table, deadline)
        print(f"grid {name}: {len(table.rows)} of {len(grid.cells())} cells")
        if len(table.rows) < len(grid.cells()):
            return False
    return True


def _key(cell: Batch) -> dict[str, int]:
    return {
        "prefill_tokens": cell.prefill_tokens,
        "decoding_sequences": cell.decoding_sequences,
        "kv_tokens": cell.decoding_sequences * cell.context_tokens,
    }


def _measure_model(
    name: str, grid: Grid, missing: list[Batch], device: str, table: Table, deadline: Deadline
) -> None:
    torch.manual_seed(0)
    torch.cuda.empty_cache()  # Of the model before.
    shape = SHAPES[name]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cache_tokens = max(cell.cache_tokens for cell in missing)
    positions = max(*grid.prompts, *grid.contexts, *grid.mixed_contexts) + 1
    model = Llama(shape, cache_tokens, positions, device, dtype).eval()
    for cell in missing:
        if deadline.passed:
            return
        times_s = iteration_times_s(model, shape, cell, device, grid.warm_ups, grid.repeats)
        table.add({
            **_key(cell), "time_s": median(times_s), "min_s": min(times_s), "max_s": max(times_s),
            "kind": _kind(cell), "model": name, "repeats": grid.repeats,
            "dtype": str(dtype).removeprefix("torch."), "device": device_name(device),
        })  # fmt: skip


def _kind(cell: Batch) -> str:
    if not cell.decoding_sequences:
        return "prefill"
    return "mixed" if cell.prefill_tokens else "decode"


def device_name(device: str) -> str:
    """The card's name, or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


@torch.inference_mode()
def iteration_times_s(
    model: Llama, shape: Shape, cell: Batch, device: str, warm_ups: int, repeats: int
) -> list[float]:
    """Time the same iteration again and again, warm, seconds each."""
    num_tokens = cell.decoding_sequences + cell.prefill_tokens
    token_ids = torch.randint(shape.vocabulary, (num_tokens,), device=device)
    context = torch.full((cell.decoding_sequences,), cell.context_tokens, device=device)
    positions = torch.cat([context, torch.arange(cell.prefill_tokens, device=device)])
    if device == "cuda":
        return _cuda_times_s(model, (token_ids, positions, cell), warm_ups, repeats)
    times_s = []
    for _ in range(warm_ups + repeats):
        begun_s = time.perf_counter()
        model(token_ids, positions, cell)
        times_s.append(time.perf_counter() - begun_s)
    return times_s[warm_ups:]


def _cuda_times_s(
    model: Llama, batch: tuple[Tensor, Tensor, Batch], warm_ups: int, repeats: int
) -> list[float]:
    """Replay a CUDA graph, as engines do: the launches of small batches take longer than they."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):  # Libraries allocate at their first call, which no graph can hold.
            model(*batch)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(*batch)
    times_s = []
    for _ in range(warm_ups + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_s.append(begin.elapsed_time(end) * 1e-3)
    return times_s[warm_ups:]

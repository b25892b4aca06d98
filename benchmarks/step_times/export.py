"""Print NVIDIA's step times over a grid of batches as CSV: runs in the wheel's own environment.

.rivals/aiconfigurator/bin/python benchmarks/step_times/export.py > times.csv

It imports the standard library and `aiconfigurator_core` (rivals/aiconfigurator.txt), nothing of
Tokenyard. The wheel adds up measured kernels of vLLM: matrix products, attention, all-reduces;
elementwise kernels by a formula. Its times are NVIDIA's data: use them, do not commit them.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import sys
from collections.abc import Iterator

SYSTEMS = ("a100_sxm", "l40s", "h100_sxm", "h200_sxm", "b200_sxm", "rtx_pro_6000_server")
MODELS = ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B")
DEGREES = (1, 2, 4, 8)

PREFILL_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CACHED_TOKENS = (0, 1024, 4096, 16384)
PROMPTS = (1, 4)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
CONTEXT_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MIXED_PREFILL_TOKENS = (64, 256, 512, 2048, 8192)
MIXED_CACHED_TOKENS = (0, 4096)
MIXED_SEQUENCES = (1, 4, 16, 64, 128, 256)
MIXED_CONTEXT_TOKENS = (256, 1024, 4096, 16384)

COLUMNS = (
    "system",
    "model",
    "tensor_parallel",
    "prompts",
    "prefill_tokens",
    "cached_prompt_tokens",
    "decoding_sequences",
    "kv_tokens",
    "time_ms",
)
Batch = tuple[int, int, int, int, int]
"""Prompts, their tokens, their cached tokens, decoding sequences, their cached tokens."""


def batches() -> Iterator[Batch]:
    """Yield the grid: prompts alone, decoding alone, both in one step."""
    for tokens, cached, prompts in itertools.product(PREFILL_TOKENS, CACHED_TOKENS, PROMPTS):
        yield prompts, tokens, prompts * cached, 0, 0
    for sequences, context in itertools.product(SEQUENCES, CONTEXT_TOKENS):
        yield 0, 0, 0, sequences, sequences * context
    for tokens, cached, sequences, context in itertools.product(
        MIXED_PREFILL_TOKENS, MIXED_CACHED_TOKENS, MIXED_SEQUENCES, MIXED_CONTEXT_TOKENS
    ):
        yield 1, tokens, cached, sequences, sequences * context


def scheduled(batch: Batch) -> dict[str, object]:
    """Describe a batch as the wheel's forward-pass metrics do; lengths do not vary within it."""
    prompts, tokens, cached, sequences, kv_tokens = batch
    queued = {
        "num_prefill_requests": 0,
        "sum_prefill_tokens": 0,
        "var_prefill_length": 0.0,
        "num_decode_requests": 0,
        "sum_decode_kv_tokens": 0,
        "var_decode_kv_tokens": 0.0,
    }
    running = {
        **queued,
        "num_prefill_requests": prompts,
        "sum_prefill_tokens": tokens,
        "sum_prefill_kv_tokens": cached,
        "num_decode_requests": sequences,
        "sum_decode_kv_tokens": kv_tokens,
    }
    identity = {"version": 1, "worker_id": "0", "dp_rank": 0, "counter_id": 0, "wall_time": 0.0}
    return {**identity, "scheduled_requests": running, "queued_requests": queued}


def config(system: str, model: str, degree: int) -> dict[str, object]:
    """Return what the wheel needs to know of a replica; `current` is its newest vLLM per GPU."""
    return {
        "schema_version": 1,
        "model_name": model,
        "system_name": system,
        "backend": "vllm",
        "backend_version": "current",
        "tp_size": degree,
        "pp_size": 1,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
        "attention_dp_size": 1,
        "extra": {},
    }


def main() -> None:
    """Print the grid of every combination that answers; name the others on standard error."""
    parser = argparse.ArgumentParser(description="NVIDIA's step times over a grid, as CSV")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--degrees", nargs="+", type=int, default=DEGREES)
    args = parser.parse_args()
    # Its model shapes lie in the wheel: nothing is to be looked up over a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from aiconfigurator_core.sdk import RustForwardPassPerfModel

    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(COLUMNS)
    for combination in itertools.product(args.systems, args.models, args.degrees):
        try:
            steps = RustForwardPassPerfModel.from_native(config(*combination))
            times = [steps.estimate_forward_pass_time_ms(scheduled(one)) for one in batches()]
        except (RuntimeError, ValueError) as error:
            print(f"no data: {combination}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
            continue
        rows.writerows(
            (*combination, *one, f"{time_ms:.6g}")
            for one, time_ms in zip(batches(), times, strict=True)
        )


if __name__ == "__main__":
    main()

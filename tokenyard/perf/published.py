"""Published measurements of whole engines, and what the model says of each.

Facts from: lmdeploy v0.1.0a1, docs/en/benchmark/a100_fp16.md (static inference, 80 settings);
TensorRT-LLM v0.6.1 (its tables of first tokens are of v0.5), docs/source/performance.md, Llama
rows; TensorRT-LLM v1.0, docs/source/performance/perf-overview.md, Llama 3.1 8B and 3.3 70B rows;
lmdeploy issue 210 (an A10, taken as A10G). The engine's parameters are fitted to Llama-2 7B on
lmdeploy alone. Assumed: FP8 rows keep an FP8 KV cache, as NVIDIA's FP8 checkpoints do.
"""

from __future__ import annotations

import csv
import io
from typing import Literal

from tokenyard.config import FrozenModel
from tokenyard.perf.hardware import Calibration, read_table
from tokenyard.perf.models import Precision
from tokenyard.perf.replica import Replica, make_replica
from tokenyard.perf.serving import (
    decode_s,
    lockstep_s,
    prefill_s,
    throughput_tokens_per_s,
)

MOST_SEQUENCES = 4096
"""Limit of TensorRT-LLM's benchmark (bench/build/tuning.py), which sets it by the KV cache."""


class Published(FrozenModel):
    """One published figure."""

    group: str
    """Engine, and model or GPU; errors are averaged within groups."""
    role: Literal["fitted", "held_out", "further"]
    """Seen by the fit; in the comparison; or a further Llama row of the same pages."""
    gpu: str
    llm: str
    tensor_parallel: int
    precision: Precision
    sequences: int | None
    """Equal requests that start and end together; None: always as many as the KV cache holds."""
    context_tokens: int
    generated_tokens: int
    metric: Literal["output_tokens_per_s", "output_tokens_per_s_per_gpu", "ttft_s", "tpot_s"]
    published: float

    def predict(self, calibration: Calibration) -> float:
        """Return the model's value of the metric."""
        replica = make_replica(
            self.gpu, self.llm, self.tensor_parallel, 1, self.precision, calibration
        )
        context, generated = self.context_tokens, self.generated_tokens
        if self.metric == "ttft_s":
            return float(prefill_s(replica, context))
        if self.metric == "tpot_s":
            assert self.sequences is not None
            return float(decode_s(replica, self.sequences, context + generated / 2))
        tokens_per_s = self._tokens_per_s(replica)
        return tokens_per_s / (replica.num_gpus if self.metric.endswith("per_gpu") else 1)

    def _tokens_per_s(self, replica: Replica) -> float:
        context, generated = self.context_tokens, self.generated_tokens
        if self.sequences is None:
            # The engine admits a request only where its whole length will fit.
            held = replica.kv_capacity_tokens / (context + generated)
            return throughput_tokens_per_s(replica, min(MOST_SEQUENCES, held), context, generated)
        running = replica.max_sequences(context, generated, limit=self.sequences)
        return running * generated / lockstep_s(replica, running, context, generated)


def read_published() -> list[Published]:
    """Return every published figure of the package."""
    rows = csv.DictReader(io.StringIO(read_table("published.csv")))
    return [Published.model_validate({key: row[key] or None for key in row}) for row in rows]

"""Readers of measurements: Vidur's kernel and collective profiles, and one's own iterations.

Vidur: github.com/microsoft/vidur, data/profiling, MIT licence; Agrawal et al. 2024,
arXiv:2405.05465. Times in its files are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from tokenyard.perf.models import load_llm
from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.paths import data_folders

VIDUR_FOLDER = "vidur_profiles"
_LINEAR = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
_ELEMENTWISE = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
_VIDUR_MODELS = {"llama2_7b": "Llama-2-7b", "llama2_70b": "Llama-2-70b"}
ITERATION_COLUMNS = ("prefill_tokens", "decoding_sequences", "kv_tokens", "time_s")


@dataclass(frozen=True)
class KernelProfile:
    """Measured time of the kernels of one layer on one GPU of a tensor-parallel group."""

    llm: str
    tensor_parallel: int
    tokens: IntArray
    """Tokens in the batch, shape (rows,)."""
    linear_s: FloatArray
    """Median of the four matrix products together, shape (rows,)."""
    elementwise_s: FloatArray
    """Median of norms, rotary embedding, activation and two residuals, shape (rows,)."""


@dataclass(frozen=True)
class CollectiveProfile:
    """Measured time of one collective, one entry per message size."""

    num_gpus: int
    gpus_per_node: int
    message_bytes: FloatArray
    """Shape (sizes,)."""
    time_s: FloatArray
    """Median, shape (sizes,)."""


@dataclass(frozen=True)
class IterationProfile:
    """Measured iterations of one's own engine."""

    batches: FloatArray
    """Prefill tokens, decoding sequences, cached tokens, shape (3, rows)."""
    time_s: FloatArray
    """Shape (rows,)."""


def find_vidur_profiles() -> Path | None:
    """Return the folder of Vidur's profiles, or None where no data folder has it."""
    folders = (folder / VIDUR_FOLDER for folder in data_folders())
    return next((folder for folder in folders if folder.is_dir()), None)


def read_kernel_profiles(folder: Path, gpu: str) -> list[KernelProfile]:
    """Read the MLP profiles of one GPU (`a100`, `h100`), one per model and degree.

    Raises:
        FileNotFoundError: A file is missing.
    """
    profiles = []
    for llm, published_name in _VIDUR_MODELS.items():
        frame = pd.read_csv(folder / f"{gpu}_meta-llama_{published_name}-hf_mlp.csv")
        # The file's own shape decides; ours must be the same, or the fit is of another model.
        assert set(frame["n_expanded_embd"]) == {load_llm(llm).mlp_size}
        for degree, group in frame.groupby("num_tensor_parallel_workers"):
            profiles.append(_kernel_profile(llm, int(str(degree)), group))
    return profiles


def _kernel_profile(llm: str, degree: int, group: pd.DataFrame) -> KernelProfile:
    median_s = {name: _median_s(group, name) for name in (*_LINEAR, *_ELEMENTWISE)}
    elementwise_s = sum((median_s[name] for name in _ELEMENTWISE), median_s["add"])
    linear_s = np.sum([median_s[name] for name in _LINEAR], axis=0)
    return KernelProfile(llm, degree, group["num_tokens"].to_numpy(), linear_s, elementwise_s)


def _median_s(frame: pd.DataFrame, name: str) -> FloatArray:
    return frame[f"time_stats.{name}.median"].to_numpy(float) * 1e-3


def read_collective_profiles(folder: Path, node: str, collective: str) -> list[CollectiveProfile]:
    """Read the profiles of `all_reduce` or `send_recv` on one kind of node, such as `a100_dgx`.

    One per number of GPUs and of GPUs per node.

    Raises:
        FileNotFoundError: A file is missing.
    """
    frame = pd.read_csv(folder / f"net_{node}_{collective}.csv")
    frame["time_s"] = _median_s(frame, collective)
    profiles = []
    for _, group in frame.groupby(["num_workers", "devices_per_node"]):
        by_size = group.groupby("size")["time_s"].median()
        num_gpus, per_node = group[["num_workers", "devices_per_node"]].iloc[0]
        sizes = by_size.index.to_numpy(float)
        profiles.append(CollectiveProfile(num_gpus, per_node, sizes, by_size.to_numpy(float)))
    return profiles


def read_iterations(path: Path) -> IterationProfile:
    """Read a CSV of one's own iterations: prefill_tokens, decoding_sequences, kv_tokens, time_s.

    Raises:
        ValueError: It is no CSV, a column is missing, or a row is empty, negative or not positive
            in time.
    """
    try:
        frame = pd.read_csv(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    missing = sorted(set(ITERATION_COLUMNS) - set(frame.columns))
    if missing:
        raise ValueError(f"{path}: columns {missing} are missing; need {list(ITERATION_COLUMNS)}")
    values = frame[list(ITERATION_COLUMNS)].to_numpy(float)
    wrong = ~((values >= 0).all(axis=1) & (values[:, 3] > 0) & (values[:, :2].sum(axis=1) > 0))
    if wrong.any():
        line = int(np.flatnonzero(wrong)[0]) + 2
        raise ValueError(
            f"{path}, line {line}: need counts of 0 or more, a batch that is not empty and a "
            "positive time"
        )
    return IterationProfile(values[:, :3].T.copy(), values[:, 3].copy())

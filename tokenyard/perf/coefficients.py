"""An iteration in four numbers, for simulators that step millions of them.

time = a + b prefill tokens + c decoding sequences + d cached tokens, fitted to `iteration_s` by
least squares of the relative error over a grid of batch compositions, none of the four negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenyard.perf.iteration import iteration_s
from tokenyard.perf.replica import MAX_SEQUENCES, Replica
from tokenyard.types import FloatArray

PREFILL_TOKENS = (0, 128, 256, 512, 1024, 2048)
"""Prompt tokens of an iteration on the grid; engines cut longer prompts into chunks."""
DECODING_SEQUENCES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
MEAN_CONTEXT_TOKENS = (64, 256, 1024, 2048, 4096)
"""Cached tokens per decoding sequence on the grid, where the KV cache can hold them."""
PROMPT_TOKENS = 1024
"""Length of the prompts that prefill tokens belong to: each attends to half of it on average."""


@dataclass(frozen=True)
class LinearCoefficients:
    """Seconds of an iteration as a linear function of its batch, and how far that is off.

    The four numbers have the names that they have in a cluster file's `profile`.
    """

    iteration_s: float
    """a: a non-empty batch, whatever is in it."""
    prefill_token_s: float
    """b: one token of a prompt."""
    sequence_s: float
    """c: one sequence that decodes."""
    kv_token_s: float
    """d: one cached token of a decoding sequence."""
    mean_error_fraction: float
    """Mean relative error over the grid."""
    max_error_fraction: float
    """Largest relative error over the grid."""

    @classmethod
    def from_fit(cls, values: FloatArray, errors: FloatArray) -> LinearCoefficients:
        """Name the four fitted values, with the relative error of every batch."""
        fixed, prefill_token, sequence, kv_token = values.tolist()
        return cls(
            fixed, prefill_token, sequence, kv_token, float(errors.mean()), float(errors.max())
        )

    @property
    def values(self) -> FloatArray:
        """The four numbers in their order, shape (4,)."""
        return np.array([self.iteration_s, self.prefill_token_s, self.sequence_s, self.kv_token_s])

    def time_s(
        self, prefill_tokens: FloatArray, decoding_sequences: FloatArray, kv_tokens: FloatArray
    ) -> FloatArray:
        """Return the time of non-empty batches, seconds; arrays of one shape."""
        return (
            self.iteration_s
            + self.prefill_token_s * prefill_tokens
            + self.sequence_s * decoding_sequences
            + self.kv_token_s * kv_tokens
        )


def linear_coefficients(
    replica: Replica, max_sequences: int = MAX_SEQUENCES, prompt_tokens: float = PROMPT_TOKENS
) -> LinearCoefficients:
    """Fit the four numbers over every batch of the grid that the replica can hold.

    Args:
        replica: On what it runs.
        max_sequences: Largest number of sequences that the simulator decodes at once.
        prompt_tokens: Typical length of a prompt, whether or not it comes in chunks; attention
            makes a token of a long prompt costlier.

    Raises:
        ValueError: The model does not fit into the replica's memory.
    """
    batches = batch_grid(replica, max_sequences)
    prefill, sequences, cached = batches
    return fit_linear(batches, iteration_s(replica, prefill, sequences, cached, prompt_tokens / 2))


def batch_grid(replica: Replica, max_sequences: int = MAX_SEQUENCES) -> FloatArray:
    """Return prefill tokens, decoding sequences and cached tokens, shape (3, num_batches).

    Raises:
        ValueError: The model does not fit into the replica's memory.
    """
    capacity = replica.kv_capacity_tokens
    if capacity < 1:
        raise ValueError(
            f"{replica.llm.name} does not fit on {replica.num_gpus} {replica.gpu.name}; "
            "take more GPUs or fp8"
        )
    grid = np.meshgrid(PREFILL_TOKENS, DECODING_SEQUENCES, MEAN_CONTEXT_TOKENS, indexing="ij")
    prefill, sequences, context = (axis.ravel().astype(float) for axis in grid)
    cached = sequences * context
    possible = (sequences <= max_sequences) & (prefill + cached <= capacity)
    batches = np.stack([prefill, sequences, cached])[:, possible & (prefill + sequences > 0)]
    return np.unique(batches, axis=1)


def fit_linear(batches: FloatArray, time_s: FloatArray) -> LinearCoefficients:
    """Fit the four numbers to times, relative errors counted equally, none negative.

    Args:
        batches: Prefill tokens, decoding sequences, cached tokens, shape (3, num_batches).
        time_s: Time of each, seconds, positive, shape (num_batches,).
    """
    design = np.vstack([np.ones_like(time_s), batches]).T / time_s[:, None]
    # Whoever serves fits nothing, and scipy is large.
    from scipy.optimize import nnls

    # nnls stops by an absolute tolerance: columns of one size, or it ends early.
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1
    solution, _ = nnls(design / scale, np.ones_like(time_s))
    solution /= scale
    return LinearCoefficients.from_fit(solution, np.abs(design @ solution - 1))

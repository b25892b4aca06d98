"""Sampling inside transformers' continuous batching, with settings per request.

The batch takes the largest score of every row. Gumbel noise on scores that were divided by the
temperature makes the largest of them a draw from their softmax, so greedy and sampled requests
share a batch. The noise depends on the request's seed and on the position alone: equal seeds give
equal tokens whatever else is in the batch, and all ranks draw alike.
"""

from __future__ import annotations

import hashlib

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)
from transformers.generation.continuous_batching.requests import FutureRequestState


class GumbelDraws(ContinuousBatchingLogitsProcessor):
    """Temperature, nucleus and seed of every request in the batch."""

    supported_kwargs = {"temperature": float, "top_p": float, "seed": int}  # noqa: RUF012
    ignored_kwargs = ()

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, int, int]] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Do nothing: nothing is passed in tensors."""
        int32_tensor.zero_()

    def prepare_tensor_args(
        self, requests_with_new_token: list[FutureRequestState]
    ) -> torch.Tensor:
        """Note temperature, nucleus, seed and position of every row that gets a token."""
        self._rows = []
        for request in requests_with_new_token:
            state = request.state
            rules = state.logit_processor_kwargs
            # A request that was pushed out and starts again has its tokens in the prompt.
            position = len(state.initial_tokens) + len(state.generated_tokens)
            self._rows.append((rules["temperature"], rules["top_p"], rules["seed"], position))
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores, shape (rows, vocabulary), whose argmax is the sampled token."""
        for row, (temperature, top_p, seed, position) in enumerate(self._rows):
            if temperature > 0:
                scores[row] = drawn(scores[row], temperature, top_p, seed, position)
        return scores


def drawn(
    scores: torch.Tensor, temperature: float, top_p: float, seed: int, position: int
) -> torch.Tensor:
    """Return noisy scores whose argmax is a sample from the nucleus.

    Args:
        scores: Logits of one position, shape (vocabulary,).
        temperature: Above 0.
        top_p: The likeliest tokens that together have this probability can be drawn.
        seed: Of the request.
        position: Of the token in the sequence.
    """
    scores = scores / temperature
    if top_p < 1:
        ordered, tokens = scores.softmax(-1).sort(descending=True)
        # A token belongs to the nucleus if those before it do not yet reach top_p.
        outside = tokens[ordered.cumsum(-1) - ordered >= top_p]
        scores = scores.index_fill(0, outside, -torch.inf)
    generator = torch.Generator(scores.device).manual_seed(_mixed(seed, position))
    noise = torch.empty_like(scores).exponential_(generator=generator)
    return scores - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log()


def _mixed(seed: int, position: int) -> int:
    # The CPU's generator looks at 32 bits of a seed only, and neighbours must not resemble.
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")

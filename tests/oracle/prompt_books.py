"""Blocks of the prompts in flight, counted from what became of every request: slow and plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenyard.types import FloatArray, IntArray


@dataclass(frozen=True)
class Pieces:
    """A prompt, token by token."""

    shared: frozenset[tuple[int, int]]
    """Block and place of each token that others may have as well."""
    num_own: int


def pieces_of(chain: IntArray, context_tokens: int, chain_tokens: int) -> Pieces:
    """Take a prompt apart: blocks of `chain_tokens` that lie within it, and the rest."""
    shared = frozenset(
        (int(block), k)
        for number, block in enumerate(chain)
        if (number + 1) * chain_tokens <= context_tokens
        for k in range(chain_tokens)
    )
    return Pieces(shared, context_tokens - len(shared))


def prompt_blocks(
    prompts: Sequence[Pieces], server: FloatArray, finish_s: FloatArray, current: int,
    num_servers: int, block_tokens: int,
) -> FloatArray:  # fmt: skip
    """Blocks at each server of what was sent there and has not ended, and of the current request.

    Args:
        prompts: Of every request.
        server: Where each was sent, shape (num_requests,); below 0: nowhere.
        finish_s: Clock time of its end, NaN before, shape (num_requests,).
        current: Index of the request to be placed.
        num_servers: How many servers there are.
        block_tokens: Tokens of a block.

    Returns:
        Blocks, shape (num_servers,). Shared tokens are counted once; of each prompt the rest is
        rounded up to blocks.
    """
    counts = np.zeros(num_servers)
    for at in range(num_servers):
        there = {i for i, where in enumerate(server) if where == at and math.isnan(finish_s[i])}
        held = [prompts[i] for i in there | {current}]
        shared = frozenset().union(*(one.shared for one in held))
        counts[at] = math.ceil(len(shared) / block_tokens)
        counts[at] += sum(math.ceil(one.num_own / block_tokens) for one in held)
    return counts

"""Attention over a packed batch: every sequence with its own keys, and with no others.

Without flash attention, transformers lets all queries of a batch meet all keys and hides those of
other sequences by a mask. That costs as many times the work as there are sequences, and room for
the largest mask: the token budget times the tokens of the whole cache. Imported in the ranks'
processes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "sequence_by_sequence"
MOST_PADDING = 2.0
"""The longest of sequences that attend together has at most this many times the shortest's keys:
to read and hide a few costs less than another call."""


@dataclass(frozen=True)
class Part:
    """Queries that attend in one call: a prompt, or one token each of several sequences."""

    num_sequences: int
    queries: torch.Tensor
    """Places of the sequences' queries, sequence by sequence, equally many of each."""
    keys: slice
    """Indices of the keys that the plan reads: sequence after sequence, equally many of each."""
    mask: torch.Tensor | None
    """Added to the scores or, as booleans, which of them count."""


@dataclass(frozen=True)
class BatchLayout:
    """How a batch attends; all layers use the same layout."""

    parts: list[Part]
    read_index: torch.Tensor
    """Places of the parts' keys in the cache; empty where the batch brings them all itself."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: prompts one after another, sequences that decode together.

    Args:
        module: The attention layer.
        query: Shape (1, heads, queries of all sequences, width).
        key: Of the queries' own tokens, shape (1, key-value heads, queries, width).
        value: Like `key`.
        attention_mask: None; every query sees what came before it in its own sequence.
        dropout: 0.
        scaling: Of the scores.
        cache: Holds the batch's plan, takes the keys and values, and returns those of the plan.
        kwargs: What continuous batching tells: where each sequence's queries and keys begin.

    Returns:
        Shape (1, queries, heads, width).
    """
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
    plan = cache.plan_of(module.layer_idx, heads // kv_heads, query.dtype, kwargs)
    key, value = cache.update(key, value, module.layer_idx, kwargs)
    out = query.new_empty(query.shape[2], heads, width)
    for part in plan.parts:
        shape = (part.num_sequences, -1)
        asking = query[0, :, part.queries].unflatten(1, shape).transpose(0, 1)
        seen = scaled_dot_product_attention(
            # Heads that share keys stand in a row: for them it is one matrix.
            asking.reshape(part.num_sequences, kv_heads, -1, width),
            key[0, :, part.keys].unflatten(1, shape).transpose(0, 1),
            value[0, :, part.keys].unflatten(1, shape).transpose(0, 1),
            attn_mask=part.mask,
            scale=scaling,
        )
        out[part.queries] = seen.reshape(asking.shape).transpose(1, 2).flatten(0, 1)
    return out[None], None


def make_plan(
    queries_at: list[int],
    keys_at: list[int],
    read_index: torch.Tensor,
    group: int,
    dtype: torch.dtype,
) -> BatchLayout:
    """Put sequences that decode and are of like length together.

    Args:
        queries_at: Where each sequence's queries begin, and where the last one's end.
        keys_at: The same of its keys in `read_index`, or in the batch where that is empty.
        read_index: Places of the keys in the cache.
        group: Query heads that share a head of keys.
        dtype: Of the scores.
    """
    parts, places, num_read = [], [], 0
    device = read_index.device

    def add(numbers: list[int], mask: torch.Tensor | None) -> None:
        nonlocal num_read
        most = max(keys_at[number + 1] - keys_at[number] for number in numbers)
        queries = [torch.arange(queries_at[number], queries_at[number + 1]) for number in numbers]
        begin = num_read if len(read_index) else keys_at[numbers[0]]
        for sequence in numbers if len(read_index) else ():
            mine = torch.arange(keys_at[sequence], keys_at[sequence] + most)
            # What is read for length alone is the sequence's own, so that it is always a number.
            mine[keys_at[sequence + 1] - keys_at[sequence] :] = keys_at[sequence]
            places.append(mine)
        num_read += most * len(numbers)
        keys = slice(begin, begin + most * len(numbers))
        parts.append(Part(len(numbers), torch.cat(queries).to(device), keys, mask))

    decoding = []
    for number, first in enumerate(queries_at[:-1]):
        num, seen = queries_at[number + 1] - first, keys_at[number + 1] - keys_at[number]
        if num == 1 and len(read_index):
            decoding.append((seen, number))
        else:
            add([number], _causal(num, seen, group, device))
    decoding.sort()
    while decoding:
        like = [item for item in decoding if item[0] <= MOST_PADDING * decoding[0][0]]
        decoding = decoding[len(like) :]
        mask = _hide([seen for seen, _ in like], group, dtype)
        add([number for _, number in like], mask if mask is None else mask.to(device))
    return BatchLayout(parts, read_index[torch.cat(places).to(device)] if places else read_index)


def _causal(
    num_queries: int, num_keys: int, group: int, device: torch.device
) -> torch.Tensor | None:
    """Mask so that the last query sees all keys, and each earlier one sees one key less."""
    if num_queries == 1:
        return None
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return visible.tril(num_keys - num_queries).repeat(group, 1)


def _hide(num_keys: list[int], group: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Mask the padding after each sequence's keys; shape (sequences, 1, group, most keys)."""
    most = max(num_keys)
    if min(num_keys) == most:
        return None
    beyond = torch.arange(most) >= torch.tensor(num_keys)[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)
    return mask[:, None, None].expand(-1, 1, group, -1)


AttentionInterface.register(NAME, attend)

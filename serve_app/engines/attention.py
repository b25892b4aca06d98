"""Attention over a packed batch on CPUs: every sequence with its own keys, and with no others.

transformers lets all queries of a batch meet all keys and hides those of other sequences by a mask,
which on a GPU without flash attention is what there is. On a CPU it costs as many times the work as
there are sequences. Imported in the ranks' processes only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "sequence_by_sequence"
_NUM_MASKS = 32


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
    """Attend, one sequence after another.

    Args:
        module: The attention layer.
        query: Shape (1, heads, queries of all sequences, width).
        key: Of the queries' own tokens, shape (1, key-value heads, queries, width).
        value: Like `key`.
        attention_mask: None; every query sees what came before it in its own sequence.
        dropout: 0.
        scaling: Of the scores.
        cache: Takes the keys and values, and returns them with those from before.
        kwargs: What continuous batching tells: where each sequence's queries and keys begin.

    Returns:
        Shape (1, queries, heads, width).
    """
    key, value = cache.update(key, value, module.layer_idx, kwargs)
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
    queries_at = kwargs["cu_seq_lens_q"].tolist()
    keys_at = kwargs["cu_seq_lens_k"].tolist()
    out = query.new_empty(query.shape[2], heads, width)
    for number, first in enumerate(queries_at[:-1]):
        num = queries_at[number + 1] - first
        mine = slice(keys_at[number], keys_at[number + 1])
        seen = scaled_dot_product_attention(
            # Heads that share keys stand in a row: for them it is one matrix.
            query[:, :, first : first + num].reshape(1, kv_heads, heads // kv_heads * num, width),
            key[:, :, mine],
            value[:, :, mine],
            attn_mask=_mask(num, mine.stop - mine.start, heads // kv_heads),
            scale=scaling,
        )
        out[first : first + num] = seen.view(heads, num, width).transpose(0, 1)
    return out[None], None


@lru_cache(_NUM_MASKS)
def _mask(num_queries: int, num_keys: int, group: int) -> torch.Tensor | None:
    """Let the last of the queries see all keys, and every other one as many less."""
    if num_queries == 1:
        return None
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    return visible.tril(num_keys - num_queries).repeat(group, 1)


AttentionInterface.register(NAME, attend)

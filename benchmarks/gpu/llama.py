"""A Llama-shaped model of random weights in torch alone, for the time of one iteration.

Matrix products are fused as serving engines fuse them (queries with keys and values, gate with
up), attention is torch's SDPA, the KV cache is contiguous and is written as well as read. A batch
is one prompt and sequences that decode, all at one context.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from benchmarks.gpu.shapes import Shape


class Batch(NamedTuple):
    """What one iteration computes."""

    prefill_tokens: int
    """Of one whole prompt; 0: none."""
    decoding_sequences: int
    context_tokens: int
    """Cached tokens of each of those sequences."""

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values it holds in the end."""
        return self.prefill_tokens + self.decoding_sequences * (self.context_tokens + 1)


class Layer(nn.Module):
    """One decoder layer and its part of the cache."""

    def __init__(self, shape: Shape, cache_tokens: int, place: dict) -> None:
        super().__init__()
        self.shape, hidden, mlp = shape, shape.hidden_size, shape.mlp_size
        self.before_attention = nn.RMSNorm(hidden, eps=1e-5, **place)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.qkv = nn.Linear(hidden, heads * shape.head_size, bias=False, **place)
        self.out = nn.Linear(hidden, hidden, bias=False, **place)
        self.before_mlp = nn.RMSNorm(hidden, eps=1e-5, **place)
        self.gate_up = nn.Linear(hidden, 2 * mlp, bias=False, **place)
        self.down = nn.Linear(mlp, hidden, bias=False, **place)
        width = (2, cache_tokens, shape.num_kv_heads, shape.head_size)
        self.register_buffer("cache", torch.zeros(width, **place))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """Compute; shape (tokens, hidden) to the same."""
        shape, num = self.shape, batch.decoding_sequences
        heads = self.qkv(self.before_attention(x)).view(len(x), -1, shape.head_size)
        q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        q, k = _rotated(q, rotation), _rotated(k, rotation)
        decoded = self._decode(q[:num], k[:num], v[:num], batch) if num else q[:0]
        prompt = self._prefill(q[num:], k[num:], v[num:], batch) if len(x) > num else q[:0]
        x = x + self.out(torch.cat([decoded, prompt]).flatten(1))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        num, keys = batch.decoding_sequences, batch.context_tokens + 1
        cache = self.cache[:, : num * keys].unflatten(1, (num, keys))
        cache[0, :, -1], cache[1, :, -1] = k, v
        keys_of, values_of = cache.transpose(2, 3)
        out = scaled_dot_product_attention(q.unsqueeze(2), keys_of, values_of, enable_gqa=True)
        return out.squeeze(2)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        place = slice(batch.cache_tokens - batch.prefill_tokens, batch.cache_tokens)
        self.cache[0, place], self.cache[1, place] = k, v
        q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


class Llama(nn.Module):
    """All layers, embedding and head, with a cache of so many tokens in all."""

    def __init__(self, shape: Shape, cache_tokens: int, positions: int, place: dict) -> None:
        """Draw the weights, for sequences of up to `positions` tokens; `place`: device, dtype."""
        super().__init__()
        size = (shape.vocabulary, shape.hidden_size)
        self.table = nn.Parameter(torch.randn(size, **place) * 0.02)
        untied = not shape.tied_embeddings
        self.head = nn.Parameter(torch.randn(size, **place) * 0.02) if untied else self.table
        layers = (Layer(shape, cache_tokens, place) for _ in range(shape.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=1e-5, **place)
        exponents = torch.arange(0, shape.head_size, 2) / shape.head_size
        angles = torch.arange(positions)[:, None, None] * 5e5**-exponents
        self.register_buffer("cos", angles.cos().to(**place))
        self.register_buffer("sin", angles.sin().to(**place))

    def forward(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Return the likeliest next token of every sequence, the prompt last.

        Args:
            token_ids: One of every sequence that decodes, then the prompt, shape (tokens,).
            positions: Of each, shape (tokens,).
            batch: How many of which.
        """
        x, rotation = embedding(token_ids, self.table), (self.cos[positions], self.sin[positions])
        for layer in self.layers:
            x = layer(x, rotation, batch)
        if batch.prefill_tokens:
            x = torch.cat([x[: batch.decoding_sequences], x[-1:]])
        return linear(self.norm(x), self.head).argmax(-1)


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

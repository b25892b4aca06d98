"""Shapes of the models, in the fields of `tokenyard.perf.models.Llm`, with no import of ours."""

from typing import NamedTuple


class Shape(NamedTuple):
    """A Llama-style decoder: grouped-query attention, gated MLP, no biases."""

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    tied_embeddings: bool

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


SHAPES = {
    "llama_1b": Shape(16, 2048, 8192, 32, 8, 128256, True),
    "llama_3b": Shape(28, 3072, 8192, 24, 8, 128256, True),
    "llama3_8b": Shape(32, 4096, 14336, 32, 8, 128256, False),
    "small": Shape(8, 512, 1536, 8, 4, 4096, False),
    "tiny": Shape(2, 64, 128, 4, 2, 128, True),
    "tiny_deep": Shape(4, 64, 128, 4, 2, 128, True),
}
"""The first three are those of Llama 3.2 1B, 3.2 3B and 3.1 8B; their weights here are random."""

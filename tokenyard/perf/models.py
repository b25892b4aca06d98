"""Shapes of the language models, and what follows from them: parameters and bytes; package data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tokenyard.config import FrozenModel
from tokenyard.perf.hardware import entry

Precision = Literal["fp16", "fp8"]
"""`fp16` stands for BF16 too; `fp8` stores weights and KV cache in one byte, embeddings in two."""

ACTIVATION_BYTES = 2
Count = Annotated[int, Field(ge=1)]


class Llm(FrozenModel):
    """A Llama-style decoder: grouped-query attention, gated MLP, no biases."""

    name: str
    num_layers: Count
    hidden_size: Count
    mlp_size: Count
    num_heads: Count
    num_kv_heads: Count
    vocabulary: Count
    tied_embeddings: bool
    """Whether the LM head is the embedding table."""
    source: str

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of one token in one layer."""
        return self.hidden_size // self.num_heads * self.num_kv_heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: 2 h^2 + 2 h h_kv + 3 h f."""
        h = self.hidden_size
        return 2 * h * h + 2 * h * self.kv_size + 3 * h * self.mlp_size

    @property
    def head_parameters(self) -> int:
        """Weights of the LM head."""
        return self.vocabulary * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; norms are left out."""
        num_tables = 1 if self.tied_embeddings else 2
        return self.num_layers * self.layer_parameters + num_tables * self.head_parameters

    def weight_bytes(self, precision: Precision) -> int:
        """Memory of all weights; embeddings and LM head stay in two bytes."""
        layers = self.num_layers * self.layer_parameters
        return layers * stored_bytes(precision) + (self.num_parameters - layers) * ACTIVATION_BYTES

    def kv_bytes_per_token(self, precision: Precision) -> int:
        """KV cache of one token over all layers."""
        return 2 * self.num_layers * self.kv_size * stored_bytes(precision)


def stored_bytes(precision: Precision) -> int:
    """Bytes of one stored weight or KV entry."""
    return 1 if precision == "fp8" else 2


def load_llm(name: str) -> Llm:
    """Return one model.

    Raises:
        ValueError: No model of that name is in the table.
    """
    return entry(Llm, "models.yaml", name, {"name": name})

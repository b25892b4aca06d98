"""Linear layers with weights in the order in which oneDNN multiplies them.

A batch that decodes has few rows, and a general matrix product then spends its time on reading
weights that lie badly for it: at eight rows oneDNN's own order halves the time of SmolLM2's layers
(docs/results/gateway.md). Imported in the ranks' processes only.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_ops = torch.ops.mkldnn
_multiply = _ops._linear_pointwise.default
_FEWEST_WEIGHTS = 100_000
"""Smaller layers are not packed: the call itself takes most of their time."""


class PackedLinear(nn.Linear):
    """A linear layer whose weight can be packed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply; shape (..., inputs) to (..., outputs)."""
        if not self.weight.is_mkldnn:
            return super().forward(input)
        out: torch.Tensor = _multiply(input, self.weight, self.bias, "none", [], "")
        return out


def make_packable(model: nn.Module) -> None:
    """Make linear layers packable, before tensor parallelism wraps their `forward`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = PackedLinear


def pack_linears(model: nn.Module) -> None:
    """Pack the weights of all linear layers that oneDNN multiplies on this machine.

    A weight that another module shares, like an embedding that is also the head, stays there too.
    """
    if not torch.backends.mkldnn.is_available():
        return
    dtypes = {torch.float32}
    if _ops._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    make_packable(model)
    for module in model.modules():
        if not isinstance(module, PackedLinear):
            continue
        weight = module.weight.detach()
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        if weight.numel() >= _FEWEST_WEIGHTS and weight.dtype in dtypes:
            packed = _ops._reorder_linear_weight(weight, None)
            module.weight = nn.Parameter(packed, requires_grad=False)

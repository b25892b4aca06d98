"""Natural gradient descent for policies of so few weights that their Fisher matrix is inverted.

A gradient says how much a weight changes the loss, and not how much it changes the policy. Weights
whose features are alike change it together. The Fisher matrix F of the policy measures that, and a
step along F^-1 g changes probabilities the most where that lowers the loss, whatever the features'
units are (Amari 1998; Kakade 2001, "A natural policy gradient").

Shapes: K decisions, N actions, P weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_FISHER = "fisher"


def fisher_matrix(probabilities: Tensor, logit_gradients: Tensor) -> Tensor:
    """Fisher matrix of a softmax policy, its mean over decisions, shape (P, P).

    Args:
        probabilities: Of every action, shape (K, N).
        logit_gradients: Of every action's logit by the weights, shape (K, N, P).
    """
    expected = (probabilities[..., None] * logit_gradients).sum(1)
    weighted = (probabilities.sqrt()[..., None] * logit_gradients).flatten(0, 1)
    return (weighted.T @ weighted - expected.T @ expected) / len(probabilities)


class NaturalGradient(torch.optim.Optimizer):
    """Steps by the learning rate along F^-1 g, with a running mean of the batches' F."""

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1.0, damping: float = 0.1, kept: float = 0.9
    ) -> None:
        """Begin without having seen a policy.

        Args:
            params: One tensor of shape (P,).
            lr: Learning rate; 1 and one step over a batch is the fit of its advantages to logits.
            damping: Share of F's diagonal that is added to it. What no decision tells apart stays.
            kept: Share of the mean so far in the running mean.
        """
        super().__init__(params, {"lr": lr, "damping": damping, "kept": kept})
        (self._weights,) = self.param_groups[0]["params"]

    def see(self, fisher: Tensor) -> None:
        """Take the Fisher matrix of the next batch into the mean, shape (P, P)."""
        state, kept = self.state[self._weights], self.param_groups[0]["kept"]
        state[_FISHER] = torch.lerp(fisher, state[_FISHER], kept) if _FISHER in state else fisher

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step; `see` comes before the first."""
        assert closure is None
        (group,) = self.param_groups
        gradient = self._weights.grad
        assert gradient is not None
        fisher = self.state[self._weights][_FISHER].double()
        diagonal = fisher.diagonal()
        # A weight that changes no decision has a row of zeros, and a gradient of 0.
        added = group["damping"] * diagonal + torch.finfo(torch.float32).eps * diagonal.sum()
        along = torch.linalg.solve(
            fisher + torch.diag(added.clamp_min(torch.finfo(torch.float32).tiny)), gradient.double()
        )
        self._weights.sub_(group["lr"] * along.to(self._weights.dtype))

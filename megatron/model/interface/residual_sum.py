"""Hidden states as the residual and what a branch adds to it, which the next norm adds up in its own pass."""

from __future__ import annotations

import torch

# What a branch has to add to the residual, that, and the bias of the branch; None in place of the residual and the bias
# where they have been added.
# Shapes: branch and residual `[b, s, h]`, bias `[h]`.
ResidualSum = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def as_sum(hidden: torch.Tensor | ResidualSum) -> ResidualSum:
    """Hidden states of either form."""
    return hidden if isinstance(hidden, tuple) else (hidden, None, None)


def total(branch: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The sum."""
    if bias is not None:
        branch = branch + bias
    return branch if residual is None else residual + branch

"""Hidden states as the residual and what a branch adds to it, which the next norm adds up in its own pass."""

from __future__ import annotations

import torch
from torch import nn

# What a branch has to add to the residual, and that; None in place of the residual where it has been added.
# Shapes: both `[b, s, h]`.
ResidualSum = tuple[torch.Tensor, torch.Tensor | None]


def as_sum(hidden: torch.Tensor | ResidualSum) -> ResidualSum:
    """Hidden states of either form."""
    return hidden if isinstance(hidden, tuple) else (hidden, None)


def total(branch: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The sum."""
    return branch if residual is None else residual + branch


def normed(norm: nn.Module, branch: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and a norm of it, which computes both in one pass if nothing was added yet."""
    if residual is None:
        return branch, norm(branch)
    return norm.add(branch, residual)  # type: ignore[no-any-return,operator]

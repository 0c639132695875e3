"""Hidden states as the residual and what a branch adds to it, which the next norm adds up in its own pass."""

from __future__ import annotations

import torch

# What a branch has to add to the residual, and that; None in place of the residual where it has been added.
# Shapes: both `[b, s, h]`.
ResidualSum = tuple[torch.Tensor, torch.Tensor | None]


def as_sum(hidden: torch.Tensor | ResidualSum) -> ResidualSum:
    """Hidden states of either form."""
    return hidden if isinstance(hidden, tuple) else (hidden, None)


def total(branch: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The sum."""
    return branch if residual is None else residual + branch

"""Hidden states as the residual and what a branch adds to it, which the next norm adds up in its own pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class ResidualSum(NamedTuple):
    """What a branch has to add to the residual; the residual is None where it has been added.

    Shapes: both `[b, s, h]`.
    """

    branch: torch.Tensor
    residual: torch.Tensor | None = None

    @classmethod
    def of(cls, hidden: torch.Tensor | ResidualSum) -> ResidualSum:
        """Hidden states of either form."""
        return hidden if isinstance(hidden, ResidualSum) else cls(hidden)

    def total(self) -> torch.Tensor:
        """The sum."""
        return self.branch if self.residual is None else self.residual + self.branch

    def normed(self, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and a norm of it, which computes both in one pass if nothing was added yet."""
        if self.residual is None:
            return self.branch, norm(self.branch)
        return norm.add(self.branch, self.residual)  # type: ignore[no-any-return,operator]

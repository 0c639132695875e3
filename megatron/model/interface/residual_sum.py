"""Hidden states as the residual and what a branch adds to it, which the next norm adds up in its own pass.

Between blocks, and in them, they are matrices with a row for each token: of tensors with more dimensions every product
and every gradient makes a matrix first, and of its result a tensor. With sequence parallelism they are not, since the
ranks divide the tokens of each sample.
"""

from __future__ import annotations

import torch

from megatron.model.interface.step_context import StepContext

# What a branch has to add to the residual, that, and the bias of the branch; None in place of the residual and the bias
# where they have been added.
# Shapes: branch and residual `[b * s, h]`, with sequence parallelism `[b, s/t, h]`; bias `[h]`.
ResidualSum = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def as_sum(hidden: torch.Tensor | ResidualSum, context: StepContext) -> ResidualSum:
    """Hidden states of either form. Shapes: hidden `[b, s, h]` if it is no sum."""
    if isinstance(hidden, tuple):
        return hidden
    return hidden if context.splits_sequence else hidden.flatten(0, 1), None, None


def total(branch: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The sum."""
    if bias is not None:
        branch = branch + bias
    return branch if residual is None else residual + branch
